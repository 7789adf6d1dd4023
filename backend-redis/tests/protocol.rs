//! What stands on the server, and what travels: keys, queue, tokens, numbers of requests.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use std::sync::mpsc;
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, ErrorKind, Locks, OwnerId, Token};
use leasehold_redis::{Redis, RedisOptions};
use support::*;
use tokio::runtime::Builder;

/// Any program that locks with `SET … NX PX` excludes us, and we exclude it.
#[tokio::test]
async fn a_plain_set_nx_px_excludes_ours_and_ours_excludes_it() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let set = "SET lock:a token NX PX 60000";

    assert_eq!(raw.get::<Option<String>>(set).await.as_deref(), Some("OK"));
    assert!(is_taken(&client, "a").await);
    let holder = client.holder(&key("a")).await.unwrap().unwrap();
    assert_eq!(holder.owner.as_deref(), Some("token"));
    assert!(
        holder
            .remaining
            .is_some_and(|left| left <= Duration::from_secs(60))
    );
    raw.run("DEL lock:a").await;

    let mut hold = granted(&client, &claim("a", LONG)).await;
    assert_eq!(raw.get::<Option<String>>(set).await, None);
    let value: String = raw.get("GET lock:a").await;
    assert!(value.contains(&hold.token().to_string()), "{value}");
    hold.release().await.unwrap();
    assert_eq!(raw.get::<Option<String>>(set).await.as_deref(), Some("OK"));
}

#[tokio::test]
async fn nothing_but_the_counter_is_left_when_all_is_free() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let hold = granted(&client, &claim("a", LONG)).await;
    let waiters: Vec<_> = (0..5).map(|_| spawn(&client, waiting("a", LONG))).collect();
    raw.until_queued("a", 5).await;
    let queue_ttl: u64 = raw.get("PTTL lock:leasehold:queue:a").await;
    assert!(queue_ttl >= 590_000, "the queue lasts {queue_ttl} ms");
    let mut holds = vec![hold];
    for waiter in waiters {
        holds.pop().unwrap().release().await.unwrap();
        holds.push(served(SOON, waiter).await);
    }
    holds.pop().unwrap().release().await.unwrap();
    let keys: Vec<String> = raw.get("KEYS *").await;
    let keys: Vec<_> = keys.iter().filter(|key| !key.contains("probe")).collect();
    assert_eq!(keys, ["lock:leasehold:token"]);
}

#[tokio::test]
async fn two_prefixes_on_one_server_have_nothing_to_do_with_each_other() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let one = connect(&server).await;
    let options = RedisOptions::new(server.url())
        .unwrap()
        .with_prefix("other:");
    let other = Redis::connect_with(options).await.unwrap();
    let mut hold = granted(&one, &claim("a", LONG)).await;
    let mut beside = granted(&other, &claim("a", LONG)).await;
    let waiter = spawn(&one, waiting("a", LONG));
    raw(&server).await.until_queued("a", 1).await;
    beside.release().await.unwrap();
    assert!(is_taken(&one, "a").await);
    hold.release().await.unwrap();
    served(SOON, waiter).await;
}

#[tokio::test]
async fn databases_of_one_server_have_nothing_to_do_with_each_other() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let one = connect(&server).await;
    let other = Redis::connect(format!("{}/3", server.url())).await.unwrap();
    let _hold = granted(&one, &claim("a", LONG)).await;
    let _beside = granted(&other, &claim("a", LONG)).await;
    assert!(is_taken(&other, "a").await);
}

/// Case 4: what an expired holder sends leaves the next one alone, and says Lost.
#[tokio::test]
async fn an_expired_holder_leaves_its_successor_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (one, other) = (connect(&server).await, connect(&server).await);
    let mut old = granted(&one, &claim("a", Duration::from_millis(50))).await;
    let mut new = within(SOON, "the lock expires", other.acquire(&waiting("a", LONG)))
        .await
        .unwrap()
        .unwrap();
    let before = other.holder(&key("a")).await.unwrap();
    assert_eq!(failed(old.renew().await).kind(), ErrorKind::Lost);
    assert_eq!(failed(old.release().await).kind(), ErrorKind::Lost);
    let after = other.holder(&key("a")).await.unwrap();
    assert_eq!(before.unwrap().grant, after.unwrap().grant);
    new.renew().await.unwrap();
    // Case 20: the token is minted in the step that grants, so the earlier grant has the lower one.
    assert!(old.token() < new.token());
}

/// Case 49: an owner whose lock was lost and granted again keeps the new one when the old guard goes.
#[tokio::test]
async fn the_same_owners_next_grant_is_untouched_by_its_old_guard() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let locks = Locks::new(connect(&server).await).with_wait(SOON);
    let me = locks.owner();
    let old = me.lock("a").await.unwrap();
    assert!(locks.evict("a", None).await.unwrap());
    within(SOON, "lost fires", old.lost()).await;
    let new = me.lock("a").await.unwrap();
    assert_ne!(old.token(), new.token());
    assert_eq!(failed(old.release().await).kind(), ErrorKind::Lost);
    assert!(new.is_held());
    let holder = locks.holder("a").await.unwrap().unwrap();
    assert_eq!(holder.token, Some(new.token()));
    new.release().await.unwrap();
}

/// Case 53: a release is repeated because its answer was lost, after the owner was granted the lock
/// again.
#[tokio::test]
async fn a_repeated_release_leaves_the_same_owners_next_grant_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, me) = (connect(&server).await, OwnerId::new());
    let mut old = granted(&client, &owned(claim("a", LONG), &me)).await;
    {
        // It gets through, and nobody hears the answer.
        let mut release = old.release();
        assert!(once(&mut release).await.is_none());
        let freed = async { while client.holder(&key("a")).await.unwrap().is_some() {} };
        within(SOON, "the release gets through", freed).await;
    }
    let mut new = granted(&client, &owned(claim("a", LONG), &me)).await;
    assert_eq!(failed(old.release().await).kind(), ErrorKind::Lost);
    new.renew().await.unwrap();
    assert!(is_taken(&client, "a").await);
}

/// Case 60: the eviction of a holder that was looked at is confirmed when another holds.
#[tokio::test]
async fn only_the_grant_that_was_looked_at_is_evicted() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    raw.run("SET lock:a foreign PX 60000").await;
    let foreign = client.holder(&key("a")).await.unwrap().unwrap();
    raw.run("DEL lock:a").await;
    let mut first = granted(&client, &claim("a", LONG)).await;
    assert!(!client.evict(&key("a"), Some(&foreign)).await.unwrap());
    let seen = client.holder(&key("a")).await.unwrap().unwrap();
    first.release().await.unwrap();
    let mut second = granted(&client, &claim("a", LONG)).await;
    assert!(!client.evict(&key("a"), Some(&seen)).await.unwrap());
    second.renew().await.unwrap();
    // And a foreign lock can be taken away, by an operator who means that one.
    second.release().await.unwrap();
    raw.run("SET lock:a foreign PX 60000").await;
    assert!(client.evict(&key("a"), Some(&foreign)).await.unwrap());
    assert!(!is_taken(&client, "a").await);
}

/// Case 27: tokens rise over a thousand grants, however each ended and whatever the server forgot in
/// between, and nothing piles up.
#[tokio::test]
async fn tokens_rise_through_expiry_restarts_and_lost_data() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (one, other) = (connect(&server).await, connect(&server).await);
    let mut last = Token::new(0);
    for cycle in 0..1000 {
        let client = if cycle % 2 == 0 { &one } else { &other };
        let (ttl, expires) = match cycle % 50 {
            49 => (Duration::from_millis(10), true),
            _ => (LONG, false),
        };
        // A connection that a restart ended is not always known to have ended.
        let hold = loop {
            match client.acquire(&waiting("a", ttl)).await {
                Ok(hold) => break hold,
                Err(e) if e.is_transient() => {}
                Err(e) => panic!("{e}"),
            }
        };
        let mut hold = hold.unwrap();
        assert!(
            hold.token() > last,
            "cycle {cycle}: {} after {last}",
            hold.token()
        );
        last = hold.token();
        if !expires {
            hold.release().await.unwrap();
        }
        match cycle {
            300 | 301 => raw(&server).await.run("FLUSHALL").await,
            500 | 501 => server.restart().await.unwrap(),
            700 => raw(&server).await.run("SCRIPT FLUSH").await,
            _ => {}
        }
    }
    let keys: Vec<String> = raw(&server).await.get("KEYS *").await;
    let keys: Vec<_> = keys.iter().filter(|key| !key.contains("probe")).collect();
    assert!(keys.len() <= 2, "{keys:?}");
}

/// Case 31: what a hand-off costs does not grow with the waiters.
#[tokio::test]
async fn a_hand_off_costs_two_requests_with_200_waiters() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    const WAITERS: usize = 200;
    let server = server([]).await;
    let mut raw = raw(&server).await;
    let clients = [connect(&server).await, connect(&server).await];
    let mut hold = granted(&clients[0], &claim("a", LONG)).await;
    raw.run("CONFIG RESETSTAT").await;
    let mut waiters = Vec::new();
    for number in 0..WAITERS {
        waiters.push(spawn(&clients[number % 2], waiting("a", LONG)));
    }
    raw.until_queued("a", WAITERS).await;
    let mut served = 0;
    let (granted, mut grants) = tokio::sync::mpsc::unbounded_channel();
    for waiter in waiters {
        let granted = granted.clone();
        tokio::spawn(async move {
            let hold = waiter.await.unwrap().unwrap().unwrap();
            granted.send(hold).unwrap();
        });
    }
    while served < WAITERS {
        hold.release().await.unwrap();
        hold = within(SOON, "the next is served", grants.recv())
            .await
            .unwrap();
        served += 1;
        assert!(grants.try_recv().is_err(), "two hold it");
    }
    let calls = raw.script_calls().await;
    assert!(
        calls <= 2 * WAITERS as u64,
        "{calls} calls for {WAITERS} hand-offs"
    );
}

#[tokio::test]
async fn a_free_lock_costs_one_request_to_take_and_one_to_free() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    raw.run("CONFIG RESETSTAT").await;
    for _ in 0..10 {
        granted(&client, &claim("a", LONG))
            .await
            .release()
            .await
            .unwrap();
    }
    assert_eq!(raw.script_calls().await, 20);
}

/// Case 33: a waiter's process is stopped just before the lock is handed to it and goes on after the
/// ttl, when another has it: the message that it finds is not believed, and it gets its turn later.
#[test]
fn a_grant_that_meets_a_stopped_process_is_not_believed_later() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let ttl = Duration::from_millis(300);
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    let server = runtime.block_on(server([]));
    let (client, mut raw, mut hold) = runtime.block_on(async {
        let client = connect(&server).await;
        let hold = granted(&client, &claim("a", LONG)).await;
        (client, raw(&server).await, hold)
    });
    let (says, said) = mpsc::channel();
    let (go_on, stopped) = mpsc::channel();
    let url = server.url();
    let thread = std::thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let stopping = runtime.block_on(Redis::connect(&url)).unwrap();
        let claim = waiting("a", ttl);
        let mut waiter = stopping.acquire(&claim);
        runtime.block_on(async {
            let raw = redis::Client::open(url).unwrap();
            let mut raw = patient(&raw).await.unwrap();
            let mut zcard = redis::cmd("ZCARD");
            zcard.arg("lock:leasehold:queue:a");
            while zcard.query_async::<usize>(&mut raw).await.unwrap() < 1 {
                assert!(once(&mut waiter).await.is_none());
                tokio::task::yield_now().await;
            }
        });
        says.send(()).unwrap();
        stopped.recv().unwrap();
        let hold = runtime.block_on(waiter).unwrap().unwrap();
        (hold.token(), hold.validity().is_ended())
    });
    said.recv().unwrap();
    let successor = runtime.block_on(async {
        hold.release().await.unwrap();
        let handed_over = client.holder(&key("a")).await.unwrap();
        assert!(handed_over.is_some(), "the stopped client was passed over");
        let waiter = spawn(&client, waiting("a", LONG));
        served(SOON, waiter).await
    });
    go_on.send(()).unwrap();
    // It must not come back with a guard while the other holds: it asks, and queues up again.
    runtime.block_on(raw.until_queued("a", 1));
    let (token, ended) = runtime.block_on(async {
        let mut successor = successor;
        let token = successor.token();
        assert!(!thread.is_finished());
        successor.release().await.unwrap();
        let thread = tokio::task::spawn_blocking(|| thread.join().unwrap());
        let (late, ended) = within(SOON, "it is served in the end", thread)
            .await
            .unwrap();
        assert!(late > token, "the old grant");
        (late, ended)
    });
    assert!(!ended, "granted {token} without validity");
}
