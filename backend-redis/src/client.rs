use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use leasehold_core::{Error, Moment, Result};
use redis::{RedisError, Script, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::RedisOptions;
use crate::cluster::Cluster;
use crate::connection::{Connection, no_runtime};
use crate::error;
use crate::inbox::{Inbox, Orphan};
use crate::names::{LockKeys, Names};
use crate::redlock;
use crate::replicas::Replicas;
use crate::request::{Place, Sender};
use crate::script::{self, IN_A_CLUSTER, Minting, ON_A_SERVER, PROBE};
use crate::servers::{Line, Servers};
use crate::target::Target;
use crate::value;

/// One client of one server, which may be a node of a cluster: the connection that is up.
///
/// 1. *Up.* Requests and messages share one connection.
/// 2. *Lost.* The connection ended, or its runtime did ([`lost`](Self::lost)). Everybody who waits is
///    woken, and whoever has something to send opens the next one, in its own runtime, all of them
///    together one: first the inbox, then it is up, then everybody who waits asks again from its
///    place. Between attempts that fail the pause grows to a second.
///    What is held is then looked for on the new connection.
/// 3. *Suspect.* A request got no answer in time ([`suspect`](Self::suspect)): the server may be slow,
///    or the other end is gone without a word. The connection is asked once more and another one is
///    opened; whichever answers first stays.
///
/// No request is repeated here: what an unanswered one did is for those to judge who sent it.
pub(crate) struct Client {
    pub(crate) id: Uuid,
    pub(crate) address: String,
    pub(crate) names: Names,
    pub(crate) shared: Arc<Shared>,
    pub(crate) minting: &'static Minting,
    pub(crate) target: Target,
    pub(crate) connect_timeout: Duration,
    /// Who must confirm grants.
    pub(crate) replicas: Replicas,
    state: watch::Sender<State>,
    failures: AtomicU32,
    /// The cluster that its server is a node of.
    cluster: Weak<Cluster>,
    /// Hears all messages in place of the inbox: that of a node of a Redlock.
    listener: Option<Listener>,
}

/// What the clients of all nodes of a cluster have in common; the client of a single server has one for
/// itself.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) inbox: Inbox,
    /// Counts connections: a number is never used twice.
    connections: AtomicU64,
    highest_token: AtomicU64,
    /// Cancels that are not through yet.
    cancels: watch::Sender<usize>,
}

/// Takes in the text of a message.
pub(crate) type Listener = Box<dyn Fn(&str) + Send + Sync>;

enum State {
    Up(Arc<Connection>),
    /// The connection of this number, and why the attempt before it failed.
    Opening(u64, Option<Error>),
    /// `Some`: why the last attempt failed.
    Down(Option<Error>),
    Closed,
}

/// How long a suspected connection is given before another is opened.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long closing waits for cancels.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);

impl Client {
    /// Connects for the first time, which fails at once if it fails.
    pub(crate) async fn connect(options: &RedisOptions) -> Result<Arc<Self>> {
        let client = Self::new(options, None)?;
        let probe = client.names.probe(client.id);
        client.probe(&probe).await?;
        Ok(client)
    }

    /// Nothing is sent yet. `listener` hears all messages in place of the inbox.
    pub(crate) fn new(options: &RedisOptions, listener: Option<Listener>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            listener,
            ..Self::down(options, Names::new(&options.prefix), &ON_A_SERVER)?
        }))
    }

    /// The client of a node of a cluster. Nothing is sent yet.
    pub(crate) fn of_node(
        options: &RedisOptions,
        names: Names,
        shared: Arc<Shared>,
        cluster: Weak<Cluster>,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            shared,
            cluster,
            ..Self::down(options, names, &IN_A_CLUSTER)?
        }))
    }

    fn down(options: &RedisOptions, names: Names, minting: &'static Minting) -> Result<Self> {
        Ok(Self {
            id: Uuid::new_v4(),
            address: options.address(),
            names,
            shared: Arc::default(),
            minting,
            target: options.target()?,
            replicas: Replicas::new(options.replicas),
            connect_timeout: options.connect_timeout,
            state: watch::Sender::new(State::Down(None)),
            failures: AtomicU32::new(0),
            cluster: Weak::new(),
            listener: None,
        })
    }

    /// Connects and tries on these keys, which must be this server's and nobody else's, all that will be
    /// used.
    pub(crate) async fn probe(self: &Arc<Self>, keys: &LockKeys) -> Result<()> {
        let connection = self.connection().await?;
        let mut call = script::call(&PROBE, &[&keys.lock, &keys.queue, &keys.token]);
        call.arg(0).arg(self.id.to_string());
        let probe = connection.probe(self, &PROBE, &call);
        match timeout(self.connect_timeout, probe).await {
            Ok(probed) => probed?,
            Err(_elapsed) => return Err(error::silent(&self.address, self.connect_timeout)),
        }
        if self.replicas.are_asked() {
            let wait = redis::cmd("WAIT").arg(0).arg(0).clone();
            let answer = connection.ask::<usize>(&wait).await;
            answer.map_err(|e| self.refused(&e, "+wait"))?;
        }
        Ok(())
    }

    /// The connection; opens one if there is none.
    ///
    /// # Errors
    /// What kept it from being opened, or [`ErrorKind::Closed`].
    ///
    /// # Cancel safety
    /// What was begun goes on.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<Arc<Connection>> {
        if let State::Up(connection) = &*self.state.borrow() {
            return Ok(connection.clone());
        }
        let mut state = self.state.subscribe();
        self.open_if_down()?;
        let mut again = true;
        let mut attempt = None;
        loop {
            let orphaned = match &*state.borrow_and_update() {
                State::Up(connection) => return Ok(connection.clone()),
                State::Closed => return Err(error::closed()),
                State::Down(Some(e)) => return Err(e.clone()),
                // The runtime that was to open it has ended.
                State::Down(None) => true,
                // Somebody else began the next one before this was polled.
                State::Opening(number, Some(e)) if attempt.is_some_and(|it| it != *number) => {
                    return Err(e.clone());
                }
                State::Opening(number, _) => {
                    attempt = Some(*number);
                    false
                }
            };
            if orphaned && again {
                again = false;
                self.open_if_down()?;
            } else if orphaned {
                // It was ours, and it is ending.
                return Err(no_runtime());
            } else if state.changed().await.is_err() {
                return Err(error::closed());
            }
        }
    }

    /// The number of the connection that is up, if one is.
    pub(crate) fn up(&self) -> Option<u64> {
        match &*self.state.borrow() {
            State::Up(connection) => Some(connection.number),
            _ => None,
        }
    }

    /// The connection that is up, if one is.
    pub(crate) fn current(&self) -> Option<Arc<Connection>> {
        match &*self.state.borrow() {
            State::Up(connection) => Some(connection.clone()),
            _ => None,
        }
    }

    /// What a request that is about to leave on `connection` tells about this client.
    pub(crate) fn sender(&self, connection: &Connection, now: Moment) -> Sender {
        Sender {
            minting: self.minting,
            inbox: self.id,
            floor: self.floor(connection),
            server_now: connection.server_at(now),
        }
    }

    /// What is loaded as soon as a connection stands.
    pub(crate) fn scripts(&self) -> Vec<&'static Script> {
        match &self.listener {
            Some(_) => redlock::script::all().into(),
            None => self.minting.and_others().collect(),
        }
    }

    /// A message came on connection `number`.
    pub(crate) fn message(self: &Arc<Self>, number: u64, text: &str) {
        if let Some(listener) = &self.listener {
            listener(text);
            return;
        }
        let Some(Orphan { claim, lock }) = self.shared.inbox.message(number, text) else {
            return;
        };
        let Some(keys) = self.names.of_lock(lock) else {
            return;
        };
        debug!(target: "leasehold", lock, %claim, "a grant that nobody waits for: given back");
        if let Some(connection) = self.current() {
            // Nobody knows its ttl any more; a minute is enough to reach the server or to give up.
            let ttl = Duration::from_secs(60);
            let line = Line::new(self.clone(), connection);
            self.servers().cancel(&line, keys, claim, Place::None, ttl);
        }
    }

    /// What this client is a part of.
    fn servers(self: &Arc<Self>) -> Servers {
        match self.cluster.upgrade() {
            Some(cluster) => Servers::Cluster(cluster),
            None => Servers::One(self.clone()),
        }
    }

    /// Something is wrong with its server: if that is a node of a cluster, another may have its place.
    fn ails(&self) {
        if let Some(cluster) = self.cluster.upgrade() {
            cluster.look_again();
        }
    }

    /// Connection `number` has ended.
    pub(crate) fn lost(self: &Arc<Self>, number: u64) {
        let mut runtime = None;
        let is_up = |state: &State| match state {
            State::Up(connection) if connection.number == number => {
                connection.set_over();
                runtime = Some(connection.runtime.clone());
                true
            }
            _ => false,
        };
        let ended = self.replace_if(is_up, || State::Down(None));
        if ended {
            info!(target: "leasehold", server = %self.address, "connection lost");
            self.shared.inbox.wake_all();
            self.ails();
            if let Some(runtime) = runtime {
                self.reconnect_for_holds(&runtime);
            }
        }
    }

    /// What is held is proven on the next connection, and hears of evictions there: so there is to be
    /// one though nobody asks for anything.
    fn reconnect_for_holds(self: &Arc<Self>, runtime: &Handle) {
        let client = Arc::downgrade(self);
        let task = async move {
            // Opening pauses by itself.
            while let Some(client) = client.upgrade()
                && client.shared.inbox.is_holding()
                && let Err(e) = client.connection().await
                && e.is_transient()
            {}
        };
        drop(runtime.spawn(task));
    }

    /// A request beside the connection that is up was not answered in time, by the same server.
    pub(crate) fn suspect_up(self: &Arc<Self>) {
        if let Some(connection) = self.current() {
            self.suspect(&connection);
        }
    }

    /// A request on `connection` was not answered in time, or nobody waited for the answer.
    pub(crate) fn suspect(self: &Arc<Self>, connection: &Arc<Connection>) {
        if connection.suspected.swap(true, Ordering::AcqRel) {
            return;
        }
        let suspicion = Suspicion(connection.clone());
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        self.ails();
        let client = self.clone();
        let task = async move {
            let suspected = &suspicion.0;
            let other = async {
                sleep(PATIENCE).await;
                Connection::open(&client, client.next_number()).await
            };
            let opened = tokio::select! {
                biased;
                answers = suspected.answers() => if answers {
                    return;
                } else {
                    None
                },
                opened = other => opened.ok(),
            };
            match opened {
                Some(opened) => {
                    let replaced = client.replace_if(
                        |state| matches!(state, State::Up(up) if up.number == suspected.number),
                        || State::Up(opened.clone()),
                    );
                    if replaced {
                        warn!(target: "leasehold", server = %client.address, "connection was silent, opened another");
                        client.is_up(&opened).await;
                    }
                }
                None => client.lost(suspected.number),
            }
        };
        drop(runtime.spawn(task));
    }

    /// A new connection is the one that is up.
    async fn is_up(self: &Arc<Self>, connection: &Connection) {
        self.shared.inbox.wake_all();
        if connection.is_over() {
            // Another server became the master while it was opened.
            self.lost(connection.number);
        }
        // Not for ever: this task keeps the client alive.
        drop(timeout(self.connect_timeout, self.prove_holds(connection)).await);
    }

    /// Ends what is held here and the server at the other end of a new connection does not have: it may
    /// be another server, or have lost its data. The next renewal would say so too, but later.
    async fn prove_holds(&self, connection: &Connection) {
        for holds in self.shared.inbox.held().chunks(128) {
            let mut gets = redis::pipe();
            for hold in holds {
                gets.cmd("GET").arg(&*hold.lock);
            }
            let Ok(values) = connection.ask_all(&gets, holds.len()).await else {
                return;
            };
            for (hold, value) in holds.iter().zip(values) {
                let grant = value::grant(hold.claim, hold.token);
                let proven = match &value {
                    Value::BulkString(value) => value.starts_with(grant.as_bytes()),
                    // Other data in its place.
                    Value::ServerError(e) => e.code() != "WRONGTYPE",
                    _ => false,
                };
                if !proven {
                    info!(target: "leasehold", lock = %hold.lock, "lost: the server does not have it");
                    self.shared.inbox.end(hold);
                }
            }
        }
    }

    /// No token at or below it may be granted any more: the highest that this client knows of, and the
    /// server's clock when the connection was made, in µs.
    pub(crate) fn floor(&self, connection: &Connection) -> u64 {
        let highest = self.shared.highest_token.load(Ordering::Relaxed);
        highest.max(connection.server_clock)
    }

    /// Ends the connection once all cancels are through, or a while has passed.
    pub(crate) async fn close(&self) {
        self.shared.cancelled().await;
        self.end();
    }

    /// Ends the connection for good.
    pub(crate) fn end(&self) {
        self.replace_if(|_| true, || State::Closed);
        self.shared.inbox.wake_all();
    }

    fn next_number(&self) -> u64 {
        self.shared.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Begins to open a connection, in the caller's runtime, unless there is one or one is on the way.
    fn open_if_down(self: &Arc<Self>) -> Result<()> {
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let number = self.next_number();
        let failed = RefCell::new(None);
        let down = |state: &State| match state {
            State::Down(e) => {
                failed.replace(e.clone());
                true
            }
            _ => false,
        };
        if self.replace_if(down, || State::Opening(number, failed.take())) {
            let attempt = Attempt(self.clone(), number);
            let task = async move {
                let client = &attempt.0;
                sleep(pause(client.failures.load(Ordering::Relaxed))).await;
                let opened = Connection::open(client, number).await;
                let connection = opened.as_ref().ok().cloned();
                client.replace_if(
                    |state| attempt.is_on(state),
                    || match opened {
                        Ok(connection) => State::Up(connection),
                        Err(e) => State::Down(Some(e)),
                    },
                );
                if let Some(connection) = connection {
                    client.failures.store(0, Ordering::Relaxed);
                    client.is_up(&connection).await;
                } else {
                    client.failures.fetch_add(1, Ordering::Relaxed);
                    client.shared.inbox.wake_all();
                    client.ails();
                }
            };
            drop(runtime.spawn(task));
        }
        Ok(())
    }

    /// The one place where the state changes. What is replaced is dropped outside of the lock.
    fn replace_if(&self, when: impl FnOnce(&State) -> bool, new: impl FnOnce() -> State) -> bool {
        let mut old = None;
        self.state.send_if_modified(|state| {
            // Closed is final.
            if matches!(state, State::Closed) || !when(state) {
                return false;
            }
            old = Some(std::mem::replace(state, new()));
            true
        });
        old.is_some()
    }
}

/// Rights.
impl Client {
    /// What an error while connecting means: if it is a missing right, which `rule` to add.
    pub(crate) fn refused(&self, e: &RedisError, rule: &str) -> Error {
        self.refused_at(&self.address, e, rule)
    }

    /// The same by the server called `server`.
    pub(crate) fn refused_at(&self, server: &str, e: &RedisError, rule: &str) -> Error {
        let said = error::describe(e);
        if error::is_right_missing(&said) {
            self.rights_missing(&self.rule(&said, rule))
        } else {
            error::map(server, e)
        }
    }

    /// The ACL rule that gives the right whose lack `said` complains of: the command that it names, or
    /// keys, or channels, or `command`.
    pub(crate) fn rule(&self, said: &str, command: &str) -> String {
        let prefix = self.names.prefix();
        let named = said
            .split_once("run the '")
            .and_then(|(_, rest)| rest.split_once('\''));
        if let Some((named, _)) = named {
            format!("+{named}")
        } else if said.contains("channel") {
            format!("&{prefix}*")
        } else if said.contains(" key") {
            format!("~{prefix}*")
        } else {
            command.to_owned()
        }
    }

    /// Says which rights are missing, by what a probe answered: commands that failed, each followed by
    /// what the server said.
    pub(crate) fn check_rights(&self, failed: &[String]) -> Result<()> {
        let mut rules: Vec<String> = Vec::new();
        for failure in failed.chunks_exact(2) {
            let (command, said) = (&failure[0], &failure[1]);
            if !error::is_right_missing(said) {
                let e = redis::make_extension_error(said.clone(), None);
                return Err(error::map(&self.address, &e));
            }
            let rule = self.rule(said, &command_rule(command));
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
        if rules.is_empty() {
            Ok(())
        } else {
            Err(self.rights_missing(&rules.join(" ")))
        }
    }

    pub(crate) fn rights_missing(&self, rules: &str) -> Error {
        error::rights_missing(&self.address, rules)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.address)
            .field("prefix", &self.names.prefix())
            .field("connection", &self.up())
            .finish_non_exhaustive()
    }
}

/// An attempt to connect; if it is dropped half-way, the next one may begin.
struct Attempt(Arc<Client>, u64);

impl Attempt {
    fn is_on(&self, state: &State) -> bool {
        matches!(state, State::Opening(number, _) if *number == self.1)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self
            .0
            .replace_if(|state| self.is_on(state), || State::Down(None))
        {
            self.0.shared.inbox.wake_all();
        }
    }
}

struct Suspicion(Arc<Connection>);

impl Drop for Suspicion {
    fn drop(&mut self) {
        self.0.suspected.store(false, Ordering::Release);
    }
}

/// A cancel that `close` waits for.
pub(crate) struct Pending(Arc<Shared>);

impl Shared {
    /// A token was granted: later ones must be higher.
    pub(crate) fn saw(&self, token: u64) {
        self.highest_token.fetch_max(token, Ordering::Relaxed);
    }

    /// Until it is dropped, a cancel is not through.
    pub(crate) fn pending(self: &Arc<Self>) -> Pending {
        self.cancels.send_modify(|pending| *pending += 1);
        Pending(self.clone())
    }

    /// Resolves when all cancels are through, or a while has passed.
    pub(crate) async fn cancelled(&self) {
        let mut cancels = self.cancels.subscribe();
        let through = cancels.wait_for(|pending| *pending == 0);
        drop(timeout(CANCEL_LIMIT, through).await);
    }
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            inbox: Inbox::default(),
            connections: AtomicU64::new(0),
            highest_token: AtomicU64::new(0),
            cancels: watch::Sender::new(0),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.cancels.send_modify(|pending| *pending -= 1);
    }
}

/// What an ACL rule calls a command of the probe.
fn command_rule(command: &str) -> String {
    match command {
        "PUBSUB" => "+pubsub|numsub".into(),
        other => format!("+{}", other.to_lowercase()),
    }
}

/// How long to wait before the next attempt after so many that failed: 0, 20, 40 … 1,000 ms.
fn pause(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        failures => Duration::from_millis(20 << (failures - 1).min(6)).min(Duration::from_secs(1)),
    }
}
