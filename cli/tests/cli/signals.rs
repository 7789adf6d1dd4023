//! Case 29: signals while waiting and while running.

use std::process::Stdio;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::support::{
    Home, Running, eventually, is_gone, is_stopped, line_in, pid_in, shell_code, stderr,
};

const SIGNALS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

fn name(signal: Signal) -> &'static str {
    signal.as_str().strip_prefix("SIG").unwrap()
}

/// Whether the process is past its start, where signals still do what they do by default.
fn hears_signals(process: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let blocked = u64::from_str_radix(blocked.unwrap().trim(), 16).unwrap();
    blocked >> (Signal::SIGTERM as i32 - 1) & 1 == 1
}

/// Somebody who holds `k` until it is dropped or told to go on.
fn holder(home: &Home) -> Running {
    let holder = Running::start(
        home.script("run k", r#"echo in > "$HOME/in"; read end"#)
            .stdin(Stdio::piped()),
    );
    line_in(&home.path("in"));
    holder
}

fn leaves_while_waiting(home: &Home, queued: impl Fn() -> bool) {
    let mut holder = holder(home);
    for signal in SIGNALS {
        let mut waiting = Running::start(&mut home.script("run k", r#"echo ran > "$HOME/ran""#));
        eventually("it waits", || {
            (hears_signals(waiting.pid()) && queued()).then_some(())
        });
        waiting.signal(signal);
        let status = waiting.end();
        assert_eq!(status.code(), Some(128 + signal as i32), "{signal}");
        assert!(holder.0.try_wait().unwrap().is_none());
    }
    drop(holder.0.stdin.take());
    assert!(!holder.end().success(), "read met the end of its input");
    // Nothing was left queued: it is free, not handed to somebody who has gone.
    assert!(!home.is_held("k"));
    let next = home.leasehold("run -n k -- true").status().unwrap();
    assert!(next.success());
    assert!(!home.path("ran").exists());
}

#[test]
fn case_29_leaves_at_once_while_waiting() {
    let home = Home::new();
    leaves_while_waiting(&home, || true);
}

fn passes_signals_on(home: &Home) {
    for signal in [&SIGNALS[..], &[Signal::SIGUSR1, Signal::SIGUSR2]].concat() {
        let name = name(signal);
        let ready = home.path(&format!("ready-{name}"));
        // The child decides what comes of it.
        let mut running = Running::start(&mut home.script(
            "run k",
            &format!(
                r#"trap 'exit 9' {name}; echo $$ > "$HOME/ready-{name}"; while :; do sleep 0.02; done"#
            ),
        ));
        line_in(&ready);
        assert!(home.is_held("k"));
        running.signal(signal);
        assert_eq!(running.end().code(), Some(9), "{name}");
        assert!(!home.is_held("k"), "{name}");

        // The child dies of it, and so does what it started.
        let started = home.path(&format!("started-{name}"));
        let mut running = Running::start(&mut home.script(
            "run k",
            &format!(
                r#"sh -c 'echo $$ > "$HOME/started-{name}"; while :; do sleep 0.02; done'; exit 4"#
            ),
        ));
        let grandchild = pid_in(&started);
        running.signal(signal);
        assert_eq!(running.end().code(), Some(128 + signal as i32), "{name}");
        eventually("the grandchild ends", || is_gone(grandchild).then_some(()));
        assert!(!home.is_held("k"), "{name}");
    }
}

#[test]
fn case_29_passes_signals_on_while_running() {
    passes_signals_on(&Home::new());
}

/// Whoever starts us with a signal ignored wants us and our child to live through it.
#[test]
fn what_was_ignored_at_the_start_stays_ignored() {
    let home = Home::new();
    let script = r#"
        trap '' HUP
        "$LEASEHOLD" run k -- sh -c 'echo $$ > "$HOME/child"; read end; exit 6' &
        echo $! > "$HOME/run"
        "$LEASEHOLD" run k -- true &
        echo $! > "$HOME/waiting"
        wait $(cat "$HOME/run"); echo "code $?" > "$HOME/code"
        wait; exit 0
    "#;
    let mut shell = Running::start(
        std::process::Command::new("bash")
            .args(["-c", script])
            .env("HOME", home.path(""))
            .env("LEASEHOLD", env!("CARGO_BIN_EXE_leasehold"))
            .env_remove("XDG_STATE_HOME")
            .env_remove("LEASEHOLD_URL")
            .stdin(Stdio::null()),
    );
    let (run, waiting) = (pid_in(&home.path("run")), pid_in(&home.path("waiting")));
    let child = pid_in(&home.path("child"));
    for process in [run, waiting, child] {
        nix::sys::signal::kill(process, Signal::SIGHUP).ok();
    }
    assert_eq!(line_in(&home.path("code")), "code 6");
    assert!(shell.end().success());
}

#[test]
fn a_death_by_signal_comes_back_as_a_shell_tells_it() {
    let home = Home::new();
    for signal in [
        Signal::SIGKILL,
        Signal::SIGSEGV,
        Signal::SIGINT,
        Signal::SIGPIPE,
    ] {
        let output = home
            .script("run k", &format!("kill -{} $$", name(signal)))
            .output()
            .unwrap();
        assert_eq!(shell_code(output.status), 128 + signal as i32, "{signal}");
        assert_eq!(stderr(&output), "");
    }
}

/// Without a terminal nobody stops with the child: it keeps its lock, and goes on when told to.
#[test]
fn stop_and_continuation_are_passed_on() {
    let home = Home::new();
    // A shell that starts others can be caught in between, where it sleeps rather than stops.
    nix::unistd::mkfifo(&home.path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut command = std::process::Command::new("setsid");
    command
        .args(["--wait", env!("CARGO_BIN_EXE_leasehold"), "run", "k", "--"])
        .args(["sh", "-c"])
        .arg(r#"echo $PPID > "$HOME/parent"; echo $$ > "$HOME/child"; trap 'exit 5' TERM; exec 9<> "$HOME/fifo"; read end <&9; echo never"#)
        .env("HOME", home.path(""))
        .env_remove("XDG_STATE_HOME")
        .env_remove("LEASEHOLD_URL")
        .stdin(Stdio::null());
    let mut running = Running::start(&mut command);
    let child = pid_in(&home.path("child"));
    let parent = pid_in(&home.path("parent"));
    let send = |signal| nix::sys::signal::kill(parent, signal).unwrap();
    send(Signal::SIGTSTP);
    eventually("the child stops", || is_stopped(child).then_some(()));
    assert!(home.is_held("k"));
    assert!(!is_stopped(parent));
    send(Signal::SIGCONT);
    eventually("the child goes on", || (!is_stopped(child)).then_some(()));
    // TERM is not slept through.
    send(Signal::SIGTSTP);
    eventually("the child stops", || is_stopped(child).then_some(()));
    send(Signal::SIGTERM);
    assert_eq!(running.end().code(), Some(5));
}

/// What happens when nobody can help it: the child does not go on without anybody to look after its
/// lock.
#[cfg(target_os = "linux")]
#[test]
fn a_killed_run_takes_its_child_along() {
    let home = Home::new();
    let mut running = Running::start(&mut home.script(
        "run k",
        r#"trap '' TERM HUP INT; echo $$ > "$HOME/child"; while :; do sleep 0.02; done"#,
    ));
    let child = pid_in(&home.path("child"));
    running.signal(Signal::SIGKILL);
    running.end();
    eventually("the child is gone", || is_gone(child).then_some(()));
    assert!(!home.is_held("k"));
}
