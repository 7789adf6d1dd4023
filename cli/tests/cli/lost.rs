//! Case 28: the lock is lost while a child with grandchildren runs.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};

use crate::support::{
    Home, RedisServer, Running, Strays, eventually, is_gone, pause, pid_in, stderr,
};

/// A child and a grandchild that say that they were told to end, and do not. (Into a pipe: a busy disk
/// may keep a file waiting for longer than they live.)
const STUBBORN: &str = r#"
    trap 'echo term' TERM
    sh -c 'trap "echo term" TERM
           echo $$ > "$HOME/grandchild"; while :; do sleep 0.01; done' &
    echo $$ > "$HOME/child"
    while :; do sleep 0.01; done
"#;

/// The same, but the child ends when told, and only the grandchild does not.
const LEFT_BEHIND: &str = r#"
    sh -c 'trap "echo term" TERM
           echo $$ > "$HOME/grandchild"; while :; do sleep 0.01; done' &
    trap 'exit 0' TERM
    echo $$ > "$HOME/child"
    while :; do sleep 0.01; done
"#;

struct Family {
    running: Running,
    /// The child and the grandchild.
    members: Strays<2>,
}

impl Family {
    fn start(home: &Home, args: &str, script: &str) -> Self {
        for name in ["child", "grandchild"] {
            fs::remove_file(home.path(name)).ok();
        }
        let stderr = fs::File::create(home.path("stderr")).unwrap();
        let mut command = home.script(args, script);
        let running = Running::start(command.stdout(Stdio::piped()).stderr(stderr));
        Self {
            members: Strays([
                pid_in(&home.path("child")),
                pid_in(&home.path("grandchild")),
            ]),
            running,
        }
    }

    fn is_gone(&self) -> bool {
        self.members.0.into_iter().all(is_gone)
    }

    /// What it said, once all of it is gone.
    fn said(&mut self) -> String {
        let mut said = String::new();
        let mut stdout = self.running.0.stdout.take().unwrap();
        stdout.read_to_string(&mut said).unwrap();
        said
    }

    /// It is gone when `run` is, with the code for a lost lock; and it was told before.
    fn ends_as_lost(mut self, home: &Home, says: &str) {
        let status = self.running.end();
        assert_eq!(status.code(), Some(116));
        eventually("the family is gone", || self.is_gone().then_some(()));
        let text = read(&home.path("stderr"));
        assert!(self.said().contains("term"), "{text}");
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

pub(crate) fn case_28_is_ended_when_the_lock_is_taken_away() {
    is_ended_when_taken_away(&Home::new());
}

pub(crate) fn case_28_is_ended_when_the_lock_is_taken_away_on_redis() {
    let server = RedisServer::start();
    is_ended_when_taken_away(&Home::with(&server));
}

/// The store falls silent. It could let go when what it had left for the lock just before is over.
pub(crate) fn case_28_is_ended_before_a_silent_store_lets_go() {
    for (script, grace) in [(STUBBORN, "3s"), (LEFT_BEHIND, "3s"), (STUBBORN, "0s")] {
        let server = RedisServer::start();
        let home = Home::with(&server);
        let args = format!("-v run k --ttl 9s --grace {grace}");
        let mut family = Family::start(&home, &args, script);
        let lets_go = eventually("a silence without a renewal at its begin", || {
            let asked = Instant::now();
            let left = server.number("PTTL lock:k");
            let left = Duration::from_millis(left.try_into().unwrap());
            server.pause();
            // It is renewed when two thirds of the ttl are left.
            if asked.elapsed() + Duration::from_millis(6_300) < left {
                return Some(asked + left);
            }
            server.resume();
            None
        });
        eventually("the family is gone", || family.is_gone().then_some(()));
        let gone = Instant::now();
        assert!(gone < lets_go, "still there for {:?}", gone - lets_go);
        assert_eq!(family.running.end().code(), Some(116));
        // Without any grace KILL follows before anybody can note it.
        let text = read(&home.path("stderr"));
        assert!(grace == "0s" || family.said().contains("term"), "{text}");
        assert!(text.contains("could not renew the lock k"), "{text}");
    }
}

/// A store that comes back in time: nothing happens to the child.
pub(crate) fn a_short_silence_is_lived_through() {
    let server = RedisServer::start();
    let home = Home::with(&server);
    let mut running = Running::start(&mut home.script(
        "run k --ttl 12s --grace 100ms",
        r#"echo $$ > "$HOME/child"; until [ -e "$HOME/end" ]; do sleep 0.02; done; exit 3"#,
    ));
    pid_in(&home.path("child"));
    server.pause();
    let paused = Instant::now();
    // Long enough for one renewal to be due and to get no answer.
    while paused.elapsed() < Duration::from_millis(4_500) {
        assert!(running.0.try_wait().unwrap().is_none());
        pause();
    }
    server.resume();
    // More than can be left of what was granted before.
    eventually("it is renewed", || {
        assert!(running.0.try_wait().unwrap().is_none());
        (server.number("PTTL lock:k") > 8_000).then_some(())
    });
    fs::write(home.path("end"), "").unwrap();
    assert_eq!(running.end().code(), Some(3));
    assert_eq!(server.number("EXISTS lock:k"), 0);
}

/// A child that is stopped is ended all the same.
pub(crate) fn a_stopped_child_is_ended_too() {
    let home = Home::new();
    let mut family = Family::start(&home, "run k", STUBBORN);
    kill(family.members.0[0], Signal::SIGSTOP).unwrap();
    let output = home.leasehold("break --yes k").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(family.running.end().code(), Some(116));
    eventually("the family is gone", || family.is_gone().then_some(()));
}
