//! Calls that meet travel as one request: each of them is answered as if it were alone.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use etcd_client::{Client, GetOptions, Permission, RoleRevokePermissionOptions};
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend as _, Claim, ErrorKind, Hold, Result};
use leasehold_etcd::Etcd;

use crate::Test;
use crate::access::{as_shop, with_users};
use crate::support::{
    SOON, at, below, claim, etcd, raw, servers, test, two_ways, until_below, waiting, within,
};

const LONG: Duration = Duration::from_secs(60);

/// So many requests are under way before calls collect.
const ALONE: usize = 2;

pub(crate) const TESTS: &[Test] = &[
    test!("calls that meet are one request", one_request),
    test!("two claims on one key meet", two_on_one_key),
    test!(
        "a claim's lease is gone, its neighbours' is not",
        lease_gone
    ),
    test!("a claim is denied, its neighbours are not", denied),
    test!(
        "without room nothing is written, and locks are released",
        no_room
    ),
    test!("the answer to many is lost", answer_lost),
    test!("a member hangs with a request of many", member_hangs),
    test!(
        "claims that are dropped while they collect leave nothing",
        dropped
    ),
    test!("each call has its own time", own_time),
    test!("together they are too large", too_large),
];

type Call<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Polls each of them once: they meet, so that all but the first few collect.
async fn meet<T>(calls: &mut [Call<'_, T>]) {
    poll_fn(|cx: &mut Context<'_>| {
        for call in &mut *calls {
            assert!(call.as_mut().poll(cx).is_pending(), "it takes a request");
        }
        Poll::Ready(())
    })
    .await;
}

/// Polls them all in turn until each is done; none is polled again before the others were.
async fn all<T>(mut calls: Vec<Call<'_, T>>) -> Vec<T> {
    let mut outcomes: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    poll_fn(|cx: &mut Context<'_>| {
        for (call, outcome) in calls.iter_mut().zip(&mut outcomes) {
            if outcome.is_none()
                && let Poll::Ready(done) = call.as_mut().poll(cx)
            {
                *outcome = Some(done);
            }
        }
        if outcomes.iter().all(Option::is_some) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
    outcomes.into_iter().flatten().collect()
}

type Outcome = Result<Option<Box<dyn Hold>>>;

fn acquiring(etcd: &Etcd, claim: Claim) -> Call<'_, Outcome> {
    Box::pin(async move { etcd.acquire(&claim).await })
}

/// Acquires all of them, so that those after the first few travel together.
async fn acquire(etcd: &Etcd, claims: Vec<Claim>) -> anyhow::Result<Vec<Outcome>> {
    let calls = claims.into_iter().map(|claim| acquiring(etcd, claim));
    within(SOON, "all are answered", all(calls.collect())).await
}

async fn release(holds: &mut [Box<dyn Hold>]) -> anyhow::Result<()> {
    let calls = holds.iter_mut().map(|hold| hold.release()).collect();
    for outcome in within(SOON, "all are released", all(calls)).await? {
        outcome?;
    }
    Ok(())
}

/// Claims that do not wait for the keys with these numbers.
fn claims(name: &str, numbers: std::ops::Range<usize>) -> anyhow::Result<Vec<Claim>> {
    numbers
        .map(|number| claim(&format!("{name}{number}"), LONG))
        .collect()
}

fn granted(outcomes: Vec<Outcome>) -> anyhow::Result<Vec<Box<dyn Hold>>> {
    outcomes
        .into_iter()
        .map(|outcome| outcome?.context("it was free"))
        .collect()
}

/// Has the lease that all claims of this ttl share granted beforehand.
async fn prepared(etcd: &Etcd, ttl: Duration) -> anyhow::Result<()> {
    let hold = etcd.acquire(&claim("first", ttl)?).await?;
    hold.context("it is free")?.release().await?;
    Ok(())
}

/// How many transactions and deletions the server has answered.
async fn answered(servers: &EtcdCluster) -> anyhow::Result<[f64; 2]> {
    let mut counts = [0.0; 2];
    for (count, method) in counts.iter_mut().zip(["Txn", "DeleteRange"]) {
        let name = format!("grpc_server_handled_total{{grpc_code=\"OK\",grpc_method=\"{method}\"");
        *count = servers.metric(0, &name).await?;
    }
    Ok(counts)
}

async fn one_request() -> anyhow::Result<()> {
    const TOGETHER: usize = 63;
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let (etcd, other) = (etcd(&servers).await?, etcd(&servers).await?);
    prepared(&etcd, LONG).await?;
    let taken = other.acquire(&claim("k50", LONG)?).await?;
    let taken = taken.context("it is free")?;

    let before = answered(&servers).await?;
    let mut outcomes = acquire(&etcd, claims("k", 0..ALONE + TOGETHER)?).await?;
    let after = answered(&servers).await?;
    ensure!(
        after[0] - before[0] == 3.0,
        "two alone, then the rest: {before:?}, then {after:?}, {outcomes:?}"
    );
    ensure!(outcomes.remove(50)?.is_none(), "another holds it");
    let mut holds = granted(outcomes)?;
    let keys = below(&client, "locks/").await?;
    ensure!(keys.len() == ALONE + TOGETHER);
    for (number, hold) in (0..ALONE + TOGETHER).filter(|it| *it != 50).zip(&holds) {
        let folder = format!("locks/k{number}/");
        let key = keys
            .iter()
            .find(|key| key.key().starts_with(folder.as_bytes()));
        let revision = key.context("it is held")?.create_revision();
        ensure!(hold.token().get() == revision.unsigned_abs(), "{folder}");
        ensure!(!hold.validity().is_ended());
    }

    release(&mut holds).await?;
    let released = answered(&servers).await?;
    ensure!(released[0] - after[0] == 1.0, "one transaction");
    ensure!(released[1] - after[1] == 2.0, "two alone");
    ensure!(below(&client, "locks/").await?.len() == 1, "the other's");
    ensure!(!taken.validity().is_ended());
    Ok(())
}

async fn two_on_one_key() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let etcd = etcd(&servers).await?;
    prepared(&etcd, LONG).await?;
    let mut some = claims("k", 0..ALONE)?;
    some.extend([claim("one", LONG)?, claim("one", LONG)?]);
    let mut outcomes = acquire(&etcd, some).await?;
    let (second, first) = (
        outcomes.pop().context("six")??,
        outcomes.pop().context("six")??,
    );
    ensure!(
        first.is_some() != second.is_some(),
        "one of them is granted"
    );
    let mut holds = granted(outcomes)?;
    holds.extend([first, second].into_iter().flatten());
    release(&mut holds).await?;

    // The same with claims that wait.
    let mut some = claims("k", 0..ALONE)?;
    some.extend([waiting("one", LONG)?, waiting("one", LONG)?]);
    let mut calls: Vec<_> = some
        .into_iter()
        .map(|claim| acquiring(&etcd, claim))
        .collect();
    meet(&mut calls).await;
    // Which of the two is first is up to the server: their requests are under way at the same time.
    let turns = calls.split_off(ALONE).into_iter().map(|call| {
        let client = client.clone();
        Box::pin(async move {
            let mut hold = call.await?.context("it waits")?;
            let token = hold.token();
            let first = below(&client, "locks/one/").await?[0].create_revision();
            ensure!(token.get() == first.unsigned_abs(), "it is the first");
            hold.release().await?;
            Ok(token)
        }) as Call<'_, anyhow::Result<_>>
    });
    let tokens = within(SOON, "each has its turn", all(turns.collect())).await?;
    let tokens: Vec<_> = tokens.into_iter().collect::<anyhow::Result<_>>()?;
    ensure!(tokens[0] != tokens[1], "two grants");
    release(&mut granted(
        within(SOON, "they are free", all(calls)).await?,
    )?)
    .await
}

async fn lease_gone() -> anyhow::Result<()> {
    let other_ttl = LONG * 2;
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let etcd = etcd(&servers).await?;
    let neighbour = etcd.acquire(&claim("neighbour", LONG)?).await?;
    let neighbour = neighbour.context("it is free")?;
    let victim = etcd.acquire(&claim("victim", other_ttl)?).await?;
    let victim = victim.context("it is free")?;
    let lease = below(&client, "locks/victim/").await?[0].lease();
    client.lease_client().revoke(lease).await?;

    let mut some = claims("k", 0..ALONE + 7)?;
    some.push(claim("gone", other_ttl)?);
    some.extend(claims("k", ALONE + 7..ALONE + 12)?);
    let mut holds = granted(acquire(&etcd, some).await?)?;
    ensure!(victim.validity().is_ended(), "its lease was taken away");
    ensure!(!neighbour.validity().is_ended(), "its lease is another");
    let ours = below(&client, "locks/neighbour/").await?[0].lease();
    for key in below(&client, "locks/").await? {
        let gone = key.key().starts_with(b"locks/gone/");
        ensure!((key.lease() == ours) != gone && key.lease() != lease);
    }
    release(&mut holds).await
}

async fn denied() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let mut root = with_users(&servers).await?;
    let etcd = Etcd::connect_with(as_shop(&servers.endpoints())?).await?;
    // All names that begin with `k`; what begins with `r` may only be read.
    let all = RoleRevokePermissionOptions::new().with_prefix();
    root.role_revoke_permission("shop", "shop/", Some(all))
        .await?;
    let rights = Permission::read_write("shop/k").with_prefix();
    root.role_grant_permission("shop", rights).await?;
    let rights = Permission::read("shop/r").with_prefix();
    root.role_grant_permission("shop", rights).await?;
    let hold = etcd.acquire(&claim("k", LONG)?).await?;
    hold.context("it is free")?.release().await?;

    for name in ["read", "secret"] {
        let mut some = claims("k", 0..ALONE + 7)?;
        some.push(claim(name, LONG)?);
        some.push(waiting(&format!("{name}-too"), LONG)?);
        some.extend(claims("k", ALONE + 7..ALONE + 12)?);
        let mut outcomes = acquire(&etcd, some).await?;
        for outcome in outcomes.drain(ALONE + 7..ALONE + 9) {
            let Err(error) = outcome else {
                bail!("{name}: granted without the right to")
            };
            ensure!(error.kind() == ErrorKind::Other, "{error:?}");
            ensure!(error.to_string().contains("grant-permission"), "{error}");
        }
        let mut holds = granted(outcomes)?;
        ensure!(
            below(&root, "shop/").await?.len() == ALONE + 12,
            "no other key was written"
        );
        release(&mut holds).await?;
    }
    Ok(())
}

async fn no_room() -> anyhow::Result<()> {
    let servers = EtcdCluster::start(1, ["--quota-backend-bytes", "4194304"]).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let etcd = etcd(&servers).await?;
    let mut held = granted(acquire(&etcd, claims("held", 0..ALONE + 8)?).await?)?;
    until_full(&client).await?;

    for outcome in acquire(&etcd, claims("k", 0..ALONE + 8)?).await? {
        let Err(error) = outcome else {
            bail!("granted without room")
        };
        ensure!(error.kind() == ErrorKind::Other, "{error:?}");
        ensure!(error.to_string().contains("compact"), "{error}");
    }
    ensure!(
        below(&client, "locks/k").await?.is_empty(),
        "nothing was written"
    );
    release(&mut held).await?;
    until_below(&client, "locks/", 0).await
}

/// Writes until the server raises the alarm.
async fn until_full(client: &Client) -> anyhow::Result<()> {
    let filling = async {
        let mut kv = client.kv_client();
        let mut refused = 0;
        // The first refusal raises it; from the second on it is there.
        while refused < 2 {
            if let Err(error) = kv.put("filler", vec![0; 500_000], None).await {
                ensure!(error.to_string().contains("space exceeded"), "{error}");
                refused += 1;
            }
        }
        Ok(())
    };
    within(SOON, "the space is used up", filling).await?
}

async fn answer_lost() -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(12);
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let (proxy, both) = two_ways(&servers).await?;
    let etcd = at(&both).await?;
    let other = self::etcd(&servers).await?;
    prepared(&etcd, LONG).await?;
    let held = etcd
        .acquire(&claim("held", LONG)?)
        .await?
        .context("it is free")?;
    let lease = below(&client, "locks/held/").await?[0].lease();

    proxy.set(Flow::LoseReplies);
    let mut some = claims("k", 0..ALONE + 8)?;
    for (number, claim) in some.iter_mut().enumerate() {
        claim.request_limit = LIMIT;
        if number % 2 == 1 {
            claim.wait = None;
        }
    }
    let calls = some
        .into_iter()
        .map(|claim| acquiring(&etcd, claim))
        .collect();
    // Two more get in line before it is asked again: the newest two keys are no longer the claim's own
    // and the one before it.
    let last = format!("k{}", ALONE + 7);
    let folder = format!("locks/{last}/");
    let younger = async {
        until_below(&client, &folder, 1).await?;
        let two = vec![
            acquiring(&other, waiting(&last, LONG)?),
            acquiring(&other, waiting(&last, LONG)?),
        ];
        anyhow::Ok(all(two).await)
    };
    tokio::pin!(younger);
    let outcomes = tokio::select! {
        outcomes = within(LIMIT * 2, "all are answered", all(calls)) => outcomes?,
        early = &mut younger => bail!("granted too early: {early:?}"),
    };
    let mut holds = granted(outcomes)?;
    let tokens: Vec<u64> = holds.iter().map(|hold| hold.token().get()).collect();
    for (number, token) in tokens[..ALONE + 7].iter().enumerate() {
        let keys = below(&client, &format!("locks/k{number}/")).await?;
        ensure!(keys.len() == 1, "one key for each");
        let revision = keys[0].create_revision().unsigned_abs();
        ensure!(*token == revision, "k{number}");
    }
    proxy.set(Flow::Pass);
    let more = etcd
        .acquire(&claim("more", LONG)?)
        .await?
        .context("it is free")?;
    let now = below(&client, "locks/more/").await?[0].lease();
    ensure!(
        now != lease,
        "what is still on the way finds no lease one day"
    );
    ensure!(!held.validity().is_ended() && !more.validity().is_ended());
    release(&mut holds).await?;
    drop(more);
    Ok(())
}

async fn member_hangs() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let follower = (servers.leader().await? + 1) % 3;
    let client = raw(&servers.endpoint((follower + 1) % 3)).await?;
    let ways = [follower, (follower + 1) % 3, (follower + 2) % 3];
    let etcd = at(&ways.map(|way| servers.endpoint(way)).join(",")).await?;
    prepared(&etcd, LONG).await?;
    servers.member(follower).pause()?;
    let mut holds = granted(acquire(&etcd, claims("k", 0..ALONE + 30)?).await?)?;
    servers.member(follower).resume()?;
    release(&mut holds).await?;
    until_below(&client, "locks/", 0).await
}

async fn dropped() -> anyhow::Result<()> {
    // The lease is looked through every third of it, which is too late to help here.
    let ttl = LONG * 4;
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let etcd = etcd(&servers).await?;
    prepared(&etcd, ttl).await?;
    for round in 0..20 {
        let mut calls = Vec::new();
        for number in 0..ALONE + 40 {
            let claim = waiting(&format!("k{round}-{number}"), ttl)?;
            calls.push(acquiring(&etcd, claim));
        }
        meet(&mut calls).await;
        // Those that went by themselves go on for every other round only.
        let alone = calls
            .drain(..if round % 2 == 0 { ALONE } else { 0 })
            .collect();
        drop(calls);
        let mut holds = granted(within(SOON, "they are free", all(alone)).await?)?;
        release(&mut holds).await?;
    }
    until_below(&client, "locks/", 0).await?;
    // Whatever was on the way before this has been carried out.
    let mut holds = granted(acquire(&etcd, claims("k", 0..ALONE + 40)?).await?)?;
    release(&mut holds).await?;
    until_below(&client, "locks/", 0).await
}

async fn own_time() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let proxy = Proxy::start(&servers.endpoint(0)).await?;
    let etcd = at(&proxy.address().to_string()).await?;
    prepared(&etcd, LONG).await?;
    let mut some = claims("k", 0..ALONE + 8)?;
    for (number, claim) in some.iter_mut().enumerate() {
        let is_short = number >= ALONE && number % 2 == 0;
        claim.request_limit = if is_short {
            Duration::from_secs(1)
        } else {
            LONG
        };
    }
    let is_long = |claim: &Claim| claim.request_limit == LONG;
    let kinds: Vec<bool> = some.iter().map(is_long).collect();
    proxy.set(Flow::Hold);
    let mut calls: Vec<_> = some
        .into_iter()
        .map(|claim| acquiring(&etcd, claim))
        .collect();
    meet(&mut calls).await;
    let (mut long, mut short) = (Vec::new(), Vec::new());
    for (is_long, call) in kinds.into_iter().zip(calls) {
        if is_long { &mut long } else { &mut short }.push(call);
    }
    let short_ones = async {
        let outcomes = within(SOON, "their time is over", all(short)).await?;
        for outcome in outcomes {
            let Err(error) = outcome else {
                bail!("granted by a silent server")
            };
            ensure!(error.kind() == ErrorKind::Unavailable, "{error:?}");
        }
        Ok(())
    };
    // All are driven, for the first few are under way as long as somebody looks for their answers.
    let long_ones = all(long);
    tokio::pin!(long_ones);
    tokio::select! {
        short = short_ones => short?,
        long = &mut long_ones => bail!("answered by a silent server: {long:?}"),
    }
    proxy.set(Flow::Pass);
    let mut holds = granted(within(SOON, "the others have time", long_ones).await?)?;
    release(&mut holds).await
}

async fn too_large() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let client = raw(&servers.endpoint(0)).await?;
    let etcd = etcd(&servers).await?;
    prepared(&etcd, LONG).await?;
    // Some are refused by the server, larger ones before they reach it.
    for label in [20_000, 200_000] {
        let mut some = claims("k", 0..ALONE + 40)?;
        for claim in &mut some {
            claim.label = Some("x".repeat(label).into());
        }
        let mut holds = granted(acquire(&etcd, some).await?)?;
        // Read at once they would be too large for the client library.
        let count = GetOptions::new().with_prefix().with_count_only();
        let found = client.kv_client().get("locks/", Some(count)).await?;
        ensure!(usize::try_from(found.count())? == holds.len());
        release(&mut holds).await?;
    }
    Ok(())
}
