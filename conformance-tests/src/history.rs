//! Histories of who believed to hold what, and when (C15).
//!
//! 1. A client that was granted a lock notes the time *before* it asks `is_held` for the first time,
//!    and again before each later time that says yes. What has ended is never revived, so the client
//!    believed to hold the lock at least from the first of these moments to the last, whatever
//!    stopped it in between, and however long.
//! 2. Two such spans of one key that overlap are two holders at one time. The clock is one for all
//!    processes of a machine, and nothing is assumed about how fast anybody runs: a busy machine
//!    makes spans shorter, never wrong.
//! 3. In the order of the spans the tokens rise.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_core::{ErrorKind, Guard, Locks};
use tokio::time::Instant;

/// One client believed to hold `key`, at least in this span of the machine's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Belief {
    pub(crate) key: usize,
    pub(crate) token: u64,
    pub(crate) from: Duration,
    pub(crate) to: Duration,
}

/// How the clients of a history behave.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) ttl: Duration,
    pub(crate) length: Duration,
    pub(crate) seed: u64,
    /// Whether the client stops its own thread now and then, for up to two ttls.
    pub(crate) stalls: bool,
}

/// Takes and frees locks on `keys` at random for the length of the plan.
pub(crate) async fn write(
    locks: &Locks,
    keys: &[String],
    plan: Plan,
) -> anyhow::Result<Vec<Belief>> {
    let mut random = fastrand::Rng::with_seed(plan.seed);
    let mut beliefs = Vec::new();
    let start = Instant::now();
    while start.elapsed() < plan.length {
        let key = random.usize(..keys.len());
        let wait = plan.ttl.mul_f64(4.0 * random.f64());
        match locks
            .with_ttl(plan.ttl)
            .with_wait(wait)
            .lock(&keys[key])
            .await
        {
            Ok(guard) => beliefs.extend(believe(guard, key, plan, &mut random).await),
            // Stalls and waits that are over bring these about.
            Err(error) if is_passing(error.kind()) => {}
            Err(error) => return Err(error).context("a client of the history"),
        }
    }
    Ok(beliefs)
}

async fn believe(
    guard: Guard,
    key: usize,
    plan: Plan,
    random: &mut fastrand::Rng,
) -> Option<Belief> {
    let from = now();
    if !guard.is_held() {
        return None;
    }
    let mut belief = Belief {
        key,
        token: guard.token().get(),
        from,
        to: from,
    };
    for _ in 0..random.usize(1..6) {
        if plan.stalls && random.u8(..12) == 0 {
            stall(plan.ttl.mul_f64(2.0 * random.f64()));
        } else {
            tokio::time::sleep(plan.ttl.mul_f64(random.f64() / 10.0)).await;
        }
        let now = now();
        if !guard.is_held() {
            break;
        }
        belief.to = now;
    }
    if random.bool() {
        // Lost after a stall: the next holder's affair.
        drop(guard.release().await);
    }
    Some(belief)
}

/// Two holders at one time, or tokens that do not rise, make a history wrong.
pub(crate) fn check(mut beliefs: Vec<Belief>) -> anyhow::Result<()> {
    ensure!(
        beliefs.len() >= 10,
        "only {} grants were seen",
        beliefs.len()
    );
    beliefs.sort_by_key(|belief| (belief.key, belief.from));
    for pair in beliefs.windows(2) {
        let [first, second] = pair else { continue };
        if first.key != second.key {
            continue;
        }
        ensure!(
            first.to < second.from,
            "two believed to hold the same lock for {:?}: {first}, {second}",
            first.to.min(second.to).saturating_sub(second.from)
        );
        ensure!(
            first.token < second.token,
            "tokens do not rise: {first}, then {second}"
        );
    }
    Ok(())
}

/// The machine's clock, the same in all processes.
#[cfg(unix)]
pub(crate) fn now() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

/// Elsewhere there are no checks with several processes, and any clock of this one does.
#[cfg(not(unix))]
pub(crate) fn now() -> Duration {
    use std::sync::LazyLock;
    use std::time::Instant;
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed()
}

fn is_passing(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::Lost
    )
}

/// Stops the whole client: its runtime has no other thread.
#[expect(
    clippy::disallowed_methods,
    reason = "to stop a thread is what this is for"
)]
fn stall(length: Duration) {
    std::thread::sleep(length);
}

impl fmt::Display for Belief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to) = (self.from.as_nanos(), self.to.as_nanos());
        write!(f, "{}:{}:{from}:{to}", self.key, self.token)
    }
}

impl FromStr for Belief {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let numbers = text
            .split(':')
            .map(str::parse)
            .collect::<Result<Vec<u64>, _>>()?;
        let [key, token, from, to] = numbers[..] else {
            bail!("not a belief: {text}");
        };
        Ok(Self {
            key: usize::try_from(key)?,
            token,
            from: Duration::from_nanos(from),
            to: Duration::from_nanos(to),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(spans: &[(u64, u64, u64)]) -> Vec<Belief> {
        let span = |&(token, from, to): &(u64, u64, u64)| Belief {
            key: 0,
            token,
            from: Duration::from_millis(from),
            to: Duration::from_millis(to),
        };
        spans.iter().map(span).collect()
    }

    fn sound() -> Vec<(u64, u64, u64)> {
        (0..10).map(|n| (n, 10 * n, 10 * n + 9)).collect()
    }

    #[test]
    fn one_after_the_other_is_right() {
        assert!(check(history(&sound())).is_ok());
        assert!(check(history(&sound()[..9])).is_err(), "too short to tell");
    }

    #[test]
    fn an_overlap_is_wrong() {
        let mut spans = sound();
        spans[4].2 = 50;
        let error = check(history(&spans)).expect_err("both at 50");
        assert!(error.to_string().contains("two believed"), "{error}");
    }

    #[test]
    fn a_token_that_does_not_rise_is_wrong() {
        let mut spans = sound();
        spans[5].0 = 4;
        let error = check(history(&spans)).expect_err("4 twice");
        assert!(error.to_string().contains("do not rise"), "{error}");
    }

    #[test]
    fn a_belief_survives_its_text() {
        for belief in history(&sound()) {
            assert_eq!(
                belief.to_string().parse::<Belief>().expect("parses"),
                belief
            );
        }
    }
}
