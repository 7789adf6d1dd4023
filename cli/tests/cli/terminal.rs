//! At a terminal, as a person meets it.

use std::process::Stdio;

use crate::support::{
    Home, RedisServer, Running, Screen, eventually, is_gone, is_stopped, line_in, pid_in,
};

pub(crate) fn an_interactive_child_keeps_the_terminal() {
    let home = Home::new();
    let mut shell = Screen::shell(&home);
    shell.enter(r#""$LEASEHOLD" run k -- sh -c 'echo asks; read line; echo "got-$line"; exit 3'; echo "code-$?""#);
    shell.expect("asks");
    shell.enter("abc");
    shell.expect("got-abc");
    shell.expect("code-3");
    // The shell has it again.
    shell.enter("read line; echo shell-$line");
    shell.enter("def");
    shell.expect("shell-def");
    // A whole shell inside, with jobs of its own.
    shell.enter(r#""$LEASEHOLD" run k -- bash --norc --noprofile --noediting -i; echo "code-$?""#);
    shell.enter("PS1=; stty -echo; echo in''side");
    shell.expect("inside");
    shell.enter("sh -c 'echo sta''rted; exec sleep 1000'");
    shell.expect("started");
    shell.type_in("\x03");
    shell.enter("echo still-$((40+2))");
    shell.expect("still-42");
    shell.enter("exit 5");
    shell.expect("code-5");
}

pub(crate) fn ctrl_c_reaches_the_child_once() {
    let home = Home::new();
    let child = r#"sh -c 'trap "n=\$((n+1)); echo int-\$n" INT; n=0; echo ready; while [ ! -e "$HOME/end" ]; do sleep 0.02; done; exit 7'"#;
    for (line, name) in [
        (
            format!(r#""$LEASEHOLD" run k -- {child}; echo "code-$?""#),
            "alone",
        ),
        (
            format!(
                r#""$LEASEHOLD" run k -- {child} | sh -c 'trap "" INT; cat'; echo "code-${{PIPESTATUS[0]}}""#
            ),
            "in a pipeline",
        ),
    ] {
        std::fs::remove_file(home.path("end")).ok();
        let mut shell = Screen::shell(&home);
        shell.enter(&line);
        shell.expect("ready");
        shell.type_in("\x03");
        shell.expect("int-1");
        shell.type_in("\x03");
        shell.expect("int-2");
        std::fs::write(home.path("end"), "").unwrap();
        let rest = shell.expect("code-7");
        assert!(!rest.contains("int-"), "{name}: {rest}");
    }
}

pub(crate) fn ctrl_c_ends_the_script_around_it_too() {
    let home = Home::new();
    let script = home.path("script");
    std::fs::write(
        &script,
        "\"$LEASEHOLD\" run k -- sh -c 'echo ready; exec sleep 1000'\necho next-$((40+2))\n",
    )
    .unwrap();
    for interpreter in ["bash", "sh"] {
        let mut shell = Screen::shell(&home);
        shell.enter(&format!(
            "{interpreter} {}; echo \"code-$?\"",
            script.display()
        ));
        shell.expect("ready");
        shell.type_in("\x03");
        // The shell gives up the rest of the line too.
        let shown = shell.expect("$ ");
        assert!(
            !shown.contains("next-42") && !shown.contains("code-"),
            "{interpreter}: {shown}"
        );
        shell.enter("echo code-$?");
        shell.expect("code-130");
        assert!(!home.is_held("k"));
    }
}

pub(crate) fn ctrl_c_ends_the_waiting_and_the_script_around_it() {
    let home = Home::new();
    let mut holder = Running::start(
        home.script("run k --label nightly", r#"echo in > "$HOME/in"; read end"#)
            .stdin(Stdio::piped()),
    );
    line_in(&home.path("in"));
    let mut shell = Screen::shell(&home);
    shell.enter(r#"bash -c '"$LEASEHOLD" run k -- true; echo next-$((40+2))'; echo "code-$?""#);
    // The line that says what is waited for; and it goes away.
    shell.expect("waiting for k");
    shell.expect("held by");
    shell.expect("(nightly)");
    shell.type_in("\x03");
    let rest = shell.expect("$ ");
    assert!(
        !rest.contains("next-42") && !rest.contains("code-"),
        "{rest}"
    );
    assert!(rest.contains("\r\x1b[2K"), "{rest:?}");
    shell.enter("echo code-$?");
    shell.expect("code-130");
    drop(holder.0.stdin.take());
    holder.end();
}

pub(crate) fn ctrl_z_stops_and_fg_goes_on() {
    let home = Home::new();
    for rest in ["", " | cat"] {
        let mut shell = Screen::shell(&home);
        shell.enter(&format!(
            r#""$LEASEHOLD" run k -- sh -c 'echo $$ > "$HOME/child"; echo $PPID > "$HOME/parent"; echo asks; read first < /dev/tty; echo "first-$first"; read line < /dev/tty; echo "got-$line"'{rest}; echo "code-$?""#
        ));
        shell.expect("asks");
        // While a shell starts its pipeline it gives the terminal away more than once. Whoever reads too
        // early is stopped, and continued with the terminal, which forgets a Ctrl-Z of that very moment.
        shell.enter("it has it");
        shell.expect("first-it has it");
        let (child, parent) = (pid_in(&home.path("child")), pid_in(&home.path("parent")));
        shell.type_in("\x1a");
        shell.expect("Stopped");
        assert!(is_stopped(child) && is_stopped(parent));
        assert!(
            home.is_held("k"),
            "a stopped job keeps its lock, in this store"
        );
        // Twice, for a stop that was left over would show now.
        shell.enter("fg");
        shell.expect("LEASEHOLD");
        eventually("it goes on", || (!is_stopped(child)).then_some(()));
        shell.type_in("\x1a");
        shell.expect("Stopped");
        shell.enter("fg");
        shell.expect("LEASEHOLD");
        shell.enter("abc");
        shell.expect("got-abc");
        shell.enter("");
        shell.expect("$ ");
        assert!(!home.is_held("k"));
        std::fs::remove_file(home.path("child")).unwrap();
        std::fs::remove_file(home.path("parent")).unwrap();
    }
}

pub(crate) fn a_background_job_asks_for_the_terminal_in_turn() {
    let home = Home::new();
    let mut shell = Screen::shell(&home);
    shell.enter(
        r#""$LEASEHOLD" run k -- sh -c 'echo $$ > "$HOME/child"; read line; echo "got-$line"' &"#,
    );
    let child = pid_in(&home.path("child"));
    eventually("it is stopped for reading", || {
        is_stopped(child).then_some(())
    });
    shell.enter("sleep 0.2; echo still-$((40+2))");
    shell.expect("still-42");
    shell.enter("jobs; fg");
    shell.expect("Stopped");
    shell.expect("LEASEHOLD");
    eventually("it goes on", || (!is_stopped(child)).then_some(()));
    shell.enter("abc");
    shell.expect("got-abc");
}

/// In a pipeline others may want the terminal as well: it goes to whoever asks.
pub(crate) fn the_rest_of_a_pipeline_keeps_the_terminal() {
    let home = Home::new();
    let mut shell = Screen::shell(&home);
    shell.enter(r#""$LEASEHOLD" run k -- sh -c 'echo pager; until [ -e "$HOME/end" ]; do sleep 0.02; done' | sh -c 'read what; echo "$what asks"; read line < /dev/tty; echo "got-$line"'"#);
    shell.expect("pager asks");
    shell.enter("abc");
    shell.expect("got-abc");
    std::fs::write(home.path("end"), "").unwrap();
    shell.expect("$ ");
    // A password prompt inside of a pipeline.
    shell.enter(r#"echo in | "$LEASEHOLD" run k -- sh -c 'read what; echo "asks after $what" > /dev/tty; read line < /dev/tty; echo "got-$line"' | cat; echo "then-$((40+2))""#);
    shell.expect("asks after in");
    shell.enter("secret");
    shell.expect("got-secret");
    shell.expect("then-42");
    shell.enter("read line; echo shell-$line");
    shell.enter("def");
    shell.expect("shell-def");
}

/// No shell is there that could continue it: Ctrl-Z is nothing then.
pub(crate) fn ctrl_z_is_nothing_where_nobody_could_continue() {
    let home = Home::new();
    let mut screen = Screen::start(
        &home,
        env!("CARGO_BIN_EXE_leasehold"),
        &[
            "run",
            "k",
            "--",
            "sh",
            "-c",
            r#"echo asks; read line; echo "got-$line""#,
        ],
    );
    screen.expect("asks");
    screen.type_in("\x1a");
    screen.expect("^Z");
    screen.enter("abc");
    screen.expect("got-abc");
    assert!(screen.running.end().success());
}

pub(crate) fn the_terminal_is_left_as_it_was() {
    let home = Home::new();
    let mut shell = Screen::shell(&home);
    shell
        .enter(r#""$LEASEHOLD" run k -- sh -c 'stty raw; kill -KILL $$'; echo "code-$?"; stty -a"#);
    shell.expect("code-137");
    let modes = shell.expect("echoke");
    assert!(
        !modes.contains("-icanon") && !modes.contains("-opost"),
        "{modes}"
    );
}

/// The lock ends while the job is stopped: the child does nothing more.
pub(crate) fn a_stopped_job_whose_lock_ends_does_not_go_on() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let mut shell = Screen::shell(&home);
    // It starts no others meanwhile: a shell caught in between sleeps rather than stops.
    shell.enter(r#"mkfifo "$HOME/fifo"; "$LEASEHOLD" run --ttl 1s k -- bash -c 'exec 9<> "$HOME/fifo"; echo $$ > "$HOME/child"; echo ready; while :; do read -t 0.01 -u 9; echo x >> "$HOME/work"; done'; echo "code-$?""#);
    shell.expect("ready");
    let child = pid_in(&home.path("child"));
    shell.type_in("\x1a");
    shell.expect("Stopped");
    eventually("the lock ends", || (!home.is_held("k")).then_some(()));
    let work = || {
        std::fs::read_to_string(home.path("work"))
            .unwrap_or_default()
            .len()
    };
    let before = work();
    shell.enter("fg");
    shell.expect("lost the lock k");
    shell.enter("");
    shell.expect("$ ");
    assert!(is_gone(child));
    // TERM is there before the continuation.
    assert_eq!(work(), before);
}

pub(crate) fn colours_are_for_terminals() {
    let home = Home::new();
    let mut shell = Screen::shell(&home);
    shell.enter(r#""$LEASEHOLD" status k; echo "code-$?""#);
    let shown = shell.expect("code-1");
    assert!(shown.contains("\x1b["), "{shown:?}");
    shell.enter(r#"NO_COLOR=1 "$LEASEHOLD" status k; echo "code-$?""#);
    let shown = shell.expect("code-1");
    assert!(!shown.contains("\x1b["), "{shown:?}");
    // Nobody waits for long enough to be told what for.
    shell.enter(r#""$LEASEHOLD" run k -- true; echo "code-$?""#);
    let shown = shell.expect("code-0");
    assert!(!shown.contains("waiting"), "{shown:?}");
}
