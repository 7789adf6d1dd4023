//! What only an ensemble of three servers can show: one of them cut off from its leader, a client that
//! moves to another, a leader that dies.

mod support;

use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::zookeeper::{ZooKeeper as Fixture, ZooKeeperEnsemble};
use leasehold_conformance::{Control as _, Flow, Harness, Outcome, Proxy, Store};
use leasehold_core::Backend;
use leasehold_zk::ZooKeeper;
use support::{
    LONG, SOON, claim, client, contenders, granted, locks, operator, run, soon, until,
    until_contenders, waiting, within,
};

fn main() -> ExitCode {
    if let Some(code) = leasehold_conformance::be_child(&ThreeServers) {
        return code;
    }
    support::main(
        ZooKeeperEnsemble::missing(),
        &[
            ("lost_on_a_follower_that_is_cut_off", || run(cut_off())),
            ("a_create_through_another_server_is_not_doubled", || {
                run(moved())
            }),
            ("kept_when_a_server_dies", || run(server_dies())),
            ("F6 the leader is killed", leader_killed),
        ],
    )
}

#[derive(Debug)]
struct ThreeServers;

#[async_trait]
impl Harness for ThreeServers {
    async fn start(&self) -> Result<Store, Missing> {
        let servers = Fixture::find(3).await?;
        Ok(servers.store().with_ttl(Duration::from_secs(3)))
    }

    async fn connect(&self, address: &str) -> leasehold_core::Result<Box<dyn Backend>> {
        Ok(Box::new(ZooKeeper::connect(address).await?))
    }
}

/// The rule of the suite that needs three servers; the others run on one (`tests/conformance.rs`).
fn leader_killed() -> anyhow::Result<()> {
    for verdict in leasehold_conformance::judge(Arc::new(ThreeServers), "F6") {
        ensure!(matches!(verdict.outcome, Outcome::Passed), "{verdict:?}");
    }
    Ok(())
}

/// A follower that is cut off from its leader goes on answering the holder: `lost` fires all the same,
/// before another is granted.
async fn cut_off() -> anyhow::Result<()> {
    const TTL: Duration = Duration::from_secs(2);
    // The follower notices after 15 s.
    let servers = ZooKeeperEnsemble::start_with_links(3, "syncLimit=150").await?;
    let leader = servers.leader().await?;
    let follower = (leader + 1) % 3;
    let holder = locks(&servers.server(follower), TTL).await?;
    let reader = operator(&servers.server(follower)).await?;
    let other = locks(&servers.server(leader), TTL).await?;
    for round in 0..3 {
        let key = format!("cut-{round}");
        let guard = soon("granted", holder.lock(&key)).await?;
        let waiter = tokio::spawn({
            let (other, key) = (other.with_wait(None), key.clone());
            async move { other.lock(&key).await }
        });
        until_contenders(&reader, &key, 2).await?;
        servers.cut_off(follower, true);
        within(TTL * 2 + SOON, "lost fires", guard.lost()).await?;
        ensure!(!waiter.is_finished(), "granted before lost fired");
        // The servers let go of it though this client's own server goes on answering.
        let next = within(TTL * 3 + SOON, "the waiter is served", waiter).await???;
        ensure!(next.token() > guard.token());
        let read = soon(
            "the follower answers",
            reader.list_children(&format!("/locks/{key}")),
        )
        .await;
        ensure!(
            read.is_ok_and(|nodes| nodes.len() == 2),
            "it should not know of it yet"
        );
        servers.cut_off(follower, false);
        next.release().await?;
        // What was held up is settled.
        until_contenders(&reader, &key, 0).await?;
    }
    Ok(())
}

/// The create goes by way of a follower that is cut off, the client moves to another server, and then
/// what was held up arrives: there is one node, and the claim is not behind an orphan of its own.
async fn moved() -> anyhow::Result<()> {
    let servers = ZooKeeperEnsemble::start_with_links(3, "syncLimit=300").await?;
    let leader = servers.leader().await?;
    let (follower, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let first = Proxy::start(&servers.server(follower)).await?;
    let second = Proxy::start(&servers.server(other)).await?;
    second.set(Flow::Cut);
    let client = client(&format!("{},{}", first.address(), second.address())).await?;
    let operator = operator(&servers.server(leader)).await?;
    for round in 0..3 {
        let key = format!("moved-{round}");
        // The session is opened, and stands.
        let mut warm = granted(&client, &claim(&format!("warm-{round}"), LONG)?).await?;
        servers.cut_off(follower, true);
        let wanted = waiting(&key, LONG)?;
        let mut acquire = pin!(client.acquire(&wanted));
        let held_up = tokio::time::timeout(Duration::from_millis(500), &mut acquire).await;
        ensure!(held_up.is_err(), "granted without its leader");
        first.set(Flow::Cut);
        second.set(Flow::Pass);
        let mut hold = soon("granted by the other server", &mut acquire)
            .await?
            .context("granted")?;
        servers.cut_off(follower, false);
        // The follower has caught up with its leader, what it had to say arrived.
        let follower_knows = async || {
            let answer = servers.ask(follower, "srvr").await?;
            let leaders = servers.ask(leader, "srvr").await?;
            let zxid = |answer: &str| {
                answer
                    .lines()
                    .find_map(|line| line.strip_prefix("Zxid: ").map(str::to_owned))
            };
            Ok(zxid(&answer) == zxid(&leaders))
        };
        until("the follower has caught up", follower_knows).await?;
        let nodes = contenders(&operator, &key).await?;
        ensure!(nodes.len() == 1, "{nodes:?}");
        hold.release().await?;
        until_contenders(&operator, &key, 0).await?;
        warm.release().await?;
        // Back to the first.
        first.set(Flow::Pass);
        second.set(Flow::Cut);
    }
    Ok(())
}

/// Each of the servers dies and comes back, the leader among them: the lock is kept, or lost is heard.
async fn server_dies() -> anyhow::Result<()> {
    const TTL: Duration = Duration::from_secs(20);
    let servers = ZooKeeperEnsemble::start(3, "").await?;
    let (one, other) = (
        locks(&servers.servers(), TTL).await?,
        locks(&servers.servers(), TTL).await?,
    );
    let guard = soon("granted", one.lock("k")).await?;
    for index in 0..servers.members() {
        servers.member(index).kill();
        until("the others answer", async || {
            Ok(other.holder("k").await.is_ok_and(|holder| holder.is_some()))
        })
        .await?;
        ensure!(guard.is_held(), "lost though two servers go on");
        if soon("tried", other.try_lock("k")).await?.is_some() {
            bail!("granted twice");
        }
        servers.start_again(index).await?;
    }
    until("signs of life", async || Ok(guard.remaining() > TTL / 2)).await?;
    soon("released", guard.release()).await?;
    let next = soon("granted", other.lock("k")).await?;
    soon("released", next.release()).await?;
    Ok(())
}
