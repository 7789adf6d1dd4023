use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::guard::Held;
use crate::kept::Kept;
use crate::locks::{Locks, all, sorted, timed_out};
use crate::{Guard, Guards, Key, Moment, OwnerId, Result};

/// One who locks, and may lock again what it already holds.
///
/// Re-entry goes by owner, never by thread or task: hand a clone to whoever acts for the same owner,
/// in whatever task. A lock that is taken again costs no round trip, has the same token, and is freed
/// when the last of its guards is gone (C16). Two owners exclude each other, also in one process.
///
/// An owner belongs to the [`Locks`] that made it and keeps its options; a clone is the same owner.
/// The ttl, label and limits of the first acquire of a key stand for its re-entries too. If the lock
/// is lost, all its guards are lost.
///
/// ```
/// # use leasehold_core::{Locks, Memory};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold_core::Result<()> {
/// let locks = Locks::new(Memory::new());
/// let me = locks.owner();
/// let a = me.lock("order:42").await?;
/// let b = me.lock("order:42").await?;
/// assert_eq!(a.token(), b.token());
/// drop(a);
/// assert!(locks.try_lock("order:42").await?.is_none(), "b still holds it");
/// drop(b);
/// assert!(locks.try_lock("order:42").await?.is_some());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Owner {
    locks: Locks,
    id: OwnerId,
    seats: Arc<Mutex<Seats>>,
}

impl Owner {
    /// Who this is, as operators see it.
    #[must_use]
    pub fn id(&self) -> &OwnerId {
        &self.id
    }

    /// Locks `key`, or takes it again; see [`Locks::lock`]. While another acquire or release of the
    /// key by this owner is under way, it waits for that within its own wait.
    ///
    /// # Errors
    /// As [`Locks::lock`].
    ///
    /// # Cancel safety
    /// As [`Locks::lock`]; the next acquire of this owner that waits for the key takes over.
    pub async fn lock(&self, key: impl AsRef<str> + Send) -> Result<Guard> {
        let key = Key::new(key)?;
        let wait = self.locks.wait();
        let guard = self.enter(&key, wait).await?;
        guard.ok_or_else(|| timed_out(&[key], wait))
    }

    /// Locks `key`, or takes it again, without waiting; `None` if another owner holds it, or another
    /// acquire or release of this one is under way.
    ///
    /// # Errors
    /// As [`Locks::try_lock`].
    ///
    /// # Cancel safety
    /// As [`Locks::try_lock`].
    pub async fn try_lock(&self, key: impl AsRef<str> + Send) -> Result<Option<Guard>> {
        self.enter(&Key::new(key)?, Some(Duration::ZERO)).await
    }

    /// Locks all of `keys`, or takes them again; see [`Locks::lock_all`].
    ///
    /// # Errors
    /// As [`Locks::lock_all`].
    ///
    /// # Cancel safety
    /// As [`Locks::lock_all`].
    pub async fn lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Guards> {
        let wait = self.locks.wait();
        let keys = sorted(keys)?;
        let guards = all(&keys, wait, |key, wait| Box::pin(self.enter(key, wait))).await?;
        guards.ok_or_else(|| timed_out(&keys, wait))
    }

    /// Locks all of `keys` without waiting; see [`Locks::try_lock_all`].
    ///
    /// # Errors
    /// As [`Locks::try_lock_all`].
    ///
    /// # Cancel safety
    /// As [`Locks::try_lock_all`].
    pub async fn try_lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Option<Guards>> {
        let keys = sorted(keys)?;
        let wait = Some(Duration::ZERO);
        all(&keys, wait, |key, wait| Box::pin(self.enter(key, wait))).await
    }

    pub(crate) fn new(locks: Locks) -> Self {
        Self {
            locks,
            id: OwnerId::new(),
            seats: Arc::default(),
        }
    }

    /// 1. The key is held by this owner: another guard of the same hold.
    /// 2. Else through the gate of its seat, one at a time: whoever comes second waits for the first
    ///    and then finds 1, or, if the first was cancelled, takes over.
    /// 3. A release under way is waited for: claiming before it is answered would queue behind it.
    async fn enter(&self, key: &Key, wait: Option<Duration>) -> Result<Option<Guard>> {
        let started = Moment::now();
        let seat = self.seat(key);
        if let Some(held) = seat.held() {
            self.locks.check_open()?;
            return Ok(Some(Guard::new(held)));
        }
        let at_the_gate = async {
            let gate = seat.gate.lock().await;
            if seat.held().is_none()
                && let Some(leaving) = seat.leaving()
            {
                leaving.over().await;
            }
            gate
        };
        let Some(_gate) = self.locks.wait_for(at_the_gate, wait).await? else {
            return Ok(None);
        };
        if let Some(held) = seat.held() {
            return Ok(Some(Guard::new(held)));
        }
        let left = wait.map(|wait| wait.saturating_sub(started.elapsed()));
        let Some(guard) = self.locks.grant(key, Some(&self.id), left).await? else {
            return Ok(None);
        };
        seat.take(guard.held());
        Ok(Some(guard))
    }

    fn seat(&self, key: &Key) -> Arc<Seat> {
        let mut seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(seat) = seats.by_key.get(key) {
            return seat.clone();
        }
        if seats.by_key.len() >= seats.sweep_at {
            seats.by_key.retain(|_, seat| !seat.is_idle());
            seats.sweep_at = 2 * seats.by_key.len() + 16;
        }
        let seat = Arc::<Seat>::default();
        seats.by_key.insert(key.clone(), seat.clone());
        seat
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner")
            .field("id", &self.id)
            .finish_non_exhaustive()
    }
}

/// What an owner has to do with each key.
#[derive(Default)]
struct Seats {
    by_key: HashMap<Key, Arc<Seat>>,
    /// Idle seats are swept when there are so many, so that they never outnumber the used ones.
    sweep_at: usize,
}

/// One key of one owner.
#[derive(Default)]
struct Seat {
    /// Whoever acquires the key for this owner holds it.
    gate: tokio::sync::Mutex<()>,
    current: Mutex<Option<Current>>,
}

/// The newest grant.
struct Current {
    /// Upgrades while one of its guards lives.
    held: Weak<Held>,
    kept: Arc<Kept>,
}

impl Seat {
    /// What can be entered again.
    fn held(&self) -> Option<Arc<Held>> {
        let current = self.current();
        let held = current.as_ref()?.held.upgrade()?;
        (!held.0.validity.is_ended()).then_some(held)
    }

    /// The grant whose release is under way.
    fn leaving(&self) -> Option<Arc<Kept>> {
        let current = self.current();
        let kept = &current.as_ref()?.kept;
        kept.is_leaving().then(|| kept.clone())
    }

    fn take(&self, held: &Arc<Held>) {
        *self.current() = Some(Current {
            held: Arc::downgrade(held),
            kept: held.0.clone(),
        });
    }

    /// Nobody acquires here, and nothing is held or on its way out.
    fn is_idle(self: &Arc<Self>) -> bool {
        let over = |current: &Current| current.kept.is_over();
        Arc::strong_count(self) == 1 && self.current().as_ref().is_none_or(over)
    }

    fn current(&self) -> MutexGuard<'_, Option<Current>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
