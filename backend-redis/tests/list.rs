//! What only Redis can show of a list: foreign data, queues without a holder, nodes that disagree.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, ErrorKind, Listed};
use leasehold_redis::{Redis, RedisOptions};
use support::*;

fn only(listed: Vec<Listed>) -> Listed {
    let [listed] = <[Listed; 1]>::try_from(listed).unwrap();
    listed
}

/// More than one page of them, and what else is under the prefix or beside it.
#[tokio::test]
async fn a_list_has_all_locks_and_nothing_else_that_is_ours() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    const LOCKS: usize = 1500;
    let server = server([]).await;
    let mut raw = raw(&server).await;
    // In which everything has a meaning in a pattern.
    let prefix = r"[l-o]*?\c^k:";
    let options = RedisOptions::new(server.url()).unwrap().with_prefix(prefix);
    let client = Redis::connect_with(options).await.unwrap();
    let mut held = Vec::new();
    for number in 0..LOCKS {
        held.push(granted(&client, &claim(&format!("n{number}"), LONG)).await);
        raw.run(&format!("SET other:{number} x")).await;
    }
    held.push(granted(&client, &claim("leasehold:queue:a", LONG)).await);
    let _waiter = spawn(&client, waiting("n7", LONG));
    let queue = format!("ZCARD {prefix}leasehold:queue:n7");
    until("it waits", async || raw.get::<u64>(&queue).await == 1).await;

    let all = list(&client, "").await;
    let mut keys: Vec<_> = all.iter().map(|it| it.key.clone().unwrap()).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), LOCKS + 1);
    for listed in &all {
        let waits = listed.key.as_ref().unwrap().as_str() == "n7";
        assert_eq!(listed.waiting, Some(waits.into()), "{listed:?}");
        assert!(listed.holder.as_ref().unwrap().token.is_some());
    }
    let ours = only(list(&client, "leasehold:").await);
    assert_eq!(ours.raw, format!("{prefix}leasehold:key:leasehold:queue:a"));
    assert!(list(&client, "n15000").await.is_empty());
}

#[tokio::test]
async fn foreign_data_is_shown_as_far_as_it_is_known() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    raw.run("SET lock:theirs host-7 PX 60000").await;
    let theirs = only(list(&client, "").await);
    let holder = theirs.holder.unwrap();
    assert_eq!(holder.owner.as_deref(), Some("host-7"));
    assert!(holder.remaining.is_some() && holder.token.is_none());
    let seen = client.holder(&key("theirs")).await.unwrap().unwrap();
    assert_eq!(holder.grant, seen.grant);
    assert!(client.evict(&key("theirs"), Some(&holder)).await.unwrap());

    // Lists, texts in the place of queues, keys that are no text, no name or too long a one.
    let long = "x".repeat(1025);
    raw.run("RPUSH lock:list one").await;
    raw.run("SET lock:b 1").await;
    raw.run("SET lock:leasehold:queue:b mine").await;
    raw.run("SET lock: 1").await;
    raw.run(&format!("SET lock:{long} 1")).await;
    raw.run("SET lock:leasehold:key:a 1").await;
    raw.run("SET lock:leasehold:else 1").await;
    raw.bytes(&[b"SET", b"lock:\xff\xfe", b"1"]).await;
    let all = list(&client, "").await;
    let named = |name: &str| {
        let mut all = all.iter();
        all.find(|it| it.raw == format!("lock:{name}")).unwrap()
    };
    assert_eq!(all.len(), 5, "{all:?}");
    assert_eq!(named("list").key, Some(key("list")));
    assert_eq!(named("list").holder.as_ref().unwrap().owner, None);
    assert_eq!(named("list").waiting, Some(0));
    assert_eq!(
        named("b").waiting,
        None,
        "its queue is somebody else's data"
    );
    assert_eq!(
        named("b").holder.as_ref().unwrap().owner.as_deref(),
        Some("1")
    );
    for nameless in ["", &long] {
        assert_eq!(named(nameless).key, None);
        assert!(named(nameless).holder.is_some());
    }
    assert_eq!(named("\u{fffd}\u{fffd}").key, None);
}

/// Its holder is gone, and the next one has not asked yet.
#[tokio::test]
async fn a_lock_that_is_only_waited_for_is_listed() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    let _hold = granted(&client, &claim("a", LONG)).await;
    let _waiter = spawn(&client, waiting("a", LONG));
    raw.until_queued("a", 1).await;
    raw.run("DEL lock:a").await;
    for prefix in ["", "a"] {
        let listed = only(list(&client, prefix).await);
        assert_eq!(listed.key, Some(key("a")));
        assert_eq!(listed.holder, None);
        assert_eq!(listed.waiting, Some(1));
    }
    assert!(list(&client, "b").await.is_empty());
}

#[tokio::test]
async fn a_missing_right_to_list_is_named_when_it_is_needed() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let mut raws = raws(&servers).await;
    for raw in &mut raws {
        raw.run("ACL SETUSER locks on >secret ~lock:* &lock:* +@all -scan")
            .await;
    }
    let option = |server: &RedisServer| {
        let options = RedisOptions::new(server.url()).unwrap();
        options.with_username("locks").with_password("secret")
    };
    let single = Redis::connect_with(option(&servers[0])).await.unwrap();
    let nodes = leasehold_redis::RedlockOptions::from_nodes(servers.iter().map(option)).unwrap();
    let several = redlock(for_new(nodes)).await;
    for client in [&single as &dyn Backend, &several] {
        let error = failed(client.list("", None).await);
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
        assert!(error.to_string().contains("+scan"), "{error}");
    }
    for raw in &mut raws {
        raw.run("ACL SETUSER locks +scan").await;
    }
    assert!(list(&single, "").await.is_empty());
    assert!(list(&several, "").await.is_empty());
}

/// A lock is held by whoever has the votes of a majority, and comes once, whichever nodes have it.
#[tokio::test]
async fn a_majority_says_what_is_held() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let mut raws = raws(&servers).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut held = Vec::new();
    for name in ["a", "b", "c"] {
        held.push(granted(&client, &claim(name, LONG)).await);
        until_voted(&servers, name).await;
    }
    // One vote is missing, on a different node for each; and one that is left over.
    for (raw, name) in raws.iter_mut().zip(["a", "b", "c"]) {
        raw.run(&format!("DEL lock:{name}")).await;
    }
    raws[1].run("SET lock:d 1 PX 60000").await;
    let names = |listed: Vec<Listed>| {
        let mut names: Vec<_> = listed.into_iter().map(|it| it.key.unwrap()).collect();
        names.sort();
        names
    };
    let all = list(&client, "").await;
    for (name, hold) in ["a", "b", "c"].iter().zip(&held) {
        let listed = all.iter().find(|it| it.key == Some(key(name))).unwrap();
        assert_eq!(listed.holder.as_ref().unwrap().token, Some(hold.token()));
        assert_eq!(listed.waiting, None);
    }
    assert_eq!(names(all), ["a", "b", "c"].map(key));
    assert_eq!(names(list(&client, "b").await), [key("b")]);

    // With one node down those may be held that it has a vote for; with two nothing is known.
    servers[0].process().kill();
    let now = names(list(&client, "").await);
    assert_eq!(now, ["a", "b", "c", "d"].map(key));
    servers[1].process().kill();
    let error = failed(client.list("", None).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
