use super::Scheme;
#[cfg(feature = "zk")]
use super::{Address, Opening};

pub(super) const SCHEME: Scheme = Scheme {
    name: "zk",
    form: "zk://host,host",
    options: &["prefix", "connect_timeout", "creator_only"],
    feature: "zk",
    #[cfg(feature = "zk")]
    open: Some(open),
    #[cfg(not(feature = "zk"))]
    open: None,
};

/// The names are those of `ZooKeeperOptions`, and the values too.
#[cfg(feature = "zk")]
fn open(address: Address) -> Opening {
    use leasehold_zk::{ZooKeeper, ZooKeeperOptions};

    Box::pin(async move {
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
        let zookeeper = ZooKeeper::connect_with(options).await?;
        Ok(leasehold_core::Locks::new(zookeeper))
    })
}
