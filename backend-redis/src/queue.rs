use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Claim, Error, ErrorKind, Moment, Result, Token, Validity};
use tokio::time::{sleep, timeout};

use crate::error;
use crate::hold::RedisHold;
use crate::inbox::{Ends, Held, Pushed, Waiter};
use crate::names::LockKeys;
use crate::request::{Answer, Place, Request};
use crate::servers::{Failed, Line, Servers};

/// Grants a claim, waiting for its turn. Cancel safe: what the claim has on the server is withdrawn
/// when this future is dropped.
///
/// The queue of a lock is a sorted set on the server: a ticket for each waiter, and with it how long
/// the waiter counts as alive. Whoever releases hands the lock over to the first living waiter, in the
/// same script that frees it, and tells its inbox. Nothing polls.
///
/// 1. *Ask.* The claim is registered in the inbox, then sent. Free: granted. Held: it got a ticket.
///    A first request that fails is the caller's error; whether it did something on the server is not
///    known, so it is withdrawn (step 6). A slot that moves is no failure for a claim that may wait.
/// 2. *Wait* for a message, and *ask again* from the same place after a third of the ttl, which keeps
///    the place alive; when the holder's lock must have ended (the last answer said when, or a message
///    to whoever is next), if this is the oldest waiter of this client for this lock, so that it gets
///    the lock of a holder that crashed; and at once on another connection. Asking again may be done any number of times, by requests that overlap too: it keeps
///    the ticket, and finds a grant whose message was lost.
/// 3. *A grant that is answered* counts from the sending of the request: it was made or renewed after
///    that.
/// 4. *A grant by message* may have been made long before it is seen here: the process may have been
///    stopped in between. It was made after the server answered "still waiting" to the newest request
///    that it answered, if the message came after that answer; so it counts from the sending of that
///    request. Messages and answers of one connection keep their order. A message that was here before
///    that answer was looked at counts from the request before; one that came on another connection, or
///    whose time is over, proves nothing, and is a reason to ask again: if the lock is ours, that
///    renews it; if not, the place in the queue is still ours.
/// 5. *Replicas that must have it* are waited for before it is a hold. Those who waited go on when too few
///    confirm in time: they keep the lock and ask again, which renews it, so nobody overtakes them.
/// 6. *The wait is over, or the future is dropped.* The claim is withdrawn in the background, down the
///    connection it asked on, so that it cannot overtake a request that is still on its way. If the
///    lock was granted in between, that hands it on.
///
/// Source: the lock recipe of `ZooKeeper` (a queue, each told by the one before), carried over to a
/// server without sessions. What a grant by message may be believed answers the paused client of
/// Kleppmann's "How to do distributed locking".
pub(crate) async fn acquire(servers: &Servers, claim: &Claim) -> Result<Option<RedisHold>> {
    let mut asker = Asker::new(servers, claim);
    let started = asker.asked;
    let seen = match asker.ask().await? {
        Asked::Granted(grant) => {
            if let Some(hold) = asker.take(&grant).await? {
                return Ok(Some(hold));
            }
            if !asker.is_proven(&grant) {
                return Err(error::superseded(&servers.address(&asker.keys)));
            }
            // Taken away before it was seen: to the end of the queue.
            None
        }
        Asked::Waiting(seen) => Some(seen),
        Asked::Moving(e) => {
            asker.failed(e);
            None
        }
        Asked::Refused => return Ok(None),
    };
    // In a box: most claims are granted at once, and are passed on without the room that this needs.
    Box::pin(wait(asker, seen, started)).await
}

/// Steps 2 to 6 of a claim that was not granted at once.
async fn wait(
    mut asker: Asker<'_>,
    mut seen: Option<Seen>,
    started: Moment,
) -> Result<Option<RedisHold>> {
    let claim = asker.claim;
    let mut ask_now = seen.is_none() && !asker.failed;
    let mut grant = None;
    loop {
        if grant.is_none()
            && let Some(pushed) = asker.waiter.take_pushed()
        {
            let believe = |seen: &Seen| seen.believe(pushed, claim.ttl);
            grant = seen.as_ref().and_then(believe);
            ask_now = true;
        }
        if let Some(grant) = grant.take() {
            match asker.take(&grant).await {
                Ok(Some(hold)) => return Ok(Some(hold)),
                Ok(None) => ask_now = true,
                Err(e) if e.is_transient() => {
                    asker.failed(e);
                    ask_now = false;
                }
                Err(e) => return Err(e),
            }
        }
        if let (Some(seen), Some(ends)) = (&mut seen, asker.waiter.take_holder_ends()) {
            seen.holder_ends = Some(ends);
        }
        let left = claim
            .wait
            .map(|wait| wait.saturating_sub(started.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            return asker.nowhere.take().map_or(Ok(None), Err);
        }
        let due = asker.due(seen.as_ref());
        if !ask_now && !due.is_zero() {
            let pause = left.map_or(due, |left| left.min(due));
            tokio::select! {
                () = asker.waiter.changed() => {}
                () = sleep(pause) => {}
            }
            continue;
        }
        ask_now = false;
        match asker.ask_again(left).await {
            Ok(Some(Asked::Granted(granted))) => grant = Some(granted),
            // A message before or after that answer, nobody can say: it counts from the request before.
            Ok(Some(Asked::Waiting(now))) if !asker.waiter.has_pushed() => seen = Some(now),
            Ok(Some(Asked::Waiting(_) | Asked::Refused) | None) => {}
            Ok(Some(Asked::Moving(e))) => asker.failed(e),
            Err(e) if e.is_transient() => asker.failed(e),
            Err(e) => return Err(e),
        }
    }
}

/// The newest answer "still waiting".
struct Seen {
    /// When the request left that it answers.
    sent: Moment,
    /// What it came on.
    line: Line,
    /// When the lock of the holder ends if it is not renewed.
    holder_ends: Option<Ends>,
}

impl Seen {
    /// How long a pushed grant may be believed; `None` if it proves nothing.
    fn believe(&self, pushed: Pushed, ttl: Duration) -> Option<Grant> {
        if pushed.connection != self.line.connection.number {
            return None;
        }
        let validity = Validity::new(self.sent, ttl);
        (!validity.is_ended()).then_some(Grant {
            token: pushed.token,
            validity,
            connection: pushed.connection,
        })
    }
}

/// The lock is ours, as was said on this connection.
struct Grant {
    token: Token,
    validity: Validity,
    connection: u64,
}

enum Asked {
    Granted(Grant),
    Waiting(Seen),
    /// The lock's slot is moving: nobody can be told before it has arrived.
    Moving(Error),
    Refused,
}

/// A claim while it asks and waits. Dropping it withdraws the claim.
struct Asker<'a> {
    servers: &'a Servers,
    claim: &'a Claim,
    keys: LockKeys,
    waiter: Arc<Waiter>,
    place: Place,
    /// Where the newest request went.
    asked_on: Option<Line>,
    /// When that was sent, and whether it failed.
    asked: Moment,
    failed: bool,
    /// Why it has neither the lock nor a place in the queue, though it waits.
    nowhere: Option<Error>,
    /// Registered in the inbox, and perhaps known to the server; not once it is a hold.
    open: bool,
}

impl<'a> Asker<'a> {
    fn new(servers: &'a Servers, claim: &'a Claim) -> Self {
        Self {
            servers,
            claim,
            keys: servers.names().of(&claim.key),
            waiter: servers.inbox().register(claim.id),
            place: match claim.wait {
                Some(Duration::ZERO) => Place::Try,
                _ => Place::None,
            },
            asked_on: None,
            asked: Moment::now(),
            failed: false,
            nowhere: None,
            open: true,
        }
    }

    /// Sends the claim and takes in the answer.
    async fn ask(&mut self) -> Result<Asked> {
        let limit = self.claim.request_limit;
        self.asked = Moment::now();
        let request = Request::Acquire {
            claim: self.claim,
            place: self.place,
            keys: &self.keys,
        };
        if self.place == Place::None {
            // Until an answer says which.
            self.place = Place::Unknown;
        }
        let asking = self.servers.request(request, &mut self.asked_on);
        let answered = match timeout(limit, asking).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(Failed::Moving(e))) => return Ok(Asked::Moving(e)),
            Ok(Err(failed)) => return Err(failed.into()),
            Err(_elapsed) => {
                let address = self.servers.address(&self.keys);
                return Err(error::silent(&address, limit));
            }
        };
        let (sent, line) = (answered.sent, answered.line);
        self.failed = false;
        self.nowhere = None;
        match answered.answer {
            Answer::Granted(token) => {
                self.leave_queue();
                Ok(Asked::Granted(Grant {
                    token,
                    validity: Validity::new(sent, self.claim.ttl),
                    connection: line.connection.number,
                }))
            }
            Answer::Waiting { ticket, left } => {
                self.join_queue(ticket);
                Ok(Asked::Waiting(Seen {
                    sent,
                    line,
                    // A millisecond more, for it has gone only after its last one.
                    holder_ends: left.map(|left| (sent, left + Duration::from_millis(1))),
                }))
            }
            Answer::Refused => {
                self.open = false;
                self.servers.inbox().forget(self.claim.id);
                Ok(Asked::Refused)
            }
            Answer::Done | Answer::NotHeld => Err(error::unexpected(&line.client.address)),
        }
    }

    /// The same from the queue; `None` if there is something else to look at first: a message, another
    /// connection, the end of the wait. A request that is left behind is harmless.
    async fn ask_again(&mut self, left: Option<Duration>) -> Result<Option<Asked>> {
        let waiter = self.waiter.clone();
        let (servers, keys) = (self.servers, self.keys.clone());
        let before = servers.standing(&keys);
        let mut over = pin!(async {
            match left {
                Some(left) => sleep(left).await,
                None => std::future::pending().await,
            }
        });
        let mut asking = pin!(self.ask());
        loop {
            tokio::select! {
                biased;
                asked = &mut asking => return asked.map(Some),
                () = waiter.changed() => {
                    let now = servers.standing(&keys);
                    let moved = now.owner != before.owner;
                    if waiter.has_pushed() || moved || (before.up.is_some() && now.up != before.up) {
                        return Ok(None);
                    }
                }
                () = &mut over => return Ok(None),
            }
        }
    }

    /// How long until it is time to ask again.
    fn due(&self, seen: Option<&Seen>) -> Duration {
        let third = self.claim.ttl / 3;
        if self.failed {
            // An ailing server that answers at once must not be asked in a loop.
            let pause = third.min(Duration::from_millis(200));
            return pause.saturating_sub(self.asked.elapsed());
        }
        if seen.is_some_and(|seen| !self.servers.stands(&seen.line, &self.keys)) {
            return Duration::ZERO;
        }
        let keep = third.saturating_sub(self.asked.elapsed());
        let holder_ends = seen
            .and_then(|seen| seen.holder_ends)
            .map(|(from, left)| left.saturating_sub(from.elapsed()));
        match (holder_ends, self.place) {
            (Some(ends), Place::Ticket(ticket))
                if ends < keep && self.servers.inbox().is_oldest(&self.keys.lock, ticket) =>
            {
                ends
            }
            _ => keep,
        }
    }

    /// The newest request failed for this reason; a place in the queue is kept.
    fn failed(&mut self, reason: Error) {
        self.failed = true;
        self.nowhere = match self.place {
            Place::Ticket(_) => None,
            _ => Some(reason),
        };
    }

    /// The lock is ours, and the replicas that must have it do. `None` if it was taken away in the
    /// meantime, or is not proven.
    ///
    /// # Errors
    /// What keeps the replicas from confirming it, or us from hearing it. It may be asked for again.
    async fn take(&mut self, grant: &Grant) -> Result<Option<RedisHold>> {
        let Some(mut hold) = self.hold(grant) else {
            return Ok(None);
        };
        if self.servers.replicas_are_asked()
            && let Err(e) = Box::pin(hold.confirm()).await
        {
            drop(hold);
            self.waiter = self.servers.inbox().register(self.claim.id);
            return Err(match e.kind() {
                ErrorKind::Lost => error::superseded(&self.servers.address(&self.keys)),
                _ => e,
            });
        }
        self.open = false;
        Ok(Some(hold))
    }

    /// The lock is ours. `None` if it was taken away in the meantime, or is not proven.
    fn hold(&mut self, grant: &Grant) -> Option<RedisHold> {
        let Grant {
            token, validity, ..
        } = grant;
        self.servers.shared().saw(token.get());
        let held = Held {
            claim: self.claim.id,
            lock: self.keys.lock.clone(),
            token: *token,
        };
        if !self.servers.inbox().hold(&held, validity) {
            return None;
        }
        // Now that it stands in the inbox, whoever opens the next connection will prove it.
        if !self.is_proven(grant) {
            self.waiter = self.servers.inbox().register(self.claim.id);
            if let Place::Ticket(ticket) = self.place {
                let lock = &self.keys.lock;
                self.servers.inbox().join(lock, ticket, &self.waiter);
            }
            return None;
        }
        self.leave_queue();
        Some(RedisHold::new(
            self.servers.clone(),
            self.keys.clone(),
            self.claim,
            *token,
            validity.clone(),
        ))
    }

    /// Whether a grant was made by the server that is asked now: not by one that has been the master
    /// before.
    fn is_proven(&self, grant: &Grant) -> bool {
        self.asked_on
            .as_ref()
            .map(|line| &line.connection)
            .is_some_and(|it| it.number == grant.connection && !it.is_over())
    }

    fn join_queue(&mut self, ticket: u64) {
        if self.place != Place::Ticket(ticket) {
            self.leave_queue();
            self.place = Place::Ticket(ticket);
            self.servers
                .inbox()
                .join(&self.keys.lock, ticket, &self.waiter);
        }
    }

    fn leave_queue(&mut self) {
        if let Place::Ticket(ticket) = self.place {
            self.servers.inbox().leave(&self.keys.lock, ticket);
            self.place = Place::Unknown;
        }
    }
}

impl Drop for Asker<'_> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let place = match self.place {
            Place::Try => Place::None,
            place => place,
        };
        self.leave_queue();
        self.servers.inbox().forget(self.claim.id);
        if let Some(line) = &self.asked_on {
            let (keys, claim) = (self.keys.clone(), self.claim.id);
            self.servers
                .cancel(line, keys, claim, place, self.claim.ttl);
        }
    }
}
