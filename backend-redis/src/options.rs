use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use redis::{ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsCertificates};

use crate::cluster::Node;
use crate::sentinel::{Sentinels, Watch};
use crate::target::Target;

/// Where the server, or the cluster, is and how to talk to it.
///
/// Plain data: start from a URL and change what differs. Nothing is sent before
/// [`Redis::connect_with`](crate::Redis::connect_with). Neither `Debug` nor any error shows the
/// username or the password.
///
/// ```
/// use leasehold_redis::RedisOptions;
///
/// let options = RedisOptions::new("redis://localhost")?
///     .with_prefix("shop:lock:")
///     .with_username("shop")
///     .with_password("secret");
/// assert!(!format!("{options:?}").contains("secret"));
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone)]
pub struct RedisOptions {
    pub(crate) server: ConnectionInfo,
    pub(crate) prefix: String,
    pub(crate) connect_timeout: Duration,
    /// So many replicas must have a grant.
    pub(crate) replicas: usize,
    certificates: TlsCertificates,
    /// Who says where the server is, if not the address in `server`.
    watch: Option<Watch>,
    /// Whom to sign in as there.
    sentinel_username: Option<String>,
    sentinel_password: Option<String>,
    /// Some nodes of a cluster, by which the others are found: `server` is one of them. `None` if it is
    /// a single server.
    cluster: Option<Vec<Node>>,
    /// Where nodes are reached, if not where the cluster says.
    reached: HashMap<Node, Node>,
}

impl RedisOptions {
    /// Reads a URL: `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or
    /// `unix:///path/to/socket`; `valkey` and `valkeys` mean the same as `redis` and `rediss`. The
    /// port is 6379 if not given, an IPv6 address stands in brackets, and whatever has a meaning in a
    /// URL is percent-encoded in the username and the password.
    ///
    /// `redis+sentinel://[user[:password]@]host[:port][,host[:port]…]/master[/database]` names the
    /// sentinels (port 26379 if not given) and what they call the master; user and password are those
    /// of the servers. See [`sentinel`](Self::sentinel). `rediss+sentinel` is TLS to the servers and to
    /// the sentinels.
    ///
    /// A Redis Cluster is `redis+cluster://[user[:password]@]host[:port],host[:port],…`, or
    /// `rediss+cluster://…` for TLS, with one or more of its nodes; see [`cluster`](Self::cluster).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the URL is not of this form.
    pub fn new(url: impl AsRef<str>) -> Result<Self> {
        let url = url.as_ref();
        if let Some(parts) = Watch::parse(url)? {
            let mut options = Self::new(parts.servers)?;
            options.watch = Some(parts.watch);
            return Ok(options);
        }
        if let Some((scheme, rest)) = url.split_once("://")
            && let Some(scheme) = scheme.strip_suffix("+cluster")
        {
            return Self::cluster(each_node(scheme, rest));
        }
        let parsed = redis::parse_redis_url(url).ok_or_else(|| {
            let known = |scheme| ["redis", "rediss", "valkey", "valkeys"].contains(&scheme);
            invalid(match url.split_once("://") {
                Some((scheme, _)) if known(scheme) => FORM,
                _ => {
                    "begin with redis://, rediss:// (TLS), unix://, redis+sentinel:// or redis+cluster://, as in \
                     redis://localhost:6379/0"
                }
            })
        })?;
        if parsed.fragment().is_some() {
            return Err(invalid(
                "it has a part after '#': percent-encode a '#' in the password as %23; a certificate \
                 that no installed authority signed is accepted by naming its authority as an option",
            ));
        }
        if parsed.query().is_some() {
            return Err(invalid(
                "it has a part after '?', but options are not part of this URL: set them on RedisOptions",
            ));
        }
        let socket = parsed.scheme().ends_with("unix");
        if !socket && parsed.host_str().is_none_or(str::is_empty) {
            return Err(invalid("it names no host, as in redis://localhost:6379/0"));
        }
        let database = parsed.path().trim_start_matches('/');
        if !socket && !database.is_empty() && database.parse::<u32>().is_err() {
            return Err(invalid(
                "what follows the host is the number of the database, as in redis://localhost/2",
            ));
        }
        // The client's own message may quote parts of the URL, and a password with them.
        let server = parsed.into_connection_info();
        let server = server.map_err(|_| invalid(FORM))?;
        Ok(Self {
            server,
            prefix: "lock:".into(),
            connect_timeout: Duration::from_secs(5),
            replicas: 0,
            certificates: TlsCertificates {
                client_tls: None,
                root_cert: None,
            },
            watch: None,
            sentinel_username: None,
            sentinel_password: None,
            cluster: None,
            reached: HashMap::new(),
        })
    }

    /// The server that the sentinels at these places (`host` or `host:port`, 26379 if not given) call
    /// the master under the name `master`.
    ///
    /// They are asked each time a connection is opened, and while it is open they tell when another
    /// server becomes the master. See the [crate's page](crate#behind-sentinel).
    ///
    /// ```
    /// use leasehold_redis::RedisOptions;
    ///
    /// let options = RedisOptions::sentinel(["one", "two", "three:26380"], "mymaster")?
    ///     .with_password("of the servers")
    ///     .with_sentinel_password("of the sentinels");
    /// # drop(options);
    /// # Ok::<(), leasehold_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if there is no sentinel, or one is no `host[:port]`, or `master` is no
    /// name that a sentinel takes.
    pub fn sentinel(
        sentinels: impl IntoIterator<Item = impl AsRef<str>>,
        master: impl Into<String>,
    ) -> Result<Self> {
        let watch = Watch::new(sentinels, master.into())?;
        let mut options = Self::new("redis://localhost")?;
        options.watch = Some(watch);
        Ok(options)
    }

    /// A Redis Cluster, by the URLs of some of its nodes, each as for a [single server](Self::new). The
    /// others are found by asking these, so one is enough as long as it answers.
    ///
    /// All nodes are spoken to alike: with TLS or all without, as the same user, with the same
    /// certificates.
    ///
    /// ```
    /// use leasehold_redis::RedisOptions;
    ///
    /// let options = RedisOptions::cluster(["redis://shop:secret@one:7000", "redis://two:7000"])?;
    /// # let same = RedisOptions::new("redis+cluster://shop:secret@one:7000,two:7000")?;
    /// # assert_eq!(format!("{options:?}"), format!("{same:?}"));
    /// # Ok::<(), leasehold_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if one is no such URL, names a database other than 0, or differs from the
    /// first in more than host and port, or if there is none.
    pub fn cluster(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self> {
        let mut options: Option<Self> = None;
        let mut named = Vec::new();
        for url in urls {
            let one = Self::new(url)?;
            let (tls, node) = match one.server.addr() {
                ConnectionAddr::Tcp(host, port) => (false, Node::new(host, *port)),
                ConnectionAddr::TcpTls { host, port, .. } => (true, Node::new(host, *port)),
                _ => return Err(invalid("a node of a cluster is reached by host and port")),
            };
            let settings = one.server.redis_settings();
            if settings.db() != 0 {
                return Err(invalid(
                    "a cluster has no other database than 0: leave the number out",
                ));
            }
            if one.cluster.is_some() || !one.is_fixed() {
                return Err(invalid("name each node as in redis://localhost:7000"));
            }
            if let Some(first) = &options {
                let same = first.server.redis_settings();
                let unnamed = settings.username().is_none() && settings.password().is_none();
                if first.is_tls() != tls
                    || !unnamed
                        && (settings.username(), settings.password())
                            != (same.username(), same.password())
                {
                    return Err(invalid(
                        "all nodes of a cluster are spoken to alike: give the first one the user and \
                         password and the others the same or none, and all TLS or none",
                    ));
                }
            }
            named.push(node);
            options.get_or_insert(one);
        }
        let mut options =
            options.ok_or_else(|| invalid("it names no node, as in redis://localhost:7000"))?;
        options.cluster = Some(named);
        Ok(options)
    }

    /// What the names of all keys and channels begin with; default `lock:`. The lock `order:42` is
    /// then the key `lock:order:42`, as any other program may see and take it.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The ACL user to sign in as.
    #[must_use]
    pub fn with_username(mut self, username: impl AsRef<str>) -> Self {
        let redis = self.server.redis_settings().clone().set_username(username);
        self.server = self.server.set_redis_settings(redis);
        self
    }

    /// The password to sign in with.
    #[must_use]
    pub fn with_password(mut self, password: impl AsRef<str>) -> Self {
        let redis = self.server.redis_settings().clone().set_password(password);
        self.server = self.server.set_redis_settings(redis);
        self
    }

    /// The number of the database; default 0, or what the URL says. A cluster has no other: connecting
    /// to one is refused as [`ErrorKind::Invalid`].
    #[must_use]
    pub fn with_database(mut self, database: u32) -> Self {
        let redis = self.server.redis_settings().clone().set_db(database.into());
        self.server = self.server.set_redis_settings(redis);
        self
    }

    /// The ACL user to sign in as at the sentinels; default none. Without sentinels, connecting is
    /// refused as [`ErrorKind::Invalid`].
    #[must_use]
    pub fn with_sentinel_username(mut self, username: impl Into<String>) -> Self {
        self.sentinel_username = Some(username.into());
        self
    }

    /// The password to sign in with at the sentinels; default none, whatever that of the servers is.
    /// Without sentinels, connecting is refused as [`ErrorKind::Invalid`].
    #[must_use]
    pub fn with_sentinel_password(mut self, password: impl Into<String>) -> Self {
        self.sentinel_password = Some(password.into());
        self
    }

    /// TLS, as `rediss://` and `rediss+sentinel://` ask for it in a URL.
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        if let ConnectionAddr::Tcp(host, port) = self.server.addr().clone() {
            let addr = ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            };
            self.server = self.server.set_addr(addr);
        }
        self
    }

    /// A lock counts as granted, and as renewed, only once so many replicas have it (`WAIT`); default
    /// 0. It is freed again and refused with [`ErrorKind::Unavailable`] if they do not confirm it
    /// within the claim's request limit.
    ///
    /// That costs a round trip to the replicas for each. What it is good for, and what not: see the
    /// [crate's page](crate#behind-sentinel).
    #[must_use]
    pub fn with_replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// The certificate authority that must have signed the server's certificate, as PEM, in place of
    /// those that the system trusts. For `rediss://` only.
    #[must_use]
    pub fn with_certificate_authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.certificates.root_cert = Some(pem.into());
        self
    }

    /// The certificate and private key that show the server who we are, as PEM. For `rediss://` only.
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate_pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> Self {
        self.certificates.client_tls = Some(ClientTlsConfig {
            client_cert: certificate_pem.into(),
            client_key: key_pem.into(),
        });
        self
    }

    /// Where a node of a cluster is reached from here, if that is not where it says that it is: behind a
    /// translation of addresses, forwarded ports, containers. Once for each such node. With TLS, its
    /// certificate must be for the host it is reached by. Without a cluster, connecting is refused as
    /// [`ErrorKind::Invalid`].
    #[must_use]
    pub fn with_node_address(mut self, announced: (&str, u16), reached: (&str, u16)) -> Self {
        let announced = Node::new(announced.0, announced.1);
        let reached = Node::new(reached.0, reached.1);
        self.reached.insert(announced, reached);
        self
    }

    /// How long making a connection may take, signing in included; default 5 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The nodes that were named, if this is a cluster.
    pub(crate) fn nodes(&self) -> Option<&[Node]> {
        self.cluster.as_deref()
    }

    /// Where a node is reached that says it is `node`.
    pub(crate) fn reached<'a>(&'a self, node: &'a Node) -> &'a Node {
        self.reached.get(node).unwrap_or(node)
    }

    /// The same for one node of the cluster, by what it says where it is.
    pub(crate) fn at_node(&self, node: &Node) -> Self {
        let Node { host, port } = self.reached(node);
        self.at(host, *port)
    }

    fn is_tls(&self) -> bool {
        matches!(self.server.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// The server as errors and logs name it: host and port, the socket's path, or what the sentinels
    /// call it.
    pub(crate) fn address(&self) -> String {
        match &self.watch {
            Some(watch) => watch.to_string(),
            None => match self.server.addr() {
                ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                    Node::new(host, *port).to_string()
                }
                other => other.to_string(),
            },
        }
    }

    pub(crate) fn addr(&self) -> &ConnectionAddr {
        self.server.addr()
    }

    /// Whether the options go together; nothing is asked for it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for an option that means nothing here.
    pub(crate) fn check(&self) -> Result<()> {
        let for_sentinels = self.sentinel_username.is_some() || self.sentinel_password.is_some();
        let refused = if for_sentinels && self.watch.is_none() {
            "a user or password for sentinels is given, and it has none: name them, as in \
             redis+sentinel://one,two,three/mymaster, or leave with_sentinel_username and \
             with_sentinel_password out"
        } else if !self.reached.is_empty() && self.cluster.is_none() {
            "an address for a node of a cluster is given, and it is none: name it as one, as in \
             redis+cluster://one:7000, or leave with_node_address out"
        } else if self.cluster.is_some() && self.server.redis_settings().db() != 0 {
            "a cluster has no other database than 0: leave with_database out"
        } else {
            return Ok(());
        };
        Err(Error::new(
            ErrorKind::Invalid,
            format!("Redis at {}: {refused}", self.address()),
        ))
    }

    /// Whether this names one certain server.
    pub(crate) fn is_fixed(&self) -> bool {
        self.watch.is_none()
    }

    /// Where to connect to. Checks the certificates.
    pub(crate) fn target(&self) -> Result<Target> {
        match &self.watch {
            Some(watch) => Ok(Target::watched(Sentinels::new(self, watch)?)),
            None => Ok(Target::Fixed(Box::new(self.client()?))),
        }
    }

    /// The same for the server at `host`, without sentinels and cluster.
    pub(crate) fn at(&self, host: &str, port: u16) -> Self {
        let host = host.to_owned();
        let addr = match self.server.addr() {
            ConnectionAddr::TcpTls { .. } => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            },
            _ => ConnectionAddr::Tcp(host, port),
        };
        let mut options = self.clone();
        options.server = options.server.set_addr(addr);
        options.watch = None;
        options.cluster = None;
        options.reached.clear();
        options
    }

    /// The same for one of its sentinels: they have no databases, and users of their own.
    pub(crate) fn at_sentinel(&self, host: &str, port: u16) -> Self {
        let mut options = self.at(host, port);
        let mut redis = redis::RedisConnectionInfo::default();
        if let Some(username) = &self.sentinel_username {
            redis = redis.set_username(username);
        }
        if let Some(password) = &self.sentinel_password {
            redis = redis.set_password(password);
        }
        options.server = options.server.set_redis_settings(redis);
        options
    }

    /// The client that opens connections to one server.
    pub(crate) fn client(&self) -> Result<redis::Client> {
        let redis = self
            .server
            .redis_settings()
            .clone()
            .set_protocol(redis::ProtocolVersion::RESP3)
            .set_lib_name("leasehold", env!("CARGO_PKG_VERSION"));
        // Requests are small and somebody waits for each: do not hold them back to fill a packet.
        let tcp = self.server.tcp_settings().clone().set_nodelay(true);
        let server = self
            .server
            .clone()
            .set_redis_settings(redis)
            .set_tcp_settings(tcp);
        let tls = matches!(server.addr(), ConnectionAddr::TcpTls { .. });
        let certified =
            self.certificates.client_tls.is_some() || self.certificates.root_cert.is_some();
        let client = match (tls, certified) {
            (false, true) => {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    "certificates are given but the URL does not ask for TLS: begin it with rediss://",
                ));
            }
            (true, true) => redis::Client::build_with_tls(server, self.certificates.clone()),
            (_, false) => redis::Client::open(server),
        };
        if tls && rustls::crypto::CryptoProvider::get_default().is_none() {
            // One choice for the whole process, as rustls has it; the application's own comes first.
            // An error says that somebody else was faster, which is as good.
            let _taken = rustls::crypto::ring::default_provider().install_default();
        }
        client.map_err(|e| {
            Error::new(
                ErrorKind::Invalid,
                format!("the TLS certificates cannot be used, PEM is expected: {e}"),
            )
        })
    }
}

impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let redis = self.server.redis_settings();
        f.debug_struct("RedisOptions")
            .field("server", &self.address())
            .field("cluster", &self.cluster)
            .field("database", &redis.db())
            .field("username", &redis.username().map(|_| "…"))
            .field("password", &redis.password().map(|_| "…"))
            .field("prefix", &self.prefix)
            .field("connect_timeout", &self.connect_timeout)
            .field("replicas", &self.replicas)
            .finish_non_exhaustive()
    }
}

const FORM: &str = "expected redis://[user[:password]@]host[:port][/database] with user and password \
                    percent-encoded UTF-8, a port up to 65535 and an IPv6 address in brackets";

/// The URL of each node in `[user[:password]@]host[:port],…` and what follows it.
fn each_node(scheme: &str, rest: &str) -> Vec<String> {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (nodes, end) = rest.split_at(end);
    // A comma and an @ in a password are percent-encoded.
    let (user, nodes) = match nodes.rsplit_once('@') {
        Some((user, nodes)) => (format!("{user}@"), nodes),
        None => (String::new(), nodes),
    };
    nodes
        .split(',')
        .map(|node| format!("{scheme}://{user}{}{end}", node.trim()))
        .collect()
}

pub(crate) fn invalid(reason: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("this Redis URL cannot be used: {reason}"),
    )
}
