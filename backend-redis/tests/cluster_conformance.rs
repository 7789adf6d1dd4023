//! The suite on a Redis Cluster of six nodes.
//!
//! F6 is not owed: each lock is decided by one server, whose replica may lack what was granted last. What
//! a killed master does to locks is in `cluster.rs`.

use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::redis_cluster::RedisCluster;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Error, ErrorKind, Result};
use leasehold_redis::{Redis, RedisOptions};

#[derive(Debug)]
struct SixNodes;

#[async_trait]
impl Harness for SixNodes {
    async fn start(&self) -> Result<Store, Missing> {
        let cluster = RedisCluster::find().await?;
        // Six servers on a machine that may be busy.
        Ok(cluster.store().with_ttl(Duration::from_secs(1)))
    }

    /// Nodes announce their own ports, and each client of the suite has its own way to them.
    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        let malformed = || Error::new(ErrorKind::Invalid, "expected a URL, '|' and ports");
        let (url, announced) = address.split_once('|').ok_or_else(malformed)?;
        let mut options = RedisOptions::new(url)?;
        let reached = url.rsplit('/').next().unwrap_or_default().split(',');
        for (announced, reached) in announced.split(',').zip(reached) {
            let announced = announced.parse().map_err(|_| malformed())?;
            let (host, port) = reached.rsplit_once(':').ok_or_else(malformed)?;
            let port = port.parse().map_err(|_| malformed())?;
            options = options.with_node_address(("127.0.0.1", announced), (host, port));
        }
        Ok(Box::new(Redis::connect_with(options).await?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(SixNodes)
}
