//! What servers say of themselves, set up well and otherwise.

mod support;

use std::io::Write as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_core::{Backend as _, Examination, Locks, Severity};
use support::{LONG, SOON, client, run, within};

fn main() -> ExitCode {
    support::main(
        ZooKeeperEnsemble::missing(),
        &[
            ("a_single_server_that_cuts_sessions_is_warned_of", || {
                run(single_server())
            }),
            ("three_servers_are_as_they_should_be", || {
                run(three_servers())
            }),
            ("a_server_without_the_others_does_not_serve", || {
                run(server_cut_off())
            }),
            ("an_ensemble_that_may_not_be_asked_is_said", || {
                run(ensemble_not_asked())
            }),
        ],
    )
}

async fn examined(servers: &str) -> anyhow::Result<(Examination, u32)> {
    let zookeeper = client(servers).await?;
    let losses = zookeeper.guarantees().node_losses;
    let locks = Locks::new(zookeeper).with_ttl(LONG);
    Ok((locks.examine().await?, losses))
}

fn found(examination: &Examination) -> Vec<(Severity, &'static str)> {
    let findings = examination.findings.iter();
    findings.map(|it| (it.severity, it.id)).collect()
}

async fn single_server() -> anyhow::Result<()> {
    let servers = ZooKeeperEnsemble::start(1, "maxSessionTimeout=4000").await?;
    let (examination, losses) = examined(&servers.servers()).await?;
    ensure!(losses == 0, "{losses}");
    let expected = [
        (Severity::Warning, "session-cut"),
        (Severity::Warning, "too-few-servers"),
    ];
    ensure!(found(&examination) == expected, "{examination:?}");
    ensure!(
        examination.findings[0].what.contains("4s"),
        "{examination:?}"
    );
    Ok(())
}

async fn three_servers() -> anyhow::Result<()> {
    let servers = ZooKeeperEnsemble::start(3, "4lw.commands.whitelist=srvr").await?;
    let (examination, losses) = examined(&servers.servers()).await?;
    ensure!(losses == 1, "{losses}");
    ensure!(examination.findings.is_empty(), "{examination:?}");
    let (whole, each) = examination.servers.split_last().context("servers")?;
    ensure!(whole.round_trip.is_some(), "{whole:?}");
    let off = whole.clock_ahead_ms.context("a clock")?;
    ensure!(off.unsigned_abs() < 10_000, "the same clock: {off} ms");
    ensure!(each.len() == 3, "{examination:?}");
    for server in each {
        let version = server.version.as_deref().context("a version")?;
        ensure!(version.starts_with("3."), "{version}");
    }

    let (examination, losses) = examined(&servers.server(0)).await?;
    ensure!(losses == 0, "nobody to turn to");
    let expected = [(Severity::Warning, "servers-not-named")];
    ensure!(found(&examination) == expected, "{examination:?}");

    let leads = servers.leader().await?;
    let follower = (leads + 1) % 3;
    servers.member(follower).kill();
    let (examination, losses) = examined(&servers.servers()).await?;
    ensure!(losses == 1, "as many as three bear: {losses}");
    let expected = [(Severity::Warning, "server-down")];
    ensure!(found(&examination) == expected, "{examination:?}");
    ensure!(
        examination.findings[0]
            .what
            .contains(&servers.server(follower))
    );
    Ok(())
}

/// It lives, and serves nobody: it has lost its leader.
async fn server_cut_off() -> anyhow::Result<()> {
    let servers = ZooKeeperEnsemble::start_with_links(3, "4lw.commands.whitelist=srvr").await?;
    let follower = (servers.leader().await? + 1) % 3;
    let locks = Locks::new(client(&servers.servers()).await?).with_ttl(LONG);
    servers.cut_off(follower, true);
    let noticed = async {
        loop {
            match locks.examine().await {
                Ok(examination) if !examination.findings.is_empty() => {
                    return anyhow::Ok(examination);
                }
                // It may be the one that was asked.
                Err(error) if !error.is_transient() => return Err(error.into()),
                _ => {}
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let examination = within(SOON, "it loses its leader", noticed).await??;
    let expected = [(Severity::Warning, "server-not-serving")];
    ensure!(found(&examination) == expected, "{examination:?}");
    let what = &examination.findings[0].what;
    ensure!(what.contains(&servers.server(follower)), "{what}");
    Ok(())
}

async fn ensemble_not_asked() -> anyhow::Result<()> {
    // Base64 of SHA-1 of the user and the password.
    let secret = "super:lK75jTNcA+U9vtVEw5vB51mj/w4=";
    let superuser = format!("DigestAuthenticationProvider.superDigest={secret}");
    let servers = ZooKeeperEnsemble::start(3, &superuser).await?;
    administrate(
        &servers.server(0),
        "addauth digest super:secret\nsetAcl /zookeeper/config auth::r\n",
    )?;
    let (examination, losses) = examined(&servers.servers()).await?;
    ensure!(losses == 0, "not known: {losses}");
    let unknown = (Severity::Warning, "servers-unknown");
    ensure!(found(&examination) == [unknown], "{examination:?}");
    Ok(())
}

/// By ZooKeeper's own command line.
fn administrate(server: &str, commands: &str) -> anyhow::Result<()> {
    let mut main = Command::new(ZooKeeperEnsemble::PROGRAM)
        .args(["-cp", "/usr/share/java/*"])
        .args(["org.apache.zookeeper.ZooKeeperMain", "-server", server])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = main.stdin.take().context("its input")?;
    input.write_all(commands.as_bytes())?;
    drop(input);
    let said = main.wait_with_output()?;
    ensure!(said.status.success(), "{said:?}");
    Ok(())
}
