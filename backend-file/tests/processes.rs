//! Locks between processes: what happens when one is killed, stopped, or has children.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // the helpers are parts of tests

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use leasehold_core::{ErrorKind, Locks};
use leasehold_file::Folder;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, test_kill_process, waitpid};

/// An upper bound for what takes milliseconds on an idle machine.
const SOON: Duration = Duration::from_secs(60);

const ROLE: &str = "LEASEHOLD_FILE_ROLE";
const FOLDER: &str = "LEASEHOLD_FILE_FOLDER";

/// Before what a helper says, since the test runner says things too.
const SAYS: &str = "helper: ";

/// Another process: this test binary, started again as [`helper`].
struct Helper {
    child: Child,
    /// It ends when this is closed.
    stdin: Option<ChildStdin>,
    said: Receiver<String>,
}

impl Helper {
    fn start(role: &str, folder: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["helper", "--exact", "--nocapture"])
            .env(ROLE, role)
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().unwrap();
        let (sender, said) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some((_, text)) = line.split_once(SAYS) {
                    drop(sender.send(text.to_owned()));
                }
            }
        });
        Self { child, stdin, said }
    }

    fn says(&self) -> String {
        self.said
            .recv_timeout(SOON)
            .expect("the helper says something")
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).unwrap();
    }

    /// Stops it, and waits until it stands.
    fn stop(&self) {
        self.signal(Signal::STOP);
        waitpid(Some(pid(self.child.id())), WaitOptions::UNTRACED).unwrap();
    }

    fn ends(mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn pid(pid: u32) -> Pid {
    Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

/// Tells the test.
fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{SAYS}{text}").unwrap();
    stdout.flush().unwrap();
}

/// Not a test: the other process. Does nothing unless it was started as one.
#[test]
fn helper() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let folder = Folder::open(std::env::var(FOLDER).unwrap()).unwrap();
    let locks = Locks::new(folder.clone());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    match role.as_str() {
        "hold" => {
            let guard = runtime.block_on(locks.lock("a")).unwrap();
            say(&guard.token().to_string());
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        }
        "hold, with a child" => {
            let guard = runtime.block_on(locks.lock("a")).unwrap();
            let mut child = Command::new("sleep")
                .arg("60")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            say(&child.id().to_string());
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            drop(guard);
        }
        "hold until lost" => {
            let guard = runtime.block_on(locks.lock("a")).unwrap();
            say(&guard.token().to_string());
            runtime.block_on(guard.lost());
            say("lost");
        }
        "count" => runtime.block_on(async {
            let counter = folder.path().join("counter");
            let log = folder.path().join("log");
            for _ in 0..25 {
                let guard = locks.lock("counter").await.unwrap();
                let before: u32 = fs::read_to_string(&counter).unwrap().parse().unwrap();
                tokio::task::yield_now().await;
                fs::write(&counter, (before + 1).to_string()).unwrap();
                let mut log = fs::File::options().append(true).open(&log).unwrap();
                writeln!(log, "{}", guard.token()).unwrap();
                guard.release().await.unwrap();
            }
        }),
        role => panic!("no role {role}"),
    }
}

fn temporary() -> (tempfile::TempDir, Locks) {
    let dir = tempfile::tempdir().unwrap();
    let locks = Locks::new(Folder::open(dir.path()).unwrap()).with_wait(SOON);
    (dir, locks)
}

#[tokio::test]
async fn a_killed_process_frees_its_lock() {
    let (dir, locks) = temporary();
    let mut last = 0;
    for _ in 0..5 {
        let holder = Helper::start("hold", dir.path());
        let token: u64 = holder.says().parse().unwrap();
        assert!(token > last);
        assert!(locks.try_lock("a").await.unwrap().is_none());
        let shown = locks.holder("a").await.unwrap().unwrap();
        assert!(
            shown
                .owner
                .unwrap()
                .contains(&format!(":{}:", holder.child.id()))
        );

        holder.signal(Signal::KILL);
        let guard = locks.lock("a").await.unwrap();
        assert!(guard.token().get() > token);
        last = guard.token().get();
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_dead_holder_is_not_shown() {
    let (dir, locks) = temporary();
    let mut holder = Helper::start("hold", dir.path());
    holder.says();
    assert!(locks.holder("a").await.unwrap().is_some());
    holder.signal(Signal::KILL);
    holder.child.wait().unwrap();
    // Its record is still there.
    assert!(
        fs::read_to_string(dir.path().join("a.info"))
            .unwrap()
            .contains("grant")
    );
    assert!(locks.holder("a").await.unwrap().is_none());
    assert!(!locks.evict("a", None).await.unwrap());
}

#[tokio::test]
async fn a_child_of_the_holder_does_not_keep_the_lock() {
    let (dir, locks) = temporary();
    let holder = Helper::start("hold, with a child", dir.path());
    let child: u32 = holder.says().parse().unwrap();
    assert!(locks.try_lock("a").await.unwrap().is_none());
    holder.signal(Signal::KILL);
    let freed = locks.lock("a").await;
    let outlived = test_kill_process(pid(child));
    kill_process(pid(child), Signal::KILL).unwrap();
    drop(freed.unwrap());
    outlived.expect("the child was running all the time");
}

#[tokio::test]
async fn a_stopped_process_keeps_its_lock_and_obeys_when_it_goes_on() {
    let (dir, locks) = temporary();
    let holder = Helper::start("hold until lost", dir.path());
    let token: u64 = holder.says().parse().unwrap();
    holder.stop();

    let error = locks.evict("a", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let message = error.to_string();
    assert!(message.contains("still held"), "{message}");
    assert!(
        message.contains(&format!("process {}", holder.child.id())),
        "{message}"
    );
    assert!(locks.try_lock("a").await.unwrap().is_none(), "still held");

    holder.signal(Signal::CONT);
    assert_eq!(holder.says(), "lost");
    let guard = locks.lock("a").await.unwrap();
    assert!(guard.token().get() > token);
    assert_eq!(fs::read_dir(dir.path().join("evict")).unwrap().count(), 0);
    holder.ends();
}

#[tokio::test]
async fn processes_take_turns() {
    let (dir, _locks) = temporary();
    fs::write(dir.path().join("counter"), "0").unwrap();
    fs::write(dir.path().join("log"), "").unwrap();
    let helpers: Vec<_> = (0..4).map(|_| Helper::start("count", dir.path())).collect();
    for helper in helpers {
        helper.ends();
    }
    assert_eq!(
        fs::read_to_string(dir.path().join("counter")).unwrap(),
        "100"
    );
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let tokens: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 100);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}
