use std::future::pending;
use std::io;
use std::sync::{Arc, Once, OnceLock};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use leasehold_core::{Error, ErrorKind, Result};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use zookeeper_client::{Connector, TlsOptions};

use crate::options::Server;

/// How to speak TLS with the servers.
///
/// The client library takes the certificates, but it does not tell why a handshake failed, and goes on
/// trying. So there is a second configuration, the same, for a handshake of our own that says what is
/// wrong.
#[derive(Clone)]
pub(crate) struct Tls {
    client: TlsOptions,
    handshake: TlsConnector,
    servers: Vec<Server>,
}

/// What came of a handshake.
enum Greeting {
    /// Both sides are content.
    Accepted,
    /// One side is not, and will not be: what the user has to change.
    Refused(String),
    /// No connection, or it broke: who knows.
    Unknown,
}

impl Tls {
    /// From PEM: the authority that signed the servers' certificates, else those that the system
    /// trusts; and our own certificate and key.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if they cannot be used.
    pub(crate) fn new(
        servers: Vec<Server>,
        authority: Option<&[u8]>,
        identity: Option<(&[u8], &[u8])>,
    ) -> Result<Self> {
        // The client library panics when it meets such a host.
        if let Some((host, _)) = servers
            .iter()
            .find(|(host, _)| ServerName::try_from(host.as_str()).is_err())
        {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{host:?} is no name that a certificate could have: write the host's DNS name or address"
                ),
            ));
        }
        let mut roots = RootCertStore::empty();
        let authority = match authority {
            Some(pem) => {
                for certificate in certificates(pem, "the certificate authority")? {
                    roots
                        .add(certificate)
                        .map_err(|error| unusable("the certificate authority", &error))?;
                }
                text(pem, "the certificate authority")?.to_owned()
            }
            None => {
                // Those that cannot be read are not trusted.
                let system = rustls_native_certs::load_native_certs().certs;
                let (used, _ignored) = roots.add_parsable_certificates(system.iter().cloned());
                if used == 0 {
                    return Err(Error::new(
                        ErrorKind::Invalid,
                        "this system trusts no certificate authority: name the one that signed the \
                         certificates of the servers (with_certificate_authority)",
                    ));
                }
                system.iter().map(pem).collect()
            }
        };
        // One choice for the whole process, as rustls has it, without which the client library
        // panics where several are built in; the application's own comes first.
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| {
            if CryptoProvider::get_default().is_none() {
                // An error says that somebody else was faster, which is as good.
                let _taken = aws_lc_rs::default_provider().install_default();
            }
        });
        let mut client = TlsOptions::new()
            .with_pem_ca(&authority)
            .map_err(|error| unusable("the certificate authority", &error))?;
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                // What is wrong with a key is not said: it may quote a part of it.
                let no_key = || unusable("the client's key", &"no private key can be read from it");
                let parsed = PrivateKeyDer::from_pem_slice(key).map_err(|_error| no_key())?;
                let chain = certificates(certificate, "the client's certificate")?;
                let key = std::str::from_utf8(key).map_err(|_error| no_key())?;
                client = client
                    .with_pem_identity(text(certificate, "the client's certificate")?, key)
                    .map_err(|_error| no_key())?;
                config
                    .with_client_auth_cert(chain, parsed)
                    .map_err(|error| unusable("the client's certificate with its key", &error))?
            }
        };
        Ok(Self {
            client,
            handshake: TlsConnector::from(Arc::new(config)),
            servers,
        })
    }

    /// Has the client library use it.
    pub(crate) fn secure(&self, connector: Connector) -> Connector {
        connector.with_tls(self.client.clone())
    }

    /// Why none of the servers will ever be content with us, or we with them: what to change. Stays
    /// pending where one of them is, or where it cannot be told of all; what was said up to then is
    /// `heard`.
    ///
    /// # Cancel safety
    /// Only asks.
    pub(crate) async fn refusal(&self, heard: &OnceLock<String>) -> String {
        let mut greetings = JoinSet::new();
        for (host, port) in self.servers.clone() {
            let handshake = self.handshake.clone();
            greetings.spawn(async move { greet(&handshake, host, port).await });
        }
        let mut by_all = true;
        while let Some(greeting) = greetings.join_next().await {
            match greeting {
                // The first will do.
                Ok(Greeting::Refused(why)) => drop(heard.set(why)),
                Ok(Greeting::Accepted) => return pending().await,
                Ok(Greeting::Unknown) | Err(_) => by_all = false,
            }
        }
        match heard.get() {
            Some(why) if by_all => why.clone(),
            _ => pending().await,
        }
    }
}

/// Shakes hands with a server.
async fn greet(handshake: &TlsConnector, host: String, port: u16) -> Greeting {
    match try_greet(handshake, host, port).await {
        Ok(()) => Greeting::Accepted,
        Err(error) => match error.get_ref().and_then(|error| error.downcast_ref()) {
            Some(error) => Greeting::Refused(explain(error)),
            None => Greeting::Unknown,
        },
    }
}

async fn try_greet(handshake: &TlsConnector, host: String, port: u16) -> io::Result<()> {
    let stream = TcpStream::connect((host.as_str(), port)).await?;
    let name = ServerName::try_from(host).map_err(io::Error::other)?;
    let mut stream = handshake.connect(name, stream).await?;
    // From TLS 1.3 on the server may refuse our certificate after the handshake is done: only an
    // answer tells. Every server has one to this word, if only that it is not allowed.
    stream.write_all(b"srvr").await?;
    stream.read_u8().await.map(drop)
}

/// What to do about it.
fn explain(error: &rustls::Error) -> String {
    let advice = match error {
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "the server's certificate is for other names: write the host as it is named there",
        rustls::Error::InvalidCertificate(_) => {
            "the server's certificate is not accepted: name the authority that signed it \
             (with_certificate_authority; in a URL certificate_authority=FILE)"
        }
        rustls::Error::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::AccessDenied,
        ) => {
            "the server does not accept who we are: show a certificate that its authority signed \
             (with_client_certificate; in a URL client_certificate=FILE&client_key=FILE)"
        }
        // What a server answers that shares no version or cipher with us; and, where it asks for a
        // certificate and is shown none, may answer up to TLS 1.2 (RFC 5246, section 7.4.6).
        rustls::Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            "the server wants a certificate of us, or shares no version or cipher of TLS with us: show a \
             certificate that its authority signed (with_client_certificate; in a URL \
             client_certificate=FILE&client_key=FILE), or see to its ssl.enabledProtocols and \
             ssl.ciphersuites"
        }
        rustls::Error::InvalidMessage(_) => {
            "what answers there does not speak TLS: name the servers' secureClientPort, or begin the \
             URL with zk://"
        }
        _ => "the server and we do not agree on how to speak TLS",
    };
    format!("{advice} ({error})")
}

fn certificates(pem: &[u8], what: &str) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(unusable(what, &"there is no certificate in it")),
        Err(error) => Err(unusable(what, &error)),
    }
}

fn text<'a>(pem: &'a [u8], what: &str) -> Result<&'a str> {
    std::str::from_utf8(pem).map_err(|error| unusable(what, &error))
}

fn pem(certificate: &CertificateDer<'_>) -> String {
    format!(
        "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
        STANDARD.encode(certificate)
    )
}

fn unusable(what: &str, why: &dyn std::fmt::Display) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("{what} cannot be used, PEM is expected: {why}"),
    )
}
