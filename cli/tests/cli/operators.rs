//! `status` and `break`.

use std::process::Stdio;

use serde_json::Value;

use crate::support::{Home, RedisServer, Running, Screen, line_in, stderr, stdout};

fn holder(home: &Home, label: &str) -> Running {
    let ready = home.path(label);
    let holder = Running::start(
        home.script(
            &format!("run k --label {label}"),
            &format!(r#"echo "$LEASEHOLD_TOKEN $LEASEHOLD_OWNER" > "$HOME/{label}"; read end"#),
        )
        .stdin(Stdio::piped())
        .stderr(Stdio::null()),
    );
    line_in(&ready);
    holder
}

fn let_go(mut holder: Running) {
    drop(holder.0.stdin.take());
    assert_eq!(
        holder.end().code(),
        Some(1),
        "read met the end of its input"
    );
}

fn status_as_json(home: &Home) -> Value {
    let output = home.leasehold("status --json k").output().unwrap();
    let text = stdout(&output);
    assert_eq!(text.lines().count(), 1);
    let status: Value = serde_json::from_str(&text).unwrap();
    let expected = if status["held"] == true { 0 } else { 1 };
    assert_eq!(output.status.code(), Some(expected));
    status
}

fn shows_who_holds(home: &Home) {
    assert_eq!(
        status_as_json(home),
        serde_json::json!({ "key": "k", "held": false })
    );
    let running = holder(home, "first");
    let told = line_in(&home.path("first"));
    let (token, owner) = told.split_once(' ').unwrap();
    let status = status_as_json(home);
    assert_eq!(status["key"], "k");
    assert_eq!(status["owner"], owner);
    assert_eq!(status["label"], "first");
    assert_eq!(status["token"], token.parse::<u64>().unwrap());
    assert!(status["since"].as_str().unwrap().ends_with('Z'), "{status}");
    let output = home.leasehold("status k").output().unwrap();
    let text = stdout(&output);
    for part in ["k is held", owner, "first", token, "ago"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "no colours in a pipe: {text:?}");
    let_go(running);
    let output = home.leasehold("status k").output().unwrap();
    assert_eq!(stdout(&output), "k is free\n");
}

pub(crate) fn status_shows_who_holds() {
    shows_who_holds(&Home::new());
}

pub(crate) fn status_shows_who_holds_on_redis() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    shows_who_holds(&home);
    let running = holder(&home, "second");
    let left = status_as_json(&home)["remaining_ms"].as_u64().unwrap();
    assert!((1..=30_000).contains(&left), "{left}");
    let_go(running);
}

pub(crate) fn break_does_not_ask_nobody() {
    let home = Home::new();
    let running = holder(&home, "first");
    let output = home.leasehold("break k").output().unwrap();
    assert_eq!(output.status.code(), Some(117));
    assert!(stderr(&output).contains("--yes"));
    assert!(home.is_held("k"));
    let_go(running);
    let output = home.leasehold("break --yes k").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "nothing to take away");
    assert!(stderr(&output).contains("free"));
}

pub(crate) fn break_asks_on_a_terminal() {
    let home = Home::new();
    let mut running = holder(&home, "first");
    let mut shell = Screen::shell(&home);
    for answer in ["n", "", "nonsense"] {
        shell.enter(r#""$LEASEHOLD" break k; echo "code-$?""#);
        shell.expect("first");
        shell.expect("[y/N]");
        shell.enter(answer);
        shell.expect("code-1");
        assert!(home.is_held("k"));
    }
    shell.enter(r#""$LEASEHOLD" break k; echo "code-$?""#);
    shell.expect("[y/N]");
    shell.enter("y");
    shell.expect("code-0");
    assert_eq!(running.end().code(), Some(116));
    assert!(!home.is_held("k"));
}

fn spares_the_successor(home: &Home) {
    let first = holder(home, "first");
    let mut shell = Screen::shell(home);
    shell.enter(r#""$LEASEHOLD" break k; echo "code-$?""#);
    shell.expect("first");
    shell.expect("[y/N]");
    // While the operator thinks, the lock changes hands.
    let_go(first);
    let second = holder(home, "second");
    shell.enter("yes");
    shell.expect("nothing was taken away");
    shell.expect("code-1");
    assert_eq!(status_as_json(home)["label"], "second");
    let_go(second);
}

pub(crate) fn case_60_break_takes_away_only_what_was_shown() {
    spares_the_successor(&Home::new());
}

pub(crate) fn case_60_break_takes_away_only_what_was_shown_on_redis() {
    let server = RedisServer::start();
    spares_the_successor(&Home::with(&server));
}
