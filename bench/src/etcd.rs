use std::sync::Arc;

use etcd_client::{
    Client, Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn,
    TxnOp, TxnOpResponse, WatchOptions,
};
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_core::Locks;
use leasehold_etcd::Etcd;

use crate::measure::{Plan, Rate, runtime};

const CLIENTS: usize = 16;

/// A free lock with several tasks on keys of their own over one client, and one key with several
/// clients; one member, which writes to the disk.
pub fn run(plan: Plan) {
    runtime().block_on(async {
        let server = EtcdCluster::start(1, [""; 0]).await.expect("etcd starts");
        let endpoint = server.endpoint(0);
        for tasks in [1, 16, 64, 256] {
            let case = format!("etcd, free lock, {tasks} tasks");
            plan.compare(
                &case,
                async || floor(plan, &endpoint, tasks).await,
                async || plan.free(locks(&endpoint).await, tasks).await,
            )
            .await;
        }
        let case = format!("etcd, one key, {CLIENTS} clients");
        plan.compare(
            &case,
            async || floor_one_key(plan, &endpoint).await,
            async || one_key(plan, &endpoint).await,
        )
        .await;
    });
}

/// The raw client without a lock library: a transaction that creates the key, and its deletion.
async fn floor(plan: Plan, endpoint: &str, tasks: usize) -> Rate {
    let client = connect(endpoint).await;
    let lease = lease(&client).await;
    let kv = client.kv_client();
    let rate = plan
        .measure(tasks, move |task| {
            let mut kv = kv.clone();
            async move {
                let key = format!("floor/{task}");
                let free = Compare::create_revision(&*key, CompareOp::Equal, 0);
                let put = TxnOp::put(&*key, "held", Some(PutOptions::new().with_lease(lease)));
                let answer = kv
                    .txn(Txn::new().when([free]).and_then([put]))
                    .await
                    .expect("the server answers");
                assert!(answer.succeeded(), "free");
                kv.delete(key, None).await.expect("the server answers");
            }
        })
        .await;
    revoke(&client, lease).await;
    rate
}

/// The recipe by hand: put a key and get the one before it, watch that until it is deleted, look
/// whether another is before ours by now; delete ours.
async fn floor_one_key(plan: Plan, endpoint: &str) -> Rate {
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        let client = connect(endpoint).await;
        let lease = lease(&client).await;
        clients.push((client, lease));
    }
    let clients = Arc::new(clients);
    let rate = plan
        .measure(CLIENTS, {
            let clients = clients.clone();
            move |task| {
                let (client, lease) = clients[task].clone();
                async move { pair_by_hand(&client, lease).await }
            }
        })
        .await;
    for (client, lease) in &*clients {
        revoke(client, *lease).await;
    }
    rate
}

async fn pair_by_hand(client: &Client, lease: i64) {
    let own = format!("floor/one/{lease:x}");
    let put = TxnOp::put(&*own, "", Some(PutOptions::new().with_lease(lease)));
    let mut answer = client
        .kv_client()
        .txn(Txn::new().and_then([put, before(i64::MAX)]))
        .await
        .expect("the server answers");
    let ours = answer.take_header().map_or(0, |header| header.revision());
    loop {
        let revision = answer.header().map_or(ours, |header| header.revision());
        let Some(TxnOpResponse::Get(found)) = answer.op_responses().pop() else {
            panic!("a transaction answers with its keys");
        };
        let older = |kv: &&KeyValue| kv.create_revision() < ours;
        let Some(ahead) = found.kvs().iter().find(older) else {
            break;
        };
        let options = WatchOptions::new().with_start_revision(revision + 1);
        let mut stream = client
            .watch_client()
            .watch(ahead.key(), Some(options))
            .await
            .expect("the server answers");
        while let Some(message) = stream.message().await.expect("the watch goes on") {
            if !message.events().is_empty() {
                break;
            }
        }
        answer = client
            .kv_client()
            .txn(Txn::new().and_then([before(ours - 1)]))
            .await
            .expect("the server answers");
    }
    client
        .kv_client()
        .delete(own, None)
        .await
        .expect("the server answers");
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

/// Everybody wants the same key.
async fn one_key(plan: Plan, endpoint: &str) -> Rate {
    let mut clients = Vec::new();
    for _ in 0..CLIENTS {
        clients.push(locks(endpoint).await);
    }
    plan.one_key(clients, 1).await
}

async fn connect(endpoint: &str) -> Client {
    Client::connect([endpoint], None)
        .await
        .expect("the server answers")
}

async fn lease(client: &Client) -> i64 {
    let lease = client.lease_client().grant(60, None).await;
    lease.expect("the server answers").id()
}

async fn revoke(client: &Client, lease: i64) {
    let revoked = client.lease_client().revoke(lease).await;
    revoked.expect("the server answers");
}

async fn locks(endpoint: &str) -> Locks {
    Locks::new(Etcd::connect([endpoint]).await.expect("the server answers"))
}
