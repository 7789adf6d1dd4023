//! A leader for a while, then another: docs/leader.md.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::ensure;
use leasehold::{ErrorKind, Locks, Token};
use tokio::task::JoinSet;

const REPLICAS: usize = 3;
const TERM: Duration = Duration::from_millis(200);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let locks = leasehold_recipes::locks().await?;
    // A name of this run: the store may be anybody's.
    let office = format!("leader:{}", std::process::id());
    let terms: Arc<Mutex<Vec<Token>>> = Arc::default();
    let mut replicas: JoinSet<leasehold::Result<()>> = JoinSet::new();
    for replica in 1..=REPLICAS {
        let (locks, office, terms) = (locks.clone(), office.clone(), terms.clone());
        replicas.spawn(async move {
            let token = one_term(&locks, &office, &terms).await?;
            println!("replica {replica} has led, term {token}");
            Ok(())
        });
    }
    while let Some(replica) = replicas.join_next().await {
        replica??;
    }
    let terms = terms
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .clone();
    ensure!(terms.len() == REPLICAS, "{terms:?}");
    ensure!(
        terms.windows(2).all(|terms| terms[0] < terms[1]),
        "{terms:?}"
    );
    locks.close().await?;
    Ok(())
}

/// Waits for the office, leads until the term is over, and says which term that was.
async fn one_term(
    locks: &Locks,
    office: &str,
    terms: &Mutex<Vec<Token>>,
) -> leasehold::Result<Token> {
    // Nobody leads for ever; the others wait.
    let guard = locks
        .with_max_hold(TERM)
        .with_wait(None)
        .lock(office)
        .await?;
    let token = guard.token();
    // Stops at its next await once the term is over or the lock is lost.
    let Err(error) = guard.run(lead(token, terms)).await;
    match error.kind() {
        ErrorKind::Lost => Ok(token),
        _ => Err(error),
    }
}

/// Does what only one may do, with the token on each order.
async fn lead(token: Token, terms: &Mutex<Vec<Token>>) -> Infallible {
    terms
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .push(token);
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
