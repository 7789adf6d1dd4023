//! Leases, revisions and requests of one server.

use std::collections::HashSet;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use etcd_client::PutOptions;
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend as _, ErrorKind, Hold, Locks};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::Test;
use crate::support::{
    SOON, at, below, claim, etcd, locks, options, raw, servers, test, two_ways, until_below,
    waiting, within,
};

const LONG: Duration = Duration::from_secs(60);

pub(crate) const TESTS: &[Test] = &[
    test!("a waiter whose lease is revoked fails at once", revoked),
    test!(
        "a revoked lease is lost, and the next claim gets another",
        lost_and_replaced
    ),
    test!("a release with 200 waiters wakes one", one_is_woken),
    test!("the revision of a watch is compacted away", compacted),
    test!("a watch stream that falls silent is replaced", silent),
    test!(
        "a cancelled wait is over at once though the server is silent",
        cancelled_in_silence
    ),
    test!(
        "a claim that is carried out late is undone",
        carried_out_late
    ),
    test!("a key under our lease that nobody has is deleted", orphan),
    test!("a lock that comes and goes has few names", few_names),
    test!(
        "a deletion that arrives late hits no other claim",
        deleted_late
    ),
    test!(
        "tokens rise through losses and a restart, and nothing is left",
        a_thousand_cycles
    ),
    test!("ttls below the server's shortest end on time", short_ttl),
    test!("a client goes on in another runtime", another_runtime),
];

/// The lease of the newest key below a prefix.
async fn newest_lease(client: &etcd_client::Client, prefix: &str) -> anyhow::Result<i64> {
    let keys = below(client, prefix).await?;
    Ok(keys.last().context("there is a key")?.lease())
}

async fn held(etcd: &impl leasehold_core::Backend, key: &str) -> anyhow::Result<Box<dyn Hold>> {
    let hold = etcd.acquire(&claim(key, LONG)?).await?;
    hold.context("it is free")
}

async fn revoked() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let (holder, waiter) = (etcd(&servers).await?, etcd(&servers).await?);
    let hold = held(&holder, "k").await?;
    let waiting = tokio::spawn(async move {
        waiter
            .acquire(&waiting("k", LONG)?)
            .await
            .map_err(anyhow::Error::from)
    });
    until_below(&client, "locks/k/", 2).await?;
    client
        .lease_client()
        .revoke(newest_lease(&client, "locks/k/").await?)
        .await?;
    // The keepalive would notice after a third of the ttl.
    let outcome = within(LONG / 4, "the waiter hears of it", waiting).await??;
    let Err(error) = outcome else {
        bail!("granted though its place was gone")
    };
    let error = error.downcast::<leasehold_core::Error>()?;
    ensure!(error.kind() == ErrorKind::Lost, "{error:?}");
    ensure!(
        !hold.validity().is_ended(),
        "the holder has a lease of its own"
    );
    Ok(())
}

async fn lost_and_replaced() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let locks = locks(&servers, Duration::from_secs(6)).await?;
    let (one, other) = (locks.lock("one").await?, locks.lock("other").await?);
    client
        .lease_client()
        .revoke(newest_lease(&client, "locks/").await?)
        .await?;
    within(SOON, "the keepalive hears of it", async {
        tokio::join!(one.lost(), other.lost())
    })
    .await?;
    let first = one.token();
    let again = locks
        .try_lock("one")
        .await?
        .context("the lease took the key with it")?;
    ensure!(again.token() > first, "the token rises");
    // A stale guard leaves its successor alone, even though the owner's client is the same.
    let error = one.release().await.expect_err("it was lost");
    ensure!(error.kind() == ErrorKind::Lost, "{error:?}");
    ensure!(again.is_held() && locks.try_lock("one").await?.is_none());
    Ok(again.release().await?)
}

/// Counts what the server has answered.
async fn answered(servers: &EtcdCluster, method: &str) -> anyhow::Result<f64> {
    let name = format!("grpc_server_handled_total{{grpc_code=\"OK\",grpc_method=\"{method}\"");
    servers.metric(0, &name).await
}

async fn one_is_woken() -> anyhow::Result<()> {
    const WAITERS: usize = 200;
    const RELEASES: usize = 20;
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let holder = etcd(&servers).await?;
    let waiter = Arc::new(etcd(&servers).await?);
    let mut hold = held(&holder, "k").await?;
    let (granted, mut grants) = mpsc::channel(WAITERS);
    let mut tasks = JoinSet::new();
    for _ in 0..WAITERS {
        let (waiter, granted) = (waiter.clone(), granted.clone());
        tasks.spawn(async move {
            let hold = waiter.acquire(&waiting("k", LONG)?).await?;
            // Nobody takes the last ones.
            let _outcome = granted.send(hold.context("it waits for ever")?).await;
            anyhow::Ok(())
        });
    }
    until_below(&client, "locks/k/", WAITERS + 1).await?;
    let methods = ["Txn", "Range", "DeleteRange"];
    let mut before = [0.0; 3];
    for (count, method) in before.iter_mut().zip(methods) {
        *count = answered(&servers, method).await?;
    }
    for _ in 0..RELEASES {
        hold.release().await?;
        hold = within(SOON, "the next is granted", grants.recv())
            .await?
            .context("one is granted")?;
    }
    ensure!(grants.try_recv().is_err(), "one grant for each release");
    let mut cost = [0.0; 3];
    for ((cost, before), method) in cost.iter_mut().zip(before).zip(methods) {
        *cost = (answered(&servers, method).await? - before) / 20.0;
    }
    // The one that is woken looks once; nobody else asks anything.
    ensure!(
        cost == [1.0, 0.0, 1.0],
        "{methods:?} for each release: {cost:?}"
    );
    Ok(())
}

async fn compacted() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let proxy = Proxy::start(&servers.endpoint(0)).await?;
    let (holder, waiter) = (
        etcd(&servers).await?,
        at(&proxy.address().to_string()).await?,
    );
    let mut hold = held(&holder, "k").await?;
    let waiting = tokio::spawn(async move {
        waiter
            .acquire(&waiting("k", LONG)?)
            .await
            .map_err(anyhow::Error::from)
    });
    until_below(&client, "locks/k/", 2).await?;
    proxy.set(Flow::Cut);
    hold.release().await?;
    // The deletion that the waiter waits for is history, and that is thrown away.
    let put = client.kv_client().put("other", "", None).await?;
    let revision = put.header().context("header")?.revision();
    client.kv_client().compact(revision, None).await?;
    proxy.set(Flow::Pass);
    let granted = within(SOON, "the waiter looks", waiting).await???;
    ensure!(granted.is_some());
    Ok(())
}

async fn silent() -> anyhow::Result<()> {
    let ttl = Duration::from_secs(9);
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    // Two ways to the same server: what the first one swallows comes by the other.
    let (proxy, other) = (
        Proxy::start(&servers.endpoint(0)).await?,
        servers.endpoint(0),
    );
    let holder = etcd(&servers).await?;
    let waiter = at(&format!("{},{other}", proxy.address())).await?;
    let mut hold = held(&holder, "k").await?;
    let waiting = tokio::spawn(async move {
        waiter
            .acquire(&waiting("k", ttl)?)
            .await
            .map_err(anyhow::Error::from)
    });
    until_below(&client, "locks/k/", 2).await?;
    proxy.set(Flow::Hold);
    hold.release().await?;
    let granted = within(SOON, "the waiter finds another way", waiting).await???;
    let granted = granted.context("it waits for ever")?;
    ensure!(
        !granted.validity().is_ended(),
        "the lease was kept alive by the other way too"
    );
    Ok(())
}

async fn cancelled_in_silence() -> anyhow::Result<()> {
    let ttl = Duration::from_secs(6);
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let proxy = Proxy::start(&servers.endpoint(0)).await?;
    let holder = etcd(&servers).await?;
    let mut hold = held(&holder, "k").await?;
    let locks = Locks::new(at(&proxy.address().to_string()).await?).with_ttl(ttl);
    let (short, long) = (locks.with_wait(Duration::from_secs(5)), locks.clone());
    let queued = async {
        until_below(&client, "locks/k/", 3).await?;
        // Answers come in the order of the requests, more or less: theirs are here by then.
        for _ in 0..5 {
            locks.holder("k").await?;
        }
        proxy.set(Flow::Hold);
        anyhow::Ok(())
    };
    let abandoned = tokio::spawn(async move { long.lock("k").await });
    let (outcome, silenced) = tokio::join!(within(SOON, "the wait ends", short.lock("k")), queued);
    silenced?;
    let error = outcome?.expect_err("it is held");
    ensure!(error.kind() == ErrorKind::Timeout, "{error:?}");
    let started = Instant::now();
    abandoned.abort();
    ensure!(
        within(SOON, "a cancelled wait ends", abandoned)
            .await?
            .is_err()
    );
    ensure!(started.elapsed() < SOON);
    // Nothing reaches the server, so the lease ends by itself, and takes both places with it.
    until_below(&client, "locks/k/", 1).await?;
    hold.release().await?;
    Ok(())
}

async fn carried_out_late() -> anyhow::Result<()> {
    let ttl = Duration::from_secs(6);
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let (proxy, both) = two_ways(&servers).await?;
    // A quarter of a request's time is for the other way.
    let locks = Locks::new(at(&both).await?)
        .with_request_limit(SOON / 4)
        .with_ttl(ttl);
    // A hold keeps the first lease alive.
    let first = locks.lock("first").await?;
    let lease = newest_lease(&client, "locks/first/").await?;
    proxy.set(Flow::Hold);
    // Its transaction stays on the way; it is repeated by the other way, and the lock comes and goes.
    locks.lock("k").await?.release().await?;
    until_below(&client, "locks/k/", 0).await?;
    proxy.set(Flow::Pass);
    // Whether the server still carries it out or not, within a ttl the lock is free.
    let other = Locks::new(etcd(&servers).await?).with_ttl(ttl);
    let guard = within(ttl + SOON, "the late claim is undone", other.lock("k")).await??;
    guard.release().await?;
    // Whatever arrives there yet finds no lease once the last hold is gone.
    let second = locks.lock("second").await?;
    ensure!(
        newest_lease(&client, "locks/second/").await? != lease,
        "the lease takes no new claims"
    );
    ensure!(first.is_held());
    first.release().await?;
    let gone = async {
        while client
            .lease_client()
            .leases()
            .await?
            .leases()
            .iter()
            .any(|it| it.id() == lease)
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    within(SOON, "the lease is given back", gone).await??;
    Ok(second.release().await?)
}

async fn orphan() -> anyhow::Result<()> {
    let ttl = Duration::from_secs(6);
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let locks = locks(&servers, ttl).await?;
    let guard = locks.lock("k").await?;
    let lease = newest_lease(&client, "locks/k/").await?;
    // What a transaction leaves that was carried out after its claim had been given up.
    let key = format!("locks/late/{lease:x}-00000000000000000000000000000000");
    let options = PutOptions::new().with_lease(lease);
    client
        .kv_client()
        .put(key, "leasehold:1 0 somebody ", Some(options))
        .await?;
    ensure!(locks.try_lock("late").await?.is_none(), "it is in the way");
    let late = within(SOON, "it is deleted", locks.lock("late")).await??;
    ensure!(guard.is_held() && late.is_held());
    Ok(())
}

/// The name of the only key below a prefix.
async fn name_below(client: &etcd_client::Client, prefix: &str) -> anyhow::Result<String> {
    let mut keys = below(client, prefix).await?;
    let key = keys.pop().context("there is a key")?;
    ensure!(keys.is_empty(), "there is one");
    Ok(key.key_str()?.to_owned())
}

async fn few_names() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let locks = locks(&servers, LONG).await?;
    let impatient = locks.with_wait(Duration::from_millis(20));
    let mut names = Vec::new();
    for _ in 0..10 {
        let guard = locks.lock("k").await?;
        names.push(name_below(&client, "locks/k/").await?);
        ensure!(locks.try_lock("k").await?.is_none());
        let error = impatient.lock("k").await.err().context("it is held")?;
        ensure!(error.kind() == ErrorKind::Timeout, "{error:?}");
        // It leaves in the background.
        until_below(&client, "locks/k/", 1).await?;
        guard.release().await?;
        drop(locks.lock("k").await?);
        until_below(&client, "locks/k/", 0).await?;
    }
    // Up to three claims at one time, or two of which one has just been deleted.
    names.sort();
    names.dedup();
    let few = |name: &String| ["-0-0", "-0-1", "-0-2"].iter().any(|it| name.ends_with(it));
    ensure!(names.iter().all(few), "{names:?}");
    Ok(())
}

async fn deleted_late() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let (proxy, both) = two_ways(&servers).await?;
    let etcd = at(&both).await?;
    let mut claim = claim("k", LONG)?;
    claim.request_limit = Duration::from_secs(4);
    let acquire = async || -> anyhow::Result<Box<dyn Hold>> {
        let hold = within(SOON, "an answer", etcd.acquire(&claim)).await??;
        hold.context("it is free")
    };
    let mut hold = acquire().await?;
    let mut names = vec![name_below(&client, "locks/k/").await?];
    // The deletion stays on the way; it is repeated by the other way.
    proxy.set(Flow::Hold);
    within(SOON, "the other way", hold.release()).await??;
    let mut hold = acquire().await?;
    names.push(name_below(&client, "locks/k/").await?);
    proxy.set(Flow::Pass);

    // One that is dropped when it was sent is repeated too.
    let once = poll_fn(|cx| Poll::Ready(hold.release().as_mut().poll(cx).is_pending()));
    ensure!(once.await, "it takes a request");
    // The dropped one may have done it.
    let _outcome = hold.release().await;
    let mut hold = acquire().await?;
    names.push(name_below(&client, "locks/k/").await?);
    let distinct: HashSet<&String> = names.iter().collect();
    ensure!(distinct.len() == names.len(), "{names:?}");
    Ok(hold.release().await?)
}

async fn a_thousand_cycles() -> anyhow::Result<()> {
    const CYCLES: usize = 1000;
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let locks = locks(&servers, LONG).await?;
    let owner = locks.owner();
    let mut last = None;
    for cycle in 0..CYCLES {
        let guard = owner.lock("k").await?;
        let token = Some(guard.token());
        ensure!(token > last, "cycle {cycle}: {token:?} after {last:?}");
        let again = owner.lock("k").await?;
        ensure!(Some(again.token()) == token, "equal on re-entry");
        last = token;
        match cycle {
            250 => {
                ensure!(locks.evict("k", None).await?);
                drop((guard, again));
            }
            500 => {
                client
                    .lease_client()
                    .revoke(newest_lease(&client, "locks/k/").await?)
                    .await?;
                drop((guard, again));
            }
            750 => {
                servers.member(0).kill();
                servers.start_again(0).await?;
                again.release().await?;
                guard.release().await?;
            }
            _ => {
                again.release().await?;
                guard.release().await?;
            }
        }
    }
    until_below(&client, "locks/", 0).await?;
    locks.close().await?;
    let left = async {
        while !client.lease_client().leases().await?.leases().is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    within(SOON, "no lease is left", left).await?
}

async fn short_ttl() -> anyhow::Result<()> {
    let ttl = Duration::from_millis(1500);
    let servers = servers(1).await?;
    let locks = locks(&servers, ttl).await?;
    let shortest = locks.guarantees().shortest_ttl;
    ensure!(
        shortest == Duration::from_secs(2),
        "etcd's own at its defaults: {shortest:?}"
    );
    let guard = locks.lock("k").await?;
    ensure!(guard.remaining() <= ttl, "{:?}", guard.remaining());
    // Kept alive for longer than the server would by itself.
    let lost = tokio::time::timeout(shortest * 2, guard.lost()).await;
    ensure!(lost.is_err(), "it is renewed");
    servers.member(0).pause()?;
    within(SOON, "it ends at the client", guard.lost()).await?;
    servers.member(0).resume()?;
    Ok(())
}

async fn another_runtime() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let endpoints = options(&servers.endpoints())?;
    let on_its_own = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
    };
    let (locks, guard) = tokio::task::spawn_blocking(move || {
        let runtime = on_its_own()?;
        let outcome = runtime.block_on(async {
            let locks = Locks::new(leasehold_etcd::Etcd::connect_with(endpoints).await?);
            let guard = locks.lock("k").await?;
            anyhow::Ok((locks, guard))
        });
        runtime.shutdown_background();
        outcome
    })
    .await??;
    // The one that it connected on is gone; its lock can be released from here, and others taken.
    let other = within(SOON, "another lock", locks.lock("other")).await??;
    within(SOON, "a release", guard.release()).await??;
    until_below(&client, "locks/k/", 0).await?;
    other.release().await?;
    Ok(locks.close().await?)
}
