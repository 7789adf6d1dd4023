//! The suite on a backend of somebody else's.

mod table;

use std::process::ExitCode;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use table::Table;

#[derive(Debug, Default)]
struct MyHarness {
    table: Table,
}

#[async_trait]
impl Harness for MyHarness {
    async fn start(&self) -> Result<Store, Missing> {
        // Whatever `connect` needs to find the store: a URL, a folder, nothing.
        Ok(Store::new("in this process"))
    }

    async fn connect(&self, _address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(self.table.clone()))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(MyHarness::default())
}
