//! The command while it runs under the lock.
//!
//! 1. The lock is watched, not the store: as long as [`Guard::remaining`] says so, it is ours.
//! 2. When no more is left than the grace and a margin, so that renewal must have failed for a
//!    while, the whole process group gets TERM (and CONT, for a stopped process sleeps through TERM);
//!    at the end of the grace, before the store may let go, KILL. A renewal that goes through in
//!    between changes nothing: the command is ending.
//! 3. When the lock is lost without warning, taken away by an operator say, the same happens at once,
//!    with less than a second in between.
//! 4. The command is gone when its process has ended; after 2 or 3, when nobody is left in its group.
//!
//! Stopping (Ctrl-Z) goes as with the jobs of a shell. A stopped command is in the middle of its
//! work: nothing else may be done to it but to stop with it, and to look at the lock before it goes on.
//!
//! 1. The command's process is reported as stopped. If it wanted the terminal and it is ours to give,
//!    it gets it and goes on. Without a terminal nobody stops with it: it keeps its lock.
//! 2. We take the terminal back, stop the rest of the command's group for good measure, and send the
//!    stop to our own group, for the rest of a pipeline or a script, and do the same ourselves: the
//!    shell takes over. Nobody renews the lock from here on.
//! 3. We are continued. If the lock is still ours, the command gets the terminal back (if it is our
//!    turn) and goes on; else it is ended as above.

use std::time::Duration;

use leasehold::Guard;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::getpgrp;
use tokio::time::{Instant, sleep, sleep_until};

use crate::child::{self, Child, Ended, Event};
use crate::signals::{self, Signals};
use crate::terminal::Terminal;

/// Between TERM and KILL when the lock is already somebody else's to take.
const GRACE_WHEN_LOST: Duration = Duration::from_millis(800);
/// No timer sleeps longer: none of them counts the time that the machine is suspended.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The command, its lock, and what may happen to either.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    child: Child,
    guard: &'a Guard,
    signals: &'a mut Signals,
    terminal: Option<&'a Terminal>,
    grace: Grace,
    ending: Option<Ending>,
    /// The command was sent a stop and has not stopped yet.
    asked_to_stop: bool,
    /// A stop for ourselves is on its way.
    stopping: bool,
    /// Whether the command had the terminal when it was last stopped.
    had_terminal: bool,
}

/// How long the command has between TERM and KILL, and how long before the end of the lock it gets
/// the KILL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grace {
    pub(crate) time: Duration,
    pub(crate) margin: Duration,
}

/// What became of the command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) ended: Ended,
    /// Why it was ended, or would have been: it then did not work under the lock to its end.
    pub(crate) cause: Option<Cause>,
    /// Whether it had the terminal at its end.
    pub(crate) had_terminal: bool,
}

/// Why the command is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The deadline comes near and nothing was renewed.
    NotRenewed,
    /// The lock is no longer ours.
    Lost,
}

#[derive(Debug, Clone, Copy)]
struct Ending {
    cause: Cause,
    kill_at: Instant,
    killed: bool,
}

impl<'a> Job<'a> {
    pub(crate) fn new(
        child: Child,
        guard: &'a Guard,
        signals: &'a mut Signals,
        terminal: Option<&'a Terminal>,
        grace: Grace,
    ) -> Self {
        Self {
            child,
            guard,
            signals,
            terminal,
            grace,
            ending: None,
            asked_to_stop: false,
            stopping: false,
            had_terminal: false,
        }
    }

    /// Comes back when the command is gone.
    pub(crate) async fn finish(mut self) -> Outcome {
        let guard = self.guard;
        let group = self.child.group();
        let reserve = self.grace.time + self.grace.margin;
        let mut outcome: Option<Outcome> = None;
        loop {
            let ending = self.ending;
            let kill_at = ending
                .filter(|ending| !ending.killed)
                .map(|ending| ending.kill_at);
            tokio::select! {
                biased;
                event = self.child.next() => match event {
                    Event::Stopped(signal) => self.stopped(signal),
                    Event::Ended(ended) => outcome = Some(self.ended(ended)),
                },
                () = guard.lost(), if ending.is_none_or(|ending| ending.cause != Cause::Lost) => {
                    self.end(Cause::Lost, self.grace.time.min(GRACE_WHEN_LOST));
                }
                () = near_end(guard, reserve), if ending.is_none() => {
                    let left = guard.remaining().saturating_sub(self.grace.margin);
                    self.end(Cause::NotRenewed, self.grace.time.min(left));
                }
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if kill_at.is_some() => self.kill(),
                () = child::gone(group), if outcome.is_some() => {}
                signal = self.signals.next() => self.arrived(signal),
            }
            if let Some(mut outcome) = outcome {
                let killed = self.ending.is_none_or(|ending| ending.killed);
                if killed || child::is_gone(group) {
                    outcome.cause = self.ending.map(|ending| ending.cause).or(outcome.cause);
                    return outcome;
                }
            }
        }
    }

    fn ended(&self, ended: Ended) -> Outcome {
        let had_terminal = self.terminal.is_some_and(|terminal| {
            let had = terminal.take_back(self.child.group());
            if had && matches!(ended, Ended::Died(_)) {
                terminal.restore();
            }
            had
        });
        let cause = (!self.guard.is_held()).then_some(Cause::Lost);
        Outcome {
            ended,
            cause,
            had_terminal,
        }
    }

    /// Asks the command to end, and sees to it that it does within `grace`.
    fn end(&mut self, cause: Cause, grace: Duration) {
        let kill_at = Instant::now() + grace;
        match &mut self.ending {
            Some(ending) => {
                ending.cause = cause;
                ending.kill_at = ending.kill_at.min(kill_at);
            }
            None => {
                self.ending = Some(Ending {
                    cause,
                    kill_at,
                    killed: false,
                });
                self.child.signal(Signal::SIGTERM);
                self.child.signal(Signal::SIGCONT);
                tracing::warn!(?cause, ?grace, "sent TERM to the command's process group");
            }
        }
    }

    fn kill(&mut self) {
        if let Some(ending) = &mut self.ending {
            ending.killed = true;
            self.child.signal(Signal::SIGKILL);
            tracing::warn!("sent KILL to the command's process group");
        }
    }

    fn arrived(&mut self, signal: Signal) {
        match signal {
            Signal::SIGTSTP if self.stopping => {
                self.stopping = false;
                signals::default_action(signal);
                self.resume();
            }
            // At a terminal we were stopped ourselves, and have seen to it when we ran on.
            Signal::SIGCONT if self.terminal.is_some() => {}
            Signal::SIGCONT => self.resume(),
            Signal::SIGTSTP => {
                self.asked_to_stop = true;
                self.child.signal(signal);
            }
            _ => {
                self.child.signal(signal);
                if matches!(signal, Signal::SIGTERM | Signal::SIGHUP) {
                    // Who is to end must not sleep through it.
                    self.child.signal(Signal::SIGCONT);
                }
            }
        }
    }

    fn stopped(&mut self, by: Signal) {
        let Some(terminal) = self.terminal else {
            return;
        };
        if self.ending.is_some() {
            return;
        }
        let group = self.child.group();
        // A continuation would make it forget a stop that it was sent at the same time.
        let asked_to_stop = std::mem::take(&mut self.asked_to_stop);
        let wants_terminal = matches!(by, Signal::SIGTTIN | Signal::SIGTTOU) && !asked_to_stop;
        if wants_terminal && (terminal.is_ours() || terminal.belongs_to(group)) {
            terminal.give(group);
            self.child.signal(Signal::SIGCONT);
            return;
        }
        self.had_terminal = terminal.take_back(group);
        // Nobody in its group works on while we cannot look after the lock.
        self.child.signal(Signal::SIGSTOP);
        // Comes back to us as a signal that has arrived.
        self.stopping = killpg(getpgrp(), Signal::SIGTSTP).is_ok();
    }

    fn resume(&mut self) {
        if !self.guard.is_held() {
            // Ended, not continued: the next thing that the loop hears of is the loss.
            return;
        }
        if let Some(terminal) = self.terminal
            && self.had_terminal
            && terminal.is_ours()
        {
            terminal.give(self.child.group());
        }
        self.child.signal(Signal::SIGCONT);
    }
}

/// Resolves when no more than `reserve` is left of the lock.
async fn near_end(guard: &Guard, reserve: Duration) {
    loop {
        let left = guard.remaining().saturating_sub(reserve);
        if left.is_zero() {
            return;
        }
        sleep(left.min(LONGEST_SLEEP)).await;
    }
}
