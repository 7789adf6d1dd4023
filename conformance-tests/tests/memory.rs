//! The suite on the memory backend.

use std::process::ExitCode;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Memory, Result};

#[derive(Debug)]
struct InMemory(Memory);

#[async_trait]
impl Harness for InMemory {
    async fn start(&self) -> Result<Store, Missing> {
        Ok(Store::new("memory"))
    }

    async fn connect(&self, _address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(self.0.clone()))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(InMemory(Memory::new()))
}
