//! What only etcd has, on real servers: its own tools and clients on the same lock, the loss of
//! members, leases and revisions, users and TLS, and how many requests things cost.

mod access;
mod cluster;
mod etcdctl;
mod examine;
mod list;
mod queue;
mod support;
mod together;

use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use leasehold_conformance::fixtures::{Missing, etcd::EtcdCluster, program};
use libtest_mimic::{Arguments, Completion, Trial};

type Running = Pin<Box<dyn Future<Output = anyhow::Result<()>>>>;

/// One test: its name, the programs that it needs, and what it does.
type Test = (&'static str, &'static [&'static str], fn() -> Running);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // They wait more than they work.
    arguments.test_threads.get_or_insert(4);
    let tests = [
        etcdctl::TESTS,
        cluster::TESTS,
        access::TESTS,
        queue::TESTS,
        examine::TESTS,
        list::TESTS,
        together::TESTS,
    ]
    .concat();
    let trials = tests.into_iter().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial((name, programs, test): Test) -> Trial {
    /// Far beyond what any of them takes, so that nothing hangs for ever.
    const LIMIT: Duration = Duration::from_secs(300);
    Trial::ignorable_test(name, move || {
        let absent = programs.iter().find(|name| program(name).is_none());
        let missing = EtcdCluster::missing().or_else(|| {
            absent.map(|name| Missing::new("etcd", format!("there is no program {name}")))
        });
        if let Some(missing) = missing {
            return if missing.is_required() {
                Err(missing.to_string().into())
            } else {
                Ok(Completion::ignored_with(missing.to_string()))
            };
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        let outcome = runtime.block_on(async { tokio::time::timeout(LIMIT, test()).await });
        runtime.shutdown_background();
        match outcome {
            Ok(Ok(())) => Ok(Completion::Completed),
            Ok(Err(reason)) => Err(format!("{reason:#}").into()),
            Err(_elapsed) => Err(format!("not done within {LIMIT:?}").into()),
        }
    })
}
