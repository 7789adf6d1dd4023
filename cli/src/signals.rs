use std::io;
use std::thread;

use nix::sys::signal::{SigSet, Signal, raise};
use tokio::sync::mpsc;

/// What `run` hears of and passes on to its command: everything that would end us, the stop that a
/// terminal sends, and the continuation.
const HEARD: [Signal; 8] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGTSTP,
    Signal::SIGCONT,
];

/// The signals that arrive, one after the other.
///
/// They are blocked and read by a thread instead of caught by handlers. So what was ignored when we
/// were started (`nohup`, a background job of a script) stays ignored, here and in the command, and
/// [`default_action`] can still do what the kernel would have done.
#[derive(Debug)]
pub(crate) struct Signals {
    arrived: mpsc::UnboundedReceiver<Signal>,
}

impl Signals {
    /// Blocks them in this thread and those it starts from now on: call it before there are others.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn block() -> io::Result<Self> {
        let ignored = ignored();
        let mut set: SigSet = HEARD.into_iter().collect();
        for signal in &ignored {
            set.remove(signal);
        }
        let mut blocked = set;
        // Taking the terminal back from the background must not stop us.
        blocked.add(Signal::SIGTTOU);
        blocked.thread_block()?;
        let (sender, arrived) = mpsc::unbounded_channel();
        thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                while let Ok(signal) = set.wait() {
                    if sender.send(signal).is_err() {
                        break;
                    }
                }
            })?;
        Ok(Self { arrived })
    }

    /// The next signal.
    ///
    /// # Cancel safety
    /// None is missed.
    pub(crate) async fn next(&mut self) -> Signal {
        match self.arrived.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
    }

    /// The next signal that asks us to leave, while there is no command yet; stops and goes on in
    /// between as any program does.
    ///
    /// # Cancel safety
    /// None is missed.
    pub(crate) async fn next_to_leave(&mut self) -> Signal {
        loop {
            match self.next().await {
                Signal::SIGTSTP => default_action(Signal::SIGTSTP),
                Signal::SIGCONT => {}
                signal => return signal,
            }
        }
    }
}

/// Undoes [`Signals::block`] in the process that becomes the command.
pub(crate) fn unblock() {
    let mut set: SigSet = HEARD.into_iter().collect();
    set.add(Signal::SIGTTOU);
    // It cannot fail for a valid set.
    set.thread_unblock().ok();
}

/// Does to this process what `signal` does by default: ends or stops it. Comes back when it is
/// continued, or when there was nothing to do: the kernel does not stop a process that no shell
/// could continue.
pub(crate) fn default_action(signal: Signal) {
    let mut set = SigSet::empty();
    set.add(signal);
    // Raised for this thread, so that the signal thread does not take it.
    if raise(signal).is_ok() {
        set.thread_unblock().ok();
        set.thread_block().ok();
    }
}

/// What was ignored when we were started.
fn ignored() -> SigSet {
    let mask = std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| parse_ignored(&status))
        .unwrap_or(0);
    HEARD
        .into_iter()
        .filter(|signal| mask >> (*signal as i32 - 1) & 1 == 1)
        .collect()
}

fn parse_ignored(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(line.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_mask_of_ignored_signals() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert_eq!(parse_ignored(status), Some(0x1001));
        assert_eq!(parse_ignored("Name:\tx\n"), None);
    }
}
