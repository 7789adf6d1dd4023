//! The suite on ZooKeeper.

use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::{Missing, zookeeper};
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use leasehold_zk::ZooKeeper;

#[derive(Debug)]
struct Servers;

#[async_trait]
impl Harness for Servers {
    async fn start(&self) -> Result<Store, Missing> {
        let servers = zookeeper::ZooKeeper::find(1).await?;
        // A server that has just been started is slow, on a busy machine for seconds.
        Ok(servers.store().with_ttl(Duration::from_secs(4)))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(ZooKeeper::connect(address).await?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(Servers)
}
