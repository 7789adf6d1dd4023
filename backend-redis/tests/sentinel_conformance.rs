//! The suite on a Redis server with two replicas behind three sentinels.

mod relay;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::sentinel::SentinelGroup;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use leasehold_redis::{Redis, RedisOptions};

#[derive(Debug)]
struct Watched;

#[async_trait]
impl Harness for Watched {
    async fn start(&self) -> Result<Store, Missing> {
        let group = Arc::new(SentinelGroup::find().await?);
        // Where each server is, for the suite puts proxies in the place of `host:port`.
        let servers = group.servers().iter().map(|it| it.port());
        let servers: Vec<_> = servers.map(|it| format!("{it}=127.0.0.1:{it}")).collect();
        let address = format!("{} {}", group.url(), servers.join(" "));
        // Six servers on a machine that may be busy.
        Ok(group.store(address).with_ttl(Duration::from_secs(1)))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        let mut words = address.split(' ');
        let url = words.next().unwrap_or_default();
        let places: Vec<(&str, &str)> = words
            .filter_map(|word| word.split_once("=127.0.0.1:"))
            .collect();
        let direct = places.iter().all(|(port, place)| port == place);
        let url = match direct {
            true => url.to_owned(),
            false => relay::sentinels(url, &places).await,
        };
        // A limit that a busy machine keeps.
        let options = RedisOptions::new(url)?.with_connect_timeout(Duration::from_secs(20));
        Ok(Box::new(Redis::connect_with(options).await?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(Watched)
}
