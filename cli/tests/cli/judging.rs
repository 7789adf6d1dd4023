//! `choose` and `doctor`.

use std::fs;
use std::path::PathBuf;
use std::process::Output;
use std::time::Instant;

use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::etcd::Etcd;
use leasehold_conformance::fixtures::postgres::{PgBouncer, PostgresServer};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::support::{Home, LIMIT, RedisServer, stderr, stdout};

fn json(output: &Output) -> Value {
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "{text}{}", stderr(output));
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn choose_shows_every_kind_of_store() {
    let home = Home::new();
    let output = home.leasehold("choose").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for part in [
        "Memory",
        "File  file:/folder",
        "survives the loss of a node",
        "first come, first served",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "no colours in a pipe: {text:?}");
}

pub(crate) fn choose_says_which_do_what_is_needed() {
    let home = Home::new();
    let folder = format!("file:{}", home.path("locks").display());
    let asked = |needs: &str| {
        let output = home
            .leasehold(&format!("choose {needs} --json {folder} memory:"))
            .output()
            .unwrap();
        (output.status.code(), json(&output))
    };
    let (code, said) = asked("--order --push --expiry --ttl 10ms");
    assert_eq!(code, Some(0), "memory does");
    let [file, memory] = [&said["stores"][0], &said["stores"][1]];
    assert_eq!(file["store"], folder);
    assert_eq!(file["url"], folder);
    assert_eq!(file["does_all"], false);
    assert_eq!(file["needs"][0]["need"], "order");
    assert_eq!(file["needs"][0]["answer"], "no");
    assert_eq!(file["guarantees"]["expiry"], "Process");
    assert_eq!(memory["does_all"], true);
    assert_eq!(memory["error"], Value::Null);
    assert_eq!(memory["needs"].as_array().unwrap().len(), 4);
    for needs in ["--node-loss", "--consensus", "--durable-tokens --order"] {
        assert_eq!(asked(needs).0, Some(1), "{needs}: none does");
    }

    let output = home
        .leasehold("choose --order memory:?tll=1s")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(117));
    let away = "choose --order --json redis://me:hunter2@127.0.0.1:1";
    let output = home.leasehold(away).output().unwrap();
    assert_eq!(output.status.code(), Some(118), "it may do later");
    let said = stdout(&output) + &stderr(&output);
    assert!(
        said.contains("127.0.0.1:1") && !said.contains("hunter2"),
        "{said}"
    );
}

pub(crate) fn doctor_has_nothing_against_the_default_store() {
    let home = Home::new();
    let output = home.leasehold("doctor").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(
        text.contains("nothing to warn of") && text.contains("Process"),
        "{text}"
    );
    let output = home
        .leasehold("doctor --json --url memory:?ttl=1s")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(json(&output)["severity"], Value::Null);
    let output = home
        .leasehold("doctor --url memory:?tll=1s")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(117));
}

/// The server of the tests keeps nothing on disk.
pub(crate) fn doctor_examines_redis() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let output = home.leasehold("doctor --json").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let said = json(&output);
    assert_eq!(said["severity"], "warning");
    assert_eq!(said["findings"][0]["id"], "no-persistence");
    assert!(
        said["findings"][0]["advice"]
            .as_str()
            .unwrap()
            .contains("appendonly")
    );
    let examined = &said["servers"][0];
    assert!(examined["version"].as_str().unwrap().contains('.'));
    assert!(examined["round_trip_us"].as_u64().is_some());
    assert!(examined["clock_ahead_ms"].as_i64().is_some());
    assert_eq!(said["guarantees"]["node_losses"], 0);
    let output = home.leasehold("doctor").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    for part in [
        "round trip",
        "clock",
        "warning: ",
        "appendonly",
        "SingleNode",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

pub(crate) fn doctor_says_why_a_store_is_not_reached() {
    let home = Home::new();
    let output = home
        .leasehold("doctor --json --url redis://me:hunter2@127.0.0.1:1")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(118));
    let said = json(&output);
    assert_eq!(said["store"], "redis://127.0.0.1:1");
    assert!(
        said["error"].as_str().unwrap().contains("no connection"),
        "{said}"
    );
    let all = stdout(&output) + &stderr(&output);
    assert!(!all.contains("hunter2"), "{all}");
}

/// The clock that is off is this command's: a server's own cannot be turned here.
pub(crate) fn doctor_warns_of_a_clock_that_is_off() {
    let Some(library) = fake_clock() else {
        return Missing::new("libfaketime", "it is not installed").skip();
    };
    let server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let home = Home::with(&server);
    let mut doctor = home.leasehold("doctor --json");
    let doctor = doctor
        .env("LD_PRELOAD", library)
        .env("FAKETIME", "-10m")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let output = doctor.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let said = json(&output);
    assert_eq!(said["findings"][0]["id"], "clock-difference", "{said}");
    assert_eq!(said["findings"].as_array().unwrap().len(), 1, "{said}");
    let ahead = said["servers"][0]["clock_ahead_ms"].as_i64().unwrap();
    assert!((540_000..660_000).contains(&ahead), "{ahead} ms");
}

/// Debian has it in a folder for each architecture.
fn fake_clock() -> Option<PathBuf> {
    let folders = fs::read_dir("/usr/lib").ok()?.flatten();
    let mut libraries = folders.map(|it| it.path().join("faketime/libfaketime.so.1"));
    libraries.find(|it| it.exists())
}

pub(crate) fn doctor_warns_of_a_ttl_that_the_store_does_not_keep() {
    let cluster = match Runtime::new().unwrap().block_on(Etcd::find(1)) {
        Ok(cluster) => cluster,
        Err(missing) => return missing.skip(),
    };
    let home = Home::new();
    let found = |ttl: &str| {
        let url = format!("etcd://{}?ttl={ttl}", cluster.endpoints());
        let output = home.leasehold(&format!("doctor --json --url {url}"));
        let said = json(&{ output }.output().unwrap());
        let findings = said["findings"].as_array().unwrap().iter();
        let ids = findings.map(|it| it["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(found("1s"), ["too-few-members", "short-ttl"]);
    assert_eq!(found("2s"), ["too-few-members"]);
}

/// What `doctor` ends with and says of the store at this URL, in which the password is hunter2.
fn refused(url: &str) -> (Option<i32>, String) {
    let home = Home::new();
    let doctor = home.leasehold("doctor").env("LEASEHOLD_URL", url).output();
    let output = doctor.unwrap();
    let said = stdout(&output) + &stderr(&output);
    assert!(!said.contains("hunter2"), "{said}");
    (output.status.code(), said)
}

pub(crate) fn doctor_says_what_makes_redis_unusable() {
    let rights = "--user locks on >hunter2 ~lock:* &lock:* +@all -evalsha";
    let server = RedisServer::start_with(&rights.split(' ').collect::<Vec<_>>());
    let (code, said) = refused(&server.url().replace("redis://", "redis://locks:hunter2@"));
    assert_eq!(code, Some(119), "{said}");
    assert!(said.contains("+evalsha"), "{said}");

    // Nobody is there to be followed.
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1 1"]);
    let (code, said) = refused(&replica.url());
    assert_eq!(code, Some(118), "{said}");
    assert!(said.contains("connect to the primary"), "{said}");
}

pub(crate) fn doctor_says_what_makes_postgresql_unusable() {
    let servers = Runtime::new().unwrap().block_on(async {
        let server = PostgresServer::start([""; 0]).await?;
        let standby = server.standby().await?;
        let pooler = PgBouncer::start(&server, "transaction").await?;
        let following = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
        let started = Instant::now();
        while server.psql(following).await?.trim() != "1" {
            anyhow::ensure!(started.elapsed() < LIMIT, "the standby does not follow");
        }
        anyhow::Ok((server, standby, pooler))
    });
    let (server, standby, pooler) = match servers {
        Ok(servers) => servers,
        Err(error) => {
            return Missing::new("postgres", format!("{error:#}")).skip();
        }
    };
    let (code, said) = refused(&server.url());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("asynchronously"), "{said}");
    let (code, said) = refused(&standby.url());
    assert_eq!(code, Some(119), "{said}");
    assert!(said.contains("connect to the primary"), "{said}");
    let (code, said) = refused(&pooler.url());
    assert_eq!(code, Some(119), "{said}");
    assert!(said.contains("pool_mode = session"), "{said}");
}
