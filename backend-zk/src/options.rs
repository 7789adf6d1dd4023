use std::fmt;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Key, Result};
use zookeeper_client::{Acls, Client, Connector, CreateMode, CreateOptions};

use crate::names;
use crate::tls::Tls;

/// Host and port.
pub(crate) type Server = (String, u16);

/// Where the servers are and how to talk to them.
///
/// Plain data: start from a URL and change what differs. Nothing is sent before
/// [`ZooKeeper::connect_with`](crate::ZooKeeper::connect_with). Neither `Debug` nor any error shows
/// the user, the password or the private key.
///
/// ```
/// use leasehold_zk::ZooKeeperOptions;
///
/// let options = ZooKeeperOptions::new("zk://zk1:2181,zk2:2181,zk3:2181/shop")?
///     .with_prefix("/order-locks")
///     .with_credentials("shop", "secret")
///     .with_creator_only(true);
/// assert!(!format!("{options:?}").contains("secret"));
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ZooKeeperOptions {
    servers: String,
    chroot: String,
    prefix: String,
    credentials: Option<(String, String)>,
    creator_only: bool,
    connect_timeout: Duration,
    secure: bool,
    authority: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
    /// Made of these by [`check`](Self::check).
    tls: Option<Tls>,
}

impl ZooKeeperOptions {
    /// Reads a URL: `zk://[user:password@]host[:port][,host[:port]…][/chroot]`, or `zks://…` for TLS,
    /// which needs the feature `tls`. The port is 2181 if not given, an IPv6 address stands in
    /// brackets, and whatever has a meaning in a URL is percent-encoded in the user and the password.
    /// All servers must be of one ensemble.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the URL is not of this form.
    pub fn new(url: impl AsRef<str>) -> Result<Self> {
        let (secure, rest) = match url.as_ref().split_once("://") {
            Some(("zk", rest)) => (false, rest),
            Some(("zks", rest)) => (true, rest),
            _ => {
                return Err(invalid(
                    "begin with zk://, or zks:// for TLS, as in zk://host1:2181,host2:2181/chroot",
                ));
            }
        };
        if rest.contains('?') || rest.contains('#') {
            return Err(invalid(
                "options after '?' are not part of this URL: set them on ZooKeeperOptions; in a \
                 password, percent-encode '?' as %3F and '#' as %23",
            ));
        }
        let (authority, chroot) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, ""),
        };
        let (credentials, servers) = match authority.rsplit_once('@') {
            Some((who, servers)) => (Some(credentials(who)?), servers),
            None => (None, authority),
        };
        let chroot = match chroot {
            "" | "/" => String::new(),
            chroot => path(chroot, "the chroot")?,
        };
        Ok(Self {
            servers: checked_servers(servers)?,
            chroot,
            prefix: "/locks".into(),
            credentials,
            creator_only: false,
            connect_timeout: Duration::from_secs(10),
            secure,
            authority: None,
            identity: None,
            tls: None,
        })
    }

    /// The node, below the chroot, under which the locks lie; default `/locks`. The lock `order:42`
    /// is then at `/locks/order:42`, where Curator's and kazoo's locks may queue too. It is made when
    /// it is missing, and ZooKeeper sweeps what is empty.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Signs in as `user` (ZooKeeper's `digest` scheme).
    #[must_use]
    pub fn with_credentials(
        mut self,
        user: impl Into<String>,
        password: impl Into<String>,
    ) -> Self {
        self.credentials = Some((user.into(), password.into()));
        self
    }

    /// Whether only those who sign in with the same credentials may use the nodes that we create;
    /// default: anybody may.
    #[must_use]
    pub fn with_creator_only(mut self, creator_only: bool) -> Self {
        self.creator_only = creator_only;
        self
    }

    /// The certificate authority that must have signed the servers' certificates, as PEM, in place of
    /// those that the system trusts. For `zks://` only.
    #[must_use]
    pub fn with_certificate_authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authority = Some(pem.into());
        self
    }

    /// The certificate and private key that show the servers who we are, as PEM. For `zks://` only.
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate_pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> Self {
        self.identity = Some((certificate_pem.into(), key_pem.into()));
        self
    }

    /// How long [`ZooKeeper::connect_with`](crate::ZooKeeper::connect_with) tries to reach one of the
    /// servers; default 10 s. Later on, the request limit of the claim decides.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Whether the options fit together; what they lack is said before anything is sent.
    pub(crate) fn check(mut self) -> Result<Self> {
        self.prefix = match self.prefix.trim_end_matches('/') {
            "" if self.chroot.is_empty() => {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    "the root of ZooKeeper cannot be the prefix: take a node below it, as in /locks",
                ));
            }
            "" => String::new(),
            prefix => path(prefix, "the prefix")?,
        };
        if let Some((user, _)) = &self.credentials
            && (user.is_empty() || user.contains(':'))
        {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the user is empty or contains a colon: ZooKeeper's digest scheme knows no such user",
            ));
        }
        if self.creator_only && self.credentials.is_none() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "nodes for their creator only need a creator: give credentials too",
            ));
        }
        if self.secure {
            let identity = self.identity.as_ref();
            self.tls = Some(Tls::new(
                self.servers.split(',').filter_map(host_and_port).collect(),
                self.authority.as_deref(),
                identity.map(|(certificate, key)| (certificate.as_slice(), key.as_slice())),
            )?);
        } else if self.authority.is_some() || self.identity.is_some() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "certificates are given but the URL does not ask for TLS: begin it with zks://",
            ));
        }
        Ok(self)
    }

    /// The servers as errors and logs name them.
    pub(crate) fn servers(&self) -> &str {
        &self.servers
    }

    /// The servers as the client gets them. Between its attempts to connect it pauses twice as long
    /// with every round, so that the end of an interruption may be noticed after twice its length; but
    /// within a round the pauses only grow by 50 ms. So each server is named several times.
    pub(crate) fn connect_string(&self) -> String {
        const NAMES: usize = 16;
        let count = self.servers.split(',').count();
        let servers = if self.secure {
            let secure = self.servers.split(',').map(|it| format!("tcp+tls://{it}"));
            secure.collect::<Vec<_>>().join(",")
        } else {
            self.servers.clone()
        };
        vec![servers; NAMES.div_ceil(count)].join(",")
    }

    /// How to speak TLS, if the servers are to be spoken to so.
    pub(crate) fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connect_timeout
    }

    /// The node whose children contend for `key`.
    pub(crate) fn parent(&self, key: &Key) -> String {
        format!("{}{}/{}", self.chroot, self.prefix, names::node(key))
    }

    /// The node under which everything lies; never the root of all.
    pub(crate) fn root(&self) -> String {
        format!("{}{}", self.chroot, self.prefix)
    }

    /// Where the sessions' own nodes lie.
    pub(crate) fn sessions(&self) -> String {
        format!("{}{}/{}", self.chroot, self.prefix, names::SESSIONS)
    }

    pub(crate) fn folder(&self) -> CreateOptions<'static> {
        CreateMode::Container.with_acls(self.acls())
    }

    pub(crate) fn place(&self) -> CreateOptions<'static> {
        CreateMode::EphemeralSequential.with_acls(self.acls())
    }

    pub(crate) fn sign_of_life(&self) -> CreateOptions<'static> {
        CreateMode::Ephemeral.with_acls(self.acls())
    }

    pub(crate) fn connector(&self, timeout: Duration) -> Connector {
        let mut connector = Client::connector().with_session_timeout(timeout);
        if let Some(tls) = &self.tls {
            connector = tls.secure(connector);
        }
        match &self.credentials {
            Some((user, password)) => {
                connector.with_auth("digest", format!("{user}:{password}").as_bytes())
            }
            None => connector,
        }
    }

    fn acls(&self) -> Acls<'static> {
        if self.creator_only {
            Acls::creator_all()
        } else {
            Acls::anyone_all()
        }
    }
}

impl fmt::Debug for ZooKeeperOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeperOptions")
            .field("servers", &self.servers)
            .field("chroot", &self.chroot)
            .field("prefix", &self.prefix)
            .field("signs_in", &self.credentials.is_some())
            .field("creator_only", &self.creator_only)
            .field("connect_timeout", &self.connect_timeout)
            .field("secure", &self.secure)
            .field("certificate_authority", &self.authority.is_some())
            .field("client_certificate", &self.identity.is_some())
            .finish()
    }
}

fn checked_servers(servers: &str) -> Result<String> {
    if servers
        .split(',')
        .all(|server| host_and_port(server).is_some())
    {
        Ok(servers.to_owned())
    } else {
        Err(invalid(
            "name the servers as host:port with commas between them, as in zk://host1:2181,host2:2181",
        ))
    }
}

fn host_and_port(server: &str) -> Option<Server> {
    let (host, port) = match server.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => server.split_at(server.find(':').unwrap_or(server.len())),
    };
    let port = match port.strip_prefix(':') {
        Some(port) => port.parse().ok().filter(|port| *port != 0)?,
        None if port.is_empty() => 2181,
        None => return None,
    };
    let host_is_good = !host.is_empty() && !host.contains(char::is_whitespace);
    host_is_good.then(|| (host.to_owned(), port))
}

fn credentials(who: &str) -> Result<(String, String)> {
    who.split_once(':')
        .and_then(|(user, password)| Some((decoded(user)?, decoded(password)?)))
        .ok_or_else(|| {
            invalid("what stands before '@' is user:password, both percent-encoded UTF-8")
        })
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digits = [rest.next()?, rest.next()?];
            let digits = std::str::from_utf8(&digits).ok()?;
            if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return None;
            }
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// A path that ZooKeeper takes.
fn path(path: &str, what: &str) -> Result<String> {
    let level_is_good = |level: &str| {
        !level.is_empty()
            && Key::new(level).is_ok_and(|key| names::node(&key).replace("%25", "%") == level)
    };
    match path.strip_prefix('/') {
        Some(levels) if levels.split('/').all(level_is_good) => Ok(path.to_owned()),
        _ => Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "{what} {path:?} is no path of ZooKeeper: it begins with '/', does not end with one, \
                 and has no empty, special or relative names between them"
            ),
        )),
    }
}

fn invalid(advice: &str) -> Error {
    // Without the URL: a password may be in it.
    Error::new(
        ErrorKind::Invalid,
        format!("not a URL of ZooKeeper: {advice}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read() {
        let options = ZooKeeperOptions::new("zk://u%3a1:p%40s@h1:2181,[::1]:2182,h3/a/b").unwrap();
        assert_eq!(options.servers, "h1:2181,[::1]:2182,h3");
        assert_eq!(options.chroot, "/a/b");
        assert_eq!(options.credentials, Some(("u:1".into(), "p@s".into())));
        let key = Key::new("x/y").unwrap();
        assert_eq!(options.parent(&key), "/a/b/locks/x%2Fy");
        assert_eq!(options.connect_string().matches("h1:2181").count(), 6);
        let root = ZooKeeperOptions::new("zk://h/c").unwrap().with_prefix("/");
        assert_eq!(root.check().unwrap().parent(&key), "/c/x%2Fy");
    }

    #[test]
    fn certificates_ask_for_tls() {
        let pem = "-----BEGIN CERTIFICATE-----";
        let plain = || ZooKeeperOptions::new("zk://h").unwrap();
        for options in [
            plain().with_certificate_authority(pem),
            plain().with_client_certificate(pem, pem),
        ] {
            let Err(error) = options.check() else {
                panic!("it does not ask for TLS");
            };
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("zks://"), "{error}");
        }
        let secure = ZooKeeperOptions::new("zks://h1,[::1]:2281").unwrap();
        let named = secure.connect_string();
        assert!(
            named.starts_with("tcp+tls://h1,tcp+tls://[::1]:2281,tcp+tls://h1,"),
            "{named}"
        );
        assert!(plain().check().unwrap().tls().is_none());
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn without_the_feature_there_is_no_tls() {
        let options = ZooKeeperOptions::new("zks://h").unwrap();
        let error = options.check().expect_err("built without");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("feature `tls`"), "{error}");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_are_read_before_anything_is_sent() {
        const GARBLED: &str = "-----BEGIN CERTIFICATE-----\nc2VjcmV0\n-----END CERTIFICATE-----\n";
        let options = |host: &str| ZooKeeperOptions::new(format!("zks://{host}")).unwrap();
        for (options, says) in [
            (options("h").with_certificate_authority("secret"), "PEM"),
            (
                options("h").with_certificate_authority(GARBLED),
                "authority",
            ),
            (
                options("h").with_client_certificate("secret", "secret"),
                "key",
            ),
            (options("a..b"), "DNS name"),
        ] {
            let error = options.check().expect_err(says);
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let shown = format!("{error} {error:?}");
            assert!(shown.contains(says) && !shown.contains("secret"), "{shown}");
        }
    }

    #[test]
    fn bad_input_is_refused_and_never_shown() {
        for url in [
            "",
            "redis://h",
            "zk://",
            "zk://,h",
            "zk://h:0",
            "zk://h:x",
            "zk://h:70000",
            "zk://[::1",
            "zk://secret@h",
            "zk://u:secret%4@h",
            "zk://u:secret%ff@h",
            "zk://u:secret?@h",
            "zk://u:secret@",
            "zk://h//a",
            "zk://h/a/",
            "zk://h/a/../b",
            "zk://h /",
        ] {
            let error = ZooKeeperOptions::new(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url}");
            assert!(
                !format!("{error} {error:?}").contains("secret"),
                "{url}: {error}"
            );
        }
        let options = || ZooKeeperOptions::new("zk://h").unwrap();
        for options in [
            options().with_prefix("/"),
            options().with_prefix("locks"),
            options().with_prefix("/a//b"),
            options().with_prefix("/a/\u{1f512}"),
            options().with_creator_only(true),
            options().with_credentials("a:b", "secret"),
            options().with_credentials("", "secret"),
        ] {
            let error = options.check().expect_err("does not fit together");
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(!format!("{error:?}").contains("secret"));
        }
    }
}
