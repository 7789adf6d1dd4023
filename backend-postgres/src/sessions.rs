use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use tokio::runtime::{Handle, Id};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use crate::key_form::LockId;
use crate::session::{Attempt, Common, Job, Kind, Session, Task};
use crate::turn::{Turn, Waiter};

/// All sessions of a client: one set for each ttl, since the server ends all of a session's locks
/// after the same idle time; and for each runtime, since a runtime that ends takes its sessions along.
pub(crate) struct Sessions {
    common: Arc<Common>,
    state: Mutex<State>,
    /// `max_sessions`, and how many of them may be spent on waits.
    all: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    closed: AtomicBool,
}

#[derive(Default)]
struct State {
    open: Vec<(Id, Arc<Session>)>,
    /// Shared sessions on their way, for all who want one.
    opening: HashMap<(Id, Duration), Opening>,
}

type Opening = watch::Receiver<Option<Result<()>>>;

enum Found {
    Open(Arc<Session>),
    Opening(Opening),
}

/// A waiting session that is ours alone; given back when this is dropped.
pub(crate) struct Taken(Option<Arc<Session>>);

impl Taken {
    /// Lets it wait; gives the turn back if the session has ended.
    pub(crate) fn wait(mut self, attempt: Attempt, waiter: Waiter) -> Result<Arc<Session>, Turn> {
        let Some(session) = self.0.take() else {
            return Err(attempt.turn);
        };
        match session.send(Job::Wait { attempt, waiter }) {
            Err(Job::Wait { attempt, .. }) => Err(attempt.turn),
            _ => Ok(session),
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(session) = &self.0 {
            session.give_back();
        }
    }
}

impl Sessions {
    pub(crate) fn new(common: Arc<Common>) -> Self {
        let sessions = common.options.max_sessions;
        // At least one for each purpose.
        let waiting = (sessions * 3 / 4).clamp(1, sessions - 1);
        Self {
            common,
            state: Mutex::default(),
            all: Arc::new(Semaphore::new(sessions)),
            waiting: Arc::new(Semaphore::new(waiting)),
            closed: AtomicBool::new(false),
        }
    }

    /// A session for a lock that may be free, opened if need be.
    ///
    /// # Cancel safety
    /// If dropped, a session that was being opened is there for the next one.
    pub(crate) async fn shared(self: &Arc<Self>, ttl: Duration) -> Result<Arc<Session>> {
        let runtime = runtime()?;
        loop {
            let mut opening = match self.find_shared(&runtime, ttl)? {
                Found::Open(session) => return Ok(session),
                Found::Opening(opening) => opening,
            };
            // An end without an answer: its runtime is gone.
            if let Ok(answer) = opening.wait_for(Option::is_some).await
                && let Some(Err(error)) = &*answer
            {
                return Err(error.clone());
            }
        }
    }

    /// Any shared session, for a question.
    pub(crate) async fn any_shared(self: &Arc<Self>) -> Result<Arc<Session>> {
        // The default of the user's API: most likely to be shared with locks.
        const USUAL: Duration = Duration::from_secs(30);
        if let Some(session) = self.open_one(runtime()?.id()) {
            return Ok(session);
        }
        let session = self.shared(USUAL).await?;
        session.discount(1);
        Ok(session)
    }

    /// Ends the wait of a waiting session early. Where nobody can be asked to: it ends by itself.
    pub(crate) fn interrupt(&self, pid: i32) {
        let shared = runtime()
            .ok()
            .and_then(|runtime| self.open_one(runtime.id()));
        if let Some(shared) = shared {
            drop(shared.send(Job::Interrupt { pid }));
        }
    }

    fn open_one(&self, runtime: Id) -> Option<Arc<Session>> {
        let state = self.state();
        let mut shared = state.open.iter().filter(|(id, session)| {
            *id == runtime && session.is_shared() && session.is_open() && session.has_room()
        });
        shared.next().map(|(_, session)| session.clone())
    }

    /// An idle waiting session that waited for `key` last: for it there is likely to be a wait again.
    pub(crate) fn waited_for(&self, key: LockId, ttl: Duration) -> Option<Taken> {
        self.take_waiting(runtime().ok()?.id(), ttl, |session| session.waited_for(key))
    }

    /// A waiting session, opened if need be. `None`: all that there may be are in use.
    ///
    /// # Cancel safety
    /// If dropped, a session that was being opened is there for the next one.
    pub(crate) async fn waiting(self: &Arc<Self>, ttl: Duration) -> Result<Option<Taken>> {
        let runtime = runtime()?;
        if let Some(idle) = self.take_waiting(runtime.id(), ttl, |_any| true) {
            return Ok(Some(idle));
        }
        let permits = (
            self.waiting.clone().try_acquire_owned(),
            self.all.clone().try_acquire_owned(),
        );
        let (Ok(waiting), Ok(any)) = permits else {
            self.retire_idle(ttl);
            return Ok(None);
        };
        let (answer, opened) = oneshot::channel();
        let sessions = self.clone();
        let id = runtime.id();
        drop(runtime.spawn(async move {
            let common = sessions.common.clone();
            let opened = Session::open(common, Kind::Waiting, ttl, vec![waiting, any]).await;
            let task = match opened {
                Ok((session, task)) => {
                    sessions.add(id, &session);
                    // Where nobody waits for it any more, it is given back.
                    drop(answer.send(Ok(Taken(Some(session)))));
                    task
                }
                Err(error) => return drop(answer.send(Err(error))),
            };
            drop(sessions);
            task.run().await;
        }));
        match opened.await {
            Ok(session) => session.map(Some),
            // The runtime ends.
            Err(_dropped) => Ok(None),
        }
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "this backend was closed"));
        }
        Ok(())
    }

    /// Ends all sessions and waits until their connections are closed.
    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let open = std::mem::take(&mut self.state().open);
        for (_, session) in &open {
            session.close();
        }
        for (_, session) in &open {
            session.closed().await;
        }
    }

    /// A shared session with room, or one that is being opened, by us if nobody else does.
    fn find_shared(self: &Arc<Self>, runtime: &Handle, ttl: Duration) -> Result<Found> {
        self.check_open()?;
        let mut state = self.state();
        state.open.retain(|(_, session)| session.is_open());
        let fits = |(id, session): &&(Id, Arc<Session>)| {
            *id == runtime.id() && session.serves(Kind::Shared, ttl) && session.has_room()
        };
        if let Some((_, session)) = state.open.iter().find(fits) {
            session.count(1);
            return Ok(Found::Open(session.clone()));
        }
        let key = (runtime.id(), ttl);
        // One whose task is gone without an answer is no longer on its way.
        if let Some(opening) = state.opening.get(&key)
            && opening.has_changed().is_ok()
        {
            return Ok(Found::Opening(opening.clone()));
        }
        let (answer, opening) = watch::channel(None);
        state.opening.insert(key, opening.clone());
        drop(state);
        let sessions = self.clone();
        drop(runtime.spawn(async move {
            let opened = sessions.open_shared(ttl).await;
            let (result, task) = match opened {
                Ok((session, task)) => {
                    sessions.add(key.0, &session);
                    (Ok(()), Some(task))
                }
                Err(error) => (Err(error), None),
            };
            sessions.state().opening.remove(&key);
            answer.send_replace(Some(result));
            // Nothing of the client is kept alive by its sessions.
            drop(sessions);
            if let Some(task) = task {
                task.run().await;
            }
        }));
        Ok(Found::Opening(opening))
    }

    async fn open_shared(&self, ttl: Duration) -> Result<(Arc<Session>, Task)> {
        let permit = self.permit(ttl).await?;
        Session::open(self.common.clone(), Kind::Shared, ttl, vec![permit]).await
    }

    async fn permit(&self, ttl: Duration) -> Result<OwnedSemaphorePermit> {
        if let Ok(permit) = self.all.clone().try_acquire_owned() {
            return Ok(permit);
        }
        self.retire_idle(ttl);
        let limit = self.common.options.connect_timeout;
        let freed = timeout(limit, self.all.clone().acquire_owned()).await;
        match freed {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "all {} sessions of this client are in use: raise max_sessions, or use fewer \
                     different ttls, which need sessions of their own",
                    self.common.options.max_sessions
                ),
            )),
        }
    }

    fn take_waiting(
        &self,
        runtime: Id,
        ttl: Duration,
        fits: impl Fn(&Session) -> bool,
    ) -> Option<Taken> {
        let state = self.state();
        let mut fitting = state.open.iter().filter(|(id, session)| {
            *id == runtime && session.serves(Kind::Waiting, ttl) && fits(session)
        });
        fitting
            .find(|(_, session)| session.take())
            .map(|(_, session)| Taken(Some(session.clone())))
    }

    /// Makes room: ends a session of another ttl that nobody uses.
    fn retire_idle(&self, ttl: Duration) {
        let state = self.state();
        let other = |session: &Session| {
            !session.serves(Kind::Shared, ttl) && !session.serves(Kind::Waiting, ttl)
        };
        for (_, session) in &state.open {
            if session.is_open() && session.is_idle() && other(session) {
                // Not accepted: it is ending already.
                let _ending = session.send(Job::Retire);
                return;
            }
        }
    }

    fn add(&self, runtime: Id, session: &Arc<Session>) {
        let mut state = self.state();
        state.open.retain(|(_, session)| session.is_open());
        state.open.push((runtime, session.clone()));
        drop(state);
        if self.check_open().is_err() {
            session.close();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Sessions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("open", &self.state().open.len())
            .finish_non_exhaustive()
    }
}

fn runtime() -> Result<Handle> {
    Handle::try_current().map_err(|_none| {
        Error::new(
            ErrorKind::Unsupported,
            "locks need a tokio runtime: call this from within one",
        )
    })
}
