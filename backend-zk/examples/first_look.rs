//! A first look at speed: pairs of lock and unlock a second on keys of their own, on the raw client
//! (create, list, delete, one after the other) and by this backend, in one run. With the address of
//! servers as argument, else on one that is started here and writes to the disk as servers do.
//!
//! `cargo run --release -p leasehold-zk --example first_look`

use std::time::Duration;

use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_core::Locks;
use leasehold_zk::ZooKeeper;
use tokio::task::JoinSet;
use tokio::time::Instant;
use zookeeper_client::{Acls, Client, CreateMode};

const LENGTH: Duration = Duration::from_secs(4);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let given = std::env::args().nth(1);
    let started = match &given {
        Some(_) => None,
        None => Some(ZooKeeperEnsemble::start_with_sync(1).await?),
    };
    let servers = match &started {
        Some(started) => started.servers(),
        None => given.unwrap_or_default(),
    };
    let client = Client::connect(&servers).await?;
    let locks = Locks::new(ZooKeeper::connect(format!("zk://{servers}")).await?);
    for round in 1..=3 {
        for tasks in [1, 64] {
            let floor = rate(tasks, &client, floor).await?;
            let ours = rate(tasks, &locks, ours).await?;
            println!(
                "round {round}, {tasks:>2} tasks: floor {floor:>5.0}/s, ours {ours:>5.0}/s ({:.2})",
                ours / floor
            );
        }
    }
    locks.close().await?;
    Ok(())
}

/// How many times a second the tasks together get through `work`, each with a key of its own.
async fn rate<T, F>(tasks: u32, with: &T, work: fn(T, String) -> F) -> anyhow::Result<f64>
where
    T: Clone + Send + Sync + 'static,
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    // Folders, sessions, and the server's own warming up.
    let warm = Instant::now() + LENGTH / 4;
    let end = warm + LENGTH;
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let with = with.clone();
        running.spawn(async move {
            let mut done = 0_u32;
            while Instant::now() < end {
                work(with.clone(), format!("look-{task}")).await?;
                done += u32::from(Instant::now() > warm);
            }
            anyhow::Ok(done)
        });
    }
    let mut done = 0;
    while let Some(task) = running.join_next().await {
        done += task??;
    }
    Ok(f64::from(done) / LENGTH.as_secs_f64())
}

async fn floor(client: Client, key: String) -> anyhow::Result<()> {
    let parent = format!("/floor/{key}");
    let place = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let path = format!("{parent}/lock-");
    let sequence = match client.create(&path, b"", &place).await {
        Ok((_, sequence)) => sequence,
        Err(zookeeper_client::Error::NoNode) => {
            let folder = CreateMode::Persistent.with_acls(Acls::anyone_all());
            return Ok(client.mkdir(&parent, &folder).await?);
        }
        Err(error) => return Err(error.into()),
    };
    let children = client.list_children(&parent).await?;
    anyhow::ensure!(children.len() == 1);
    Ok(client.delete(&format!("{path}{sequence}"), None).await?)
}

async fn ours(locks: Locks, key: String) -> anyhow::Result<()> {
    Ok(locks.lock(key).await?.release().await?)
}
