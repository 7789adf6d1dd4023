use std::fmt;
use std::future::Future;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold_core::{Backend, Claim, Error, ErrorKind, Guarantees, Hold, Key, Locks};
use tokio::task::JoinSet;
use tokio::time::Instant;
use uuid::Uuid;

use crate::child::Child;
use crate::harness::{Harness, Store};
use crate::proxy::Line;

/// What a check works with: clients, keys of its own, times and a random number generator.
#[derive(Debug, Clone)]
pub(crate) struct Cx {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    harness: Arc<dyn Harness>,
    store: Store,
    guarantees: Guarantees,
    label: String,
    seed: u64,
    run: Uuid,
    keys: AtomicU32,
}

/// How long anything may take that is to happen at once. Long, for the machine may be busy; and yet
/// far below [`Cx::LONG`], so that nothing that only a ttl ends is taken for it.
pub(crate) const SOON: Duration = Duration::from_secs(10);

impl Cx {
    /// A ttl that does not run out during a check: what becomes free meanwhile was freed by somebody.
    pub(crate) const LONG: Duration = Duration::from_secs(30);

    pub(crate) fn new(
        harness: Arc<dyn Harness>,
        store: Store,
        guarantees: Guarantees,
        label: &str,
        seed: u64,
    ) -> Self {
        Self {
            inner: Arc::new(Inner {
                harness,
                store,
                guarantees,
                label: label.to_owned(),
                seed,
                run: Uuid::new_v4(),
                keys: AtomicU32::new(0),
            }),
        }
    }

    /// The same check on a store of its own.
    pub(crate) async fn on_new_store(&self) -> anyhow::Result<Self> {
        let store = self.inner.harness.start().await;
        let store = store.map_err(|missing| anyhow::anyhow!("{missing}"))?;
        let inner = &self.inner;
        let harness = Arc::clone(&inner.harness);
        Ok(Self::new(
            harness,
            store,
            inner.guarantees,
            &inner.label,
            inner.seed,
        ))
    }

    pub(crate) fn store(&self) -> &Store {
        &self.inner.store
    }

    pub(crate) fn guarantees(&self) -> &Guarantees {
        &self.inner.guarantees
    }

    /// The shortest ttl to test with: for what is to run out.
    pub(crate) fn ttl(&self) -> Duration {
        const SHORTEST: Duration = Duration::from_millis(300);
        let promised = self.inner.guarantees.shortest_ttl;
        self.inner.store.ttl.max(promised).max(SHORTEST)
    }

    /// A ttl that a renewal each third keeps alive on a busy machine.
    pub(crate) fn steady_ttl(&self) -> Duration {
        self.ttl().max(Duration::from_secs(2))
    }

    /// Tries something that holds only while nothing takes long: this process runs, and the store
    /// answers, within a sixth of `ttl`. Both are measured, and a failure counts only if it was so;
    /// else the attempt is made again, a few times.
    pub(crate) async fn undisturbed<F>(
        &self,
        ttl: Duration,
        mut attempt: impl FnMut() -> F + Send,
    ) -> anyhow::Result<()>
    where
        F: Future<Output = anyhow::Result<()>> + Send,
    {
        const TRIES: usize = 5;
        let limit = ttl / 6;
        let (client, key) = (self.client().await?, self.key());
        for _ in 0..TRIES {
            let (beats, answers) = (Meter::new(), Meter::new());
            let mut meters = JoinSet::new();
            meters.spawn(Arc::clone(&beats).measure(None));
            let asked = (Arc::clone(&client), key.clone());
            meters.spawn(Arc::clone(&answers).measure(Some(asked)));
            let outcome = attempt().await;
            drop(meters);
            let longest = beats.longest().max(answers.longest());
            match outcome {
                Err(error) if longest < limit => return Err(error),
                Err(_) => {}
                Ok(()) => return Ok(()),
            }
        }
        bail!("too slow to tell: in {TRIES} tries this process or the store took {limit:?} or more")
    }

    /// A new client.
    pub(crate) async fn client(&self) -> anyhow::Result<Arc<dyn Backend>> {
        self.client_at(&self.inner.store.address).await
    }

    /// A new client behind proxies of its own.
    pub(crate) async fn line(&self) -> anyhow::Result<(Line, Arc<dyn Backend>)> {
        let line = Line::to(&self.inner.store).await?;
        let client = self.client_at(line.address()).await?;
        Ok((line, client))
    }

    async fn client_at(&self, address: &str) -> anyhow::Result<Arc<dyn Backend>> {
        let connecting = self.inner.harness.connect(address);
        let client = soon("a client connects", connecting).await?;
        Ok(client.context("a client cannot connect")?.into())
    }

    /// The user's view of a new client, with a [long](Self::LONG) ttl.
    pub(crate) async fn locks(&self) -> anyhow::Result<Locks> {
        Ok(locks(self.client().await?))
    }

    /// A new client in a process of its own.
    pub(crate) async fn child(&self) -> anyhow::Result<Child> {
        Child::start(&self.inner.store.address).await
    }

    /// A key that no other check uses.
    pub(crate) fn key(&self) -> Key {
        let number = self.inner.keys.fetch_add(1, Ordering::Relaxed);
        let id = self.inner.label.split(' ').next().unwrap_or_default();
        let prefix = &self.inner.store.key_prefix;
        let text = format!("{prefix}{id}-{}-{number}", self.inner.run.simple());
        Key::new(text).expect("neither empty nor long")
    }

    /// Random numbers from the seed of the run, apart for each check.
    pub(crate) fn random(&self) -> fastrand::Rng {
        let mut hasher = DefaultHasher::new();
        self.inner.label.hash(&mut hasher);
        fastrand::Rng::with_seed(self.inner.seed ^ hasher.finish())
    }
}

/// How long to wait for what is to happen within `ttl`: several of them, and some seconds since the
/// machine may be busy.
pub(crate) fn after(ttl: Duration) -> Duration {
    ttl * 4 + Duration::from_secs(4)
}

/// The user's view of `client`: with a [long](Cx::LONG) ttl, and limits that a busy machine keeps.
pub(crate) fn locks(client: impl Backend) -> Locks {
    Locks::new(client)
        .with_ttl(Cx::LONG)
        .with_wait(SOON)
        .with_request_limit(SOON)
}

/// A claim of `key` that does not wait.
pub(crate) fn claim(key: &Key, ttl: Duration) -> Claim {
    let mut claim = Claim::new(key.clone(), ttl).expect("a good ttl");
    claim.request_limit = SOON;
    claim
}

/// A claim of `key` that waits as long as it may.
pub(crate) fn waiting(key: &Key, ttl: Duration) -> Claim {
    let mut claim = claim(key, ttl);
    claim.wait = None;
    claim
}

/// Acquires what must be free.
pub(crate) async fn granted(client: &dyn Backend, claim: &Claim) -> anyhow::Result<Box<dyn Hold>> {
    match soon("an acquire is answered", client.acquire(claim)).await?? {
        Some(hold) => Ok(hold),
        None => bail!("{} is not granted, though nobody holds it", claim.key),
    }
}

/// Tries to acquire what must be held by another.
pub(crate) async fn refused(client: &dyn Backend, key: &Key) -> anyhow::Result<()> {
    let claim = claim(key, Cx::LONG);
    match soon("a try is answered", client.acquire(&claim)).await?? {
        None => Ok(()),
        Some(hold) => bail!(
            "{key} is granted again (token {}), though another holds it",
            hold.token()
        ),
    }
}

/// Checks that a call failed, and in which way.
pub(crate) fn fails<T>(
    kind: ErrorKind,
    what: &str,
    result: leasehold_core::Result<T>,
) -> anyhow::Result<Error> {
    match result {
        Err(error) if error.kind() == kind => Ok(error),
        Err(error) => bail!("{what}: {kind:?} is due, not {:?}: {error}", error.kind()),
        Ok(_) => bail!("{what}: {kind:?} is due, and it says Ok"),
    }
}

/// Waits for something that is to happen at once.
pub(crate) async fn soon<F: Future>(what: &str, event: F) -> anyhow::Result<F::Output> {
    within(SOON, what, event).await
}

/// Waits for something that is to happen within `limit`.
pub(crate) async fn within<F: Future>(
    limit: Duration,
    what: &str,
    event: F,
) -> anyhow::Result<F::Output> {
    let waited = tokio::time::timeout(limit, event).await;
    waited.with_context(|| format!("not within {limit:?}: {what}"))
}

/// Takes the lock on `key` away from `hold`, whoever does it.
pub(crate) async fn take_away(
    operator: &dyn Backend,
    key: &Key,
    hold: &mut dyn Hold,
) -> anyhow::Result<()> {
    let taken = soon("an evict is answered", operator.evict(key, None)).await?;
    if matches!(&taken, Err(error) if error.kind() == ErrorKind::Unsupported) {
        bail!(Skip("the store cannot take a lock away"));
    }
    taken.context("an evict")?;
    // Some holders let go only at their next check.
    let check = soon("a renewal is answered", hold.renew()).await?;
    fails(ErrorKind::Lost, "the renewal of an evicted lock", check)?;
    Ok(())
}

/// A check found that it cannot be made here, for this reason.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) &'static str);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Skip {}

/// The longest that something took, what is under way included.
#[derive(Debug)]
struct Meter(Mutex<(Duration, Instant)>);

impl Meter {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new((Duration::ZERO, Instant::now()))))
    }

    /// Measures for ever how long a short sleep and, if one is named, a store's answer takes.
    async fn measure(self: Arc<Self>, store: Option<(Arc<dyn Backend>, Key)>) {
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            if let Some((client, key)) = &store {
                // A failure is answered too.
                drop(client.holder(key).await);
            }
            self.longest();
            self.0.lock().unwrap_or_else(PoisonError::into_inner).1 = Instant::now();
        }
    }

    fn longest(&self) -> Duration {
        let mut measured = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        measured.0 = measured.0.max(measured.1.elapsed());
        measured.0
    }
}

/// Drives `waiter`, an acquire of `key` by `client`, until the store must know of it.
///
/// # Errors
/// If the waiter does not wait, but ends.
pub(crate) async fn queued<T>(
    client: &dyn Backend,
    key: &Key,
    waiter: &mut (impl Future<Output = T> + Unpin),
) -> anyhow::Result<()> {
    match drive(client, key, waiter).await? {
        None => Ok(()),
        Some(_) => bail!("an acquire of {key} ended, though another holds it"),
    }
}

/// Drives `waiter`, an acquire of `key` by `client`, until it ends or the store must know of it.
///
/// No store tells how many wait. But a client's requests reach it in their order: when several reads
/// have been sent and answered one after the other since, and the waiter was driven before each, its
/// own requests have arrived too.
pub(crate) async fn drive<T>(
    client: &dyn Backend,
    key: &Key,
    waiter: &mut (impl Future<Output = T> + Unpin),
) -> anyhow::Result<Option<T>> {
    const READS: usize = 12;
    let mut reads = pin!(async {
        for _ in 0..READS {
            client.holder(key).await?;
            tokio::task::yield_now().await;
        }
        leasehold_core::Result::<()>::Ok(())
    });
    let mut waiter = pin!(waiter);
    let both = std::future::poll_fn(|cx| {
        if let Poll::Ready(output) = waiter.as_mut().poll(cx) {
            return Poll::Ready(Ok(Some(output)));
        }
        reads.as_mut().poll(cx).map(|read| {
            read?;
            Ok(None)
        })
    });
    soon("a waiter is queued", both).await?
}
