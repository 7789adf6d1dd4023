//! How a lock lasts and ends: kept while renewed, lost in time, free when nobody is left.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use leasehold_core::{Backend, ErrorKind, Expiry, Guard, Key};
use tokio::runtime::{Builder, Runtime};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use crate::cx::{
    Cx, SOON, Skip, after, claim, drive, fails, granted, locks, queued, refused, soon, waiting,
    within,
};
use crate::faulty::{Fault, Faulty};
use crate::rule::{Rule, check};

pub(super) const C4: Rule = Rule {
    id: "C4",
    title: "an abandoned hold ends within the ttl",
    checks: &[
        check!("dropped without a release", [], dropped_hold_ends),
        check!("not renewed", [Lease], unrenewed_hold_ends),
    ],
};

pub(super) const C9: Rule = Rule {
    id: "C9",
    title: "a killed process frees its lock",
    checks: &[check!("within the ttl", [Processes], killed_process_frees)],
};

pub(super) const C10: Rule = Rule {
    id: "C10",
    title: "renewal outlives many ttls",
    checks: &[
        check!("four of them", [], renewal_outlives),
        check!(
            "though some renewals fail",
            [Lease],
            renewal_outlives_failures
        ),
    ],
};

pub(super) const C11: Rule = Rule {
    id: "C11",
    title: "lost fires in time, and only then",
    checks: &[
        check!("when the store is silent", [Lease], lost_when_silent),
        check!("when it is taken away", [], lost_when_taken_away),
        check!("never on a release", [], never_on_a_release),
        check!("a grant that comes late", [Lease], late_grant),
        check!(
            "a grant that meets a stopped client",
            [Expiry],
            late_grant_at_a_stopped_client
        ),
    ],
};

pub(super) const C17: Rule = Rule {
    id: "C17",
    title: "a fixed lease ends, a maximum hold ends",
    checks: &[
        check!("a fixed lease", [], fixed_lease_ends),
        check!("a maximum hold", [], maximum_hold_ends),
    ],
};

pub(super) const C22: Rule = Rule {
    id: "C22",
    title: "panics and dropped runtimes free within the ttl",
    checks: &[
        check!("a task that panics", [], panic_frees),
        check!("a runtime that is dropped", [], dropped_runtime_frees),
        check!(
            "a guard dropped outside of its runtime",
            [],
            drop_outside_of_the_runtime
        ),
        check!(
            "a guard dropped after its runtime",
            [],
            drop_after_the_runtime
        ),
    ],
};

async fn dropped_hold_ends(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let hold = granted(&*one, &claim(&key, cx.ttl())).await?;
    drop(hold);
    is_free_within(cx.ttl(), &*other, &key).await
}

async fn unrenewed_hold_ends(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let hold = granted(&*one, &claim(&key, cx.ttl())).await?;
    let holder = soon("the store is asked", other.holder(&key)).await??;
    let left = holder
        .and_then(|holder| holder.remaining)
        .unwrap_or_default();
    ensure!(left <= cx.ttl(), "the store keeps it for {left:?}");
    is_free_within(cx.ttl(), &*other, &key).await?;
    ensure!(hold.validity().is_ended(), "believed after another got it");
    Ok(())
}

/// Waits for `key`, and frees it again.
async fn is_free_within(ttl: Duration, client: &dyn Backend, key: &Key) -> anyhow::Result<()> {
    let wanted = waiting(key, Cx::LONG);
    let next = within(after(ttl), "another gets the key", client.acquire(&wanted)).await??;
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    next.release().await?;
    Ok(())
}

async fn killed_process_frees(cx: Cx) -> anyhow::Result<()> {
    let (client, key) = (cx.client().await?, cx.key());
    // Where the end of the process is what frees it, no ttl has to run out.
    let (ttl, limit) = match cx.guarantees().expiry {
        Expiry::Process => (Cx::LONG, SOON),
        _ => (cx.ttl(), after(cx.ttl())),
    };
    let mut child = cx.child().await?;
    child.lock(&key, ttl).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = client.acquire(&wanted);
    queued(&*client, &key, &mut waiter).await?;
    child.kill().await?;
    let next = within(limit, "the dead process's lock is free", waiter).await??;
    ensure!(
        next.is_some(),
        "a claim without a limit to its wait gave up"
    );
    Ok(())
}

async fn renewal_outlives(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(cx.steady_ttl(), || outlives(&cx, 4, None))
        .await
}

/// Two renewals in a row fail, the next go through.
async fn renewal_outlives_failures(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(cx.steady_ttl(), || outlives(&cx, 2, Some(2)))
        .await
}

async fn outlives(cx: &Cx, ttls: u32, failures: Option<usize>) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let renew = &faulty.calls().renew;
    let guard = locks(faulty.clone()).with_ttl(ttl).lock(&key).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    let held = async {
        if let Some(failures) = failures {
            renew.set(Fault::Fails);
            while renew.begun() < failures {
                tokio::time::sleep(ttl / 50).await;
            }
            renew.set(Fault::None);
        }
        tokio::time::sleep(ttl * ttls).await;
    };
    tokio::select! {
        () = held => {}
        () = guard.lost() => bail!("lost, though it was renewed"),
        _ = waiter.as_mut() => bail!("another got it, though it was renewed"),
    }
    ensure!(guard.is_held(), "lost, though it was renewed");
    guard
        .release()
        .await
        .context("released after {ttls} ttls")?;
    soon("the waiter is served", waiter).await??;
    Ok(())
}

async fn lost_when_silent(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.ttl();
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    faulty.calls().renew.set(Fault::Silent);
    let guard = locks(faulty).with_ttl(ttl).lock(&key).await?;
    let wanted = waiting(&key, Cx::LONG);
    let next = within(after(ttl), "the store lets go", other.acquire(&wanted)).await??;
    // Asked after the other's grant: whatever the machine does, it must be over by then.
    ensure!(
        !guard.is_held(),
        "two hold {key}: believed after another got it"
    );
    ensure!(guard.remaining().is_zero(), "believed after another got it");
    soon("lost fires", guard.lost()).await?;
    let work = soon("run gives up", guard.run(std::future::pending::<()>())).await?;
    fails(ErrorKind::Lost, "work under a lost lock", work)?;
    let released = soon("a release is answered", guard.release()).await?;
    fails(ErrorKind::Lost, "the release of a lost lock", released)?;
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    next.release().await.context("the successor's release")?;
    Ok(())
}

async fn lost_when_taken_away(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (one, other, key) = (cx.locks().await?, cx.locks().await?, cx.key());
    let guard = one.with_ttl(ttl).lock(&key).await?;
    let taken = other.evict(&key, None).await;
    if matches!(&taken, Err(error) if error.kind() == ErrorKind::Unsupported) {
        bail!(Skip("the store cannot take a lock away"));
    }
    taken?;
    within(after(ttl), "lost fires", guard.lost()).await?;
    ensure!(!guard.is_held(), "lost has fired, and yet it is held");
    let released = soon("a release is answered", guard.release()).await?;
    fails(ErrorKind::Lost, "the release of an evicted lock", released)?;
    Ok(())
}

async fn never_on_a_release(cx: Cx) -> anyhow::Result<()> {
    let (locks, key, neighbour) = (cx.locks().await?, cx.key(), cx.key());
    let me = locks.owner();
    let (one, again) = (me.lock(&key).await?, me.lock(&key).await?);
    let other = me.lock(&neighbour).await?;
    let mut lost = Box::pin(async {
        tokio::select! {
            () = again.lost() => "the same key",
            () = other.lost() => "another key",
        }
    });
    tokio::select! {
        released = one.release() => released?,
        which = &mut lost => bail!("lost fired for {which} on a release"),
    }
    let third = me.lock(cx.key()).await?;
    tokio::select! {
        released = third.release() => released?,
        which = &mut lost => bail!("lost fired for {which} on a release"),
    }
    tokio::select! {
        biased;
        which = lost => bail!("lost fired for {which} on a release"),
        () = std::future::ready(()) => {}
    }
    ensure!(again.is_held() && other.is_held(), "lost on a release");
    again.release().await?;
    other.release().await?;
    Ok(())
}

/// The answer to an acquire comes after the lease that it grants: the guard must not believe in it,
/// and the claim goes back to waiting.
async fn late_grant(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.ttl();
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let calls = Arc::clone(faulty.calls());
    calls.acquire.set(Fault::LateOnce(ttl * 2));
    let late = locks(faulty).with_ttl(ttl).with_wait(None);
    let mut late = Box::pin(late.lock(&key));
    // Granted in the store, and nobody knows yet.
    let granted = async {
        while other.holder(&key).await?.is_none() {
            tokio::task::yield_now().await;
        }
        anyhow::Ok(())
    };
    tokio::select! {
        granted = soon("the store has granted it", granted) => granted??,
        _ = &mut late => bail!("the answer came at once"),
    }
    let wanted = waiting(&key, Cx::LONG);
    let next = tokio::select! {
        next = within(after(ttl), "the store lets go", other.acquire(&wanted)) => next??,
        // Claimed again and granted, before the other: then it is alone with it.
        guard = &mut late => {
            let guard = guard?;
            ensure!(guard.is_held(), "a guard that was lost from the start");
            return refused(&*other, &key).await;
        }
    };
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    let claims_again = async {
        while calls.acquire.begun() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        waited = within(after(ttl), "the claim is made again", claims_again) => waited?,
        guard = &mut late => {
            let believed = guard?.is_held() && !next.validity().is_ended();
            ensure!(!believed, "two hold {key}: a late grant was believed");
        }
    }
    next.release().await?;
    let guard = soon("the late claim is served in the end", late).await??;
    ensure!(guard.token() > next.token(), "an old grant: {guard:?}");
    Ok(())
}

/// A client stops while it waits, is granted the lock meanwhile, and goes on when another has it: as
/// a process that is stopped in the wrong moment. All of it runs in one thread, which is blocked.
async fn late_grant_at_a_stopped_client(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.ttl();
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let (says, mut said) = tokio::sync::mpsc::unbounded_channel();
    let (go_on, stopped) = mpsc::channel();
    let client = spawn_blocking({
        let (cx, key) = (cx.clone(), key.clone());
        move || {
            let runtime = single_threaded()?;
            let client = runtime.block_on(cx.client())?;
            let patient = locks(Arc::clone(&client)).with_ttl(ttl).with_wait(None);
            let mut waiter = Box::pin(patient.lock(&key));
            runtime.block_on(queued(&*client, &key, &mut waiter))?;
            says.send(None)?;
            stopped.recv()?;
            let early = runtime.block_on(drive(&*client, &key, &mut waiter))?;
            let believed = early.is_some_and(|guard| guard.is_ok_and(|guard| guard.is_held()));
            says.send(Some(believed))?;
            anyhow::Ok(())
        }
    });
    soon("the client waits", said.recv()).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    soon("a release is answered", hold.release()).await??;
    let next = within(after(ttl), "the store lets go", waiter).await??;
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    go_on.send(())?;
    let believed = soon("the client goes on", said.recv()).await?.flatten();
    let over = next.validity().is_ended();
    soon("the client ends", client).await???;
    ensure!(
        over || believed == Some(false),
        "two hold {key}: a late grant was believed"
    );
    next.release().await?;
    Ok(())
}

async fn fixed_lease_ends(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(cx.steady_ttl(), || ends_by_itself(&cx, Limit::FixedLease))
        .await
}

async fn maximum_hold_ends(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(cx.steady_ttl(), || ends_by_itself(&cx, Limit::MaximumHold))
        .await
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Limit {
    FixedLease,
    MaximumHold,
}

async fn ends_by_itself(cx: &Cx, limit: Limit) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let renew = &faulty.calls().renew;
    let one = locks(faulty.clone());
    let (one, length) = match limit {
        Limit::FixedLease => (one.with_fixed_lease(ttl), ttl),
        Limit::MaximumHold => (one.with_ttl(ttl).with_max_hold(ttl * 2), ttl * 2),
    };
    let start = Instant::now();
    let guard = one.lock(&key).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    within(after(length), "lost fires", guard.lost()).await?;
    ensure!(!guard.is_held(), "lost has fired, and yet it is held");
    let held = start.elapsed();
    ensure!(
        held >= length.mul_f64(0.9),
        "over after {held:?}, not after {length:?}"
    );
    if limit == Limit::FixedLease {
        ensure!(renew.begun() == 0, "a fixed lease was renewed");
    }
    // The guard lives, and nobody releases it.
    let next = within(after(ttl), "the lock is free, a ttl later at most", waiter).await??;
    ensure!(
        next.is_some(),
        "a claim without a limit to its wait gave up"
    );
    drop(guard);
    Ok(())
}

async fn panic_frees(cx: Cx) -> anyhow::Result<()> {
    let (locks, other, key) = (cx.locks().await?, cx.client().await?, cx.key());
    let guard = locks.with_ttl(cx.ttl()).lock(&key).await?;
    let task = tokio::spawn(async move {
        let _guard = guard;
        tokio::task::yield_now().await;
        panic_quietly();
    });
    let ended = soon("the task panics", task).await?;
    ensure!(
        ended.is_err_and(|error| error.is_panic()),
        "it did not panic"
    );
    is_free_within(cx.ttl(), &*other, &key).await
}

async fn dropped_runtime_frees(cx: Cx) -> anyhow::Result<()> {
    let (other, key) = (cx.client().await?, cx.key());
    let thread = std::thread::spawn({
        let (cx, key) = (cx.clone(), key.clone());
        move || {
            let runtime = single_threaded()?;
            let guard = lock_on(&runtime, &cx, &key)?;
            let (started, running) = tokio::sync::oneshot::channel();
            let _task = runtime.spawn(async move {
                let _guard = guard;
                if started.send(()).is_ok() {
                    std::future::pending::<()>().await;
                }
            });
            runtime.block_on(running)?;
            drop(runtime);
            anyhow::Ok(())
        }
    });
    ends_without_panic(thread).await?;
    is_free_within(cx.ttl(), &*other, &key).await
}

async fn drop_outside_of_the_runtime(cx: Cx) -> anyhow::Result<()> {
    let (locks, other, key) = (cx.locks().await?, cx.client().await?, cx.key());
    // Long, so that only the release frees it.
    let guard = locks.lock(&key).await?;
    let thread = std::thread::spawn(move || {
        drop(guard);
        Ok(())
    });
    ends_without_panic(thread).await?;
    let wanted = waiting(&key, Cx::LONG);
    let next = soon("the lock is free", other.acquire(&wanted)).await??;
    ensure!(
        next.is_some(),
        "a claim without a limit to its wait gave up"
    );
    Ok(())
}

async fn drop_after_the_runtime(cx: Cx) -> anyhow::Result<()> {
    dropped_after_the_runtime(&cx, drop).await?;
    // By a panic too; now that it does not panic itself, for that would be the end of this process.
    dropped_after_the_runtime(&cx, |guard| {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = guard;
            panic_quietly();
        }));
        drop(panicked);
    })
    .await
}

async fn dropped_after_the_runtime(cx: &Cx, end: fn(Guard)) -> anyhow::Result<()> {
    let (other, key) = (cx.client().await?, cx.key());
    let thread = std::thread::spawn({
        let (cx, key) = (cx.clone(), key.clone());
        move || {
            let runtime = single_threaded()?;
            let guard = lock_on(&runtime, &cx, &key)?;
            drop(runtime);
            end(guard);
            anyhow::Ok(())
        }
    });
    ends_without_panic(thread).await?;
    is_free_within(cx.ttl(), &*other, &key).await
}

async fn ends_without_panic(thread: JoinHandle<anyhow::Result<()>>) -> anyhow::Result<()> {
    let ended = soon("the thread ends", spawn_blocking(|| thread.join())).await??;
    ended.map_err(|_panic| anyhow!("it panicked"))?
}

fn single_threaded() -> anyhow::Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// Takes `key` by a client that lives on `runtime`.
fn lock_on(runtime: &Runtime, cx: &Cx, key: &Key) -> anyhow::Result<Guard> {
    runtime.block_on(async {
        let locks = cx.locks().await?.with_ttl(cx.ttl());
        Ok(locks.lock(key).await?)
    })
}

/// A panic that the hook does not print: it is wanted.
fn panic_quietly() {
    resume_unwind(Box::new("a panic of the suite's own"));
}
