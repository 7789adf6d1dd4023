use std::ffi::OsString;
use std::io;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::launch;

/// The command of `run`: a process in a group of its own, and whatever it starts in there.
///
/// What leaves the group (a daemon, a shell with job control) is out of reach.
#[derive(Debug)]
pub(crate) struct Child {
    group: Pid,
    events: mpsc::UnboundedReceiver<Event>,
}

/// What happens to the process that was started; those that it starts are not waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Stopped(Signal),
    Ended(Ended),
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    Exited(u8),
    Died(Signal),
}

impl Child {
    /// Starts `command` with `env` added to the environment; it has the terminal from its start if
    /// `with_terminal`.
    ///
    /// # Errors
    /// What the system says. A command that is not found is no error here: it ends with a code.
    pub(crate) fn start(
        command: &[OsString],
        env: impl IntoIterator<Item = (&'static str, String)>,
        with_terminal: bool,
    ) -> io::Result<Self> {
        keep_statuses()?;
        adopt_orphans();
        let started = launch::command(command, with_terminal)?.envs(env).spawn()?;
        let group = Pid::from_raw(
            i32::try_from(started.id()).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?,
        );
        let (sender, events) = mpsc::unbounded_channel();
        thread::Builder::new()
            .name("child".into())
            .spawn(move || report(group, &sender))
            .inspect_err(|_| {
                // Nobody would hear of its end.
                killpg(group, Signal::SIGKILL).ok();
            })?;
        Ok(Self { group, events })
    }

    /// The process group; its number is that of the process.
    pub(crate) fn group(&self) -> Pid {
        self.group
    }

    /// What happens next to the process. Never resolves again once it has ended.
    ///
    /// # Cancel safety
    /// None is missed.
    pub(crate) async fn next(&mut self) -> Event {
        match self.events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Sends `signal` to the whole group; a group that is gone is no failure.
    pub(crate) fn signal(&self, signal: Signal) {
        killpg(self.group, signal).ok();
    }
}

/// Whether nobody is left in the group of a command.
pub(crate) fn is_gone(group: Pid) -> bool {
    killpg(group, None) == Err(Errno::ESRCH)
}

/// Resolves when nobody is left in the group of a command. It has to look now and then: nobody tells
/// us of the end of processes that are not our children.
///
/// # Cancel safety
/// Only looks.
pub(crate) async fn gone(group: Pid) {
    while !is_gone(group) {
        sleep(Duration::from_millis(10)).await;
    }
}

/// Reports what happens to `process`, and reaps whatever is or becomes ours, until there is nothing
/// left to wait for. What the command leaves behind becomes ours, on Linux: so its group is seen to
/// be empty as soon as it is, even where process 1 does not reap, or where that is this process.
fn report(process: Pid, sender: &mpsc::UnboundedSender<Event>) {
    let mut ended = false;
    loop {
        let event = match waitpid(None, Some(WaitPidFlag::WUNTRACED)) {
            Ok(WaitStatus::Exited(pid, code)) if pid == process => {
                // The system keeps no more than eight bits.
                Event::Ended(Ended::Exited(u8::try_from(code).unwrap_or(u8::MAX)))
            }
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == process => {
                Event::Ended(Ended::Died(signal))
            }
            Ok(WaitStatus::Stopped(pid, signal)) if pid == process => Event::Stopped(signal),
            Err(Errno::ECHILD) if ended => return,
            // Died of a signal that has no name (a real-time one), which tells no more than this.
            Err(_) if !ended && kill(process, None) == Err(Errno::ESRCH) => {
                Event::Ended(Ended::Died(Signal::SIGKILL))
            }
            Ok(_) | Err(_) => continue,
        };
        ended = ended || matches!(event, Event::Ended(_));
        if sender.send(event).is_err() {
            return;
        }
    }
}

/// Whoever ignores CHLD, or is started so, is not told how its children ended. A handler for it stays, and
/// does not go on to the command.
fn keep_statuses() -> io::Result<()> {
    signal(SignalKind::child()).map(drop)
}

#[cfg(target_os = "linux")]
fn adopt_orphans() {
    nix::sys::prctl::set_child_subreaper(true).ok();
}

#[cfg(not(target_os = "linux"))]
fn adopt_orphans() {}
