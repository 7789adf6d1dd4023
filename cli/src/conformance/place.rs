use std::fmt;
use std::time::Duration;

use leasehold::shown;
use leasehold_conformance::Store;
use uuid::Uuid;

/// A place in a store that nobody else uses: the suite's own.
#[derive(Debug)]
pub(super) struct Place {
    /// It may contain a password: nobody is shown it.
    url: String,
    /// What was made for it.
    name: String,
}

/// How a kind of store keeps the suite apart from everything else in it.
enum Apart {
    /// The option `prefix`: what it is by default, and what comes before and behind a longer one.
    Prefix(&'static str, &'static str, &'static str),
    /// A folder in the folder.
    Folder,
    /// Nothing of the store's own: the keys' names are random.
    Keys,
    /// No other process sees it.
    Alone,
}

/// What the suite has to know of a kind of store.
struct Kind {
    apart: Apart,
    /// Where servers listen that are named without a port; `None`: no proxy can stand in front of them.
    port: Option<u16>,
    /// Short enough not to take all day, long enough for a network and a busy machine.
    ttl: Duration,
}

impl Place {
    /// A new one in the store at `url`.
    pub(super) fn in_store(url: &str) -> Self {
        let id = Uuid::new_v4();
        let name = format!("conformance-{}", id.simple());
        let url = url.trim();
        let kind = Kind::of(url);
        let url = with_ports(url, kind.port);
        let (text, query) = url.split_once('?').unwrap_or((&url, ""));
        let (url, name) = match kind.apart {
            Apart::Alone | Apart::Keys => (url, name),
            Apart::Folder => {
                let text = format!("{}/{name}", text.trim_end_matches('/'));
                (joined(&text, query), name)
            }
            Apart::Prefix(default, before, behind) => {
                let mut settings: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes())
                    .into_owned()
                    .collect();
                let given = settings.iter().position(|(name, _)| name == "prefix");
                let given = given.map(|at| settings.remove(at).1);
                let given = given.as_deref().unwrap_or(default);
                let given = given.strip_suffix(before).unwrap_or(given);
                let name = format!("{given}{before}{name}{behind}");
                settings.push(("prefix".into(), name.clone()));
                if is(text, "redlock") {
                    settings.retain(|(name, _)| name != "max_ttl");
                    let longest = humantime::format_duration(LONGEST_ON_REDLOCK);
                    settings.push(("max_ttl".into(), longest.to_string()));
                }
                let query = form_urlencoded::Serializer::new(String::new())
                    .extend_pairs(settings)
                    .finish();
                (joined(text, &query), name)
            }
        };
        Self { url, name }
    }

    /// The one that a URL from [`url`](Self::url) leads to.
    pub(super) fn of_suite(url: String) -> Self {
        let name = format!("conformance-{}:", Uuid::new_v4().simple());
        Self { url, name }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn is_redlock(&self) -> bool {
        is(&self.url, "redlock")
    }

    /// What the suite can do with it.
    pub(super) fn store(&self, ttl: Option<Duration>) -> Store {
        let kind = Kind::of(&self.url);
        let mut store = Store::new(&self.url)
            .with_description(shown(&self.url))
            .with_ttl(ttl.unwrap_or(kind.ttl))
            .without_control("the servers are not ours to stop");
        if !matches!(kind.apart, Apart::Alone) {
            store = store.with_processes();
        }
        if kind.port.is_some() {
            store = store.with_servers(hosts(&self.url).split(',').filter(|host| !host.is_empty()));
        }
        if matches!(kind.apart, Apart::Keys) {
            store = store
                .with_key_prefix(&self.name)
                .with_locks_on_connections();
        }
        if self.is_redlock() {
            store = store.with_longest_ttl(LONGEST_ON_REDLOCK);
        }
        store
    }
}

/// What the suite's longest locks need: nodes that have not been up for so long do not vote yet.
const LONGEST_ON_REDLOCK: Duration = Duration::from_secs(30);

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "what begins with {} in {}", self.name, shown(&self.url))
    }
}

impl Kind {
    fn of(url: &str) -> Self {
        let scheme = url.split(':').next().unwrap_or_default().to_lowercase();
        let prefix = Apart::Prefix;
        let (apart, port, millis) = match &*scheme {
            "memory" => (Apart::Alone, None, 0),
            "file" => (Apart::Folder, None, 1_000),
            "redis" | "redlock" => (prefix("lock:", "", ":"), Some(6379), 1_000),
            // The servers name themselves, or are named in their certificates.
            "rediss" | "redis+sentinel" | "rediss+sentinel" | "redis+cluster"
            | "rediss+cluster" => (prefix("lock:", "", ":"), None, 1_000),
            "etcd" => (prefix("locks/", "", "/"), Some(2379), 3_000),
            "etcds" => (prefix("locks/", "", "/"), None, 3_000),
            "zk" => (prefix("/locks", "/", ""), Some(2181), 4_000),
            "zks" => (prefix("/locks", "/", ""), None, 4_000),
            // Its options may name other hosts, and want their certificates.
            _ if url.contains('?') => (Apart::Keys, None, 1_000),
            _ => (Apart::Keys, Some(5432), 1_000),
        };
        Self {
            apart,
            port,
            ttl: Duration::from_millis(millis),
        }
    }
}

fn is(url: &str, scheme: &str) -> bool {
    let name = url.split(':').next().unwrap_or_default();
    name.eq_ignore_ascii_case(scheme)
}

fn joined(text: &str, query: &str) -> String {
    match query {
        "" => text.to_owned(),
        query => format!("{text}?{query}"),
    }
}

/// The hosts in `scheme://[user@]host[:port],…[/…][?…]`.
fn hosts(url: &str) -> &str {
    let (text, _) = url.split_once('?').unwrap_or((url, ""));
    let (_, rest) = text.split_once("://").unwrap_or((text, ""));
    let (_, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
    rest.split('/').next().unwrap_or_default()
}

/// The same URL with `port` where a host has none, so that each server is written as `host:port`.
fn with_ports(url: &str, port: Option<u16>) -> String {
    let hosts = hosts(url);
    let (Some(port), false) = (port, hosts.is_empty()) else {
        return url.to_owned();
    };
    let named: Vec<String> = hosts
        .split(',')
        .map(|host| match host.rsplit_once(':') {
            Some((_, port)) if !port.contains(']') => host.to_owned(),
            _ => format!("{host}:{port}"),
        })
        .collect();
    // A part of the URL itself: where it lies is known.
    let at = hosts.as_ptr() as usize - url.as_ptr() as usize;
    format!(
        "{}{}{}",
        &url[..at],
        named.join(","),
        &url[at + hosts.len()..]
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The URL of a place in the store at `url`, and the name that was made.
    fn place(url: &str) -> (String, String) {
        let place = Place::in_store(url);
        let at = place.name.find("conformance-").unwrap();
        let name = &place.name[at..at + "conformance-".len() + 32];
        (
            place.url.replace(name, "NEW"),
            place.name.replace(name, "NEW"),
        )
    }

    #[test]
    fn each_store_has_a_place_that_is_nobody_elses() {
        for (url, expected, name) in [
            ("memory:", "memory:", "NEW"),
            ("file:/a/?ttl=1s", "file:/a/NEW?ttl=1s", "NEW"),
            (
                "redis://h",
                "redis://h:6379?prefix=lock%3ANEW%3A",
                "lock:NEW:",
            ),
            (
                "redis://me:a%40b@h:1/2?prefix=x&ttl=1s",
                "redis://me:a%40b@h:1/2?ttl=1s&prefix=xNEW%3A",
                "xNEW:",
            ),
            (
                "rediss://h?client_key=%2Fa",
                "rediss://h?client_key=%2Fa&prefix=lock%3ANEW%3A",
                "lock:NEW:",
            ),
            (
                "redlock://a,[::1],c:1/3?max_ttl=5s",
                "redlock://a:6379,[::1]:6379,c:1/3?prefix=lock%3ANEW%3A&max_ttl=30s",
                "lock:NEW:",
            ),
            (
                "etcd://a,b:1",
                "etcd://a:2379,b:1?prefix=locks%2FNEW%2F",
                "locks/NEW/",
            ),
            (
                "zk://a/chroot?prefix=/mine/",
                "zk://a:2181/chroot?prefix=%2Fmine%2FNEW",
                "/mine/NEW",
            ),
            ("zks://a", "zks://a?prefix=%2Flocks%2FNEW", "/locks/NEW"),
            ("postgres://h/db", "postgres://h:5432/db", "NEW"),
        ] {
            assert_eq!(place(url), (expected.into(), name.into()), "{url}");
        }
    }

    #[test]
    fn a_proxy_stands_only_where_it_is_seen_by_nobody() {
        for (url, servers) in [
            ("redis://me:x@h:1/2?prefix=a", "h:1"),
            ("redlock://a:1,[::1]:2/3", "a:1,[::1]:2"),
            ("postgres://h:5432/db", "h:5432"),
        ] {
            assert_eq!(hosts(url), servers);
            assert!(Kind::of(url).port.is_some(), "{url}");
        }
        for url in [
            "rediss://h:1",
            "redis+cluster://h:1",
            "etcds://h:1",
            "postgres://h/db?sslmode=verify-full",
            "file:/a",
        ] {
            assert!(Kind::of(url).port.is_none(), "{url}");
        }
    }
}
