//! A first look at speed: the raw client and this backend, in turn in one run.
//!
//! `cargo run --release -p leasehold-etcd --example first_look -- localhost:2379` prints, as medians of
//! three rounds each: pairs of lock and unlock per second for 1 and 64 tasks with keys of their own over
//! one client, beside the raw client's transaction and deletion; and hand-offs per second of 16 clients
//! on one key, beside the same recipe by hand on the raw client.

use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{
    Client, Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn,
    TxnOp, TxnOpResponse, WatchOptions,
};
use leasehold_core::Locks;
use leasehold_etcd::Etcd;
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const ROUND: Duration = Duration::from_secs(2);
const ROUNDS: usize = 3;
const CLIENTS: usize = 16;

#[tokio::main]
async fn main() -> Outcome<()> {
    let endpoint = std::env::args().nth(1).unwrap_or("localhost:2379".into());
    for tasks in [1, 64] {
        let (mut floor, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            floor.push(raw(&endpoint, tasks).await?);
            ours.push(locks(&endpoint, tasks).await?);
        }
        report(
            &format!("free lock, {tasks} tasks, transaction and deletion"),
            floor,
            ours,
        );
    }
    let (mut floor, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        floor.push(raw_hand_offs(&endpoint).await?);
        ours.push(hand_offs(&endpoint).await?);
    }
    report(&format!("one key, {CLIENTS} clients, by hand"), floor, ours);
    Ok(())
}

fn report(what: &str, floor: Vec<f64>, ours: Vec<f64>) {
    let (floor, ours) = (median(floor), median(ours));
    println!(
        "{what}: {floor:.0}/s, ours: {ours:.0}/s ({:.2})",
        ours / floor
    );
}

async fn raw(endpoint: &str, tasks: usize) -> Outcome<f64> {
    let client = Client::connect([endpoint], None).await?;
    let lease = client.lease_client().grant(60, None).await?.id();
    let kv = client.kv_client();
    let per_second = pairs(tasks, move |task| {
        let mut kv = kv.clone();
        let key = format!("floor/{task}");
        async move {
            let free = Compare::create_revision(&*key, CompareOp::Equal, 0);
            let put = TxnOp::put(&*key, "held", Some(PutOptions::new().with_lease(lease)));
            let answer = kv.txn(Txn::new().when([free]).and_then([put])).await?;
            assert!(answer.succeeded(), "nobody else uses the key");
            kv.delete(key, None).await?;
            Ok(())
        }
    })
    .await?;
    client.lease_client().revoke(lease).await?;
    Ok(per_second)
}

async fn locks(endpoint: &str, tasks: usize) -> Outcome<f64> {
    let locks = Locks::new(Etcd::connect([endpoint]).await?);
    // The lease is granted beforehand, as the floor's is.
    locks.lock("first").await?.release().await?;
    let shared = locks.clone();
    let per_second = pairs(tasks, move |task| {
        let locks = shared.clone();
        async move { Ok(locks.lock(format!("ours-{task}")).await?.release().await?) }
    })
    .await?;
    locks.close().await?;
    Ok(per_second)
}

/// The recipe by hand: put a key and get the one before it, watch that until it is deleted, look
/// whether another is before ours by now; delete ours.
async fn raw_hand_offs(endpoint: &str) -> Outcome<f64> {
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let client = Client::connect([endpoint], None).await?;
        let lease = client.lease_client().grant(60, None).await?.id();
        clients.push((client, lease));
    }
    let clients = Arc::new(clients);
    let shared = clients.clone();
    let per_second = pairs(CLIENTS, move |task| {
        let (client, lease) = shared[task].clone();
        async move {
            let own = format!("floor/one/{lease:x}");
            let put = TxnOp::put(&*own, "", Some(PutOptions::new().with_lease(lease)));
            let mut answer = client
                .kv_client()
                .txn(Txn::new().and_then([put, before(i64::MAX)]))
                .await?;
            let ours = answer.take_header().map_or(0, |header| header.revision());
            loop {
                let revision = answer.header().map_or(ours, |header| header.revision());
                let Some(TxnOpResponse::Get(found)) = answer.op_responses().pop() else {
                    return Err("a transaction without its keys".into());
                };
                let older = |kv: &&KeyValue| kv.create_revision() < ours;
                let Some(ahead) = found.kvs().iter().find(older) else {
                    break;
                };
                let options = WatchOptions::new().with_start_revision(revision + 1);
                let mut stream = client
                    .watch_client()
                    .watch(ahead.key(), Some(options))
                    .await?;
                while let Some(message) = stream.message().await? {
                    if !message.events().is_empty() {
                        break;
                    }
                }
                answer = client
                    .kv_client()
                    .txn(Txn::new().and_then([before(ours - 1)]))
                    .await?;
            }
            client.kv_client().delete(own, None).await?;
            Ok(())
        }
    })
    .await?;
    for (client, lease) in &*clients {
        client.lease_client().revoke(*lease).await?;
    }
    Ok(per_second)
}

fn before(revision: i64) -> TxnOp {
    let options = GetOptions::new()
        .with_prefix()
        .with_keys_only()
        .with_sort(SortTarget::Create, SortOrder::Descend)
        .with_max_create_revision(revision)
        .with_limit(2);
    TxnOp::get("floor/one/", Some(options))
}

async fn hand_offs(endpoint: &str) -> Outcome<f64> {
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let locks = Locks::new(Etcd::connect([endpoint]).await?);
        locks.lock("first").await?.release().await?;
        clients.push(locks);
    }
    let clients = Arc::new(clients);
    let shared = clients.clone();
    let per_second = pairs(CLIENTS, move |task| {
        let locks = shared[task].clone();
        async move { Ok(locks.lock("one").await?.release().await?) }
    })
    .await?;
    for locks in &*clients {
        locks.close().await?;
    }
    Ok(per_second)
}

/// How many pairs of lock and unlock `tasks` of them do in a second, each one after the other.
async fn pairs<F>(tasks: usize, pair: impl Fn(usize) -> F + Clone + Send + 'static) -> Outcome<f64>
where
    F: Future<Output = Outcome<()>> + Send + 'static,
{
    let started = Instant::now();
    let mut running: JoinSet<Outcome<u32>> = JoinSet::new();
    for task in 0..tasks {
        let pair = pair.clone();
        running.spawn(async move {
            let mut done = 0;
            while started.elapsed() < ROUND {
                pair(task).await?;
                done += 1;
            }
            Ok(done)
        });
    }
    let mut done = 0;
    while let Some(outcome) = running.join_next().await {
        done += outcome??;
    }
    Ok(f64::from(done) / started.elapsed().as_secs_f64())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}
