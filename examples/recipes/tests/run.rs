//! Each program on stores that several processes can reach.
#![allow(clippy::unwrap_used, reason = "a test fails by it")]

use std::process::{Command, Output};

use leasehold_conformance::fixtures::redis::Redis;

const PROGRAMS: [(&str, &str); 4] = [
    (env!("CARGO_BIN_EXE_scheduled_job"), "sent it"),
    (env!("CARGO_BIN_EXE_payment_callback"), "shipped: 1"),
    (
        env!("CARGO_BIN_EXE_flash_sale"),
        "10 orders for 10 articles",
    ),
    (env!("CARGO_BIN_EXE_leader"), "has led"),
];

fn each_runs_on(url: &str) {
    for (program, says) in PROGRAMS {
        let Output {
            status,
            stdout,
            stderr,
        } = Command::new(program)
            .env("LEASEHOLD_URL", url)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&stdout);
        let complained = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{program}: {said}{complained}");
        assert!(said.contains(says), "{program}: {said}");
    }
}

#[test]
fn in_memory() {
    each_runs_on("memory:");
}

#[test]
fn on_files() {
    let folder = tempfile::tempdir().unwrap();
    each_runs_on(&format!("file:{}", folder.path().display()));
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread")]
async fn on_redis() {
    match Redis::find().await {
        Ok(server) => {
            let url = server.url().to_owned();
            tokio::task::spawn_blocking(move || each_runs_on(&url))
                .await
                .unwrap();
        }
        Err(missing) => missing.skip(),
    }
}
