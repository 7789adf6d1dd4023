use std::sync::Arc;

use leasehold_conformance::fixtures::postgres::PostgresServer;
use leasehold_core::Locks;
use leasehold_postgres::Postgres;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::Mutex;

use crate::measure::{Plan, Rate, median, report};

/// A free lock with several tasks on keys of their own.
pub fn run(plan: Plan) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let server = PostgresServer::start(["max_connections = 100"])
            .await
            .expect("PostgreSQL starts");
        let url = server.url();
        for tasks in [1, 16, 64, 256] {
            let mut rates = (Vec::new(), Vec::new());
            for _ in 0..plan.rounds {
                rates.0.push(floor(plan, &url, tasks).await);
                rates.1.push(free(plan, &url, tasks).await);
            }
            report(
                &format!("postgres, free lock, {tasks} tasks"),
                median(rates.0),
                median(rates.1),
            );
        }
    });
}

/// The raw client without a lock library: `pg_try_advisory_lock` and `pg_advisory_unlock`, in two round
/// trips, with at most 16 connections (more do not make it faster), each for the tasks that share it
/// in turn.
async fn floor(plan: Plan, url: &str, tasks: usize) -> Rate {
    const CONNECTIONS: usize = 16;
    let mut connections = Vec::new();
    for _ in 0..tasks.min(CONNECTIONS) {
        let connection = PgConnection::connect(url).await;
        connections.push(Mutex::new(connection.expect("the server answers")));
    }
    let connections = Arc::new(connections);
    plan.measure(tasks, move |task| {
        let connections = connections.clone();
        async move {
            let mut connection = connections[task % connections.len()].lock().await;
            let key = i64::try_from(task).expect("few tasks");
            for statement in [
                "SELECT pg_try_advisory_lock($1)",
                "SELECT pg_advisory_unlock($1)",
            ] {
                let done: bool = sqlx::query_scalar(statement)
                    .bind(key)
                    .fetch_one(&mut *connection)
                    .await
                    .expect("the server answers");
                assert!(done, "free, and ours");
            }
        }
    })
    .await
}

/// Ours: token and server-enforced expiry included.
async fn free(plan: Plan, url: &str, tasks: usize) -> Rate {
    let locks = Locks::new(Postgres::connect(url).await.expect("the server answers"));
    // The session is open beforehand, as the floor's are.
    pair(&locks, 0).await;
    let rate = plan.measure(tasks, {
        let locks = locks.clone();
        move |task| {
            let locks = locks.clone();
            async move { pair(&locks, task).await }
        }
    });
    let rate = rate.await;
    locks.close().await.expect("nothing is held");
    rate
}

async fn pair(locks: &Locks, task: usize) {
    let guard = locks.lock(format!("free:{task}")).await.expect("free");
    guard.release().await.expect("ours");
}
