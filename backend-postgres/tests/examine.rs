//! What servers say of themselves, set up well and otherwise.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // the helpers are parts of tests

mod support;

use leasehold_core::{Examination, Severity};
use leasehold_postgres::Postgres;
use support::{foreign, patient, run, server, soon, until};

async fn examined(url: String) -> Examination {
    let locks = patient(Postgres::connect(url).await.unwrap());
    soon("an answer", locks.examine()).await.unwrap()
}

fn found(examination: &Examination) -> Vec<(Severity, &'static str)> {
    let findings = examination.findings.iter();
    findings.map(|it| (it.severity, it.id)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_alone_is_as_it_should_be() {
    let server = server!("fsync = on");
    let examination = examined(server.url()).await;
    assert_eq!(found(&examination), []);
    let [server] = &examination.servers[..] else {
        panic!("{examination:?}")
    };
    assert!(server.version.as_deref().unwrap().starts_with('1'));
    assert!(server.round_trip.is_some());
    assert!(
        server.clock_ahead_ms.unwrap().unsigned_abs() < 10_000,
        "the same clock"
    );
}

/// A role that may see nothing but that they are there is told the same.
#[tokio::test(flavor = "multi_thread")]
async fn an_asynchronous_standby_is_warned_of() {
    let server = server!("fsync = on");
    let mut psql = foreign(&server).await;
    let standby = server.standby().await.unwrap();
    let following = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
    until(&mut psql, "the standby follows", following, 1).await;
    let expected = [(Severity::Warning, "asynchronous-standbys")];
    assert_eq!(found(&examined(server.url()).await), expected);

    run(
        &mut psql,
        "CREATE ROLE shop LOGIN; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO shop",
    )
    .await;
    assert_eq!(found(&examined(server.url_for("shop")).await), expected);

    run(
        &mut psql,
        "ALTER SYSTEM SET synchronous_standby_names = '*'",
    )
    .await;
    run(&mut psql, "SELECT pg_reload_conf()").await;
    let synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
    until(&mut psql, "it is synchronous", synchronous, 1).await;
    let expected = [(Severity::Note, "standbys")];
    assert_eq!(found(&examined(server.url()).await), expected);
    drop(standby);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_wait_for_its_disk_is_warned_of() {
    let server = server!("fsync = off");
    let expected = [(Severity::Warning, "fsync-off")];
    assert_eq!(found(&examined(server.url()).await), expected);
}
