use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{Claim, Result};
use tokio::runtime::Handle;
use tokio::sync::{OnceCell, mpsc};
use tokio::task::JoinSet;

use crate::EtcdOptions;
use crate::cleaner::{Cleaner, Cleaning, DeadWithIt};
use crate::endpoints::Endpoints;
use crate::session::Session;
use crate::together::Together;
use crate::watch::Watches;

/// What a client has on one runtime: connections, watches, sessions, and the tasks behind them.
///
/// Each runtime has its own, for they end with it, and locks that were acquired on another must not.
pub(crate) struct Link {
    pub(crate) runtime: Handle,
    pub(crate) endpoints: Arc<Endpoints>,
    pub(crate) together: Arc<Together>,
    pub(crate) watches: Watches,
    pub(crate) sessions: Sessions,
    cleaner: mpsc::UnboundedSender<Cleaning>,
    dead: Arc<AtomicBool>,
}

/// The session of each ttl.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<HashMap<Duration, Slot>>);

/// Filled by the first claim of that ttl; the others wait for it.
type Slot = Arc<OnceCell<Arc<Session>>>;

impl Link {
    /// Starts the tasks on the current runtime; connects when something is to be sent.
    pub(crate) fn start(options: EtcdOptions) -> Arc<Self> {
        let endpoints = Arc::new(Endpoints::new(options));
        let dead = Arc::new(AtomicBool::new(false));
        let (cleaner, handed) = mpsc::unbounded_channel();
        let task = Cleaner {
            endpoints: endpoints.clone(),
            handed,
        };
        drop(tokio::spawn(task.run(DeadWithIt(dead.clone()))));
        Arc::new(Self {
            runtime: Handle::current(),
            together: Arc::new(Together::start(endpoints.clone())),
            watches: Watches::start(endpoints.clone()),
            endpoints,
            sessions: Sessions::default(),
            cleaner,
            dead,
        })
    }

    /// Whether its runtime has ended.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The session for `claim`: that of its ttl, or one of its own for a fixed lease.
    pub(crate) async fn session(self: &Arc<Self>, claim: &Claim) -> Result<Arc<Session>> {
        let limit = claim.request_limit;
        if claim.fixed {
            return Session::grant(self, claim.ttl, limit).await;
        }
        loop {
            let slot = self.sessions.slot(claim.ttl);
            let grant = || Session::grant(self, claim.ttl, limit);
            let session = slot.get_or_try_init(grant).await?;
            if session.is_open() {
                return Ok(session.clone());
            }
            self.sessions.forget(session);
        }
    }

    /// Deletes a key in the background.
    pub(crate) fn clean(&self, cleaning: Cleaning) {
        // Without a task the runtime has ended; so does the lease.
        let _outcome = self.cleaner.send(cleaning);
    }

    /// Runs `task` on the runtime, from wherever this is called; if it has ended, drops it.
    pub(crate) fn spawn(&self, task: Pin<Box<dyn Future<Output = ()> + Send>>) {
        drop(self.runtime.spawn(task));
    }

    /// Gives all leases back.
    pub(crate) async fn close(&self) -> Result<()> {
        let mut ends = JoinSet::new();
        for session in self.sessions.take() {
            let _task = ends.spawn(async move { session.end().await });
        }
        ends.join_all().await.into_iter().fold(Ok(()), Result::and)
    }
}

impl Sessions {
    /// Lets go of all: each ends when the last of its holds is gone.
    pub(crate) fn take(&self) -> Vec<Arc<Session>> {
        let slots: Vec<Slot> = self.slots().drain().map(|(_, slot)| slot).collect();
        slots
            .iter()
            .filter_map(|slot| slot.get().cloned())
            .collect()
    }

    /// `session` is not for new claims any more.
    pub(crate) fn forget(&self, session: &Session) {
        let mut slots = self.slots();
        let this = |slot: &Slot| {
            slot.get()
                .is_some_and(|other| std::ptr::eq(&**other, session))
        };
        if slots.get(&session.ttl).is_some_and(this) {
            let slot = slots.remove(&session.ttl);
            drop(slots);
            drop(slot);
        }
    }

    fn slot(&self, ttl: Duration) -> Slot {
        /// Whoever uses ever new ttls must not be left with ever more leases.
        const MOST: usize = 16;
        let mut slots = self.slots();
        let mut unused = Vec::new();
        if slots.len() >= MOST && !slots.contains_key(&ttl) {
            let idle = |slot: &mut Slot| {
                let session = slot.get();
                Arc::strong_count(slot) == 1
                    && session.is_some_and(|session| Arc::strong_count(session) == 1)
            };
            unused.extend(slots.extract_if(|_, slot| idle(slot)));
        }
        let slot = slots.entry(ttl).or_default().clone();
        drop(slots);
        drop(unused);
        slot
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<Duration, Slot>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("runtime", &self.runtime.id())
            .field("endpoints", &self.endpoints)
            .finish_non_exhaustive()
    }
}
