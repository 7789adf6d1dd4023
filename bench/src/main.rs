//! Speed as a ratio to the floor, measured in the same run.
//!
//! `cargo run --release -- redis` starts a server of its own on a free port, and so do `etcd`, `zk` and
//! `postgres`; `all` runs everything. Each case runs the floor and ours in turn, several rounds, and
//! shows the medians: compare the ratios, not the rates.

mod core;
mod etcd;
mod measure;
mod postgres;
mod redis;
mod zk;

use std::time::Duration;

use clap::{Parser, Subcommand};

/// Measures the floor and ours in one run.
#[derive(Parser)]
struct Args {
    /// How long each measurement takes, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    millis: u64,
    /// How many rounds, of which the medians are shown.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Core alone, on the memory backend, one thread.
    Core,
    /// Redis: free locks with 1, 64 and 256 tasks, and one key with 16 clients.
    Redis,
    /// etcd: free locks with 1, 16, 64 and 256 tasks, and one key with 16 clients.
    Etcd,
    /// ZooKeeper: free locks with 1 and 64 tasks.
    Zk,
    /// PostgreSQL: free locks with 1, 16, 64 and 256 tasks.
    Postgres,
    /// All of them, one after the other.
    All,
}

fn main() {
    let args = Args::parse();
    let plan = measure::Plan {
        length: Duration::from_millis(args.millis),
        rounds: args.rounds,
    };
    match args.what {
        What::Core => core::run(plan),
        What::Redis => redis::run(plan),
        What::Etcd => etcd::run(plan),
        What::Zk => zk::run(plan),
        What::Postgres => postgres::run(plan),
        What::All => {
            core::run(plan);
            redis::run(plan);
            etcd::run(plan);
            zk::run(plan);
            postgres::run(plan);
        }
    }
}
