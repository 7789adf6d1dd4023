//! `ls`.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Output, Stdio};

use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::postgres::PostgresServer;
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::support::{Home, RedisServer, Running, Screen, eventually, line_in, stderr, stdout};

/// Somebody who holds `key` until it is told to end.
fn holder(home: &Home, key: &str, label: &str) -> Running {
    let holder = start(home, key, label);
    line_in(&home.path(label));
    holder
}

/// Somebody who wants `key`.
fn start(home: &Home, key: &str, label: &str) -> Running {
    let script = format!(r#"echo "$LEASEHOLD_TOKEN $LEASEHOLD_OWNER" > "$HOME/{label}"; read end"#);
    let mut command = home.leasehold("run --label");
    command.args([label, key, "--", "sh", "-c", &script]);
    Running::start(command.stdin(Stdio::piped()).stderr(Stdio::null()))
}

fn let_go(mut holder: Running) {
    drop(holder.0.stdin.take());
    holder.end();
}

fn list(home: &Home, prefix: &str) -> Vec<Value> {
    let output = home.leasehold("ls --json").arg(prefix).output().unwrap();
    array(&output)
}

fn array(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", stderr(output));
    let text = stdout(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

pub(crate) fn ls_lists_what_is_held() {
    const ODD: &str = "order:\u{fc} /%2F\n*";
    let home = Home::new();
    assert_eq!(list(&home, ""), [Value::Null; 0]);
    let output = home.leasehold("ls").output().unwrap();
    assert_eq!(stdout(&output), "nothing is held or waited for\n");

    let one = holder(&home, "order:42", "first");
    let other = holder(&home, ODD, "second");
    let third = holder(&home, "stock:7", "third");
    let listed = list(&home, "");
    let keys: Vec<_> = listed
        .iter()
        .map(|it| it["key"].as_str().unwrap())
        .collect();
    assert_eq!(keys, ["order:42", ODD, "stock:7"]);
    let orders = list(&home, "order:");
    assert_eq!(orders[..], listed[..2]);
    let told = line_in(&home.path("first"));
    let (token, owner) = told.split_once(' ').unwrap();
    assert_eq!(orders[0]["owner"], owner);
    assert_eq!(orders[0]["token"], token.parse::<u64>().unwrap());
    assert_eq!(orders[0]["label"], "first");
    assert_eq!(orders[0]["held"], true);
    assert_eq!(orders[0]["waiting"], Value::Null, "no file knows who polls");
    assert!(
        orders[0]["raw"]
            .as_str()
            .unwrap()
            .ends_with("order%3a42.lock")
    );
    assert!(orders[0]["since"].as_str().unwrap().ends_with('Z'));

    let output = home.leasehold("ls").output().unwrap();
    assert!(output.status.success());
    let text = stdout(&output);
    assert!(!text.contains('\x1b'), "no colours in a pipe: {text:?}");
    assert_eq!(text.lines().count(), 4, "{text:?}");
    let labels = ["LABEL", "first", "second", "third"];
    let columns: Vec<_> = labels
        .iter()
        .zip(text.lines())
        .map(|(label, line)| {
            let bytes = line.find(label).expect(line);
            line[..bytes].chars().count()
        })
        .collect();
    assert_eq!(columns, [columns[0]; 4], "{text}");

    let_go(one);
    let left: Vec<_> = list(&home, "")
        .iter()
        .map(|it| it["label"].clone())
        .collect();
    assert_eq!(left, ["second", "third"]);
    let_go(other);
    let_go(third);
    assert_eq!(list(&home, ""), [Value::Null; 0]);
}

pub(crate) fn ls_lists_who_waits_on_redis() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let first = holder(&home, "k", "first");
    let second = start(&home, "k", "second");
    let third = start(&home, "k", "third");
    let listed = eventually("both wait", || {
        let listed = list(&home, "k");
        assert_eq!(listed.len(), 1, "{listed:?}");
        (listed[0]["waiting"] == 2).then(|| listed[0].clone())
    });
    assert_eq!(listed["label"], "first");
    assert_eq!(listed["raw"], "lock:k");
    assert!((1..=30_000).contains(&listed["remaining_ms"].as_u64().unwrap()));
    let output = home.leasehold("ls").output().unwrap();
    let text = stdout(&output);
    let row = text.lines().nth(1).unwrap();
    assert!(row.starts_with("k ") && row.ends_with(" 2"), "{text}");
    for mut waiter in [second, third] {
        waiter.signal(Signal::SIGTERM);
        // Killed, it would have left its place to be passed over.
        waiter.end();
    }
    eventually("nobody waits", || {
        (list(&home, "")[0]["waiting"] == 0).then_some(())
    });
    let_go(first);
    assert_eq!(list(&home, ""), [Value::Null; 0]);
}

pub(crate) fn ls_says_which_right_it_needs_on_redis() {
    let rights = "--user locks on >hunter2 ~lock:* &lock:* +@all -scan";
    let server = RedisServer::start_with(&rights.split(' ').collect::<Vec<_>>());
    let url = server.url().replace("redis://", "redis://locks:hunter2@");
    let home = Home::new();
    let status = home
        .leasehold("status k")
        .env("LEASEHOLD_URL", &url)
        .output();
    assert_eq!(
        status.unwrap().status.code(),
        Some(1),
        "locks do not need it"
    );
    let listed = home
        .leasehold("ls")
        .env("LEASEHOLD_URL", &url)
        .output()
        .unwrap();
    assert_eq!(listed.status.code(), Some(119));
    let said = stderr(&listed);
    assert!(
        said.contains("+scan") && !said.contains("hunter2"),
        "{said}"
    );
}

pub(crate) fn ls_says_where_names_are_not_known() {
    let server = Runtime::new()
        .unwrap()
        .block_on(PostgresServer::start([""; 0]));
    let server = match server {
        Ok(server) => server,
        Err(error) => {
            let missing = Missing::new("postgres", format!("{error:#}"));
            assert!(!missing.is_required(), "{missing}");
            eprintln!("not tried: {missing}");
            return;
        }
    };
    let home = Home::at(&server.url());
    let mut running = holder(&home, "order:42", "first");
    let listed = list(&home, "");
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(listed[0]["key"], Value::Null);
    let output = home.leasehold("ls order:").output().unwrap();
    assert_eq!(output.status.code(), Some(119));
    assert!(stderr(&output).contains("hashes"), "{}", stderr(&output));
    // What is shown in place of the name can be taken away by it.
    let number = listed[0]["raw"].as_str().unwrap();
    let url = server.url();
    let options = if url.contains('?') { '&' } else { '?' };
    let output = home
        .leasehold("break --yes")
        .args([
            "--url",
            &format!("{url}{options}key_form=bigint"),
            "--",
            number,
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(running.end().code(), Some(116));
    assert_eq!(list(&home, ""), [Value::Null; 0]);
}

pub(crate) fn watch_leaves_at_once() {
    let home = Home::new();
    let mut shell = Screen::shell(&home);
    shell.enter(r#""$LEASEHOLD" ls --watch=100ms"#);
    shell.expect("nothing is held");
    let running = holder(&home, "k", "first");
    shell.expect("KEY");
    shell.expect("first");
    let_go(running);
    shell.expect("nothing is held");
    shell.type_in("\x03");
    shell.expect("$ ");
    shell.enter(r#"echo "code-$?""#);
    shell.expect("code-130");
}

pub(crate) fn watch_writes_a_line_of_json_each_time() {
    let home = Home::new();
    let running = holder(&home, "k", "first");
    let mut watching = Running::start(
        home.leasehold("ls --watch=100ms --json")
            .stdout(Stdio::piped()),
    );
    let mut lines = BufReader::new(watching.0.stdout.take().unwrap()).lines();
    let mut next = || -> Vec<Value> {
        let line = lines.next().unwrap().unwrap();
        serde_json::from_str(&line).unwrap()
    };
    for _ in 0..2 {
        assert_eq!(next()[0]["key"], "k");
    }
    let_go(running);
    while !next().is_empty() {}
    watching.signal(Signal::SIGINT);
    assert_eq!(watching.end().signal(), Some(Signal::SIGINT as i32));

    // A reader that has seen enough ends it.
    let mut watching = Running::start(
        home.leasehold("ls --watch=100ms --json")
            .stdout(Stdio::piped()),
    );
    let mut first = String::new();
    let mut reader = BufReader::new(watching.0.stdout.take().unwrap());
    reader.read_line(&mut first).unwrap();
    drop(reader);
    assert_eq!(first, "[]\n");
    assert!(watching.end().success());
}

pub(crate) fn watch_outlives_a_store_that_is_away() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let running = holder(&home, "k", "first");
    let mut watching = Running::start(
        home.leasehold("ls --watch=100ms --json")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    );
    let mut lines = BufReader::new(watching.0.stdout.take().unwrap()).lines();
    let mut warnings = BufReader::new(watching.0.stderr.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    // A replica without its master answers nothing.
    server.ask("CONFIG SET replica-serve-stale-data no");
    server.ask("REPLICAOF 127.0.0.1 1");
    let warning = warnings.next().unwrap().unwrap();
    assert!(warning.contains("Redis at "), "{warning}");
    server.ask("REPLICAOF NO ONE");
    let listed = lines.next().unwrap().unwrap();
    assert!(listed.contains("first"), "{listed}");
    let_go(running);
    watching.signal(Signal::SIGINT);
    watching.end();
}
