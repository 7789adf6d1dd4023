//! `etcdctl lock` and ours on the same name.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use crate::Test;
use crate::support::{SOON, below, locks, raw, servers, test, until_below, within};

const NEEDED: &[&str] = &["etcdctl"];
const TTL: Duration = Duration::from_secs(30);

pub(crate) const TESTS: &[Test] = &[
    test!("etcdctl waits for a lock of ours", NEEDED, waits_for_ours),
    test!("we wait for a lock of etcdctl", NEEDED, ours_waits),
    test!("etcdctl on a name with a slash", NEEDED, slashes),
];

/// `etcdctl lock name command…`; without a command it holds the lock until it is killed.
fn etcdctl(servers: &EtcdCluster, name: &str, command: &[&str]) -> anyhow::Result<Child> {
    let child = Command::new("etcdctl")
        .env("ETCDCTL_API", "3")
        .args(["--endpoints", &servers.endpoints()])
        .args(["lock", "--ttl", "2", name])
        .args(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    child.context("etcdctl cannot be started")
}

async fn waits_for_ours() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let (locks, client) = (
        locks(&servers, TTL).await?,
        raw(&servers.endpoint(0)).await?,
    );
    let guard = locks.lock("order:42").await?;
    let mut theirs = etcdctl(&servers, "locks/order:42", &["true"])?;
    until_below(&client, "locks/order:42/", 2).await?;
    // It is queued, and would be through by now if it did not wait for ours.
    let early = tokio::time::timeout(Duration::from_millis(300), theirs.wait()).await;
    ensure!(early.is_err(), "etcdctl got a lock that we hold");
    guard.release().await?;
    let status = within(SOON, "etcdctl gets the lock", theirs.wait()).await??;
    ensure!(status.success(), "etcdctl says {status}");
    let again = locks.try_lock("order:42").await?;
    ensure!(again.is_some(), "etcdctl has let go");
    Ok(())
}

async fn ours_waits() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let (locks, client) = (
        locks(&servers, TTL).await?,
        raw(&servers.endpoint(0)).await?,
    );
    let mut theirs = etcdctl(&servers, "locks/order:42", &[])?;
    let output = theirs.stdout.take().context("piped")?;
    let mut lines = BufReader::new(output).lines();
    let line = within(SOON, "etcdctl holds the lock", lines.next_line()).await??;
    let line = line.context("etcdctl ended")?;
    ensure!(line.starts_with("locks/order:42/"), "{line}");

    ensure!(
        locks.try_lock("order:42").await?.is_none(),
        "etcdctl holds it"
    );
    let holder = locks.holder("order:42").await?.context("it is held")?;
    ensure!(
        holder.owner.is_none(),
        "etcdctl does not say who it is: {holder:?}"
    );
    let other = locks.clone();
    let waiting = tokio::spawn(async move { other.lock("order:42").await });
    until_below(&client, "locks/order:42/", 2).await?;
    ensure!(!waiting.is_finished(), "etcdctl holds it");
    // A killed one lets go when its lease of 2 s ends.
    theirs.kill().await?;
    let guard = within(SOON, "the lock of a killed etcdctl ends", waiting).await???;
    ensure!(Some(guard.token()) > holder.token, "the token rises");
    Ok(())
}

async fn slashes() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let (locks, client) = (
        locks(&servers, TTL).await?,
        raw(&servers.endpoint(0)).await?,
    );
    let guard = locks.lock("a/b").await?;
    // The folder of `a` is empty: neither etcdctl nor we have to wait there.
    let mut theirs = etcdctl(&servers, "locks/a", &["true"])?;
    ensure!(within(SOON, "a is free", theirs.wait()).await??.success());
    ensure!(locks.try_lock("a").await?.is_some(), "a is free");
    // Under its own name a/b is held.
    let mut theirs = etcdctl(&servers, "locks/a%2Fb", &["true"])?;
    until_below(&client, "locks/a%2Fb/", 2).await?;
    guard.release().await?;
    ensure!(within(SOON, "a/b is free", theirs.wait()).await??.success());
    until_below(&client, "locks/", 0).await?;
    ensure!(below(&client, "locks/").await?.is_empty());
    Ok(())
}
