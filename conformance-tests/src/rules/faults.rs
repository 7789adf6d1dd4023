//! What holds when the network, the servers or the clients fail.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_core::{Backend, ErrorKind, Expiry, Guard, Hold, Key, Locks};

use crate::cx::{
    Cx, SOON, after, claim, fails, granted, locks, queued, refused, soon, waiting, within,
};
use crate::harness::Control;
use crate::history;
use crate::proxy::Flow;
use crate::rule::{Rule, check};

pub(super) const F1: Rule = Rule {
    id: "F1",
    title: "cut off and healed before the deadline: nothing is lost",
    checks: &[
        check!(
            "the connections are closed",
            [Proxy, Reconnect],
            healed_after_a_cut
        ),
        check!(
            "nothing is delivered for a while",
            [Proxy],
            healed_after_silence
        ),
    ],
};

pub(super) const F2: Rule = Rule {
    id: "F2",
    title: "cut off for longer: lost before the server lets go",
    checks: &[
        check!(
            "the connections are closed",
            [Proxy, Expiry, Reconnect],
            lost_after_a_cut
        ),
        check!(
            "nothing is delivered for a while",
            [Proxy, Expiry],
            lost_in_silence
        ),
        check!("answers are lost", [Proxy, Expiry], lost_without_answers),
    ],
};

pub(super) const F3: Rule = Rule {
    id: "F3",
    title: "a server restarts: clients go on by themselves",
    checks: &[
        check!("they lock again", [Control], lock_after_a_restart),
        check!(
            "one that waits is served",
            [Control],
            wait_through_a_restart
        ),
        check!(
            "tokens rise",
            [Control, LastingTokens],
            tokens_rise_through_a_restart
        ),
    ],
};

pub(super) const F4: Rule = Rule {
    id: "F4",
    title: "a server stops and goes on: no two holders",
    checks: &[
        check!(
            "for longer than the ttl",
            [Control, Expiry],
            server_stops_for_long
        ),
        check!("for a moment", [Control], server_stops_for_a_moment),
    ],
};

pub(super) const F5: Rule = Rule {
    id: "F5",
    title: "the reply to an acquire is lost: no orphan for longer than a ttl",
    checks: &[
        check!(
            "and the acquire is dropped",
            [Proxy],
            orphan_of_a_dropped_acquire
        ),
        check!(
            "and the client tries again",
            [Proxy],
            orphan_of_a_client_that_goes_on
        ),
    ],
};

pub(super) const F6: Rule = Rule {
    id: "F6",
    title: "the leader is killed: held or lost in time, and locks go on",
    checks: &[
        check!(
            "what is held goes to nobody else",
            [Members, Majority],
            held_through_a_loss
        ),
        check!("locks go on", [Members, NodeLoss], locks_go_on_after_a_loss),
    ],
};

pub(super) const F7: Rule = Rule {
    id: "F7",
    title: "one client is cut off, the other takes over",
    checks: &[
        check!("the holder is cut off", [Proxy, Expiry], holder_is_cut_off),
        check!(
            "the next waiter is cut off",
            [Proxy, Expiry],
            waiter_is_cut_off
        ),
    ],
};

pub(super) const F8: Rule = Rule {
    id: "F8",
    title: "the wake-up is lost: the waiter still wakes in bounded time",
    checks: &[
        check!("its connections are closed", [Proxy], wake_up_after_a_cut),
        check!("the answers to it are lost", [Proxy], wake_up_is_lost),
        check!("nothing is delivered for a while", [Proxy], wake_up_is_late),
    ],
};

pub(super) const F9: Rule = Rule {
    id: "F9",
    title: "a process stopped past its ttl: its token is refused",
    checks: &[
        check!("while it holds", [Processes, Expiry], stopped_holder),
        check!("while it waits", [Processes, Expiry], stopped_waiter),
    ],
};

/// A ttl that leaves time for a fault, and for a busy machine.
fn fault_ttl(cx: &Cx) -> Duration {
    cx.steady_ttl() * 2
}

/// The user's view of `client` with request limits that notice a fault.
fn noticing(client: Arc<dyn Backend>, ttl: Duration) -> Locks {
    locks(client).with_ttl(ttl).with_request_limit(ttl / 4)
}

async fn healed_after_a_cut(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(fault_ttl(&cx), || healed(&cx, Flow::Cut))
        .await
}

async fn healed_after_silence(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(fault_ttl(&cx), || healed(&cx, Flow::Hold))
        .await
}

async fn healed(cx: &Cx, flow: Flow) -> anyhow::Result<()> {
    let ttl = fault_ttl(cx);
    let (line, client) = cx.line().await?;
    let (other, key) = (cx.client().await?, cx.key());
    let guard = noticing(client, ttl).lock(&key).await?;
    let fault = async {
        line.set(flow);
        // The first renewal falls into it, the deadline does not.
        tokio::time::sleep(ttl / 2).await;
        line.set(Flow::Pass);
        tokio::time::sleep(ttl * 3 / 2).await;
    };
    tokio::select! {
        () = fault => {}
        () = guard.lost() => bail!("lost by a fault that was over before the deadline"),
    }
    ensure!(
        guard.is_held(),
        "lost by a fault that was over before the deadline"
    );
    refused(&*other, &key).await?;
    let released = soon("a release is answered", guard.release()).await?;
    released.context("the release after a healed fault")
}

async fn lost_after_a_cut(cx: Cx) -> anyhow::Result<()> {
    lost(&cx, Flow::Cut).await
}

async fn lost_in_silence(cx: Cx) -> anyhow::Result<()> {
    lost(&cx, Flow::Hold).await
}

async fn lost_without_answers(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let key = cx.key();
    let guard = noticing(client, ttl).lock(&key).await?;
    // The store hears every renewal and keeps the lock: but we do not know.
    line.set(Flow::LoseReplies);
    within(after(ttl), "lost fires", guard.lost()).await?;
    ensure!(!guard.is_held(), "lost has fired, and yet it is held");
    Ok(())
}

async fn lost(cx: &Cx, flow: Flow) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let (other, key) = (cx.client().await?, cx.key());
    let guard = noticing(client, ttl).lock(&key).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    line.set(flow);
    let next = within(after(ttl), "the server lets go", waiter).await??;
    // Asked after the other's grant: whatever the machine does, it must be over by then.
    ensure!(
        !guard.is_held(),
        "two hold {key}: believed after another got it"
    );
    soon("lost fires", guard.lost()).await?;
    // What was held back on the way arrives now, and must not harm the successor.
    line.set(Flow::Pass);
    let released = soon("a release is answered", guard.release()).await?;
    fails(ErrorKind::Lost, "the release of a lost lock", released)?;
    successor_is_untouched(next).await
}

async fn successor_is_untouched(next: Option<Box<dyn Hold>>) -> anyhow::Result<()> {
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    let renewed = soon("a renewal is answered", next.renew()).await?;
    renewed.context("the successor's renewal")?;
    let released = soon("a release is answered", next.release()).await?;
    released.context("the successor's release")
}

async fn lock_after_a_restart(cx: Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(&cx).await?;
    let ttl = cx.steady_ttl();
    let (client, key) = (cx.client().await?, cx.key());
    let locks = noticing(Arc::clone(&client), ttl);
    let guard = locks.lock(&key).await?;
    control.restart().await?;
    let next = within(after(ttl), "locked again", until_locked(&locks, &cx.key())).await??;
    next.release().await?;
    // The store has kept the lock, or the holder hears that it has not.
    let kept = async {
        loop {
            let holder = client.holder(&key).await.ok().flatten();
            let ours = holder.is_some_and(|h| h.token.is_none_or(|t| t == guard.token()));
            if ours && guard.is_held() {
                return;
            }
            tokio::time::sleep(ttl / 20).await;
        }
    };
    let either = async {
        tokio::select! {
            () = guard.lost() => {}
            () = kept => {}
        }
    };
    within(after(ttl), "lost fires, or the store still has it", either).await
}

async fn wait_through_a_restart(cx: Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(&cx).await?;
    let ttl = cx.steady_ttl();
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let guard = noticing(one, ttl).lock(&key).await?;
    let patient = noticing(Arc::clone(&other), ttl).with_wait(None);
    let mut waiter = Box::pin(patient.lock(&key));
    queued(&*other, &key, &mut waiter).await?;
    control.restart().await?;
    drop(guard);
    let served = within(after(ttl), "the waiter is served", waiter).await?;
    // Its session may have ended with the server: it says so, and does not hang.
    match served {
        Err(error) if error.kind() == ErrorKind::Lost && is_session(&cx) => Ok(()),
        served => {
            served?.release().await?;
            Ok(())
        }
    }
}

fn is_session(cx: &Cx) -> bool {
    cx.guarantees().expiry == Expiry::Session
}

async fn tokens_rise_through_a_restart(cx: Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(&cx).await?;
    let ttl = cx.steady_ttl();
    let (locks, key) = (noticing(cx.client().await?, ttl), cx.key());
    let mut last = None;
    for _ in 0..3 {
        for _ in 0..20 {
            let guard = within(after(ttl), "locked again", until_locked(&locks, &key)).await??;
            let token = guard.token();
            ensure!(
                last.is_none_or(|last| last < token),
                "after the token {last:?} comes {token}"
            );
            last = Some(token);
            guard.release().await?;
        }
        control.restart().await?;
    }
    Ok(())
}

async fn server_stops_for_long(cx: Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(&cx).await?;
    let ttl = cx.steady_ttl();
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let guard = noticing(one, ttl).lock(&key).await?;
    let patient = noticing(Arc::clone(&other), ttl).with_wait(None);
    let mut waiter = Box::pin(patient.lock(&key));
    queued(&*other, &key, &mut waiter).await?;
    control.pause().await?;
    within(after(ttl), "lost fires", guard.lost()).await?;
    control.resume().await?;
    let served = within(after(ttl), "the waiter is served", waiter).await?;
    ensure!(
        !guard.is_held(),
        "two hold {key}: revived by a server that goes on"
    );
    match served {
        Err(error) if error.kind() == ErrorKind::Lost && is_session(&cx) => Ok(()),
        served => {
            served?.release().await?;
            Ok(())
        }
    }
}

async fn server_stops_for_a_moment(cx: Cx) -> anyhow::Result<()> {
    cx.undisturbed(fault_ttl(&cx), || stops_for_a_moment(&cx))
        .await
}

async fn stops_for_a_moment(cx: &Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(cx).await?;
    let ttl = fault_ttl(&cx);
    let (other, key) = (cx.client().await?, cx.key());
    let guard = noticing(cx.client().await?, ttl).lock(&key).await?;
    let fault = async {
        control.pause().await?;
        tokio::time::sleep(ttl / 2).await;
        control.resume().await?;
        tokio::time::sleep(ttl * 3 / 2).await;
        anyhow::Ok(())
    };
    tokio::select! {
        done = fault => done?,
        () = guard.lost() => bail!("lost by a stop that was over before the deadline"),
    }
    ensure!(
        guard.is_held(),
        "lost by a stop that was over before the deadline"
    );
    refused(&*other, &key).await?;
    guard.release().await?;
    Ok(())
}

/// The same check on servers of its own, which it may break.
async fn own_servers(cx: &Cx) -> anyhow::Result<(Cx, Arc<dyn Control>)> {
    let cx = cx.on_new_store().await?;
    let control = cx.store().control.clone();
    Ok((cx, control.context("a store without control this time")?))
}

/// Locks `key` as soon as the store answers again; until then it must say that it does not.
async fn until_locked(locks: &Locks, key: &Key) -> anyhow::Result<Guard> {
    loop {
        match locks.lock(key).await {
            Ok(guard) => return Ok(guard),
            Err(error) if error.is_transient() || error.kind() == ErrorKind::Lost => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => return Err(error).context("while the store is away"),
        }
    }
}

async fn orphan_of_a_dropped_acquire(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let (other, key) = (cx.client().await?, cx.key());
    let locks = noticing(client, ttl);
    // Connected and warm, to the server that this key is on.
    locks.lock(&key).await?.release().await?;
    other.holder(&key).await?;
    line.set(Flow::LoseReplies);
    {
        let acquire = locks.lock(&key);
        let seen = is_granted(&*other, &key);
        tokio::select! {
            seen = within(after(ttl), "the store grants it", seen) => seen??,
            lock = acquire => bail!("answered, though the answers are lost: {lock:?}"),
        }
    }
    line.set(Flow::Pass);
    orphan_ends(&*other, &key, ttl).await
}

async fn orphan_of_a_client_that_goes_on(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let (other, key) = (cx.client().await?, cx.key());
    let locks = noticing(client, ttl);
    locks.lock(&key).await?.release().await?;
    line.set(Flow::LoseReplies);
    let lock = within(after(ttl), "an acquire gives up", locks.lock(&key)).await?;
    fails(ErrorKind::Unavailable, "an acquire without answers", lock)?;
    line.set(Flow::Pass);
    let guard = within(
        after(ttl),
        "its own orphan is out of the way",
        until_locked(&locks, &key),
    );
    let guard = guard.await??;
    ensure!(guard.is_held(), "lost from the start");
    refused(&*other, &key).await?;
    guard.release().await?;
    orphan_ends(&*other, &key, ttl).await
}

async fn is_granted(client: &dyn Backend, key: &Key) -> anyhow::Result<()> {
    while client.holder(key).await?.is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

async fn orphan_ends(client: &dyn Backend, key: &Key, ttl: Duration) -> anyhow::Result<()> {
    let wanted = waiting(key, Cx::LONG);
    let next = within(after(ttl), "the orphan ends", client.acquire(&wanted)).await??;
    ensure!(
        next.is_some(),
        "a claim without a limit to its wait gave up"
    );
    Ok(())
}

async fn held_through_a_loss(cx: Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(&cx).await?;
    let ttl = cx.steady_ttl();
    let (locks, other, key) = (
        noticing(cx.client().await?, ttl),
        cx.locks().await?,
        cx.key(),
    );
    let guard = locks.lock(&key).await?;
    control.kill_leader_of(&key).await?;
    let patient = other.with_wait(None);
    tokio::select! {
        biased;
        taken = until_locked(&patient, &key) => {
            let taken = taken?;
            ensure!(!guard.is_held(), "two hold {key}");
            taken.release().await?;
        }
        () = guard.lost() => {}
        () = tokio::time::sleep(ttl * 2) => {
            ensure!(guard.is_held(), "neither held nor lost");
        }
    }
    Ok(())
}

async fn locks_go_on_after_a_loss(cx: Cx) -> anyhow::Result<()> {
    let (cx, control) = own_servers(&cx).await?;
    let ttl = cx.steady_ttl();
    let (locks, other, key) = (
        noticing(cx.client().await?, ttl),
        cx.locks().await?,
        cx.key(),
    );
    let guard = locks.lock(&key).await?;
    control.kill_leader_of(&key).await?;
    // An election may take a while, and so may the renewal of all leases after it.
    let limit = after(ttl) + SOON;
    let next = within(limit, "locked again", until_locked(&locks, &cx.key())).await??;
    next.release().await?;
    // Lost or not: if nobody keeps it, it is free in time.
    drop(guard);
    let patient = other.with_wait(None);
    let last = within(limit, "the key goes on", until_locked(&patient, &key)).await??;
    last.release().await?;
    Ok(())
}

async fn holder_is_cut_off(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let (locks, other, key) = (noticing(client, ttl), cx.locks().await?, cx.key());
    let guard = locks.lock(&key).await?;
    line.set(Flow::Hold);
    let patient = other.with_wait(None);
    let next = within(after(ttl), "the other takes over", patient.lock(&key));
    let next = next.await??;
    ensure!(!guard.is_held(), "two hold {key}");
    ensure!(next.token() > guard.token(), "a token that does not rise");
    line.set(Flow::Pass);
    // Back again, the first waits its turn like anybody.
    let released = soon("a release is answered", guard.release()).await?;
    fails(ErrorKind::Lost, "the release of a lost lock", released)?;
    let tried = within(
        after(ttl),
        "the store answers again",
        until_tried(&locks, &key),
    )
    .await??;
    ensure!(tried.is_none(), "two hold {key}");
    next.release().await.context("the successor's release")?;
    let again = within(after(ttl), "locked again", until_locked(&locks, &key)).await??;
    again.release().await?;
    Ok(())
}

async fn until_tried(locks: &Locks, key: &Key) -> anyhow::Result<Option<Guard>> {
    loop {
        match locks.try_lock(key).await {
            Ok(tried) => return Ok(tried),
            Err(error) if error.is_transient() || error.kind() == ErrorKind::Lost => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(error) => return Err(error).context("while the store is away"),
        }
    }
}

async fn waiter_is_cut_off(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let patient = noticing(Arc::clone(&client), ttl).with_wait(None);
    let mut cut_off = Box::pin(patient.lock(&key));
    queued(&*client, &key, &mut cut_off).await?;
    let wanted = waiting(&key, ttl);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    line.set(Flow::Hold);
    soon("a release is answered", hold.release()).await??;
    let both = async {
        tokio::select! {
            next = waiter => Ok(next?),
            _ = &mut cut_off => bail!("granted without a network"),
        }
    };
    let next = within(after(ttl), "the living waiter is served", both).await??;
    next.context("a claim without a limit to its wait gave up")?;
    Ok(())
}

async fn wake_up_after_a_cut(cx: Cx) -> anyhow::Result<()> {
    wakes_after(&cx, Flow::Cut).await
}

async fn wake_up_is_lost(cx: Cx) -> anyhow::Result<()> {
    wakes_after(&cx, Flow::LoseReplies).await
}

async fn wake_up_is_late(cx: Cx) -> anyhow::Result<()> {
    wakes_after(&cx, Flow::Hold).await
}

/// The lock becomes free while the waiter hears nothing; the network is well again right after.
async fn wakes_after(cx: &Cx, flow: Flow) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (line, client) = cx.line().await?;
    let (one, key) = (cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let patient = noticing(Arc::clone(&client), ttl).with_wait(None);
    let mut waiter = Box::pin(patient.lock(&key));
    queued(&*client, &key, &mut waiter).await?;
    line.set(flow);
    let before = line.bytes();
    soon("a release is answered", hold.release()).await??;
    if flow != Flow::Cut {
        // Until the wake-up has come as far as the proxy, if one is sent at all.
        let on_the_way = async {
            while line.bytes() == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        drop(tokio::time::timeout(ttl, on_the_way).await);
    }
    line.set(Flow::Pass);
    let served = within(after(ttl), "the waiter wakes", waiter).await?;
    match served {
        // Its session may have ended with the connection: it says so, and does not hang.
        Err(error) if error.kind() == ErrorKind::Lost && is_session(cx) => Ok(()),
        served => {
            let guard = served?;
            ensure!(guard.is_held(), "lost from the start");
            guard.release().await?;
            Ok(())
        }
    }
}

async fn stopped_holder(cx: Cx) -> anyhow::Result<()> {
    let (other, key) = (cx.client().await?, cx.key());
    let mut child = cx.child().await?;
    let old = child.lock(&key, cx.ttl()).await?;
    child.pause()?;
    let wanted = waiting(&key, Cx::LONG);
    let next = within(after(cx.ttl()), "the store lets go", other.acquire(&wanted)).await??;
    let next = next.context("a claim without a limit to its wait gave up")?;
    child.resume()?;
    ensure!(
        !child.is_held(&key).await?,
        "two hold {key}: the stopped process believes in its lock"
    );
    // What a resource does that has seen the newer token.
    ensure!(
        old < next.token(),
        "the old token {old} is not refused after {}",
        next.token()
    );
    successor_is_untouched(Some(next)).await
}

/// The process is stopped just before the lock is handed to it, and goes on when another has it.
async fn stopped_waiter(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let mut child = cx.child().await?;
    let believes = child.queue(&key, cx.ttl(), 1).await?;
    child.pause()?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    soon("a release is answered", hold.release()).await??;
    let next = within(after(cx.ttl()), "the store lets go", waiter).await??;
    let next = next.context("a claim without a limit to its wait gave up")?;
    child.resume()?;
    // It has the time to believe in its late grant.
    child.settle(&key).await?;
    let until = history::now();
    let over = next.validity().is_ended();
    successor_is_untouched(Some(next)).await?;
    // Since when the child believes: the clock is one for both processes.
    let believes = within(after(cx.ttl()), "the child is served", believes.get()).await?;
    match believes {
        Err(_) if is_session(&cx) => Ok(()),
        believes => {
            let since = Duration::from_nanos(believes?.parse()?);
            ensure!(
                over || since > until,
                "two hold {key}: a late grant was believed"
            );
            Ok(())
        }
    }
}
