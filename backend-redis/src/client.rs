use std::fmt;
use std::pin::pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Moment, Result};
use redis::RedisError;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::RedisOptions;
use crate::connection::{Connection, no_runtime};
use crate::error;
use crate::inbox::{Inbox, Orphan};
use crate::names::{LockKeys, Names};
use crate::request::{Answer, Place, Request, Sender};
use crate::script::{self, PROBE};

/// One client of one server: its inbox, and the connection that is up.
///
/// 1. *Up.* Requests and messages share one connection.
/// 2. *Lost.* The connection ended, or its runtime did ([`lost`](Self::lost)). Everybody who waits is
///    woken, and whoever has something to send opens the next one, in its own runtime, all of them
///    together one: first the inbox, then it is up, then everybody who waits asks again from its
///    place. Between attempts that fail the pause grows to a second.
/// 3. *Suspect.* A request got no answer in time ([`suspect`](Self::suspect)): the server may be slow,
///    or the other end is gone without a word. The connection is asked once more and another one is
///    opened; whichever answers first stays.
///
/// No request is repeated here: what an unanswered one did is for those to judge who sent it.
pub(crate) struct Client {
    pub(crate) id: Uuid,
    pub(crate) address: String,
    pub(crate) names: Names,
    pub(crate) inbox: Inbox,
    pub(crate) opener: redis::Client,
    pub(crate) connect_timeout: Duration,
    state: watch::Sender<State>,
    connections: AtomicU64,
    failures: AtomicU32,
    highest_token: AtomicU64,
    /// Cancels that are not through yet.
    cancels: watch::Sender<usize>,
    /// Hears all messages in place of the inbox.
    listener: Option<Listener>,
}

/// Takes in the text of a message.
pub(crate) type Listener = Box<dyn Fn(&str) + Send + Sync>;

enum State {
    Up(Arc<Connection>),
    /// The connection of this number.
    Opening(u64),
    /// `Some`: why the last attempt failed.
    Down(Option<Error>),
    Closed,
}

/// How long a suspected connection is given before another is opened.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long a cancel waits for an answer, and for a connection, before it looks again.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);

impl Client {
    /// Connects for the first time, which fails at once if it fails.
    pub(crate) async fn connect(options: &RedisOptions) -> Result<Arc<Self>> {
        let client = Self::new(options, None)?;
        let connection = client.connection().await?;
        let keys = client.names.probe(client.id);
        let mut call = script::call(&PROBE, &[&keys.lock, &keys.queue, &keys.token]);
        call.arg(0).arg(client.id.to_string());
        let probe = connection.probe(&client, &PROBE, &call);
        match timeout(client.connect_timeout, probe).await {
            Ok(probed) => probed?,
            Err(_elapsed) => return Err(error::silent(&client.address, client.connect_timeout)),
        }
        Ok(client)
    }

    /// Nothing is sent yet. `listener` hears all messages in place of the inbox.
    pub(crate) fn new(options: &RedisOptions, listener: Option<Listener>) -> Result<Arc<Self>> {
        let opener = options.client()?;
        Ok(Arc::new(Self {
            id: Uuid::new_v4(),
            address: options.address(),
            names: Names::new(&options.prefix),
            inbox: Inbox::default(),
            opener,
            connect_timeout: options.connect_timeout,
            state: watch::Sender::new(State::Down(None)),
            connections: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            highest_token: AtomicU64::new(0),
            cancels: watch::Sender::new(0),
            listener,
        }))
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
        loop {
            let orphaned = match &*state.borrow_and_update() {
                State::Up(connection) => return Ok(connection.clone()),
                State::Closed => return Err(error::closed()),
                State::Down(Some(e)) => return Err(e.clone()),
                // The runtime that was to open it has ended.
                State::Down(None) => true,
                State::Opening(_) => false,
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

    /// Sends one request. All acquires, renewals and releases go through here; those that meet travel
    /// together.
    ///
    /// It is on its way after the first poll, in order with all others on this connection.
    ///
    /// # Errors
    /// As [`error::map`] has it.
    pub(crate) async fn request(
        &self,
        connection: &Arc<Connection>,
        request: Request<'_>,
    ) -> Result<Answer> {
        let sender = Sender {
            inbox: self.id,
            floor: self.floor(connection),
            server_now: connection.server_now(),
        };
        let value = match connection.request(&request, sender).await {
            Ok(value) => value,
            // Somebody has put other data in the place of our lock.
            Err(e) if error::is_wrong_type(&e) && !matches!(request, Request::Acquire { .. }) => {
                return Ok(Answer::NotHeld);
            }
            Err(e) => return Err(error::map(&self.address, &e)),
        };
        let answer = Answer::read(&value).ok_or_else(|| error::unexpected(&self.address))?;
        if let Answer::Granted(token) = answer {
            self.saw(token.get());
        }
        Ok(answer)
    }

    /// Makes sure that `claim` neither holds the lock nor waits for it, in the background: the request
    /// leaves before this returns, down the connection that the claim asked on, and again after a
    /// reconnect, until it is answered. What is then left ends within the claim's ttl.
    pub(crate) fn cancel(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        keys: LockKeys,
        claim: Uuid,
        place: Place,
        ttl: Duration,
    ) {
        let pending = Pending::new(self);
        let mut first = {
            let (client, connection, keys) = (self.clone(), connection.clone(), keys.clone());
            Box::pin(async move {
                let request = Request::Release {
                    claim,
                    place,
                    keys: &keys,
                };
                client.request(&connection, request).await
            })
        };
        let mut begun = Poll::Pending;
        if !std::thread::panicking() {
            // Unconstrained: a task that has used up its budget would see it pending unsent.
            let mut once = pin!(tokio::task::unconstrained(first.as_mut()));
            begun = once.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            if let Poll::Ready(Ok(_)) = begun {
                return;
            }
        }
        let client = Arc::downgrade(self);
        let task = async move {
            let _pending = pending;
            let since = Moment::now();
            // One that failed at once is not polled again: it goes out anew below.
            let mut answer = match begun {
                Poll::Ready(answer) => Ok(answer),
                Poll::Pending => timeout(CANCEL_LIMIT, first).await,
            };
            while !matches!(answer, Ok(Ok(_))) && since.elapsed() < ttl {
                let Some(client) = client.upgrade() else {
                    return;
                };
                match timeout(CANCEL_LIMIT, client.connection()).await {
                    Ok(Ok(connection)) => {
                        if matches!(answer, Ok(Err(_))) {
                            sleep(PATIENCE).await;
                        }
                        let request = Request::Release {
                            claim,
                            place,
                            keys: &keys,
                        };
                        answer = timeout(CANCEL_LIMIT, client.request(&connection, request)).await;
                    }
                    Ok(Err(e)) if !e.is_transient() => return,
                    _ => {}
                }
                if let Ok(Err(e)) = &answer
                    && !e.is_transient()
                {
                    debug!(target: "leasehold", lock = %keys.lock, error = %e, "cancel failed");
                    return;
                }
            }
        };
        drop(connection.runtime.spawn(task));
    }

    /// A message came on connection `number`.
    pub(crate) fn message(self: &Arc<Self>, number: u64, text: &str) {
        if let Some(listener) = &self.listener {
            listener(text);
            return;
        }
        let Some(Orphan { claim, lock }) = self.inbox.message(number, text) else {
            return;
        };
        let Some(keys) = self.names.of_lock(lock) else {
            return;
        };
        debug!(target: "leasehold", lock, %claim, "a grant that nobody waits for: given back");
        let up = match &*self.state.borrow() {
            State::Up(connection) => Some(connection.clone()),
            _ => None,
        };
        if let Some(connection) = up {
            // Nobody knows its ttl any more; a minute is enough to reach the server or to give up.
            let ttl = Duration::from_secs(60);
            self.cancel(&connection, keys, claim, Place::None, ttl);
        }
    }

    /// Connection `number` has ended.
    pub(crate) fn lost(&self, number: u64) {
        let ended = self.replace_if(
            |state| matches!(state, State::Up(connection) if connection.number == number),
            || State::Down(None),
        );
        if ended {
            info!(target: "leasehold", server = %self.address, "connection lost");
            self.inbox.wake_all();
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
                        || State::Up(opened),
                    );
                    if replaced {
                        warn!(target: "leasehold", server = %client.address, "connection was silent, opened another");
                        client.inbox.wake_all();
                    }
                }
                None => client.lost(suspected.number),
            }
        };
        drop(runtime.spawn(task));
    }

    /// No token at or below it may be granted any more: the highest that this client knows of, and the
    /// server's clock when the connection was made, in µs.
    pub(crate) fn floor(&self, connection: &Connection) -> u64 {
        let highest = self.highest_token.load(Ordering::Relaxed);
        highest.max(connection.server_clock)
    }

    /// A token was granted: later ones must be higher.
    pub(crate) fn saw(&self, token: u64) {
        self.highest_token.fetch_max(token, Ordering::Relaxed);
    }

    /// Ends the connection once all cancels are through, or a while has passed.
    pub(crate) async fn close(&self) {
        let mut cancels = self.cancels.subscribe();
        let through = cancels.wait_for(|pending| *pending == 0);
        drop(timeout(CANCEL_LIMIT, through).await);
        self.replace_if(|_| true, || State::Closed);
        self.inbox.wake_all();
    }

    fn next_number(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Begins to open a connection, in the caller's runtime, unless there is one or one is on the way.
    fn open_if_down(self: &Arc<Self>) -> Result<()> {
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let number = self.next_number();
        let down = |state: &State| matches!(state, State::Down(_));
        if self.replace_if(down, || State::Opening(number)) {
            let attempt = Attempt(self.clone(), number);
            let task = async move {
                let client = &attempt.0;
                sleep(pause(client.failures.load(Ordering::Relaxed))).await;
                let opened = Connection::open(client, number).await;
                let failed = opened.is_err();
                client.replace_if(
                    |state| attempt.is_on(state),
                    || match opened {
                        Ok(connection) => State::Up(connection),
                        Err(e) => State::Down(Some(e)),
                    },
                );
                if failed {
                    client.failures.fetch_add(1, Ordering::Relaxed);
                } else {
                    client.failures.store(0, Ordering::Relaxed);
                }
                client.inbox.wake_all();
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
        let said = error::describe(e);
        if self.is_right_missing(&said) {
            self.rights_missing(&self.rule(&said, rule))
        } else {
            error::map(&self.address, e)
        }
    }

    pub(crate) fn is_right_missing(&self, said: &str) -> bool {
        [
            "NOPERM",
            "no permissions",
            "The user executing the script",
            "ACL failure",
        ]
        .iter()
        .any(|sign| said.contains(sign))
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
            if !self.is_right_missing(said) {
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
        Error::new(
            ErrorKind::Other,
            format!(
                "Redis at {}: rights are missing, add them with ACL SETUSER <user> {rules}",
                self.address
            ),
        )
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
        matches!(state, State::Opening(number) if *number == self.1)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self
            .0
            .replace_if(|state| self.is_on(state), || State::Down(None))
        {
            self.0.inbox.wake_all();
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
struct Pending(Weak<Client>);

impl Pending {
    fn new(client: &Arc<Client>) -> Self {
        client.cancels.send_modify(|pending| *pending += 1);
        Self(Arc::downgrade(client))
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(client) = self.0.upgrade() {
            client.cancels.send_modify(|pending| *pending -= 1);
        }
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
