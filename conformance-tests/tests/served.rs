//! The suite on a small server of its own, with processes, proxies and restarts.

mod server;

use std::process::ExitCode;
use std::sync::Arc;

use leasehold_core::Memory;
use server::{Flaw, Served};

fn main() -> ExitCode {
    if let Some(code) = server::be_server(|_| Arc::new(Memory::new())) {
        return code;
    }
    leasehold_conformance::main(Served(Flaw::None))
}
