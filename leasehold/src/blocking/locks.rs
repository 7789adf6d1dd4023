use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Backend, Examination, Guarantees, Holder, Need, Result};

use super::runtime::Runtime;
use super::{Guard, Guards, Listing, Owner};

/// The locks of one store: [`leasehold::Locks`](crate::Locks) for programs without async.
///
/// Cheap to clone. Options are plain data: each `with_…` gives another `Locks` of the same store and
/// leaves this one as it is. Send it, or clones of it, to as many threads as you like.
///
/// Every call that asks the store fails with [`ErrorKind::Unsupported`] inside an async task; see
/// [beside async code](crate::blocking#beside-async-code).
///
/// ```
/// let locks = leasehold::blocking::open("memory:")?;
/// let sell = || {
///     let guard = locks.lock("stock:7")?;
///     guard.run(|| { /* one thread at a time */ })
/// };
/// std::thread::scope(|scope| {
///     let sellers = [(); 4].map(|()| scope.spawn(sell));
///     sellers.into_iter().try_for_each(|seller| seller.join().unwrap())
/// })?;
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// [`ErrorKind::Unsupported`]: crate::ErrorKind::Unsupported
#[derive(Debug, Clone)]
pub struct Locks {
    locks: crate::Locks,
    runtime: Arc<Runtime>,
}

impl Locks {
    /// The locks of `backend`, with the options of [`leasehold::Locks::new`](crate::Locks::new). For a
    /// backend that has to be connected first see [`connect`](super::connect).
    ///
    /// # Errors
    /// [`ErrorKind::Other`](crate::ErrorKind::Other) if no thread can be started.
    pub fn new(backend: impl Backend) -> Result<Self> {
        Self::start(async { Ok(crate::Locks::new(backend)) })
    }

    /// How long a grant lasts unrenewed; see [`leasehold::Locks::with_ttl`](crate::Locks::with_ttl).
    #[must_use]
    pub fn with_ttl(&self, ttl: Duration) -> Self {
        self.with(self.locks.with_ttl(ttl))
    }

    /// How long `lock` waits at most; see [`leasehold::Locks::with_wait`](crate::Locks::with_wait).
    #[must_use]
    pub fn with_wait(&self, wait: impl Into<Option<Duration>>) -> Self {
        self.with(self.locks.with_wait(wait))
    }

    /// Locks are never renewed and end by themselves; see
    /// [`leasehold::Locks::with_fixed_lease`](crate::Locks::with_fixed_lease).
    #[must_use]
    pub fn with_fixed_lease(&self, lease: impl Into<Option<Duration>>) -> Self {
        self.with(self.locks.with_fixed_lease(lease))
    }

    /// Locks are renewed, but not for ever; see
    /// [`leasehold::Locks::with_max_hold`](crate::Locks::with_max_hold).
    #[must_use]
    pub fn with_max_hold(&self, max: impl Into<Option<Duration>>) -> Self {
        self.with(self.locks.with_max_hold(max))
    }

    /// Words of your own that operators see beside the owner; see
    /// [`leasehold::Locks::with_label`](crate::Locks::with_label).
    #[must_use]
    pub fn with_label(&self, label: impl Into<String>) -> Self {
        self.with(self.locks.with_label(label))
    }

    /// How long a single request to the store may take; see
    /// [`leasehold::Locks::with_request_limit`](crate::Locks::with_request_limit).
    #[must_use]
    pub fn with_request_limit(&self, limit: impl Into<Option<Duration>>) -> Self {
        self.with(self.locks.with_request_limit(limit))
    }

    /// Locks `key`; waits its turn, at most for the [wait](Self::with_wait).
    ///
    /// Each call is an owner of its own: locking twice from one thread waits for itself. For re-entry see
    /// [`owner`](Self::owner).
    ///
    /// # Errors
    /// As [`leasehold::Locks::lock`](crate::Locks::lock).
    pub fn lock(&self, key: impl AsRef<str> + Send) -> Result<Guard> {
        let guard = self.runtime.wait(self.locks.lock(key))?;
        Ok(Guard::new(guard, &self.runtime))
    }

    /// Locks `key` without waiting for others; `None` if somebody else holds it.
    ///
    /// # Errors
    /// As [`leasehold::Locks::try_lock`](crate::Locks::try_lock).
    pub fn try_lock(&self, key: impl AsRef<str> + Send) -> Result<Option<Guard>> {
        let guard = self.runtime.wait(self.locks.try_lock(key))?;
        Ok(guard.map(|guard| Guard::new(guard, &self.runtime)))
    }

    /// Locks all of `keys`, or none, with one [wait](Self::with_wait) for all; see
    /// [`leasehold::Locks::lock_all`](crate::Locks::lock_all).
    ///
    /// ```
    /// # let locks = leasehold::blocking::open("memory:")?;
    /// let both = locks.lock_all(["order:42", "stock:7"])?;
    /// let token = both.get("stock:7").map(|guard| guard.token());
    /// assert!(token.is_some());
    /// both.release()?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`leasehold::Locks::lock_all`](crate::Locks::lock_all).
    pub fn lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Guards> {
        let guards = self.runtime.wait(self.locks.lock_all(keys))?;
        Ok(Guards::new(guards, &self.runtime))
    }

    /// Locks all of `keys` without waiting for others; `None`, and nothing held, if somebody else holds
    /// one.
    ///
    /// # Errors
    /// As [`leasehold::Locks::try_lock_all`](crate::Locks::try_lock_all).
    pub fn try_lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Option<Guards>> {
        let guards = self.runtime.wait(self.locks.try_lock_all(keys))?;
        Ok(guards.map(|guards| Guards::new(guards, &self.runtime)))
    }

    /// A new owner, who may lock again what it already holds.
    #[must_use]
    pub fn owner(&self) -> Owner {
        Owner::new(self.locks.owner(), &self.runtime)
    }

    /// Who holds `key` now, as far as the store knows; `None`: nobody (C21).
    ///
    /// # Errors
    /// As [`leasehold::Locks::holder`](crate::Locks::holder).
    pub fn holder(&self, key: impl AsRef<str> + Send) -> Result<Option<Holder>> {
        self.runtime.wait(self.locks.holder(key))
    }

    /// Takes the lock on `key` away: whoever holds it, or only `grant`; see
    /// [`leasehold::Locks::evict`](crate::Locks::evict).
    ///
    /// # Errors
    /// As [`leasehold::Locks::evict`](crate::Locks::evict).
    pub fn evict(&self, key: impl AsRef<str> + Send, grant: Option<&Holder>) -> Result<bool> {
        self.runtime.wait(self.locks.evict(key, grant))
    }

    /// The locks whose keys begin with `prefix` (all of them: `""`), with who holds them; see
    /// [`leasehold::Locks::list`](crate::Locks::list).
    ///
    /// ```
    /// # let locks = leasehold::blocking::open("memory:")?;
    /// let guard = locks.lock("order:42")?;
    /// for listed in locks.list("order:") {
    ///     let listed = listed?;
    ///     assert_eq!(listed.key.as_ref(), Some(guard.key()));
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// Each step fails as [`leasehold::Listing::next`](crate::Listing::next) does.
    pub fn list(&self, prefix: impl Into<String>) -> Listing {
        Listing::new(self.locks.list(prefix), &self.runtime)
    }

    /// How long a grant lasts unrenewed: the [ttl](Self::with_ttl), or the [fixed
    /// lease](Self::with_fixed_lease) that stands in its place.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.locks.ttl()
    }

    /// What the backend promises.
    #[must_use]
    pub fn guarantees(&self) -> Guarantees {
        self.locks.guarantees()
    }

    /// Fails if the store does not promise all of `needs`; see
    /// [`leasehold::Locks::require`](crate::Locks::require).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported), naming all that is missing.
    pub fn require(&self, needs: impl IntoIterator<Item = Need>) -> Result<()> {
        self.locks.require(needs)
    }

    /// Asks the store about itself; see [`leasehold::Locks::examine`](crate::Locks::examine).
    ///
    /// # Errors
    /// As [`leasehold::Locks::examine`](crate::Locks::examine).
    pub fn examine(&self) -> Result<Examination> {
        self.runtime.wait(self.locks.examine())
    }

    /// Ends all clones and their owners: waiting acquires of other threads fail with
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed), living guards hear `lost`, then everything is
    /// released, and that is awaited.
    ///
    /// # Errors
    /// As [`leasehold::Locks::close`](crate::Locks::close).
    pub fn close(&self) -> Result<()> {
        self.runtime.wait(self.locks.close())
    }

    pub(super) fn start(opening: impl Future<Output = Result<crate::Locks>>) -> Result<Self> {
        let (locks, runtime) = Runtime::start(opening)?;
        Ok(Self { locks, runtime })
    }

    fn with(&self, locks: crate::Locks) -> Self {
        Self {
            locks,
            runtime: self.runtime.clone(),
        }
    }
}
