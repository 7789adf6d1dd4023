//! What the cluster says of itself, set up well and otherwise.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use etcd_client::{AlarmAction, AlarmOptions, AlarmType, MemberAddOptions};
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_core::{Backend as _, Examination, Finding, Locks, Severity};
use leasehold_etcd::Etcd;

use crate::Test;
use crate::support::{SOON, at, etcd, options, raw, servers, test, within};

pub(crate) const TESTS: &[Test] = &[
    test!("examined: a single member is warned of", single_member),
    test!(
        "examined: three members are as they should be",
        three_members
    ),
    test!("examined: a member that is down is warned of", member_down),
    test!(
        "examined: a member without the others is in trouble",
        majority_down
    ),
    test!("examined: nobody is left to ask", all_down),
    test!("examined: a full database is warned of", database_full),
    test!("examined: corrupt data is a danger", data_corrupt),
    test!(
        "examined: an even number and learners are noted",
        four_members
    ),
];

const STEP: Duration = Duration::from_millis(50);

async fn examined(endpoints: &str) -> anyhow::Result<(Examination, u32)> {
    // Where the leader was killed, another is elected first.
    let etcd = Etcd::connect_with(options(endpoints)?.with_connect_timeout(SOON)).await?;
    let losses = etcd.guarantees().node_losses;
    Ok((Locks::new(etcd).examine().await?, losses))
}

/// Examines until it finds what is expected.
async fn until(
    locks: &Locks,
    expected: impl Fn(&Examination) -> bool + Send + Sync,
) -> anyhow::Result<Examination> {
    let mut last = None;
    let found = async {
        loop {
            let examination = locks.examine().await?;
            if expected(&examination) {
                return anyhow::Ok(examination);
            }
            last = Some(examination);
            tokio::time::sleep(STEP).await;
        }
    };
    let found = within(SOON, "what is expected", found).await;
    found.with_context(|| format!("{last:?}"))?
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

async fn majority_down() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let locks = Locks::new(at(&servers.endpoints()).await?);
    servers.member(1).kill();
    servers.member(2).kill();
    // Until it notices, it takes the killed leader for its own.
    let trouble = |it: &Finding| it.id == "member-in-trouble";
    let examination = until(&locks, |found| found.findings.iter().any(trouble)).await?;
    let down = ids(&examination)
        .iter()
        .filter(|id| **id == "member-down")
        .count();
    ensure!(down == 2, "{examination:?}");
    let found = examination.findings.iter().find(|it| trouble(it));
    let what = &found.context("its trouble")?.what;
    ensure!(what.contains(&servers.endpoint(0)), "{what}");
    Ok(())
}

async fn all_down() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let locks = Locks::new(at(&servers.endpoints()).await?);
    servers.member(0).kill();
    let examination = locks.examine().await?;
    let expected = ["members-unknown", "member-down"];
    ensure!(ids(&examination) == expected, "{examination:?}");
    Ok(())
}

async fn data_corrupt() -> anyhow::Result<()> {
    let servers = servers(3).await?;
    let locks = Locks::new(etcd(&servers).await?);
    let mut client = raw(&servers.endpoint(1)).await?;
    let status = client.status().await?;
    let mut member = AlarmOptions::new();
    member.with_member(status.header().context("a header")?.member_id());
    let (raise, corrupt) = (AlarmAction::Activate, AlarmType::Corrupt);
    client.alarm(raise, corrupt, Some(member)).await?;
    // The others hear of it when they apply it.
    let mut examination = locks.examine().await?;
    while ids(&examination) != ["corrupt"; 3] {
        ensure!(
            !ids(&examination).contains(&"member-down"),
            "{examination:?}"
        );
        examination = locks.examine().await?;
    }
    ensure!(examination.severity() == Some(Severity::Danger));
    Ok(())
}

async fn four_members() -> anyhow::Result<()> {
    let servers = servers(4).await?;
    let mut client = raw(&servers.endpoint(0)).await?;
    let learner = MemberAddOptions::new().with_is_learner();
    let added = async {
        // Not before all of them have been connected for five seconds.
        while let Err(error) = client
            .member_add(["127.0.0.1:1"], Some(learner.clone()))
            .await
        {
            ensure!(error.to_string().contains("unhealthy cluster"), "{error}");
            tokio::time::sleep(STEP).await;
        }
        anyhow::Ok(())
    };
    within(SOON, "a learner is added", added).await??;
    let (examination, losses) = examined(&servers.endpoints()).await?;
    ensure!(losses == 1, "{losses}");
    ensure!(
        ids(&examination) == ["even-members", "learners"],
        "{examination:?}"
    );
    ensure!(examination.severity() == Some(Severity::Note));
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
