use super::Scheme;
#[cfg(feature = "zk")]
use super::{Address, Opening};

pub(super) const PLAIN: Scheme = Scheme {
    name: "zk",
    form: "zk://host,host",
    options: &["prefix", "connect_timeout", "creator_only"],
    feature: "zk",
    #[cfg(feature = "zk")]
    open: Some(open),
    #[cfg(not(feature = "zk"))]
    open: None,
};

/// Without the feature `zk-tls` it is the store that says so.
pub(super) const TLS: Scheme = Scheme {
    name: "zks",
    form: "zks://host,host",
    options: &[
        "prefix",
        "connect_timeout",
        "creator_only",
        "certificate_authority",
        "client_certificate",
        "client_key",
    ],
    feature: "zk-tls",
    ..PLAIN
};

#[cfg(feature = "zk")]
fn open(address: Address) -> Opening {
    Box::pin(async move {
        let options = opening::options(&address)?;
        let zookeeper = leasehold_zk::ZooKeeper::connect_with(options).await?;
        Ok(Box::new(zookeeper) as Box<dyn leasehold_core::Backend>)
    })
}

#[cfg(feature = "zk")]
mod opening {
    use leasehold_core::Result;
    use leasehold_zk::ZooKeeperOptions;

    use crate::schemes::Address;

    /// The names are those of [`ZooKeeperOptions`], and the values too, but that certificates are
    /// files.
    pub(super) fn options(address: &Address) -> Result<ZooKeeperOptions> {
        let mut options = ZooKeeperOptions::new(&address.text)?;
        if let Some(prefix) = address.setting("prefix") {
            options = options.with_prefix(prefix.text());
        }
        if let Some(timeout) = address.setting("connect_timeout") {
            options = options.with_connect_timeout(timeout.limit()?);
        }
        if let Some(only) = address.setting("creator_only") {
            options = options.with_creator_only(match only.text() {
                "true" => true,
                "false" => false,
                _ => return Err(only.wrong("is neither true nor false")),
            });
        }
        let certificates = address.certificates()?;
        if let Some(authority) = certificates.authority {
            options = options.with_certificate_authority(authority);
        }
        if let Some((certificate, key)) = certificates.client {
            options = options.with_client_certificate(certificate, key);
        }
        Ok(options)
    }
}
