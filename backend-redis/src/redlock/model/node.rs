use std::collections::HashMap;
use std::time::Duration;

use uuid::Uuid;

use super::super::node::{Standing, Vote};
use super::super::tokens::DAY;

/// What a node stores and how it answers: the scripts, for one lock. Its times are those of its own
/// clock, in µs.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// The run of the server, and its start.
    pub(super) run: u64,
    pub(super) started: u64,
    token: Option<u64>,
    marked: Option<u64>,
    /// The run in which that was written.
    written_in: u64,
    lock: Option<Lock>,
    tombs: HashMap<Uuid, (u32, u64)>,
    pub(super) flaw: Option<Flaw>,
}

#[derive(Debug, Clone)]
struct Lock {
    claim: Uuid,
    number: u32,
    ends: u64,
}

/// What a node does wrong, so that the tests can be seen to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flaw {
    /// It says that it has noted a token, and has not: as if there were no second trip.
    RaisesNothing,
    /// It notes a token for whoever asks.
    RaisesForAnybody,
    /// Without data it votes at once.
    VotesWithoutData,
}

impl Store {
    /// The server stops and starts again, with all it had or with nothing.
    pub(super) fn restart(&mut self, now: u64, keeps_data: bool) {
        self.run += 1;
        self.started = now;
        if keeps_data {
            // As a server that waits for its disk: what it has is all it ever said.
            self.written_in = self.run;
        } else {
            self.flush();
        }
    }

    /// Everything is deleted while it runs.
    pub(super) fn flush(&mut self) {
        self.token = None;
        self.marked = None;
        self.lock = None;
        self.tombs.clear();
        if self.flaw == Some(Flaw::VotesWithoutData) {
            self.put(Some(0));
        }
    }

    pub(super) fn put(&mut self, token: Option<u64>) {
        self.token = token;
        self.written_in = self.run;
    }

    pub(super) fn is_seeded(&self) -> bool {
        self.token.is_some() && self.written_in == self.run
    }

    pub(super) fn acquire(
        &mut self,
        now: u64,
        clock: u64,
        (claim, number): (Uuid, u32),
        proposal: u64,
        ttl: u64,
    ) -> Vote {
        self.expire(now);
        let Some(known) = self.token.filter(|_| self.is_seeded()) else {
            return Vote::Unseeded;
        };
        if proposal > clock + DAY {
            return Vote::Ahead;
        }
        if self
            .tombs
            .get(&claim)
            .is_some_and(|(tomb, _)| *tomb >= number)
        {
            return Vote::Gone;
        }
        match &self.lock {
            Some(lock) if lock.claim != claim => {
                return Vote::Held {
                    known,
                    by: lock.claim.as_fields().0.to_string(),
                    left: Some(Duration::from_micros(lock.ends - now)),
                };
            }
            Some(lock) if lock.number > number => return Vote::Gone,
            // It came twice.
            Some(lock) if lock.number == number => return Vote::Granted { known },
            _ => {}
        }
        self.lock = Some(Lock {
            claim,
            number,
            ends: now + ttl,
        });
        self.token = Some(known.max(proposal));
        Vote::Granted { known }
    }

    pub(super) fn raise(&mut self, now: u64, attempt: (Uuid, u32), token: u64) -> bool {
        self.expire(now);
        match self.flaw {
            Some(Flaw::RaisesNothing) => return true,
            Some(Flaw::RaisesForAnybody) => {}
            _ if !self.holds(attempt) => return false,
            _ => {}
        }
        self.token = self.token.map(|known| known.max(token));
        true
    }

    pub(super) fn extend(&mut self, now: u64, attempt: (Uuid, u32), ttl: u64) -> bool {
        self.expire(now);
        let holds = self.holds(attempt);
        if let Some(lock) = self.lock.as_mut().filter(|_| holds) {
            lock.ends = now + ttl;
        }
        holds
    }

    pub(super) fn free(&mut self, now: u64, (claim, number): (Uuid, u32), ttl: u64) -> bool {
        self.expire(now);
        match &self.lock {
            Some(lock) if lock.claim == claim && lock.number <= number => {
                self.lock = None;
                true
            }
            Some(lock) if lock.claim == claim => false,
            _ => {
                let tomb = self.tombs.entry(claim).or_default();
                *tomb = (tomb.0.max(number), now + ttl);
                false
            }
        }
    }

    pub(super) fn look(&self, now: u64) -> Standing {
        Standing {
            token: self.token.filter(|_| self.is_seeded()),
            up: Duration::from_micros(now - self.started),
            waiting: self
                .marked
                .filter(|_| self.written_in == self.run)
                .map(|marked| Duration::from_micros(now - marked)),
            state: self.state(),
        }
    }

    pub(super) fn mark(&mut self, now: u64, state: &str) {
        if self.state() == state && !self.is_seeded() {
            self.put(None);
            self.marked = Some(now);
        }
    }

    pub(super) fn seed(&mut self, state: &str, token: u64) {
        if self.state() == state && !self.is_seeded() {
            self.put(Some(token));
            self.marked = None;
        }
    }

    fn holds(&self, (claim, number): (Uuid, u32)) -> bool {
        let lock = self.lock.as_ref();
        lock.is_some_and(|lock| lock.claim == claim && lock.number == number)
    }

    fn state(&self) -> String {
        let marked = self.marked.filter(|_| self.written_in == self.run);
        format!("{} {marked:?}", self.run)
    }

    fn expire(&mut self, now: u64) {
        self.lock.take_if(|lock| lock.ends <= now);
        self.tombs.retain(|_, (_, ends)| *ends > now);
    }
}
