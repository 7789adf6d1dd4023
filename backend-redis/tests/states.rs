//! States in which a server takes no changes, for a while: what asks for a new lock gets a typed error
//! that says why, what is held is held again once that is over, and who waits is served. On a single
//! server and on the nodes of a Redlock.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use std::fs;
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, Error, ErrorKind};
use leasehold_redis::{Redis, Redlock};
use support::*;

#[derive(Debug, Clone, Copy)]
enum State {
    /// `READONLY`: it has become a replica, of a primary that cannot be reached.
    Replica,
    /// `MISCONF`: the last snapshot failed.
    Misconf,
    /// `NOREPLICAS`: too few of them.
    NoReplicas,
    /// `BUSY`: a script runs for long.
    Busy,
}

impl State {
    /// What the errors say.
    fn advice(self) -> &'static str {
        match self {
            Self::Replica => "connect to the primary",
            Self::Misconf => "cannot write to its disk",
            Self::NoReplicas => "min-replicas-to-write",
            Self::Busy => "BUSY",
        }
    }

    async fn enter(self, server: &RedisServer) {
        let mut raw = raw(server).await;
        match self {
            // Nothing listens there.
            Self::Replica => raw.run("REPLICAOF 127.0.0.1 1").await,
            Self::Misconf => {
                // The snapshot cannot take the place of a folder.
                fs::create_dir_all(server.process().folder().join("dump.rdb")).unwrap();
                raw.words(&["CONFIG", "SET", "save", "3600 1"]).await;
                raw.run("BGSAVE").await;
                until("the snapshot has failed", async || {
                    let info: String = raw.get("INFO persistence").await;
                    info.contains("rdb_last_bgsave_status:err")
                })
                .await;
            }
            Self::NoReplicas => raw.run("CONFIG SET min-replicas-to-write 1").await,
            Self::Busy => {
                raw.run("CONFIG SET lua-time-limit 20").await;
                let mut script = raw.clone();
                let endless = async move {
                    script
                        .ask::<()>("EVAL while(true)do(function()end)()end 0")
                        .await
                };
                drop(tokio::spawn(endless));
                let mut other = support::raw(server).await;
                until("the script runs", async || {
                    let answer = other.ask::<String>("PING").await;
                    answer.is_err_and(|e| e.to_string().contains("BUSY"))
                })
                .await;
            }
        }
    }

    async fn leave(self, server: &RedisServer) {
        let mut raw = raw(server).await;
        match self {
            Self::Replica => raw.run("REPLICAOF NO ONE").await,
            Self::Misconf => {
                fs::remove_dir(server.process().folder().join("dump.rdb")).unwrap();
                raw.run("CONFIG SET stop-writes-on-bgsave-error no").await;
            }
            Self::NoReplicas => raw.run("CONFIG SET min-replicas-to-write 0").await,
            Self::Busy => raw.run("SCRIPT KILL").await,
        }
    }
}

fn refuses(error: &Error, state: State) {
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{state:?}: {error}");
    let text = error.to_string();
    assert!(text.contains(state.advice()), "{state:?}: {text}");
}

/// Waiters ask again within a third of it.
const TTL: Duration = Duration::from_secs(6);

async fn on_a_single_server(state: State) {
    let server = server([]).await;
    let client = connect(&server).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", TTL));
    raw(&server).await.until_queued("a", 1).await;

    state.enter(&server).await;
    refuses(&failed(client.acquire(&claim("b", LONG)).await), state);
    refuses(&failed(client.acquire(&waiting("b", LONG)).await), state);
    refuses(&failed(hold.renew().await), state);
    refuses(&failed(hold.release().await), state);
    refuses(&failed(Redis::connect(server.url()).await), state);
    assert!(!hold.validity().is_ended());
    assert!(!waiter.is_finished());

    state.leave(&server).await;
    eventually(async || hold.renew().await).await;
    assert!(is_taken(&client, "a").await);
    eventually(async || hold.release().await).await;
    let next = served(SOON, waiter).await;
    assert!(next.token() > hold.token());
    assert!(!is_taken(&client, "b").await);
}

#[tokio::test]
async fn a_primary_that_becomes_a_replica() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_single_server(State::Replica).await;
}

#[tokio::test]
async fn a_server_that_cannot_save() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_single_server(State::Misconf).await;
}

#[tokio::test]
async fn a_server_with_too_few_replicas() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_single_server(State::NoReplicas).await;
}

#[tokio::test]
async fn a_server_that_runs_a_long_script() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_single_server(State::Busy).await;
}

/// A minority in such a state is not noticed; a majority is the same as a single server.
async fn on_a_redlock(state: State) {
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    until_voted(&servers, "a").await;

    state.enter(&servers[0]).await;
    hold.renew().await.unwrap();
    let mut beside = granted(&client, &claim("b", LONG)).await;
    beside.release().await.unwrap();
    let other = redlock(redlock_options(&servers)).await;
    let waiter = spawn(&other, waiting("a", TTL));

    state.enter(&servers[1]).await;
    for claim in [claim("c", LONG), waiting("c", LONG)] {
        refuses(&failed(client.acquire(&claim).await), state);
    }
    refuses(&failed(hold.renew().await), state);
    refuses(
        &failed(Redlock::connect_with(redlock_options(&servers)).await),
        state,
    );
    assert!(!hold.validity().is_ended());
    assert!(!waiter.is_finished());

    for server in &servers[..2] {
        state.leave(server).await;
    }
    eventually(async || hold.renew().await).await;
    assert!(is_taken(&client, "a").await);
    eventually(async || hold.release().await).await;
    let next = served(SOON, waiter).await;
    assert!(next.token() > hold.token());
    // The votes that could not be taken back are by now, or soon.
    until("nothing is left of claims that failed", async || {
        !is_taken(&client, "c").await
    })
    .await;
}

#[tokio::test]
async fn nodes_that_become_replicas() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_redlock(State::Replica).await;
}

#[tokio::test]
async fn nodes_that_cannot_save() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_redlock(State::Misconf).await;
}

#[tokio::test]
async fn nodes_with_too_few_replicas() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_redlock(State::NoReplicas).await;
}

#[tokio::test]
async fn nodes_that_run_a_long_script() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    on_a_redlock(State::Busy).await;
}
