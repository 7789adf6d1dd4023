use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::validity::LONGEST_SLEEP;
use crate::{
    Backend, Claim, Error, ErrorKind, Expiry, Fairness, Guarantees, Hold, Holder, Key, Listed,
    Moment, OwnerId, Page, Result, Token, Validity, Wakeup,
};

/// Locks in the memory of this process: to test a service with, and to try things out.
///
/// It does all that the other backends do (leases that end, first come first served, tokens, holder
/// and evict), except that no other process sees it. Clones share the store: a
/// [`Locks`](crate::Locks) on each is like two clients of one server.
///
/// ```
/// # use leasehold_core::{Locks, Memory};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold_core::Result<()> {
/// let store = Memory::new();
/// let one = Locks::new(store.clone());
/// let other = Locks::new(store);
/// let guard = one.lock("order:42").await?;
/// assert!(other.try_lock("order:42").await?.is_none());
/// # drop(guard);
/// # Ok(())
/// # }
/// ```
///
/// How it works: each key that is held has an entry with its holder and a queue. A release hands the
/// lock to the first in the queue; so does whoever comes by after the holder's time is up, and each
/// waiter wakes at that time. A waiter that is dropped leaves the queue, or hands on what it was
/// just given. Whatever is neither held nor waited for leaves nothing behind.
#[derive(Clone, Default)]
pub struct Memory {
    store: Arc<Mutex<Store>>,
}

impl Memory {
    /// What it promises.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Lease, *Claim::TTL_RANGE.start());
        guarantees.fairness = Fairness::Fifo;
        guarantees.wakeup = Wakeup::Push;
        guarantees
    };

    /// A new, empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

#[async_trait]
impl Backend for Memory {
    fn guarantees(&self) -> Guarantees {
        Self::GUARANTEES
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let mut waiting = {
            let mut store = lock(&self.store);
            store.expire(&claim.key);
            match store.try_grant(claim) {
                Some(grant) => return Ok(Some(self.hold(claim, grant))),
                None if claim.wait == Some(Duration::ZERO) => return Ok(None),
                None => {
                    let (granted, grant) = oneshot::channel();
                    store.enqueue(claim, granted);
                    Waiting {
                        store: self.store.clone(),
                        claim,
                        grant,
                    }
                }
            }
        };
        let started = Moment::now();
        loop {
            let left = claim
                .wait
                .map_or(Duration::MAX, |wait| wait.saturating_sub(started.elapsed()));
            if left.is_zero() {
                return Ok(None);
            }
            let holder_ends = lock(&self.store).expires_in(&claim.key);
            tokio::select! {
                biased;
                grant = &mut waiting.grant => {
                    // The sender lives in the queue until it is used.
                    let Ok(grant) = grant else { continue };
                    return Ok(Some(self.hold(claim, grant)));
                }
                () = tokio::time::sleep(holder_ends.min(left).min(LONGEST_SLEEP)) => {
                    lock(&self.store).expire(&claim.key);
                }
            }
        }
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let mut store = lock(&self.store);
        store.expire(key);
        Ok(store.entries.get(key).map(|entry| entry.held.show()))
    }

    /// It has nothing that outlives it.
    async fn erase(&self) -> Result<()> {
        Ok(())
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let mut store = lock(&self.store);
        store.expire(key);
        let named = |held: &Held| grant.is_none_or(|grant| grant.grant == held.id.to_string());
        let Some(entry) = store.entries.get(key).filter(|entry| named(&entry.held)) else {
            return Ok(false);
        };
        entry.held.validity.end();
        store.pass_on(key);
        Ok(true)
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        const PAGE: usize = 1000;
        let mut store = lock(&self.store);
        let follows = |key: &Key| after.is_none_or(|last| key.as_str().as_bytes() > last);
        let mut keys: Vec<Key> = store
            .entries
            .keys()
            .filter(|key| key.as_str().starts_with(prefix) && follows(key))
            .cloned()
            .collect();
        keys.sort_unstable();
        let more = keys.len() > PAGE;
        keys.truncate(PAGE);
        let last = keys.last().map(|key| key.as_str().into());
        for key in &keys {
            store.expire(key);
        }
        let listed = |key: Key| {
            let entry = store.entries.get(&key)?;
            let mut listed = Listed::new(Some(key.clone()), key.as_str());
            listed.holder = Some(entry.held.show());
            listed.waiting = u64::try_from(entry.queue.len()).ok();
            Some(listed)
        };
        let locks = keys.into_iter().filter_map(listed).collect();
        Ok(Page::new(locks, last.filter(|_| more)))
    }
}

impl Memory {
    fn hold(&self, claim: &Claim, grant: Grant) -> Box<dyn Hold> {
        Box::new(MemoryHold {
            store: self.store.clone(),
            key: claim.key.clone(),
            id: claim.id,
            ttl: claim.ttl,
            grant,
        })
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("held", &lock(&self.store).entries.len())
            .finish()
    }
}

#[derive(Debug, Clone)]
struct Grant {
    token: Token,
    validity: Validity,
}

#[derive(Debug)]
struct MemoryHold {
    store: Arc<Mutex<Store>>,
    key: Key,
    id: Uuid,
    ttl: Duration,
    grant: Grant,
}

#[async_trait]
impl Hold for MemoryHold {
    fn token(&self) -> Token {
        self.grant.token
    }

    fn validity(&self) -> &Validity {
        &self.grant.validity
    }

    async fn renew(&mut self) -> Result<()> {
        let mut store = lock(&self.store);
        store.expire(&self.key);
        let held = store.held_by(&self.key, self.id).ok_or_else(gone)?;
        held.granted = Moment::now();
        self.grant.validity.extend(held.granted, self.ttl);
        Ok(())
    }

    async fn release(&mut self) -> Result<()> {
        let mut store = lock(&self.store);
        store.expire(&self.key);
        store.held_by(&self.key, self.id).ok_or_else(gone)?;
        store.pass_on(&self.key);
        Ok(())
    }
}

/// A place in a queue; leaves it, or hands on what came too late, when it is dropped.
struct Waiting<'a> {
    store: Arc<Mutex<Store>>,
    claim: &'a Claim,
    grant: oneshot::Receiver<Grant>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let (key, id) = (&self.claim.key, self.claim.id);
        let mut store = lock(&self.store);
        if let Some(entry) = store.entries.get_mut(key) {
            entry.queue.retain(|waiter| waiter.claim.id != id);
        }
        // Granted, and nobody has taken it out.
        if self.grant.try_recv().is_ok() && store.held_by(key, id).is_some() {
            store.pass_on(key);
        }
    }
}

#[derive(Debug, Default)]
struct Store {
    entries: HashMap<Key, Entry>,
    /// One counter for all keys, so that a key leaves nothing behind.
    last_token: u64,
}

/// There is one for each key that is held.
#[derive(Debug)]
struct Entry {
    held: Held,
    queue: VecDeque<Waiter>,
}

#[derive(Debug)]
struct Held {
    id: Uuid,
    owner: OwnerId,
    label: Option<Arc<str>>,
    token: Token,
    ttl: Duration,
    granted: Moment,
    since: SystemTime,
    validity: Validity,
}

#[derive(Debug)]
struct Waiter {
    claim: Claim,
    granted: oneshot::Sender<Grant>,
}

impl Store {
    /// Grants a key that nobody holds.
    fn try_grant(&mut self, claim: &Claim) -> Option<Grant> {
        if self.entries.contains_key(&claim.key) {
            return None;
        }
        let (held, grant) = self.grant(claim);
        let entry = Entry {
            held,
            queue: VecDeque::new(),
        };
        self.entries.insert(claim.key.clone(), entry);
        Some(grant)
    }

    fn enqueue(&mut self, claim: &Claim, granted: oneshot::Sender<Grant>) {
        if let Some(entry) = self.entries.get_mut(&claim.key) {
            entry.queue.push_back(Waiter {
                claim: claim.clone(),
                granted,
            });
        }
    }

    fn grant(&mut self, claim: &Claim) -> (Held, Grant) {
        self.last_token += 1;
        let granted = Moment::now();
        let grant = Grant {
            token: Token::new(self.last_token),
            validity: Validity::new(granted, claim.ttl),
        };
        let held = Held {
            id: claim.id,
            owner: claim.owner.clone(),
            label: claim.label.clone(),
            token: grant.token,
            ttl: claim.ttl,
            granted,
            since: wall_clock(),
            validity: grant.validity.clone(),
        };
        (held, grant)
    }

    fn held_by(&mut self, key: &Key, id: Uuid) -> Option<&mut Held> {
        let held = &mut self.entries.get_mut(key)?.held;
        (held.id == id).then_some(held)
    }

    fn expires_in(&self, key: &Key) -> Duration {
        let entry = self.entries.get(key);
        entry.map_or(Duration::ZERO, |entry| entry.held.left())
    }

    /// Lets go of a hold whose time is up.
    fn expire(&mut self, key: &Key) {
        let over = |entry: &Entry| entry.held.left().is_zero();
        if self.entries.get(key).is_some_and(over) {
            self.pass_on(key);
        }
    }

    /// Hands the key to the first in its queue that still listens.
    fn pass_on(&mut self, key: &Key) {
        let Some(mut entry) = self.entries.remove(key) else {
            return;
        };
        while let Some(waiter) = entry.queue.pop_front() {
            let (held, grant) = self.grant(&waiter.claim);
            if waiter.granted.send(grant).is_ok() {
                entry.held = held;
                self.entries.insert(key.clone(), entry);
                return;
            }
        }
    }
}

impl Held {
    fn left(&self) -> Duration {
        self.ttl.saturating_sub(self.granted.elapsed())
    }

    fn show(&self) -> Holder {
        let mut holder = Holder::new(self.id.to_string());
        holder.owner = Some(self.owner.to_string());
        holder.label = self.label.as_deref().map(Into::into);
        holder.token = Some(self.token);
        holder.since = Some(self.since);
        holder.remaining = Some(self.left());
        holder
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Lost, "the store does not have this grant")
}

fn lock(store: &Mutex<Store>) -> MutexGuard<'_, Store> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

#[expect(
    clippy::disallowed_methods,
    reason = "shown to people, decides nothing"
)]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
