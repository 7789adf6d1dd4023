use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use etcd_client::{Txn, TxnOp};
use leasehold_core::Error;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tracing::warn;

use crate::endpoints::{Channel, Endpoints};
use crate::session::Session;

/// A key that nobody wants any more: a hold that was dropped, a claim that was cancelled.
#[derive(Debug)]
pub(crate) struct Cleaning {
    /// Kept alive by this until the key is gone.
    pub(crate) session: Arc<Session>,
    pub(crate) key: String,
    /// All requests that named it were answered.
    pub(crate) certain: bool,
}

/// Deletes what is handed to it, many keys in one request, and repeats until that is answered or the
/// lease has ended and taken the keys with it.
pub(crate) struct Cleaner {
    pub(crate) endpoints: Arc<Endpoints>,
    pub(crate) handed: mpsc::UnboundedReceiver<Cleaning>,
}

/// Says that the runtime has ended.
#[derive(Debug)]
pub(crate) struct DeadWithIt(pub(crate) Arc<AtomicBool>);

impl Drop for DeadWithIt {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Cleaner {
    /// `_dead` is dropped with the task.
    pub(crate) async fn run(mut self, _dead: DeadWithIt) {
        /// A transaction may have 128 operations in it by default.
        const MOST: usize = 64;
        const LONGEST_PAUSE: Duration = Duration::from_secs(1);
        let mut waiting = VecDeque::new();
        let mut pause = Duration::ZERO;
        loop {
            if waiting.is_empty() {
                match self.handed.recv().await {
                    Some(cleaning) => waiting.push_back(cleaning),
                    None => return,
                }
            }
            while let Ok(cleaning) = self.handed.try_recv() {
                waiting.push_back(cleaning);
            }
            waiting.retain(|cleaning| !cleaning.session.validity.is_ended());
            let some = waiting.len().min(MOST);
            let mut batch: Vec<Cleaning> = waiting.drain(..some).collect();
            let outcome = self.delete(&mut batch).await;
            match outcome {
                Ok(()) => {
                    pause = Duration::ZERO;
                    done(batch);
                }
                Err(error) if error.is_transient() => {
                    // The others get their turn first.
                    waiting.extend(batch);
                    pause = (pause * 2).clamp(Duration::from_millis(20), LONGEST_PAUSE);
                    sleep(pause).await;
                }
                // One of them may have spoilt it for all.
                Err(_) if batch.len() > 1 => {
                    for cleaning in batch.drain(..) {
                        let mut alone = [cleaning];
                        match self.delete(&mut alone).await {
                            Err(error) if error.is_transient() => waiting.extend(alone),
                            outcome => end(alone, outcome),
                        }
                    }
                }
                refused => end(batch, refused),
            }
        }
    }

    async fn delete(&self, batch: &mut [Cleaning]) -> Result<(), Error> {
        let Some(first) = batch.first() else {
            return Ok(());
        };
        let limit = first.session.request_limit();
        let keys: Vec<&str> = batch.iter().map(|cleaning| &*cleaning.key).collect();
        let mut attempts = 0;
        let request = |channel: Arc<Channel>, _| {
            attempts += 1;
            let deletes = keys.iter().map(|key| TxnOp::delete(*key, None));
            let txn = Txn::new().and_then(deletes.collect::<Vec<_>>());
            async move { channel.kv.clone().txn(txn).await }
        };
        let outcome = self.endpoints.request(limit, request).await;
        let certain = outcome.is_ok() && attempts == 1;
        for cleaning in batch {
            cleaning.certain &= certain;
        }
        Ok(outcome.map(drop)?)
    }
}

fn end(batch: impl IntoIterator<Item = Cleaning>, outcome: Result<(), Error>) {
    if let Err(error) = outcome {
        warn!(target: "leasehold", %error, "keys were not deleted in etcd: they end with their lease");
    }
    done(batch);
}

fn done(batch: impl IntoIterator<Item = Cleaning>) {
    for cleaning in batch {
        cleaning.session.give_back(&cleaning.key, cleaning.certain);
    }
}
