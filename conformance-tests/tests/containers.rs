//! Containers are removed at the end, whatever the end is.
#![allow(
    clippy::disallowed_methods,
    reason = "it looks again after a pause, up to a limit"
)]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use leasehold_conformance::fixtures::container::LABEL;
use leasehold_conformance::fixtures::redis::Redis;
use leasehold_conformance::fixtures::{Missing, SERVERS};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};

/// Set where this binary is to start a server, say so, and come to this end.
const END: &str = "LEASEHOLD_TEST_CONTAINERS";

/// Engines are slow when they have much to do.
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    if let Ok(end) = std::env::var(END) {
        start_and_end(&end);
        return ExitCode::SUCCESS;
    }
    let ends = [
        ("when the run is over", "return", None),
        ("after a panic", "panic", None),
        ("after an exit in the middle", "exit", None),
        ("after Ctrl-C", "wait", Some(Signal::INT)),
        ("after SIGTERM", "wait", Some(Signal::TERM)),
        ("after SIGKILL", "wait", Some(Signal::KILL)),
    ];
    let mut tests: Vec<_> = ends
        .into_iter()
        .map(|(name, end, signal)| {
            Trial::ignorable_test(format!("nothing is left {name}"), move || {
                nothing_is_left(end, signal)
            })
        })
        .collect();
    tests.push(Trial::ignorable_test(
        "what a process left behind that is gone is removed by the next",
        the_next_sweeps,
    ));
    tests.push(Trial::test(
        "a way of starting servers that does not exist is refused",
        an_unknown_way_is_refused,
    ));
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

/// The other process: it prints the name of its container, or why there is none.
fn start_and_end(end: &str) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let found = runtime.block_on(Redis::find());
    match &found {
        Ok(_) => println!("started"),
        Err(missing) => {
            println!("{missing}, required: {}", missing.is_required());
            return;
        }
    }
    match end {
        "panic" => panic!("as it was told"),
        "exit" => std::process::exit(3),
        "wait" => std::thread::sleep(LIMIT * 2),
        _ => runtime.block_on(async { drop(found) }),
    }
}

fn nothing_is_left(end: &str, signal: Option<Signal>) -> Result<Completion, Failed> {
    if let Some(reason) = unavailable() {
        return reason;
    }
    let mut child = start(end, "containers")?;
    let mut said = String::new();
    let output = child.stdout.take().ok_or("no output")?;
    BufReader::new(output).read_line(&mut said)?;
    if said.trim() != "started" {
        child.wait()?;
        return ignored_unless_required(said.trim());
    }
    let pid = child.id();
    if let Some(signal) = signal {
        // While it waits, its container is there: else this test could not fail.
        if containers_of(pid)?.is_empty() {
            return Err("there is no container with the label of its process".into());
        }
        kill_process(Pid::from_child(&child), signal)?;
    }
    child.wait()?;
    gone(|| containers_of(pid))
}

fn the_next_sweeps() -> Result<Completion, Failed> {
    if let Some(reason) = unavailable() {
        return reason;
    }
    // What a process would leave whose watchdog was killed with it: created, and never started.
    let image = docker(&["images", "--quiet", "--filter", "dangling=false"])?;
    let Some(image) = image.lines().next() else {
        return Ok(Completion::ignored_with("the engine has no image"));
    };
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let space = std::fs::read_link("/proc/self/ns/pid")?;
    let mut past = Command::new("true").spawn()?;
    past.wait()?;
    let create = |pid: u32, started: &str| {
        let label = format!(
            "{LABEL}={} {} {pid} {started}",
            boot.trim(),
            space.display()
        );
        docker(&["create", "--label", &label, image, "true"])
    };
    let left = create(past.id(), "1")?;
    let own = std::fs::read_to_string("/proc/self/stat")?;
    let started = own
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.split(' ').nth(19));
    let kept = create(std::process::id(), started.ok_or("no time of the start")?)?;

    let mut child = start("return", "containers")?;
    child.wait()?;
    let all = docker(&["ps", "--all", "--quiet", "--no-trunc"]);
    docker(&["rm", "--force", &kept])?;
    let all = all?;
    if all.contains(&left) {
        docker(&["rm", "--force", &left])?;
        return Err("it is still there".into());
    }
    if !all.contains(&kept) {
        return Err("that of a living process was removed too".into());
    }
    Ok(Completion::Completed)
}

fn an_unknown_way_is_refused() -> Result<(), Failed> {
    let output = start("return", "magic")?.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.contains("say containers or programs") && said.contains("required: true") {
        true => Ok(()),
        false => Err(said.into()),
    }
}

/// Why there can be no containers here, unless it is known only when one is started.
fn unavailable() -> Option<Result<Completion, Failed>> {
    if std::env::var(SERVERS).is_ok_and(|only| only == "programs") {
        let reason = format!("no containers by {SERVERS}");
        return Some(Ok(Completion::ignored_with(reason)));
    }
    match docker(&["version"]) {
        Ok(_) => None,
        Err(error) => Some(ignored_unless_required(error.message().unwrap_or_default())),
    }
}

fn ignored_unless_required(reason: &str) -> Result<Completion, Failed> {
    match Missing::new("redis", reason).is_required() {
        true => Err(reason.into()),
        false => Ok(Completion::ignored_with(reason)),
    }
}

fn start(end: &str, servers: &str) -> std::io::Result<Child> {
    Command::new(std::env::current_exe()?)
        .env(END, end)
        .env(SERVERS, servers)
        .env_remove(Redis::URL)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
}

/// Those that belong to the process with this number, running or not.
fn containers_of(pid: u32) -> Result<String, Failed> {
    let format = format!("{{{{.ID}}}} {{{{.Label \"{LABEL}\"}}}}");
    let all = docker(&["ps", "--all", "--format", &format])?;
    let number = pid.to_string();
    let its = all
        .lines()
        .filter(|line| line.rsplit(' ').nth(1) == Some(&number));
    Ok(its.collect::<Vec<_>>().join("\n"))
}

fn gone(look: impl Fn() -> Result<String, Failed>) -> Result<Completion, Failed> {
    let start = Instant::now();
    loop {
        let left = look()?;
        if left.is_empty() {
            return Ok(Completion::Completed);
        }
        if start.elapsed() > LIMIT {
            return Err(format!("left behind: {left}").into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn docker(arguments: &[&str]) -> Result<String, Failed> {
    let output = Command::new("docker").args(arguments).output()?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(format!("docker {}: {}", arguments.join(" "), words.trim()).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
