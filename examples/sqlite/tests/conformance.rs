//! The suite on locks in a SQLite database.

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Result};
use sqlite_locks::Sqlite;
use tempfile::TempDir;

#[derive(Debug, Default)]
struct InFolder {
    folder: OnceLock<TempDir>,
}

#[async_trait]
impl Harness for InFolder {
    async fn start(&self) -> Result<Store, Missing> {
        // Whatever `connect` needs to find the store: a URL, a path, nothing.
        let new = || tempfile::tempdir().expect("a temporary folder");
        let path = self.folder.get_or_init(new).path().join("locks.db");
        Ok(Store::new(path.to_string_lossy())
            .with_description(format!("SQLite {}", rusqlite::version()))
            // Each grant waits for the disk, which may take its time on a busy machine.
            .with_ttl(Duration::from_secs(1))
            .with_processes())
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        Ok(Box::new(Sqlite::open(address)?))
    }
}

fn main() -> ExitCode {
    leasehold_conformance::main(InFolder::default())
}
