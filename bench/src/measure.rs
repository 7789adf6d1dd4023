use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use leasehold_core::Locks;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;

/// How long and how often to measure.
#[derive(Clone, Copy)]
pub struct Plan {
    pub length: Duration,
    pub rounds: usize,
}

/// What came of one measurement.
#[derive(Clone, Copy, Default)]
pub struct Rate {
    /// Pairs of lock and unlock in a second, all tasks together.
    pub per_second: f64,
    /// The pairs of the least served task as a share of those of the most served one.
    pub evenness: f64,
}

impl Plan {
    /// Measures the floor and ours in turn, several rounds, and prints their medians.
    pub async fn compare(
        self,
        case: &str,
        floor: impl AsyncFn() -> Rate,
        ours: impl AsyncFn() -> Rate,
    ) {
        let mut rates = (Vec::new(), Vec::new());
        for _ in 0..self.rounds {
            rates.0.push(floor().await);
            rates.1.push(ours().await);
        }
        report(case, median(rates.0), median(rates.1));
    }

    /// Ours on free locks: each task has a key of its own. What a session needs is there beforehand,
    /// as it is for the floor.
    pub async fn free(self, locks: Locks, tasks: usize) -> Rate {
        for task in 0..tasks {
            pair(&locks, &free_key(task)).await;
        }
        let shared = locks.clone();
        let rate = self.measure(tasks, move |task| {
            let locks = shared.clone();
            async move { pair(&locks, &free_key(task)).await }
        });
        let rate = rate.await;
        locks.close().await.expect("nothing is held");
        rate
    }

    /// Ours on one key that `tasks` of each client want.
    pub async fn one_key(self, clients: Vec<Locks>, tasks: usize) -> Rate {
        for locks in &clients {
            pair(locks, "first").await;
        }
        let all = clients.clone();
        let rate = self.measure(clients.len() * tasks, move |task| {
            let locks = all[task % all.len()].clone();
            async move { pair(&locks, "one").await }
        });
        let rate = rate.await;
        for locks in clients {
            locks.close().await.expect("nothing is held");
        }
        rate
    }

    /// Runs `tasks` tasks that each repeat `pair(task)` until the time is over.
    pub async fn measure<F, W>(&self, tasks: usize, pair: F) -> Rate
    where
        F: Fn(usize) -> W + Send + Sync + 'static,
        W: Future<Output = ()> + Send + 'static,
    {
        let pair = Arc::new(pair);
        let done: Arc<Vec<AtomicU64>> = Arc::new((0..tasks).map(|_| AtomicU64::new(0)).collect());
        let start = Instant::now();
        let end = start + self.length;
        let mut running = JoinSet::new();
        for task in 0..tasks {
            let (pair, done) = (pair.clone(), done.clone());
            running.spawn(async move {
                while Instant::now() < end {
                    pair(task).await;
                    done[task].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        running.join_all().await;
        let elapsed = start.elapsed().as_secs_f64();
        let counts: Vec<u64> = done.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        let (least, most) = (counts.iter().min(), counts.iter().max());
        Rate {
            per_second: counts.iter().sum::<u64>() as f64 / elapsed,
            evenness: *least.unwrap_or(&0) as f64 / *most.unwrap_or(&1).max(&1) as f64,
        }
    }
}

/// What a service has.
pub fn runtime() -> Runtime {
    let built = Builder::new_multi_thread().enable_all().build();
    built.expect("a runtime")
}

fn free_key(task: usize) -> String {
    format!("free:{task}")
}

/// Waits for the lock, and releases it.
async fn pair(locks: &Locks, key: &str) {
    let guard = locks.lock(key).await.expect("its turn comes");
    guard.release().await.expect("ours");
}

/// The median by rate.
fn median(mut rates: Vec<Rate>) -> Rate {
    rates.sort_by(|a, b| a.per_second.total_cmp(&b.per_second));
    rates[rates.len() / 2]
}

/// Prints one line of the table.
fn report(case: &str, floor: Rate, ours: Rate) {
    println!(
        "{case:<34} floor {:>8.0}/s   ours {:>8.0}/s   ratio {:.2}   least/most served {:.2}",
        floor.per_second,
        ours.per_second,
        ours.per_second / floor.per_second,
        ours.evenness,
    );
}
