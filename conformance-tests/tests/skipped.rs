//! A plain test without its server: it says that it was skipped, or fails where the server is required.

use std::process::{Command, Output};

use leasehold_conformance::fixtures::{Missing, REQUIRE};
use leasehold_conformance::skip_without;

/// Set where this binary is to run only the test that is skipped.
const SKIPPING: &str = "LEASEHOLD_TEST_SKIPPED";

#[test]
fn on_no_server() {
    if std::env::var_os(SKIPPING).is_none() {
        return;
    }
    skip_without!(Some(Missing::new(
        "nowhere",
        "no such server was ever built"
    )));
    unreachable!("it is skipped");
}

#[test]
fn a_skipped_test_says_so() {
    let output = run("redis");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr);
    let line = "on_no_server: skipped, nowhere is missing: no such server was ever built\n";
    assert!(text.contains(line), "{output:?}");
}

#[test]
fn it_fails_where_the_server_is_required() {
    let output = run("redis,nowhere");
    assert!(!output.status.success(), "{output:?}");
}

/// Without `--nocapture`, as it is run by everybody.
fn run(required: &str) -> Output {
    Command::new(std::env::current_exe().expect("this binary"))
        .args(["on_no_server", "--exact", "--test-threads=2"])
        .env(SKIPPING, "1")
        .env(REQUIRE, required)
        .output()
        .expect("it runs")
}
