//! What only a cluster can show: slots that move, nodes that fail, maps that are old.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use leasehold_conformance::fixtures::redis_cluster::RedisCluster;
use leasehold_core::{Backend, ErrorKind, Locks, Moment, Result};
use leasehold_redis::{Redis, RedisOptions, RedlockOptions};
use redis::Value;
use redis::aio::MultiplexedConnection;
use support::*;
use tokio::runtime::Builder;

/// A node that is silent for so long is replaced.
const TIMEOUT: [&str; 2] = ["--cluster-node-timeout", "1500"];
/// A ttl of which a third is over soon.
const SHORT: Duration = Duration::from_secs(3);
/// Within a third of it: the rest is for a busy machine.
const A_THIRD: Duration = Duration::from_secs(11);

async fn cluster<const N: usize>(arguments: [&str; N]) -> RedisCluster {
    RedisCluster::start(arguments).await.unwrap()
}

async fn connect(cluster: &RedisCluster) -> Redis {
    Redis::connect(cluster.url()).await.unwrap()
}

/// A node as any other program sees it.
async fn node(cluster: &RedisCluster, node: usize) -> MultiplexedConnection {
    let url = format!("redis://127.0.0.1:{}", cluster.port(node));
    let client = redis::Client::open(url).unwrap();
    support::patient(&client).await.unwrap()
}

/// What a node answers.
async fn ask<T: redis::FromRedisValue>(cluster: &RedisCluster, at: usize, words: &[&str]) -> T {
    let mut cmd = redis::Cmd::new();
    for word in words {
        cmd.arg(word);
    }
    cmd.query_async(&mut node(cluster, at).await).await.unwrap()
}

/// The slot of a lock, and the node that has it.
async fn place(cluster: &RedisCluster, name: &str) -> (u16, usize) {
    let slot = cluster.slot(&format!("lock:{name}")).await.unwrap();
    (slot, cluster.owner(slot).await.unwrap())
}

/// The name of a lock that such a node has.
async fn name_at(cluster: &RedisCluster, wanted: impl Fn(usize) -> bool + Send + Sync) -> String {
    let mut number = 0;
    loop {
        let name = format!("b{number}");
        if wanted(place(cluster, &name).await.1) {
            return name;
        }
        number += 1;
    }
}

/// All keys of a slot at a node.
async fn keys(cluster: &RedisCluster, at: usize, slot: u16) -> Vec<String> {
    let mut cmd = redis::cmd("CLUSTER");
    cmd.arg("GETKEYSINSLOT").arg(slot).arg(10_000);
    cmd.query_async(&mut node(cluster, at).await).await.unwrap()
}

/// Waits until so many stand in the queue of a lock at a node.
async fn until_queued(cluster: &RedisCluster, at: usize, slot: u16, count: usize) {
    let mut raw = node(cluster, at).await;
    let queued = async {
        loop {
            let keys = keys(cluster, at, slot).await;
            let queue = keys.iter().find(|key| key.contains("leasehold:queue:"));
            let length: usize = match queue {
                // It may be gone by now, and be asked for elsewhere.
                Some(queue) => redis::cmd("ZCARD")
                    .arg(queue)
                    .query_async(&mut raw)
                    .await
                    .unwrap_or(0),
                None => 0,
            };
            if length == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(SOON, &format!("{count} in the queue"), queued).await;
}

/// A slot on its way from one node to another, as `redis-cli --cluster reshard` moves it.
struct Move<'a> {
    cluster: &'a RedisCluster,
    slot: u16,
    from: usize,
    to: usize,
}

impl<'a> Move<'a> {
    async fn begin(cluster: &'a RedisCluster, slot: u16, from: usize) -> Self {
        let to = (0..3).find(|node| *node != from).unwrap();
        let it = Self {
            cluster,
            slot,
            from,
            to,
        };
        let (source, target) = (it.id(from).await, it.id(to).await);
        it.set(to, &format!("IMPORTING {source}")).await;
        it.set(from, &format!("MIGRATING {target}")).await;
        it
    }

    async fn id(&self, node: usize) -> String {
        self.cluster.id(node).await.unwrap()
    }

    async fn set(&self, node: usize, what: &str) {
        let set = format!("CLUSTER SETSLOT {} {what}", self.slot);
        self.cluster.ask(node, &set).await.unwrap();
    }

    async fn take(&self, key: &str) {
        let mut cmd = redis::cmd("MIGRATE");
        let port = self.cluster.port(self.to);
        cmd.arg("127.0.0.1").arg(port).arg(key).arg(0).arg(5000);
        let mut from = node(self.cluster, self.from).await;
        cmd.query_async::<Value>(&mut from).await.unwrap();
    }

    async fn take_all(&self) {
        loop {
            let keys = keys(self.cluster, self.from, self.slot).await;
            if keys.is_empty() {
                return;
            }
            for key in keys {
                self.take(&key).await;
            }
        }
    }

    async fn end(&self) {
        let target = self.id(self.to).await;
        // The node that gets it first, as the manual says.
        for node in [self.to, self.from, 3 - self.to - self.from] {
            self.set(node, &format!("NODE {target}")).await;
        }
    }
}

/// Moves a whole slot away from a node; says to which.
async fn move_slot(cluster: &RedisCluster, slot: u16, from: usize) -> usize {
    let it = Move::begin(cluster, slot, from).await;
    it.take_all().await;
    it.end().await;
    it.to
}

/// Repeats what fails for a passing reason, as core does.
async fn eventually(mut attempt: impl AsyncFnMut() -> Result<()>) {
    let start = Moment::now();
    while let Err(e) = attempt().await {
        assert!(e.is_transient() && start.elapsed() < SOON, "{e}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Case 30: the client knows the slot of every name as the server does, so nothing is redirected; and
/// whatever a lock needs is in one slot.
#[tokio::test]
async fn every_name_is_found_at_once_and_all_its_keys_share_a_slot() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let odd = [
        "{order:42}",
        "a}b",
        "{}x",
        "{",
        "}",
        "}{",
        "{}",
        "{{a}}",
        "{a}{b}",
        " ",
        "\0",
        "\r\n",
        "Ω{é}",
        "leasehold:token:{1}",
        "leasehold:queue:{1}:x",
    ];
    let mut names: Vec<String> = odd.iter().map(ToString::to_string).collect();
    let random = fastrand::u64(..);
    println!("seed {random}");
    let mut random = fastrand::Rng::with_seed(random);
    let letters = ['a', 'b', '{', '}', ':', 'é', '\0'];
    for _ in 0..150 {
        let length = random.usize(1..12);
        names.push(
            (0..length)
                .map(|_| random.choice(letters).unwrap())
                .collect(),
        );
    }
    for name in &names {
        let mut hold = granted(&one, &claim(name, LONG)).await;
        let waiter = spawn(&other, waiting(name, LONG));
        // It is in the queue, or finds the lock free: both need all keys.
        tokio::task::yield_now().await;
        hold.release().await.unwrap();
        served(SOON, waiter).await.release().await.unwrap();
    }
    for at in 0..3 {
        let stats: String = redis::cmd("INFO")
            .arg("errorstats")
            .query_async(&mut node(&cluster, at).await)
            .await
            .unwrap();
        for wrong in ["MOVED", "CROSSSLOT", "ASK"] {
            assert!(!stats.contains(wrong), "{stats}");
        }
        let left: Vec<String> = redis::cmd("KEYS")
            .arg("*")
            .query_async(&mut node(&cluster, at).await)
            .await
            .unwrap();
        let left = left.iter().find(|key| {
            !key.starts_with("lock:leasehold:token:{") && !key.contains("leasehold:probe")
        });
        assert_eq!(left, None);
    }
}

/// Case 30: other data in the place of a lock, of its queue or of the counter of its slot is an error, and
/// is left alone.
#[tokio::test]
async fn other_data_in_the_place_of_a_lock_is_left_alone() {
    let cluster = cluster([]).await;
    let client = connect(&cluster).await;
    let (slot, at) = place(&cluster, "a").await;
    ask::<u8>(&cluster, at, &["RPUSH", "lock:a", "theirs"]).await;
    for claim in [claim("a", LONG), waiting("a", LONG)] {
        let error = failed(client.acquire(&claim).await);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        says(&error, "other data");
    }
    let error = failed(client.evict(&key("a"), None).await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    failed(client.holder(&key("a")).await);
    let list: Vec<String> = ask(&cluster, at, &["LRANGE", "lock:a", "0", "-1"]).await;
    assert_eq!(list, ["theirs"]);
    ask::<u8>(&cluster, at, &["DEL", "lock:a"]).await;

    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_queued(&cluster, at, slot, 1).await;
    let ours = keys(&cluster, at, slot).await;
    let ours = |what: &str| ours.iter().find(|key| key.contains(what)).unwrap().as_str();
    let (queue, counter) = (ours("leasehold:queue:"), ours("leasehold:token"));
    waiter.abort();
    until_queued(&cluster, at, slot, 0).await;
    ask::<Value>(&cluster, at, &["SET", queue, "theirs"]).await;
    let error = failed(client.acquire(&waiting("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert_eq!(ask::<String>(&cluster, at, &["GET", queue]).await, "theirs");
    ask::<u8>(&cluster, at, &["DEL", queue]).await;
    hold.release().await.unwrap();
    ask::<Value>(&cluster, at, &["SET", counter, "theirs"]).await;
    let error = failed(client.acquire(&claim("a", LONG)).await);
    says(&error, "leasehold:token");
    assert_eq!(
        ask::<String>(&cluster, at, &["GET", counter]).await,
        "theirs"
    );
}

/// Any program that locks with `SET … NX PX` excludes us, and we exclude it, braces or not.
#[tokio::test]
async fn the_lock_is_called_as_other_programs_call_it() {
    let cluster = cluster([]).await;
    let client = connect(&cluster).await;
    for name in ["{order:42}", "a}b", "{}x"] {
        let (_, at) = place(&cluster, name).await;
        let mut raw = node(&cluster, at).await;
        let mut set = redis::cmd("SET");
        set.arg(format!("lock:{name}"))
            .arg("theirs")
            .arg("NX")
            .arg("PX")
            .arg(60_000);
        assert_eq!(
            set.query_async::<Value>(&mut raw).await.unwrap(),
            Value::Okay
        );
        assert!(is_taken(&client, name).await);
        let lock = format!("lock:{name}");
        assert_eq!(ask::<u8>(&cluster, at, &["DEL", &lock]).await, 1);
        let _hold = granted(&client, &claim(name, LONG)).await;
        assert_eq!(
            set.query_async::<Value>(&mut raw).await.unwrap(),
            Value::Nil
        );
    }
}

/// Case 55: the slot migrates while the lock is held and waited for. As long as all keys are here the
/// hand-off works; once they are apart, renewals and the release do, and whoever waits gets it when the
/// slot has arrived.
#[tokio::test]
async fn a_lock_whose_slot_migrates_is_renewed_freed_and_handed_on() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, from) = place(&cluster, "a").await;
    let mut first = granted(&one, &claim("a", LONG)).await;
    let second = spawn(&other, waiting("a", SHORT));
    until_queued(&cluster, from, slot, 1).await;
    let third = spawn(&one, waiting("a", SHORT));
    until_queued(&cluster, from, slot, 2).await;

    let moving = Move::begin(&cluster, slot, from).await;
    first.renew().await.unwrap();
    first.release().await.unwrap();
    let mut second = served(SOON, second).await;
    assert!(first.token() < second.token());

    moving.take("lock:a").await;
    second.renew().await.unwrap();
    let holder = one.holder(&key("a")).await.unwrap().unwrap();
    assert_eq!(holder.token, Some(second.token()));
    second.release().await.unwrap();
    assert_eq!(failed(second.release().await).kind(), ErrorKind::Lost);
    assert!(one.holder(&key("a")).await.unwrap().is_none());

    moving.take_all().await;
    moving.end().await;
    let third = served(A_THIRD, third).await;
    assert!(second.token() < third.token());
    assert!(is_taken(&other, "a").await);
}

/// Locks on all nodes, one of them waited for, and one whose slot is just moving.
#[tokio::test]
async fn a_list_has_the_locks_of_all_nodes() {
    let cluster = cluster([]).await;
    let client = connect(&cluster).await;
    let names: Vec<_> = (0..50).map(|number| format!("n{number}")).collect();
    let mut held = Vec::new();
    for name in &names {
        held.push(granted(&client, &claim(name, LONG)).await);
    }
    let (slot, from) = place(&cluster, "n7").await;
    let _waiter = spawn(&client, waiting("n7", LONG));
    until_queued(&cluster, from, slot, 1).await;
    let check = async |waiting| {
        let listed = list(&client, "n").await;
        for (name, hold) in names.iter().zip(&held) {
            let key = key(name);
            let found = listed.iter().find(|it| it.key.as_ref() == Some(&key));
            let found = found.unwrap_or_else(|| panic!("{name} is not listed"));
            let holder = found.holder.as_ref().unwrap();
            assert_eq!(holder.token, Some(hold.token()), "{name}");
            let others = Some(0);
            let waits = if name == "n7" { waiting } else { others };
            assert_eq!(found.waiting, waits, "{name}");
        }
        listed.len()
    };
    assert_eq!(check(Some(1)).await, 50);
    let moving = Move::begin(&cluster, slot, from).await;
    moving.take("lock:n7").await;
    // Its queue is elsewhere, so that no script may use both.
    check(None).await;
    moving.take_all().await;
    moving.end().await;
    check(Some(1)).await;
}

/// A claim that may wait does so while its slot migrates, though nobody can be queued, and is served when
/// the slot has arrived. If its wait is over before that, it hears why.
#[tokio::test]
async fn a_claim_that_may_wait_is_served_when_its_slot_has_arrived() {
    const WAIT: Duration = Duration::from_secs(3);
    let cluster = cluster([]).await;
    let client = connect(&cluster).await;
    let (slot, from) = place(&cluster, "a").await;
    let moving = Move::begin(&cluster, slot, from).await;
    let patient = spawn(&client, waiting("a", LONG));
    let begun = Moment::now();
    let mut limited = waiting("a", LONG);
    limited.wait = Some(WAIT);
    let limited = spawn(&client, limited);
    let mut raw = raw_at(cluster.port(moving.to)).await;
    until("it was told to try again", async || {
        let errors: String = raw.get("INFO errorstats").await;
        errors.contains("errorstat_TRYAGAIN")
    })
    .await;
    // Tries come to an end: they begin later, and are as patient as one request of those who wait.
    for _ in 0..2 {
        let error = failed(client.acquire(&claim("a", LONG)).await);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        says(&error, "slot");
    }
    let error = failed(within(SOON, "its wait is over", limited).await.unwrap());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "slot");
    assert!(begun.elapsed() >= WAIT);
    assert!(!patient.is_finished());
    moving.take_all().await;
    moving.end().await;
    served(SOON, patient).await.release().await.unwrap();
    assert!(!is_taken(&client, "a").await);
}

/// A waiter that gives up while the keys of its lock are apart leaves the queue all the same, and a
/// claim that comes meanwhile is told to come again.
#[tokio::test]
async fn while_a_slot_migrates_waiters_leave_and_new_claims_are_unavailable() {
    let cluster = cluster([]).await;
    let client = connect(&cluster).await;
    let (slot, from) = place(&cluster, "a").await;
    let _hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    until_queued(&cluster, from, slot, 1).await;
    let moving = Move::begin(&cluster, slot, from).await;
    moving.take("lock:a").await;
    let error = failed(client.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "slot");
    waiter.abort();
    until_queued(&cluster, from, slot, 0).await;
    moving.take_all().await;
    moving.end().await;
    assert!(is_taken(&client, "a").await);
}

/// Waits until whoever has this place in the queue listens at the node.
async fn until_listening(cluster: &RedisCluster, at: usize, slot: u16, place: usize) {
    let mut raw = node(cluster, at).await;
    let listening = async {
        loop {
            let queue = keys(cluster, at, slot).await;
            let queue = queue.iter().find(|key| key.contains("leasehold:queue:"));
            let entries: Vec<String> = redis::cmd("ZRANGE")
                .arg(queue)
                .arg(0)
                .arg(-1)
                .query_async(&mut raw)
                .await
                .unwrap();
            let inbox = entries[place].split(' ').nth(4).unwrap();
            let open: (String, usize) = redis::cmd("PUBSUB")
                .arg("NUMSUB")
                .arg(format!("lock:leasehold:inbox:{inbox}"))
                .query_async(&mut raw)
                .await
                .unwrap();
            if open.1 == 1 {
                break;
            }
        }
    };
    within(SOON, "its inbox is at the node", listening).await;
}

/// Case 50: the slot has moved, and the first waiter's client, which stands still, has its inbox at the
/// node before. It is passed over, the one behind it is told, and the first keeps its ticket: when it is
/// back it stands before those who came later.
#[test]
fn a_waiter_whose_inbox_is_at_another_node_keeps_its_place() {
    let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
    let still = Builder::new_current_thread().enable_all().build().unwrap();
    let cluster = runtime.block_on(cluster([]));
    let (holder, other) =
        runtime.block_on(async { (connect(&cluster).await, connect(&cluster).await) });
    let (slot, from) = runtime.block_on(place(&cluster, "a"));
    let mut hold = runtime.block_on(granted(&holder, &claim("a", LONG)));
    let stopped = still.block_on(connect(&cluster));
    let first = {
        let _entered = still.enter();
        spawn(&stopped, waiting("a", LONG))
    };
    // Its runtime runs until it stands in the queue, and then no more.
    still.block_on(until_queued(&cluster, from, slot, 1));
    let (mut second, third, to) = runtime.block_on(async {
        let second = spawn(&other, waiting("a", LONG));
        until_queued(&cluster, from, slot, 2).await;
        let to = move_slot(&cluster, slot, from).await;
        // Whatever its client asks shows that the slot has moved, and the second goes after it.
        assert!(is_taken(&other, "a").await);
        until_listening(&cluster, to, slot, 1).await;
        hold.release().await.unwrap();
        let second = served(SOON, second).await;
        assert!(hold.token() < second.token());
        // Somebody queues while the first is away.
        let third = spawn(&other, waiting("a", LONG));
        until_queued(&cluster, to, slot, 1).await;
        (second, third, to)
    });
    still.block_on(async {
        assert!(is_taken(&stopped, "a").await);
        until_queued(&cluster, to, slot, 2).await;
    });
    runtime.block_on(second.release()).unwrap();
    // Had it been told before, it would come back with that grant.
    let mut first = still.block_on(served(SOON, first));
    assert!(second.token() < first.token());
    assert!(!third.is_finished());
    still.block_on(first.release()).unwrap();
    runtime.block_on(served(SOON, third));
}

/// The slot moves, and the waiter comes after it with its ticket before the lock is released.
#[tokio::test]
async fn a_waiter_follows_its_slot_with_its_ticket() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, from) = place(&cluster, "a").await;
    let mut hold = granted(&one, &claim("a", LONG)).await;
    let first = spawn(&other, waiting("a", LONG));
    until_queued(&cluster, from, slot, 1).await;
    let second = spawn(&one, waiting("a", LONG));
    until_queued(&cluster, from, slot, 2).await;
    let to = move_slot(&cluster, slot, from).await;
    // Whatever its client asks shows that the slot has moved, and the waiter goes after it.
    assert!(is_taken(&other, "a").await);
    until_listening(&cluster, to, slot, 0).await;
    hold.release().await.unwrap();
    // By a message: it would ask by itself after 40 s.
    let mut first = served(SOON, first).await;
    assert!(!second.is_finished());
    assert!(hold.token() < first.token());
    first.release().await.unwrap();
    served(SOON, second).await;
}

/// The same without any hint: it finds out when it asks again.
#[tokio::test]
async fn a_waiter_that_hears_of_nothing_finds_its_slot_within_a_third_of_its_ttl() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, from) = place(&cluster, "a").await;
    let mut hold = granted(&one, &claim("a", LONG)).await;
    let waiter = spawn(&other, waiting("a", SHORT));
    until_queued(&cluster, from, slot, 1).await;
    move_slot(&cluster, slot, from).await;
    hold.release().await.unwrap();
    served(A_THIRD, waiter).await;
}

/// A client whose map is old is redirected, under the same claim; so it excludes others and is excluded.
#[tokio::test]
async fn an_old_map_does_no_harm() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, from) = place(&cluster, "a").await;
    let mut hold = granted(&one, &claim("a", LONG)).await;
    move_slot(&cluster, slot, from).await;
    assert!(is_taken(&other, "a").await);
    hold.renew().await.unwrap();
    // Taken away at the new node, told at the old one, where the holder still listens.
    assert!(other.evict(&key("a"), None).await.unwrap());
    within(SOON, "the holder hears of it", hold.validity().ended()).await;
    let mut next = granted(&other, &claim("a", LONG)).await;
    assert_eq!(failed(hold.release().await).kind(), ErrorKind::Lost);
    next.renew().await.unwrap();
    next.release().await.unwrap();
}

/// Slots move back and forth under load: nobody holds together with another, no token falls, and no
/// error but a passing one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resharding_under_load_gives_nothing_away() {
    const NAMES: usize = 6;
    struct Resource {
        taken: AtomicBool,
        token: AtomicU64,
        uses: AtomicU64,
    }
    let cluster = cluster([]).await;
    let resources: Arc<Vec<Resource>> = Arc::new(
        (0..NAMES)
            .map(|_| Resource {
                taken: AtomicBool::new(false),
                token: AtomicU64::new(0),
                uses: AtomicU64::new(0),
            })
            .collect(),
    );
    let over = Arc::new(AtomicBool::new(false));
    let mut workers = Vec::new();
    for client in 0..3 {
        let locks = Locks::new(connect(&cluster).await)
            .with_ttl(Duration::from_secs(20))
            .with_wait(SOON);
        for worker in 0..3 {
            let (locks, resources, over) = (locks.clone(), resources.clone(), over.clone());
            workers.push(tokio::spawn(async move {
                let mut number: usize = client + worker;
                while !over.load(Ordering::Relaxed) {
                    number = (number * 5 + 1) % NAMES;
                    let resource = &resources[number];
                    let guard = match locks.lock(format!("r{number}")).await {
                        Ok(guard) => guard,
                        Err(e) => {
                            assert!(e.is_transient() || e.kind() == ErrorKind::Timeout, "{e}");
                            continue;
                        }
                    };
                    assert!(!resource.taken.swap(true, Ordering::SeqCst), "two hold it");
                    let before = resource.token.swap(guard.token().get(), Ordering::SeqCst);
                    assert!(before < guard.token().get(), "a token that does not rise");
                    tokio::task::yield_now().await;
                    resource.uses.fetch_add(1, Ordering::Relaxed);
                    resource.taken.store(false, Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            }));
        }
    }
    for _round in 0..4 {
        for number in 0..NAMES {
            let uses = resources[number].uses.load(Ordering::Relaxed);
            let (slot, from) = place(&cluster, &format!("r{number}")).await;
            move_slot(&cluster, slot, from).await;
            let goes_on = async {
                while resources[number].uses.load(Ordering::Relaxed) == uses {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            within(SOON, "the lock goes on where it is now", goes_on).await;
        }
    }
    over.store(true, Ordering::Relaxed);
    for worker in workers {
        within(2 * SOON, "a worker ends", worker).await.unwrap();
    }
}

/// A master is killed while its lock is held and waited for: the replica has the lock, which is proven
/// and not assumed, and the queue. Cases 20, 27: tokens go on rising, though the counter were lost.
#[tokio::test]
async fn a_killed_master_is_followed_to_its_replica() {
    let cluster = cluster(TIMEOUT).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, master) = place(&cluster, "a").await;
    let mut hold = granted(&one, &claim("a", LONG)).await;
    let waiter = spawn(&other, waiting("a", LONG));
    until_queued(&cluster, master, slot, 1).await;
    let copied = cluster.ask(master, "WAIT 1 20000").await.unwrap();
    assert_eq!(copied, "1");
    cluster.process(master).kill();

    eventually(async || hold.renew().await).await;
    let replica = master + 3;
    cluster.until_owner(slot, replica).await.unwrap();
    let token = keys(&cluster, replica, slot).await;
    let token = token
        .iter()
        .find(|key| key.contains("leasehold:token"))
        .unwrap();
    assert_eq!(ask::<u8>(&cluster, replica, &["DEL", token]).await, 1);
    assert!(!waiter.is_finished());
    // A waiter that is not yet back is passed over; and one that is back is told.
    eventually(async || hold.release().await).await;
    let mut next = served(Duration::from_secs(45), waiter).await;
    assert!(hold.token() < next.token());
    next.release().await.unwrap();

    // A lock that the new master does not have is lost, whatever its holder thinks.
    let mut lost = granted(&one, &claim("a", LONG)).await;
    assert_eq!(ask::<u8>(&cluster, replica, &["DEL", "lock:a"]).await, 1);
    assert_eq!(failed(lost.renew().await).kind(), ErrorKind::Lost);
    assert!(lost.validity().is_ended());

    // The old one comes back as a replica, and nobody takes it for more.
    cluster.start_again(master).await.unwrap();
    cluster.until_owner(slot, replica).await.unwrap();
    let mut last = granted(&other, &claim("a", LONG)).await;
    assert!(next.token() < last.token());
    last.renew().await.unwrap();
}

/// Cases 20, 27: the counter of a slot is a little behind, as on a replica that lacks the last grants, and
/// a client that knows the node for long and has seen none of them asks.
#[tokio::test]
async fn a_counter_that_is_behind_makes_no_token_fall() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, at) = place(&cluster, "a").await;
    granted(&other, &claim("a", LONG))
        .await
        .release()
        .await
        .unwrap();
    let mut last = granted(&one, &claim("a", LONG)).await;
    last.release().await.unwrap();
    let keys = keys(&cluster, at, slot).await;
    let counter = keys
        .iter()
        .find(|key| key.contains("leasehold:token"))
        .unwrap();
    let behind = (last.token().get() - 1).to_string();
    ask::<Value>(&cluster, at, &["SET", counter, &behind]).await;
    let next = granted(&other, &claim("a", LONG)).await;
    assert!(last.token() < next.token());
}

/// While one shard is without master, the locks of the others go on as if nothing were.
#[tokio::test]
async fn the_locks_of_other_shards_go_on_while_one_has_failed() {
    let arguments = [
        TIMEOUT[0],
        TIMEOUT[1],
        "--cluster-require-full-coverage",
        "no",
    ];
    let cluster = cluster(arguments).await;
    let client = connect(&cluster).await;
    let (_, failing) = place(&cluster, "a").await;
    let beside = name_at(&cluster, |node| node != failing).await;
    let _ours = granted(&client, &claim("a", LONG)).await;
    let mut hold = granted(&client, &claim(&beside, LONG)).await;
    // Nobody is left to take its place.
    cluster.process(failing + 3).kill();
    cluster.process(failing).kill();
    let error = failed(client.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for _ in 0..20 {
        hold.renew().await.unwrap();
        hold.release().await.unwrap();
        hold = granted(&client, &claim(&beside, LONG)).await;
    }
    let error = failed(client.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// An operator makes the replica the master: nothing is lost, and whoever waits is served there.
#[tokio::test]
async fn a_planned_failover_loses_nothing() {
    let cluster = cluster(TIMEOUT).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, master) = place(&cluster, "a").await;
    let mut hold = granted(&one, &claim("a", LONG)).await;
    let waiter = spawn(&other, waiting("a", SHORT));
    until_queued(&cluster, master, slot, 1).await;
    cluster.ask(master + 3, "CLUSTER FAILOVER").await.unwrap();
    cluster.until_owner(slot, master + 3).await.unwrap();
    eventually(async || hold.renew().await).await;
    eventually(async || hold.release().await).await;
    let next = served(A_THIRD, waiter).await;
    assert!(hold.token() < next.token());
}

/// Case 56: the replica of the lock's node must have it, and is asked wherever the slot is.
#[tokio::test]
async fn replicas_of_the_locks_node_confirm_it() {
    let cluster = cluster(["--cluster-node-timeout", "30000"]).await;
    let options = RedisOptions::new(cluster.url()).unwrap().with_replicas(1);
    let client = Redis::connect_with(options).await.unwrap();
    let (slot, from) = place(&cluster, "a").await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let to = move_slot(&cluster, slot, from).await;
    eventually(async || hold.renew().await).await;
    cluster.process(to + 3).pause().unwrap();
    let short = |name| {
        let mut claim = waiting(name, LONG);
        claim.request_limit = Duration::from_millis(500);
        claim
    };
    let waiter = spawn(&client, short("a"));
    until_queued(&cluster, to, slot, 1).await;
    // Granted, but not confirmed.
    let beside = name_at(&cluster, |node| node == to).await;
    let error = failed(client.acquire(&short(&beside)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "replicas");
    // Handed over, and not confirmed: it waits on.
    let mut raw = raw_at(cluster.port(to)).await;
    raw.run("CONFIG RESETSTAT").await;
    hold.release().await.unwrap();
    until("it was to be confirmed again and again", async || {
        raw.script_calls().await >= 10
    })
    .await;
    assert!(!waiter.is_finished());
    cluster.process(to + 3).resume().unwrap();
    let next = served(SOON, waiter).await;
    assert!(hold.token() < next.token());
}

/// Cases 6 and 7 at each node: scripts are forgotten, connections are cut.
#[tokio::test]
async fn forgotten_scripts_and_cut_connections_are_made_good() {
    let cluster = cluster([]).await;
    let (one, other) = (connect(&cluster).await, connect(&cluster).await);
    let (slot, at) = place(&cluster, "a").await;
    let mut hold = granted(&one, &claim("a", LONG)).await;
    for _ in 0..5 {
        let waiter = spawn(&other, waiting("a", LONG));
        until_queued(&cluster, at, slot, 1).await;
        cluster.ask(at, "SCRIPT FLUSH").await.unwrap();
        cluster.ask(at, "CLIENT KILL TYPE pubsub").await.unwrap();
        eventually(async || hold.release().await).await;
        hold = served(SOON, waiter).await;
    }
}

/// Clients listen at nodes, not at the cluster: whoever waits with the inbox of one is not taken for
/// alive at another, though messages cross.
#[tokio::test]
async fn closing_ends_the_connections_to_all_nodes() {
    let cluster = cluster([]).await;
    let client = connect(&cluster).await;
    let mut holds = Vec::new();
    for number in 0..20 {
        holds.push(granted(&client, &claim(&format!("n{number}"), LONG)).await);
    }
    let listening = async || {
        let mut listening = 0;
        for at in 0..3 {
            let clients = cluster.ask(at, "CLIENT LIST TYPE pubsub").await.unwrap();
            listening += usize::from(clients.contains("id="));
        }
        listening
    };
    assert_eq!(listening().await, 3);
    drop(holds);
    client.close().await.unwrap();
    let error = failed(client.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Closed);
    let gone = async { while listening().await > 0 {} };
    within(SOON, "its connections are closed", gone).await;
}

#[tokio::test]
async fn a_slot_that_no_node_has_is_named() {
    let cluster = cluster(["--cluster-require-full-coverage", "no"]).await;
    let client = connect(&cluster).await;
    let (slot, _) = place(&cluster, "a").await;
    for at in 0..6 {
        // A replica cannot be told; its master does.
        drop(cluster.ask(at, &format!("CLUSTER DELSLOTS {slot}")).await);
    }
    let error = failed(client.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "slot");
    // A client that comes now serves the others as well.
    let late = connect(&cluster).await;
    let error = failed(late.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "slot");
    let mut other = granted(&late, &claim("b", LONG)).await;
    assert!(is_taken(&client, "b").await);
    other.release().await.unwrap();
}

#[tokio::test]
async fn what_is_no_cluster_is_refused_with_what_to_do() {
    let single = server([]).await;
    let url = format!("redis+cluster://127.0.0.1:{}", single.port());
    let error = failed(Redis::connect(url).await);
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    says(&error, "redis://");

    // By itself it would take a port for the other nodes that nobody has reserved.
    let bus = ["--cluster-port", "{tls_port}"];
    let unmade = server(["--cluster-enabled", "yes", bus[0], bus[1]]).await;
    let url = format!("redis+cluster://127.0.0.1:{}", unmade.port());
    let error = failed(Redis::connect(url).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "--cluster create");

    single.process().kill();
    unmade.process().kill();
    let nodes = [single.port(), unmade.port()].map(|port| format!("redis://127.0.0.1:{port}"));
    let options = RedisOptions::cluster(nodes).unwrap();
    let error = failed(Redis::connect_with(options).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// One node that answers is enough, whichever it is.
#[tokio::test]
async fn the_others_are_found_by_one() {
    let cluster = cluster([]).await;
    let gone = server([]).await;
    gone.process().kill();
    let url = format!(
        "redis+cluster://127.0.0.1:{},127.0.0.1:{}/",
        gone.port(),
        cluster.port(5)
    );
    let client = Redis::connect(url).await.unwrap();
    for number in 0..10 {
        granted(&client, &claim(&format!("n{number}"), LONG)).await;
    }
    let examination = client.examine(LONG).await.unwrap();
    assert_eq!(examination.servers.len(), 3);
}

#[test]
fn urls_of_clusters_are_read_and_malformed_ones_refused() {
    for url in [
        "redis+cluster://one",
        "redis+cluster://one:7000,two:7001,[::1]:7002/",
        "rediss+cluster://user:secret@one,two",
        "valkey+cluster://:secret@one/0",
    ] {
        let options = RedisOptions::new(url).unwrap();
        assert!(!format!("{options:?}").contains("secret"), "{options:?}");
    }
    for url in [
        "redis+cluster://",
        "redis+cluster://one,,two",
        "redis+cluster://one,two/1",
        "redis+cluster://one,two?x=1",
        "redis+cluster://user:sec#ret@one,two",
        "redis+cluster://user:secret@one,user:secret@two:0x1",
        "unix+cluster:///run/redis.sock",
        "redis+cluster+cluster://one",
    ] {
        let error = failed(RedisOptions::new(url));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
    }
    for urls in [
        &[][..],
        &["redis://one", "rediss://two"],
        &["redis://a:b@one", "redis://a:c@two"],
        &["redis://one", "redis://a:b@two"],
    ] {
        let error = failed(RedisOptions::cluster(urls));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{urls:?}: {error}");
    }
    let nodes = ["redis://a", "redis+cluster://b", "redis://c"];
    let error = failed(RedlockOptions::new(nodes));
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test]
async fn a_prefix_that_would_part_a_lock_from_its_queue_is_refused() {
    let options = RedisOptions::new("redis+cluster://127.0.0.1:1").unwrap();
    let error = failed(Redis::connect_with(options.with_prefix("{}lock:")).await);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");

    let cluster = cluster([]).await;
    let options = RedisOptions::new(cluster.url()).unwrap();
    let client = Redis::connect_with(options.with_prefix("{shop}:"))
        .await
        .unwrap();
    let mut hold = granted(&client, &claim("a{b", LONG)).await;
    let waiter = spawn(&client, waiting("a{b", LONG));
    let slot = cluster.slot("{shop}:a").await.unwrap();
    until_queued(&cluster, cluster.owner(slot).await.unwrap(), slot, 1).await;
    hold.release().await.unwrap();
    served(SOON, waiter).await;
}

/// Rights are tried on every master, wherever the locks will be; one that is down keeps nobody from
/// connecting.
#[tokio::test]
async fn a_right_that_one_master_lacks_is_found_when_connecting() {
    let cluster = cluster(["--cluster-require-full-coverage", "no"]).await;
    for at in 0..6 {
        let user = "ACL SETUSER locks on >secret ~* &* +@all";
        cluster.ask(at, user).await.unwrap();
    }
    let url = cluster.url().replace("://", "://locks:secret@");
    for at in 0..3 {
        let set = async |rule: &str| {
            let set = format!("ACL SETUSER locks {rule}");
            cluster.ask(at, &set).await.unwrap();
        };
        set("-zpopmin").await;
        let error = failed(Redis::connect(&url).await);
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
        says(&error, "+zpopmin");
        says(&error, &cluster.port(at).to_string());
        set("+zpopmin").await;
    }
    let (_, failing) = place(&cluster, "a").await;
    // Nobody is left to take its place.
    cluster.process(failing + 3).kill();
    cluster.process(failing).kill();
    let client = Redis::connect(&url).await.unwrap();
    let error = failed(client.acquire(&claim("a", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// Case 30: a user who may do what the README lists and nothing else, on keys and channels of the prefix.
#[tokio::test]
async fn a_user_limited_to_the_prefix_has_all_rights_that_are_needed() {
    let cluster = cluster([]).await;
    let readme = include_str!("../README.md");
    let rule = readme.split("ACL SETUSER locks ").nth(1).unwrap();
    let rule = rule.split("```").next().unwrap();
    let rule: Vec<&str> = rule.split_whitespace().collect();
    let set = async |rule: &str| {
        for at in 0..6 {
            cluster
                .ask(at, &format!("ACL SETUSER locks {rule}"))
                .await
                .unwrap();
        }
    };
    set(&format!("{} +cluster|slots +asking", rule.join(" "))).await;
    let url = cluster.url().replace("://", "://locks:secret@");
    let client = Redis::connect(&url).await.unwrap();
    let (slot, from) = place(&cluster, "a").await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", SHORT));
    until_queued(&cluster, from, slot, 1).await;
    let moving = Move::begin(&cluster, slot, from).await;
    moving.take("lock:a").await;
    hold.renew().await.unwrap();
    hold.release().await.unwrap();
    moving.take_all().await;
    moving.end().await;
    let next = served(A_THIRD, waiter).await;
    assert!(client.evict(&key("a"), None).await.unwrap());
    within(SOON, "the holder hears of it", next.validity().ended()).await;
    for at in 0..3 {
        let log: Vec<Value> = ask(&cluster, at, &["ACL", "LOG"]).await;
        assert!(log.is_empty(), "refused: {log:?}");
    }

    for (without, right) in [("-cluster|slots", "+cluster|slots"), ("-asking", "+asking")] {
        set(without).await;
        let error = failed(Redis::connect(&url).await);
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
        says(&error, right);
        assert!(!error.to_string().contains("secret"), "{error}");
        set(right).await;
    }
}
