use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Key, OwnerId, Result, Token};
use tokio::time::timeout;

use super::runtime::Runtime;

/// A held lock: [`leasehold::Guard`](crate::Guard) for programs without async.
///
/// It is renewed in the background while this lives, whatever its thread does. Dropping it releases the
/// lock and waits for the store's answer, at most for the [request
/// limit](super::Locks::with_request_limit); also while the thread panics. Inside an async task the drop
/// waits for nothing, and the release goes through in the background.
///
/// ```
/// let locks = leasehold::blocking::open("memory:")?;
/// let guard = locks.lock("order:42")?;
/// assert!(guard.is_held());
/// drop(guard);
/// assert!(locks.try_lock("order:42")?.is_some());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct Guard {
    /// `None` once it was let go of.
    guard: Option<crate::Guard>,
    runtime: Arc<Runtime>,
}

impl Guard {
    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &Key {
        self.guard().key()
    }

    /// The fencing token of this grant: higher than that of every earlier grant of the key, the same
    /// for every re-entry (C7).
    #[must_use]
    pub fn token(&self) -> Token {
        self.guard().token()
    }

    /// Who holds it.
    #[must_use]
    pub fn owner(&self) -> &OwnerId {
        self.guard().owner()
    }

    /// Whether the lock is still ours, by our own clock. Asks nobody.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guard().is_held()
    }

    /// How long the lock stays ours if nothing is heard of the store any more; see
    /// [`leasehold::Guard::remaining`](crate::Guard::remaining).
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guard().remaining()
    }

    /// Waits until the lock is lost: at the latest before the store may hand it to somebody else, at once
    /// when the store says so (C11).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn lost(&self) -> Result<()> {
        self.runtime.wait(async {
            self.guard().lost().await;
            Ok(())
        })
    }

    /// Waits as [`lost`](Self::lost) does, at most for `limit`, and says whether the lock is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn lost_within(&self, limit: Duration) -> Result<bool> {
        self.runtime
            .wait(async { Ok(timeout(limit, self.guard().lost()).await.is_ok()) })
    }

    /// Does `work`, and gives back its output if the lock was held until it was done.
    ///
    /// Unlike [`leasehold::Guard::run`](crate::Guard::run) it cannot stop `work`: what that writes is to
    /// be guarded by the [`token`](Self::token), and if it takes long it should look at
    /// [`is_held`](Self::is_held) now and then.
    ///
    /// ```
    /// # let locks = leasehold::blocking::open("memory:")?;
    /// let guard = locks.lock("report")?;
    /// let rows = guard.run(|| 7)?;
    /// guard.release()?;
    /// assert_eq!(rows, 7);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Lost`](crate::ErrorKind::Lost) if the lock was lost before `work` was done; if it was
    /// lost before it began, `work` is not done at all.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let held = || self.runtime.look(self.guard().run(ready(())));
        held()?;
        let output = work();
        held().map(|()| output)
    }

    /// Releases the lock and waits for the store's answer; see
    /// [`leasehold::Guard::release`](crate::Guard::release).
    ///
    /// # Errors
    /// As [`leasehold::Guard::release`](crate::Guard::release).
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside an async task: then it is the
    /// drop of the guard.
    pub fn release(mut self) -> Result<()> {
        match self.guard.take() {
            Some(guard) => self.runtime.wait(guard.release()),
            None => Ok(()),
        }
    }

    pub(super) fn new(guard: crate::Guard, runtime: &Arc<Runtime>) -> Self {
        Self {
            guard: Some(guard),
            runtime: runtime.clone(),
        }
    }

    fn guard(&self) -> &crate::Guard {
        self.guard.as_ref().expect("there until it is let go of")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.runtime.let_go(guard.release());
        }
    }
}

/// Several held locks, all or none: [`leasehold::Guards`](crate::Guards) for programs without async.
///
/// Made by [`Locks::lock_all`](super::Locks::lock_all). Dropping it releases them, as for [`Guard`].
#[derive(Debug)]
#[must_use = "the locks are released as soon as the guards are dropped"]
pub struct Guards {
    /// `None` once they were let go of.
    guards: Option<crate::Guards>,
    runtime: Arc<Runtime>,
}

impl Guards {
    /// The guards, in the order of their keys: to read their tokens.
    pub fn iter(&self) -> std::slice::Iter<'_, crate::Guard> {
        self.guards().iter()
    }

    /// The guard of `key`, if it is among them: to read its token.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&crate::Guard> {
        self.guards().get(key)
    }

    /// How many locks these are; keys that were named twice count once.
    #[must_use]
    pub fn len(&self) -> usize {
        self.guards().len()
    }

    /// Whether no key was named at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.guards().is_empty()
    }

    /// Whether all of them are still ours.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guards().is_held()
    }

    /// How long all of them stay ours if nothing is heard of the store any more.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.guards().remaining()
    }

    /// Waits until the first of them is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn lost(&self) -> Result<()> {
        self.runtime.wait(async {
            self.guards().lost().await;
            Ok(())
        })
    }

    /// Waits as [`lost`](Self::lost) does, at most for `limit`, and says whether one of them is lost.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside an async task.
    pub fn lost_within(&self, limit: Duration) -> Result<bool> {
        self.runtime
            .wait(async { Ok(timeout(limit, self.guards().lost()).await.is_ok()) })
    }

    /// Does `work`, and gives back its output if all of them were held until it was done; see
    /// [`Guard::run`].
    ///
    /// # Errors
    /// [`ErrorKind::Lost`](crate::ErrorKind::Lost) if one of them was lost before `work` was done.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        let held = || self.runtime.look(self.guards().run(ready(())));
        held()?;
        let output = work();
        held().map(|()| output)
    }

    /// Releases all of them at the same time and waits for the answers; see [`Guard::release`].
    ///
    /// # Errors
    /// The first failure in the order of the keys; the others are released all the same.
    pub fn release(mut self) -> Result<()> {
        match self.guards.take() {
            Some(guards) => self.runtime.wait(guards.release()),
            None => Ok(()),
        }
    }

    pub(super) fn new(guards: crate::Guards, runtime: &Arc<Runtime>) -> Self {
        Self {
            guards: Some(guards),
            runtime: runtime.clone(),
        }
    }

    fn guards(&self) -> &crate::Guards {
        self.guards
            .as_ref()
            .expect("there until they are let go of")
    }
}

impl<'a> IntoIterator for &'a Guards {
    type Item = &'a crate::Guard;
    type IntoIter = std::slice::Iter<'a, crate::Guard>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        if let Some(guards) = self.guards.take() {
            self.runtime.let_go(guards.release());
        }
    }
}
