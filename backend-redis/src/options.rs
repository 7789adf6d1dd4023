use std::fmt;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use redis::{ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsCertificates};

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
    certificates: TlsCertificates,
}

impl RedisOptions {
    /// Reads a URL: `redis://[user[:password]@]host[:port][/database]`, `rediss://…` for TLS, or
    /// `unix:///path/to/socket`; `valkey` and `valkeys` mean the same as `redis` and `rediss`. The
    /// port is 6379 if not given, an IPv6 address stands in brackets, and whatever has a meaning in a
    /// URL is percent-encoded in the username and the password.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the URL is not of this form.
    pub fn new(url: impl AsRef<str>) -> Result<Self> {
        let url = url.as_ref();
        let parsed = redis::parse_redis_url(url).ok_or_else(|| {
            invalid(
                "begin with redis://, rediss:// (TLS) or unix://, as in redis://localhost:6379/0",
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
            certificates: TlsCertificates {
                client_tls: None,
                root_cert: None,
            },
        })
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

    /// The server as errors and logs name it: host and port, or the socket's path.
    pub(crate) fn address(&self) -> String {
        self.server.addr().to_string()
    }

    /// Checks the certificates and makes the client that opens connections.
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
            .finish_non_exhaustive()
    }
}

fn invalid(reason: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("this Redis URL cannot be used: {reason}"),
    )
}
