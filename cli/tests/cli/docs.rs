//! Help, manual and completions.

use std::fs;
use std::process::{Command, Stdio};

use crate::support::{Home, stderr, stdout};

/// Those that have examples: all but `man`.
const SUBCOMMANDS: &[&str] = &[
    "run",
    "status",
    "ls",
    "break",
    "choose",
    "doctor",
    #[cfg(feature = "conformance")]
    "conformance",
    "completions",
];

pub(crate) fn help_has_examples_and_exit_codes() {
    let home = Home::new();
    let output = home.leasehold("--help").output().unwrap();
    assert!(output.status.success());
    let text = stdout(&output);
    for part in ["Examples:", "Exit codes:", "LEASEHOLD_URL", "116"] {
        assert!(text.contains(part), "{part}");
    }
    for subcommand in SUBCOMMANDS {
        let output = home.leasehold(subcommand).arg("--help").output().unwrap();
        assert!(output.status.success());
        assert!(stdout(&output).contains("Examples:"), "{subcommand}");
        assert_eq!(stderr(&output), "");
    }
    let output = home.leasehold("--version").output().unwrap();
    assert_eq!(
        stdout(&output),
        format!("leasehold {}\n", env!("CARGO_PKG_VERSION"))
    );
}

pub(crate) fn manual_pages_render() {
    let home = Home::new();
    let output = home.leasehold("man").output().unwrap();
    assert!(output.status.success());
    assert!(stdout(&output).contains(".TH leasehold 1"));
    let dir = home.path("man");
    let written = home.leasehold("man --dir").arg(&dir).status().unwrap();
    assert!(written.success());
    let mut pages: Vec<_> = fs::read_dir(&dir)
        .unwrap()
        .map(|page| page.unwrap().file_name().into_string().unwrap())
        .collect();
    pages.sort();
    let expected = SUBCOMMANDS.iter().chain(&["man"]);
    let mut expected: Vec<_> = expected.map(|it| format!("leasehold-{it}.1")).collect();
    expected.push("leasehold.1".into());
    expected.sort();
    assert_eq!(pages, expected);
    let page = fs::read_to_string(dir.join("leasehold-run.1")).unwrap();
    assert!(page.contains("LEASEHOLD_TOKEN") && page.contains("\\-\\-grace"));
}

pub(crate) fn completions_are_for_the_shell() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = home.leasehold("completions").arg(shell).output().unwrap();
        assert!(output.status.success(), "{shell}");
        assert!(stdout(&output).contains("on-busy"), "{shell}");
    }
    // One that is here to say whether it can read them.
    let script = home.path("completions");
    let output = home.leasehold("completions bash").output().unwrap();
    fs::write(&script, &output.stdout).unwrap();
    let read = Command::new("bash")
        .arg("-n")
        .arg(&script)
        .status()
        .unwrap();
    assert!(read.success());
}

pub(crate) fn a_reader_that_leaves_early_is_no_failure() {
    let home = Home::new();
    let mut running = home
        .leasehold("completions bash")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(running.stdout.take());
    let output = running.wait_with_output().unwrap();
    assert_eq!(stderr(&output), "");
    assert!(output.status.success());
}
