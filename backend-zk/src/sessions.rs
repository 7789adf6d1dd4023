use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{Moment, Result};
use tokio::runtime;
use tokio::time::timeout;

use crate::error;
use crate::options::ZooKeeperOptions;
use crate::session::Session;

/// The sessions of one client: one for each ttl and runtime, opened when it is needed.
#[derive(Debug)]
pub(crate) struct Sessions {
    options: Arc<ZooKeeperOptions>,
    slots: Mutex<HashMap<(Duration, runtime::Id), Arc<Slot>>>,
    closed: AtomicBool,
}

/// Locked while a session is opened, so that claims that meet share it.
type Slot = tokio::sync::Mutex<Option<Arc<Session>>>;

impl Sessions {
    pub(crate) fn new(options: Arc<ZooKeeperOptions>) -> Self {
        Self {
            options,
            slots: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn options(&self) -> &ZooKeeperOptions {
        &self.options
    }

    /// The same, to open a session apart from these.
    pub(crate) fn shared_options(&self) -> &Arc<ZooKeeperOptions> {
        &self.options
    }

    /// The session for this ttl on this runtime; opens it within `limit` if there is none.
    pub(crate) async fn get(&self, ttl: Duration, limit: Duration) -> Result<Arc<Session>> {
        let runtime = runtime::Handle::try_current().map_err(|_| error::no_runtime())?;
        let started = Moment::now();
        let slot = self.slot(ttl, runtime.id())?;
        let silent =
            |_elapsed| error::map(self.options.servers(), &zookeeper_client::Error::Timeout);
        let mut current = timeout(limit, slot.lock()).await.map_err(silent)?;
        if let Some(session) = &*current
            && !session.is_over()
        {
            session.used();
            return Ok(session.clone());
        }
        let left = limit.saturating_sub(started.elapsed());
        let session = Session::open(self.options.clone(), ttl, left).await?;
        session.used();
        *current = Some(session.clone());
        drop(current);
        if self.closed.load(Ordering::Acquire) {
            session.end();
            return Err(error::closed());
        }
        Ok(session)
    }

    /// Any session on this runtime, for a request that is no claim.
    pub(crate) async fn any(&self, ttl: Duration, limit: Duration) -> Result<Arc<Session>> {
        let here = runtime::Handle::try_current()
            .map(|runtime| runtime.id())
            .ok();
        let open = self
            .open()
            .into_iter()
            .find(|session| Some(session.runtime().id()) == here);
        match open {
            Some(session) => Ok(session),
            None => self.get(ttl, limit).await,
        }
    }

    /// Those that are open now, and not just being opened.
    pub(crate) fn open(&self) -> Vec<Arc<Session>> {
        let slots = self.slots();
        let sessions = slots
            .values()
            .filter_map(|slot| slot.try_lock().ok()?.clone());
        sessions.filter(|session| !session.is_over()).collect()
    }

    /// Closes them all; there will be no new ones.
    pub(crate) async fn close(&self, limit: Duration) {
        let slots: Vec<Arc<Slot>> = {
            let mut slots = self.slots();
            self.closed.store(true, Ordering::Release);
            slots.drain().map(|(_, slot)| slot).collect()
        };
        for slot in slots {
            let session = slot.lock().await.take();
            if let Some(session) = session {
                session.close(limit).await;
            }
        }
    }

    fn slot(&self, ttl: Duration, runtime: runtime::Id) -> Result<Arc<Slot>> {
        let mut slots = self.slots();
        if self.closed.load(Ordering::Acquire) {
            return Err(error::closed());
        }
        if let Some(slot) = slots.get(&(ttl, runtime)) {
            return Ok(slot.clone());
        }
        // A runtime that has ended never asks for its slots again, and who knows for the ttls.
        slots.retain(|_, slot| match slot.try_lock() {
            Ok(session) => session.as_ref().is_some_and(|session| !session.is_over()),
            Err(_) => true,
        });
        let slot = Arc::new(Slot::default());
        slots.insert((ttl, runtime), slot.clone());
        Ok(slot)
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<(Duration, runtime::Id), Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
