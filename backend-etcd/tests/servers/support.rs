//! What several of the tests need.

use std::time::Duration;

use anyhow::Context as _;
use etcd_client::{Client, GetOptions, KeyValue};
use leasehold_conformance::Proxy;
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_core::{Claim, Key, Locks};
use leasehold_etcd::{Etcd, EtcdOptions};

/// What is to happen at once may take so long on a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Shortens a line of a table of tests.
macro_rules! test {
    ($name:literal, $test:path) => {
        ($name, &[], || Box::pin($test()))
    };
    ($name:literal, $programs:expr, $test:path) => {
        ($name, $programs, || Box::pin($test()))
    };
}
pub(crate) use test;

/// `members` servers as they come.
pub(crate) async fn servers(members: usize) -> anyhow::Result<EtcdCluster> {
    EtcdCluster::start(members, [""; 0]).await
}

/// A client of all members.
pub(crate) async fn etcd(servers: &EtcdCluster) -> anyhow::Result<Etcd> {
    at(&servers.endpoints()).await
}

/// A client of the members at these endpoints, separated by commas.
pub(crate) async fn at(endpoints: &str) -> anyhow::Result<Etcd> {
    Ok(Etcd::connect(endpoints.split(',')).await?)
}

/// Two ways to the first member, as endpoints: through a proxy, then directly. What is lost on the first
/// is asked again by the other.
pub(crate) async fn two_ways(servers: &EtcdCluster) -> anyhow::Result<(Proxy, String)> {
    let direct = servers.endpoint(0);
    let proxy = Proxy::start(&direct).await?;
    let both = format!("{},{direct}", proxy.address());
    Ok((proxy, both))
}

/// Options for a client of the members at these endpoints.
pub(crate) fn options(endpoints: &str) -> anyhow::Result<EtcdOptions> {
    Ok(EtcdOptions::new(endpoints.split(','))?)
}

/// A user's locks on a client of all members.
pub(crate) async fn locks(servers: &EtcdCluster, ttl: Duration) -> anyhow::Result<Locks> {
    Ok(Locks::new(etcd(servers).await?).with_ttl(ttl))
}

/// The client library alone, to look behind the scenes.
pub(crate) async fn raw(endpoint: &str) -> anyhow::Result<Client> {
    Ok(Client::connect([endpoint], None).await?)
}

/// A claim that does not wait.
pub(crate) fn claim(key: &str, ttl: Duration) -> anyhow::Result<Claim> {
    Ok(Claim::new(Key::new(key)?, ttl)?)
}

/// A claim that waits as long as it takes.
pub(crate) fn waiting(key: &str, ttl: Duration) -> anyhow::Result<Claim> {
    let mut claim = claim(key, ttl)?;
    claim.wait = None;
    Ok(claim)
}

/// Everything below a prefix, oldest first.
pub(crate) async fn below(client: &Client, prefix: &str) -> anyhow::Result<Vec<KeyValue>> {
    let options = GetOptions::new().with_prefix();
    let mut found = client.kv_client().get(prefix, Some(options)).await?;
    let mut keys = found.take_kvs();
    keys.sort_by_key(KeyValue::create_revision);
    Ok(keys)
}

/// Waits until so many stand below a prefix.
pub(crate) async fn until_below(client: &Client, prefix: &str, count: usize) -> anyhow::Result<()> {
    let looking = async {
        while below(client, prefix).await?.len() != count {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    within(SOON, &format!("{count} keys below {prefix}"), looking).await?
}

/// Waits for something that is to happen within `limit`.
pub(crate) async fn within<F: Future>(
    limit: Duration,
    what: &str,
    event: F,
) -> anyhow::Result<F::Output> {
    let waited = tokio::time::timeout(limit, event).await;
    waited.with_context(|| format!("not within {limit:?}: {what}"))
}
