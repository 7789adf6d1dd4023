//! Case 29: signals while waiting and while running.

use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{
    Home, RedisServer, Running, Strays, eventually, is_gone, is_stopped, line_in, pid_in,
    shell_code, stderr,
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

pub(crate) fn case_29_leaves_at_once_while_waiting() {
    let home = Home::new();
    leaves_while_waiting(&home, || true);
}

pub(crate) fn case_29_leaves_at_once_while_waiting_on_redis() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    leaves_while_waiting(&home, || {
        // One of the queue's keys is there while somebody waits.
        server
            .ask("KEYS lock:leasehold:*q*")
            .contains("lock:leasehold:")
    });
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

pub(crate) fn case_29_passes_signals_on_while_running() {
    passes_signals_on(&Home::new());
}

pub(crate) fn case_29_passes_signals_on_while_running_on_redis() {
    let server = RedisServer::start();
    passes_signals_on(&Home::with(&server));
    assert_eq!(server.number("EXISTS lock:k"), 0);
}

/// Whoever starts us with a signal ignored wants us and our child to live through it.
pub(crate) fn what_was_ignored_at_the_start_stays_ignored() {
    let home = Home::new();
    let script = r#"
        mkfifo "$HOME/fifo"
        trap '' HUP
        "$LEASEHOLD" run k -- sh -c 'echo $$ > "$HOME/child"; read end < "$HOME/fifo"; exit 6' &
        run=$!
        until [ -s "$HOME/child" ]; do sleep 0.01; done
        "$LEASEHOLD" run k -- true &
        waiting=$!
        echo "$run" > "$HOME/run"
        echo "$waiting" > "$HOME/waiting"
        wait "$run"; codes=$?
        wait "$waiting"; echo "$codes $?" > "$HOME/codes"
    "#;
    let mut shell = Running::start(
        home.program("bash")
            .args(["-c", script])
            .stdin(Stdio::null()),
    );
    let strays = Strays(["run", "waiting", "child"].map(|name| pid_in(&home.path(name))));
    eventually("it waits", || hears_signals(strays.0[1]).then_some(()));
    for process in strays.0 {
        kill(process, Signal::SIGHUP).unwrap();
    }
    std::fs::write(home.path("fifo"), "end\n").unwrap();
    assert_eq!(line_in(&home.path("codes")), "6 0");
    assert!(shell.end().success());
}

/// Then the kernel tells nobody how a child has ended.
pub(crate) fn the_code_comes_back_though_the_ends_of_children_were_ignored() {
    let home = Home::new();
    let mut command = home.program("env");
    command.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_leasehold")]);
    // The command itself hears of its children again: 17 is the number of CHLD.
    let script = "grep -q '^SigIgn:.*0....$' /proc/self/status && exit 7";
    command.args(["run", "k", "--", "sh", "-c", script]);
    assert_eq!(shell_code(command.status().unwrap()), 7);
}

pub(crate) fn a_death_by_signal_comes_back_as_a_shell_tells_it() {
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
pub(crate) fn stop_and_continuation_are_passed_on() {
    let home = Home::new();
    // A shell that starts others can be caught in between, where it sleeps rather than stops.
    nix::unistd::mkfifo(&home.path("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut command = home.program("setsid");
    command
        .args(["--wait", env!("CARGO_BIN_EXE_leasehold"), "run", "k", "--"])
        .args(["sh", "-c"])
        .arg(r#"echo $PPID > "$HOME/parent"; echo $$ > "$HOME/child"; trap 'exit 5' TERM; exec 9<> "$HOME/fifo"; read end <&9; echo never"#)
        .stdin(Stdio::null());
    let mut running = Running::start(&mut command);
    let strays = Strays(["child", "parent"].map(|name| pid_in(&home.path(name))));
    let [child, parent] = strays.0;
    let send = |signal| kill(parent, signal).unwrap();
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
pub(crate) fn a_killed_run_takes_its_child_along() {
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
