//! What the tests of this backend share.
#![allow(clippy::unwrap_used, dead_code)] // parts of tests, not all used by each

use std::time::Duration;

use leasehold_conformance::fixtures::postgres::PostgresServer;
use leasehold_core::Locks;
use leasehold_postgres::{Postgres, PostgresOptions};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, raw_sql};
use tokio::time::{Instant, sleep, timeout};

/// An upper bound for what takes milliseconds on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A server with these settings, or the end of the test.
macro_rules! server {
    ($($setting:expr),*) => {{
        leasehold_conformance::skip_without!(leasehold_conformance::fixtures::postgres::PostgresServer::missing());
        leasehold_conformance::fixtures::postgres::PostgresServer::start([""; 0].into_iter().chain([$($setting),*])).await.unwrap()
    }};
}
pub(crate) use server;

/// A client with a long ttl.
pub(crate) async fn client(server: &PostgresServer) -> Postgres {
    Postgres::connect(server.url()).await.unwrap()
}

pub(crate) async fn locks(server: &PostgresServer) -> Locks {
    patient(client(server).await)
}

/// With limits that a busy machine keeps.
pub(crate) fn patient(postgres: Postgres) -> Locks {
    Locks::new(postgres)
        .with_wait(SOON)
        .with_request_limit(SOON)
}

pub(crate) fn options(server: &PostgresServer) -> PostgresOptions {
    PostgresOptions::new(server.url()).unwrap()
}

/// A connection as any other program would have one.
pub(crate) async fn foreign(server: &PostgresServer) -> PgConnection {
    PgConnection::connect(&server.url()).await.unwrap()
}

pub(crate) async fn run(connection: &mut PgConnection, statements: &str) {
    let statements = raw_sql(AssertSqlSafe(statements));
    sqlx::Executor::execute(connection, statements)
        .await
        .unwrap();
}

pub(crate) async fn ask<T>(connection: &mut PgConnection, statement: &str) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    let row = sqlx::Executor::fetch_one(connection, raw_sql(AssertSqlSafe(statement)))
        .await
        .unwrap();
    sqlx::Row::try_get(&row, 0).unwrap()
}

/// Waits for an event, with a limit.
pub(crate) async fn soon<F: Future>(what: &str, event: F) -> F::Output {
    match timeout(SOON, event).await {
        Ok(output) => output,
        Err(_) => panic!("not within {SOON:?}: {what}"),
    }
}

/// Asks until the answer is `expected`.
pub(crate) async fn until(
    connection: &mut PgConnection,
    what: &str,
    statement: &str,
    expected: i64,
) {
    let start = Instant::now();
    loop {
        let is: i64 = ask(connection, statement).await;
        if is == expected {
            return;
        }
        assert!(
            start.elapsed() < SOON,
            "{what}: {is} in place of {expected}"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// How many connections our clients have, as the server sees it.
pub(crate) const OURS: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'leasehold %'";
/// How many sessions wait for an advisory lock.
pub(crate) const WAITING: &str =
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
/// How many locks our sessions hold, but for the one that says that they listen.
pub(crate) const HELD: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted \
     AND mode = 'ExclusiveLock'";
