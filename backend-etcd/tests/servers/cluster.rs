//! Three members, one of which fails.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::etcd::{Etcd as Fixture, EtcdCluster};
use leasehold_conformance::{Harness, Outcome, Store, judge};
use leasehold_core::{Backend, Locks};
use leasehold_etcd::Etcd;

use crate::Test;
use crate::support::{SOON, at, raw, servers, test, until_below, within};

/// Long enough for an election, and for the next member when one hangs, on a busy machine.
const TTL: Duration = Duration::from_secs(15);

pub(crate) const TESTS: &[Test] = &[
    test!(
        "a follower that hangs is left for the others",
        a_follower_hangs
    ),
    test!("the leader is killed", the_leader_dies),
    test!("the leader hangs", the_leader_hangs),
    test!("a member that is down when we connect", one_is_down),
    test!("a member that has lost the others is left", one_is_alone),
    test!("F3, F4 and F6 on three members", rules),
];

/// The endpoints, with this one first: it is preferred.
fn first(servers: &EtcdCluster, index: usize) -> String {
    let others = (0..3).filter(|other| *other != index);
    let all = [index].into_iter().chain(others);
    all.map(|index| servers.endpoint(index))
        .collect::<Vec<_>>()
        .join(",")
}

async fn locks_at(endpoints: &str) -> anyhow::Result<Locks> {
    Ok(Locks::new(at(endpoints).await?).with_ttl(TTL))
}

async fn a_follower_hangs() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let follower = (servers.leader().await? + 1) % 3;
    let client = raw(&servers.endpoint((follower + 1) % 3)).await?;
    let (locks, other) = (
        locks_at(&first(&servers, follower)).await?,
        locks_at(&first(&servers, follower)).await?,
    );
    let held = locks.lock("held").await?;
    let waits = other.clone();
    let waiting = tokio::spawn(async move { waits.lock("held").await });
    until_below(&client, "locks/held/", 2).await?;
    servers.member(follower).pause()?;
    for round in 0..20 {
        let guard = within(TTL, "a lock", locks.lock(format!("k{round}"))).await??;
        within(TTL, "a release", guard.release()).await??;
    }
    // Until the lease had to be kept alive by way of another member.
    tokio::time::sleep(TTL).await;
    ensure!(held.is_held(), "kept alive by way of another member");
    held.release().await?;
    let next = within(TTL, "the waiter is woken by way of another member", waiting).await???;
    next.release().await?;
    servers.member(follower).resume()?;
    Ok(())
}

/// Whatever happens to the leader: nothing is lost if there is time for an election.
async fn through_a_change(
    fail: impl Fn(&EtcdCluster, usize) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let leader = servers.leader().await?;
    let client = raw(&servers.endpoint((leader + 1) % 3)).await?;
    let (locks, other) = (
        locks_at(&first(&servers, leader)).await?,
        locks_at(&first(&servers, leader)).await?,
    );
    let guard = locks.lock("k").await?;
    let waits = other.clone();
    let waiting = tokio::spawn(async move { waits.lock("k").await });
    until_below(&client, "locks/k/", 2).await?;
    fail(&servers, leader)?;
    // Other claims go on once there is a new leader.
    let more = async {
        loop {
            match locks.lock("more").await {
                Ok(more) => return anyhow::Ok(more),
                Err(error) => ensure!(error.is_transient(), "{error:?}"),
            }
        }
    };
    let more = within(TTL * 2, "another lock", more).await??;
    // The ttl passes: whatever was granted before the change counts for nothing any more.
    tokio::time::sleep(TTL).await;
    ensure!(
        guard.is_held() && more.is_held(),
        "kept alive through the change"
    );
    ensure!(!waiting.is_finished(), "one holder at a time");
    let token = guard.token();
    guard.release().await?;
    let next = within(TTL, "the waiter is granted", waiting).await???;
    ensure!(next.token() > token, "the token rises");
    Ok(())
}

async fn the_leader_dies() -> anyhow::Result<()> {
    through_a_change(|servers, leader| {
        servers.member(leader).kill();
        Ok(())
    })
    .await
}

async fn the_leader_hangs() -> anyhow::Result<()> {
    through_a_change(|servers, leader| Ok(servers.member(leader).pause()?)).await
}

async fn one_is_down() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let follower = (servers.leader().await? + 1) % 3;
    servers.member(follower).kill();
    let locks = within(SOON, "by the others", locks_at(&first(&servers, follower))).await??;
    let guard = locks.lock("k").await?;
    // Then the other way round: the one that served us goes when the first is back.
    servers.start_again(follower).await?;
    let client = raw(&servers.endpoint(follower)).await?;
    servers.member((follower + 1) % 3).kill();
    let release = async {
        match guard.release().await {
            // It goes on in the background.
            Err(error) if error.is_transient() => Ok(()),
            outcome => outcome,
        }
    };
    within(TTL, "a release", release).await??;
    until_below(&client, "locks/k/", 0).await
}

async fn one_is_alone() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let locks = locks_at(&first(&servers, 0)).await?;
    let guard = locks.lock("k").await?;
    // Without a majority nothing is granted, and it is said in time.
    servers.member(1).pause()?;
    servers.member(2).pause()?;
    let error = within(TTL, "an answer", locks.lock("more")).await?;
    let error = error.err().context("granted by a minority")?;
    ensure!(error.is_transient(), "{error:?}");
    within(TTL + SOON, "the lock is lost at its deadline", guard.lost()).await?;
    servers.member(1).resume()?;
    servers.member(2).resume()?;
    let again = async {
        loop {
            match locks.lock("k").await {
                Ok(again) => return anyhow::Ok(again),
                Err(error) => ensure!(error.is_transient(), "{error:?}"),
            }
        }
    };
    let again = within(TTL * 2 + SOON, "with a majority again", again).await??;
    ensure!(again.token() > guard.token(), "the token rises");
    Ok(())
}

/// The suite's own rules for servers that fail, on three of them. It is not async, and has runtimes of
/// its own.
async fn rules() -> anyhow::Result<()> {
    for rule in ["F3", "F4", "F6"] {
        let judged = tokio::task::spawn_blocking(|| judge(Arc::new(Three), rule));
        for verdict in judged.await? {
            ensure!(
                verdict.outcome == Outcome::Passed,
                "{rule}, {}: {:?}",
                verdict.check,
                verdict.outcome
            );
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Three;

#[async_trait]
impl Harness for Three {
    async fn start(&self) -> leasehold_core::Result<Store, Missing> {
        Ok(Fixture::find(3).await?.store().with_ttl(TTL / 3))
    }

    async fn connect(&self, address: &str) -> leasehold_core::Result<Box<dyn Backend>> {
        Ok(Box::new(Etcd::connect(address.split(',')).await?))
    }
}
