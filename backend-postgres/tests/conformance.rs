//! The suite on a PostgreSQL server.

use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::{Missing, postgres};
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use leasehold_postgres::{Postgres, PostgresOptions};

#[derive(Debug)]
struct OneServer;

#[async_trait]
impl Harness for OneServer {
    async fn start(&self) -> Result<Store, Missing> {
        // A session is a process of the server's, which takes its time to start on a busy machine.
        let ttl = Duration::from_secs(1);
        Ok(postgres::Postgres::find().await?.store().with_ttl(ttl))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        let options = PostgresOptions::new(address)?.with_connect_timeout(Duration::from_secs(20));
        Ok(Box::new(Postgres::connect_with(options).await?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(OneServer)
}
