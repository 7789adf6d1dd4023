use std::fmt;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, OnceCell};
use tokio::task::JoinSet;
use tracing::{Instrument, debug, debug_span};
use uuid::Uuid;

use crate::guard::Held;
use crate::keeper::Keeper;
use crate::kept::Kept;
use crate::{
    Backend, Claim, Error, ErrorKind, Examination, Guarantees, Guard, Guards, Holder, Key, Listing,
    Moment, Need, Owner, OwnerId, Page, Result,
};

/// The locks of one store: the place to start.
///
/// Cheap to clone, and the same type whatever the backend. Options are plain data: each `with_…`
/// gives another `Locks` of the same store and leaves this one as it is.
///
/// ```
/// use std::time::Duration;
/// use leasehold_core::{Locks, Memory};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold_core::Result<()> {
/// let locks = Locks::new(Memory::new())
///     .with_ttl(Duration::from_secs(30))
///     .with_wait(Duration::from_secs(3));
///
/// let guard = locks.lock("order:42").await?;
/// assert!(locks.try_lock("order:42").await?.is_none(), "held by another: None, not an error");
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Locks {
    shared: Arc<Shared>,
    options: Options,
}

impl Locks {
    /// The locks of `backend`: ttl 30 s, renewed every third of it, no limit to waiting.
    #[must_use]
    pub fn new(backend: impl Backend) -> Self {
        Self {
            shared: Arc::new(Shared {
                backend: Box::new(backend),
                keepers: Mutex::default(),
                closed: AtomicBool::new(false),
                closing: Notify::new(),
                close: OnceCell::new(),
            }),
            options: Options {
                ttl: Duration::from_secs(30),
                wait: None,
                fixed_lease: None,
                max_hold: None,
                label: None,
                request_limit: None,
            },
        }
    }

    /// How long a grant lasts unrenewed: what others wait at most after this process has died. It is
    /// renewed in the background every third of that while the guard lives. Whole milliseconds, from
    /// 10 ms to a year; the acquire refuses others (C14).
    #[must_use]
    pub fn with_ttl(&self, ttl: Duration) -> Self {
        self.with(|options| options.ttl = ttl)
    }

    /// How long `lock` waits at most before it fails with [`ErrorKind::Timeout`] (C12); `None`: for
    /// as long as it takes.
    #[must_use]
    pub fn with_wait(&self, wait: impl Into<Option<Duration>>) -> Self {
        let wait = wait.into();
        self.with(|options| options.wait = wait)
    }

    /// Locks are never renewed and end by themselves after `lease`, which stands in place of the ttl
    /// (C17); `None`: they are renewed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use leasehold_core::{Locks, Memory};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> leasehold_core::Result<()> {
    /// let locks = Locks::new(Memory::new()).with_fixed_lease(Duration::from_secs(10));
    /// let guard = locks.lock("order:42").await?;
    /// guard.lost().await; // just before the 10 s are over
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_fixed_lease(&self, lease: impl Into<Option<Duration>>) -> Self {
        let lease = lease.into();
        self.with(|options| options.fixed_lease = lease)
    }

    /// Locks are renewed, but not for ever: after `max`, counted from the grant, `lost` fires, and at
    /// most one ttl later the store has let go (C17). Working code has that long to hear it.
    #[must_use]
    pub fn with_max_hold(&self, max: impl Into<Option<Duration>>) -> Self {
        let max = max.into();
        self.with(|options| options.max_hold = max)
    }

    /// Words of your own that operators see beside the owner; an empty text is none. At most 1 KiB
    /// ([`Claim::MAX_LABEL_LEN`]).
    #[must_use]
    pub fn with_label(&self, label: impl Into<String>) -> Self {
        let label = label.into();
        self.with(|options| options.label = (!label.is_empty()).then(|| label.into()))
    }

    /// How long a single request to the store may take before it counts as failed; `None`: a third
    /// of the ttl, at most 5 s.
    #[must_use]
    pub fn with_request_limit(&self, limit: impl Into<Option<Duration>>) -> Self {
        let limit = limit.into();
        self.with(|options| options.request_limit = limit)
    }

    /// Locks `key`; waits its turn, at most for the [wait](Self::with_wait).
    ///
    /// Each call is an owner of its own: locking twice from one task waits for itself. For re-entry
    /// see [`owner`](Self::owner).
    ///
    /// # Errors
    /// - [`ErrorKind::Timeout`] if somebody else still held it when the wait was over.
    /// - [`ErrorKind::Unavailable`] if the store could not be reached at the first attempt.
    /// - [`ErrorKind::Invalid`] for an empty or too long key, or an option out of its range, before
    ///   anything is sent.
    /// - [`ErrorKind::Lost`] if the session in which it waited was taken away.
    /// - [`ErrorKind::Closed`] after [`close`](Self::close), [`ErrorKind::Unsupported`] outside of a
    ///   tokio runtime.
    ///
    /// # Cancel safety
    /// Dropping the future at any await leaves nothing queued and nothing held (C5).
    pub async fn lock(&self, key: impl AsRef<str> + Send) -> Result<Guard> {
        let key = Key::new(key)?;
        let guard = self.grant(&key, None, self.options.wait).await?;
        guard.ok_or_else(|| timed_out(&[key], self.options.wait))
    }

    /// Locks `key` without waiting; `None` if somebody else holds it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), but never [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn try_lock(&self, key: impl AsRef<str> + Send) -> Result<Option<Guard>> {
        self.grant(&Key::new(key)?, None, Some(Duration::ZERO))
            .await
    }

    /// Locks all of `keys`, or none: in the order of their names, so that two who want the same keys
    /// never wait for each other, with one [wait](Self::with_wait) for all. A key that is named twice
    /// counts once.
    ///
    /// ```
    /// # use leasehold_core::{Locks, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> leasehold_core::Result<()> {
    /// # let locks = Locks::new(Memory::new());
    /// let both = locks.lock_all(["order:42", "stock:7"]).await?;
    /// let token = both.get("stock:7").map(|guard| guard.token());
    /// assert!(token.is_some());
    /// both.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`lock`](Self::lock); [`ErrorKind::Lost`] also if one was lost while others were waited
    /// for. Whatever was held by then is freed.
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Guards> {
        let wait = self.options.wait;
        let keys = sorted(keys)?;
        let guards = all(&keys, wait, |key, wait| {
            Box::pin(self.grant(key, None, wait))
        })
        .await?;
        guards.ok_or_else(|| timed_out(&keys, wait))
    }

    /// Locks all of `keys` without waiting; `None`, and nothing held, if somebody else holds one.
    ///
    /// # Errors
    /// As [`lock_all`](Self::lock_all), but never [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// As [`lock`](Self::lock).
    pub async fn try_lock_all<K: AsRef<str>>(
        &self,
        keys: impl IntoIterator<Item = K> + Send,
    ) -> Result<Option<Guards>> {
        let wait = Some(Duration::ZERO);
        let keys = sorted(keys)?;
        all(&keys, wait, |key, wait| {
            Box::pin(self.grant(key, None, wait))
        })
        .await
    }

    /// A new owner, who may lock again what it already holds.
    #[must_use]
    pub fn owner(&self) -> Owner {
        Owner::new(self.clone())
    }

    /// Who holds `key` now, as far as the store knows; `None`: nobody (C21).
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store does not answer, [`ErrorKind::Invalid`] for an
    /// impossible key, [`ErrorKind::Closed`] after [`close`](Self::close).
    ///
    /// # Cancel safety
    /// Only reads.
    pub async fn holder(&self, key: impl AsRef<str> + Send) -> Result<Option<Holder>> {
        let key = Key::new(key)?;
        self.request(self.shared.backend.holder(&key)).await
    }

    /// Takes the lock on `key` away: whoever holds it, or only `grant`, as [`holder`](Self::holder)
    /// gave it. The next waiter gets it; the holder's `lost` fires, at once where the store can tell
    /// it, else at its next check (C21). Says whether something was taken away.
    ///
    /// For operators: the holder may be in the middle of its work.
    ///
    /// # Errors
    /// As [`holder`](Self::holder); [`ErrorKind::Unsupported`] where the store cannot.
    ///
    /// # Cancel safety
    /// If dropped, it may or may not have been taken away.
    pub async fn evict(&self, key: impl AsRef<str> + Send, grant: Option<&Holder>) -> Result<bool> {
        let key = Key::new(key)?;
        self.request(self.shared.backend.evict(&key, grant)).await
    }

    /// The locks that are held or waited for and whose keys begin with `prefix`, everybody's, in no
    /// order; with an empty `prefix` all of them (C21). For operators: `leasehold ls` shows it.
    ///
    /// It is no snapshot, and nothing to decide by: the store is asked page by page, so a lock that
    /// changes hands meanwhile may come twice, or not at all, and each may be free again when it comes.
    ///
    /// ```
    /// # use leasehold_core::{Locks, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> leasehold_core::Result<()> {
    /// # let locks = Locks::new(Memory::new());
    /// let guard = locks.lock("order:42").await?;
    /// let mut listing = locks.list("order:");
    /// while let Some(listed) = listing.next().await? {
    ///     let name = listed.key.map_or(listed.raw, |key| key.to_string());
    ///     println!("{name}: {:?}, {:?} waiting", listed.holder, listed.waiting);
    /// #   assert_eq!(name, guard.key().as_str());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn list(&self, prefix: impl Into<String>) -> Listing {
        Listing::new(self.clone(), prefix.into())
    }

    /// How long a grant lasts unrenewed: the [ttl](Self::with_ttl), or the [fixed
    /// lease](Self::with_fixed_lease) that stands in its place.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.options.fixed_lease.unwrap_or(self.options.ttl)
    }

    /// What the backend promises.
    #[must_use]
    pub fn guarantees(&self) -> Guarantees {
        self.shared.backend.guarantees()
    }

    /// Fails if the store does not promise all of `needs`: call it when the program starts, and it is
    /// not in the night that somebody finds out. Nothing is sent.
    ///
    /// ```
    /// # use leasehold_core::{Locks, Memory, Need};
    /// let locks = Locks::new(Memory::new());
    /// locks.require([Need::Order, Need::Push])?;
    /// # Ok::<(), leasehold_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`], naming all that is missing.
    pub fn require(&self, needs: impl IntoIterator<Item = Need>) -> Result<()> {
        Need::require(needs, &self.guarantees())
    }

    /// Asks the store about itself: versions, how long a request takes, whose clock differs, and what
    /// endangers locks of this [ttl](Self::ttl). For operators; `leasehold doctor` shows it.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store does not answer within 30 s, [`ErrorKind::Closed`]
    /// after [`close`](Self::close), [`ErrorKind::Unsupported`] outside of a tokio runtime.
    ///
    /// # Cancel safety
    /// Leaves nothing but what ends within a ttl.
    pub async fn examine(&self) -> Result<Examination> {
        let examining = self.shared.backend.examine(self.ttl());
        let mut examination = self.request_within(LONG_LIMIT, examining).await?;
        examination.judge(self.ttl(), self.guarantees().shortest_ttl);
        Ok(examination)
    }

    /// Ends all clones and their owners: waiting acquires fail with [`ErrorKind::Closed`], living
    /// guards hear `lost`, then everything is released, and that is awaited.
    ///
    /// # Errors
    /// The first release that did not get through, or what the backend could not give back; it is
    /// closed all the same, and what is left ends within its ttl.
    ///
    /// # Cancel safety
    /// If dropped, all is closed, and what is left ends in the background; call it again to wait for
    /// the rest.
    pub async fn close(&self) -> Result<()> {
        runtime()?;
        let closed = self.shared.close.get_or_init(|| self.shared.close()).await;
        closed.clone()
    }

    /// A part of a [`Listing`].
    pub(crate) async fn page(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        let listing = self.shared.backend.list(prefix, after);
        self.request_within(LONG_LIMIT, listing).await
    }

    pub(crate) fn wait(&self) -> Option<Duration> {
        self.options.wait
    }

    /// The one acquire from which all others derive.
    ///
    /// 1. Claim, with a new id.
    /// 2. From the moment of the grant a guard stands for it, so that dropping this future releases.
    /// 3. A grant that took long to arrive is confirmed by one renewal; if it is gone by then, back
    ///    to 1 with what is left of the wait.
    pub(crate) async fn grant(
        &self,
        key: &Key,
        owner: Option<&OwnerId>,
        wait: Option<Duration>,
    ) -> Result<Option<Guard>> {
        let started = Moment::now();
        self.check_open()?;
        let keeper = self.shared.keeper(runtime()?);
        let mut claim = self.claim(key, owner)?;
        let waiting = debug_span!(target: "leasehold", "wait", %key, owner = %claim.owner);
        let granting = async {
            loop {
                claim.wait = wait.map(|wait| wait.saturating_sub(started.elapsed()));
                let acquire = self.shared.backend.acquire(&claim);
                // The backend keeps the wait; this is for one that does not.
                let patience = claim
                    .wait
                    .map(|wait| wait.saturating_add(claim.request_limit));
                let Some(answer) = self.wait_for(acquire, patience).await? else {
                    return Err(no_answer(&claim));
                };
                let Some(hold) = answer? else {
                    return Ok(None);
                };
                let kept = Kept::new(hold, &claim, self.options.max_hold, keeper.clone());
                let held = Arc::new(Held(kept));
                if held.0.confirm().await {
                    held.0.schedule(held.0.granted);
                    // Whoever closes in between has not seen it on the schedule.
                    self.check_open()?;
                    debug!(
                        target: "leasehold",
                        %key, owner = %claim.owner, token = %held.0.token,
                        waited = ?started.elapsed(),
                        "lock granted"
                    );
                    return Ok(Some(Guard::new(held)));
                }
                debug!(
                    target: "leasehold",
                    %key, owner = %claim.owner, token = %held.0.token,
                    "a grant came too late to be believed: claiming again"
                );
                drop(held);
                claim.id = Uuid::new_v4();
            }
        };
        if waiting.is_disabled() {
            granting.await
        } else {
            granting.instrument(waiting).await
        }
    }

    /// Waits for `event`, at most for `wait`; fails when all is closed. Looks at the event first.
    pub(crate) async fn wait_for<T>(
        &self,
        event: impl Future<Output = T>,
        wait: Option<Duration>,
    ) -> Result<Option<T>> {
        tokio::select! {
            biased;
            answer = event => Ok(Some(answer)),
            () = self.shared.closed() => Err(closed()),
            () = over(wait) => Ok(None),
        }
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.shared.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        Ok(())
    }

    fn with(&self, change: impl FnOnce(&mut Options)) -> Self {
        let mut changed = self.clone();
        change(&mut changed.options);
        changed
    }

    fn claim(&self, key: &Key, owner: Option<&OwnerId>) -> Result<Claim> {
        let options = &self.options;
        let zero = |limit: Option<Duration>| limit.is_some_and(|limit| limit.is_zero());
        if zero(options.max_hold) || zero(options.request_limit) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "a maximum hold or request limit of zero is not possible: give None for no limit",
            ));
        }
        if let Some(label) = &options.label
            && label.len() > Claim::MAX_LABEL_LEN
        {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "the label has {} bytes, at most {} are allowed: shorten it",
                    label.len(),
                    Claim::MAX_LABEL_LEN
                ),
            ));
        }
        let mut claim = Claim::new(key.clone(), self.ttl())?;
        if let Some(owner) = owner {
            claim.owner = owner.clone();
        }
        claim.fixed = options.fixed_lease.is_some();
        claim.label.clone_from(&options.label);
        if let Some(limit) = options.request_limit {
            claim.request_limit = limit;
        }
        Ok(claim)
    }

    /// A single request that is no claim.
    async fn request<T>(&self, request: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.options.request_limit;
        let limit = limit.unwrap_or_else(|| Claim::default_request_limit(self.options.ttl));
        self.request_within(limit, request).await
    }

    async fn request_within<T>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        runtime()?;
        self.check_open()?;
        self.wait_for(request, Some(limit))
            .await?
            .unwrap_or_else(|| {
                Err(Error::new(
                    ErrorKind::Unavailable,
                    format!("the store did not answer within {limit:?}"),
                ))
            })
    }
}

/// For what operators ask and no lock waits for.
const LONG_LIMIT: Duration = Duration::from_secs(30);

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks")
            .field("backend", &self.shared.backend)
            .field("options", &self.options)
            .finish()
    }
}

#[derive(Debug, Clone)]
struct Options {
    ttl: Duration,
    wait: Option<Duration>,
    fixed_lease: Option<Duration>,
    max_hold: Option<Duration>,
    label: Option<Arc<str>>,
    request_limit: Option<Duration>,
}

/// What all clones share.
struct Shared {
    backend: Box<dyn Backend>,
    /// One for each runtime that acquires.
    keepers: Mutex<Vec<Arc<Keeper>>>,
    closed: AtomicBool,
    closing: Notify,
    close: OnceCell<Result<()>>,
}

impl Shared {
    fn keeper(&self, runtime: Handle) -> Arc<Keeper> {
        let mut keepers = self.keepers();
        let here = |keeper: &&Arc<Keeper>| keeper.runtime().id() == runtime.id();
        if let Some(keeper) = keepers.iter().find(here) {
            return keeper.clone();
        }
        keepers.retain(|keeper| !keeper.is_dead());
        let keeper = Keeper::start(runtime);
        keepers.push(keeper.clone());
        keeper
    }

    async fn closed(&self) {
        let mut closing = pin!(self.closing.notified());
        closing.as_mut().enable();
        if !self.closed.load(Ordering::Acquire) {
            closing.await;
        }
    }

    async fn close(&self) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        self.closing.notify_waiters();
        let keepers: Vec<_> = self.keepers().iter().cloned().collect();
        let mut releases = JoinSet::new();
        for keeper in &keepers {
            for kept in keeper.all() {
                let _task = releases.spawn(kept.close());
            }
        }
        let mut outcome = Ok(());
        while let Some(release) = releases.join_next().await {
            // One that panicked is abandoned like one that is dropped.
            outcome = outcome.and(release.unwrap_or(Ok(())));
        }
        for keeper in &keepers {
            keeper.close();
        }
        outcome = outcome.and(self.backend.close().await);
        outcome
    }

    fn keepers(&self) -> MutexGuard<'_, Vec<Arc<Keeper>>> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for keeper in self.keepers().iter() {
            keeper.close();
        }
    }
}

/// Checks `keys`, sorts them, and takes each once.
pub(crate) fn sorted<K: AsRef<str>>(keys: impl IntoIterator<Item = K>) -> Result<Vec<Key>> {
    let mut keys = keys
        .into_iter()
        .map(Key::new)
        .collect::<Result<Vec<Key>>>()?;
    keys.sort();
    keys.dedup();
    Ok(keys)
}

pub(crate) type Acquiring<'a> = Pin<Box<dyn Future<Output = Result<Option<Guard>>> + Send + 'a>>;

/// Acquires `keys` one after the other, with one wait for all of them; `None` if it ran out. What is
/// held by then is freed with the guards.
pub(crate) async fn all<'a>(
    keys: &'a [Key],
    wait: Option<Duration>,
    acquire: impl Fn(&'a Key, Option<Duration>) -> Acquiring<'a> + Send,
) -> Result<Option<Guards>> {
    let started = Moment::now();
    let mut guards = Guards::new();
    for key in keys {
        let left = wait.map(|wait| wait.saturating_sub(started.elapsed()));
        let acquiring = acquire(key, left);
        let guard = tokio::select! {
            biased;
            guard = acquiring => guard?,
            () = guards.lost() => return Err(guards.first_lost()),
        };
        let Some(guard) = guard else {
            return Ok(None);
        };
        guards.push(guard);
    }
    if !guards.is_held() {
        return Err(guards.first_lost());
    }
    Ok(Some(guards))
}

pub(crate) fn timed_out(keys: &[Key], wait: Option<Duration>) -> Error {
    let wait = wait.unwrap_or_default();
    Error::new(
        ErrorKind::Timeout,
        match keys {
            [key] => format!("{key:?} was still held by another after {wait:?}"),
            keys => format!("one of {keys:?} was still held by another after {wait:?}"),
        },
    )
}

fn no_answer(claim: &Claim) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "the store did not answer the claim of {:?} in time",
            claim.key
        ),
    )
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "these locks were closed")
}

fn runtime() -> Result<Handle> {
    Handle::try_current().map_err(|_none| {
        Error::new(
            ErrorKind::Unsupported,
            "locks need a tokio runtime: call this from within one",
        )
    })
}

async fn over(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}
