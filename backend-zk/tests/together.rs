//! Calls of one client that meet travel together, and each fares as if it had been alone.

mod support;

use std::future::poll_fn;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::Poll;

use anyhow::{Context as _, ensure};
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend, Claim, ErrorKind, Hold, Result, Token};
use leasehold_zk::ZooKeeper;
use support::{
    LONG, claim, client, contenders, granted, operator, run, soon, until_contenders, waiting,
};
use tokio::task::unconstrained;
use zookeeper_client::{Acls, Client, CreateMode};

fn main() -> ExitCode {
    support::main(
        ZooKeeperEnsemble::missing(),
        &[
            ("claims_that_meet_are_created_in_one", || run(one())),
            ("a_bad_one_fails_alone", || run(bad_ones())),
            ("long_labels_do_not_add_up", || run(long_labels())),
            ("a_lost_answer_leaves_one_node_each", || run(lost_answer())),
            ("dropped_on_the_way_leaves_nothing", || run(dropped())),
            ("a_try_does_not_overtake_a_release", || run(try_after())),
        ],
    )
}

/// Nodes created in one transaction have one number: it is the token of each.
async fn one() -> anyhow::Result<()> {
    let net = Net::start().await?;
    // Of some the folders are there.
    for number in 0..5 {
        let mut hold = granted(&*net.client, &claim(&format!("met-{number}"), LONG)?).await?;
        hold.release().await?;
    }
    let busy = net.busy().await?;
    let mut claims = Vec::new();
    for number in 0..15 {
        claims.push(net.acquire(waiting(&format!("met-{number}"), LONG)?));
    }
    collect(&mut claims).await?;
    let mut second = vec![net.acquire(waiting("met-7", LONG)?)];
    collect(&mut second).await?;
    net.proxy.set(Flow::Pass);
    let mut holds = Vec::new();
    for hold in soon("granted", all(claims)).await? {
        holds.push(hold?.context("granted")?);
    }
    let tokens: Vec<Token> = holds.iter().map(|hold| hold.token()).collect();
    for (number, &token) in tokens.iter().enumerate() {
        ensure!(token == tokens[0], "they did not meet");
        ensure!(net.czxid(&format!("met-{number}"), 0).await? == token);
    }
    ensure!(poll_once(&mut second[0]).await.is_pending(), "two hold it");
    until_contenders(&net.operator, "met-7", 2).await?;
    let czxid = net.czxid("met-7", 1).await?;
    holds[7].release().await?;
    for hold in soon("granted", all(second)).await? {
        let hold = hold?.context("granted")?;
        ensure!(hold.token() > tokens[7], "the same transaction");
        ensure!(hold.token() == czxid);
    }
    net.stop(busy).await
}

/// Among claims and releases that are fine: a key's node that is gone, one on which we have no right,
/// and a lock that an operator took away.
async fn bad_ones() -> anyhow::Result<()> {
    let net = Net::start().await?;
    let mut holds = Vec::new();
    for number in 0..4 {
        holds.push(granted(&*net.client, &claim(&format!("held-{number}"), LONG)?).await?);
    }
    let mut swept = granted(&*net.client, &claim("swept", LONG)?).await?;
    swept.release().await?;
    let read = CreateMode::Persistent.with_acls(Acls::anyone_read());
    for bad in ["gone", "denied", "taken"] {
        match bad {
            "gone" => net.operator.delete("/locks/swept", None).await?,
            "denied" => drop(net.operator.create("/locks/denied", b"", &read).await?),
            _ => {
                let node = contenders(&net.operator, "held-2").await?;
                let path = format!("/locks/held-2/{}", node[0]);
                net.operator.delete(&path, None).await?;
            }
        }
        let busy = net.busy().await?;
        let mut claims = Vec::new();
        for number in 0..4 {
            claims.push(net.acquire(waiting(&format!("{bad}-{number}"), LONG)?));
            match (bad, number) {
                ("gone", 2) => claims.push(net.acquire(waiting("swept", LONG)?)),
                ("denied", 2) => claims.push(net.acquire(waiting("denied", LONG)?)),
                _ => {}
            }
        }
        let mut releases: Vec<Way<'_, Result<()>>> = Vec::new();
        if bad == "taken" {
            for hold in &mut holds {
                releases.push(Box::pin(unconstrained(hold.release())));
            }
        }
        collect(&mut claims).await?;
        collect(&mut releases).await?;
        net.proxy.set(Flow::Pass);
        let both = async { Ok::<_, anyhow::Error>(tokio::join!(all(claims), all(releases))) };
        let (claims, releases) = soon("answered", both).await?;
        for (index, claim) in claims?.into_iter().enumerate() {
            match claim {
                Err(error) => {
                    ensure!(bad == "denied" && index == 3, "{bad}, {index}: {error}");
                    ensure!(error.kind() == ErrorKind::Other, "{error}");
                }
                Ok(hold) => {
                    ensure!(bad != "denied" || index != 3, "granted without a right");
                    hold.context("granted")?.release().await?;
                }
            }
        }
        for (index, release) in releases?.into_iter().enumerate() {
            match release {
                Err(error) => {
                    ensure!(index == 2 && error.kind() == ErrorKind::Lost, "{error}");
                }
                Ok(()) => ensure!(index != 2, "it was taken away"),
            }
        }
        net.stop(busy).await?;
    }
    for number in 0..4 {
        until_contenders(&net.operator, &format!("held-{number}"), 0).await?;
    }
    Ok(())
}

/// Together they would be more than a server takes as one request.
async fn long_labels() -> anyhow::Result<()> {
    let net = Net::start().await?;
    let busy = net.busy().await?;
    let mut claims = Vec::new();
    for number in 0..20 {
        let mut wanted = waiting(&format!("long-{number}"), LONG)?;
        wanted.label = Some("x".repeat(100_000).into());
        claims.push(net.acquire(wanted));
        claims.push(net.acquire(waiting(&format!("short-{number}"), LONG)?));
    }
    collect(&mut claims).await?;
    net.proxy.set(Flow::Pass);
    for hold in soon("granted", all(claims)).await? {
        hold?.context("granted")?.release().await?;
    }
    net.stop(busy).await
}

/// They are created, and the connection ends before anybody hears of it.
async fn lost_answer() -> anyhow::Result<()> {
    const KEYS: u32 = 8;
    let net = Net::start().await?;
    let busy = net.busy().await?;
    let mut claims = Vec::new();
    for number in 0..KEYS {
        claims.push(net.acquire(waiting(&format!("lost-{number}"), LONG)?));
    }
    collect(&mut claims).await?;
    net.proxy.set(Flow::LoseReplies);
    let created = async {
        for number in 0..KEYS {
            until_contenders(&net.operator, &format!("lost-{number}"), 1).await?;
        }
        net.proxy.set(Flow::Cut);
        net.proxy.set(Flow::Pass);
        anyhow::Ok(())
    };
    let both = async { Ok::<_, anyhow::Error>(tokio::join!(all(claims), created)) };
    let (claims, created) = soon("granted", both).await?;
    created?;
    for (number, hold) in claims?.into_iter().enumerate() {
        let mut hold = hold?.context("granted")?;
        let key = format!("lost-{number}");
        ensure!(contenders(&net.operator, &key).await?.len() == 1, "{key}");
        ensure!(net.czxid(&key, 0).await? == hold.token());
        hold.release().await?;
    }
    net.stop(busy).await
}

/// Claims that are dropped while they collect, and while their request is under way.
async fn dropped() -> anyhow::Result<()> {
    let net = Net::start().await?;
    for under_way in [false, true] {
        let busy = net.busy().await?;
        let mut kept = Vec::new();
        let mut gone = Vec::new();
        for number in 0..4 {
            kept.push(net.acquire(waiting(&format!("kept-{number}"), LONG)?));
            collect(&mut kept[number..]).await?;
            gone.push(net.acquire(waiting(&format!("gone-{number}"), LONG)?));
            collect(&mut gone[number..]).await?;
        }
        if under_way {
            net.proxy.set(Flow::HoldReplies);
            let created = async {
                for number in 0..4 {
                    until_contenders(&net.operator, &format!("gone-{number}"), 1).await?;
                }
                anyhow::Ok(())
            };
            tokio::select! {
                _ = all(gone) => anyhow::bail!("answered, though no answer came through"),
                created = created => created?,
            }
        } else {
            drop(gone);
        }
        net.proxy.set(Flow::Pass);
        let mut holds = Vec::new();
        for hold in soon("granted", all(kept)).await? {
            holds.push(hold?.context("granted")?);
        }
        // By now those that were dropped have been created too, for they left with these.
        for number in 0..4 {
            until_contenders(&net.operator, &format!("gone-{number}"), 0).await?;
        }
        for mut hold in holds {
            hold.release().await?;
        }
        net.stop(busy).await?;
    }
    Ok(())
}

/// A try that comes after a release was begun finds the lock free, also while the release collects.
async fn try_after() -> anyhow::Result<()> {
    let net = Net::start().await?;
    let mut hold = granted(&*net.client, &claim("again", LONG)?).await?;
    let busy = net.busy().await?;
    let mut release: Vec<Way<'_, Result<()>>> = vec![Box::pin(unconstrained(hold.release()))];
    collect(&mut release).await?;
    let mut tried = vec![net.acquire(claim("again", LONG)?)];
    collect(&mut tried).await?;
    net.proxy.set(Flow::Pass);
    let both = async { Ok::<_, anyhow::Error>(tokio::join!(all(release), all(tried))) };
    let (released, tried) = soon("answered", both).await?;
    for release in released? {
        release?;
    }
    for tried in tried? {
        tried?.context("it was released before")?.release().await?;
    }
    net.stop(busy).await
}

/// A call that is on its way, polled by hand.
type Way<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;
type Acquire = Way<'static, Result<Option<Box<dyn Hold>>>>;

/// A server, a client that is connected to it by a proxy, and an operator who is not.
struct Net {
    operator: Client,
    client: Arc<ZooKeeper>,
    proxy: Proxy,
    _servers: ZooKeeperEnsemble,
}

impl Net {
    async fn start() -> anyhow::Result<Self> {
        let servers = ZooKeeperEnsemble::start(1, "").await?;
        let proxy = Proxy::start(&servers.server(0)).await?;
        let client = Arc::new(client(&proxy.address().to_string()).await?);
        // So that its session is open.
        let mut hold = granted(&*client, &claim("session", LONG)?).await?;
        hold.release().await?;
        Ok(Self {
            operator: operator(&servers.servers()).await?,
            client,
            proxy,
            _servers: servers,
        })
    }

    fn acquire(&self, claim: Claim) -> Acquire {
        let client = self.client.clone();
        Box::pin(unconstrained(async move { client.acquire(&claim).await }))
    }

    /// Nothing goes through from here on; and so many requests are under way that all others collect.
    async fn busy(&self) -> anyhow::Result<Vec<Acquire>> {
        self.proxy.set(Flow::Hold);
        let mut busy = Vec::new();
        for number in 0..2 {
            busy.push(self.acquire(waiting(&format!("busy-{number}"), LONG)?));
        }
        collect(&mut busy).await?;
        Ok(busy)
    }

    async fn stop(&self, busy: Vec<Acquire>) -> anyhow::Result<()> {
        for hold in soon("granted", all(busy)).await? {
            hold?.context("granted")?.release().await?;
        }
        Ok(())
    }

    /// The number of the transaction that created the contender, as any client reads it.
    async fn czxid(&self, key: &str, place: usize) -> anyhow::Result<Token> {
        let nodes = contenders(&self.operator, key).await?;
        let path = format!("/locks/{key}/{}", nodes.get(place).context("a contender")?);
        let stat = self
            .operator
            .check_stat(&path)
            .await?
            .context("it is there")?;
        Ok(Token::new(stat.czxid.try_into()?))
    }
}

async fn poll_once<T>(call: &mut Way<'_, T>) -> Poll<T> {
    poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await
}

/// Each goes as far as it gets by itself. Nothing in here waits, so they meet.
async fn collect<T>(calls: &mut [Way<'_, T>]) -> anyhow::Result<()> {
    for call in calls {
        ensure!(poll_once(call).await.is_pending(), "answered by nobody");
    }
    Ok(())
}

/// Waits for all of them.
async fn all<T>(mut calls: Vec<Way<'_, T>>) -> anyhow::Result<Vec<T>> {
    let mut answers: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (call, answer) in calls.iter_mut().zip(&mut answers) {
            if answer.is_none()
                && let Poll::Ready(ready) = call.as_mut().poll(cx)
            {
                *answer = Some(ready);
            }
        }
        match answers.iter().all(Option::is_some) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    Ok(answers.into_iter().flatten().collect())
}
