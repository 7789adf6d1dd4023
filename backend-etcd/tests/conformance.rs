//! The suite on etcd.

use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::etcd::Etcd as Fixture;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use leasehold_etcd::Etcd;

#[derive(Debug)]
struct OneServer;

#[async_trait]
impl Harness for OneServer {
    async fn start(&self) -> Result<Store, Missing> {
        // etcd's shortest lease is 2 s, and a restart or a change of leader takes a second or two.
        let ttl = Duration::from_secs(3);
        Ok(Fixture::find(1).await?.store().with_ttl(ttl))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(Etcd::connect(address.split(',')).await?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(OneServer)
}
