use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Claim, Error, ErrorKind, Moment, Result, Validity};
use tokio::time::sleep;

use super::backend::Nodes;
use super::fanout::Fanout;
use super::hold::RedlockHold;
use super::node::Attempt;
use super::queues::Place;
use super::quorum::Outcome;

/// Grants a claim, waiting for its turn. Cancel safe: what an attempt has on the nodes is taken back
/// when this future is dropped.
///
/// 1. *In line.* Of the waiters of this client for a lock only the first asks.
/// 2. *Attempt.* Granted: done. A first attempt that does not find enough nodes is the caller's error.
/// 3. *Watch.* From the second attempt on the nodes tell when the lock is released. It is asked for
///    again at once, since it may have been released in between.
/// 4. *Wait* until a majority has told, or the holder's lock must have ended, or for a second at most:
///    a message may be lost. After a release all clients that wait ask, each after a random time that
///    grows with their number, so that they do not take votes from each other for long. After votes
///    were split the time is random too.
/// 5. *Over.* Where the wait ends while too few nodes vote yet, that is said: nobody need hold the lock.
pub(super) async fn acquire(nodes: &Arc<Nodes>, claim: &Claim) -> Result<Option<RedlockHold>> {
    if claim.ttl > nodes.max_ttl {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "a ttl of {:?} is longer than max_ttl, {:?}: give a shorter one, or raise max_ttl on \
                 all clients of these nodes",
                claim.ttl, nodes.max_ttl
            ),
        ));
    }
    let started = Moment::now();
    let left = || {
        claim
            .wait
            .map(|wait| wait.saturating_sub(started.elapsed()))
    };
    if claim.wait == Some(Duration::ZERO) {
        return try_now(nodes, claim).await;
    }

    let waiting = Waiting {
        nodes,
        place: nodes.queues.join(&nodes.lock(&claim.key)),
    };
    let line = &waiting.place.line;
    let Some(_turn) = line.turn(left()).await else {
        return Ok(None);
    };
    let mut failures = 0;
    for number in 1.. {
        line.forget();
        let sent = Moment::now();
        let outcome = nodes.attempt(claim, number).await;
        let took = sent.elapsed().max(Duration::from_micros(500));
        let not_yet = match &outcome {
            Outcome::NotYet(e) => Some(e.clone()),
            _ => None,
        };
        let pause = match outcome {
            Outcome::Granted { token, sent, .. } => {
                let validity = Validity::new(sent, claim.ttl);
                return Ok(Some(hold(nodes, claim, number, token, validity)));
            }
            Outcome::Missing(e) if number == 1 || !e.is_transient() => return Err(e),
            Outcome::Held { left } => {
                failures = 0;
                // A millisecond more, for it has gone only after its last one.
                let ends = left.map_or(LONGEST_PAUSE, |left| left + Duration::from_millis(1));
                ends.min(random(LONGEST_PAUSE / 2, LONGEST_PAUSE))
            }
            Outcome::Split | Outcome::Late(_) => {
                failures += 1;
                random(Duration::ZERO, 2 * took * failures.min(16)).min(LONGEST_PAUSE)
            }
            Outcome::NotYet(_) | Outcome::Missing(_) => {
                random(LONGEST_PAUSE / 20, LONGEST_PAUSE / 5)
            }
        };
        if left().is_some_and(|left| left.is_zero()) {
            return not_yet.map_or(Ok(None), Err);
        }
        if watch(nodes, claim, line).await {
            continue;
        }
        let pause = left().map_or(pause, |left| left.min(pause));
        tokio::select! {
            waiting = line.freed(nodes.quorum.majority()) => {
                if waiting > 1 {
                    let slots = took * waiting.min(64);
                    sleep(random(Duration::ZERO, slots)).await;
                }
            }
            () = sleep(pause) => {}
        }
        if left().is_some_and(|left| left.is_zero()) {
            return not_yet.map_or(Ok(None), Err);
        }
    }
    Ok(None)
}

/// How long it takes at most until a waiter asks again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Never waits; but where votes were split and nobody has the lock, or came too late, it asks again a
/// few times.
async fn try_now(nodes: &Arc<Nodes>, claim: &Claim) -> Result<Option<RedlockHold>> {
    const TRIES: u32 = 5;
    for number in 1..=TRIES {
        let sent = Moment::now();
        match nodes.attempt(claim, number).await {
            Outcome::Granted { token, sent, .. } => {
                let validity = Validity::new(sent, claim.ttl);
                return Ok(Some(hold(nodes, claim, number, token, validity)));
            }
            Outcome::Held { .. } => return Ok(None),
            Outcome::Split => {
                let took = sent.elapsed().min(Duration::from_millis(20));
                sleep(random(Duration::ZERO, 2 * took * number)).await;
            }
            // The next one need not be as slow.
            Outcome::Late(_) if number < TRIES => {}
            // Nodes whose time had come were seeded meanwhile.
            Outcome::NotYet(_) if number == 1 => {}
            Outcome::NotYet(e) | Outcome::Missing(e) | Outcome::Late(e) => return Err(e),
        }
    }
    Ok(None)
}

/// Has the nodes tell when the lock is released; says whether one of them does from now on that did
/// not before.
async fn watch(nodes: &Arc<Nodes>, claim: &Claim, line: &super::queues::Line) -> bool {
    let all = nodes.quorum.nodes();
    let unwatched = line.unwatched(all.iter().map(|node| node.up()).enumerate());
    if unwatched.is_empty() {
        return false;
    }
    let lock = nodes.lock(&claim.key);
    let replies = all.iter().enumerate();
    let replies =
        replies.map(|(index, node)| unwatched.contains(&index).then(|| node.watch(&lock)));
    let mut replies = Fanout::new(replies);
    let mut any = false;
    while let Some((node, watched)) = replies.next().await {
        if let Ok(connection) = watched {
            line.watched(node, connection);
            any = true;
        }
    }
    any
}

fn hold(
    nodes: &Arc<Nodes>,
    claim: &Claim,
    number: u32,
    token: leasehold_core::Token,
    validity: Validity,
) -> RedlockHold {
    let attempt = Attempt {
        key: claim.key.clone(),
        claim: claim.id,
        number,
    };
    RedlockHold::new(nodes.clone(), attempt, token, claim.ttl, validity)
}

/// A claim that waits.
struct Waiting<'a> {
    nodes: &'a Arc<Nodes>,
    place: Place,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let lock = self.place.lock.clone();
        for node in self.place.leave() {
            self.nodes.quorum.nodes()[node].unwatch(&lock);
        }
    }
}

fn random(from: Duration, to: Duration) -> Duration {
    from + to.saturating_sub(from).mul_f64(fastrand::f64())
}
