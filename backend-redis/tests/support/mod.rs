//! What the tests share: a server of their own, claims, raw access to the server.
#![allow(dead_code, reason = "no test file uses all of it")]
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

use std::future::{Future, poll_fn};
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{
    Backend, Claim, Error, ErrorKind, Hold, Key, Listed, Moment, OwnerId, Result,
};
use leasehold_redis::{Redis, RedisOptions, Redlock, RedlockOptions};
use redis::aio::MultiplexedConnection;
use redis::{FromRedisValue, RedisResult};

/// An upper bound for what takes milliseconds on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(30);
/// A ttl that does not end during a test.
pub(crate) const LONG: Duration = Duration::from_secs(120);

pub(crate) type Granted = Result<Option<Box<dyn Hold>>>;

/// A server for one test, with these arguments beside the usual ones.
pub(crate) async fn server<const N: usize>(arguments: [&str; N]) -> RedisServer {
    RedisServer::start(arguments).await.unwrap()
}

pub(crate) async fn servers<const N: usize>(
    count: usize,
    arguments: [&str; N],
) -> Vec<RedisServer> {
    let mut servers = Vec::new();
    for _ in 0..count {
        servers.push(server(arguments).await);
    }
    servers
}

pub(crate) fn urls(servers: &[RedisServer]) -> Vec<String> {
    servers.iter().map(RedisServer::url).collect()
}

/// For new servers, which have forgotten nothing.
pub(crate) fn redlock_options(servers: &[RedisServer]) -> RedlockOptions {
    for_new(RedlockOptions::new(urls(servers)).unwrap())
}

pub(crate) fn for_new(options: RedlockOptions) -> RedlockOptions {
    options
        .with_restart_guard(false)
        .with_max_ttl(LONG)
        // The machine may be busy.
        .with_node_timeout(SOON)
        .with_connect_timeout(SOON)
}

pub(crate) async fn redlock(options: RedlockOptions) -> Redlock {
    let connecting = Redlock::connect_with(options);
    within(SOON, "it connects", connecting).await.unwrap()
}

pub(crate) async fn raws(servers: &[RedisServer]) -> Vec<Raw> {
    let mut raws = Vec::new();
    for server in servers {
        raws.push(raw(server).await);
    }
    raws
}

pub(crate) async fn connect(server: &RedisServer) -> Redis {
    let options = RedisOptions::new(server.url()).unwrap();
    // The machine may be busy.
    let options = options.with_connect_timeout(SOON);
    Redis::connect_with(options).await.unwrap()
}

/// The server as any other program sees it.
pub(crate) async fn raw(server: &RedisServer) -> Raw {
    let client = redis::Client::open(server.url()).unwrap();
    Raw(patient(&client).await.unwrap())
}

/// A connection that waits for its answers as long as they take: the library's own limit is half a
/// second, and the machine may be busy.
pub(crate) async fn patient(client: &redis::Client) -> RedisResult<MultiplexedConnection> {
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None);
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

#[derive(Clone)]
pub(crate) struct Raw(MultiplexedConnection);

impl Raw {
    /// Sends a command, its words separated by blanks.
    pub(crate) async fn ask<T: FromRedisValue>(&mut self, words: &str) -> RedisResult<T> {
        let mut cmd = redis::Cmd::new();
        for word in words.split(' ') {
            cmd.arg(word);
        }
        cmd.query_async(&mut self.0).await
    }

    /// The same, of words that may have blanks in them.
    pub(crate) async fn words(&mut self, words: &[&str]) {
        let cmd = words.iter().fold(redis::Cmd::new(), |mut cmd, word| {
            cmd.arg(word);
            cmd
        });
        let answer: RedisResult<redis::Value> = cmd.query_async(&mut self.0).await;
        answer.unwrap_or_else(|e| panic!("{words:?}: {e}"));
    }

    /// The same, of words that may be no text.
    pub(crate) async fn bytes(&mut self, words: &[&[u8]]) {
        let mut cmd = redis::Cmd::new();
        for word in words {
            cmd.arg(*word);
        }
        cmd.query_async::<redis::Value>(&mut self.0).await.unwrap();
    }

    /// The same; it must succeed.
    pub(crate) async fn get<T: FromRedisValue>(&mut self, words: &str) -> T {
        self.ask(words)
            .await
            .unwrap_or_else(|e| panic!("{words}: {e}"))
    }

    pub(crate) async fn run(&mut self, words: &str) {
        self.get::<redis::Value>(words).await;
    }

    /// How often scripts were called since the last `CONFIG RESETSTAT`.
    pub(crate) async fn script_calls(&mut self) -> u64 {
        let info: String = self.get("INFO commandstats").await;
        let calls = |command: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(command));
            let calls = line.and_then(|line| line.split(',').next());
            calls.map_or(0, |calls| calls.parse::<u64>().unwrap())
        };
        calls("cmdstat_evalsha:calls=") + calls("cmdstat_eval:calls=")
    }

    /// Waits until so many stand in the queue of the lock `name`.
    pub(crate) async fn until_queued(&mut self, name: &str, count: usize) {
        let zcard = format!("ZCARD lock:leasehold:queue:{name}");
        let queued = async {
            while self.get::<usize>(&zcard).await != count {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        within(SOON, &format!("{count} in the queue of {name}"), queued).await;
    }
}

pub(crate) fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// A claim that does not wait.
pub(crate) fn claim(name: &str, ttl: Duration) -> Claim {
    let mut claim = Claim::new(key(name), ttl).unwrap();
    // These tests are about other limits, and the machine may be busy.
    claim.request_limit = SOON;
    claim
}

/// A claim that waits for as long as it takes.
pub(crate) fn waiting(name: &str, ttl: Duration) -> Claim {
    let mut claim = claim(name, ttl);
    claim.wait = None;
    claim
}

pub(crate) fn owned(mut claim: Claim, owner: &OwnerId) -> Claim {
    claim.owner = owner.clone();
    claim
}

/// The lock, which is free.
pub(crate) async fn granted(client: &impl Backend, claim: &Claim) -> Box<dyn Hold> {
    let hold = within(SOON, "a free lock is granted", client.acquire(claim)).await;
    hold.unwrap().expect("it was not free")
}

/// Whether the lock is taken for a claim that does not wait.
pub(crate) async fn is_taken(client: &impl Backend, name: &str) -> bool {
    client.acquire(&claim(name, LONG)).await.unwrap().is_none()
}

/// All locks that are listed.
pub(crate) async fn list(client: &impl Backend, prefix: &str) -> Vec<Listed> {
    let (mut locks, mut after) = (Vec::new(), None);
    loop {
        let page = client.list(prefix, after.as_deref());
        let page = within(SOON, "a list is answered", page).await.unwrap();
        locks.extend(page.locks);
        after = page.next;
        if after.is_none() {
            return locks;
        }
    }
}

/// An acquire that runs by itself.
pub(crate) fn spawn(
    client: &(impl Backend + Clone),
    claim: Claim,
) -> tokio::task::JoinHandle<Granted> {
    let client = client.clone();
    tokio::spawn(async move { client.acquire(&claim).await })
}

/// The hold of an acquire that runs by itself.
pub(crate) async fn served(
    limit: Duration,
    waiter: tokio::task::JoinHandle<Granted>,
) -> Box<dyn Hold> {
    let hold = within(limit, "the waiter is served", waiter).await;
    hold.unwrap().unwrap().expect("it has no limit to its wait")
}

pub(crate) async fn within<T>(limit: Duration, what: &str, event: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, event).await {
        Ok(answer) => answer,
        Err(_) => panic!("not within {limit:?}: {what}"),
    }
}

/// Polls once; the answer, if there is one already.
pub(crate) async fn once<T>(
    future: &mut Pin<Box<dyn Future<Output = T> + Send + '_>>,
) -> Option<T> {
    poll_fn(|cx| {
        Poll::Ready(match future.as_mut().poll(cx) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        })
    })
    .await
}

/// Repeats what fails because a connection or a server is not there just now, as core does.
pub(crate) async fn eventually(mut attempt: impl AsyncFnMut() -> Result<()>) {
    let start = Moment::now();
    let mut unanswered = false;
    loop {
        match attempt().await {
            Ok(()) => return,
            Err(e) if e.kind() == ErrorKind::Lost && unanswered => return,
            Err(e) => {
                assert!(e.is_transient() && start.elapsed() < SOON, "{e}");
                unanswered = true;
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until it is so.
pub(crate) async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(SOON, what, waiting).await;
}

/// Waits until every node has voted for whoever holds `name`: a lock is granted when a majority has.
pub(crate) async fn until_voted(servers: &[RedisServer], name: &str) {
    for server in servers {
        let mut raw = raw(server).await;
        until("the node votes", async || {
            raw.get::<bool>(&format!("EXISTS lock:{name}")).await
        })
        .await;
    }
}

/// A server with these arguments, once [filled](fill) and started again, loads its data until it is
/// [told](load_fast) to hurry.
pub(crate) const SLOW_TO_LOAD: [&str; 6] = [
    "--key-load-delay",
    "100000",
    "--loading-process-events-interval-bytes",
    "1024",
    "--rdbcompression",
    "no",
];

/// Saves data that takes a minute to load.
pub(crate) async fn fill(raw: &mut Raw) {
    let value = "x".repeat(2000);
    for number in 0..600 {
        raw.run(&format!("SET filler:{number} {value}")).await;
    }
    raw.run("SAVE").await;
}

pub(crate) async fn until_loading(server: &RedisServer) {
    let client = redis::Client::open(server.url()).unwrap();
    until("it loads its data", async || {
        let Ok(mut connection) = patient(&client).await else {
            return false;
        };
        let answer: RedisResult<String> = redis::cmd("GET")
            .arg("a")
            .query_async(&mut connection)
            .await;
        answer.is_err_and(|e| e.code() == Some("LOADING"))
    })
    .await;
}

pub(crate) async fn load_fast(server: &RedisServer) {
    let mut raw = raw(server).await;
    raw.run("CONFIG SET key-load-delay 0").await;
    until("it has loaded its data", async || {
        raw.ask::<Option<String>>("GET a").await.is_ok()
    })
    .await;
}

/// What is logged on this thread while the guard lives.
pub(crate) fn logs() -> (Logs, tracing::subscriber::DefaultGuard) {
    let logs = Logs::default();
    let writer = logs.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone());
    let guard = tracing::subscriber::set_default(subscriber.finish());
    (logs, guard)
}

#[derive(Clone, Default)]
pub(crate) struct Logs(Arc<Mutex<Vec<u8>>>);

impl Logs {
    /// The warnings with these words in them, and no others; what was logged is then forgotten.
    pub(crate) fn take_warnings(&self, words: &str) -> Vec<String> {
        let text = std::mem::take(&mut *self.0.lock().unwrap());
        let text = String::from_utf8(text).unwrap();
        let lines = text.lines().map(str::to_owned);
        lines
            .filter(|line| line.contains("WARN") && line.contains(words))
            .collect()
    }
}

impl Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The error of something that must fail.
pub(crate) fn failed<T>(answer: Result<T>) -> Error {
    match answer {
        Ok(_) => panic!("it succeeded"),
        Err(e) => e,
    }
}
