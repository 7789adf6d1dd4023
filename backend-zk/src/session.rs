use std::collections::{HashMap, HashSet};
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use leasehold_core::{Moment, Result, Validity};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};
use zookeeper_client::{Client, EventType, SessionState, StateWatcher};

use crate::call::{Call, Calls};
use crate::error;
use crate::options::ZooKeeperOptions;
use crate::pulse::Pulse;

pub(crate) type Answer<T> = std::result::Result<T, zookeeper_client::Error>;

/// A session with the servers, on which all locks of one client with one ttl live.
///
/// 1. *Opened* with the ttl as its time-out, one second or more (what the servers make of it counts),
///    and an ephemeral node of its own.
/// 2. *Kept alive* by a task that writes to that node; [`Pulse`] says what the answers prove, and the
///    session's [`Validity`] is extended so far.
/// 3. *Watched:* the same task sees to it that the nodes of its locks are watched once they are a
///    second old, so that their holder hears at once of an operator who deletes one. Younger ones are
///    not: a lock that is soon released costs no watch.
/// 4. *Over* when its validity has ended, the servers say so, it was not used for a minute, or
///    nobody wants it any more: then the connection is closed in order, and with it all nodes go.
///
/// The task and the connection live on the runtime that opened the session, and die with it.
#[derive(Debug)]
pub(crate) struct Session {
    options: Arc<ZooKeeperOptions>,
    /// None once it is over: requests under way still have it.
    client: Mutex<Option<Arc<Client>>>,
    id: i64,
    timeout: Duration,
    validity: Validity,
    runtime: Handle,
    /// Our nodes by their path, and whether they are watched.
    nodes: Mutex<HashMap<String, Own>>,
    /// Folders that were there lately.
    folders: Mutex<HashSet<String>>,
    calls: Calls,
    uses: AtomicU64,
}

#[derive(Debug)]
struct Own {
    validity: Validity,
    /// Woken when it has ended. (To wait for the validity itself takes a timer for each that waits.)
    told: Arc<Notify>,
    created: Moment,
    watched: bool,
}

impl Session {
    /// What is asked for at least: shorter ones would end in any pause of a server.
    pub(crate) const SHORTEST: Duration = Duration::from_secs(1);

    /// How long a node lives before it is watched.
    const UNWATCHED: Duration = Duration::from_secs(1);

    /// How long an unused session is kept.
    const IDLE: Duration = Duration::from_secs(60);

    /// Opens a session on the current runtime, within `limit`.
    pub(crate) async fn open(
        options: Arc<ZooKeeperOptions>,
        ttl: Duration,
        limit: Duration,
    ) -> Result<Arc<Self>> {
        let mut last = zookeeper_client::Error::Timeout;
        let opening = async {
            loop {
                match Self::try_open(&options, ttl).await {
                    Err(error)
                        if error::is_unanswered(&error) || error::is_session_over(&error) =>
                    {
                        last = error;
                    }
                    answer => return answer,
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        // The client tries again whatever the reason is; some do not pass.
        let heard = OnceLock::new();
        let refusal = async {
            match options.tls() {
                Some(tls) => tls.refusal(&heard).await,
                None => pending().await,
            }
        };
        let answer = timeout(limit, async {
            tokio::select! {
                biased;
                answer = opening => Ok(answer),
                refusal = refusal => Err(refusal),
            }
        });
        let answer = match answer.await {
            Ok(Ok(answer)) => answer,
            Ok(Err(refusal)) => return Err(error::no_tls(options.servers(), &refusal)),
            Err(_elapsed) => Err(last),
        };
        let (session, pulse) = answer.map_err(|error| {
            let hint = match (heard.get(), options.tls()) {
                (Some(heard), _) => heard,
                (None, Some(_)) => "do they speak TLS there? Their secureClientPort is meant",
                (None, None) => "if they speak TLS there, begin the URL with zks://",
            };
            error::map_opening(options.servers(), hint, &error)
        })?;
        let alive = Alive(Arc::downgrade(&session));
        let state = session.client().map(|client| client.state_watcher());
        if let Ok(state) = state {
            drop(
                session
                    .runtime
                    .spawn(async move { alive.keep(pulse, state).await }),
            );
        }
        Ok(session)
    }

    async fn try_open(
        options: &Arc<ZooKeeperOptions>,
        ttl: Duration,
    ) -> Answer<(Arc<Self>, Pulse)> {
        const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);
        let sent = Moment::now();
        let connector = options.connector(ttl.clamp(Self::SHORTEST, LONGEST));
        let client = connector.connect(&options.connect_string()).await?;
        let timeout = client.session_timeout();
        let mut pulse = Pulse::new(sent, ttl, timeout);
        let sent = Moment::now();
        show_life(&client, options).await?;
        let (from, length) = pulse.answered(sent);
        let session = Arc::new_cyclic(|session| Self {
            id: client.session_id().0,
            timeout,
            validity: Validity::new(from, length),
            client: Mutex::new(Some(Arc::new(client))),
            options: options.clone(),
            runtime: Handle::current(),
            nodes: Mutex::default(),
            folders: Mutex::default(),
            calls: Call::gather(session.clone()),
            uses: AtomicU64::new(0),
        });
        debug!(target: "leasehold", id = %session.name(), ?ttl, ?timeout, "session opened");
        Ok((session, pulse))
    }

    pub(crate) fn options(&self) -> &ZooKeeperOptions {
        &self.options
    }

    pub(crate) fn shared_options(&self) -> Arc<ZooKeeperOptions> {
        self.options.clone()
    }

    /// By which its calls on queues go.
    pub(crate) fn calls(&self) -> &Calls {
        &self.calls
    }

    /// What the servers granted.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn id(&self) -> i64 {
        self.id
    }

    pub(crate) fn validity(&self) -> &Validity {
        &self.validity
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn is_over(&self) -> bool {
        self.validity.is_ended() || self.slot().is_none()
    }

    /// It was given to somebody.
    pub(crate) fn used(&self) {
        self.uses.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn client(&self) -> Answer<Arc<Client>> {
        let client = self.slot().clone();
        client.ok_or(zookeeper_client::Error::ClientClosed)
    }

    /// Requests other than calls on queues; one that is not answered within `limit` counts as failed.
    ///
    /// The client sends when its method is called and not when the answer is awaited: so requests
    /// that belong together are sent together, in this order.
    pub(crate) async fn ask<T>(
        &self,
        limit: Duration,
        request: impl AsyncFnOnce(&Client) -> Answer<T>,
    ) -> Answer<T> {
        let client = self.client()?;
        timeout(limit, request(&client))
            .await
            .unwrap_or(Err(zookeeper_client::Error::Timeout))
    }

    /// Whether the folder was there lately. It is only a guess: the servers sweep empty ones.
    pub(crate) fn knows_folder(&self, path: &str) -> bool {
        self.folders().contains(path)
    }

    /// Remembers whether the folder is there.
    pub(crate) fn note_folder(&self, path: &str, there: bool) {
        const REMEMBERED: usize = 10_000;
        let mut folders = self.folders();
        if !there {
            folders.remove(path);
        } else if !folders.contains(path) {
            if folders.len() == REMEMBERED {
                folders.clear();
            }
            folders.insert(path.to_owned());
        }
    }

    fn folders(&self) -> MutexGuard<'_, HashSet<String>> {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the folder `path` and those above it where they are missing.
    pub(crate) async fn make_folder(&self, path: &str, limit: Duration) -> Answer<()> {
        let options = self.options.folder();
        self.ask(limit, async |client| client.mkdir(path, &options).await)
            .await
    }

    /// Ends it: all its nodes go as soon as the servers hear of it.
    pub(crate) fn end(&self) {
        self.validity.end();
        let client = self.slot().take();
        drop(client);
        for own in self.nodes().values() {
            own.told.notify_one();
        }
    }

    /// Ends it and waits until the servers have answered, or until `limit` is over.
    pub(crate) async fn close(&self, limit: Duration) {
        let state = self.client().map(|client| client.state_watcher());
        self.end();
        let Ok(mut state) = state else { return };
        let closed = async { while !state.changed().await.is_terminated() {} };
        // If they do not answer they end it by themselves.
        drop(timeout(limit, closed).await);
    }

    fn name(&self) -> String {
        format!("{:#x}", self.id)
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<Client>>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The nodes of its locks.
impl Session {
    /// A node was created. Its validity ends with the session, or when the node is found deleted.
    pub(crate) fn add(&self, path: &str, validity: &Validity, told: &Arc<Notify>) {
        let own = Own {
            validity: validity.clone(),
            told: told.clone(),
            created: Moment::now(),
            watched: false,
        };
        self.nodes().insert(path.to_owned(), own);
        if self.is_over() {
            told.notify_one();
        }
    }

    /// We are about to delete it ourselves: from here on nobody is told.
    pub(crate) fn remove(&self, path: &str) {
        self.nodes().remove(path);
    }

    /// Somebody else deleted it. Says whether it was one of ours.
    pub(crate) fn taken(&self, path: &str) -> bool {
        let own = self.nodes().remove(path);
        if let Some(own) = &own {
            own.validity.end();
            own.told.notify_one();
        }
        own.is_some()
    }

    /// Watches one of our nodes from now on.
    pub(crate) fn watch(self: &Arc<Self>, path: &str) {
        match self.nodes().get_mut(path) {
            Some(own) if !own.watched => own.watched = true,
            _ => return,
        }
        let watching = Watching {
            session: Arc::downgrade(self),
            path: path.to_owned(),
        };
        drop(self.runtime.spawn(watching.run()));
    }

    fn watch_older(self: &Arc<Self>) {
        let due: Vec<String> = self
            .nodes()
            .iter()
            .filter(|(_, own)| !own.watched && own.created.elapsed() >= Self::UNWATCHED)
            .map(|(path, _)| path.clone())
            .collect();
        for path in due {
            self.watch(&path);
        }
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<String, Own>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the end of one of our nodes. When we delete it ourselves the event comes too, and ends
/// this: no watch is left behind.
struct Watching {
    session: Weak<Session>,
    path: String,
}

impl Watching {
    async fn run(self) {
        loop {
            let watcher = {
                let Some(client) = self.session.upgrade().and_then(|s| s.client().ok()) else {
                    return;
                };
                let answer = client.get_and_watch_data(&self.path).await;
                answer.map(|(_, _, watcher)| watcher)
            };
            match watcher {
                Ok(watcher) => match watcher.changed().await.event_type {
                    EventType::NodeDeleted => return self.taken(),
                    // Somebody wrote to it.
                    EventType::NodeDataChanged => {}
                    // The session's own end is told by its validity.
                    _ => return,
                },
                Err(zookeeper_client::Error::NoNode) => return self.taken(),
                // The session looks again.
                Err(_) => return self.unwatched(),
            }
        }
    }

    fn taken(&self) {
        if self
            .session
            .upgrade()
            .is_some_and(|session| session.taken(&self.path))
        {
            warn!(target: "leasehold", node = %self.path, "somebody deleted the node of a lock");
        }
    }

    fn unwatched(&self) {
        if let Some(session) = self.session.upgrade()
            && let Some(own) = session.nodes().get_mut(&self.path)
        {
            own.watched = false;
        }
    }
}

/// The sign of life.
impl Session {
    /// Sends a write that needs the quorum. The client has it when this returns.
    fn beat(&self) -> Beat {
        let sent = Moment::now();
        let answer: Pin<Box<dyn Future<Output = Answer<()>> + Send>> = match self.client() {
            Ok(client) => {
                let written = client.set_data(&own_node(&client, &self.options), b"", None);
                Box::pin(async { written.await.map(drop) })
            }
            Err(error) => Box::pin(std::future::ready(Err(error))),
        };
        Beat { sent, answer }
    }

    /// Writes the same, and says when that was by the leader's clock.
    pub(crate) async fn write_sign_of_life(&self, limit: Duration) -> Answer<SystemTime> {
        let stat = self
            .ask(limit, async |client| {
                let node = own_node(client, &self.options);
                client.set_data(&node, b"", None).await
            })
            .await?;
        let since = Duration::from_millis(stat.mtime.unsigned_abs());
        Ok(SystemTime::UNIX_EPOCH + since)
    }
}

/// Creates the session's own node.
async fn show_life(client: &Client, options: &ZooKeeperOptions) -> Answer<()> {
    let node = own_node(client, options);
    loop {
        let created = client.create(&node, b"", &options.sign_of_life());
        match created.await {
            Ok(_) | Err(zookeeper_client::Error::NodeExists) => return Ok(()),
            Err(zookeeper_client::Error::NoNode) => {
                client.mkdir(&options.sessions(), &options.folder()).await?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// The session's own node.
pub(crate) fn own_node(client: &Client, options: &ZooKeeperOptions) -> String {
    format!("{}/{}", options.sessions(), client.session_id())
}

struct Beat {
    sent: Moment,
    answer: Pin<Box<dyn Future<Output = Answer<()>> + Send>>,
}

/// The task that keeps a session alive. It ends with the session, and the session with it.
struct Alive(Weak<Session>);

impl Alive {
    async fn keep(self, mut pulse: Pulse, mut state: StateWatcher) {
        let interval = pulse.beat();
        // Often: what a new connection proves counts from the last look at the former one.
        let look = (interval / 4).min(Session::UNWATCHED);
        let mut under_way: Option<Beat> = None;
        let mut last_beat: Option<Moment> = None;
        // When the connection last was seen to stand, and whether it has been lost since.
        let (mut stood, mut lost) = (Moment::now(), false);
        let mut idle = (Moment::now(), 0);
        loop {
            let Some(session) = self.0.upgrade() else {
                return;
            };
            if session.is_over() {
                debug!(target: "leasehold", id = %session.name(), "session over");
                return;
            }
            if session.is_idle(&mut idle) {
                debug!(target: "leasehold", id = %session.name(), "idle session closed");
                return;
            }
            let now = Moment::now();
            let mut reopened = false;
            match state.state() {
                SessionState::SyncConnected => {
                    reopened = std::mem::replace(&mut lost, false);
                    if reopened {
                        pulse.reopened(stood);
                    }
                    stood = now;
                }
                state if state.is_terminated() => return report_end(&session, state),
                _ => lost = true,
            }
            session.watch_older();
            let due = last_beat.is_none_or(|last| last.elapsed() >= interval);
            // After a reopening, one that is sent now proves more than one that waited for it.
            if reopened || due && under_way.is_none() {
                last_beat = Some(now);
                under_way = Some(session.beat());
            }
            let validity = session.validity.clone();
            drop(session);

            tokio::select! {
                biased;
                state = state.changed() => {
                    let Some(session) = self.0.upgrade() else { return };
                    if state.is_terminated() {
                        return report_end(&session, state);
                    }
                    // If it stands again by now, it was lost in between.
                    lost = true;
                    debug!(target: "leasehold", id = %session.name(), %state, "connection");
                    if state == SessionState::SyncConnected {
                        lost = false;
                        pulse.reopened(stood);
                        last_beat = Some(Moment::now());
                        under_way = Some(session.beat());
                    }
                }
                (sent, answer) = answered(&mut under_way) => {
                    let Some(session) = self.0.upgrade() else { return };
                    match answer {
                        Ok(()) => {
                            let (from, length) = pulse.answered(sent);
                            validity.extend(from, length);
                        }
                        Err(zookeeper_client::Error::NoNode) => {
                            warn!(target: "leasehold", id = %session.name(), "the node of a session is gone: it is made again");
                            let shown = session.ask(interval, async |client| show_life(client, &session.options).await);
                            if let Err(error) = shown.await {
                                warn!(target: "leasehold", id = %session.name(), %error, "no sign of life");
                            }
                        }
                        Err(error) => {
                            warn!(target: "leasehold", id = %session.name(), %error, left = ?validity.remaining(), "no sign of life");
                        }
                    }
                }
                () = validity.ended() => {}
                () = sleep(look) => {}
            }
        }
    }
}

fn report_end(session: &Session, state: SessionState) {
    warn!(target: "leasehold", id = %session.name(), %state, "the servers ended a session");
}

impl Drop for Alive {
    fn drop(&mut self) {
        if let Some(session) = self.0.upgrade() {
            session.end();
        }
    }
}

impl Session {
    /// Whether nobody has used it for long, and nobody can just now be given it: then the pool has
    /// the only other reference.
    fn is_idle(self: &Arc<Self>, idle: &mut (Moment, u64)) -> bool {
        let uses = self.uses.load(Ordering::Relaxed);
        if Arc::strong_count(self) > 2 || idle.1 != uses {
            *idle = (Moment::now(), uses);
        }
        idle.0.elapsed() > Self::IDLE
    }
}

/// The answer to the beat under way; never, while there is none.
async fn answered(under_way: &mut Option<Beat>) -> (Moment, Answer<()>) {
    let answer = poll_fn(|cx| match under_way {
        Some(beat) => beat.answer.as_mut().poll(cx),
        None => Poll::Pending,
    })
    .await;
    let sent = under_way.take().map_or_else(Moment::now, |beat| beat.sent);
    (sent, answer)
}
