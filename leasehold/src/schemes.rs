//! The kinds of stores that a URL can name. One more is one more file and one more line here.

mod etcd;
mod file;
mod memory;
mod postgres;
mod redis;
mod redlock;
mod zk;

use std::pin::Pin;

use leasehold_core::{Backend, Result};

use crate::setting::Setting;

pub(crate) const SCHEMES: &[Scheme] = &[
    memory::SCHEME,
    file::SCHEME,
    redis::PLAIN,
    redis::TLS,
    redis::SENTINEL,
    redis::SENTINEL_TLS,
    redis::CLUSTER,
    redis::CLUSTER_TLS,
    redlock::SCHEME,
    etcd::PLAIN,
    etcd::TLS,
    zk::PLAIN,
    zk::TLS,
    postgres::SHORT,
    postgres::LONG,
];

/// One kind of store.
pub(crate) struct Scheme {
    /// What the URL begins with.
    pub(crate) name: &'static str,
    /// How such a URL looks.
    pub(crate) form: &'static str,
    /// The options that only this store has.
    pub(crate) options: &'static [&'static str],
    /// The cargo feature that it needs.
    pub(crate) feature: &'static str,
    /// Opens it; `None` if the feature is off.
    pub(crate) open: Option<fn(Address) -> Opening>,
}

pub(crate) type Opening = Pin<Box<dyn Future<Output = Result<Box<dyn Backend>>> + Send>>;

/// What a URL says to a store.
pub(crate) struct Address {
    /// The URL without its options, as it was given. It may contain a password: no error shows it.
    pub(crate) text: String,
    /// Those of its options that are the store's own.
    #[allow(
        dead_code,
        reason = "a build may have no store with options of its own"
    )]
    pub(crate) settings: Vec<Setting>,
}

impl Address {
    /// The store's own option of this name, if it is given.
    #[allow(
        dead_code,
        reason = "a build may have no store with options of its own"
    )]
    pub(crate) fn setting(&self, name: &str) -> Option<&Setting> {
        self.settings.iter().find(|setting| setting.name() == name)
    }

    /// What its options about certificates name. Whether they go together is seen before any file is
    /// read.
    #[cfg(any(feature = "redis", feature = "etcd", feature = "zk"))]
    fn certificates(&self) -> Result<Certificates> {
        let own = (
            self.setting("client_certificate"),
            self.setting("client_key"),
        );
        let own = match own {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                return Err(crate::setting::invalid(
                    "a client shows its certificate with its key: give both client_certificate and \
                     client_key",
                ));
            }
        };
        let authority = self.setting("certificate_authority");
        Ok(Certificates {
            authority: authority.map(Setting::read).transpose()?,
            client: match own {
                Some((certificate, key)) => Some((certificate.read()?, key.read()?)),
                None => None,
            },
        })
    }
}

/// PEM files: who must have signed the server's certificate, and the client's own with its key.
#[cfg(any(feature = "redis", feature = "etcd", feature = "zk"))]
struct Certificates {
    authority: Option<Vec<u8>>,
    client: Option<(Vec<u8>, Vec<u8>)>,
}
