use std::fs;
use std::process::Stdio;

use crate::support::{Home, RedisServer, Running, line_in, stderr, stdout};

pub(crate) fn the_child_knows_its_lock_and_its_code_comes_back() {
    let home = Home::new();
    let mut tokens = Vec::new();
    for code in [0, 1, 7, 255] {
        let output = home
            .script(
                "run order:42",
                &format!(r#"echo "$LEASEHOLD_KEY $LEASEHOLD_TOKEN $LEASEHOLD_OWNER"; exit {code}"#),
            )
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(stderr(&output), "");
        let text = stdout(&output);
        let [key, token, owner] = text.trim().split(' ').collect::<Vec<_>>()[..] else {
            panic!("{text:?}");
        };
        assert_eq!(key, "order:42");
        tokens.push(token.parse::<u64>().unwrap());
        assert_eq!(owner.split(':').count(), 3, "{owner}");
    }
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    assert!(!home.is_held("order:42"));
}

pub(crate) fn standard_streams_and_arguments_are_the_childs() {
    let home = Home::new();
    let mut running = Running::start(
        home.leasehold("run k --")
            .args(["sh", "-c", r#"cat; printf '[%s]' "$@"; echo err >&2"#, "sh"])
            .args(["a b", "", "--wait", "ü*"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped()),
    );
    let mut stdin = running.0.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"input ").unwrap();
    drop(stdin);
    assert!(running.end().success());
    let read = |mut from: Box<dyn std::io::Read>| {
        let mut text = String::new();
        from.read_to_string(&mut text).unwrap();
        text
    };
    let out = read(Box::new(running.0.stdout.take().unwrap()));
    assert_eq!(out, "input [a b][][--wait][ü*]");
    let err = read(Box::new(running.0.stderr.take().unwrap()));
    assert_eq!(err, "err\n");
}

pub(crate) fn one_at_a_time() {
    let home = Home::new();
    let log = home.path("log");
    let mut all: Vec<_> = (0..6)
        .map(|_| {
            Running::start(
                &mut home.script(
                    "run k",
                    r#"echo "in $LEASEHOLD_TOKEN" >> "$HOME/log"; sleep 0.05; echo "out $LEASEHOLD_TOKEN" >> "$HOME/log""#,
                ),
            )
        })
        .collect();
    for running in &mut all {
        assert!(running.end().success());
    }
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 12, "{text}");
    let mut last = 0;
    for pair in lines.chunks(2) {
        let token: u64 = pair[0].strip_prefix("in ").expect(&text).parse().unwrap();
        assert_eq!(pair[1], format!("out {token}"), "{text}");
        assert!(token > last, "{text}");
        last = token;
    }
}

pub(crate) fn every_kind_of_failure_has_its_code() {
    let home = Home::new();
    let not_executable = home.path("plain");
    fs::write(&not_executable, "text").unwrap();
    let not_executable = not_executable.display();
    let folder = home.path("");
    let folder = folder.display();
    let long = "k".repeat(1025);
    for (args, code, says) in [
        (
            "run k -- no-such-program".to_owned(),
            127,
            "no-such-program",
        ),
        (
            "run k -- /no/such/program".to_owned(),
            127,
            "/no/such/program",
        ),
        (format!("run k -- {not_executable}"), 126, "plain"),
        (format!("run k -- {folder}"), 126, "cannot be executed"),
        ("run k".to_owned(), 117, "COMMAND"),
        ("run -- true".to_owned(), 117, "KEY"),
        ("run --no-such k -- true".to_owned(), 117, "--no-such"),
        ("run k --ttl 5 -- true".to_owned(), 117, "time unit needed"),
        ("run k --ttl 0s -- true".to_owned(), 117, "ttl"),
        ("run k --ttl 1ms -- true".to_owned(), 117, "ttl"),
        (
            "run k --ttl 3s --grace 2s -- true".to_owned(),
            117,
            "at most a third",
        ),
        ("run k -n --wait 1s -- true".to_owned(), 117, "--wait"),
        ("run k --on-busy panic -- true".to_owned(), 117, "panic"),
        (format!("run {long} -- true"), 117, "1025 bytes"),
        (
            "run --url nonsense k -- true".to_owned(),
            117,
            "file:/folder",
        ),
        ("status --url gopher://x k".to_owned(), 117, "gopher"),
        (
            "status --url file:/x?tll=5s k".to_owned(),
            117,
            "did you mean ttl",
        ),
        (
            "break --url redis://127.0.0.1:1 k".to_owned(),
            118,
            "127.0.0.1:1",
        ),
        (
            "run --url redis://127.0.0.1:1 k -- true".to_owned(),
            118,
            "127.0.0.1:1",
        ),
        ("no-such".to_owned(), 117, "no-such"),
        ("".to_owned(), 117, "Usage"),
    ] {
        let output = home.leasehold(&args).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{args}: {text}");
        assert!(text.contains(says), "{args}: {text}");
        assert_eq!(stdout(&output), "", "{args}");
        assert!(!text.contains('\x1b'), "{args}: {text:?}");
        if text.starts_with("leasehold:") {
            assert_eq!(text.lines().count(), 1, "{args}: {text}");
        }
    }
    assert!(!home.is_held("k"));
    let empty = home.leasehold("run").args(["", "--", "true"]).output();
    assert_eq!(empty.unwrap().status.code(), Some(117));
}

pub(crate) fn a_busy_lock_fails_or_is_skipped() {
    let home = Home::new();
    let mut holder = Running::start(
        home.script("run k --label nightly", r#"echo in > "$HOME/in"; read end"#)
            .stdin(Stdio::piped()),
    );
    line_in(&home.path("in"));
    for (args, code) in [
        ("run -n k -- false", 115),
        ("run k --no-wait -- false", 115),
        ("run --wait 0s k -- false", 115),
        ("run --wait 50ms k -- false", 115),
        // For long enough that it would be said on a terminal what for.
        ("run --wait 700ms k -- false", 115),
        ("run --on-busy fail -n k -- false", 115),
        ("run --on-busy skip -n k -- false", 0),
        ("run k --wait 50ms --on-busy skip -- false", 0),
    ] {
        let output = home.leasehold(args).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args}");
        let text = stderr(&output);
        if code == 0 {
            assert_eq!(
                text, "",
                "{args}: a scheduled job that is skipped is silent"
            );
        } else {
            assert!(
                text.contains("is held by") && text.contains("(nightly)"),
                "{text}"
            );
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(!text.contains('\x1b'), "{text:?}");
        }
    }
    drop(holder.0.stdin.take());
    holder.end();
    let free = home.leasehold("run -n k -- false").output().unwrap();
    assert_eq!(free.status.code(), Some(1));
}

pub(crate) fn the_default_store_is_the_users_state_folder() {
    let home = Home::new();
    let state = home.path(".local/state/leasehold");
    assert!(home.leasehold("run k -- true").status().unwrap().success());
    assert!(state.is_dir());

    let xdg = home.path("xdg state?");
    let run = home
        .leasehold("run k -- true")
        .env("XDG_STATE_HOME", &xdg)
        .status();
    assert!(run.unwrap().success());
    assert!(xdg.join("leasehold").is_dir());

    let other = home.path("other");
    let url = format!("file:{}", other.display());
    let run = home
        .leasehold("run k -- true")
        .env("LEASEHOLD_URL", &url)
        .status();
    assert!(run.unwrap().success());
    assert!(other.is_dir(), "LEASEHOLD_URL names another");

    let third = home.path("third");
    let run = home
        .leasehold(&format!("run k --url file:{} -- true", third.display()))
        .env("LEASEHOLD_URL", &url)
        .status();
    assert!(run.unwrap().success());
    assert!(third.is_dir(), "--url goes before LEASEHOLD_URL");

    // Without HOME it is the folder that the system knows for this user. Nothing is written there.
    let status = home
        .leasehold("status some-key-that-nobody-locks")
        .env_remove("HOME")
        .env("XDG_STATE_HOME", "relative, so to be ignored")
        .output()
        .unwrap();
    assert!(
        matches!(status.status.code(), Some(1 | 119)),
        "{}",
        stderr(&status)
    );
    let run = home
        .leasehold("run k -- true")
        .env_remove("HOME")
        .env("XDG_STATE_HOME", &xdg)
        .status();
    assert!(run.unwrap().success());
}

pub(crate) fn the_same_on_redis() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let output = home
        .script(
            "run --ttl 5s --label nightly k",
            r#""$LEASEHOLD" status k; "$LEASEHOLD" run -n k -- true; echo "code $?"; exit 3"#,
        )
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    let text = stdout(&output);
    for part in [
        "k is held",
        "owner ",
        "label  nightly",
        "token ",
        "since ",
        "left ",
        "code 115",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!home.is_held("k"));
    assert_eq!(server.number("EXISTS lock:k"), 0);
}

pub(crate) fn verbose_tells_what_happens_to_the_lock() {
    let home = Home::new();
    let output = home.leasehold("run -v k -- true").output().unwrap();
    let text = stderr(&output);
    assert!(
        text.contains("lock granted") && text.contains("lock released"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text:?}");
}

pub(crate) fn credentials_are_never_shown() {
    let home = Home::new();
    for url in [
        "redis://user:s3cret@127.0.0.1:1",
        "redis://:s3cret@127.0.0.1:1/0?ttl=nonsense",
        "redis://user:s3cret@",
        "gopher://user:s3cret@host",
        "user:s3cret@host",
    ] {
        for args in [
            "status k",
            "run k -vv -- true",
            "break k",
            "--help",
            "run --help",
            "run",
        ] {
            let output = home
                .leasehold(args)
                .env("LEASEHOLD_URL", url)
                .output()
                .unwrap();
            let text = stderr(&output) + &stdout(&output);
            assert!(!text.contains("s3cret"), "{url} {args}: {text}");
        }
    }
}

pub(crate) fn options_of_the_url_hold_unless_others_are_given() {
    let home = Home::new();
    let url = format!(
        "file:{}?ttl=3s&wait=50ms&label=from+url",
        home.path("locks").display()
    );
    let run = |args: &str, script: &str| {
        let mut command = home.script(args, script);
        command.env("LEASEHOLD_URL", &url).output().unwrap()
    };
    let show = r#""$LEASEHOLD" status k; "$LEASEHOLD" run k -- true; echo "code $?""#;
    let text = stdout(&run("run k", show));
    assert!(
        text.contains("from url") && text.contains("code 115"),
        "{text}"
    );
    let text = stdout(&run("run k --label mine", show));
    assert!(
        text.contains("mine") && !text.contains("from url"),
        "{text}"
    );
    let refused = run("run k --grace 2s", "true");
    assert_eq!(refused.status.code(), Some(117), "{}", stderr(&refused));
    assert!(run("run k --grace 2s --ttl 6s", "true").status.success());
}
