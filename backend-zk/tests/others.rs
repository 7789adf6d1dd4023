//! Locks of Curator and of kazoo on the same path exclude ours, and ours exclude theirs.

mod support;

use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_conformance::fixtures::{Missing, program};
use support::{LONG, Test, contenders, locks, operator, run, soon, until_contenders, within};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Where Debian installs Curator.
const CURATOR: [&str; 3] = [
    "/usr/share/java/curator-recipes.jar",
    "/usr/share/java/curator-framework.jar",
    "/usr/share/java/curator-client.jar",
];

fn main() -> ExitCode {
    let curator: &[Test] = &[("curator", || run(curator()))];
    let kazoo: &[Test] = &[("kazoo", || run(kazoo()))];
    let servers = ZooKeeperEnsemble::missing();
    support::main_of(&[
        (servers.clone().or_else(no_curator), curator),
        (servers.or_else(no_kazoo), kazoo),
    ])
}

fn no_curator() -> Option<Missing> {
    let missing = CURATOR.iter().find(|jar| !Path::new(jar).exists())?;
    let reason = format!("there is no {missing} (Debian's package libcurator-recipes-java)");
    Some(Missing::new("zookeeper", reason))
}

/// kazoo is fetched by pip, once, below the target folder.
fn no_kazoo() -> Option<Missing> {
    if Path::new(&python()).exists() {
        return None;
    }
    let missing = |reason: String| Some(Missing::new("zookeeper", reason));
    let Some(system) = program("python3") else {
        return missing("there is no program python3 for kazoo".into());
    };
    let venv = venv();
    let steps = [
        vec![
            system.display().to_string(),
            "-m".into(),
            "venv".into(),
            venv.clone(),
        ],
        vec![
            format!("{venv}/bin/pip"),
            "--quiet".into(),
            "--disable-pip-version-check".into(),
            "install".into(),
            "kazoo==2.10.0".into(),
        ],
    ];
    for step in steps {
        let done = std::process::Command::new(&step[0])
            .args(&step[1..])
            .output();
        let failed = match done {
            Ok(output) if output.status.success() => continue,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        // So that the next run tries again.
        drop(std::fs::remove_dir_all(&venv));
        let last = failed.lines().last().unwrap_or_default();
        return missing(format!("kazoo cannot be installed: {last}"));
    }
    None
}

fn venv() -> String {
    format!("{}/kazoo", env!("CARGO_TARGET_TMPDIR"))
}

fn python() -> String {
    format!("{}/bin/python", venv())
}

async fn curator() -> anyhow::Result<()> {
    let class_path = [
        &CURATOR[..],
        &[ZooKeeperEnsemble::JAR, "/usr/share/java/guava.jar"],
    ]
    .concat();
    let class_path = [class_path.join(":"), "/usr/share/java/slf4j-nop.jar".into()].join(":");
    let mut command = Command::new("java");
    command.args(["-Xmx64m", "-XX:+UseSerialGC", "-cp", &class_path]);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/Curator.java"));
    excludes("curator", command).await
}

async fn kazoo() -> anyhow::Result<()> {
    let mut command = Command::new(python());
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kazoo_lock.py"));
    excludes("kazoo", command).await
}

/// Tries, waits and hand-offs in both directions.
async fn excludes(key: &'static str, mut command: Command) -> anyhow::Result<()> {
    let servers = ZooKeeperEnsemble::start(1, "").await?;
    command.arg(servers.servers()).arg(format!("/locks/{key}"));
    let mut other = Program::start(command).await?;
    let locks = locks(&servers.servers(), LONG).await?;
    let operator = operator(&servers.servers()).await?;

    // Theirs is held: ours waits, and is served.
    ensure!(other.ask("lock").await? == "got");
    ensure!(
        soon("tried", locks.try_lock(key)).await?.is_none(),
        "it is held by {key}"
    );
    let holder = soon("asked", locks.holder(key))
        .await?
        .context("a holder")?;
    ensure!(holder.grant == contenders(&operator, key).await?[0]);
    let mut waiter = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock(key).await }
    });
    until_contenders(&operator, key, 2).await?;
    let early = tokio::time::timeout(Duration::from_millis(300), &mut waiter).await;
    ensure!(early.is_err(), "granted while {key} holds it");
    ensure!(other.ask("unlock").await? == "free");
    let guard = soon("served", waiter).await??;

    // Ours is held: theirs is refused, then waits, and is served.
    ensure!(other.ask("try").await? == "busy", "{key} took what is held");
    other.tell("lock").await?;
    until_contenders(&operator, key, 2).await?;
    let early = tokio::time::timeout(Duration::from_millis(300), other.answer()).await;
    ensure!(early.is_err(), "{key} was served while we hold it");
    soon("released", guard.release()).await?;
    ensure!(other.answer().await? == "got");

    // One that was handed on to us is handed on to them.
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock(key).await }
    });
    until_contenders(&operator, key, 2).await?;
    ensure!(other.ask("unlock").await? == "free");
    let guard = soon("served", waiter).await??;
    other.tell("lock").await?;
    until_contenders(&operator, key, 2).await?;
    soon("released", guard.release()).await?;
    ensure!(other.answer().await? == "got");
    ensure!(other.ask("unlock").await? == "free");
    until_contenders(&operator, key, 0).await
}

/// A program that is told what to do line by line.
struct Program {
    _child: Child,
    words: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Program {
    async fn start(mut command: Command) -> anyhow::Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let words = child.stdin.take().context("piped")?;
        let answers = child.stdout.take().context("piped")?;
        let mut program = Self {
            _child: child,
            words,
            answers: BufReader::new(answers).lines(),
        };
        match program.answer().await?.as_str() {
            "ready" => Ok(program),
            other => bail!("it says {other}"),
        }
    }

    async fn ask(&mut self, word: &str) -> anyhow::Result<String> {
        self.tell(word).await?;
        self.answer().await
    }

    async fn tell(&mut self, word: &str) -> anyhow::Result<()> {
        Ok(self.words.write_all(format!("{word}\n").as_bytes()).await?)
    }

    /// A compiler may have to run first.
    async fn answer(&mut self) -> anyhow::Result<String> {
        let line = within(
            Duration::from_secs(120),
            "an answer",
            self.answers.next_line(),
        )
        .await??;
        line.context("it has ended")
    }
}
