use std::sync::Arc;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::Locks;
use leasehold_redis::Redis;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Script};
use uuid::Uuid;

use crate::measure::{Plan, Rate, runtime};

/// A free lock with several tasks on keys of their own, and one key with several clients.
pub fn run(plan: Plan) {
    runtime().block_on(async {
        let server = RedisServer::start([""; 0])
            .await
            .expect("redis-server starts");
        let url = server.url();
        for tasks in [1, 64, 256] {
            let case = format!("redis, free lock, {tasks} tasks");
            plan.compare(
                &case,
                async || floor(plan, &url, tasks).await,
                async || plan.free(connect(&url).await, tasks).await,
            )
            .await;
        }
        for (clients, tasks) in [(16, 1), (1, 16), (4, 256)] {
            let case = format!("redis, one key, {clients} clients of {tasks}");
            plan.compare(
                &case,
                async || floor(plan, &url, 1).await,
                async || one_key(plan, &url, clients, tasks).await,
            )
            .await;
        }
    });
}

/// The raw client without a lock library: `SET NX PX`, then a script that compares and deletes.
async fn floor(plan: Plan, url: &str, tasks: usize) -> Rate {
    let client = Client::open(url).expect("a URL");
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let connection = client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .expect("the server answers");
    let release = Arc::new(Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end",
    ));
    let _sha: String = release
        .load_async(&mut connection.clone())
        .await
        .expect("it loads");
    plan.measure(tasks, move |task| {
        let (mut connection, release) = (connection.clone(), release.clone());
        async move { raw_pair(&mut connection, &release, task).await }
    })
    .await
}

async fn raw_pair(connection: &mut MultiplexedConnection, release: &Script, task: usize) {
    let (key, value) = (format!("floor:{task}"), Uuid::new_v4().to_string());
    let set: Option<String> = redis::cmd("SET")
        .arg(&key)
        .arg(&value)
        .arg("NX")
        .arg("PX")
        .arg(30_000)
        .query_async(connection)
        .await
        .expect("the server answers");
    assert!(set.is_some(), "free");
    let deleted: i64 = release
        .key(&key)
        .arg(&value)
        .invoke_async(connection)
        .await
        .expect("the server answers");
    assert_eq!(deleted, 1, "ours");
}

/// Everybody wants the same key.
async fn one_key(plan: Plan, url: &str, clients: usize, tasks: usize) -> Rate {
    let mut locks = Vec::new();
    for _ in 0..clients {
        locks.push(connect(url).await);
    }
    plan.one_key(locks, tasks).await
}

async fn connect(url: &str) -> Locks {
    Locks::new(Redis::connect(url).await.expect("the server answers"))
}
