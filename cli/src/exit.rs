use std::fmt;
use std::process::ExitCode;

use leasehold::{Error, ErrorKind};
use nix::sys::signal::Signal;

use crate::signals;

/// How the command ends. The codes of its own keep clear of those that have a meaning elsewhere:
/// small numbers (programs), 64–78 (sysexits.h), 80–99 (curl), 100 and 111 (daemontools), 123–127
/// (xargs, timeout, env, shells), 128 and more (signals).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Did what was asked for.
    Done,
    /// `status`: free. `break`: nothing was taken away. `choose`: none does. `doctor`: warnings.
    /// `conformance`: a rule is broken.
    No,
    /// Somebody else held the lock for as long as was waited.
    Busy,
    /// The lock was lost, or about to be, while the command ran; it was ended.
    Lost,
    /// An argument is wrong.
    Usage,
    /// The store did not answer.
    Unavailable,
    /// The store refused, or anything else went wrong.
    Failed,
    /// `doctor`: a promise may be broken.
    Unsafe,
    /// The command of `run` exists but cannot be executed.
    NotExecutable,
    /// The command of `run` was not found.
    NotFound,
    /// The command of `run` ended with this code.
    Child(u8),
    /// Ended as signals do it in a shell: 128 and the number.
    Signal(Signal),
    /// Ended by this very signal, so that a script which waits for us ends with it too.
    By(Signal),
}

impl Exit {
    /// What each code means, in the words of the help, the manual page and the README.
    pub(crate) const TABLE: [(&'static str, &'static str); 12] = [
        (
            "0",
            "done; `status`: the lock is held; `break`: it was taken away; `choose`: a store does all; `doctor`: nothing to warn of; `conformance`: no rule is broken",
        ),
        (
            "1",
            "`status`: the lock is free; `break`: nothing was taken away; `choose`: no store does all; `doctor`: warnings; `conformance`: a rule is broken",
        ),
        (
            "115",
            "not got: somebody else held the lock for as long as was waited",
        ),
        (
            "116",
            "lost: the lock was lost, or could not be renewed in time; the command was ended",
        ),
        ("117", "bad argument"),
        ("118", "the store cannot be reached or does not answer"),
        (
            "119",
            "the store refused (a missing right, a version too old), or another failure",
        ),
        (
            "120",
            "`doctor`: a promise may be broken in daily use: one lock may be given to two",
        ),
        ("126", "the command of `run` cannot be executed"),
        ("127", "the command of `run` was not found"),
        (
            "128+n",
            "the command of `run` died of signal n, or the signal ended the waiting",
        ),
        ("other", "the code of the command of `run`, unchanged"),
    ];

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::No => 1,
            Self::Busy => 115,
            Self::Lost => 116,
            Self::Usage => 117,
            Self::Unavailable => 118,
            Self::Failed => 119,
            Self::Unsafe => 120,
            Self::NotExecutable => 126,
            Self::NotFound => 127,
            Self::Child(code) => code,
            Self::Signal(signal) | Self::By(signal) => {
                128_u8.saturating_add(u8::try_from(signal as i32).unwrap_or(u8::MAX))
            }
        }
    }

    /// The code to return from `main`; does not come back from [`Exit::By`].
    pub(crate) fn leave(self) -> ExitCode {
        if let Self::By(signal) = self {
            signals::default_action(signal);
        }
        self.code().into()
    }
}

/// Why the command cannot do what it was asked for: a code and one line to read.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }

    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = self.message.split_whitespace();
        f.write_str(words.next().unwrap_or("failed"))?;
        words.try_for_each(|word| write!(f, " {word}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match error.kind() {
            ErrorKind::Timeout => Exit::Busy,
            ErrorKind::Lost => Exit::Lost,
            ErrorKind::Invalid => Exit::Usage,
            ErrorKind::Unavailable => Exit::Unavailable,
            _ => Exit::Failed,
        };
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Some libraries repeat the cause in their own text.
            if !message.contains(&cause_text) {
                message = format!("{message}: {cause_text}");
            }
            source = cause.source();
        }
        Self::new(exit, message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in the README is the one that the command shows, and both name the real codes.
    #[test]
    fn codes_are_documented() {
        let readme = include_str!("../README.md");
        for (code, meaning) in Exit::TABLE {
            let row = format!("| {code} | {meaning} |");
            assert!(readme.contains(&row), "cli/README.md lacks the row: {row}");
        }
        let own = [
            Exit::Done,
            Exit::No,
            Exit::Busy,
            Exit::Lost,
            Exit::Usage,
            Exit::Unavailable,
            Exit::Failed,
            Exit::Unsafe,
            Exit::NotExecutable,
            Exit::NotFound,
        ];
        let documented: Vec<u8> = Exit::TABLE
            .iter()
            .filter_map(|(code, _)| code.parse().ok())
            .collect();
        assert_eq!(own.map(Exit::code).to_vec(), documented);
        assert_eq!(Exit::Signal(Signal::SIGTERM).code(), 143);
    }

    #[test]
    fn own_codes_keep_clear_of_the_usual_ones() {
        for exit in [
            Exit::Busy,
            Exit::Lost,
            Exit::Usage,
            Exit::Unavailable,
            Exit::Failed,
            Exit::Unsafe,
        ] {
            let code = exit.code();
            let usual = [0..=2, 64..=78, 80..=100, 111..=111, 123..=255];
            assert!(
                usual.iter().all(|range| !range.contains(&code)),
                "{exit:?} has the code {code}"
            );
        }
    }

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::new(Exit::Failed, "first\n  second\tthird\n");
        assert_eq!(failure.to_string(), "first second third");
    }
}
