//! What breaks underneath a Redlock: its nodes' memory, data, connections, scripts.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use leasehold_conformance::fixtures::redis::RedisServer;
use std::time::Duration;

use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend, ErrorKind, Locks, Moment};
use leasehold_redis::{Redlock, RedlockOptions};
use support::*;
use tokio::runtime::Builder;

async fn on_each(raws: &mut [Raw], words: &str) {
    for raw in raws {
        raw.run(words).await;
    }
}

/// Waits until so many clients wait to hear of releases of the lock `name`, on every node.
async fn until_waiting(raws: &mut [Raw], name: &str, clients: u64) {
    for raw in raws {
        let numsub = format!("PUBSUB NUMSUB lock:leasehold:freed:{name}");
        until("the waiters listen", async || {
            raw.get::<(String, u64)>(&numsub).await.1 == clients
        })
        .await;
    }
}

/// Case 6: the nodes forget the scripts between acquire, renewal and release.
#[tokio::test]
async fn forgotten_scripts_are_loaded_again_unseen() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    on_each(&mut raws, "SCRIPT FLUSH").await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    on_each(&mut raws, "SCRIPT FLUSH").await;
    hold.renew().await.unwrap();
    let waiter = spawn(&client, waiting("a", LONG));
    until_waiting(&mut raws, "a", 1).await;
    on_each(&mut raws, "SCRIPT FLUSH").await;
    hold.release().await.unwrap();
    let hold = served(SOON, waiter).await;
    on_each(&mut raws, "SCRIPT FLUSH").await;
    let holder = client.holder(&key("a")).await.unwrap();
    assert_eq!(holder.as_ref().unwrap().token, Some(hold.token()));
    on_each(&mut raws, "SCRIPT FLUSH").await;
    assert!(client.evict(&key("a"), holder.as_ref()).await.unwrap());
}

/// Case 6: all nodes are restarted at once, and none forgets anything: they vote at once, and for the
/// same holder.
#[tokio::test]
async fn a_restart_of_all_nodes_with_persistence_loses_nothing() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, ["--appendonly", "yes", "--appendfsync", "always"]).await;
    let options = RedlockOptions::new(urls(&servers)).unwrap();
    // The guard is on: had they forgotten anything, they would not vote for longer than this test.
    let options = options.with_max_ttl(LONG).with_node_timeout(SOON);
    // They are new, too, and would not vote yet.
    let seeding = redlock(redlock_options(&servers)).await;
    granted(&seeding, &claim("b", LONG))
        .await
        .release()
        .await
        .unwrap();
    let client = redlock(options.clone()).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    until_voted(&servers, "a").await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_waiting(&mut raws(&servers).await, "a", 1).await;
    for server in &servers {
        server.restart().await.unwrap();
    }
    eventually(async || hold.renew().await).await;
    assert!(is_taken(&redlock(options).await, "a").await);
    hold.release().await.unwrap();
    let next = served(SOON, waiter).await;
    assert!(next.token() > hold.token());
}

/// Case 6: without persistence, a minority is not missed, and a majority takes the lock with it; that
/// is said, and waiters get it.
#[tokio::test]
async fn a_restart_without_persistence_of_a_majority_loses_the_lock_and_says_so() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    until_voted(&servers, "a").await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_waiting(&mut raws(&servers).await, "a", 1).await;
    servers[0].restart().await.unwrap();
    eventually(async || hold.renew().await).await;
    assert!(is_taken(&client, "a").await);
    servers[1].restart().await.unwrap();
    let next = served(SOON, waiter).await;
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert!(hold.validity().is_ended());
    assert!(hold.token() < next.token());
}

#[tokio::test]
async fn flushall_on_a_majority_loses_the_lock_and_on_a_minority_does_not() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    until_voted(&servers, "a").await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_waiting(&mut raws, "a", 1).await;
    on_each(&mut raws[..1], "FLUSHALL").await;
    hold.renew().await.unwrap();
    assert!(is_taken(&client, "a").await);
    on_each(&mut raws[1..2], "FLUSHALL").await;
    let next = served(SOON, waiter).await;
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert!(hold.token() < next.token());
}

/// Case 7: the waiter's connections to all nodes, and with them its ears, are cut before the holder
/// releases.
#[tokio::test]
async fn a_waiter_whose_connections_were_cut_is_served() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let other = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    for _round in 0..10 {
        let mut hold = granted(&other, &claim("a", LONG)).await;
        let waiter = spawn(&client, waiting("a", LONG));
        until_waiting(&mut raws, "a", 1).await;
        on_each(&mut raws, "CLIENT KILL TYPE pubsub").await;
        // The holder's connections were cut as well; a first attempt may not get through.
        eventually(async || hold.release().await).await;
        let mut next = served(SOON, waiter).await;
        assert!(hold.token() < next.token());
        eventually(async || next.release().await).await;
        until("it is free", async || {
            let tried = other.acquire(&claim("a", LONG)).await;
            match tried {
                Ok(Some(mut hold)) => hold.release().await.is_ok(),
                Ok(None) => false,
                Err(e) => {
                    assert!(e.is_transient(), "{e}");
                    false
                }
            }
        })
        .await;
    }
}

#[tokio::test]
async fn paused_nodes_lose_nothing_that_lasts_longer() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_waiting(&mut raws, "a", 1).await;
    on_each(&mut raws, "CLIENT PAUSE 1000 ALL").await;
    hold.renew().await.unwrap();
    hold.release().await.unwrap();
    served(SOON, waiter).await;
}

/// Case 54: `maxmemory` is reached and nothing may be thrown away: a minority of such nodes is not
/// missed, with a majority what is held is renewed and released, and nothing new is granted until there
/// is room again.
#[tokio::test]
async fn with_their_memory_full_renewals_work_and_new_locks_are_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    until_voted(&servers, "a").await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_waiting(&mut raws, "a", 1).await;
    on_each(&mut raws[..1], "CONFIG SET maxmemory 1").await;
    hold.renew().await.unwrap();
    granted(&client, &claim("b", LONG))
        .await
        .release()
        .await
        .unwrap();
    on_each(&mut raws[1..2], "CONFIG SET maxmemory 1").await;
    for claim in [claim("c", LONG), waiting("c", LONG)] {
        let error = failed(client.acquire(&claim).await);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("maxmemory"), "{error}");
    }
    hold.renew().await.unwrap();
    hold.release().await.unwrap();
    assert!(!waiter.is_finished());
    on_each(&mut raws, "CONFIG SET maxmemory 0").await;
    served(SOON, waiter).await.release().await.unwrap();
    // And of the refused ones nothing is left.
    until("it is free", async || !is_taken(&client, "c").await).await;
}

/// Nodes that may throw locks away are warned of, one by one, also when they come later.
#[tokio::test]
async fn evicting_nodes_are_warned_of() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let evicting = ["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"];
    let mut servers = servers(1, evicting).await;
    servers.push(server([]).await);
    servers.push(server(evicting).await);
    let warns_of = |warnings: &[String], index: usize| {
        let port = servers[index].port().to_string();
        let about = warnings.iter().filter(|line| line.contains(&port));
        about.count()
    };
    servers[2].process().kill();
    let (logs, _logging) = logs();
    let client = redlock(redlock_options(&servers)).await;
    let warnings = logs.take_warnings("maxmemory-policy");
    assert!(warnings.iter().all(|line| line.contains("volatile-lru")));
    assert_eq!([0, 1, 2].map(|it| warns_of(&warnings, it)), [1, 0, 0]);

    servers[2].start_again().await.unwrap();
    until("the third node is there", async || {
        drop(client.acquire(&claim("a", LONG)).await);
        warns_of(&logs.take_warnings("maxmemory-policy"), 2) == 1
    })
    .await;
}

/// Case 31: what a hand-off costs does not grow with those who wait in a client.
#[tokio::test]
async fn a_hand_off_costs_the_same_with_200_waiters() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    async fn calls_per_hand_off(waiters: u64) -> u64 {
        const HAND_OFFS: u64 = 10;
        let servers = servers(3, []).await;
        let client = redlock(redlock_options(&servers)).await;
        let other = redlock(redlock_options(&servers)).await;
        let mut raws = raws(&servers).await;
        let mut hold = granted(&client, &claim("a", LONG)).await;
        let (granted, mut grants) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..waiters {
            let client = if number % 2 == 0 { &client } else { &other };
            let (waiter, granted) = (spawn(client, waiting("a", LONG)), granted.clone());
            tokio::spawn(async move {
                let hold = waiter.await.unwrap().unwrap().unwrap();
                drop(granted.send(hold));
            });
        }
        until_waiting(&mut raws, "a", 2).await;
        on_each(&mut raws, "CONFIG RESETSTAT").await;
        for _ in 0..HAND_OFFS {
            hold.release().await.unwrap();
            hold = within(SOON, "the next is served", grants.recv())
                .await
                .unwrap();
            assert!(grants.try_recv().is_err(), "two hold it");
        }
        let mut calls = 0;
        for raw in &mut raws {
            calls += raw.script_calls().await;
        }
        calls / HAND_OFFS / 3
    }
    let (few, many) = (calls_per_hand_off(12).await, calls_per_hand_off(200).await);
    // One to free it, one each to ask, and a few more where the two clients meet; never one for each.
    assert!(many <= 5 * few.max(2), "{many} calls, {few} with few");
}

/// Case 51: fifty waiters of a client that is stopped, and an operator who listens to every channel,
/// do not hold up the living.
#[test]
fn stopped_waiters_and_an_operator_who_listens_do_not_hold_up_the_living() {
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    let servers = runtime.block_on(servers(3, []));
    let options = redlock_options(&servers);
    let mut operators = Vec::new();
    for server in &servers {
        let operator = redis::Client::open(server.url()).unwrap();
        let mut operator = runtime.block_on(operator.get_async_pubsub()).unwrap();
        runtime.block_on(operator.psubscribe("*")).unwrap();
        operators.push(operator);
    }
    let (mut hold, client, mut raws) = runtime.block_on(async {
        let client = redlock(options.clone()).await;
        let hold = granted(&client, &claim("a", LONG)).await;
        (hold, client, raws(&servers).await)
    });

    // Its only thread stops once they wait.
    let still = Builder::new_current_thread().enable_all().build().unwrap();
    let stopped = still.block_on(async {
        let stopped = redlock(options).await;
        for _ in 0..50 {
            drop(spawn(&stopped, waiting("a", LONG)));
        }
        until_waiting(&mut raws, "a", 1).await;
        stopped
    });
    runtime.block_on(async {
        let waiter = spawn(&client, waiting("a", LONG));
        until_waiting(&mut raws, "a", 2).await;
        hold.release().await.unwrap();
        served(SOON, waiter).await.release().await.unwrap();
    });
    drop((stopped, still, operators));
}

/// Case 52: a holder with a much shorter ttl than the waiter's dies.
#[tokio::test]
async fn a_waiter_wakes_after_a_holder_with_a_shorter_ttl_died() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let client = redlock(redlock_options(&servers)).await;
    let dead = granted(&client, &claim("a", Duration::from_millis(300))).await;
    let waiter = spawn(&client, waiting("a", LONG));
    drop(dead);
    served(SOON, waiter).await;
}

/// Case 53: a release is repeated because its answers were lost, after the same owner was granted the
/// lock again; case 4 and 20: the new hold is untouched, and its token higher.
#[tokio::test]
async fn a_repeated_release_leaves_the_same_owners_next_grant_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let mut proxies = Vec::new();
    for server in &servers {
        let address = format!("127.0.0.1:{}", server.port());
        proxies.push(Proxy::start(&address).await.unwrap());
    }
    let through = proxies
        .iter()
        .map(|proxy| format!("redis://{}", proxy.address()));
    let through = for_new(RedlockOptions::new(through).unwrap());
    let client = redlock(through).await;
    let direct = redlock(redlock_options(&servers)).await;
    let me = leasehold_core::OwnerId::new();

    let mut old = granted(&client, &owned(claim("a", LONG), &me)).await;
    proxies
        .iter()
        .for_each(|proxy| proxy.set(Flow::LoseReplies));
    let mut release = old.release();
    assert!(once(&mut release).await.is_none());
    until("the release gets through", async || {
        direct.holder(&key("a")).await.unwrap().is_none()
    })
    .await;
    drop(release);
    proxies.iter().for_each(|proxy| proxy.set(Flow::Pass));

    let mut new = granted(&direct, &owned(claim("a", LONG), &me)).await;
    assert!(old.token() < new.token());
    let start = Moment::now();
    let again = loop {
        match old.release().await {
            Err(e) if e.is_transient() && start.elapsed() < SOON => {}
            answer => break answer,
        }
    };
    assert_eq!(failed(again).kind(), ErrorKind::Lost);
    assert_eq!(failed(old.renew().await).kind(), ErrorKind::Lost);
    new.renew().await.unwrap();
    assert!(is_taken(&direct, "a").await);
}

/// Case 27: an owner's tokens through expiry, take-over and re-entry.
#[tokio::test]
async fn tokens_are_equal_on_reentry_and_rise_with_each_grant() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let ttl = Duration::from_secs(10);
    let locks = Locks::new(redlock(redlock_options(&servers)).await)
        .with_ttl(ttl)
        .with_wait(SOON);
    let me = locks.owner();
    let mut last = None;
    for _ in 0..20 {
        let guard = me.lock("a").await.unwrap();
        let again = me.lock("a").await.unwrap();
        assert_eq!(guard.token(), again.token());
        assert!(last < Some(guard.token()));
        last = Some(guard.token());
        guard.release().await.unwrap();
        again.release().await.unwrap();
    }
}

/// `LOADING`: nodes that read their data are as good as down, and votes are found in it again.
#[tokio::test]
async fn nodes_that_load_their_data_are_waited_for() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, SLOW_TO_LOAD).await;
    let client = redlock(redlock_options(&servers)).await;
    let mut raws = raws(&servers).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    for (server, raw) in servers[..2].iter().zip(&mut raws) {
        fill(raw).await;
        server.process().kill();
        server.process().start_again().await.unwrap();
    }
    for server in &servers[..2] {
        until_loading(server).await;
    }
    until("they say why", async || {
        let error = failed(client.acquire(&claim("b", LONG)).await);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        error.to_string().contains("loading")
    })
    .await;
    let error = failed(Redlock::connect_with(redlock_options(&servers)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("loading"), "{error}");
    for server in &servers[..2] {
        load_fast(server).await;
    }
    eventually(async || hold.renew().await).await;
    hold.release().await.unwrap();
}
