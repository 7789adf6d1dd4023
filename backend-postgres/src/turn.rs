use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::OwnerId;
use tokio::sync::oneshot;

use crate::hold::PostgresHold;
use crate::key_form::LockId;

/// Who of this client may ask the server for a key: one at a time, first come first served.
///
/// PostgreSQL grants a lock again to the session that has it, and many owners share a session; so
/// that two owners of one client exclude each other is seen to here (C18). A key is in the table
/// while somebody has its [`Turn`]: asks for it, holds it, or is about to free it.
#[derive(Default)]
pub(crate) struct Turns {
    keys: Mutex<HashMap<LockId, Entry>>,
    next_waiter: AtomicU64,
}

#[derive(Default)]
struct Entry {
    /// Its release is on the way.
    leaving: bool,
    queue: VecDeque<Waiter>,
}

/// The right to ask the server for a key, and later the place of whoever holds it. Dropped, it goes
/// to the next in the queue.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    key: LockId,
    passed_on: bool,
}

/// What a claim in the queue is given.
#[derive(Debug)]
pub(crate) enum Place {
    Turn(Turn),
    /// Somebody else of this client had asked the server already, and gave up.
    Granted(PostgresHold),
}

/// A claim in the queue, or one that waits at the server, as the one who serves it sees it.
#[derive(Debug)]
pub(crate) struct Waiter {
    number: u64,
    pub(crate) ttl: Duration,
    pub(crate) claimant: Claimant,
    answer: oneshot::Sender<Place>,
    _served: oneshot::Sender<()>,
}

/// Who asks, for operators.
#[derive(Debug, Clone)]
pub(crate) struct Claimant {
    pub(crate) owner: OwnerId,
    pub(crate) label: Option<Arc<str>>,
}

/// A claim that waits, as it sees itself; leaves the queue when it is dropped.
pub(crate) struct Waiting {
    turns: Arc<Turns>,
    key: LockId,
    number: u64,
    answer: oneshot::Receiver<Place>,
    served: oneshot::Receiver<()>,
}

/// What [`Turns::enter`] says.
pub(crate) enum Entered {
    Turn(Turn),
    Waiting(Waiting),
    /// Somebody has it, and the claim does not wait.
    Busy,
}

impl Turns {
    /// Asks for the turn of `key`. A claim that does not `wait` queues only where the lock is being
    /// freed and nobody else wants it.
    pub(crate) fn enter(
        self: &Arc<Self>,
        key: LockId,
        ttl: Duration,
        claimant: &Claimant,
        wait: bool,
    ) -> Entered {
        let mut keys = self.keys();
        let Some(entry) = keys.get_mut(&key) else {
            keys.insert(key, Entry::default());
            return Entered::Turn(self.turn(key));
        };
        let soon_free = entry.leaving && entry.queue.is_empty();
        if !wait && !soon_free {
            return Entered::Busy;
        }
        let (waiter, waiting) = self.waiter(key, ttl, claimant.clone());
        entry.queue.push_back(waiter);
        Entered::Waiting(waiting)
    }

    /// Both sides of a wait that is not in the queue: for whoever has the turn and hands it on.
    pub(crate) fn waiter(
        self: &Arc<Self>,
        key: LockId,
        ttl: Duration,
        claimant: Claimant,
    ) -> (Waiter, Waiting) {
        let (sender, answer) = oneshot::channel();
        let (_served, served) = oneshot::channel();
        let number = self.next_waiter.fetch_add(1, Ordering::Relaxed);
        let waiter = Waiter {
            number,
            ttl,
            claimant,
            answer: sender,
            _served,
        };
        let waiting = Waiting {
            turns: self.clone(),
            key,
            number,
            answer,
            served,
        };
        (waiter, waiting)
    }

    /// The release of `key` is on the way.
    pub(crate) fn leaving(&self, key: LockId) {
        if let Some(entry) = self.keys().get_mut(&key) {
            entry.leaving = true;
        }
    }

    /// Whether a claim queues for `key`.
    pub(crate) fn is_wanted(&self, key: LockId) -> bool {
        let keys = self.keys();
        let mut queue = keys.get(&key).into_iter().flat_map(|entry| &entry.queue);
        queue.any(|waiter| !waiter.is_gone())
    }

    fn turn(self: &Arc<Self>, key: LockId) -> Turn {
        Turn {
            turns: self.clone(),
            key,
            passed_on: false,
        }
    }

    fn keys(&self) -> MutexGuard<'_, HashMap<LockId, Entry>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    pub(crate) fn key(&self) -> LockId {
        self.key
    }

    /// Takes the first living claim out of the queue.
    pub(crate) fn next(&self) -> Option<Waiter> {
        let mut keys = self.turns.keys();
        let queue = &mut keys.get_mut(&self.key)?.queue;
        std::iter::from_fn(|| queue.pop_front()).find(|waiter| !waiter.is_gone())
    }

    /// Takes the next claim out of the queue; there is none: takes the key out of the table.
    fn next_or_none(&self) -> Option<Waiter> {
        let mut keys = self.turns.keys();
        let entry = keys.get_mut(&self.key)?;
        entry.leaving = false;
        let waiter = entry.queue.pop_front();
        if waiter.is_none() {
            keys.remove(&self.key);
        }
        waiter
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.passed_on {
            return;
        }
        let mut turn = self.turns.turn(self.key);
        while let Some(waiter) = turn.next_or_none() {
            match waiter.answer.send(Place::Turn(turn)) {
                Err(Place::Turn(back)) => turn = back,
                _ => return,
            }
        }
        turn.passed_on = true;
    }
}

impl Waiter {
    /// Whether the claim was cancelled, or its wait is over.
    pub(crate) fn is_gone(&self) -> bool {
        self.answer.is_closed()
    }

    /// Gives the claim its place; gives it back if the claim is gone.
    pub(crate) fn answer(self, place: Place) -> Result<(), Place> {
        self.answer.send(place)
    }
}

impl Waiting {
    /// Waits for a place. `None`: whoever had the turn is gone, with the session that knew of us.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(crate) async fn place(&mut self) -> Option<Place> {
        (&mut self.answer).await.ok()
    }

    /// Wants no place any more; has one if it was given just now.
    pub(crate) fn give_up(&mut self) -> Option<Place> {
        self.answer.close();
        self.answer.try_recv().ok()
    }

    /// Resolves when whoever served the claim has seen that it gave up, and has cleared up after it.
    pub(crate) async fn cleared(&mut self) {
        // Nothing is sent; the other end is dropped.
        let _cleared = (&mut self.served).await;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(entry) = self.turns.keys().get_mut(&self.key) {
            entry.queue.retain(|waiter| waiter.number != self.number);
        }
        // A place that nobody has taken out is dropped with the channel, and so passed on.
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns")
            .field("keys", &self.keys().len())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Turn({})", self.key)
    }
}
