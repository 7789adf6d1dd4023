//! Waiters that stop, crash and come back, and holders that end without a word: on a single server, and in
//! a cluster, where each node has the inboxes of its own clients.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_conformance::fixtures::redis_cluster::RedisCluster;
use leasehold_core::{Backend, Moment};
use leasehold_redis::{Redis, RedisOptions};
use support::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Builder;

/// Where the lock `a` is.
#[derive(Clone)]
struct Home {
    url: String,
    /// Of the server that has it.
    port: u16,
}

impl Home {
    async fn on(server: &RedisServer) -> Self {
        Self {
            url: server.url(),
            port: server.port(),
        }
    }

    async fn within(cluster: &RedisCluster) -> Self {
        let slot = cluster.slot("lock:a").await.unwrap();
        let node = cluster.owner(slot).await.unwrap();
        Self {
            url: cluster.url(),
            port: cluster.port(node),
        }
    }

    async fn connect(&self) -> Redis {
        let options = RedisOptions::new(&self.url).unwrap();
        // The machine may be busy.
        let options = options.with_connect_timeout(SOON);
        Redis::connect_with(options).await.unwrap()
    }

    /// The server that has it.
    async fn raw(&self) -> Raw {
        raw_at(self.port).await
    }
}

async fn cluster() -> RedisCluster {
    RedisCluster::start([""; 0]).await.unwrap()
}

/// Its queue, if anybody waits: the only one here.
async fn queue(raw: &mut Raw) -> Option<String> {
    let queues: Vec<String> = raw.get("KEYS lock:leasehold:queue:*").await;
    assert!(queues.len() <= 1, "{queues:?}");
    queues.into_iter().next()
}

async fn queued(raw: &mut Raw) -> usize {
    match queue(raw).await {
        Some(queue) => raw.get(&format!("ZCARD {queue}")).await,
        None => 0,
    }
}

async fn until_queued(raw: &mut Raw, count: usize) {
    let what = format!("{count} in the queue");
    until(&what, async || queued(raw).await == count).await;
}

/// Case 51.
#[test]
fn stopped_waiters_and_an_operator_who_listens_do_not_hold_up_the_living() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    stopped_waiters(async || {
        let server = server([]).await;
        (Home::on(&server).await, server)
    });
}

/// Case 51.
#[test]
fn in_a_cluster_stopped_waiters_and_an_operator_who_listens_do_not_hold_up_the_living() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    stopped_waiters(async || {
        let cluster = cluster().await;
        (Home::within(&cluster).await, cluster)
    });
}

/// Fifty waiters of a process that is stopped stand in front, and an operator listens to every channel, so
/// that their inboxes seem open.
fn stopped_waiters<S>(start: impl AsyncFnOnce() -> (Home, S)) {
    let ttl = Duration::from_secs(2);
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    let (home, _running) = runtime.block_on(start());
    let (mut hold, client, mut raw) = runtime.block_on(async {
        let client = home.connect().await;
        let hold = granted(&client, &claim("a", LONG)).await;
        (hold, client, home.raw().await)
    });
    let _operator = runtime.block_on(async {
        let mut operator = TcpStream::connect(("127.0.0.1", home.port)).await.unwrap();
        operator.write_all(b"PSUBSCRIBE *\r\n").await.unwrap();
        let mut begun = [0; 4];
        operator.read_exact(&mut begun).await.unwrap();
        assert_eq!(&begun, b"*3\r\n");
        operator
    });

    let (stopped, go_on) = stopped_client(home, 50, ttl);
    runtime.block_on(until_queued(&mut raw, 50));
    let waiter = {
        let _entered = runtime.enter();
        spawn(&client, waiting("a", ttl))
    };
    runtime.block_on(until_queued(&mut raw, 51));
    let released = Moment::now();
    let hold = runtime.block_on(async {
        hold.release().await.unwrap();
        served(SOON, waiter).await
    });
    let waited = released.elapsed();
    // Two ttls are owed, the rest is for a busy machine; one after the other it would be fifty.
    assert!(waited < 2 * ttl + Duration::from_secs(8), "{waited:?}");
    drop(hold);
    drop(go_on);
    stopped.join().unwrap();
}

/// A client with so many waiters for `a`, whose only thread stops once they are queued, until the
/// sender is dropped.
fn stopped_client(home: Home, waiters: usize, ttl: Duration) -> (JoinHandle<()>, mpsc::Sender<()>) {
    let (go_on, stopped) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let client = runtime.block_on(home.connect());
        runtime.block_on(async {
            for _ in 0..waiters {
                drop(spawn(&client, waiting("a", ttl)));
            }
            until_queued(&mut home.raw().await, waiters).await;
        });
        assert!(stopped.recv().is_err());
    });
    (thread, go_on)
}

/// Case 52.
#[tokio::test]
async fn a_waiter_wakes_after_a_foreign_lock_was_deleted() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    deleted_lock(Home::on(&server).await).await;
}

/// Case 52.
#[tokio::test]
async fn in_a_cluster_a_waiter_wakes_after_a_foreign_lock_was_deleted() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let cluster = cluster().await;
    deleted_lock(Home::within(&cluster).await).await;
}

/// A foreign lock without a ttl is waited for, and its end noticed within a third of ours.
async fn deleted_lock(home: Home) {
    let (client, mut raw) = (home.connect().await, home.raw().await);
    raw.run("SET lock:a foreign").await;
    let waiter = spawn(&client, waiting("a", Duration::from_secs(3)));
    until_queued(&mut raw, 1).await;
    raw.run("DEL lock:a").await;
    // Nobody tells: a second is owed, the rest is for a busy machine.
    served(Duration::from_secs(11), waiter).await;
}

/// Case 52.
#[tokio::test]
async fn a_waiter_wakes_after_a_holder_with_a_shorter_ttl_died() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    dead_holder(Home::on(&server).await).await;
}

/// Case 52.
#[tokio::test]
async fn in_a_cluster_a_waiter_wakes_after_a_holder_with_a_shorter_ttl_died() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let cluster = cluster().await;
    dead_holder(Home::within(&cluster).await).await;
}

/// A holder with a shorter ttl than the waiters' dies, having taken the lock when it was free and having
/// been handed it.
async fn dead_holder(home: Home) {
    let (client, mut raw) = (home.connect().await, home.raw().await);
    let short = Duration::from_millis(300);
    let dead = granted(&client, &claim("a", short)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    drop(dead);
    let mut hold = served(SOON, waiter).await;

    let first = spawn(&client, waiting("a", short));
    until_queued(&mut raw, 1).await;
    let second = spawn(&client, waiting("a", LONG));
    until_queued(&mut raw, 2).await;
    hold.release().await.unwrap();
    drop(served(SOON, first).await);
    served(SOON, second).await;
}

/// Case 57.
#[tokio::test]
async fn the_queue_stays_near_the_living_when_clients_crash() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    crashing_clients(Home::on(&server).await).await;
}

/// Case 57.
#[tokio::test]
async fn in_a_cluster_the_queue_stays_near_the_living_when_clients_crash() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let cluster = cluster().await;
    crashing_clients(Home::within(&cluster).await).await;
}

/// Clients crash and come back behind a long hold; the queue does not keep them all.
async fn crashing_clients(home: Home) {
    const ROUNDS: usize = 40;
    const EACH: usize = 10;
    let (client, mut raw) = (home.connect().await, home.raw().await);
    let _hold = granted(&client, &claim("a", LONG)).await;
    let alive: Vec<_> = (0..5).map(|_| spawn(&client, waiting("a", LONG))).collect();
    until_queued(&mut raw, 5).await;
    for _round in 0..ROUNDS {
        let home = home.clone();
        let crashing = move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(crash(&home, EACH));
        };
        tokio::task::spawn_blocking(crashing).await.unwrap();
    }
    let (length, all) = (queued(&mut raw).await, 5 + ROUNDS * EACH);
    assert!(length < all / 4, "{length} of {all} are kept, 5 live");
    let queue = queue(&mut raw).await.unwrap();
    let queue_ttl: i64 = raw.get(&format!("PTTL {queue}")).await;
    assert!((1..=600_000).contains(&queue_ttl), "{queue_ttl}");
    assert!(alive.iter().all(|waiter| !waiter.is_finished()));
}

/// A client that takes so many places in the queue, and ends without a word.
async fn crash(home: &Home, places: usize) {
    let (client, mut raw) = (home.connect().await, home.raw().await);
    let claims: Vec<_> = (0..places).map(|_| waiting("a", LONG)).collect();
    let mut waiters: Vec<_> = claims.iter().map(|claim| client.acquire(claim)).collect();
    for claim in &claims {
        until("it has its place", async || {
            // All of them: a request whose answer is not taken in holds up those behind it.
            for waiter in &mut waiters {
                assert!(once(waiter).await.is_none());
            }
            let queue = queue(&mut raw).await;
            let entries: Vec<String> = match queue {
                Some(queue) => raw.get(&format!("ZRANGE {queue} 0 -1")).await,
                None => Vec::new(),
            };
            let claim = claim.id.to_string();
            entries.iter().any(|entry| entry.contains(&claim))
        })
        .await;
    }
    // A crash withdraws nothing.
    std::mem::forget(waiters);
}
