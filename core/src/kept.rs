use std::fmt;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::at_once::poll_once;
use crate::keeper::{Keeper, Place};
use crate::validity::LONGEST_SLEEP;
use crate::{Claim, Error, ErrorKind, Hold, Key, Moment, OwnerId, Result, Token, Validity};

/// A granted lock in core's keeping, from the grant to the end of its release.
///
/// The backend's [`Hold`] is used by one at a time: it lies in a slot, and whoever needs it (a
/// renewal, a release) takes it out as a [`Loan`], which puts it back when it is dropped, wherever
/// that happens. So a renewal that is dropped half-way, or whose runtime dies, never takes the hold
/// with it.
///
/// 1. *Held.* The [`Keeper`] calls [`attend`](Self::attend) when it is due: renews, or reports the
///    loss, and one ttl after a loss drops the hold.
/// 2. *Releasing*, from the first poll of a release: a renewal under way is stopped and gives the
///    hold back; attempts follow until one is answered or the lock has ended.
/// 3. *Over.* The hold is dropped and the keeper forgets it.
pub(crate) struct Kept {
    pub(crate) key: Key,
    pub(crate) owner: OwnerId,
    pub(crate) token: Token,
    pub(crate) validity: Validity,
    /// When the grant arrived.
    pub(crate) granted: Moment,
    ttl: Duration,
    renewed: bool,
    request_limit: Duration,
    keeper: Arc<Keeper>,
    slot: Mutex<Slot>,
    /// The hold came back, or the phase changed.
    changed: Notify,
}

struct Slot {
    hold: Option<Box<dyn Hold>>,
    phase: Phase,
    place: Option<Place>,
    /// A release was sent and not answered: "not there" may be its doing.
    unanswered: bool,
    /// Since when it is being closed, and how long that may take.
    closing: Option<(Moment, Duration)>,
    loss_reported: bool,
    /// Why its release did not get through before the lock had ended.
    unreleased: Option<Error>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Held,
    Releasing,
    Over,
}

impl Kept {
    /// Takes a hold that was just granted into keeping; `max_hold` counts from now.
    pub(crate) fn new(
        hold: Box<dyn Hold>,
        claim: &Claim,
        max_hold: Option<Duration>,
        keeper: Arc<Keeper>,
    ) -> Arc<Self> {
        let granted = Moment::now();
        let validity = hold.validity().clone();
        let fixed = claim.fixed.then_some(claim.ttl);
        if let Some(limit) = [fixed, max_hold].into_iter().flatten().min() {
            validity.limit(granted, limit);
        }
        Arc::new(Self {
            key: claim.key.clone(),
            owner: claim.owner.clone(),
            token: hold.token(),
            validity,
            ttl: claim.ttl,
            renewed: !claim.fixed,
            request_limit: claim.request_limit,
            granted,
            keeper,
            slot: Mutex::new(Slot {
                hold: Some(hold),
                phase: Phase::Held,
                place: None,
                unanswered: false,
                closing: None,
                loss_reported: false,
                unreleased: None,
            }),
            changed: Notify::new(),
        })
    }

    /// Makes sure of a grant that took long to arrive: renews once if less than half of the ttl is
    /// left. False: it is not ours (any more).
    pub(crate) async fn confirm(&self) -> bool {
        let late = |left: Duration| left < self.ttl / 2;
        if !self.validity.term_left(self.granted).is_some_and(late) {
            return !self.validity.is_ended_at(self.granted);
        }
        let Some(mut loan) = self.lend() else {
            return false;
        };
        if let Ok(Err(error)) = timeout(self.request_limit, loan.hold().renew()).await
            && error.kind() == ErrorKind::Lost
        {
            self.validity.end();
        }
        !self.validity.is_ended()
    }

    /// Resolves once nothing of it is left on the way: released, or given up.
    pub(crate) async fn over(&self) {
        self.until(|slot| slot.phase == Phase::Over).await;
    }

    /// The grid on which its times are rounded, so that renewals travel together.
    pub(crate) fn grid(&self) -> Duration {
        self.ttl / 100
    }

    /// Whether a release is under way.
    pub(crate) fn is_leaving(&self) -> bool {
        self.slot().phase == Phase::Releasing
    }

    /// Whether nothing of it is left.
    pub(crate) fn is_over(&self) -> bool {
        self.slot().phase == Phase::Over
    }
}

/// Renewal and loss.
impl Kept {
    /// The keeper's time for it has come.
    pub(crate) fn attend(self: &Arc<Self>) {
        let now = Moment::now();
        let mut slot = self.slot();
        match slot.phase {
            Phase::Over => {}
            Phase::Releasing => self.keeper.place(self, &mut slot.place, None),
            Phase::Held if !self.validity.is_ended_at(now) => {
                if self.renewal_needed(now) {
                    self.keeper.place(self, &mut slot.place, None);
                    drop(slot);
                    self.keeper.spawn(self.clone().renew());
                } else {
                    let next = (now, self.next_look(now));
                    self.keeper.place(self, &mut slot.place, Some(next));
                }
            }
            Phase::Held if !slot.loss_reported => {
                slot.loss_reported = true;
                self.keeper
                    .place(self, &mut slot.place, Some((now, self.ttl)));
                drop(slot);
                warn!(
                    target: "leasehold",
                    key = %self.key, owner = %self.owner, token = %self.token,
                    held = ?self.granted.elapsed(),
                    "lock lost"
                );
            }
            Phase::Held => {
                drop(slot);
                self.finish();
            }
        }
    }

    /// Puts it on the keeper's schedule; `now` is a moment just past.
    pub(crate) fn schedule(self: &Arc<Self>, now: Moment) {
        let mut slot = self.slot();
        if slot.phase == Phase::Held {
            let next = (now, self.next_look(now));
            self.keeper.place(self, &mut slot.place, Some(next));
        }
    }

    /// Nothing is renewed that has no term, or whose limit comes before the end of its term.
    fn renewal_needed(&self, now: Moment) -> bool {
        let limit = self.validity.limit_left(now);
        let term = self.validity.term_left(now);
        self.renewed && term.is_some_and(|term| limit.is_none_or(|limit| limit > term))
    }

    /// How long from `now` it has to be looked at: for the next renewal, a third of the term; else
    /// when it ends, and every third of the ttl to hear what the store may have said.
    fn next_look(&self, now: Moment) -> Duration {
        if self.renewal_needed(now) {
            self.validity.term_left(now).unwrap_or(self.ttl) / 3
        } else {
            self.validity.remaining_at(now).min(self.ttl / 3)
        }
    }

    /// Renews until it succeeds, a release begins, or the lock has ended.
    async fn renew(self: Arc<Self>) {
        let mut attempts = 0_u32;
        loop {
            let left = self.validity.term_left(Moment::now()).unwrap_or_default();
            if left.is_zero() {
                break;
            }
            attempts += 1;
            let answer = {
                let Some(mut loan) = self.lend_in(|phase| phase == Phase::Held) else {
                    return;
                };
                tokio::select! {
                    biased;
                    () = self.until(|slot| slot.phase != Phase::Held) => return,
                    // Half of what remains leaves time for another attempt.
                    answer = timeout(left / 2, loan.hold().renew()) => answer,
                }
            };
            match answer {
                Ok(Ok(())) => {
                    if attempts > 1 || left < self.ttl / 3 {
                        warn!(
                            target: "leasehold",
                            key = %self.key, owner = %self.owner, token = %self.token,
                            attempts, was_left = ?left,
                            "renewed late"
                        );
                    }
                    break;
                }
                Ok(Err(error)) if error.kind() == ErrorKind::Lost => {
                    self.validity.end();
                    break;
                }
                Ok(Err(error)) => self.report_failed_renewal(attempts, &error),
                Err(_elapsed) => self.report_failed_renewal(attempts, &no_answer(left / 2)),
            }
            // An answer that comes at once must not become a busy loop against an ailing store.
            let pause = (self.ttl / 20)
                .min(self.validity.remaining() / 4)
                .min(LONGEST_SLEEP);
            tokio::select! {
                biased;
                () = self.until(|slot| slot.phase != Phase::Held) => return,
                () = self.validity.ended() => break,
                () = tokio::time::sleep(pause) => {}
            }
        }
        if self.validity.is_ended() {
            self.attend();
        } else {
            self.schedule(Moment::now());
        }
    }

    fn report_failed_renewal(&self, attempt: u32, error: &Error) {
        warn!(
            target: "leasehold",
            key = %self.key, owner = %self.owner, token = %self.token,
            attempt, left = ?self.validity.remaining(), %error,
            "renewal failed"
        );
    }
}

/// Release.
impl Kept {
    /// Releases and waits for one attempt. If the future is dropped, or the attempt fails for a
    /// passing reason, the rest happens in the background.
    pub(crate) async fn release(self: Arc<Self>) -> Result<()> {
        if !self.begin_release() {
            return Err(self.lost());
        }
        let mut rest = Rest(Some(self.clone()));
        if self.validity.is_ended() {
            // The store may still have it: it is freed for the next one, but nobody waits for that.
            return Err(self.lost());
        }
        let Some(runtime) = self.runtime() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "released outside of a tokio runtime, after the one of the acquire has ended: \
                 the lock ends by itself within its ttl",
            ));
        };
        let attempt = self.limited(self.request_limit, self.clone().attempt());
        let answer = within(&runtime, attempt).await;
        if self.settle(&answer) {
            rest.0 = None;
        }
        answer
    }

    /// Releases without waiting: polls the release once, so that a quick store is done with it when
    /// this returns; the rest happens in the background. Never panics, wherever it is called.
    pub(crate) fn let_go(self: &Arc<Self>) {
        if !self.begin_release() {
            return;
        }
        let mut attempt: Attempt = Box::pin(self.clone().attempt());
        if let Some(runtime) = self.background()
            && let Ok(Poll::Ready(answer)) =
                catch_unwind(AssertUnwindSafe(|| poll_once(&runtime, attempt.as_mut())))
        {
            if self.settle(&answer) {
                return;
            }
            attempt = Box::pin(std::future::ready(answer));
        }
        self.release_in_background(attempt);
    }

    /// `close`: `lost` fires, then the lock is released, and that is awaited.
    pub(crate) async fn close(self: Arc<Self>) -> Result<()> {
        let patience = self.validity.remaining().min(self.ttl);
        // Once the lock has ended nothing is left to be released, however long a request may take.
        let longest = patience + self.request_limit.min(self.ttl);
        let late = |_elapsed| no_answer(longest);
        if !self.begin_release() {
            timeout(longest, self.over()).await.map_err(late)?;
            return self.slot().unreleased.clone().map_or(Ok(()), Err);
        }
        self.slot().closing = Some((Moment::now(), patience));
        self.validity.end();
        let _rest = Rest(Some(self.clone()));
        let releasing = self.clone().drive(Box::pin(self.clone().attempt()));
        match timeout(longest, releasing).await.map_err(late)? {
            Err(error) if error.kind() == ErrorKind::Lost => Ok(()),
            answer => answer,
        }
    }

    /// From here on nothing renews. False: somebody else began already.
    fn begin_release(&self) -> bool {
        let mut slot = self.slot();
        if slot.phase != Phase::Held {
            return false;
        }
        slot.phase = Phase::Releasing;
        let renewal_under_way = slot.hold.is_none();
        drop(slot);
        if renewal_under_way {
            self.changed.notify_waiters();
        }
        true
    }

    /// One attempt, without a limit in time.
    ///
    /// "Not there" is success only as the answer to a retry of an unanswered attempt, and only while
    /// the lock could not have ended otherwise (C13); else it was lost.
    async fn attempt(self: Arc<Self>) -> Result<()> {
        let Some(mut loan) = self.lend_when_free().await else {
            return Ok(());
        };
        let retry = std::mem::replace(&mut self.slot().unanswered, true);
        match loan.hold().release().await {
            Err(error) if error.kind() == ErrorKind::Lost => {
                if retry && !self.validity.is_ended() {
                    Ok(())
                } else {
                    Err(self.lost())
                }
            }
            Err(error) => {
                if !error.is_transient() {
                    self.slot().unanswered = retry;
                }
                Err(error)
            }
            Ok(()) => Ok(()),
        }
    }

    async fn limited(
        &self,
        limit: Duration,
        attempt: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        timeout(limit, attempt)
            .await
            .unwrap_or_else(|_elapsed| Err(no_answer(limit)))
    }

    /// Drives an attempt that was begun, and then others, until the release is answered or the lock
    /// has ended.
    async fn drive(self: Arc<Self>, begun: Attempt) -> Result<()> {
        // No attempt need outlive the lock, however long a request may take.
        let limit = self.request_limit.min(self.ttl);
        let mut attempt = begun;
        let mut pause = self.ttl / 50;
        loop {
            let answer = self.limited(limit, attempt).await;
            if self.settle(&answer) {
                return answer;
            }
            if self.has_ended() {
                self.slot().unreleased = answer.as_ref().err().cloned();
                self.finish();
                return answer;
            }
            tokio::time::sleep(pause.min(LONGEST_SLEEP)).await;
            pause = (pause * 2).min(self.ttl / 3);
            attempt = Box::pin(self.clone().attempt());
        }
    }

    fn release_in_background(self: &Arc<Self>, begun: Attempt) {
        match self.background() {
            Some(runtime) => {
                let rest = GivenUp(self.clone());
                drop(runtime.spawn(async move {
                    let rest = rest;
                    // Its answer was told to tracing.
                    let _answer = rest.0.clone().drive(begun).await;
                }));
            }
            None => self.finish(),
        }
    }

    /// Whether the store has let go by now, so that there is nothing left to release.
    fn has_ended(&self) -> bool {
        match self.slot().closing {
            Some((since, patience)) => since.elapsed() >= patience,
            None => self.validity.is_ended(),
        }
    }

    /// Whether the store has answered the release for good; then it is over.
    fn settle(&self, answer: &Result<()>) -> bool {
        let (key, owner, token) = (&self.key, &self.owner, &self.token);
        let held = || self.granted.elapsed();
        match answer {
            Ok(()) => {
                debug!(target: "leasehold", %key, %owner, %token, held = ?held(), "lock released");
            }
            Err(error) if error.kind() == ErrorKind::Lost => {
                debug!(
                    target: "leasehold", %key, %owner, %token, held = ?held(),
                    "lock was lost before its release"
                );
            }
            Err(error) => {
                warn!(
                    target: "leasehold", %key, %owner, %token, held = ?held(), %error,
                    "release failed"
                );
                return false;
            }
        }
        self.finish();
        true
    }

    /// It is over: the hold is dropped, the keeper forgets it.
    fn finish(&self) {
        let mut slot = self.slot();
        slot.phase = Phase::Over;
        let hold = slot.hold.take();
        self.keeper.forget(&mut slot.place);
        drop(slot);
        drop(hold);
        self.changed.notify_waiters();
    }

    /// The runtime to enter here, if that is possible.
    fn runtime(&self) -> Option<Handle> {
        match Handle::try_current() {
            // The thread is ending: entering a runtime would panic.
            Err(error) if error.is_thread_local_destroyed() => None,
            _ => self.background(),
        }
    }

    /// The runtime of the acquire; where that is gone, the one of this call. A thread that is ending can
    /// still hand something on to it.
    fn background(&self) -> Option<Handle> {
        if self.keeper.is_dead() {
            Handle::try_current().ok()
        } else {
            Some(self.keeper.runtime().clone())
        }
    }

    pub(crate) fn lost(&self) -> Error {
        Error::new(
            ErrorKind::Lost,
            format!(
                "the lock on {:?} was lost: it ended, or was taken away",
                self.key
            ),
        )
    }
}

/// The slot.
impl Kept {
    fn lend(&self) -> Option<Loan<'_>> {
        self.lend_in(|_any| true)
    }

    fn lend_in(&self, phase: impl Fn(Phase) -> bool) -> Option<Loan<'_>> {
        let mut slot = self.slot();
        if !phase(slot.phase) {
            return None;
        }
        let hold = slot.hold.take()?;
        Some(Loan {
            kept: self,
            hold: Some(hold),
        })
    }

    /// Waits for whoever has the hold; `None`: it is over.
    async fn lend_when_free(&self) -> Option<Loan<'_>> {
        loop {
            if let Some(loan) = self.lend() {
                return Some(loan);
            }
            if self.slot().phase == Phase::Over {
                return None;
            }
            self.until(|slot| slot.hold.is_some() || slot.phase == Phase::Over)
                .await;
        }
    }

    async fn until(&self, holds: impl Fn(&Slot) -> bool + Send) {
        let mut changed = pin!(self.changed.notified());
        loop {
            changed.as_mut().enable();
            if holds(&self.slot()) {
                return;
            }
            changed.as_mut().await;
            changed.set(self.changed.notified());
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("key", &self.key)
            .field("owner", &self.owner)
            .field("token", &self.token)
            .field("validity", &self.validity)
            .finish_non_exhaustive()
    }
}

/// The hold, out of its slot; goes back when this is dropped.
struct Loan<'a> {
    kept: &'a Kept,
    hold: Option<Box<dyn Hold>>,
}

impl Loan<'_> {
    fn hold(&mut self) -> &mut dyn Hold {
        self.hold
            .as_deref_mut()
            .expect("the hold is there until the loan is dropped")
    }
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        let mut slot = self.kept.slot();
        // Given up in the meantime: nobody will want it again.
        let unwanted = match slot.phase {
            Phase::Over => self.hold.take(),
            _ => {
                slot.hold = self.hold.take();
                None
            }
        };
        drop(slot);
        drop(unwanted);
        self.kept.changed.notify_waiters();
    }
}

/// What is still to be done of a release when its future is dropped.
struct Rest(Option<Arc<Kept>>);

impl Drop for Rest {
    fn drop(&mut self) {
        if let Some(kept) = self.0.take()
            && kept.slot().phase == Phase::Releasing
        {
            kept.release_in_background(Box::pin(kept.clone().attempt()));
        }
    }
}

/// The task that drives a release; a runtime that ends drops it, and then nobody will.
struct GivenUp(Arc<Kept>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        if self.0.slot().phase != Phase::Over {
            self.0.finish();
        }
    }
}

type Attempt = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// Polls `work` within `runtime` where the caller is in none, since timers need one.
async fn within<T>(runtime: &Handle, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|cx| {
        let _entered = Handle::try_current().is_err().then(|| runtime.enter());
        work.as_mut().poll(cx)
    })
    .await
}

fn no_answer(limit: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("the store did not answer within {limit:?}"),
    )
}
