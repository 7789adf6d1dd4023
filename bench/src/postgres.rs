use std::sync::Arc;

use leasehold_conformance::fixtures::postgres::PostgresServer;
use leasehold_core::Locks;
use leasehold_postgres::Postgres;
use sqlx::{Connection as _, PgConnection};
use tokio::sync::Mutex;

use crate::measure::{Plan, Rate, runtime};

/// A free lock with several tasks on keys of their own.
pub fn run(plan: Plan) {
    runtime().block_on(async {
        let server = PostgresServer::start(["max_connections = 100"])
            .await
            .expect("PostgreSQL starts");
        let url = server.url();
        for tasks in [1, 16, 64, 256] {
            let case = format!("postgres, free lock, {tasks} tasks");
            plan.compare(
                &case,
                async || floor(plan, &url, tasks).await,
                async || plan.free(locks(&url).await, tasks).await,
            )
            .await;
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

async fn locks(url: &str) -> Locks {
    Locks::new(Postgres::connect(url).await.expect("the server answers"))
}
