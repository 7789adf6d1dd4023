use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

/// No timer sleeps longer than this: a timer does not count the time a machine was suspended, so
/// that a deadline could pass unseen behind a long one.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// A point in time on clocks that nobody sets.
///
/// Take one *before* a request is sent and count the lease from there: the store cannot have granted
/// it earlier. What has [elapsed](Self::elapsed) is the larger of two readings: tokio's clock (which
/// tests may pause) and the clock that goes on while the machine is suspended. So a lease ends during
/// a laptop's sleep, and tests with `start_paused` work.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    timer: Instant,
    boot: Duration,
}

impl Moment {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self {
            timer: Instant::now(),
            boot: since_boot(),
        }
    }

    /// How much time has passed since, suspended time included.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Self::now().since(*self)
    }

    /// How much time passed from `earlier` to this moment, suspended time included; zero if it is
    /// not the earlier one.
    #[must_use]
    pub fn since(&self, earlier: Self) -> Duration {
        let timer = self.timer.saturating_duration_since(earlier.timer);
        timer.max(self.boot.saturating_sub(earlier.boot))
    }
}

/// The clock that counts suspended time.
#[cfg(unix)]
fn since_boot() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    // Apple's CLOCK_MONOTONIC goes on during sleep; elsewhere it stops, and CLOCK_BOOTTIME does not.
    #[cfg(any(target_os = "linux", target_os = "android", target_os = "fuchsia"))]
    const CLOCK: ClockId = ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android", target_os = "fuchsia")))]
    const CLOCK: ClockId = ClockId::Monotonic;
    Duration::try_from(clock_gettime(CLOCK)).unwrap_or_default()
}

/// Where there is no such clock tokio's alone decides.
#[cfg(not(unix))]
fn since_boot() -> Duration {
    Duration::ZERO
}

/// How long a grant may be believed.
///
/// A backend makes one for each hold (or one for a session and a [child](Self::child) for each hold
/// on it), extends it with every answered renewal, and ends it when the store says that it is over.
/// [`Guard::lost`](crate::Guard::lost), `is_held` and `remaining` read it directly, so that they are
/// right even when nothing else runs.
///
/// It ends earlier than the store lets go, by a margin for clocks that run at different speeds:
/// 1 % of the ttl and 2 ms, as in the [Redlock description]. The margin lives here and in no backend.
/// Whatever has ended stays ended (see C11).
///
/// Clones are the same validity.
///
/// [Redlock description]: https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
#[derive(Clone)]
pub struct Validity {
    own: Arc<Own>,
}

struct Own {
    state: Mutex<State>,
    changed: Notify,
    parent: Option<Validity>,
}

#[derive(Clone, Copy)]
struct State {
    /// Valid for so long after the moment; `None`: no term of its own.
    term: Option<(Moment, Duration)>,
    /// Valid for so long after the moment whatever the store grants.
    limit: Option<(Moment, Duration)>,
    ended: bool,
}

impl Validity {
    /// Valid from `sent`, taken before the request left, for `ttl` less the margin.
    #[must_use]
    pub fn new(sent: Moment, ttl: Duration) -> Self {
        Self::build(Some((sent, less_margin(ttl))), None)
    }

    /// Valid until [`end`](Self::end) is called: for a store that lets go only when this process
    /// ends ([`Expiry::Process`](crate::Expiry::Process)).
    #[must_use]
    pub fn until_ended() -> Self {
        Self::build(None, None)
    }

    /// A validity that ends with this one, or earlier by itself: for a hold on a shared session.
    #[must_use]
    pub fn child(&self) -> Self {
        Self::build(None, Some(self.clone()))
    }

    /// A renewal that left at `sent` was granted for `ttl`. It never shortens, and never revives
    /// what has ended; returns whether the validity is still good.
    pub fn extend(&self, sent: Moment, ttl: Duration) -> bool {
        let now = Moment::now();
        let mut state = self.state();
        if self.refresh(&mut state, now) {
            return false;
        }
        let new = (sent, less_margin(ttl));
        if state
            .term
            .is_none_or(|term| left(new, now) > left(term, now))
        {
            // Whoever waits sleeps towards the old deadline and looks again there.
            state.term = Some(new);
        }
        true
    }

    /// The store says that it is over, or we know it otherwise.
    pub fn end(&self) {
        self.state().ended = true;
        self.own.changed.notify_waiters();
    }

    /// Ends at the latest `limit` after `from`, whatever is granted later: a fixed lease, a maximum
    /// hold.
    pub(crate) fn limit(&self, from: Moment, limit: Duration) {
        self.state().limit = Some((from, limit));
        self.own.changed.notify_waiters();
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.is_ended_at(Moment::now())
    }

    /// How long the grant may still be believed; zero once it has ended, `Duration::MAX` while
    /// nothing but the end of the process ends it.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.remaining_at(Moment::now())
    }

    /// Resolves when it has ended.
    ///
    /// # Cancel safety
    /// May be dropped and called again at any time.
    pub async fn ended(&self) {
        let mut own = pin!(self.own.changed.notified());
        let parent = self.own.parent.as_ref();
        // Whoever ends a session wakes those who wait for its children.
        let mut above = pin!(async {
            match parent {
                Some(parent) => Box::pin(parent.ended()).await,
                None => std::future::pending().await,
            }
        });
        loop {
            // Listen first, look then: an end in between is not missed.
            own.as_mut().enable();
            let remaining = self.remaining();
            if remaining.is_zero() {
                return;
            }
            let mut sleep = pin!(tokio::time::sleep(remaining.min(LONGEST_SLEEP)));
            let above_ended = poll_fn(|cx| {
                if above.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(true);
                }
                let woken = own.as_mut().poll(cx).is_ready() | sleep.as_mut().poll(cx).is_ready();
                if woken {
                    Poll::Ready(false)
                } else {
                    Poll::Pending
                }
            })
            .await;
            if above_ended {
                return;
            }
            own.set(self.own.changed.notified());
        }
    }

    pub(crate) fn is_ended_at(&self, now: Moment) -> bool {
        self.remaining_at(now).is_zero()
    }

    pub(crate) fn remaining_at(&self, now: Moment) -> Duration {
        let own = {
            let mut state = self.state();
            if self.refresh(&mut state, now) {
                return Duration::ZERO;
            }
            state.remaining(now)
        };
        match &self.own.parent {
            Some(parent) => own.min(parent.remaining_at(now)),
            None => own,
        }
    }

    /// How long its own term still runs; `None`: it has none, so that nobody has to renew it.
    pub(crate) fn term_left(&self, now: Moment) -> Option<Duration> {
        self.state().term.map(|term| left(term, now))
    }

    /// How long until the [`limit`](Self::limit); `None`: there is none.
    pub(crate) fn limit_left(&self, now: Moment) -> Option<Duration> {
        self.state().limit.map(|limit| left(limit, now))
    }

    fn build(term: Option<(Moment, Duration)>, parent: Option<Self>) -> Self {
        Self {
            own: Arc::new(Own {
                state: Mutex::new(State {
                    term,
                    limit: None,
                    ended: false,
                }),
                changed: Notify::new(),
                parent,
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.own
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an end that the clock brought final, so that a later `extend` cannot revive it.
    fn refresh(&self, state: &mut State, now: Moment) -> bool {
        if !state.ended && state.remaining(now).is_zero() {
            state.ended = true;
            self.own.changed.notify_waiters();
        }
        state.ended
    }
}

impl State {
    fn remaining(&self, now: Moment) -> Duration {
        if self.ended {
            return Duration::ZERO;
        }
        let terms = [self.term, self.limit].into_iter().flatten();
        terms
            .map(|term| left(term, now))
            .min()
            .unwrap_or(Duration::MAX)
    }
}

impl fmt::Debug for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Validity")
            .field("remaining", &self.remaining())
            .finish()
    }
}

fn left((from, length): (Moment, Duration), now: Moment) -> Duration {
    length.saturating_sub(now.since(from))
}

fn less_margin(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, advance};

    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn it_ends_before_the_store_lets_go() {
        let validity = Validity::new(Moment::now(), TTL);
        let start = Instant::now();
        validity.ended().await;
        assert!(start.elapsed() < TTL && start.elapsed() > TTL * 98 / 100);
    }

    #[tokio::test(start_paused = true)]
    async fn it_counts_from_the_sending() {
        let sent = Moment::now();
        advance(TTL / 2).await;
        let validity = Validity::new(sent, TTL);
        assert!(validity.remaining() <= TTL / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn an_extension_neither_shortens_nor_revives() {
        let validity = Validity::new(Moment::now(), TTL);
        let sent = Moment::now();
        assert!(validity.extend(sent, TTL / 2));
        assert!(validity.remaining() > TTL / 2);
        advance(TTL * 9 / 10).await;
        let sent = Moment::now();
        assert!(validity.extend(sent, TTL));
        advance(TTL).await;
        assert!(validity.is_ended());
        assert!(!validity.extend(Moment::now(), TTL));
        assert!(validity.is_ended());
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_that_nobody_looked_at_is_final_too() {
        let validity = Validity::new(Moment::now(), TTL);
        advance(TTL).await;
        assert!(!validity.extend(Moment::now(), TTL));
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_ends_with_its_parent_or_alone() {
        let session = Validity::new(Moment::now(), TTL);
        let (one, two) = (session.child(), session.child());
        assert_eq!(one.term_left(Moment::now()), None);
        let waiting = tokio::spawn({
            let one = one.clone();
            async move { one.ended().await }
        });
        tokio::task::yield_now().await;
        two.end();
        assert!(two.is_ended() && !session.is_ended() && !one.is_ended());
        session.end();
        assert!(one.is_ended());
        let start = Instant::now();
        waiting.await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO, "woken at once");
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_stands_whatever_is_granted_later() {
        let validity = Validity::until_ended();
        assert_eq!(validity.remaining(), Duration::MAX);
        validity.limit(Moment::now(), TTL);
        assert!(validity.extend(Moment::now(), TTL * 10));
        let start = Instant::now();
        validity.ended().await;
        assert!(start.elapsed() <= TTL + LONGEST_SLEEP / 100);
        assert!(validity.is_ended());
    }

    #[tokio::test(start_paused = true)]
    async fn no_timer_sleeps_through_a_suspended_machine() {
        let validity = Validity::new(Moment::now(), TTL * 1000);
        let woken = tokio::spawn(async move { validity.ended().await });
        advance(TTL * 1000).await;
        tokio::time::timeout(LONGEST_SLEEP, woken)
            .await
            .unwrap()
            .unwrap();
    }
}
