//! A store that is not there: its rules are ignored, or fail where it is required.

use std::process::{Command, ExitCode, Output};

use async_trait::async_trait;
use leasehold_conformance::fixtures::{Missing, REQUIRE};
use leasehold_conformance::{Harness, Store};
use leasehold_core::{Backend, Error, ErrorKind, Result};
use libtest_mimic::{Arguments, Failed, Trial};

/// Set where this binary is to be the suite, and not its test.
const SUITE: &str = "LEASEHOLD_TEST_MISSING";

#[derive(Debug)]
struct Nowhere;

#[async_trait]
impl Harness for Nowhere {
    async fn start(&self) -> Result<Store, Missing> {
        Err(Missing::new("nowhere", "no such server was ever built"))
    }

    async fn connect(&self, _address: &str) -> Result<Box<dyn Backend>> {
        Err(Error::new(
            ErrorKind::Unavailable,
            "there is nothing to connect to",
        ))
    }
}

fn main() -> ExitCode {
    if std::env::var_os(SUITE).is_some() {
        return leasehold_conformance::main(Nowhere);
    }
    let tests = vec![
        Trial::test("it is ignored with the reason", ignored_with_the_reason),
        Trial::test("it fails where it is required", fails_where_required),
        Trial::test("others may be required", others_may_be_required),
    ];
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn ignored_with_the_reason() -> std::result::Result<(), Failed> {
    let output = suite("")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let reason = "ignored (nowhere is missing: no such server was ever built)";
    if !output.status.success() || !text.contains(reason) || !text.contains("0 failed") {
        return Err(format!("{output:?}").into());
    }
    Ok(())
}

fn fails_where_required() -> std::result::Result<(), Failed> {
    let output = suite("redis, nowhere")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if output.status.success() || !text.contains("the store is there") {
        return Err(format!("{output:?}").into());
    }
    Ok(())
}

fn others_may_be_required() -> std::result::Result<(), Failed> {
    let output = suite("redis,nowhere-else")?;
    if !output.status.success() {
        return Err(format!("{output:?}").into());
    }
    Ok(())
}

fn suite(required: &str) -> std::io::Result<Output> {
    Command::new(std::env::current_exe()?)
        .env(SUITE, "1")
        .env(REQUIRE, required)
        .output()
}
