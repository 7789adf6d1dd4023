use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Error, ErrorKind, Guarantees, Hold, Holder, Key, Result, Token, Validity,
};

/// A client between core and the backend under test: counts the calls and breaks them on command.
///
/// What it does is what a network does to single requests, so it works on every backend.
#[derive(Debug, Clone)]
pub(crate) struct Faulty {
    inner: Arc<dyn Backend>,
    calls: Arc<Calls>,
}

/// The calls of a [`Faulty`] client.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    pub(crate) acquire: Call,
    pub(crate) renew: Call,
    pub(crate) release: Call,
}

/// One kind of call: how often it was begun, and what becomes of it.
#[derive(Default)]
pub(crate) struct Call {
    begun: AtomicUsize,
    fault: Mutex<Fault>,
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Fault {
    #[default]
    None,
    /// It never reaches the store and is never answered.
    Silent,
    /// It never reaches the store and fails.
    Fails,
    /// Once: it never reaches the store and fails.
    FailsOnce,
    /// Once: it is done, and its answer is lost.
    LosesAnswerOnce,
    /// Once: it is done, and the answer comes only so much later.
    LateOnce(Duration),
}

impl Faulty {
    pub(crate) fn new(inner: Arc<dyn Backend>) -> Self {
        Self {
            inner,
            calls: Arc::default(),
        }
    }

    pub(crate) fn calls(&self) -> &Arc<Calls> {
        &self.calls
    }
}

impl Call {
    /// How many were begun.
    pub(crate) fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    /// What becomes of the calls from now on.
    pub(crate) fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    async fn through<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        match self.take() {
            Fault::None => call.await,
            Fault::Silent => std::future::pending().await,
            Fault::Fails | Fault::FailsOnce => Err(unavailable()),
            Fault::LosesAnswerOnce => call.await.and(Err(unavailable())),
            Fault::LateOnce(delay) => {
                let answer = call.await;
                tokio::time::sleep(delay).await;
                answer
            }
        }
    }

    fn take(&self) -> Fault {
        let mut fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        match *fault {
            Fault::FailsOnce | Fault::LosesAnswerOnce | Fault::LateOnce(_) => {
                std::mem::take(&mut *fault)
            }
            lasting => lasting,
        }
    }
}

fn unavailable() -> Error {
    Error::new(ErrorKind::Unavailable, "the suite broke this call")
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.begun())
    }
}

#[async_trait]
impl Backend for Faulty {
    fn guarantees(&self) -> Guarantees {
        self.inner.guarantees()
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let acquire = self.inner.acquire(claim);
        let inner = self.calls.acquire.through(acquire).await?;
        Ok(inner.map(|inner| {
            let calls = Arc::clone(&self.calls);
            Box::new(FaultyHold { inner, calls }) as Box<dyn Hold>
        }))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        self.inner.holder(key).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        self.inner.evict(key, grant).await
    }

    async fn close(&self) -> Result<()> {
        self.inner.close().await
    }
}

#[derive(Debug)]
struct FaultyHold {
    inner: Box<dyn Hold>,
    calls: Arc<Calls>,
}

#[async_trait]
impl Hold for FaultyHold {
    fn token(&self) -> Token {
        self.inner.token()
    }

    fn validity(&self) -> &Validity {
        self.inner.validity()
    }

    async fn renew(&mut self) -> Result<()> {
        self.calls.renew.through(self.inner.renew()).await
    }

    async fn release(&mut self) -> Result<()> {
        self.calls.release.through(self.inner.release()).await
    }
}
