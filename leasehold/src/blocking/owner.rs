use std::sync::Arc;

use leasehold_core::{OwnerId, Result};

use super::runtime::Runtime;
use super::{Guard, Guards};

/// One who locks, and may lock again what it already holds: [`leasehold::Owner`](crate::Owner) for
/// programs without async.
///
/// Re-entry goes by owner, never by thread: hand a clone to whoever acts for the same owner.
///
/// ```
/// let locks = leasehold::blocking::open("memory:")?;
/// let me = locks.owner();
/// let a = me.lock("order:42")?;
/// let b = me.lock("order:42")?;
/// assert_eq!(a.token(), b.token());
/// drop(a);
/// assert!(locks.try_lock("order:42")?.is_none(), "b still holds it");
/// drop(b);
/// assert!(locks.try_lock("order:42")?.is_some());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Owner {
    owner: crate::Owner,
    runtime: Arc<Runtime>,
}

impl Owner {
    /// Who this is, as operators see it.
    #[must_use]
    pub fn id(&self) -> &OwnerId {
        self.owner.id()
    }

    /// Locks `key`, or takes it again; see [`leasehold::Owner::lock`](crate::Owner::lock).
    ///
    /// # Errors
    /// As [`leasehold::Owner::lock`](crate::Owner::lock).
    pub fn lock(&self, key: impl AsRef<str> + Send) -> Result<Guard> {
        let guard = self.runtime.wait(self.owner.lock(key))?;
        Ok(Guard::new(guard, &self.runtime))
    }

    /// Locks `key`, or takes it again, without waiting for others; see
    /// [`leasehold::Owner::try_lock`](crate::Owner::try_lock).
    ///
    /// # Errors
    /// As [`leasehold::Owner::try_lock`](crate::Owner::try_lock).
    pub fn try_lock(&self, key: impl AsRef<str> + Send) -> Result<Option<Guard>> {
        let guard = self.runtime.wait(self.owner.try_lock(key))?;
        Ok(guard.map(|guard| Guard::new(guard, &self.runtime)))
    }

    /// Locks all of `keys`, or takes them again; see
    /// [`leasehold::Owner::lock_all`](crate::Owner::lock_all).
    ///
    /// # Errors
    /// As [`leasehold::Owner::lock_all`](crate::Owner::lock_all).
    pub fn lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Guards> {
        let guards = self.runtime.wait(self.owner.lock_all(keys))?;
        Ok(Guards::new(guards, &self.runtime))
    }

    /// Locks all of `keys` without waiting for others; see
    /// [`leasehold::Owner::try_lock_all`](crate::Owner::try_lock_all).
    ///
    /// # Errors
    /// As [`leasehold::Owner::try_lock_all`](crate::Owner::try_lock_all).
    pub fn try_lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Option<Guards>> {
        let guards = self.runtime.wait(self.owner.try_lock_all(keys))?;
        Ok(guards.map(|guards| Guards::new(guards, &self.runtime)))
    }

    pub(super) fn new(owner: crate::Owner, runtime: &Arc<Runtime>) -> Self {
        Self {
            owner,
            runtime: runtime.clone(),
        }
    }
}
