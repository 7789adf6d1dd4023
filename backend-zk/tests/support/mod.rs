//! What the tests on real servers share: each is told why it cannot run, where something is missing.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_core::{Backend, Claim, Hold, Key, Locks};
use leasehold_zk::{ZooKeeper, ZooKeeperOptions};
use libtest_mimic::{Arguments, Failed, Trial};
use zookeeper_client::Client;

/// How long anything may take that is to happen at once; the machine may be busy.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A ttl that does not run out during a test.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// A test by its name.
pub(crate) type Test = (&'static str, fn() -> anyhow::Result<()>);

/// Runs the tests; lists them as ignored with the reason if something is missing, unless the
/// environment requires it.
pub(crate) fn main(missing: Option<Missing>, tests: &[Test]) -> ExitCode {
    main_of(&[(missing, tests)])
}

/// As [`main`], for tests that need different things.
pub(crate) fn main_of(groups: &[(Option<Missing>, &[Test])]) -> ExitCode {
    let mut trials = Vec::new();
    for (missing, tests) in groups {
        let ignored = missing.as_ref().filter(|missing| !missing.is_required());
        for &(name, test) in *tests {
            let missing = missing.as_ref().map(ToString::to_string);
            let shown = match ignored {
                Some(missing) => format!("{name} ({missing})"),
                None => name.to_owned(),
            };
            let trial = Trial::test(shown, move || match missing {
                Some(missing) => Err(Failed::from(missing)),
                None => test().map_err(|error| Failed::from(format!("{error:#}"))),
            });
            trials.push(trial.with_ignored_flag(ignored.is_some()));
        }
    }
    let mut arguments = Arguments::from_args();
    // Each starts servers of its own.
    arguments.test_threads.get_or_insert(2);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Drives a test on a runtime of its own.
pub(crate) fn run(test: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let result = runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(240), test)
            .await
            .context("the test hangs")?
    });
    runtime.shutdown_timeout(Duration::from_secs(5));
    result
}

/// A client of these servers (`host:port,…`).
pub(crate) async fn client(servers: &str) -> anyhow::Result<ZooKeeper> {
    let options = ZooKeeperOptions::new(format!("zk://{servers}"))?.with_connect_timeout(SOON);
    Ok(ZooKeeper::connect_with(options).await?)
}

/// The user's view of a new client.
pub(crate) async fn locks(servers: &str, ttl: Duration) -> anyhow::Result<Locks> {
    let locks = Locks::new(client(servers).await?);
    Ok(locks.with_ttl(ttl).with_wait(SOON).with_request_limit(SOON))
}

/// A client of the store as an operator has it.
pub(crate) async fn operator(servers: &str) -> anyhow::Result<Client> {
    soon("an operator connects", Client::connect(servers)).await
}

/// A claim that does not wait.
pub(crate) fn claim(key: &str, ttl: Duration) -> anyhow::Result<Claim> {
    let mut claim = Claim::new(Key::new(key)?, ttl)?;
    claim.request_limit = SOON;
    Ok(claim)
}

/// A claim that waits as long as it may.
pub(crate) fn waiting(key: &str, ttl: Duration) -> anyhow::Result<Claim> {
    let mut claim = claim(key, ttl)?;
    claim.wait = None;
    Ok(claim)
}

/// Acquires what is or becomes free.
pub(crate) async fn granted(client: &dyn Backend, claim: &Claim) -> anyhow::Result<Box<dyn Hold>> {
    let hold = soon("an acquire is answered", client.acquire(claim)).await?;
    hold.with_context(|| format!("{} is not granted", claim.key))
}

/// Waits for something that is to happen at once.
pub(crate) async fn soon<T, E>(
    what: &str,
    event: impl Future<Output = Result<T, E>>,
) -> anyhow::Result<T>
where
    anyhow::Error: From<E>,
{
    within(SOON, what, async {
        event.await.map_err(anyhow::Error::from)
    })
    .await?
}

/// Waits for something that is to happen within `limit`.
pub(crate) async fn within<T>(
    limit: Duration,
    what: &str,
    event: impl Future<Output = T>,
) -> anyhow::Result<T> {
    let waited = tokio::time::timeout(limit, event).await;
    waited.with_context(|| format!("not within {limit:?}: {what}"))
}

/// Waits until `condition` holds.
pub(crate) async fn until(
    what: &str,
    condition: impl AsyncFn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let started = tokio::time::Instant::now();
    while !condition().await? {
        ensure!(started.elapsed() < SOON, "not within {SOON:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// The nodes that contend for `key`, in their order.
pub(crate) async fn contenders(operator: &Client, key: &str) -> anyhow::Result<Vec<String>> {
    let path = format!("/locks/{key}");
    let mut children = match operator.list_children(&path).await {
        Err(zookeeper_client::Error::NoNode) => Vec::new(),
        children => children?,
    };
    children.sort_by_key(|child| child[child.len().saturating_sub(10)..].to_owned());
    Ok(children)
}

/// Waits until so many nodes contend for `key`.
pub(crate) async fn until_contenders(
    operator: &Client,
    key: &str,
    count: usize,
) -> anyhow::Result<()> {
    until(&format!("{count} contenders for {key}"), async || {
        Ok(contenders(operator, key).await?.len() == count)
    })
    .await
}

/// A number among what a server says of itself (`mntr`).
pub(crate) async fn metric(
    ensemble: &ZooKeeperEnsemble,
    index: usize,
    name: &str,
) -> anyhow::Result<u64> {
    let answer = ensemble.ask(index, "mntr").await?;
    let line = answer
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('\t'));
    match line {
        Some(value) => Ok(value.trim().parse()?),
        None => bail!("the server does not tell {name}"),
    }
}
