use std::time::{Duration, Instant};

use leasehold_core::{Locks, Memory};

use crate::measure::Plan;

/// Core alone, on the memory backend, in one thread: what a call costs, and what 10,000 held locks
/// cost.
pub fn run(plan: Plan) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        calls(plan).await;
        held(10_000, Duration::from_secs(30)).await;
    });
}

async fn calls(plan: Plan) {
    let locks = Locks::new(Memory::new());
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..plan.rounds {
        rounds[0].push(
            per_call(&plan, async || {
                let guard = locks.lock("a").await.expect("free");
                guard.release().await.expect("ours");
            })
            .await,
        );
        let me = locks.owner();
        let _held = me.lock("a").await.expect("free");
        rounds[1].push(
            per_call(&plan, async || {
                let guard = me.lock("a").await.expect("ours");
                guard.release().await.expect("ours");
            })
            .await,
        );
    }
    for (what, mut micros) in ["lock + release", "re-entry"].into_iter().zip(rounds) {
        micros.sort_by(f64::total_cmp);
        println!("{what:<34} {:.2} µs", micros[micros.len() / 2]);
    }
}

async fn per_call(plan: &Plan, call: impl AsyncFn()) -> f64 {
    const BATCH: u32 = 1000;
    let start = Instant::now();
    let mut calls = 0_u32;
    while start.elapsed() < plan.length {
        for _ in 0..BATCH {
            call().await;
        }
        calls += BATCH;
    }
    start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
}

/// Memory and processor time of locks that are only held, the memory backend's own part included.
async fn held(count: usize, ttl: Duration) {
    let locks = Locks::new(Memory::new()).with_ttl(ttl);
    let resident = resident_bytes();
    let mut guards = Vec::with_capacity(count);
    for n in 0..count {
        guards.push(locks.lock(format!("held:{n}")).await.expect("free"));
    }
    let bytes = resident_bytes().saturating_sub(resident) / count as u64;
    let (start, busy) = (Instant::now(), busy_time());
    tokio::time::sleep(ttl).await;
    let share = (busy_time() - busy).as_secs_f64() / start.elapsed().as_secs_f64();
    println!(
        "{count} held, ttl {ttl:?}: {bytes} bytes each, renewals take {:.2} % of a core",
        share * 100.0
    );
    assert!(guards.iter().all(leasehold_core::Guard::is_held));
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_u64) * 4096
}

/// User and system time of this process.
fn busy_time() -> Duration {
    let sched = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanos = sched.split(' ').next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}
