//! What only a set of independent nodes can show: some of them down, silent, slow, or back without
//! their data.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use leasehold_conformance::fixtures::redis::RedisServer;
use std::time::Duration;

use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend, ErrorKind, Token};
use leasehold_redis::{Redlock, RedlockOptions};
use support::*;

#[tokio::test(flavor = "multi_thread")]
async fn two_of_five_nodes_may_be_silent_or_dead_and_are_not_waited_for() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(5, []).await;
    // Whoever waited for a silent node would not be done in time.
    let client = redlock(redlock_options(&servers).with_node_timeout(10 * SOON)).await;
    let other = redlock(redlock_options(&servers).with_node_timeout(10 * SOON)).await;
    servers[0].process().pause().unwrap();
    servers[1].process().pause().unwrap();
    for _ in 0..10 {
        let mut hold = granted(&client, &claim("a", LONG)).await;
        assert!(within(SOON, "a try", is_taken(&other, "a")).await);
        within(SOON, "a renewal", hold.renew()).await.unwrap();
        within(SOON, "a release", hold.release()).await.unwrap();
    }
    let mut kept = granted(&client, &claim("kept", LONG)).await;
    servers[0].process().kill();
    servers[1].process().kill();
    within(SOON, "a renewal", kept.renew()).await.unwrap();
    assert!(within(SOON, "a try", is_taken(&other, "kept")).await);
    within(SOON, "a release", kept.release()).await.unwrap();
    let mut hold = granted(&other, &claim("kept", LONG)).await;
    hold.release().await.unwrap();
    let also = redlock(redlock_options(&servers).with_connect_timeout(Duration::from_secs(2)));
    let _hold = granted(&also.await, &claim("a", LONG)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_majority_it_fails_and_leaves_nothing() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(5, []).await;
    let client =
        redlock(redlock_options(&servers).with_node_timeout(Duration::from_millis(500))).await;
    let other = redlock(redlock_options(&servers)).await;
    for server in &servers[..3] {
        server.process().pause().unwrap();
    }
    let wanted = claim("a", LONG);
    let tried = within(SOON, "it is given up", client.acquire(&wanted)).await;
    assert_eq!(failed(tried).kind(), ErrorKind::Unavailable);
    // The other two were freed before it returned.
    for raw in &mut raws(&servers[3..]).await {
        assert_eq!(raw.get::<u64>("EXISTS lock:a").await, 0);
    }
    for server in &servers[..3] {
        server.process().resume().unwrap();
    }
    // What the silent ones took in meanwhile is taken back there too: nothing ends by its ttl here.
    let wanted = waiting("a", LONG);
    let hold = within(SOON, "another gets it", other.acquire(&wanted)).await;
    assert!(hold.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_that_comes_too_late_is_given_back() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(5, []).await;
    let mut proxies = Vec::new();
    let mut urls = urls(&servers);
    for index in [3, 4] {
        let address = format!("127.0.0.1:{}", servers[index].port());
        let proxy = Proxy::start(&address).await.unwrap();
        urls[index] = format!("redis://{}", proxy.address());
        proxies.push(proxy);
    }
    let slow = RedlockOptions::new(urls)
        .unwrap()
        .with_restart_guard(false)
        .with_max_ttl(LONG);
    let client = redlock(slow.with_node_timeout(SOON)).await;
    let other = redlock(redlock_options(&servers)).await;
    let ttl = Duration::from_millis(400);
    let flow = |flow| proxies.iter().for_each(|proxy| proxy.set(flow));
    servers[0].process().kill();
    flow(Flow::Hold);
    let wanted = claim("a", ttl);
    let (tried, ()) = tokio::join!(client.acquire(&wanted), async {
        tokio::time::sleep(ttl).await;
        flow(Flow::Pass);
    });
    // It asked again: the late votes are no grant, and are not in its own way.
    if let Ok(Some(mut hold)) = tried {
        drop(hold.release().await);
    }
    // Nor in that of others.
    let wanted = waiting("a", LONG);
    let hold = within(SOON, "another gets it", other.acquire(&wanted)).await;
    let mut hold = hold.unwrap().unwrap();
    within(SOON, "a release", hold.release()).await.unwrap();
    let hold = within(SOON, "it gets it", client.acquire(&wanted)).await;
    assert!(hold.unwrap().is_some());
}

/// Nobody holds it, but the nodes are new.
#[tokio::test]
async fn a_wait_that_ends_before_the_nodes_vote_says_so() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let options = redlock_options(&servers).with_restart_guard(true);
    let client = redlock(options.with_max_ttl(LONG)).await;
    let mut claim = claim("a", LONG);
    claim.wait = Some(Duration::from_millis(500));
    let error = failed(within(SOON, "its wait ends", client.acquire(&claim)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("do not vote until"), "{error}");
}

/// A holds by the votes of nodes 0 and 1. Node 1 is restarted without data: with node 2 it could give
/// the lock to B.
async fn restarted_empty(guard: bool) -> bool {
    let servers = servers(3, []).await;
    // Without the guard nothing is waited for, so it may be long.
    let max_ttl = Duration::from_secs(if guard { 5 } else { 100 });
    let options = redlock_options(&servers)
        .with_max_ttl(max_ttl)
        .with_restart_guard(guard);
    let (one, other) = (redlock(options.clone()).await, redlock(options).await);
    // New nodes do not vote at first either, and a claim waits for them.
    let mut first = waiting("a", max_ttl);
    let hold = within(SOON, "the nodes vote", one.acquire(&first)).await;
    let mut hold = hold.unwrap().unwrap();
    within(SOON, "a release", hold.release()).await.unwrap();

    servers[2].process().pause().unwrap();
    first = waiting("a", max_ttl);
    let hold = within(SOON, "two of three", one.acquire(&first)).await;
    let hold = hold.unwrap().unwrap();
    servers[2].process().resume().unwrap();
    servers[1].restart().await.unwrap();
    // Node 2 still may have been asked for its vote by the first: it counts for nothing here.
    let mut node = raw(&servers[2]).await;
    node.run("DEL lock:a").await;
    let second = waiting("a", max_ttl);
    let next = within(2 * SOON, "the lock is free again", other.acquire(&second)).await;
    let next = next.unwrap().unwrap();
    assert!(next.token() > hold.token(), "{next:?} after {hold:?}");
    hold.validity().is_ended()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_came_back_empty_does_not_vote_until_old_holders_are_gone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    assert!(restarted_empty(true).await, "two held it");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_guard_it_gives_one_lock_to_two() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    assert!(
        !restarted_empty(false).await,
        "the test above shows nothing"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_do_not_vote_yet_are_an_error_to_those_who_do_not_wait() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(RedlockOptions::new(urls(&servers)).unwrap()).await;
    let error = failed(client.acquire(&claim("a", Duration::from_secs(30))).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("max_ttl"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_while_nodes_lose_their_data_and_little_is_left_behind() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(5, []).await;
    let clients = [
        redlock(redlock_options(&servers)).await,
        redlock(redlock_options(&servers)).await,
    ];
    let mut last = Token::new(0);
    for cycle in 0..60 {
        if cycle % 6 == 5 {
            servers[cycle / 6 % 5].restart().await.unwrap();
        }
        let client = &clients[cycle % 2];
        let hold = within(SOON, "a grant", client.acquire(&waiting("a", LONG))).await;
        let mut hold = hold.unwrap().unwrap();
        assert!(hold.token() > last, "{:?} after {last:?}", hold.token());
        last = hold.token();
        within(SOON, "a release", hold.release()).await.unwrap();
    }
    for raw in &mut raws(&servers).await {
        for name in raw.get::<Vec<String>>("KEYS *").await {
            let ends: i64 = raw.get(&format!("PTTL {name}")).await;
            assert!(ends > 0 || name == "lock:leasehold:redlock", "{name} stays");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_data_is_left_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    for raw in &mut raws(&servers).await {
        raw.run("RPUSH lock:a theirs").await;
    }
    let tried = client.acquire(&claim("a", LONG)).await;
    assert_eq!(failed(tried).kind(), ErrorKind::Invalid);
    for raw in &mut raws(&servers).await {
        assert_eq!(
            raw.get::<Vec<String>>("LRANGE lock:a 0 -1").await,
            ["theirs"]
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_of_another_program_excludes_ours_and_is_shown() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    for raw in &mut raws {
        raw.run("SET lock:a theirs").await;
    }
    assert!(is_taken(&client, "a").await);
    let holder = client.holder(&key("a")).await.unwrap().unwrap();
    assert_eq!(holder.owner.as_deref(), Some("theirs"));
    let waiter = tokio::spawn({
        let client = client.clone();
        async move { client.acquire(&waiting("a", LONG)).await }
    });
    for raw in &mut raws {
        raw.run("DEL lock:a").await;
    }
    let hold = within(SOON, "it becomes free", waiter).await.unwrap();
    let hold = hold.unwrap().unwrap();
    let holder = client.holder(&key("a")).await.unwrap().unwrap();
    assert_eq!(holder.token, Some(hold.token()));
    assert!(client.evict(&key("a"), Some(&holder)).await.unwrap());
    assert!(!client.evict(&key("a"), Some(&holder)).await.unwrap());
}

#[tokio::test]
async fn wrong_sets_of_nodes_are_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let refused = |urls: &[&str]| failed(RedlockOptions::new(urls)).kind();
    assert_eq!(refused(&["redis://a", "redis://b"]), ErrorKind::Invalid);
    let twice = ["redis://a", "redis://b", "redis://a"];
    assert_eq!(refused(&twice), ErrorKind::Invalid);
    let servers = servers(2, []).await;
    let port = servers[0].port();
    let mut urls = urls(&servers);
    urls.push(format!("redis://localhost:{port}"));
    let error = failed(Redlock::connect(urls).await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let client = redlock(redlock_options(&support::servers(3, []).await).with_max_ttl(SOON)).await;
    let error = failed(client.acquire(&claim("a", 2 * SOON)).await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

/// A release is answered once a majority has let go; the other votes may be there for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn votes_of_a_minority_are_no_lock_that_could_be_taken_away() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(5, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let operator = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let named = operator.holder(&key("a")).await.unwrap().unwrap();
    for raw in &mut raws {
        raw.run("COPY lock:a vote").await;
    }
    hold.release().await.unwrap();
    for raw in &mut raws {
        let gone = async { while raw.get::<bool>("EXISTS lock:a").await {} };
        within(SOON, "its vote is given back", gone).await;
    }

    for grant in [None, Some(&named)] {
        for raw in &mut raws[..2] {
            raw.run("COPY vote lock:a REPLACE").await;
        }
        assert!(operator.holder(&key("a")).await.unwrap().is_none());
        assert!(!operator.evict(&key("a"), grant).await.unwrap());
    }
    // Three of them are one.
    for raw in &mut raws[..3] {
        raw.run("COPY vote lock:a REPLACE").await;
    }
    assert!(operator.evict(&key("a"), Some(&named)).await.unwrap());
}
