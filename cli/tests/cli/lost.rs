//! Case 28: the lock is lost while a child with grandchildren runs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::support::{Home, Running, eventually, is_gone, pid_in, stderr};

/// A child and a grandchild that note that they were told to end, and do not.
const STUBBORN: &str = r#"
    trap 'echo term >> "$HOME/told"' TERM
    sh -c 'trap "echo term >> \"$HOME/told\"" TERM
           echo $$ > "$HOME/grandchild"; while :; do sleep 0.01; done' &
    echo $$ > "$HOME/child"
    while :; do sleep 0.01; done
"#;

/// The same, but the child ends when told, and only the grandchild does not.
const LEFT_BEHIND: &str = r#"
    sh -c 'trap "echo term >> \"$HOME/told\"" TERM
           echo $$ > "$HOME/grandchild"; while :; do sleep 0.01; done' &
    trap 'exit 0' TERM
    echo $$ > "$HOME/child"
    while :; do sleep 0.01; done
"#;

struct Family {
    running: Running,
    child: Pid,
    grandchild: Pid,
}

impl Family {
    fn start(home: &Home, args: &str, script: &str) -> Self {
        for name in ["child", "grandchild", "told"] {
            fs::remove_file(home.path(name)).ok();
        }
        let stderr = fs::File::create(home.path("stderr")).unwrap();
        let running = Running::start(home.script(args, script).stderr(stderr));
        Self {
            child: pid_in(&home.path("child")),
            grandchild: pid_in(&home.path("grandchild")),
            running,
        }
    }

    fn is_gone(&self) -> bool {
        is_gone(self.child) && is_gone(self.grandchild)
    }

    /// It is gone when `run` is, with the code for a lost lock; and it was told before.
    fn ends_as_lost(mut self, home: &Home, says: &str) {
        let status = self.running.end();
        assert_eq!(status.code(), Some(116));
        eventually("the family is gone", || self.is_gone().then_some(()));
        assert!(read(&home.path("told")).contains("term"));
        let text = read(&home.path("stderr"));
        // Shells write there too.
        let ours = text.lines().filter(|line| line.starts_with("leasehold:"));
        assert_eq!(ours.count(), 1, "{text}");
        assert!(text.contains(says), "{text}");
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn is_ended_when_taken_away(home: &Home) {
    for script in [STUBBORN, LEFT_BEHIND] {
        let family = Family::start(home, "run k --ttl 30s --grace 10s", script);
        let output = home.leasehold("break --yes k").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let taken = Instant::now();
        family.ends_as_lost(home, "lost the lock k");
        // The grace of 10 s is for a lock that is still ours.
        assert!(taken.elapsed() < Duration::from_secs(9));
        let next = home.leasehold("run -n k -- true").status().unwrap();
        assert!(next.success());
    }
}

#[test]
fn case_28_is_ended_when_the_lock_is_taken_away() {
    is_ended_when_taken_away(&Home::new());
}

/// The store falls silent. It could let go at the earliest a ttl after the last renewal that it
/// answered; that one was sent before it was stopped.
/// A store that comes back in time: nothing happens to the child.
/// A child that is stopped is ended all the same.
#[test]
fn a_stopped_child_is_ended_too() {
    let home = Home::new();
    let mut family = Family::start(&home, "run k", STUBBORN);
    let stop = Command::new("kill")
        .args(["-STOP", &family.child.to_string()])
        .status()
        .unwrap();
    assert!(stop.success());
    let output = home.leasehold("break --yes k").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(family.running.end().code(), Some(116));
    eventually("the family is gone", || family.is_gone().then_some(()));
}
