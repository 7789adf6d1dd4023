//! A job that every replica starts and one does: docs/scheduled-job.md.

use std::sync::Mutex;

use anyhow::ensure;
use leasehold::{ErrorKind, Locks};
use tokio::task::JoinSet;

/// Stands in for a table of the reports that were sent.
static SENT: Mutex<Vec<String>> = Mutex::new(Vec::new());

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let locks = leasehold_recipes::locks().await?;
    // A name of this run: the store may be anybody's.
    let night = format!("night-{}", std::process::id());
    let mut replicas: JoinSet<leasehold::Result<bool>> = JoinSet::new();
    for replica in 1..=5 {
        let (locks, night) = (locks.clone(), night.clone());
        replicas.spawn(async move {
            let sent = nightly_report(&locks, &night).await?;
            println!(
                "replica {replica}: {}",
                if sent { "sent it" } else { "nothing to do" }
            );
            Ok(sent)
        });
    }
    let mut times = 0;
    while let Some(replica) = replicas.join_next().await {
        times += usize::from(replica??);
    }
    ensure!(times == 1, "sent {times} times");
    locks.close().await?;
    Ok(())
}

/// Whether this replica sent it.
async fn nightly_report(locks: &Locks, night: &str) -> leasehold::Result<bool> {
    let Some(guard) = locks.try_lock(format!("report:{night}")).await? else {
        return Ok(false);
    };
    let work = async {
        // Another replica may be done already, before our clock struck.
        if is_sent(night) {
            return false;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await; // the work
        note_sent(night);
        true
    };
    let sent = guard.run(work).await?;
    match guard.release().await {
        // The work is done and noted: it is late to hear that the lock had ended.
        Err(error) if error.kind() == ErrorKind::Lost => Ok(sent),
        released => released.map(|()| sent),
    }
}

fn is_sent(night: &str) -> bool {
    let sent = SENT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    sent.iter().any(|it| it == night)
}

fn note_sent(night: &str) {
    let mut sent = SENT.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    sent.push(night.to_owned());
}
