//! How one waits: in order, as long as wanted, and without a trace when cancelled.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold_core::{Backend, ErrorKind, Guard, Hold, Key};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cx::{
    Cx, after, claim, drive, fails, granted, locks, queued, refused, soon, waiting, within,
};
use crate::proxy::Line;
use crate::rule::{Rule, check};
use crate::steps::{Step, counted, steps};

pub(super) const C5: Rule = Rule {
    id: "C5",
    title: "a cancelled acquire leaves nothing",
    checks: &[
        check!("of a free key, in the backend", [], cancelled_on_a_free_key),
        check!("of a held key, in the backend", [], cancelled_on_a_held_key),
        check!(
            "of a free key, by the user",
            [],
            cancelled_by_the_user_on_a_free_key
        ),
        check!(
            "of a held key, by the user",
            [],
            cancelled_by_the_user_on_a_held_key
        ),
    ],
};

pub(super) const C8: Rule = Rule {
    id: "C8",
    title: "first come, first served; dead waiters are skipped",
    checks: &[
        check!("in order", [Fifo], served_in_order),
        check!(
            "in order, cancelled ones left out",
            [Fifo],
            served_in_order_without_the_cancelled
        ),
        check!(
            "waiters of a stopped process",
            [Processes],
            stopped_waiters_are_skipped
        ),
        check!(
            "waiters of a killed process",
            [Processes],
            killed_waiters_are_skipped
        ),
    ],
};

pub(super) const C12: Rule = Rule {
    id: "C12",
    title: "the wait limit is kept",
    checks: &[
        check!("by the user", [], wait_limit),
        check!("by the backend", [], wait_limit_of_the_backend),
        check!("and leaves no place in the queue", [], no_place_is_left),
    ],
};

pub(super) const C19: Rule = Rule {
    id: "C19",
    title: "a cancelled waiter does not delay the next",
    checks: &[
        check!(
            "cancelled before the release",
            [],
            cancelled_before_the_release
        ),
        check!("cancelled as it is granted", [], cancelled_as_it_is_granted),
    ],
};

pub(super) const C20: Rule = Rule {
    id: "C20",
    title: "a hand-off costs the same with 2 or 200 waiters",
    checks: &[check!("wake-ups and bytes", [Push], cost_of_a_hand_off)],
};

async fn cancelled_on_a_free_key(cx: Cx) -> anyhow::Result<()> {
    cancelled_at_every_await(&cx, Level::Backend, false).await
}

async fn cancelled_on_a_held_key(cx: Cx) -> anyhow::Result<()> {
    cancelled_at_every_await(&cx, Level::Backend, true).await
}

async fn cancelled_by_the_user_on_a_free_key(cx: Cx) -> anyhow::Result<()> {
    cancelled_at_every_await(&cx, Level::User, false).await
}

async fn cancelled_by_the_user_on_a_held_key(cx: Cx) -> anyhow::Result<()> {
    cancelled_at_every_await(&cx, Level::User, true).await
}

/// Drops an acquire at each of its awaits in turn until it completes; on a held key the holder lets
/// go once the acquire is queued, so that it is dropped during the hand-off too. Each time a third
/// client must get the key at once: with these ttls nothing becomes free by itself.
async fn cancelled_at_every_await(cx: &Cx, level: Level, held: bool) -> anyhow::Result<()> {
    const AWAITS: usize = 300;
    let (holder, other, third) = (cx.client().await?, cx.client().await?, cx.client().await?);
    let mut keys = Vec::new();
    for polls in 1..AWAITS {
        let key = cx.key();
        keys.push(key.clone());
        let hold = match held {
            true => Some(granted(&*holder, &claim(&key, Cx::LONG)).await?),
            false => None,
        };
        let mut acquire = steps(polls, level.acquire(&other, &key));
        let mut step = None;
        if let Some(mut hold) = hold {
            step = drive(&*other, &key, &mut acquire).await?;
            soon("a release is answered", hold.release()).await??;
        }
        let step = match step {
            Some(step) => step,
            None => soon("an acquire goes on", acquire).await?,
        };
        let completed = match step {
            Step::Completed(taken) => Some(taken?.release().await?),
            Step::Dropped => None,
        };
        let wanted = waiting(&key, Cx::LONG);
        let next = soon("another gets the key", third.acquire(&wanted)).await;
        let next = next.with_context(|| format!("after a drop at poll {polls}"))??;
        next.context("a claim without a limit to its wait gave up")?
            .release()
            .await?;
        if completed.is_some() {
            // What was granted to a dropped acquire only later is seen here.
            for key in keys {
                let wanted = waiting(&key, Cx::LONG);
                let free = soon("all keys are free in the end", third.acquire(&wanted)).await??;
                ensure!(
                    free.is_some(),
                    "a claim without a limit to its wait gave up"
                );
            }
            return Ok(());
        }
    }
    anyhow::bail!("an acquire did not complete in {AWAITS} polls")
}

/// Whose acquire is tried.
#[derive(Clone, Copy)]
enum Level {
    Backend,
    User,
}

enum Taken {
    Hold(Box<dyn Hold>),
    Guard(Guard),
}

impl Level {
    async fn acquire(self, client: &Arc<dyn Backend>, key: &Key) -> anyhow::Result<Taken> {
        match self {
            Self::Backend => {
                let hold = client.acquire(&waiting(key, Cx::LONG)).await?;
                Ok(Taken::Hold(
                    hold.context("a claim without a limit gave up")?,
                ))
            }
            Self::User => Ok(Taken::Guard(locks(Arc::clone(client)).lock(key).await?)),
        }
    }
}

impl Taken {
    async fn release(self) -> leasehold_core::Result<()> {
        match self {
            Self::Hold(mut hold) => hold.release().await,
            Self::Guard(guard) => guard.release().await,
        }
    }
}

async fn served_in_order(cx: Cx) -> anyhow::Result<()> {
    serve(&cx, |_| true).await
}

async fn served_in_order_without_the_cancelled(cx: Cx) -> anyhow::Result<()> {
    let mut random = cx.random();
    // The first and the last but one are always cancelled.
    serve(&cx, |place| !matches!(place, 0 | 10) && random.u8(..3) > 0).await
}

/// Queues twelve waiters of three clients, drops those that do not `stay`, lets go, and looks in
/// which order the others are served.
async fn serve(cx: &Cx, stay: impl FnMut(&usize) -> bool) -> anyhow::Result<()> {
    const WAITERS: usize = 12;
    let key = cx.key();
    let clients = [cx.client().await?, cx.client().await?, cx.client().await?];
    let mut hold = granted(&*clients[0], &claim(&key, Cx::LONG)).await?;
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for place in 0..WAITERS {
        let client = &clients[place % clients.len()];
        let waiter = take_turn(Arc::clone(client), key.clone(), place, Arc::clone(&served));
        let mut waiter = Box::pin(waiter);
        queued(&**client, &key, &mut waiter).await?;
        waiters.push(Some(waiter));
    }
    let staying = (0..WAITERS).filter(stay).collect::<Vec<_>>();
    let mut tasks = JoinSet::new();
    for (place, waiter) in waiters.iter_mut().enumerate() {
        let waiter = waiter.take();
        if staying.contains(&place) {
            tasks.spawn(waiter.context("taken once")?);
        }
    }
    soon("a release is answered", hold.release()).await??;
    let outcomes = soon("all are served", tasks.join_all()).await?;
    outcomes.into_iter().collect::<anyhow::Result<()>>()?;
    let served = served.lock().unwrap_or_else(PoisonError::into_inner);
    ensure!(*served == staying, "queued {staying:?}, served {served:?}");
    Ok(())
}

async fn take_turn(
    client: Arc<dyn Backend>,
    key: Key,
    place: usize,
    served: Arc<Mutex<Vec<usize>>>,
) -> anyhow::Result<()> {
    let hold = client.acquire(&waiting(&key, Cx::LONG)).await?;
    let mut hold = hold.context("a claim without a limit to its wait gave up")?;
    served
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(place);
    // Held for a moment, so that whoever would push in has the time to.
    tokio::time::sleep(Duration::from_millis(2)).await;
    hold.release().await?;
    Ok(())
}

async fn stopped_waiters_are_skipped(cx: Cx) -> anyhow::Result<()> {
    dead_waiters_are_skipped(&cx, Death::Stopped).await
}

async fn killed_waiters_are_skipped(cx: Cx) -> anyhow::Result<()> {
    dead_waiters_are_skipped(&cx, Death::Killed).await
}

enum Death {
    Stopped,
    Killed,
}

/// Twelve waiters of a dead process stand in front of a living one: they cost it two ttls at most,
/// not one each.
async fn dead_waiters_are_skipped(cx: &Cx, death: Death) -> anyhow::Result<()> {
    const DEAD: usize = 12;
    let ttl = cx.steady_ttl();
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let mut child = cx.child().await?;
    let _answer = child.queue(&key, ttl, DEAD).await?;
    let wanted = waiting(&key, ttl);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    let _stopped = match death {
        Death::Stopped => {
            child.pause()?;
            Some(child)
        }
        Death::Killed => {
            child.kill().await?;
            None
        }
    };
    soon("a release is answered", hold.release()).await??;
    let next = within(after(ttl), "the living waiter is served", waiter).await??;
    ensure!(
        next.is_some(),
        "a claim without a limit to its wait gave up"
    );
    Ok(())
}

const WAITS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_nanos(1),
    Duration::from_micros(400),
    Duration::from_millis(1),
    Duration::from_millis(120),
];

async fn wait_limit(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.locks().await?, cx.locks().await?, cx.key());
    let guard = one.lock(&key).await?;
    for wait in WAITS {
        let start = Instant::now();
        let lock = soon("the wait is over", other.with_wait(wait).lock(&key)).await;
        let lock = lock.with_context(|| format!("with a wait of {wait:?}"))?;
        fails(ErrorKind::Timeout, "a wait that is over", lock)?;
        ensure!(
            start.elapsed() >= wait,
            "gave up before {wait:?} had passed"
        );
        let tried = soon("a try is answered", other.with_wait(wait).try_lock(&key)).await??;
        ensure!(tried.is_none(), "granted, though another holds it");
    }
    let limited = other.with_wait(WAITS[3]);
    let lock_all = limited.lock_all([cx.key(), key.clone()]);
    let lock_all = soon("the wait is over", lock_all).await?;
    fails(ErrorKind::Timeout, "a wait that is over", lock_all)?;
    guard.release().await?;
    Ok(())
}

async fn wait_limit_of_the_backend(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    for wait in WAITS {
        let mut limited = claim(&key, Cx::LONG);
        limited.wait = Some(wait);
        let start = Instant::now();
        let answer = soon("the wait is over", other.acquire(&limited)).await;
        let answer = answer.with_context(|| format!("with a wait of {wait:?}"))??;
        ensure!(answer.is_none(), "granted, though another holds it");
        ensure!(
            start.elapsed() >= wait,
            "gave up before {wait:?} had passed"
        );
    }
    // A limit that is not reached does no harm.
    let mut limited = claim(&key, Cx::LONG);
    limited.wait = Some(crate::cx::SOON);
    let mut waiter = other.acquire(&limited);
    queued(&*other, &key, &mut waiter).await?;
    hold.release().await?;
    let next = soon("granted within its wait", waiter).await??;
    ensure!(next.is_some(), "gave up, though the lock became free");
    Ok(())
}

async fn no_place_is_left(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    for wait in WAITS {
        let mut limited = claim(&key, Cx::LONG);
        limited.wait = Some(wait);
        let answer = soon("the wait is over", other.acquire(&limited)).await??;
        ensure!(answer.is_none(), "granted, though another holds it");
    }
    soon("a release is answered", hold.release()).await??;
    let holder = soon("the store is asked", other.holder(&key)).await??;
    ensure!(
        holder.is_none(),
        "granted to a claim that has given up: {holder:?}"
    );
    granted(&*one, &claim(&key, Cx::LONG)).await?;
    Ok(())
}

async fn cancelled_before_the_release(cx: Cx) -> anyhow::Result<()> {
    next_is_served(&cx, When::Before).await
}

async fn cancelled_as_it_is_granted(cx: Cx) -> anyhow::Result<()> {
    next_is_served(&cx, When::AfterTheRelease).await
}

enum When {
    Before,
    AfterTheRelease,
}

/// A holds, B and C wait, B is dropped, and C must be served at once: with these ttls nothing becomes
/// free by itself.
async fn next_is_served(cx: &Cx, when: When) -> anyhow::Result<()> {
    let (one, other, third) = (cx.client().await?, cx.client().await?, cx.client().await?);
    // Of the same client as C, and of another.
    for neighbour in [&other, &third] {
        let key = cx.key();
        let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
        let wanted = waiting(&key, Cx::LONG);
        let mut cancelled = neighbour.acquire(&wanted);
        queued(&**neighbour, &key, &mut cancelled).await?;
        let wanted = waiting(&key, Cx::LONG);
        let mut waiter = third.acquire(&wanted);
        queued(&*third, &key, &mut waiter).await?;
        match when {
            When::Before => {
                drop(cancelled);
                soon("a release is answered", hold.release()).await??;
            }
            When::AfterTheRelease => {
                // Granted by now where the store hands on; and it does not come to know.
                soon("a release is answered", hold.release()).await??;
                drop(cancelled);
            }
        }
        let next = soon("the next waiter is served", waiter).await??;
        let mut next = next.context("a claim without a limit to its wait gave up")?;
        refused(&*one, &key).await?;
        next.release().await?;
    }
    Ok(())
}

/// Counted are the polls of the waiting futures and, where a proxy can be put in between, the bytes
/// on the wire. A herd costs a hundred times as much with 200; some multiple is left for what runs
/// beside: heartbeats, packets of other sizes.
async fn cost_of_a_hand_off(cx: Cx) -> anyhow::Result<()> {
    const TOLERATED: f64 = 5.0;
    let few = hand_offs(&cx, 2, 20).await?;
    let many = hand_offs(&cx, 200, 1).await?;
    ensure!(
        many.polls <= few.polls * TOLERATED,
        "{:.1} wake-ups a hand-off with 2 waiters, {:.1} with 200",
        few.polls,
        many.polls
    );
    ensure!(
        many.bytes <= few.bytes * TOLERATED,
        "{:.0} bytes a hand-off with 2 waiters, {:.0} with 200",
        few.bytes,
        many.bytes
    );
    Ok(())
}

/// What one hand-off costs.
#[derive(Debug)]
struct Cost {
    polls: f64,
    bytes: f64,
}

async fn hand_offs(cx: &Cx, waiters: usize, rounds: usize) -> anyhow::Result<Cost> {
    const CLIENTS: usize = 4;
    let (mut clients, mut lines) = (Vec::new(), Vec::new());
    for _ in 0..CLIENTS {
        let (line, client) = cx.line().await?;
        clients.push(client);
        lines.push(line);
    }
    let sent = || lines.iter().map(Line::bytes).sum::<u64>();
    let holder = cx.client().await?;
    let (mut polls, mut bytes) = (0, 0);
    for _ in 0..rounds {
        let key = cx.key();
        // Outlasts the queueing of all, on a busy machine too.
        let ttl = (Cx::LONG * 10).min(cx.store().longest_ttl);
        let mut hold = granted(&*holder, &claim(&key, ttl)).await?;
        let counter = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        for place in 0..waiters {
            let client = Arc::clone(&clients[place % CLIENTS]);
            tasks.spawn(take_and_free(client, key.clone(), Arc::clone(&counter)));
        }
        let all_begun = async {
            while counter.load(Ordering::Relaxed) < waiters as u64 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        soon("all have begun", all_begun).await?;
        for client in &clients {
            drive(&**client, &key, &mut pending::<()>()).await?;
        }
        let (polled, before) = (counter.load(Ordering::Relaxed), sent());
        soon("a release is answered", hold.release()).await??;
        let served = within(after(Cx::LONG), "all are served", tasks.join_all()).await?;
        served.into_iter().collect::<anyhow::Result<()>>()?;
        polls += counter.load(Ordering::Relaxed) - polled;
        bytes += sent() - before;
    }
    #[expect(clippy::cast_precision_loss, reason = "counts are small")]
    let each = |count: u64| count as f64 / (waiters * rounds) as f64;
    Ok(Cost {
        polls: each(polls),
        bytes: each(bytes),
    })
}

async fn take_and_free(
    client: Arc<dyn Backend>,
    key: Key,
    counter: Arc<AtomicU64>,
) -> anyhow::Result<()> {
    let wanted = waiting(&key, Cx::LONG);
    let hold = counted(&counter, client.acquire(&wanted)).await?;
    let mut hold = hold.context("a claim without a limit to its wait gave up")?;
    // Held for a moment, so that whoever was woken in vain sees it taken.
    tokio::time::sleep(Duration::from_millis(2)).await;
    hold.release().await?;
    Ok(())
}
