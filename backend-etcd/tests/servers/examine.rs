//! What the cluster says of itself, set up well and otherwise.

use anyhow::{Context as _, ensure};
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_core::{Backend as _, Examination, Locks, Severity};

use crate::Test;
use crate::support::{at, etcd, raw, servers, test};

pub(crate) const TESTS: &[Test] = &[
    test!("examined: a single member is warned of", single_member),
    test!(
        "examined: three members are as they should be",
        three_members
    ),
    test!("examined: a member that is down is warned of", member_down),
    test!("examined: a full database is warned of", database_full),
];

async fn examined(endpoints: &str) -> anyhow::Result<(Examination, u32)> {
    let etcd = at(endpoints).await?;
    let losses = etcd.guarantees().node_losses;
    Ok((Locks::new(etcd).examine().await?, losses))
}

fn ids(examination: &Examination) -> Vec<&'static str> {
    examination.findings.iter().map(|it| it.id).collect()
}

async fn single_member() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let (examination, losses) = examined(&servers.endpoints()).await?;
    ensure!(losses == 0, "{losses}");
    ensure!(ids(&examination) == ["too-few-members"], "{examination:?}");
    ensure!(examination.severity() == Some(Severity::Warning));
    Ok(())
}

async fn three_members() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let (examination, losses) = examined(&servers.endpoints()).await?;
    ensure!(losses == 1, "{losses}");
    ensure!(examination.findings.is_empty(), "{examination:?}");
    ensure!(examination.servers.len() == 3);
    let leads = |facts: &[(_, String)]| facts.iter().any(|(_, value)| value == "leader");
    let leaders = examination.servers.iter().filter(|it| leads(&it.facts));
    ensure!(leaders.count() == 1, "{examination:?}");
    for server in &examination.servers {
        let version = server.version.as_deref().context("a version")?;
        ensure!(version.starts_with("3."), "{version}");
        ensure!(server.round_trip.is_some(), "{server:?}");
    }

    let (examination, losses) = examined(&servers.endpoint(1)).await?;
    ensure!(losses == 0, "nobody to turn to");
    ensure!(
        ids(&examination) == ["members-not-named"],
        "{examination:?}"
    );
    Ok(())
}

async fn member_down() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    servers.member(1).kill();
    let (examination, losses) = examined(&servers.endpoints()).await?;
    ensure!(losses == 1, "as many as three bear: {losses}");
    ensure!(ids(&examination) == ["member-down"], "{examination:?}");
    ensure!(examination.findings[0].what.contains(&servers.endpoint(1)));
    Ok(())
}

async fn database_full() -> anyhow::Result<()> {
    let servers = EtcdCluster::start(1, ["--quota-backend-bytes", "400000"]).await?;
    let locks = Locks::new(etcd(&servers).await?);
    let client = raw(&servers.endpoint(0)).await?;
    let full = async {
        for number in 0..1000 {
            let mut kv = client.kv_client();
            let written = kv.put(format!("{number}"), vec![0; 50_000], None);
            if written.await.is_err() {
                return true;
            }
        }
        false
    };
    ensure!(full.await, "the quota is kept");
    let examination = locks.examine().await?;
    ensure!(ids(&examination).contains(&"no-space"), "{examination:?}");
    Ok(())
}
