use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The terminal that controls this process, and whose turn it is there.
///
/// A terminal has one foreground process group: it gets what the keys send (Ctrl-C, Ctrl-Z) and may
/// read; members of other groups are stopped when they try. The command has a group of its own, so
/// the terminal is handed over to it and taken back, as a shell does with its jobs.
#[derive(Debug)]
pub(crate) struct Terminal {
    tty: File,
    own: Pid,
    /// How it was set before the command had it.
    modes: Option<Termios>,
}

impl Terminal {
    /// The controlling terminal, if there is one.
    pub(crate) fn open() -> Option<Self> {
        let tty = File::options()
            .read(true)
            .write(true)
            .open("/dev/tty")
            .ok()?;
        let modes = tcgetattr(tty.as_fd()).ok();
        Some(Self {
            tty,
            own: getpgrp(),
            modes,
        })
    }

    /// Whether the command should have it from its start: it is our turn, and we are not part of a
    /// pipeline whose other members may want it too (as in `leasehold run … | less`). There the
    /// command gets it when it first asks for it.
    pub(crate) fn is_for_command(&self) -> bool {
        self.is_ours() && io::stdin().is_terminal() && io::stdout().is_terminal()
    }

    /// Whether it is our process group's turn.
    pub(crate) fn is_ours(&self) -> bool {
        self.belongs_to(self.own)
    }

    /// Whether it is `group`'s turn.
    pub(crate) fn belongs_to(&self, group: Pid) -> bool {
        tcgetpgrp(self.tty.as_fd()) == Ok(group)
    }

    /// Hands it over to `group`. A group that is gone, or another session's terminal, is no failure
    /// of ours.
    pub(crate) fn give(&self, group: Pid) {
        tcsetpgrp(self.tty.as_fd(), group).ok();
    }

    /// Takes it back if `group` has it, and says whether it did.
    pub(crate) fn take_back(&self, group: Pid) -> bool {
        let had = self.belongs_to(group);
        if had {
            self.give(self.own);
        }
        had
    }

    /// Sets it as it was, after a command that could not do so itself.
    pub(crate) fn restore(&self) {
        if let Some(modes) = &self.modes {
            tcsetattr(self.tty.as_fd(), SetArg::TCSANOW, modes).ok();
        }
    }
}
