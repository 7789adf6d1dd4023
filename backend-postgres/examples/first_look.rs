//! A first look at speed: what a free lock costs here and with the raw client, in one run.
//!
//! ```text
//! cargo run --release -p leasehold-postgres --example first_look [postgres://…]
//! ```
//! Without a URL it starts a server of its own. The floor is `pg_try_advisory_lock` and
//! `pg_advisory_unlock` with sqlx, one connection for each task, no token and no renewal.

use std::time::{Duration, Instant};

use leasehold_conformance::fixtures::postgres::Postgres as Server;
use leasehold_core::Locks;
use leasehold_postgres::Postgres;
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;

const TIME: Duration = Duration::from_secs(3);
const ROUNDS: usize = 3;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (url, server) = match std::env::args().nth(1) {
        Some(url) => (url, None),
        None => {
            let server = Server::find()
                .await
                .map_err(|missing| anyhow::anyhow!("{missing}"))?;
            (server.url().to_owned(), Some(server))
        }
    };
    let locks = Locks::new(Postgres::connect(&url).await?);
    for tasks in [1, 16] {
        for _ in 0..ROUNDS {
            // In turn, so that both meet the same neighbours.
            let floor = floor(&url, tasks).await?;
            let ours = ours(&locks, tasks).await?;
            println!(
                "{tasks:>2} tasks, own keys: floor {floor:>6.0} pairs/s, ours {ours:>6.0} pairs/s, \
                 {:.2} of it",
                ours / floor
            );
        }
    }
    locks.close().await?;
    drop(server);
    Ok(())
}

async fn floor(url: &str, tasks: i64) -> anyhow::Result<f64> {
    let mut running = JoinSet::new();
    for key in 0..tasks {
        let mut connection = PgConnection::connect(url).await?;
        running.spawn(async move {
            let (start, mut pairs) = (Instant::now(), 0_u32);
            while start.elapsed() < TIME {
                let locked: bool = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)")
                    .bind(key)
                    .fetch_one(&mut connection)
                    .await?;
                let freed: bool = sqlx::query_scalar("SELECT pg_advisory_unlock($1)")
                    .bind(key)
                    .fetch_one(&mut connection)
                    .await?;
                anyhow::ensure!(locked && freed, "somebody else has the key");
                pairs += 1;
            }
            anyhow::Ok(pairs)
        });
    }
    rate(running).await
}

async fn ours(locks: &Locks, tasks: i64) -> anyhow::Result<f64> {
    let mut running = JoinSet::new();
    for key in 0..tasks {
        let locks = locks.clone();
        running.spawn(async move {
            let key = format!("first look {key}");
            let (start, mut pairs) = (Instant::now(), 0_u32);
            while start.elapsed() < TIME {
                locks.lock(&key).await?.release().await?;
                pairs += 1;
            }
            anyhow::Ok(pairs)
        });
    }
    rate(running).await
}

async fn rate(mut running: JoinSet<anyhow::Result<u32>>) -> anyhow::Result<f64> {
    let mut pairs = 0.0;
    while let Some(done) = running.join_next().await {
        pairs += f64::from(done??);
    }
    Ok(pairs / TIME.as_secs_f64())
}
