//! The suite on the file backend.

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use leasehold_file::Folder;
use tempfile::TempDir;

#[derive(Debug, Default)]
struct InFolder {
    /// Made by the first process alone.
    folder: OnceLock<TempDir>,
}

#[async_trait]
impl Harness for InFolder {
    async fn start(&self) -> Result<Store, Missing> {
        let folder = self
            .folder
            .get_or_init(|| tempfile::tempdir().expect("a temporary folder"));
        // The first grant of a key waits for the disk, which may take its time on a busy machine.
        let ttl = Duration::from_secs(1);
        Ok(Store::new(folder.path().to_string_lossy())
            .with_ttl(ttl)
            .with_processes())
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(Folder::open(address)?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(InFolder::default())
}
