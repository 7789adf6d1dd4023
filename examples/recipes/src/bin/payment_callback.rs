//! A payment callback that arrives several times while the first is worked on:
//! docs/payment-callback.md.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::ensure;
use leasehold::{ErrorKind, Locks};
use tokio::task::JoinSet;

/// Stands in for the order in a database.
static PAID: AtomicBool = AtomicBool::new(false);
static SHIPPED: AtomicUsize = AtomicUsize::new(0);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let locks = leasehold_recipes::locks().await?;
    // A name of this run: the store may be anybody's.
    let payment = format!("payment:{}", std::process::id());
    let mut callbacks = JoinSet::new();
    for _ in 0..3 {
        let (locks, payment) = (locks.clone(), payment.clone());
        callbacks.spawn(async move { paid(&locks, &payment).await });
    }
    while let Some(answer) = callbacks.join_next().await {
        println!("answer to the provider: {:?}", answer??);
    }
    let shipped = SHIPPED.load(Ordering::SeqCst);
    println!("shipped: {shipped}");
    ensure!(shipped == 1, "shipped {shipped} times");
    locks.close().await?;
    Ok(())
}

/// What to answer the payment provider.
#[derive(Debug)]
enum Answer {
    Thanks,
    TryAgainLater,
}

async fn paid(locks: &Locks, payment: &str) -> leasehold::Result<Answer> {
    // Shorter than the provider's own patience.
    let locks = locks.with_wait(Duration::from_secs(10));
    let guard = match locks.lock(payment).await {
        Ok(guard) => guard,
        // The first one is still at it, or the store is away: the provider comes again.
        Err(error) if error.kind() == ErrorKind::Timeout || error.is_transient() => {
            return Ok(Answer::TryAgainLater);
        }
        Err(error) => return Err(error),
    };
    let work = guard.run(async {
        if !PAID.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(50)).await; // prints the label
            PAID.store(true, Ordering::SeqCst);
            SHIPPED.fetch_add(1, Ordering::SeqCst);
        }
    });
    match work.await {
        Ok(()) => {}
        // Whether it was done is not known: the next callback finds out.
        Err(error) if error.kind() == ErrorKind::Lost => return Ok(Answer::TryAgainLater),
        Err(error) => return Err(error),
    }
    drop(guard); // released in the background: the provider need not wait for it
    Ok(Answer::Thanks)
}
