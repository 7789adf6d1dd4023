use std::fmt;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use redis::{ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsCertificates};

use crate::sentinel::{Sentinels, Watch};
use crate::target::Target;

/// Where the server is and how to talk to it.
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
    /// # Errors
    /// [`ErrorKind::Invalid`] if the URL is not of this form.
    pub fn new(url: impl AsRef<str>) -> Result<Self> {
        let url = url.as_ref();
        if let Some(parts) = Watch::parse(url)? {
            let mut options = Self::new(parts.servers)?;
            options.watch = Some(parts.watch);
            return Ok(options);
        }
        let parsed = redis::parse_redis_url(url).ok_or_else(|| {
            invalid(
                "begin with redis://, rediss:// (TLS), unix:// or redis+sentinel://, as in \
                 redis://localhost:6379/0",
            )
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
        let server = parsed.into_connection_info().map_err(|_| {
            invalid(
                "expected redis://[user[:password]@]host[:port][/database] with user and password \
                 percent-encoded UTF-8",
            )
        })?;
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

    /// The number of the database; default 0, or what the URL says.
    #[must_use]
    pub fn with_database(mut self, database: u32) -> Self {
        let redis = self.server.redis_settings().clone().set_db(database.into());
        self.server = self.server.set_redis_settings(redis);
        self
    }

    /// The ACL user to sign in as at the sentinels; default none. Only where there are sentinels.
    #[must_use]
    pub fn with_sentinel_username(mut self, username: impl Into<String>) -> Self {
        if let Some(watch) = &mut self.watch {
            watch.username = Some(username.into());
        }
        self
    }

    /// The password to sign in with at the sentinels; default none, whatever that of the servers is.
    /// Only where there are sentinels.
    #[must_use]
    pub fn with_sentinel_password(mut self, password: impl Into<String>) -> Self {
        if let Some(watch) = &mut self.watch {
            watch.password = Some(password.into());
        }
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

    /// How long making a connection may take, signing in included; default 5 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// The server as errors and logs name it: host and port, the socket's path, or what the sentinels
    /// call it.
    pub(crate) fn address(&self) -> String {
        match &self.watch {
            Some(watch) => watch.to_string(),
            None => self.server.addr().to_string(),
        }
    }

    pub(crate) fn addr(&self) -> &ConnectionAddr {
        self.server.addr()
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

    /// The same for the server at `host`, without sentinels.
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
        options
    }

    /// The same for one of its sentinels: they have no databases, and users of their own.
    pub(crate) fn at_sentinel(&self, watch: &Watch, host: &str, port: u16) -> Self {
        let mut options = self.at(host, port);
        let mut redis = redis::RedisConnectionInfo::default();
        if let Some(username) = &watch.username {
            redis = redis.set_username(username);
        }
        if let Some(password) = &watch.password {
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
            .field("database", &redis.db())
            .field("username", &redis.username().map(|_| "…"))
            .field("password", &redis.password().map(|_| "…"))
            .field("prefix", &self.prefix)
            .field("connect_timeout", &self.connect_timeout)
            .field("replicas", &self.replicas)
            .finish_non_exhaustive()
    }
}

pub(crate) fn invalid(reason: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("this Redis URL cannot be used: {reason}"),
    )
}
