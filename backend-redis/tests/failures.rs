//! What breaks underneath: the server, its memory, its data, connections, runtimes.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, ErrorKind, Moment};
use leasehold_redis::{Redis, RedisOptions};
use support::*;
use tokio::runtime::{Builder, Runtime};

/// Case 6: the server forgets the scripts between acquire, renewal and release.
#[tokio::test]
async fn forgotten_scripts_are_loaded_again_unseen() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    raw.run("SCRIPT FLUSH").await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    raw.run("SCRIPT FLUSH").await;
    hold.renew().await.unwrap();
    let waiter = spawn(&client, waiting("a", LONG));
    raw.until_queued("a", 1).await;
    raw.run("SCRIPT FLUSH").await;
    hold.release().await.unwrap();
    let hold = served(SOON, waiter).await;
    raw.run("SCRIPT FLUSH").await;
    let holder = client.holder(&key("a")).await.unwrap();
    assert_eq!(holder.as_ref().unwrap().token, Some(hold.token()));
    raw.run("SCRIPT FLUSH").await;
    assert!(client.evict(&key("a"), holder.as_ref()).await.unwrap());
}

/// Case 6: restarted with its data, the server still has the lock and the queue.
#[tokio::test]
async fn a_restart_with_persistence_loses_no_lock_and_no_place() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(["--appendonly", "yes", "--appendfsync", "always"]).await;
    let (client, other) = (connect(&server).await, connect(&server).await);
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let mut before = raw(&server).await;
    let first = spawn(&other, waiting("a", LONG));
    before.until_queued("a", 1).await;
    let second = spawn(&client, waiting("a", LONG));
    before.until_queued("a", 2).await;
    server.restart().await.unwrap();

    eventually(async || hold.renew().await).await;
    // A waiter whose client is not back yet would be passed over.
    let mut again = raw(&server).await;
    let inboxes = "PUBSUB CHANNELS lock:leasehold:inbox:*";
    let back = async { while again.get::<Vec<String>>(inboxes).await.len() < 2 {} };
    within(SOON, "both clients are back", back).await;
    assert!(is_taken(&connect(&server).await, "a").await);
    hold.release().await.unwrap();
    let mut first = served(SOON, first).await;
    assert!(hold.token() < first.token());
    assert!(!second.is_finished());
    first.release().await.unwrap();
    served(SOON, second).await;
}

/// Case 6: restarted without its data, the lock is gone; that is said, and waiters get it.
#[tokio::test]
async fn a_restart_without_persistence_loses_the_lock_and_says_so() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    raw(&server).await.until_queued("a", 1).await;
    server.restart().await.unwrap();
    // Not after a third of its ttl, which is 40 s: the waiter asks again as soon as it is connected.
    let next = served(SOON, waiter).await;
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert!(hold.validity().is_ended());
    assert!(hold.token() < next.token());
}

#[tokio::test]
async fn flushall_loses_the_lock_and_waiters_come_back_in_bounded_time() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", Duration::from_secs(3)));
    raw.until_queued("a", 1).await;
    raw.run("FLUSHALL").await;
    let next = served(Duration::from_secs(11), waiter).await;
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert!(hold.token() < next.token());
}

/// Case 7: the waiter's connection, and with it its inbox, is cut before the holder releases.
#[tokio::test]
async fn a_waiter_whose_connection_was_cut_is_served() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, other, mut raw) = (
        connect(&server).await,
        connect(&server).await,
        raw(&server).await,
    );
    for round in 0..20 {
        let mut hold = granted(&other, &claim("a", LONG)).await;
        let waiter = spawn(&client, waiting("a", LONG));
        raw.until_queued("a", 1).await;
        raw.run("CLIENT KILL TYPE pubsub").await;
        if round % 2 == 0 {
            // It may be back in its place by then, or not.
            tokio::time::sleep(Duration::from_millis(round)).await;
        }
        // The holder's connection was cut as well; a first attempt may not get through.
        eventually(async || hold.release().await).await;
        let mut next = served(SOON, waiter).await;
        assert!(hold.token() < next.token());
        eventually(async || next.release().await).await;
    }
}

#[tokio::test]
async fn a_paused_server_loses_nothing_that_lasts_longer() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    raw.until_queued("a", 1).await;
    raw.run("CLIENT PAUSE 1000 ALL").await;
    hold.renew().await.unwrap();
    hold.release().await.unwrap();
    served(SOON, waiter).await;
}

/// A server that stands still answers nothing within the request limit; when it goes on, so do those
/// who hold and wait.
#[tokio::test]
async fn a_stopped_server_is_unavailable_and_then_goes_on() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    raw(&server).await.until_queued("a", 1).await;
    server.process().pause().unwrap();
    let mut quick = claim("b", LONG);
    quick.request_limit = Duration::from_millis(100);
    for _ in 0..3 {
        let error = failed(client.acquire(&quick).await);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    let renewal = tokio::time::timeout(Duration::from_millis(500), hold.renew());
    assert!(renewal.await.is_err());
    server.process().resume().unwrap();
    eventually(async || hold.renew().await).await;
    eventually(async || hold.release().await).await;
    served(SOON, waiter).await;
    // What the unanswered acquires may have taken was given back.
    let free = async { while is_taken(&client, "b").await {} };
    within(SOON, "nothing is left of claims that failed", free).await;
}

#[tokio::test]
async fn a_server_that_is_gone_is_unavailable_and_waiters_wait_for_it() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let _hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    let mut limited = waiting("a", LONG);
    limited.wait = Some(Duration::from_secs(1));
    let limited = spawn(&client, limited);
    raw(&server).await.until_queued("a", 2).await;
    server.process().kill();
    let error = within(SOON, "it fails", client.acquire(&claim("b", LONG))).await;
    assert_eq!(failed(error).kind(), ErrorKind::Unavailable);
    let over = within(SOON, "its wait is over", limited).await.unwrap();
    assert!(over.unwrap().is_none());
    server.start_again().await.unwrap();
    served(SOON, waiter).await;
}

/// A primary is made a replica of another while it has a lock: the lock is gone with its data, and that
/// is said.
#[tokio::test]
async fn a_primary_that_takes_over_the_data_of_another_loses_the_lock_and_says_so() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let (server, other) = (server([]).await, server([]).await);
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", Duration::from_secs(3)));
    raw.until_queued("a", 1).await;
    raw.run(&format!("REPLICAOF 127.0.0.1 {}", other.port()))
        .await;
    until("its data is that of the other", async || {
        let keys = raw.ask::<Vec<String>>("KEYS *").await;
        keys.is_ok_and(|keys| keys.is_empty())
    })
    .await;
    let error = failed(client.acquire(&claim("b", LONG)).await);
    assert!(error.to_string().contains("replica"), "{error}");
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert!(hold.validity().is_ended());
    assert!(!waiter.is_finished());
    raw.run("REPLICAOF NO ONE").await;
    let next = served(SOON, waiter).await;
    assert!(hold.token() < next.token());
}

/// `LOADING`: a server that reads its data is unavailable and says why, also to those who come while
/// others try to connect again and again; the lock is found in the data.
#[tokio::test]
async fn a_server_that_loads_its_data_is_waited_for() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(SLOW_TO_LOAD).await;
    let client = connect(&server).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    let mut before = raw(&server).await;
    before.until_queued("a", 1).await;
    fill(&mut before).await;
    server.process().kill();
    server.process().start_again().await.unwrap();
    until_loading(&server).await;
    until("it says why", async || {
        let error = failed(client.acquire(&claim("b", LONG)).await);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        error.to_string().contains("loading")
    })
    .await;
    let error = failed(Redis::connect(server.url()).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("loading"), "{error}");
    assert!(!waiter.is_finished());
    load_fast(&server).await;
    eventually(async || hold.renew().await).await;
    eventually(async || hold.release().await).await;
    served(SOON, waiter).await;
}

/// Old servers that do not replicate what scripts do, but the scripts, are refused; since 7.0 the
/// setting is taken and does nothing.
#[tokio::test]
async fn a_server_that_replicates_scripts_is_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(["--lua-replicate-commands", "no"]).await;
    let info: String = raw(&server).await.get("INFO server").await;
    let old = info.contains("redis_version:6.");
    match Redis::connect(server.url()).await {
        Ok(client) => {
            assert!(!old);
            granted(&client, &claim("a", LONG)).await;
        }
        Err(e) => {
            assert!(old, "{e}");
            assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
            assert!(e.to_string().contains("lua-replicate-commands"), "{e}");
        }
    }
}

/// A server that throws locks away: there is a warning when connecting, on each connection, unless the
/// user may not know; what was thrown away is lost, and that is said.
#[tokio::test]
async fn an_evicting_server_is_warned_of_and_its_locks_are_lost_and_that_is_said() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(["--maxmemory-policy", "allkeys-lru"]).await;
    let mut raw = raw(&server).await;
    let (logs, _logging) = logs();
    let warned = || logs.take_warnings("maxmemory-policy").len();
    // Without a limit nothing is thrown away.
    let client = connect(&server).await;
    assert_eq!(warned(), 0);
    raw.run("CONFIG SET maxmemory 100mb").await;
    let other = connect(&server).await;
    assert_eq!(warned(), 1);
    raw.run("CONFIG SET maxmemory-policy noeviction").await;
    connect(&server).await;
    assert_eq!(warned(), 0);
    raw.run("CONFIG SET maxmemory-policy volatile-ttl").await;
    raw.run("CLIENT KILL TYPE pubsub").await;
    until("they connect again", async || {
        drop(client.acquire(&claim("b", LONG)).await);
        drop(other.acquire(&claim("b", LONG)).await);
        warned() > 0
    })
    .await;
    raw.run("ACL SETUSER unknowing on nopass ~* &* +@all -info -config")
        .await;
    let options = RedisOptions::new(server.url()).unwrap();
    let options = options.with_username("unknowing").with_password("any");
    let unknowing = Redis::connect_with(options).await.unwrap();
    let mut hold = granted(&unknowing, &claim("a", LONG)).await;
    assert_eq!(warned(), 0);

    let waiter = spawn(&unknowing, waiting("a", Duration::from_secs(3)));
    raw.until_queued("a", 1).await;
    raw.run("CONFIG SET maxmemory 1").await;
    until("it is thrown away", async || {
        drop(raw.ask::<String>("SET x y").await);
        !raw.get::<bool>("EXISTS lock:a").await
    })
    .await;
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert!(hold.validity().is_ended());
    raw.run("CONFIG SET maxmemory 0").await;
    let next = served(SOON, waiter).await;
    assert!(hold.token() < next.token());
}

/// Case 54: `maxmemory` is reached and nothing may be thrown away.
#[tokio::test]
async fn with_its_memory_full_renewals_and_hand_offs_work_and_new_locks_are_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let ttl = Duration::from_secs(3);
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiters: Vec<_> = (0..2).map(|_| spawn(&client, waiting("a", ttl))).collect();
    raw.until_queued("a", 2).await;
    raw.run("CONFIG SET maxmemory 1").await;
    for claim in [claim("b", LONG), waiting("a", LONG)] {
        let error = failed(client.acquire(&claim).await);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("maxmemory"), "{error}");
    }
    hold.renew().await.unwrap();
    // Waiters have kept their places through their next request.
    raw.run("CONFIG RESETSTAT").await;
    let asked = async { while raw.script_calls().await < 2 {} };
    within(SOON, "the waiters ask again", asked).await;
    hold.release().await.unwrap();
    for waiter in waiters {
        served(SOON, waiter).await.release().await.unwrap();
    }
}

/// An acquire is dropped when its connection has ended: its cancel fails at once, and goes out anew on
/// the next connection. Else its place would be kept for a ttl.
#[tokio::test]
async fn a_cancel_that_fails_at_once_is_repeated() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, other, mut raw) = (
        connect(&server).await,
        connect(&server).await,
        raw(&server).await,
    );
    let _hold = granted(&other, &claim("a", LONG)).await;
    let wanted = waiting("a", LONG);
    // Polled by hand, so that it does not hear that its connection has ended.
    let mut waiter = client.acquire(&wanted);
    until("it is queued", async || {
        assert!(once(&mut waiter).await.is_none());
        raw.get::<usize>("ZCARD lock:leasehold:queue:a").await == 1
    })
    .await;
    raw.run("CLIENT KILL TYPE pubsub").await;
    until("its client has noticed", async || {
        format!("{client:?}").contains("connection: None")
    })
    .await;
    drop(waiter);
    raw.until_queued("a", 0).await;
}

/// Cancelled wherever it is, an acquire leaves nothing: here with many at once, on one connection.
#[tokio::test]
async fn cancelled_acquires_leave_no_places() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiters: Vec<_> = (0..300)
        .map(|_| spawn(&client, waiting("a", LONG)))
        .collect();
    for (number, waiter) in waiters.iter().enumerate() {
        if number % 7 == 0 {
            tokio::task::yield_now().await;
        }
        waiter.abort();
    }
    raw.until_queued("a", 0).await;
    hold.release().await.unwrap();
    assert!(!is_taken(&client, "a").await);
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// The runtime of the connection ends; the next one that is used opens another.
#[test]
fn used_from_another_runtime_after_the_first_has_ended_it_reconnects() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let (first, second) = (runtime(), runtime());
    let server = second.block_on(server([]));
    let client = first.block_on(connect(&server));
    let mut hold = first.block_on(granted(&client, &claim("a", LONG)));
    // It waits in a runtime that lives on, over a connection that does not.
    let waiter = {
        let _entered = second.enter();
        spawn(&client, waiting("a", LONG))
    };
    second.block_on(async { raw(&server).await.until_queued("a", 1).await });
    // Its answer has come before this one; lost with the connection, it would be an error.
    first.block_on(client.holder(&key("a"))).unwrap();
    drop(first);
    second.block_on(async {
        hold.renew().await.unwrap();
        hold.release().await.unwrap();
        let mut next = served(SOON, waiter).await;
        next.release().await.unwrap();
        assert!(!is_taken(&client, "a").await);
    });
}

/// The runtime of the connection lives but nobody runs it.
#[test]
fn a_connection_whose_runtime_stands_still_is_replaced() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let second = runtime();
    let server = second.block_on(server([]));
    let still = Builder::new_current_thread().enable_all().build().unwrap();
    let client = still.block_on(connect(&server));
    second.block_on(async {
        let mut impatient = claim("a", LONG);
        impatient.request_limit = Duration::from_millis(200);
        let start = Moment::now();
        loop {
            match client.acquire(&impatient).await {
                Ok(hold) => break assert!(hold.is_some()),
                Err(e) => assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}"),
            }
            assert!(start.elapsed() < SOON, "it is never replaced");
        }
    });
}

#[tokio::test]
async fn close_ends_everything() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client: Redis = connect(&server).await;
    let waiter = {
        let _hold = granted(&client, &claim("a", LONG)).await;
        spawn(&client, waiting("a", LONG))
    };
    let mut raw = raw(&server).await;
    raw.until_queued("a", 1).await;
    waiter.abort();
    within(SOON, "the waiter ends", waiter).await.unwrap_err();
    client.close().await.unwrap();
    // Its cancel was through before that.
    assert_eq!(raw.get::<usize>("ZCARD lock:leasehold:queue:a").await, 0);
    assert_eq!(
        failed(client.acquire(&claim("b", LONG)).await).kind(),
        ErrorKind::Closed
    );
    let gone = async {
        while raw
            .get::<String>("CLIENT LIST TYPE pubsub")
            .await
            .contains("id=")
        {}
    };
    within(SOON, "its connection is closed", gone).await;
}
