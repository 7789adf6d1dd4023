//! `conformance`: what it says, and that it leaves nothing behind.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Output, Stdio};

use leasehold_conformance::RULES;
use leasehold_conformance::fixtures::certificates::Authority;
use leasehold_conformance::fixtures::etcd::Etcd;
use leasehold_conformance::fixtures::redis;
use leasehold_conformance::fixtures::redis_cluster::RedisCluster;
use leasehold_conformance::fixtures::sentinel::{SentinelGroup, ask};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use tokio::runtime::Runtime;

use crate::support::{Home, RedisServer, Running, children, eventually, is_gone, stderr, stdout};

/// Rules that are quick, and that leave something on every store while they run.
const QUICK: &str = "C1 C2 C3 c6 C16 C21 F3";

fn run(home: &Home, args: &str) -> Output {
    home.leasehold(&format!("conformance {args}"))
        .output()
        .unwrap()
}

/// All that was promised is kept, and what would stop the server is not tried.
fn keeps_its_promises(home: &Home, args: &str) {
    let output = run(home, args);
    let said = stdout(&output) + &stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("test C1 one holder at a time"), "{said}");
    assert!(
        !said.contains("test C4 "),
        "only what was asked for: {said}"
    );
    assert!(!said.contains("FAILED"), "{said}");
    let restarts = said.lines().find(|line| line.starts_with("test F3 "));
    assert!(
        restarts.is_some_and(|line| line.contains("the servers are not ours to stop")),
        "{said}"
    );
}

/// Ends as Ctrl-C ends it, in the middle of a check that takes long, with locks held.
fn leaves_by_ctrl_c(home: &Home, args: &str, is_under_way: impl Fn() -> bool) {
    let said = home.path("said");
    let mut running = Running::start(
        home.leasehold(&format!("conformance C10 C15 C9 {args}"))
            .stdout(fs::File::create(&said).unwrap())
            .stderr(Stdio::null()),
    );
    // The place itself is made before the suite, which is a process of its own, is started.
    let family = eventually("the suite runs, and writes something", || {
        let family = descendants(running.pid());
        (is_under_way() && !family.is_empty()).then_some(family)
    });
    running.signal(Signal::SIGINT);
    assert_eq!(running.end().code(), Some(130));
    let said = fs::read_to_string(said).unwrap();
    assert!(
        !said.contains("test result"),
        "it was not ended, but ran on: {said}"
    );
    for process in family {
        eventually("all of it is gone", || is_gone(process).then_some(()));
    }
}

fn descendants(process: Pid) -> Vec<Pid> {
    let children = children(process).into_iter();
    children
        .flat_map(|child| [vec![child], descendants(child)].concat())
        .collect()
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

pub(crate) fn the_rules_are_listed() {
    let home = Home::new();
    let output = run(&home, "--list");
    assert_eq!(output.status.code(), Some(0));
    let listed = stdout(&output);
    assert_eq!(listed.lines().count(), RULES.len());
    for rule in RULES {
        assert!(listed.contains(rule.title), "{}", rule.id);
    }
    let some = stdout(&run(&home, "c1 F5 C8 --skip f5 --list"));
    assert_eq!(some.lines().count(), 2, "{some}");
    let output = run(&home, "C1 C99 --list");
    assert_eq!(output.status.code(), Some(117));
    assert!(stderr(&output).contains("no rule C99"));
}

pub(crate) fn a_store_that_is_not_reached_is_said_in_one_line() {
    let home = Home::new();
    for (url, code) in [
        ("redis://me:hunter2@127.0.0.1:1", 118),
        ("memory:?tll=1s", 117),
    ] {
        let output = run(&home, &format!("C1 --url {url}"));
        assert_eq!(output.status.code(), Some(code), "{url}");
        assert_eq!(stdout(&output), "");
        let said = stderr(&output);
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
}

pub(crate) fn files_keep_their_promises_and_nothing_is_left() {
    let home = Home::new();
    let folder = home.path("locks");
    fs::create_dir(&folder).unwrap();
    let url = format!("--url file:{}", folder.display());
    keeps_its_promises(&home, &format!("{QUICK} {url}"));
    assert!(is_empty(&folder));
    leaves_by_ctrl_c(&home, &url, || {
        let place = fs::read_dir(&folder).unwrap().next();
        place.is_some_and(|place| !is_empty(&place.unwrap().path()))
    });
    assert!(is_empty(&folder));
    // What others have there stays.
    home.script(&format!("run mine {url}"), "true")
        .status()
        .unwrap();
    assert!(!is_empty(&folder));
    keeps_its_promises(&home, &format!("C1 F3 {url}"));
    assert!(folder.join("mine.lock").exists());
}

pub(crate) fn redis_keeps_its_promises_and_nothing_is_left() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let keys = || server.number("DBSIZE");
    keeps_its_promises(&home, QUICK);
    assert_eq!(keys(), 0);
    leaves_by_ctrl_c(&home, "", || keys() > 1);
    assert_eq!(keys(), 0);
    // What others have there stays, though its name looks alike.
    server.ask("SET lock:mine somebody");
    server.ask("SET lock:conformance-mine somebody");
    keeps_its_promises(&home, "C1 C7 F3");
    assert_eq!(keys(), 2);
}

pub(crate) fn redis_behind_sentinels_keeps_its_promises_and_nothing_is_left() {
    let runtime = Runtime::new().unwrap();
    let group = runtime.block_on(SentinelGroup::find()).unwrap();
    keeps_its_promises_on(&runtime, &group.url(), &[group.servers()[0].port()]);
}

/// What is left lies on every master.
pub(crate) fn a_redis_cluster_keeps_its_promises_and_nothing_is_left() {
    let runtime = Runtime::new().unwrap();
    let cluster = runtime.block_on(RedisCluster::find()).unwrap();
    let masters = [0, 1, 2].map(|node| cluster.port(node));
    keeps_its_promises_on(&runtime, &cluster.url(), &masters);
}

pub(crate) fn redis_over_tls_keeps_its_promises_and_nothing_is_left() {
    if let Some(missing) = Authority::missing("redis") {
        return missing.skip();
    }
    let authority = Authority::new().unwrap();
    let certificate = authority.sign("server").unwrap();
    let authority = authority.certificate().display().to_string();
    let [certificate, key] = [certificate.certificate, certificate.key];
    let arguments = format!(
        "--tls-port {{tls_port}} --tls-auth-clients no --tls-cert-file {} --tls-key-file {} \
         --tls-ca-cert-file {authority}",
        certificate.display(),
        key.display(),
    );
    let runtime = Runtime::new().unwrap();
    let server = redis::RedisServer::start(arguments.split(' '));
    let server = runtime.block_on(server).unwrap();
    let port = server.tls_port();
    let url = format!("rediss://127.0.0.1:{port}?certificate_authority={authority}");
    keeps_its_promises_on(&runtime, &url, &[server.port()]);
}

/// The servers at `ports`, which are nobody else's, have all that the store at `url` has.
fn keeps_its_promises_on(runtime: &Runtime, url: &str, ports: &[u16]) {
    let keys = || {
        let keys = ports.iter().map(|&port| {
            let number = runtime.block_on(ask(port, "DBSIZE")).unwrap();
            number[0].parse::<u64>().unwrap()
        });
        keys.collect::<Vec<_>>()
    };
    let home = Home::at(url);
    keeps_its_promises(&home, QUICK);
    assert_eq!(keys(), vec![0; ports.len()]);
    leaves_by_ctrl_c(&home, "", || keys().iter().sum::<u64>() > 1);
    assert_eq!(keys(), vec![0; ports.len()]);
}

pub(crate) fn etcd_keeps_its_promises_and_nothing_is_left() {
    let runtime = Runtime::new().unwrap();
    let cluster = match runtime.block_on(Etcd::find(1)) {
        Ok(cluster) => cluster,
        Err(missing) => return missing.skip(),
    };
    let home = Home::new();
    // It may be a server that was given to us, with whatever in it.
    let prefix = format!("test-{}/", std::process::id());
    let url = format!("etcd://{}?prefix={prefix}", cluster.endpoints());
    let left = || {
        let client = etcd_client::Client::connect([cluster.endpoints()], None);
        runtime.block_on(async {
            let all = etcd_client::GetOptions::new()
                .with_prefix()
                .with_count_only();
            let found = client.await.unwrap().get(&*prefix, Some(all)).await;
            found.unwrap().count()
        })
    };
    keeps_its_promises(&home, &format!("{QUICK} --url {url}"));
    assert_eq!(left(), 0);
    leaves_by_ctrl_c(&home, &format!("--url {url}"), || left() > 0);
    assert_eq!(left(), 0);
}

/// Locks vanish: the code says that a rule is broken.
pub(crate) fn a_broken_promise_is_told() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let mut running = Running::start(
        home.leasehold("conformance C10")
            .stdout(Stdio::piped())
            .stderr(Stdio::null()),
    );
    let status = eventually("the suite ends", || {
        server.ask("FLUSHALL");
        running.0.try_wait().unwrap()
    });
    let mut said = String::new();
    running
        .0
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("FAILED"), "{said}");
}
