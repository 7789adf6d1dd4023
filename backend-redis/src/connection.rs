use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use leasehold_core::{Batch, Error, ErrorKind, Gather, Moment, Result, Way, poll_once};
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{
    Cmd, Pipeline, PushInfo, PushKind, RedisError, RedisResult, Script, ServerErrorKind, Value,
};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tracing::{info, warn};

use crate::client::Client;
use crate::error;
use crate::request::{Call, Calls, Request, Sender};
use crate::script::{self, ON_A_SERVER, TOGETHER};
use crate::target::{Watcher, without_limits};

/// One connection to the server: requests go out and are answered in order, messages come in between.
///
/// It lives in the runtime in which it was opened. When it ends, however that happens, its client
/// hears of it.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Counts the connections of a client.
    pub(crate) number: u64,
    pub(crate) runtime: Handle,
    /// Being asked whether it still lives.
    pub(crate) suspected: AtomicBool,
    /// The server's clock at `opened`, in µs since 1970.
    pub(crate) server_clock: u64,
    opened: Moment,
    redis: MultiplexedConnection,
    client: Weak<Client>,
    over: Arc<AtomicBool>,
    _watching: Option<Watching>,
    gather: Gather<Call, RedisResult<Value>>,
}

/// How many requests are under way before calls collect: while the server works on one, others are on
/// their way to it and back. With 256 tasks two left it idle now and then, and more than these made the groups
/// smaller.
const REQUESTS: usize = 4;
/// How many calls travel as one request: the server does nothing else meanwhile.
const TOGETHER_AT_MOST: usize = 128;

impl Connection {
    /// Connects and signs in, loads the scripts and opens the inbox; warns of a server that may throw
    /// locks away.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the server cannot be reached, [`ErrorKind::Unsupported`] if it
    /// is too old or a cluster, [`ErrorKind::Other`] if it refuses us.
    pub(crate) async fn open(client: &Arc<Client>, number: u64) -> Result<Arc<Self>> {
        let opening = Self::opening(client, number);
        match tokio::time::timeout(client.connect_timeout, opening).await {
            Ok(opened) => opened,
            Err(_elapsed) => Err(error::silent(&client.address, client.connect_timeout)),
        }
    }

    /// Sends a request, by itself or with others; `sender` says what it tells about the client.
    ///
    /// It is on its way after the first poll, in order with all others that go through here.
    pub(crate) async fn request(
        self: &Arc<Self>,
        request: &Request<'_>,
        sender: Sender,
    ) -> RedisResult<Value> {
        match self.gather.enter(|| request.call(sender)) {
            Way::Alone(_pass) => {
                let (script, cmd) = request.command(sender);
                self.call(script, &cmd).await
            }
            Way::Together(answer) => {
                let mut unanswered = Unanswered(Some(self));
                let answer = answer.await;
                unanswered.0 = None;
                let answer = answer.unwrap_or_else(|| Err(ended()));
                self.heed(&answer);
                answer
            }
        }
    }

    /// Sends one call of a script. A request that is dropped or fails before it was answered makes
    /// the connection suspect.
    pub(crate) async fn call(self: &Arc<Self>, script: &Script, cmd: &Cmd) -> RedisResult<Value> {
        self.call_as(script, cmd, false).await
    }

    /// The same; `asking`: of a node that the slot of the keys is just coming to.
    pub(crate) async fn call_as(
        self: &Arc<Self>,
        script: &Script,
        cmd: &Cmd,
        asking: bool,
    ) -> RedisResult<Value> {
        let mut unanswered = Unanswered(Some(self));
        let answer = script::send(&mut self.redis.clone(), script, cmd, asking).await;
        unanswered.0 = None;
        self.heed(&answer);
        answer
    }

    /// The same for a command that is no script.
    pub(crate) async fn command(self: &Arc<Self>, cmd: &Cmd) -> RedisResult<Value> {
        let mut unanswered = Unanswered(Some(self));
        let answer = self.ask(cmd).await;
        unanswered.0 = None;
        self.heed(&answer);
        answer
    }

    /// Whether this connection is one to go on with.
    fn heed(&self, answer: &RedisResult<Value>) {
        if let Err(e) = answer
            // Read-only: it was the master once, and another is now.
            && (e.is_unrecoverable_error() || error::is_read_only(e))
            && let Some(client) = self.client.upgrade()
        {
            client.lost(self.number);
        }
    }

    /// It has ended, or its server is no longer the one to ask: what that granted is not proven.
    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    pub(crate) fn set_over(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Tries whether we may ask a node of a cluster for keys that are just coming to it.
    ///
    /// # Errors
    /// [`ErrorKind::Other`] with the ACL rule that is missing.
    pub(crate) async fn may_ask(&self, client: &Client) -> Result<()> {
        let asked = self.ask::<()>(&redis::cmd("ASKING")).await;
        asked.map_err(|e| client.refused(&e, "+asking"))
    }

    /// Sends a command that is no script.
    pub(crate) async fn ask<T: redis::FromRedisValue>(&self, cmd: &Cmd) -> RedisResult<T> {
        cmd.query_async(&mut self.redis.clone()).await
    }

    /// Sends so many commands at once; a failed one among them is a value too.
    pub(crate) async fn ask_all(&self, cmds: &Pipeline, count: usize) -> RedisResult<Vec<Value>> {
        let mut redis = self.redis.clone();
        redis.req_packed_commands(cmds, 0, count).await
    }

    /// Messages of `channel` come in from now on.
    pub(crate) async fn subscribe(&self, channel: &str) -> RedisResult<()> {
        self.redis.clone().subscribe(channel).await
    }

    /// They do not any more.
    pub(crate) async fn unsubscribe(&self, channel: &str) -> RedisResult<()> {
        self.redis.clone().unsubscribe(channel).await
    }

    /// Whether the server answers on it.
    pub(crate) async fn answers(&self) -> bool {
        let mut connection = self.redis.clone();
        let answer = connection.send_packed_command(&redis::cmd("PING")).await;
        answer.is_ok()
    }

    /// The server's clock at `moment` by our reckoning, in ms since 1970; to be shown to people.
    pub(crate) fn server_at(&self, moment: Moment) -> u64 {
        let elapsed = moment.since(self.opened).as_millis();
        let elapsed = u64::try_from(elapsed).unwrap_or(u64::MAX);
        (self.server_clock / 1000).saturating_add(elapsed)
    }

    /// Tries all that will be used, so that a missing right shows now and not when somebody waits.
    ///
    /// # Errors
    /// [`ErrorKind::Other`] with the ACL rules that are missing; [`ErrorKind::Unsupported`] if the
    /// server cannot run the scripts.
    pub(crate) async fn probe(&self, client: &Client, script: &Script, call: &Cmd) -> Result<()> {
        let mut redis = self.redis.clone();
        let refused = |e: RedisError, rule: &str| client.refused(&e, rule);
        let ping = redis::cmd("PING").query_async::<()>(&mut redis).await;
        ping.map_err(|e| refused(e, "+ping"))?;

        script
            .load_async(&mut redis)
            .await
            .map_err(|e| refused(e, "+script|load"))?;
        let failed: Vec<String> = call
            .query_async(&mut redis)
            .await
            .map_err(|e| refused(e, "+evalsha"))?;
        client.check_rights(&failed)?;

        Ok(())
    }

    async fn opening(client: &Arc<Client>, number: u64) -> Result<Arc<Self>> {
        let end = End {
            client: Arc::downgrade(client),
            number,
        };
        let config = without_limits()
            .set_pipeline_buffer_size(1024)
            // Requests that meet leave in one write.
            .set_write_backpressure_boundary(64 * 1024)
            .set_push_sender(move |push| {
                end.message(&push);
                Ok::<_, ()>(())
            });
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let opened = client.target.connect(client, &config).await;
        drop(config);
        let (mut redis, watcher) = opened?;

        let before = Moment::now();
        let clock = redis::cmd("TIME")
            .query_async::<(u64, u64)>(&mut redis)
            .await;
        let (seconds, micros) = clock.map_err(|e| client.refused(&e, "+time"))?;
        // At once: a claim may be waiting for its first connection to this server.
        let mut load = redis::pipe();
        for script in client.scripts() {
            load.load_script(script);
        }
        let scripts = load.cmd_iter().count();
        let loaded = redis.send_packed_commands(&load, 0, scripts).await;
        loaded
            .and_then(|loaded| {
                loaded
                    .into_iter()
                    .try_for_each(|it| it.extract_error().map(drop))
            })
            .map_err(|e| client.refused(&e, "+script|load"))?;
        let inbox = client.names.inbox(client.id);
        let subscribed = redis.subscribe(inbox).await;
        subscribed.map_err(|e| client.refused(&e, "+subscribe"))?;
        // On every connection: a server may come back set up differently.
        if let Some(policy) = evicting(&mut redis).await {
            warn!(
                target: "leasehold",
                server = %client.address, policy,
                "this server throws locks away when its memory is full, and then two may hold one: set maxmemory-policy to noeviction"
            );
        }
        let over = Arc::new(AtomicBool::new(false));
        let watching = watcher.map(|it| Watching::start(it, client, number, over.clone()));
        Ok(Arc::new_cyclic(|connection: &Weak<Self>| {
            let connection = connection.clone();
            Self {
                number,
                runtime,
                suspected: AtomicBool::new(false),
                server_clock: seconds * 1_000_000 + micros,
                opened: before,
                redis,
                client: Arc::downgrade(client),
                over,
                _watching: watching,
                gather: Gather::new(REQUESTS, TOGETHER_AT_MOST, move |batch| {
                    if let Some(connection) = connection.upgrade() {
                        connection.hand_on(batch);
                    }
                }),
            }
        }))
    }

    /// Sends what has collected: the request is on its way when this returns, a task sees to the answers.
    fn hand_on(self: Arc<Self>, batch: Batch<Call, RedisResult<Value>>) {
        let runtime = self.runtime.clone();
        let mut carried = Box::pin(self.carry(batch));
        if poll_once(&runtime, carried.as_mut()).is_pending() {
            drop(runtime.spawn(carried));
        }
    }

    async fn carry(self: Arc<Self>, batch: Batch<Call, RedisResult<Value>>) {
        let Batch { calls, replies } = batch;
        let floor = self
            .client
            .upgrade()
            .map_or(0, |client| client.floor(&self));
        if let [call] = &calls[..] {
            replies.answer([self.alone(call, floor).await]);
            return;
        }
        let calls = Calls::new(calls);
        match self.call(&TOGETHER, &calls.command(floor)).await {
            Ok(value) => match calls.answers(value) {
                Some(answers) => replies.answer(answers),
                None => replies.answer_all(Ok(Value::Nil)),
            },
            // Refused as a whole, before anything was done: a right that one of them lacks is none of the
            // others' business.
            Err(e) if e.kind() == redis::ErrorKind::Server(ServerErrorKind::NoPerm) => {
                let mut answers = Vec::new();
                for call in calls.each() {
                    answers.push(self.alone(call, floor).await);
                }
                replies.answer(answers);
            }
            Err(e) => replies.answer_all(Err(e)),
        }
    }

    async fn alone(self: &Arc<Self>, call: &Call, floor: u64) -> RedisResult<Value> {
        let (script, cmd) = call.command(&ON_A_SERVER, floor);
        self.call(script, &cmd).await
    }
}

/// What carried the call is gone: the runtime of the connection has ended.
fn ended() -> RedisError {
    std::io::Error::from(std::io::ErrorKind::BrokenPipe).into()
}

pub(crate) fn no_runtime() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "Redis is used outside of a tokio runtime, or in one that is ending: call from within one",
    )
}

/// Held by the task that drives the connection: receives its messages, and tells the client when
/// that task ends, also when its whole runtime does.
struct End {
    client: Weak<Client>,
    number: u64,
}

impl End {
    fn message(&self, push: &PushInfo) {
        if let PushKind::Message = push.kind
            && let [_channel, Value::BulkString(text)] = &push.data[..]
            && let Ok(text) = std::str::from_utf8(text)
            && let Some(client) = self.client.upgrade()
        {
            client.message(self.number, text);
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if let Some(client) = self.client.upgrade() {
            client.lost(self.number);
        }
    }
}

/// The task that ends a connection when another server has become the master.
#[derive(Debug)]
struct Watching(AbortHandle);

impl Watching {
    fn start(watcher: Watcher, client: &Arc<Client>, number: u64, over: Arc<AtomicBool>) -> Self {
        let client = Arc::downgrade(client);
        let task = tokio::spawn(async move {
            watcher.until_moved().await;
            over.store(true, Ordering::Release);
            if let Some(client) = client.upgrade() {
                info!(target: "leasehold", server = %client.address, "another server is the master now");
                client.lost(number);
            }
        });
        Self(task.abort_handle())
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Unanswered<'a>(Option<&'a Arc<Connection>>);

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.0
            && let Some(client) = connection.client.upgrade()
        {
            client.suspect(connection);
        }
    }
}

/// The policy by which a server throws keys away, if it does and lets us know. It need not: the right
/// to ask may be missing.
async fn evicting(redis: &mut MultiplexedConnection) -> Option<String> {
    let info: String = redis::cmd("INFO")
        .arg("memory")
        .query_async(redis)
        .await
        .ok()?;
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
    let limited = field("maxmemory:").is_some_and(|limit| limit != "0");
    let policy = field("maxmemory_policy:")?;
    (limited && policy != "noeviction").then(|| policy.to_owned())
}
