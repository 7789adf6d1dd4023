use std::fmt;
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use leasehold_core::{Error, ErrorKind, Result};

/// Where the cluster is and how to talk to it.
///
/// Plain data: start from the endpoints and change what differs. Nothing is sent before
/// [`Etcd::connect_with`](crate::Etcd::connect_with). Neither `Debug` nor any error shows the
/// username, the password or the private key.
///
/// ```
/// use leasehold_etcd::EtcdOptions;
///
/// let options = EtcdOptions::new(["etcd-1:2379", "etcd-2:2379", "etcd-3:2379"])?
///     .with_prefix("shop/locks/")
///     .with_user("shop", "secret");
/// assert!(!format!("{options:?}").contains("secret"));
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone)]
pub struct EtcdOptions {
    endpoints: Vec<Endpoint>,
    pub(crate) prefix: String,
    pub(crate) connect_timeout: Duration,
    user: Option<(String, String)>,
    authority: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

/// One member of the cluster.
#[derive(Debug, Clone)]
struct Endpoint {
    scheme: Option<Scheme>,
    /// Host and port.
    address: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Http,
    Https,
}

impl EtcdOptions {
    /// The members of one cluster, each `host:port`, `http://host:port` or `https://host:port`; any
    /// of them will do, more make it bear the loss of one. Without a scheme it is TLS if certificates
    /// are given.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if there is none, or one is not of this form.
    pub fn new(endpoints: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self> {
        let endpoints = (1..)
            .zip(endpoints)
            .map(|(number, endpoint)| Endpoint::read(number, endpoint.as_ref()))
            .collect::<Result<Vec<_>>>()?;
        if endpoints.is_empty() {
            return Err(invalid(
                "there is none: give at least one, as in localhost:2379",
            ));
        }
        Ok(Self {
            endpoints,
            prefix: "locks/".into(),
            connect_timeout: Duration::from_secs(5),
            user: None,
            authority: None,
            identity: None,
        })
    }

    /// What all keys begin with; default `locks/`. The lock `order:42` is then the one that
    /// `etcdctl lock locks/order:42` takes.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The user to sign in as, where the cluster has authentication turned on.
    #[must_use]
    pub fn with_user(mut self, name: impl Into<String>, password: impl Into<String>) -> Self {
        self.user = Some((name.into(), password.into()));
        self
    }

    /// The certificate authority that must have signed the servers' certificates, as PEM, in place of
    /// those that the system trusts.
    #[must_use]
    pub fn with_certificate_authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authority = Some(pem.into());
        self
    }

    /// The certificate and private key that show the servers who we are, as PEM.
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate_pem: impl Into<Vec<u8>>,
        key_pem: impl Into<Vec<u8>>,
    ) -> Self {
        self.identity = Some((certificate_pem.into(), key_pem.into()));
        self
    }

    /// How long connecting may take, signing in included; default 5 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Checks what can be checked before anything is sent.
    pub(crate) fn check(&self) -> Result<()> {
        let plain = |endpoint: &&Endpoint| endpoint.scheme == Some(Scheme::Http);
        if self.has_certificates()
            && let Some(endpoint) = self.endpoints.iter().find(plain)
        {
            return Err(invalid(&format!(
                "certificates are given but {} is not to use TLS: begin it with https://",
                endpoint.address
            )));
        }
        for pem in self
            .authority
            .iter()
            .chain(self.identity.iter().flat_map(|(c, k)| [c, k]))
        {
            if !pem.windows(10).any(|part| part == b"-----BEGIN") {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    "a certificate or key cannot be read: PEM is expected",
                ));
            }
        }
        if self.user.as_ref().is_some_and(|(name, _)| name.is_empty()) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the user name is empty: leave it out to be nobody",
            ));
        }
        Ok(())
    }

    /// The members: how each is shown, and the URL to connect to.
    pub(crate) fn servers(&self) -> impl Iterator<Item = (String, String)> + '_ {
        self.endpoints.iter().map(|endpoint| {
            let scheme = match endpoint.scheme {
                Some(Scheme::Https) => "https",
                None if self.has_certificates() => "https",
                _ => "http",
            };
            let url = format!("{scheme}://{}", endpoint.address);
            (endpoint.address.clone(), url)
        })
    }

    /// How the client library connects to the server at `url`.
    pub(crate) fn client(&self, url: &str) -> ConnectOptions {
        // etcd closes connections that ping more often than every 5 s.
        const PING: Duration = Duration::from_secs(10);
        const PONG: Duration = Duration::from_secs(5);
        let mut options = ConnectOptions::new()
            .with_connect_timeout(self.connect_timeout)
            .with_keep_alive(PING, PONG)
            .with_keep_alive_while_idle(false)
            // A member that is cut off from the leader says so at once, and ends its watches.
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let Some((name, password)) = &self.user {
            options = options.with_user(name, password);
        }
        if url.starts_with("https") {
            let mut tls = TlsOptions::new();
            tls = match &self.authority {
                Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
                None => tls.with_native_roots(),
            };
            if let Some((certificate, key)) = &self.identity {
                tls = tls.identity(Identity::from_pem(certificate, key));
            }
            options = options.with_tls(tls);
        }
        options
    }

    /// What to look at if no server answers.
    pub(crate) fn tls_hint(&self) -> &'static str {
        let secure = self.servers().any(|(_, url)| url.starts_with("https"));
        match (secure, &self.identity) {
            (false, _) => "if TLS is spoken there, begin the endpoint with https://",
            (true, None) => {
                "if a certificate of ours is wanted there, give one (with_client_certificate)"
            }
            (true, Some(_)) => {
                "the certificate that we show (with_client_certificate) must be signed by the authority \
                 that the servers trust"
            }
        }
    }

    pub(crate) fn has_user(&self) -> bool {
        self.user.is_some()
    }

    fn has_certificates(&self) -> bool {
        self.authority.is_some() || self.identity.is_some()
    }
}

impl Endpoint {
    /// What is wrong is never quoted: it may be a part of a password.
    fn read(number: usize, text: &str) -> Result<Self> {
        let (scheme, address) = match text.split_once("://") {
            Some(("http", address)) => (Some(Scheme::Http), address),
            Some(("https", address)) => (Some(Scheme::Https), address),
            Some(_) => {
                return Err(invalid(&format!(
                    "number {number} begins with neither http:// nor https://, nor directly with the host"
                )));
            }
            None => (None, text),
        };
        if address.contains('@') {
            return Err(invalid(&format!(
                "number {number} has a user in it: user name and password are options of their own"
            )));
        }
        let address = address.strip_suffix('/').unwrap_or(address);
        let port = address.rsplit_once(':').filter(|(host, _)| {
            let bracketed = host.starts_with('[') && host.ends_with(']');
            !host.is_empty() && (bracketed || !host.contains([':', '/', '?', '#', ' ']))
        });
        if port.is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
            return Err(invalid(&format!(
                "number {number} is not host:port, as in localhost:2379 or [::1]:2379"
            )));
        }
        Ok(Self {
            scheme,
            address: address.into(),
        })
    }
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = |given: bool| given.then_some("…");
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("connect_timeout", &self.connect_timeout)
            .field("user", &hidden(self.user.is_some()))
            .field("certificate_authority", &hidden(self.authority.is_some()))
            .field("client_certificate", &hidden(self.identity.is_some()))
            .finish()
    }
}

fn invalid(reason: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("the etcd endpoints cannot be used: {reason}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_and_wrong_ones_refused() {
        for good in [
            "h:1",
            "http://h:2379/",
            "https://h.example:1",
            "[::1]:2379",
            "127.0.0.1:9",
        ] {
            assert!(EtcdOptions::new([good]).is_ok(), "{good}");
        }
        for bad in [
            "",
            "h",
            "h:",
            ":1",
            "h:99999",
            "etcd://h:1",
            "h:1/path",
            "::1:5",
            "http://",
        ] {
            let error = EtcdOptions::new([bad]).expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
        assert!(EtcdOptions::new(Vec::<String>::new()).is_err());
        let error = EtcdOptions::new(["http://me:secret@h:1"]).expect_err("credentials");
        assert!(!error.to_string().contains("secret"));
    }

    #[test]
    fn certificates_ask_for_tls() {
        let pem = "-----BEGIN CERTIFICATE-----";
        let url = |options: &EtcdOptions| options.servers().next().map(|(_, url)| url);
        let options = EtcdOptions::new(["h:1"]).unwrap();
        assert_eq!(url(&options).as_deref(), Some("http://h:1"));
        let options = options.with_certificate_authority(pem);
        assert_eq!(url(&options).as_deref(), Some("https://h:1"));
        options.check().unwrap();
        let plain = EtcdOptions::new(["http://h:1"]).unwrap();
        assert!(plain.with_certificate_authority(pem).check().is_err());
        let no_pem = EtcdOptions::new(["h:1"]).unwrap();
        assert!(no_pem.with_client_certificate("x", "y").check().is_err());
    }
}
