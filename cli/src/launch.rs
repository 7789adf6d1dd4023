//! The process between `run` and its command: the same program, started again, that sets itself up
//! and then becomes the command.
//!
//! 1. `run` starts it in a process group of its own, with our signals blocked.
//! 2. It asks the kernel to be killed when `run` dies (Linux): a job whose lock nobody looks after
//!    must not go on. This outlives step 4, except for a program with set-user-id.
//! 3. If `run` says so, it takes the terminal for its group, so that the command never runs a moment
//!    without it; then it lets the signals through.
//! 4. It executes the command. If that fails it ends with 126 or 127, as shells do.
//!
//! All this could be done between fork and exec, but not without `unsafe`.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::unistd::{getpgrp, getppid};

use crate::exit::{Exit, Failure};
use crate::signals;
use crate::terminal::Terminal;

/// First argument of the program that is to become a command; no subcommand of the user's.
const LAUNCH: &str = "--launch--";
const WITH_TERMINAL: &str = "with-terminal";
const WITHOUT: &str = "without";

/// The process that becomes `command`.
pub(crate) fn command(command: &[OsString], with_terminal: bool) -> io::Result<Command> {
    let mut launcher = Command::new(this_program()?);
    launcher
        .arg(LAUNCH)
        .arg(std::process::id().to_string())
        .arg(if with_terminal {
            WITH_TERMINAL
        } else {
            WITHOUT
        })
        .args(command)
        .process_group(0);
    Ok(launcher)
}

/// If this process was started to become a command: becomes it, or says why it could not.
pub(crate) fn requested() -> Option<Failure> {
    let mut args = std::env::args_os().skip(1);
    if args.next()? != LAUNCH {
        return None;
    }
    let parent = args.next()?.into_string().ok()?.parse().ok()?;
    let with_terminal = args.next()? == WITH_TERMINAL;
    let program = args.next()?;
    Some(become_command(parent, with_terminal, &program, args))
}

fn become_command(
    parent: i32,
    with_terminal: bool,
    program: &OsStr,
    args: impl Iterator<Item = OsString>,
) -> Failure {
    end_with_parent();
    if getppid().as_raw() != parent {
        // It died before the kernel knew that we want to die with it.
        return Failure::new(Exit::Failed, "ended while its command was started");
    }
    if with_terminal && let Some(terminal) = Terminal::open() {
        terminal.give(getpgrp());
    }
    signals::unblock();
    let error = Command::new(program).args(args).exec();
    let program = program.display();
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new(Exit::NotFound, format!("{program}: not found")),
        _ => Failure::new(
            Exit::NotExecutable,
            format!("{program}: cannot be executed: {error}"),
        ),
    }
}

/// On Linux also right when the file was replaced since we were started.
pub(crate) fn this_program() -> io::Result<OsString> {
    if cfg!(target_os = "linux") {
        Ok("/proc/self/exe".into())
    } else {
        Ok(std::env::current_exe()?.into())
    }
}

#[cfg(target_os = "linux")]
fn end_with_parent() {
    // The parent's main thread started us, so it is the end of the process that counts.
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL).ok();
}

#[cfg(not(target_os = "linux"))]
fn end_with_parent() {}
