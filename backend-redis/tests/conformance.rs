//! The suite on a Redis server.

use std::process::ExitCode;

use async_trait::async_trait;
use leasehold_conformance::fixtures::{Missing, redis};
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use leasehold_redis::Redis;

#[derive(Debug)]
struct OneServer;

#[async_trait]
impl Harness for OneServer {
    async fn start(&self) -> Result<Store, Missing> {
        Ok(redis::Redis::find().await?.store())
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(Redis::connect(address).await?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(OneServer)
}
