use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{ConnectionAddr, FromRedisValue as _, PushInfo, RedisResult, Value};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::RedisOptions;
use crate::cluster::Node;
use crate::error;
use crate::options::invalid;
use crate::target::without_limits;

/// Which sentinels there are, and what they call the master.
#[derive(Clone)]
pub(crate) struct Watch {
    sentinels: Vec<(String, u16)>,
    master: String,
}

/// What a URL with sentinels says.
pub(crate) struct Parts {
    pub(crate) watch: Watch,
    /// User, password, database and TLS of the servers, as a URL of a server.
    pub(crate) servers: String,
}

impl Watch {
    pub(crate) fn new(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: String,
    ) -> Result<Self> {
        let sentinels = sentinels.into_iter().map(|it| place(it.as_ref()));
        let sentinels = sentinels.collect::<Result<Vec<_>>>()?;
        if sentinels.is_empty() {
            return Err(invalid("it names no sentinel"));
        }
        let allowed = |it: char| it.is_ascii_alphanumeric() || ".-_".contains(it);
        if master.is_empty() || !master.chars().all(allowed) {
            return Err(invalid(
                "behind the sentinels stands the name that they monitor the master by, as in \
                 redis+sentinel://one,two,three/mymaster; it is made of letters, digits and any of .-_",
            ));
        }
        Ok(Self { sentinels, master })
    }

    /// Reads `redis[s]+sentinel://[user[:password]@]host[:port][,host[:port]…]/master[/database]`;
    /// `None` if the URL is of another kind.
    pub(crate) fn parse(url: &str) -> Result<Option<Parts>> {
        let Some((scheme, rest)) = url.split_once("://") else {
            return Ok(None);
        };
        let scheme = match scheme.to_ascii_lowercase().as_str() {
            "redis+sentinel" | "valkey+sentinel" => "redis",
            "rediss+sentinel" | "valkeys+sentinel" => "rediss",
            _ => return Ok(None),
        };
        if rest.contains(['?', '#']) {
            return Err(invalid(
                "it has a part after '?' or '#', but options are not part of this URL: set them on \
                 RedisOptions; in a password, percent-encode these characters as %3F and %23",
            ));
        }
        let (user, rest) = match rest.rsplit_once('@') {
            Some((user, rest)) => (format!("{user}@"), rest),
            None => (String::new(), rest),
        };
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (master, database) = path.split_once('/').unwrap_or((path, ""));
        Ok(Some(Parts {
            watch: Self::new(hosts.split(','), master.to_owned())?,
            servers: format!("{scheme}://{user}localhost/{database}"),
        }))
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by the sentinels ", self.master)?;
        for (index, (host, port)) in self.sentinels.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{}", Node::new(host, *port))?;
        }
        Ok(())
    }
}

/// `host[:port]`, an IPv6 address in brackets.
fn place(text: &str) -> Result<(String, u16)> {
    let server = RedisOptions::new(format!("redis://{text}")).map_err(|_| {
        invalid("a sentinel is named by its host and port, as in one:26379,two:26379")
    })?;
    let has_port = text
        .rsplit_once(':')
        .is_some_and(|(_, port)| !port.contains(']'));
    match server.addr() {
        ConnectionAddr::Tcp(host, port) if !text.contains(['/', '@']) => {
            Ok((host.clone(), if has_port { *port } else { 26379 }))
        }
        _ => Err(invalid(
            "a sentinel is named by its host and port, as in one:26379,two:26379",
        )),
    }
}

/// The sentinels of a master: they say where it is.
///
/// 1. *Find.* All are asked at the same time, each within its own limit. What a majority of them
///    answers is enough, and of these the newest configuration counts (the highest `config-epoch`): a
///    sentinel that is cut off together with an old master would name that one for ever. Whoever
///    connects then asks the server for its `ROLE`.
/// 2. *Watch.* While a connection is open, each sentinel is listened to for `+switch-master` and
///    `+promoted-slave`, and asked again after each message, each reconnect, and now and then. Without
///    that a planned failover (`SENTINEL FAILOVER`) has two masters for ten seconds: sentinels demote
///    the old one, and close its connections, only after that time, and until then it goes on granting
///    locks that the new one has never heard of.
///
/// Source: "Guidelines for Redis clients with support for Redis Sentinel" and "Redis Sentinel pub/sub
/// messages" in the manual of Redis; the ten seconds: issue 6062 of Redis.
#[derive(Debug)]
pub(crate) struct Sentinels {
    all: Vec<Arc<Sentinel>>,
    master: Arc<str>,
    /// How to talk to the servers.
    options: RedisOptions,
    limit: Duration,
}

/// Where the master is, by a certain configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Master {
    pub(crate) host: String,
    pub(crate) port: u16,
    epoch: u64,
}

#[derive(Debug)]
struct Sentinel {
    address: String,
    client: redis::Client,
}

/// The pause before a sentinel that failed is watched again.
const PAUSE: Duration = Duration::from_secs(1);
/// How long no message is waited for before a sentinel is asked again: some may have been lost with a
/// connection that ended without a word.
const SILENCE: Duration = Duration::from_secs(10);

impl Sentinels {
    pub(crate) fn new(options: &RedisOptions, watch: &Watch) -> Result<Self> {
        let sentinel = |(host, port): &(String, u16)| {
            let client = options.at_sentinel(host, *port).client()?;
            let address = Node::new(host, *port).to_string();
            Ok(Arc::new(Sentinel { address, client }))
        };
        Ok(Self {
            all: watch
                .sentinels
                .iter()
                .map(sentinel)
                .collect::<Result<_>>()?,
            master: watch.master.as_str().into(),
            options: options.clone(),
            // Somebody who answers in time shall leave time to connect.
            limit: options.connect_timeout / 2,
        })
    }

    /// Where the master is now, and the client to connect to it.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if no sentinel says; [`ErrorKind::Invalid`] if all of them know no
    /// such master.
    pub(crate) async fn find(&self) -> Result<(Master, redis::Client)> {
        let majority = self.all.len() / 2 + 1;
        let mut asking = JoinSet::new();
        for sentinel in &self.all {
            let (sentinel, master, limit) = (sentinel.clone(), self.master.clone(), self.limit);
            asking.spawn(async move {
                let asked = sentinel.within(limit, async {
                    let mut connection = sentinel.connect(None).await?;
                    sentinel.ask(&mut connection, &master).await
                });
                asked.await
            });
        }
        let mut newest: Option<Master> = None;
        let (mut named, mut unknown, mut failures) = (0, 0, Vec::new());
        while named < majority
            && let Some(answer) = asking.join_next().await
        {
            match answer {
                Ok(Ok(Some(master))) => {
                    named += 1;
                    if newest.as_ref().is_none_or(|it| it.epoch < master.epoch) {
                        newest = Some(master);
                    }
                }
                Ok(Ok(None)) => unknown += 1,
                Ok(Err(e)) => failures.push(e),
                // The runtime is ending.
                Err(e) => failures.push(Error::new(ErrorKind::Unavailable, e.to_string())),
            }
        }
        let Some(master) = newest else {
            return Err(self.nowhere(unknown, &failures));
        };
        let client = self.options.at(&master.host, master.port).client()?;
        Ok((master, client))
    }

    /// Resolves when a newer configuration has another master than `known`.
    pub(crate) async fn until_moved(&self, known: &Master) {
        let mut watching = JoinSet::new();
        for sentinel in &self.all {
            let (sentinel, name, limit) = (sentinel.clone(), self.master.clone(), self.limit);
            let known = known.clone();
            watching.spawn(async move {
                while let Err(e) = sentinel.until_moved(&name, &known, limit).await {
                    debug!(target: "leasehold", error = %e, "a sentinel is not watched");
                    sleep(PAUSE).await;
                }
            });
        }
        watching.join_next().await;
    }

    /// The name of the server at `master` in errors and logs.
    pub(crate) fn describe(&self, master: &Master) -> String {
        format!(
            "{}:{}, the master of {}",
            master.host, master.port, self.master
        )
    }

    /// The sentinels call a server the master that says it is none.
    pub(crate) fn not_yet(&self, master: &Master) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!(
                "{} by its sentinels, says that it is a replica: a failover is under way",
                self.describe(master)
            ),
        )
    }

    fn nowhere(&self, unknown: usize, failures: &[Error]) -> Error {
        let name = &self.master;
        let mut said: Vec<String> = failures.iter().map(ToString::to_string).collect();
        if unknown > 0 {
            said.push(format!("{unknown} of them know no such master"));
        }
        let said = said.join("; ");
        if failures.is_empty() {
            return Error::new(
                ErrorKind::Invalid,
                format!(
                    "no sentinel knows a master {name:?}: SENTINEL MASTERS lists those that there are"
                ),
            );
        }
        // Something passing at one of them may be all that is wrong.
        let lasting = failures.iter().find(|e| !e.is_transient());
        match lasting {
            Some(e) if failures.iter().all(|e| !e.is_transient()) => Error::new(
                e.kind(),
                format!(
                    "the sentinels do not say where the master {name:?} is; their user and password \
                     are options apart from those of the servers: {said}"
                ),
            ),
            _ => Error::new(
                ErrorKind::Unavailable,
                format!(
                    "no sentinel says where the master {name:?} is: check that they run and are \
                     reached under these addresses: {said}"
                ),
            ),
        }
    }
}

impl Sentinel {
    async fn until_moved(&self, name: &str, known: &Master, limit: Duration) -> Result<()> {
        let (sender, mut news) = mpsc::unbounded_channel();
        let connecting = async {
            let mut connection = self.connect(Some(sender)).await?;
            let channels = ["+switch-master", "+promoted-slave"];
            let subscribed = connection.subscribe(&channels[..]).await;
            subscribed.map_err(|e| self.failed(&e))?;
            Ok(connection)
        };
        let mut connection = self.within(limit, connecting).await?;
        loop {
            let now = self.within(limit, self.ask(&mut connection, name)).await?;
            if let Some(now) = now
                && now.epoch > known.epoch
                && (&now.host, now.port) != (&known.host, known.port)
            {
                return Ok(());
            }
            // Its end is news, too: the next question fails.
            drop(timeout(SILENCE, news.recv()).await);
            while news.try_recv().is_ok() {}
        }
    }

    async fn connect(
        &self,
        news: Option<mpsc::UnboundedSender<PushInfo>>,
    ) -> Result<MultiplexedConnection> {
        let mut config = without_limits();
        if let Some(news) = news {
            config = config.set_push_sender(news);
        }
        let opening = self
            .client
            .get_multiplexed_async_connection_with_config(&config);
        opening.await.map_err(|e| self.failed(&e))
    }

    /// Where this one says that the master is; `None` if it does not know any.
    async fn ask(
        &self,
        connection: &mut MultiplexedConnection,
        name: &str,
    ) -> Result<Option<Master>> {
        // The epoch first: so the address is at least as new as it.
        let mut question = redis::pipe();
        question.cmd("SENTINEL").arg("MASTER").arg(name);
        question
            .cmd("SENTINEL")
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(name);
        let asking = connection.req_packed_commands(&question, 0, 2);
        let mut answers = asking.await.map_err(|e| self.failed(&e))?.into_iter();
        let (details, place) = (answers.next(), answers.next());
        let place = place.unwrap_or_default().extract_error();
        let place = match place.map_err(|e| self.failed(&e))? {
            Value::Nil => return Ok(None),
            place => place,
        };
        let details = details.unwrap_or_default().extract_error();
        let details = details.map_err(|e| self.failed(&e))?;
        let read = || -> RedisResult<Option<Master>> {
            let details = HashMap::<String, String>::from_redis_value(details)?;
            let (host, port) = <(String, u16)>::from_redis_value(place)?;
            let epoch = details.get("config-epoch").and_then(|it| it.parse().ok());
            Ok(epoch.map(|epoch| Master { host, port, epoch }))
        };
        match read() {
            Ok(Some(master)) => Ok(Some(master)),
            _ => Err(error::unexpected(&self.name())),
        }
    }

    async fn within<T>(
        &self,
        limit: Duration,
        asking: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        match timeout(limit, asking).await {
            Ok(answer) => answer,
            Err(_elapsed) => Err(error::silent(&self.name(), limit)),
        }
    }

    fn failed(&self, e: &redis::RedisError) -> Error {
        if error::describe(e).contains("unknown command") {
            return Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} is no sentinel: name the sentinels, which listen on a port of their own, \
                     26379 as a rule",
                    self.address
                ),
            );
        }
        error::map(&self.name(), e)
    }

    fn name(&self) -> String {
        format!("the sentinel {}", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(url: &str) -> Parts {
        Watch::parse(url).unwrap().unwrap()
    }

    #[test]
    fn sentinels_master_and_servers_are_read() {
        let it = parts("redis+sentinel://me:p%40x@a,b:1,[::1],[::2]:3/my-master.1/2");
        let places = [("a", 26379), ("b", 1), ("::1", 26379), ("::2", 3)];
        let places = places.map(|(host, port)| (host.to_owned(), port));
        assert_eq!(it.watch.sentinels, places);
        assert_eq!(it.watch.master, "my-master.1");
        assert_eq!(it.servers, "redis://me:p%40x@localhost/2");
        let it = parts("REDISS+sentinel://a/m");
        assert_eq!(it.servers, "rediss://localhost/");
        assert!(Watch::parse("redis://a/2").unwrap().is_none());
    }

    #[test]
    fn what_is_no_such_url_is_refused_and_no_password_is_shown() {
        for url in [
            "redis+sentinel://a",
            "redis+sentinel://a/",
            "redis+sentinel:///m",
            "redis+sentinel://a,,b/m",
            "redis+sentinel://a/m m",
            "redis+sentinel://a:x/m",
            "redis+sentinel://a/m?secret=1",
            "redis+sentinel://u:secret@a/m#1",
            "redis+sentinel://u:secret@a/m/zero",
            "redis+sentinel://u:sec/ret@a/m",
        ] {
            let e = RedisOptions::new(url).expect_err(url);
            assert_eq!(e.kind(), ErrorKind::Invalid, "{url}: {e}");
            assert!(!e.to_string().contains("sec"), "{e}");
        }
    }
}
