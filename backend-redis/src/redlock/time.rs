use std::time::{Duration, SystemTime};

use leasehold_core::{Moment, Validity};

/// The clocks of a client. The protocol has no others, so that a model can be in their place.
pub(crate) trait Time: Send + Sync + 'static {
    /// A point in time on a clock that nobody sets.
    type Moment: Copy + Send + Sync;

    fn now(&self) -> Self::Moment;

    /// How much time has passed since.
    fn since(&self, moment: Self::Moment) -> Duration;

    /// Whether a grant for `ttl` that was asked for at `sent` must not be believed any more.
    fn is_over(&self, sent: Self::Moment, ttl: Duration) -> bool;

    /// The microseconds since 1970, however wrong: tokens begin with it, and nothing rests on it.
    fn clock(&self) -> u64;
}

/// The clocks of this machine.
#[derive(Debug)]
pub(crate) struct SystemTimes;

impl Time for SystemTimes {
    type Moment = Moment;

    fn now(&self) -> Moment {
        Moment::now()
    }

    fn since(&self, moment: Moment) -> Duration {
        moment.elapsed()
    }

    fn is_over(&self, sent: Moment, ttl: Duration) -> bool {
        Validity::new(sent, ttl).is_ended()
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a first guess at a token, put right by what the nodes know"
    )]
    fn clock(&self) -> u64 {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        u64::try_from(since.unwrap_or_default().as_micros()).unwrap_or(0)
    }
}
