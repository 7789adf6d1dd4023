//! What the tests share: a server of their own, claims, raw access to the server.
#![allow(dead_code, reason = "no test file uses all of it")]
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, Claim, Error, Hold, Key, OwnerId, Result};
use leasehold_redis::Redis;
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

pub(crate) async fn connect(server: &RedisServer) -> Redis {
    Redis::connect(server.url()).await.unwrap()
}

/// The server as any other program sees it.
pub(crate) async fn raw(server: &RedisServer) -> Raw {
    let client = redis::Client::open(server.url()).unwrap();
    Raw(client.get_multiplexed_async_connection().await.unwrap())
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

/// An acquire that runs by itself.
pub(crate) fn spawn(client: &Redis, claim: Claim) -> tokio::task::JoinHandle<Granted> {
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

/// The error of something that must fail.
pub(crate) fn failed<T>(answer: Result<T>) -> Error {
    match answer {
        Ok(_) => panic!("it succeeded"),
        Err(e) => e,
    }
}
