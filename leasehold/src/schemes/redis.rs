use super::Scheme;
#[cfg(feature = "redis")]
use super::{Address, Opening};

pub(super) const PLAIN: Scheme = Scheme {
    name: "redis",
    form: "redis://host",
    options: &["prefix", "connect_timeout", "replicas"],
    feature: "redis",
    #[cfg(feature = "redis")]
    open: Some(open),
    #[cfg(not(feature = "redis"))]
    open: None,
};

pub(super) const TLS: Scheme = Scheme {
    name: "rediss",
    form: "rediss://host",
    options: &[
        "prefix",
        "connect_timeout",
        "replicas",
        "certificate_authority",
        "client_certificate",
        "client_key",
    ],
    ..PLAIN
};

pub(super) const SENTINEL: Scheme = Scheme {
    name: "redis+sentinel",
    form: "redis+sentinel://host,host/master",
    options: &[
        "prefix",
        "connect_timeout",
        "replicas",
        "sentinel_username",
        "sentinel_password",
    ],
    ..PLAIN
};

pub(super) const SENTINEL_TLS: Scheme = Scheme {
    name: "rediss+sentinel",
    form: "rediss+sentinel://host,host/master",
    options: &[
        "prefix",
        "connect_timeout",
        "replicas",
        "sentinel_username",
        "sentinel_password",
        "certificate_authority",
        "client_certificate",
        "client_key",
    ],
    ..PLAIN
};

pub(super) const CLUSTER: Scheme = Scheme {
    name: "redis+cluster",
    form: "redis+cluster://host,host",
    ..PLAIN
};

pub(super) const CLUSTER_TLS: Scheme = Scheme {
    name: "rediss+cluster",
    form: "rediss+cluster://host,host",
    ..TLS
};

#[cfg(feature = "redis")]
fn open(address: Address) -> Opening {
    Box::pin(async move {
        let options = opening::options(&address)?;
        let redis = leasehold_redis::Redis::connect_with(options).await?;
        Ok(Box::new(redis) as Box<dyn leasehold_core::Backend>)
    })
}

#[cfg(feature = "redis")]
mod opening {
    use leasehold_core::Result;
    use leasehold_redis::RedisOptions;

    use crate::schemes::Address;

    /// The names are those of [`RedisOptions`], and the values too, but that certificates are files.
    pub(super) fn options(address: &Address) -> Result<RedisOptions> {
        let mut options = RedisOptions::new(&address.text)?;
        if let Some(prefix) = address.setting("prefix") {
            options = options.with_prefix(prefix.text());
        }
        if let Some(timeout) = address.setting("connect_timeout") {
            options = options.with_connect_timeout(timeout.limit()?);
        }
        if let Some(replicas) = address.setting("replicas") {
            let number = replicas.text().parse();
            let number = number.map_err(|_| replicas.wrong("is no number of replicas, as in 1"))?;
            options = options.with_replicas(number);
        }
        if let Some(username) = address.setting("sentinel_username") {
            options = options.with_sentinel_username(username.text());
        }
        if let Some(password) = address.setting("sentinel_password") {
            options = options.with_sentinel_password(password.text());
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
