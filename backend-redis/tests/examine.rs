//! What servers say of themselves, set up well and otherwise.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use leasehold_conformance::fixtures::redis::RedisServer;
use std::time::Duration;

use leasehold_core::{Backend, Examination, Locks, Severity};
use leasehold_redis::{Redis, Redlock, RedlockOptions};
use support::{LONG, SOON, raw, server, within};

async fn examined(backend: impl Backend) -> Examination {
    let locks = Locks::new(backend);
    within(SOON, "an answer", locks.examine()).await.unwrap()
}

async fn examined_at(url: &str) -> Examination {
    let examination = examined(Redis::connect(url).await.unwrap()).await;
    assert!(!format!("{examination:?}").contains("hunter2"));
    examination
}

fn found(examination: &Examination) -> Vec<(Severity, &'static str)> {
    let findings = examination.findings.iter();
    let mut found: Vec<_> = findings.map(|it| (it.severity, it.id)).collect();
    found.sort_unstable();
    found
}

const DURABLE: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

#[tokio::test]
async fn a_server_that_loses_nothing_is_as_it_should_be() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(DURABLE).await;
    let examination = examined_at(&server.url()).await;
    assert_eq!(found(&examination), []);
    let [server] = &examination.servers[..] else {
        panic!("{examination:?}")
    };
    assert!(server.version.as_deref().unwrap().contains('.'));
    assert!(server.round_trip.unwrap() < SOON);
    assert!(
        server.clock_ahead_ms.unwrap().unsigned_abs() < 10_000,
        "the same clock"
    );
    assert!(
        server
            .facts
            .iter()
            .any(|(name, value)| name == "role" && value == "master")
    );
}

#[tokio::test]
async fn an_evicting_policy_is_a_danger() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let [a, b, c, d] = DURABLE;
    let limits = ["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"];
    let [e, f, g, h] = limits;
    let server = server([a, b, c, d, e, f, g, h]).await;
    let examination = examined_at(&server.url()).await;
    assert_eq!(found(&examination), [(Severity::Danger, "eviction")]);
    assert!(examination.findings[0].advice.contains("noeviction"));
}

#[tokio::test]
async fn what_a_crash_forgets_is_warned_of() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let late = server(["--appendonly", "yes", "--appendfsync", "everysec"]).await;
    let examination = examined_at(&late.url()).await;
    assert_eq!(found(&examination), [(Severity::Note, "late-persistence")]);
    let nothing = server([]).await;
    let examination = examined_at(&nothing.url()).await;
    assert_eq!(found(&examination), [(Severity::Warning, "no-persistence")]);
    let snapshots = server(["--save", "3600 1"]).await;
    let examination = examined_at(&snapshots.url()).await;
    assert_eq!(found(&examination), [(Severity::Warning, "snapshots-only")]);
}

/// One that takes writes: a client connects to it as if it were a primary.
#[tokio::test]
async fn a_replica_is_a_danger_and_its_primary_is_warned_of() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let primary = server(DURABLE).await;
    let port = primary.port().to_string();
    let replica = server(
        [
            "--replicaof",
            "127.0.0.1 {primary}",
            "--replica-read-only",
            "no",
        ]
        .map(|argument| Box::leak(argument.replace("{primary}", &port).into_boxed_str()) as &str),
    );
    let replica = replica.await;
    let mut ask = raw(&primary).await;
    let linked = async {
        while !ask
            .get::<String>("INFO replication")
            .await
            .contains("state=online")
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within(SOON, "the replica follows", linked).await;
    let examination = examined_at(&replica.url()).await;
    assert!(found(&examination).contains(&(Severity::Danger, "replica")));
    let examination = examined_at(&primary.url()).await;
    assert_eq!(
        found(&examination),
        [(Severity::Warning, "asynchronous-replicas")]
    );
}

#[tokio::test]
async fn what_may_not_be_asked_is_said() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let mut ask = raw(&server).await;
    ask.run("ACL SETUSER locks on >hunter2 +@all ~* &* -info -config")
        .await;
    let url = server.url().replace("redis://", "redis://locks:hunter2@");
    let examination = examined_at(&url).await;
    assert_eq!(found(&examination), [(Severity::Note, "not-asked"); 2]);
    let advice = examination.findings.iter().map(|it| &*it.advice);
    let advice = advice.collect::<Vec<_>>().join(" ");
    assert!(
        advice.contains("+info") && advice.contains("+config|get"),
        "{advice}"
    );

    // Without its settings it is not known whether there are snapshots.
    ask.run("ACL SETUSER locks +info").await;
    let examination = examined_at(&url).await;
    let expected = [
        (Severity::Note, "not-asked"),
        (Severity::Warning, "no-append-only-file"),
    ];
    assert_eq!(found(&examination), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_of_nodes_is_examined_one_by_one_and_as_a_whole() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let mut servers = Vec::new();
    for _ in 0..3 {
        servers.push(server(DURABLE).await);
    }
    let options = RedlockOptions::new(servers.iter().map(|it| it.url()))
        .unwrap()
        .with_node_timeout(SOON);
    let connect = |options| async {
        within(SOON, "it connects", Redlock::connect_with(options))
            .await
            .unwrap()
    };

    // New servers, and the guard: no node votes yet. All are on this machine.
    let redlock = connect(options.clone()).await;
    assert_eq!(redlock.guarantees().node_losses, 1);
    let examination = examined(redlock.clone()).await;
    let expected = [(Severity::Warning, "node-without-data"); 3];
    let shared = (Severity::Warning, "nodes-share-a-host");
    assert_eq!(found(&examination), [&expected[..], &[shared]].concat());

    let unguarded = options
        .with_restart_guard(false)
        .with_max_ttl(Duration::from_secs(10));
    let unguarded = connect(unguarded).await;
    servers[2].process().kill();
    let mut ask = raw(&servers[0]).await;
    ask.run("CONFIG SET maxmemory-policy allkeys-lru").await;
    ask.run("CONFIG SET maxmemory 100mb").await;
    let locks = Locks::new(unguarded).with_ttl(LONG);
    let examination = within(SOON, "an answer", locks.examine()).await.unwrap();
    assert_eq!(
        found(&examination),
        [
            (Severity::Warning, "long-ttl"),
            (Severity::Warning, "node-down"),
            shared,
            (Severity::Danger, "eviction"),
            (Severity::Danger, "no-restart-guard"),
        ]
    );
    assert_eq!(examination.servers.len(), 3);
}
