use std::sync::{Mutex, PoisonError};

use super::time::Time;

/// How far ahead of a clock a token may be and still be taken for one: what a node with a broken
/// clock made must not drag all others along.
pub(crate) const DAY: u64 = 24 * 60 * 60 * 1_000_000;

/// The tokens that this client proposes: microseconds since 1970, but never one that is not above all
/// that it knows of.
///
/// From the newest token it has heard of it goes on counting the time. So a client whose clock is
/// behind proposes what the others do, as soon as it has heard of one of theirs.
#[derive(Debug)]
pub(crate) struct Proposals<M> {
    newest: Mutex<Option<(u64, M)>>,
}

impl<M: Copy> Proposals<M> {
    pub(crate) fn new() -> Self {
        Self {
            newest: Mutex::new(None),
        }
    }

    /// A token above all that this client has proposed or heard of.
    pub(crate) fn next(&self, time: &impl Time<Moment = M>) -> u64 {
        let now = time.now();
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let known = match *newest {
            Some((token, at)) => counted_on(token, at, time).max(token + 1),
            None => 1,
        };
        let proposal = known.max(time.clock());
        *newest = Some((proposal, now));
        proposal
    }

    /// Hears of a token.
    pub(crate) fn saw(&self, token: u64, time: &impl Time<Moment = M>) {
        if token > time.clock().saturating_add(DAY) {
            return;
        }
        let now = time.now();
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.is_none_or(|(old, at)| counted_on(old, at, time) < token) {
            *newest = Some((token, now));
        }
    }
}

fn counted_on<M: Copy>(token: u64, at: M, time: &impl Time<Moment = M>) -> u64 {
    let since = time.since(at).as_micros();
    token.saturating_add(u64::try_from(since).unwrap_or(u64::MAX))
}
