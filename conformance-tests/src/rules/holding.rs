//! Who holds: never two at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context as _, ensure};
use leasehold_core::{Backend, ErrorKind, Hold, Key};
use tokio::task::JoinSet;

use crate::cx::{
    Cx, after, claim, fails, granted, locks, queued, refused, soon, take_away, waiting, within,
};
use crate::history::{self, Plan};
use crate::rule::{Rule, check};

pub(super) const C1: Rule = Rule {
    id: "C1",
    title: "one holder at a time",
    checks: &[
        check!("a second claim is refused", [], second_claim_is_refused),
        check!("of many at once one is granted", [], one_of_many),
        check!("no two are inside together", [], no_two_inside),
    ],
};

pub(super) const C2: Rule = Rule {
    id: "C2",
    title: "a release frees at once",
    checks: &[
        check!("for the next try", [], release_frees_for_a_try),
        check!("for one that waits", [], release_frees_for_a_waiter),
        check!("a dropped guard too", [], drop_frees),
    ],
};

pub(super) const C3: Rule = Rule {
    id: "C3",
    title: "a stale release or renewal leaves the successor alone",
    checks: &[
        check!("after the lease ran out", [Lease], stale_after_expiry),
        check!("after it was taken away", [], stale_after_evict),
        check!(
            "after a release, with the same owner",
            [],
            stale_after_release
        ),
    ],
};

pub(super) const C15: Rule = Rule {
    id: "C15",
    title: "histories under stalls show no overlap",
    checks: &[
        check!(
            "clients that stop their threads",
            [Expiry],
            history_of_threads
        ),
        check!(
            "processes that are stopped",
            [Processes, Expiry],
            history_of_processes
        ),
    ],
};

pub(super) const C18: Rule = Rule {
    id: "C18",
    title: "two owners over one connection exclude each other",
    checks: &[
        check!(
            "the second is refused, then served",
            [],
            owners_of_one_client
        ),
        check!(
            "no two are inside together",
            [],
            owners_of_one_client_inside
        ),
    ],
};

async fn second_claim_is_refused(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    refused(&*other, &key).await?;
    refused(&*one, &key).await?;
    granted(&*other, &claim(&cx.key(), Cx::LONG))
        .await
        .context("another key")?;
    refused(&*other, &key).await?;
    hold.release().await?;
    Ok(())
}

async fn one_of_many(cx: Cx) -> anyhow::Result<()> {
    const CLIENTS: usize = 4;
    const CLAIMS: usize = 8;
    for _ in 0..10 {
        let key = cx.key();
        let mut claims = JoinSet::new();
        for _ in 0..CLIENTS {
            let client = cx.client().await?;
            for _ in 0..CLAIMS {
                let (client, claim) = (Arc::clone(&client), claim(&key, Cx::LONG));
                claims.spawn(async move { client.acquire(&claim).await });
            }
        }
        let answers = soon("all claims are answered", claims.join_all()).await?;
        // Kept until all are counted: a dropped hold may be free again.
        let holds = answers.into_iter().collect::<Result<Vec<_>, _>>()?;
        let count = holds.iter().flatten().count();
        ensure!(
            count == 1,
            "{count} of {} claims were granted",
            CLIENTS * CLAIMS
        );
    }
    Ok(())
}

async fn no_two_inside(cx: Cx) -> anyhow::Result<()> {
    let mut clients = Vec::new();
    for _ in 0..6 {
        clients.push(cx.client().await?);
    }
    inside_one_by_one(&clients, cx.key()).await
}

/// Lets each of `clients` take and free `key` some times, and looks who else is inside.
async fn inside_one_by_one(clients: &[Arc<dyn Backend>], key: Key) -> anyhow::Result<()> {
    const ROUNDS: usize = 15;
    let inside = Arc::new(AtomicBool::new(false));
    let entered = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for client in clients {
        let locks = locks(Arc::clone(client)).with_wait(None);
        let (inside, entered, key) = (Arc::clone(&inside), Arc::clone(&entered), key.clone());
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let guard = locks.lock(&key).await?;
                ensure!(!inside.swap(true, Ordering::SeqCst), "two hold {key}");
                entered.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.store(false, Ordering::SeqCst);
                guard.release().await?;
            }
            anyhow::Ok(())
        });
    }
    let limit = after(Cx::LONG);
    let outcomes = within(limit, "all rounds are over", tasks.join_all()).await?;
    outcomes.into_iter().collect::<anyhow::Result<()>>()?;
    let entered = entered.load(Ordering::SeqCst);
    ensure!(entered == clients.len() * ROUNDS, "{entered} grants");
    Ok(())
}

async fn release_frees_for_a_try(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    for _ in 0..5 {
        let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
        soon("a release is answered", hold.release()).await??;
        let mut hold = granted(&*other, &claim(&key, Cx::LONG)).await?;
        soon("a release is answered", hold.release()).await??;
    }
    Ok(())
}

async fn release_frees_for_a_waiter(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    soon("a release is answered", hold.release()).await??;
    let hold = soon("the waiter is granted after the release", waiter).await??;
    ensure!(
        hold.is_some(),
        "a claim without a limit to its wait gave up"
    );
    Ok(())
}

async fn drop_frees(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.locks().await?, cx.locks().await?, cx.key());
    drop(one.lock(&key).await?);
    let guard = soon("granted after the drop", other.lock(&key)).await??;
    drop(guard);
    drop(soon("granted after the drop", one.lock(&key)).await??);
    Ok(())
}

async fn stale_after_expiry(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut stale = granted(&*one, &claim(&key, cx.ttl())).await?;
    let wanted = waiting(&key, Cx::LONG);
    let next = within(after(cx.ttl()), "the lease ran out", other.acquire(&wanted)).await??;
    let next = next.context("a claim without a limit to its wait gave up")?;
    leaves_alone(&cx, &key, &mut *stale, next).await
}

async fn stale_after_evict(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let first = claim(&key, Cx::LONG);
    let mut stale = granted(&*one, &first).await?;
    take_away(&*other, &key, &mut *stale).await?;
    // The same owner again: what counts is the grant.
    let mut second = claim(&key, Cx::LONG);
    second.owner = first.owner;
    let next = granted(&*one, &second).await?;
    leaves_alone(&cx, &key, &mut *stale, next).await
}

async fn stale_after_release(cx: Cx) -> anyhow::Result<()> {
    let (one, key) = (cx.client().await?, cx.key());
    let first = claim(&key, Cx::LONG);
    let mut stale = granted(&*one, &first).await?;
    stale.release().await?;
    let mut second = claim(&key, Cx::LONG);
    second.owner = first.owner;
    let next = granted(&*one, &second).await?;
    leaves_alone(&cx, &key, &mut *stale, next).await
}

async fn leaves_alone(
    cx: &Cx,
    key: &Key,
    stale: &mut dyn Hold,
    mut next: Box<dyn Hold>,
) -> anyhow::Result<()> {
    let third = cx.client().await?;
    for _ in 0..2 {
        let renewed = soon("a stale renewal is answered", stale.renew()).await?;
        fails(ErrorKind::Lost, "a stale renewal", renewed)?;
        refused(&*third, key).await?;
        let released = soon("a stale release is answered", stale.release()).await?;
        fails(ErrorKind::Lost, "a stale release", released)?;
        refused(&*third, key).await?;
    }
    next.renew().await.context("the successor's renewal")?;
    next.release().await.context("the successor's release")?;
    granted(&*third, &claim(key, Cx::LONG)).await?;
    Ok(())
}

/// Each client is a thread with a runtime of its own, so that one can be stopped as a whole.
async fn history_of_threads(cx: Cx) -> anyhow::Result<()> {
    const CLIENTS: usize = 6;
    let keys = [cx.key().to_string(), cx.key().to_string()];
    let mut random = cx.random();
    let mut threads = JoinSet::new();
    for _ in 0..CLIENTS {
        let plan = Plan {
            ttl: cx.ttl(),
            length: cx.ttl() * 12,
            seed: random.u64(..),
            stalls: true,
        };
        let (cx, keys) = (cx.clone(), keys.clone());
        threads.spawn_blocking(move || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_all().build()?;
            runtime.block_on(async {
                let locks = cx.locks().await?;
                history::write(&locks, &keys, plan).await
            })
        });
    }
    let limit = after(cx.ttl() * 20);
    let histories = within(limit, "the histories are written", threads.join_all()).await?;
    let histories = histories.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    history::check(histories.concat())
}

async fn history_of_processes(cx: Cx) -> anyhow::Result<()> {
    const CLIENTS: usize = 4;
    let keys = [cx.key().to_string(), cx.key().to_string()];
    let length = cx.ttl() * 12;
    let mut random = cx.random();
    let (mut children, mut answers) = (Vec::new(), Vec::new());
    for _ in 0..CLIENTS {
        let plan = Plan {
            ttl: cx.ttl(),
            length,
            seed: random.u64(..),
            stalls: false,
        };
        let mut child = cx.child().await?;
        answers.push(child.history(&keys, plan).await?);
        children.push(child);
    }
    let start = tokio::time::Instant::now();
    while start.elapsed() < length {
        let child = random.choice(&children).context("no child")?;
        child.pause()?;
        tokio::time::sleep(cx.ttl().mul_f64(2.0 * random.f64())).await;
        child.resume()?;
        tokio::time::sleep(cx.ttl().mul_f64(random.f64() / 2.0)).await;
    }
    let mut beliefs = Vec::new();
    for answer in answers {
        let written = within(after(length), "the history is written", answer.beliefs());
        beliefs.extend(written.await??);
    }
    history::check(beliefs)
}

async fn owners_of_one_client(cx: Cx) -> anyhow::Result<()> {
    let (locks, key) = (cx.locks().await?, cx.key());
    let (one, other) = (locks.owner(), locks.owner());
    let guard = one.lock(&key).await?;
    ensure!(
        other.try_lock(&key).await?.is_none(),
        "two owners of one client hold {key}"
    );
    ensure!(
        locks.try_lock(&key).await?.is_none(),
        "a claim without owner is granted beside one"
    );
    let (waited, released) = tokio::join!(
        soon("the other owner is granted", other.lock(&key)),
        guard.release()
    );
    released?;
    let guard = waited??;
    ensure!(one.try_lock(&key).await?.is_none(), "two owners hold {key}");
    guard.release().await?;
    Ok(())
}

async fn owners_of_one_client_inside(cx: Cx) -> anyhow::Result<()> {
    let client = cx.client().await?;
    inside_one_by_one(&vec![client; 6], cx.key()).await
}
