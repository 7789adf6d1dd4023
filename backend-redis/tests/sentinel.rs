//! Behind Sentinel: failovers while locks are held and waited for, sentinels that fail, and replicas
//! that confirm.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod relay;
mod support;

use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_conformance::fixtures::sentinel::{SentinelGroup, ask};
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend, ErrorKind, Moment, Result};
use leasehold_redis::{Redis, RedisOptions, RedlockOptions};
use support::*;
use tokio::runtime::Builder;

/// An upper bound for a failover, on a machine that may be busy.
const FAILOVER: Duration = Duration::from_secs(120);

async fn group() -> SentinelGroup {
    SentinelGroup::start_with([""; 0], [""; 0]).await.unwrap()
}

/// With a limit that a busy machine keeps.
fn options(group: &SentinelGroup) -> RedisOptions {
    let options = RedisOptions::new(group.url()).unwrap();
    options.with_connect_timeout(SOON)
}

async fn client(group: &SentinelGroup) -> Redis {
    Redis::connect_with(options(group)).await.unwrap()
}

async fn confirmed(group: &SentinelGroup, replicas: usize) -> Redis {
    let options = options(group).with_replicas(replicas);
    Redis::connect_with(options).await.unwrap()
}

/// Waits until a majority of the sentinels calls another server the master than `old`.
async fn new_master(group: &SentinelGroup, old: usize) -> usize {
    let moved = async {
        loop {
            let mut votes = Vec::new();
            for sentinel in 0..group.sentinels().len() {
                votes.extend(group.master_by(sentinel).await.ok());
            }
            votes.retain(|it| *it != old);
            if let [one, other, ..] = votes[..]
                && one == other
                && group.is_master(one).await.unwrap_or(false)
            {
                return one;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within(FAILOVER, "another server is the master", moved).await
}

/// Repeats what fails because there is no master just now, as core does.
async fn eventually<T>(mut attempt: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let start = Moment::now();
    loop {
        match attempt().await {
            Err(e) if e.is_transient() => assert!(start.elapsed() < FAILOVER, "{e}"),
            answer => return answer,
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A claim that gives a request up before long: the server may be gone.
fn quick(name: &str) -> leasehold_core::Claim {
    let mut claim = claim(name, LONG);
    claim.request_limit = Duration::from_secs(2);
    claim
}

/// The servers behind proxies, and the URL of sentinels that name the proxies.
async fn behind_proxies(group: &SentinelGroup) -> (Vec<Proxy>, String) {
    let mut lines = Vec::new();
    let mut pairs = Vec::new();
    for server in group.servers() {
        let port = server.port();
        let proxy = Proxy::start(&format!("127.0.0.1:{port}")).await.unwrap();
        pairs.push((port.to_string(), proxy.address().port().to_string()));
        lines.push(proxy);
    }
    let pairs: Vec<_> = pairs
        .iter()
        .map(|(from, to)| (from.as_str(), to.as_str()))
        .collect();
    (lines, relay::sentinels(&group.url(), &pairs).await)
}

/// A planned failover after which the first server goes on taking itself for the master, though the
/// sentinels tell it otherwise; else that lasts ten seconds.
async fn two_masters(group: &SentinelGroup) -> usize {
    let mut old = raw(&group.servers()[0]).await;
    old.run("ACL SETUSER default -slaveof -replicaof").await;
    let sentinel = group.sentinels()[0].port(0);
    ask(sentinel, "SENTINEL FAILOVER mymaster").await.unwrap();
    let master = new_master(group, 0).await;
    assert!(group.is_master(0).await.unwrap());
    master
}

/// The inboxes that are open at a server.
async fn inboxes(port: u16) -> Vec<String> {
    let channels = ask(port, "PUBSUB CHANNELS lock:leasehold:inbox:*").await;
    channels.unwrap_or_default()
}

/// Whether a client of ours has its connection to this server.
async fn has_client(server: &RedisServer) -> bool {
    !inboxes(server.port()).await.is_empty()
}

/// The master is killed while one holds and another waits. What the replicas had is still held, by
/// the same grant; the waiter keeps its place and gets it; tokens rise (cases 4, 20, 27).
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_master_is_followed_by_holder_and_waiter() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let (holder, other) = (client(&group).await, client(&group).await);
    let mut hold = granted(&holder, &claim("a", LONG)).await;
    let first = spawn(&other, waiting("a", LONG));
    raw(&group.servers()[0]).await.until_queued("a", 1).await;
    let second = spawn(&holder, waiting("a", LONG));
    raw(&group.servers()[0]).await.until_queued("a", 2).await;
    group.until_replicated(0).await.unwrap();
    group.servers()[0].process().kill();

    let error = failed(holder.acquire(&quick("b")).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let master = new_master(&group, 0).await;
    eventually(async || hold.renew().await).await.unwrap();
    assert!(!hold.validity().is_ended());
    // Both are back in their places before it is released: who is not there is passed over.
    let port = group.servers()[master].port();
    let back = async { while inboxes(port).await.len() < 2 {} };
    within(FAILOVER, "both clients are back", back).await;
    assert!(is_taken(&client(&group).await, "a").await);
    hold.release().await.unwrap();
    let mut first = served(FAILOVER, first).await;
    assert!(hold.token() < first.token());
    assert!(!second.is_finished());
    first.release().await.unwrap();
    let second = served(FAILOVER, second).await;
    assert!(first.token() < second.token());
}

/// A grant that no replica has is lost with its master: its holder hears so from the new one, long
/// before its ttl or a renewal, and the next token is higher (case 27).
#[tokio::test(flavor = "multi_thread")]
async fn what_the_new_master_does_not_have_is_lost_and_said() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let holder = client(&group).await;
    let ttl = FAILOVER * 10;
    let kept = granted(&holder, &claim("kept", ttl)).await;
    group.until_replicated(0).await.unwrap();
    // Stopped and without a connection: what comes now is never sent to them.
    for replica in &group.servers()[1..] {
        replica.process().pause().unwrap();
    }
    let mut master = raw(&group.servers()[0]).await;
    master.run("CLIENT KILL TYPE replica").await;
    let mut hold = granted(&holder, &claim("a", ttl)).await;
    group.servers()[0].process().kill();
    for replica in &group.servers()[1..] {
        replica.process().resume().unwrap();
    }
    within(FAILOVER, "its holder hears of it", hold.validity().ended()).await;
    assert!(!kept.validity().is_ended());
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    let next = granted(&client(&group).await, &claim("a", LONG)).await;
    assert!(hold.token() < next.token());
    // A stale release leaves the successor alone (case 4).
    assert_eq!(failed(hold.release().await).kind(), ErrorKind::Lost);
    assert!(is_taken(&holder, "a").await);
}

/// A planned failover leaves the old master a master for ten seconds. Clients go over at once, so that
/// it grants nothing that the new one does not know of.
#[tokio::test(flavor = "multi_thread")]
async fn a_planned_failover_is_followed_before_the_old_master_is_demoted() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let (holder, other) = (client(&group).await, client(&group).await);
    let mut hold = granted(&holder, &claim("a", LONG)).await;
    let waiter = spawn(&other, waiting("a", LONG));
    raw(&group.servers()[0]).await.until_queued("a", 1).await;
    group.until_replicated(0).await.unwrap();
    let sentinel = group.sentinels()[0].port(0);
    ask(sentinel, "SENTINEL FAILOVER mymaster").await.unwrap();
    let master = new_master(&group, 0).await;

    let old = &group.servers()[0];
    let gone = async { while has_client(old).await {} };
    within(FAILOVER, "the clients leave the old master", gone).await;
    assert!(
        group.is_master(0).await.unwrap(),
        "they left only when they were thrown out"
    );
    // Both old clients and a new one see the same lock.
    let fresh = client(&group).await;
    let taken = granted(&fresh, &claim("b", LONG)).await;
    let refused = eventually(async || holder.acquire(&quick("b")).await);
    assert!(refused.await.unwrap().is_none(), "two hold b");
    eventually(async || hold.renew().await).await.unwrap();
    let at = has_client(&group.servers()[master]);
    assert!(at.await, "they are at the new one");
    eventually(async || hold.release().await).await.unwrap();
    let next = served(FAILOVER, waiter).await;
    assert!(hold.token() < next.token());
    drop(taken);
}

/// A master that was down comes back and takes itself for the master, until the sentinels find it:
/// nobody is led to it, neither then nor as a replica.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_master_that_comes_back_is_left_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let early = client(&group).await;
    let hold = granted(&early, &claim("a", LONG)).await;
    group.until_replicated(0).await.unwrap();
    group.servers()[0].process().kill();
    let master = new_master(&group, 0).await;
    group.servers()[0].start_again().await.unwrap();
    assert!(group.is_master(0).await.unwrap());
    for _ in 0..5 {
        assert!(is_taken(&client(&group).await, "a").await);
    }
    let taken = eventually(async || early.acquire(&quick("a")).await).await;
    assert!(taken.unwrap().is_none());
    let demoted = async { while group.is_master(0).await.unwrap_or(true) {} };
    within(FAILOVER, "it is demoted", demoted).await;
    assert!(is_taken(&client(&group).await, "a").await);
    assert!(!has_client(&group.servers()[0]).await);
    assert!(has_client(&group.servers()[master]).await);
    drop(hold);
}

/// What is on its way when the master changes is answered by the old one, and proves nothing: no grant
/// is believed, and nothing counts as renewed or freed before the new one says so. What the new one had
/// of a claim that was refused so is withdrawn there.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_master_before_answers_late_proves_nothing() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let (lines, url) = behind_proxies(&group).await;
    let far = RedisOptions::new(url).unwrap().with_connect_timeout(SOON);
    let far = Redis::connect_with(far).await.unwrap();
    let patient = |name| {
        let mut claim = claim(name, FAILOVER * 10);
        claim.request_limit = FAILOVER;
        claim
    };
    let mut freed = granted(&far, &patient("freed")).await;
    let mut renewed = granted(&far, &patient("renewed")).await;
    let up = format!("{far:?}");

    // Granted, copied to the replicas, and not yet answered.
    lines[0].set(Flow::HoldReplies);
    let granted_late = spawn(&far, patient("granted"));
    let mut old = raw(&group.servers()[0]).await;
    until("it is granted", async || {
        old.get::<bool>("EXISTS lock:granted").await
    })
    .await;
    group.until_replicated(0).await.unwrap();
    // These are held back before they arrive.
    lines[0].set(Flow::Hold);
    let mut renewing = renewed.renew();
    assert!(once(&mut renewing).await.is_none());
    let mut freeing = freed.release();
    assert!(once(&mut freeing).await.is_none());
    let master = two_masters(&group).await;
    let gives_up = async { while format!("{far:?}") == up {} };
    within(FAILOVER, "its connection is given up", gives_up).await;
    lines[0].set(Flow::Pass);

    let late = within(SOON, "the grant is judged", granted_late).await;
    let error = failed(late.unwrap());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("not proven"), "{error}");
    let error = failed(within(SOON, "so is the renewal", renewing).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let error = failed(within(SOON, "so is the release", freeing).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");

    eventually(async || renewed.renew().await).await.unwrap();
    let mut new = raw(&group.servers()[master]).await;
    assert!(new.get::<bool>("EXISTS lock:freed").await);
    eventually(async || freed.release().await).await.unwrap();
    let fresh = client(&group).await;
    for name in ["granted", "freed"] {
        served(SOON, spawn(&fresh, waiting(name, LONG))).await;
    }
    assert!(is_taken(&fresh, "renewed").await);
}

/// The master changes while a client connects to the old one, which goes on taking itself for the
/// master: the client goes over to the new one, and what it took in between is lost and said.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_while_connecting_is_followed() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let (lines, url) = behind_proxies(&group).await;
    lines[0].set(Flow::Hold);
    let options = RedisOptions::new(url).unwrap();
    let connecting = Redis::connect_with(options.with_connect_timeout(FAILOVER));
    let connecting = tokio::spawn(connecting);
    // It has asked the sentinels, and speaks to the master that they named.
    until("it connects", async || lines[0].bytes() > 0).await;
    two_masters(&group).await;
    let _hold = granted(&client(&group).await, &claim("a", LONG)).await;
    lines[0].set(Flow::Pass);
    let late = within(FAILOVER, "it connects", connecting).await.unwrap();
    let late = late.unwrap();
    let goes_over = async {
        loop {
            match late.acquire(&quick("a")).await {
                Ok(None) => return,
                // By the old master.
                Ok(Some(hold)) => hold.validity().ended().await,
                Err(e) => assert!(e.is_transient(), "{e}"),
            }
        }
    };
    within(FAILOVER, "it goes over to the new master", goes_over).await;
}

/// Case 50: the next waiter's client has its inbox still at the demoted master. It is passed over, the
/// one behind it is told, and the first keeps its ticket: when it is back it stands before those who
/// came later.
#[test]
fn a_waiter_whose_inbox_is_at_the_demoted_master_keeps_its_place() {
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    let still = Builder::new_current_thread().enable_all().build().unwrap();
    let group = runtime.block_on(group());
    let holder = runtime.block_on(client(&group));
    let other = runtime.block_on(client(&group));
    let mut hold = runtime.block_on(granted(&holder, &claim("a", LONG)));
    let stopped = still.block_on(client(&group));
    let first = {
        let _entered = still.enter();
        spawn(&stopped, waiting("a", LONG))
    };
    // Its runtime runs until it stands in the queue, and then no more.
    let mut at_old = still.block_on(raw(&group.servers()[0]));
    still.block_on(at_old.until_queued("a", 1));
    let mut second = runtime.block_on(async {
        let second = spawn(&other, waiting("a", LONG));
        raw(&group.servers()[0]).await.until_queued("a", 2).await;
        group.until_replicated(0).await.unwrap();
        let sentinel = group.sentinels()[0].port(0);
        ask(sentinel, "SENTINEL FAILOVER mymaster").await.unwrap();
        let master = new_master(&group, 0).await;
        eventually(async || hold.renew().await).await.unwrap();
        let port = group.servers()[master].port();
        let back = async { while inboxes(port).await.len() < 2 {} };
        within(FAILOVER, "holder and second are back", back).await;
        eventually(async || hold.release().await).await.unwrap();
        served(FAILOVER, second).await
    });
    assert!(hold.token() < second.token());
    // Somebody queues while the first is away.
    let third = {
        let _entered = runtime.enter();
        spawn(&other, waiting("a", LONG))
    };
    runtime.block_on(async {
        let master = new_master(&group, 0).await;
        let mut master = raw(&group.servers()[master]).await;
        master.until_queued("a", 1).await;
    });
    still.block_on(async {
        let master = new_master(&group, 0).await;
        raw(&group.servers()[master])
            .await
            .until_queued("a", 2)
            .await;
    });
    runtime
        .block_on(eventually(async || second.release().await))
        .unwrap();
    let mut first = still.block_on(served(FAILOVER, first));
    assert!(second.token() < first.token());
    assert!(!third.is_finished());
    still.block_on(first.release()).unwrap();
    runtime.block_on(served(FAILOVER, third));
}

/// A sentinel that is dead and one that hangs cost the time-out of one, side by side.
#[tokio::test]
async fn dead_and_hanging_sentinels_are_borne() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    group.sentinels()[0].kill();
    group.sentinels()[1].pause().unwrap();
    let start = Moment::now();
    let redis = client(&group).await;
    // One hangs for half of the limit at most.
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    let _hold = granted(&redis, &claim("a", LONG)).await;
    group.sentinels()[1].resume().unwrap();
}

/// A sentinel that was cut off with the old master names that one for ever; the newer configuration
/// wins.
#[tokio::test(flavor = "multi_thread")]
async fn a_sentinel_that_missed_the_failover_is_outvoted() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let hold = granted(&client(&group).await, &claim("a", LONG)).await;
    group.until_replicated(0).await.unwrap();
    let old = group.sentinels()[2].port(0);
    let server = format!("127.0.0.1:{}", group.servers()[0].port());
    let line = Proxy::start(&server).await.unwrap();
    let cut_off = SentinelGroup::sentinel(line.address().port(), Vec::new());
    let cut_off = cut_off.await.unwrap();
    line.set(Flow::Hold);
    let sentinel = group.sentinels()[0].port(0);
    ask(sentinel, "SENTINEL FAILOVER mymaster").await.unwrap();
    let moved = async {
        while group.master_by(0).await.unwrap() == 0 || group.master_by(1).await.unwrap() == 0 {}
    };
    within(FAILOVER, "two of three know of it", moved).await;
    let master = group.master_by(0).await.unwrap();
    let url = group
        .url()
        .replace(&old.to_string(), &cut_off.port(0).to_string());
    for _ in 0..5 {
        let client = RedisOptions::new(&url).unwrap().with_connect_timeout(SOON);
        let client = Redis::connect_with(client).await.unwrap();
        assert!(is_taken(&client, "a").await);
    }
    assert!(has_client(&group.servers()[master]).await);
    drop(hold);
}

#[tokio::test]
async fn what_is_wrong_with_the_sentinels_is_said() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let addresses = group.addresses();
    let wrong_name = Redis::connect(format!("redis+sentinel://{addresses}/nomaster"));
    let error = failed(wrong_name.await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("\"nomaster\""), "{error}");

    // The server in place of its sentinel.
    let server = group.servers()[0].port();
    let no_sentinel = Redis::connect(format!("redis+sentinel://127.0.0.1:{server}/mymaster"));
    let error = failed(no_sentinel.await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("is no sentinel"), "{error}");

    let redis = client(&group).await;
    for sentinel in group.sentinels() {
        sentinel.kill();
    }
    // Who is connected needs none.
    let _hold = granted(&redis, &claim("a", LONG)).await;
    let error = failed(Redis::connect(group.url()).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for part in ["\"mymaster\"", "check that they run", &addresses[..15]] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// Servers and sentinels with users and passwords of their own; neither shows anywhere.
#[tokio::test]
async fn servers_and_sentinels_have_their_own_passwords() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let arguments = ["--requirepass", "of-servers", "--masterauth", "of-servers"];
    let lines = [
        "sentinel auth-pass mymaster of-servers",
        "requirepass of-sentinels",
        "sentinel sentinel-pass of-sentinels",
    ];
    let group = SentinelGroup::start_with(arguments, lines).await;
    let group = group.unwrap();
    let options = RedisOptions::sentinel(group.addresses().split(','), "mymaster").unwrap();
    let both = options
        .clone()
        .with_password("of-servers")
        .with_sentinel_password("of-sentinels");
    assert!(!format!("{both:?}").contains("of-se"), "{both:?}");
    let redis = Redis::connect_with(both).await.unwrap();
    assert!(!format!("{redis:?}").contains("of-se"), "{redis:?}");
    let _hold = granted(&redis, &claim("a", LONG)).await;

    let wrong = options.clone().with_password("of-servers");
    let error = failed(Redis::connect_with(wrong).await);
    assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    assert!(error.to_string().contains("apart from those"), "{error}");
    let wrong = options
        .with_password("of-else")
        .with_sentinel_password("of-sentinels");
    let error = failed(Redis::connect_with(wrong).await);
    assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    assert!(!error.to_string().contains("of-"), "{error}");
}

/// Case 30: a user for locks alone needs one right more behind Sentinel, and one more for replicas; an
/// error names them.
#[tokio::test]
async fn the_rights_that_are_missing_are_named() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let rights = "ACL SETUSER locks on >secret resetchannels ~lock:* &lock:* \
                  +ping +time +info +script|load +evalsha +subscribe +publish +pubsub|numsub \
                  +exists +get +mget +set +del +incr +incrby +pttl +pexpire \
                  +zadd +zrem +zcard +zscore +zpopmin +zrange +zrangebyscore +zrevrange";
    let mut master = raw(&group.servers()[0]).await;
    master.run(rights).await;
    let options = options(&group)
        .with_username("locks")
        .with_password("secret")
        .with_replicas(1);
    for right in ["+role", "+wait"] {
        let error = failed(Redis::connect_with(options.clone()).await);
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
        assert!(error.to_string().contains(right), "{error}");
        master.run(&format!("ACL SETUSER locks {right}")).await;
    }
    let redis = Redis::connect_with(options).await.unwrap();
    let mut hold = granted(&redis, &claim("a", LONG)).await;
    hold.renew().await.unwrap();
}

/// `min-replicas-to-write`: a master without replicas refuses, as an error that passes.
#[tokio::test]
async fn a_master_that_wants_replicas_refuses_new_locks_without() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let redis = client(&group).await;
    let mut hold = granted(&redis, &claim("a", LONG)).await;
    let mut master = raw(&group.servers()[0]).await;
    master.run("CONFIG SET min-replicas-to-write 1").await;
    for replica in &group.servers()[1..] {
        replica.process().kill();
    }
    let refused = async {
        for number in 0.. {
            match redis.acquire(&quick(&format!("b{number}"))).await {
                Err(e) => return e,
                Ok(hold) => drop(hold.unwrap()),
            }
        }
        unreachable!("numbers do not end")
    };
    let error = within(FAILOVER, "it refuses", refused).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(
        error.to_string().contains("min-replicas-to-write"),
        "{error}"
    );
    assert!(failed(hold.renew().await).is_transient());
    group.servers()[1].start_again().await.unwrap();
    eventually(async || hold.renew().await).await.unwrap();
    eventually(async || hold.release().await).await.unwrap();
}

/// Case 56: with a replica stopped a lock is not granted, and what was handed to a waiter does not become
/// its guard: the waiter goes on until it is confirmed, or its wait is over. What was refused is free again.
#[tokio::test(flavor = "multi_thread")]
async fn what_replicas_do_not_confirm_is_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let redis = confirmed(&group, 2).await;
    let short = |name, wait| {
        let mut claim = waiting(name, LONG);
        claim.wait = wait;
        claim.request_limit = Duration::from_millis(500);
        claim
    };
    let mut master = raw(&group.servers()[0]).await;
    let mut hold = granted(&redis, &claim("a", LONG)).await;
    hold.renew().await.unwrap();
    let mut other = granted(&redis, &claim("b", LONG)).await;
    let patient = spawn(&redis, short("a", None));
    master.until_queued("a", 1).await;
    let limited = spawn(&redis, short("b", Some(Duration::from_secs(10))));
    master.until_queued("b", 1).await;
    group.servers()[2].process().pause().unwrap();

    let error = failed(redis.acquire(&short("c", Some(Duration::ZERO))).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "1 of the 2");
    let error = failed(redis.acquire(&short("c", None)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let content = client(&group).await;
    granted(&content, &waiting("c", LONG)).await;

    // Handed over.
    master.run("CONFIG RESETSTAT").await;
    hold.release().await.unwrap();
    other.release().await.unwrap();
    until("it was to be confirmed again and again", async || {
        master.script_calls().await >= 12
    })
    .await;
    assert!(!patient.is_finished());
    let behind = spawn(&content, waiting("a", LONG));
    master.until_queued("a", 1).await;
    let limited = within(SOON, "its wait is over", limited).await;
    let error = failed(limited.unwrap());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "1 of the 2");
    granted(&content, &waiting("b", LONG)).await;
    assert!(!patient.is_finished());

    group.servers()[2].process().resume().unwrap();
    let mut patient = served(SOON, patient).await;
    assert!(hold.token() < patient.token());
    assert!(!behind.is_finished());
    eventually(async || patient.renew().await).await.unwrap();
    eventually(async || patient.release().await).await.unwrap();
    served(SOON, behind).await;
}

/// A renewal that no replica confirms extends nothing: the replica would let the lock end.
#[tokio::test(flavor = "multi_thread")]
async fn an_unconfirmed_renewal_extends_nothing() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let redis = confirmed(&group, 2).await;
    let mut short = claim("a", Duration::from_secs(20));
    short.request_limit = Duration::from_millis(200);
    let mut hold = granted(&redis, &short).await;
    for replica in &group.servers()[1..] {
        replica.process().pause().unwrap();
    }
    let before = hold.validity().remaining();
    let error = failed(hold.renew().await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("0 of the 2"), "{error}");
    assert!(hold.validity().remaining() < before);
    for replica in &group.servers()[1..] {
        replica.process().resume().unwrap();
    }
    eventually(async || hold.renew().await).await.unwrap();
}

/// Renewals that meet share a `WAIT`, and a cancelled acquire leaves nothing while it waits for one.
#[tokio::test(flavor = "multi_thread")]
async fn many_share_a_wait_and_a_cancelled_one_leaves_nothing() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let redis = confirmed(&group, 2).await;
    let tasks: Vec<_> = (0..200)
        .map(|number| spawn(&redis, waiting(&format!("k{number}"), LONG)))
        .collect();
    let mut holds = Vec::new();
    for task in tasks {
        holds.push(served(SOON, task).await);
    }
    group.servers()[1].process().pause().unwrap();
    let waiter = spawn(&redis, waiting("a", LONG));
    let mut master = raw(&group.servers()[0]).await;
    let held = async { while master.get::<usize>("EXISTS lock:a").await == 0 {} };
    within(SOON, "it is granted and waits", held).await;
    waiter.abort();
    let mut master = raw(&group.servers()[0]).await;
    let free = async { while master.get::<usize>("EXISTS lock:a").await == 1 {} };
    within(SOON, "it is withdrawn", free).await;
    group.servers()[1].process().resume().unwrap();
    for mut hold in holds {
        hold.release().await.unwrap();
    }
}

/// A client that gives its requests all the time there is.
#[tokio::test]
async fn replicas_are_waited_for_without_a_limit_too() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let redis = confirmed(&group, 1).await;
    let mut patient = claim("a", LONG);
    patient.request_limit = Duration::MAX;
    granted(&redis, &patient).await.release().await.unwrap();
}

/// `SCRIPT FLUSH` is not noticed on the connection that waits for replicas either (case 6).
#[tokio::test]
async fn forgotten_scripts_are_loaded_again_there_too() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let redis = confirmed(&group, 1).await;
    let mut hold = granted(&redis, &claim("a", LONG)).await;
    raw(&group.servers()[0]).await.run("SCRIPT FLUSH").await;
    hold.renew().await.unwrap();
    hold.release().await.unwrap();
}

/// The connection, and with it the inbox, is cut while one waits (case 7); by sentinels' orders too.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_behind_sentinels_whose_connection_was_cut_is_served() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let (redis, other) = (client(&group).await, client(&group).await);
    let mut master = raw(&group.servers()[0]).await;
    for _ in 0..5 {
        let mut hold = granted(&other, &claim("a", LONG)).await;
        let waiter = spawn(&redis, waiting("a", LONG));
        master.until_queued("a", 1).await;
        master.run("CLIENT KILL TYPE pubsub").await;
        eventually(async || hold.release().await).await.unwrap();
        let mut next = served(SOON, waiter).await;
        eventually(async || next.release().await).await.unwrap();
    }
}

/// An old master that is cut off together with a client goes on: the client's hold ends by its own
/// clock, before the new master may grant it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_cut_off_from_all_loses_before_another_is_granted() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let group = group().await;
    let ttl = Duration::from_secs(3);
    let (lines, url) = behind_proxies(&group).await;
    let far = RedisOptions::new(url).unwrap().with_connect_timeout(SOON);
    let far = Redis::connect_with(far).await.unwrap();
    let mut short = claim("a", ttl);
    short.request_limit = Duration::from_millis(500);
    let hold = granted(&far, &short).await;
    group.until_replicated(0).await.unwrap();
    for line in &lines {
        line.set(Flow::Hold);
    }
    group.servers()[0].process().kill();
    let near = eventually(async || Redis::connect(group.url()).await).await;
    let near = near.unwrap();
    let mut next = waiting("a", LONG);
    next.request_limit = Duration::from_secs(2);
    let next = eventually(async || near.acquire(&next).await).await;
    let next = next.unwrap().unwrap();
    assert!(hold.validity().is_ended(), "two hold a");
    assert!(hold.token() < next.token());
}

/// Redlock's nodes must be independent servers.
#[test]
fn a_master_behind_sentinels_is_no_node_of_redlock() {
    let sentinel = "redis+sentinel://a,b/m";
    let error = failed(RedlockOptions::new([sentinel, "redis://b", "redis://c"]));
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("cannot be a node of Redlock"));
    let waiting = RedisOptions::new("redis://a").unwrap().with_replicas(1);
    let plain = |url| RedisOptions::new(url).unwrap();
    let error = failed(RedlockOptions::from_nodes([
        waiting,
        plain("redis://b"),
        plain("redis://c"),
    ]));
    assert_eq!(error.kind(), ErrorKind::Invalid);
}
