//! The `leasehold` command: runs a job under a lock, shows who holds one, takes it away, tells stores
//! apart and tries them out.

#![allow(
    clippy::future_not_send,
    reason = "everything runs on one thread; see store.rs"
)]

#[cfg(not(unix))]
compile_error!("the leasehold command needs Unix signals and process groups");

mod break_lock;
mod child;
mod choose;
mod cli;
mod completions;
#[cfg(feature = "conformance")]
mod conformance;
mod doctor;
mod exit;
mod job;
mod launch;
mod ls;
mod man;
mod output;
mod run;
mod signals;
mod status;
mod store;
mod terminal;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::cli::{Cli, Command};
use crate::exit::{Exit, Failure};

fn main() -> ExitCode {
    if let Some(failure) = launch::requested() {
        return fail(&failure);
    }
    #[cfg(feature = "conformance")]
    if let Some(code) = conformance::requested() {
        return code;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    output::trace(cli.verbose);
    let outcome = match &cli.command {
        Command::Run(args) => run::run(&cli.store, args),
        Command::Status(args) => status::status(&cli.store, args),
        Command::Ls(args) => ls::ls(&cli.store, args),
        Command::Break(args) => break_lock::break_lock(&cli.store, args),
        Command::Choose(args) => choose::choose(&cli.store, args),
        Command::Doctor(args) => doctor::doctor(&cli.store, args),
        #[cfg(feature = "conformance")]
        Command::Conformance(args) => conformance::conformance(&cli.store, args),
        Command::Completions(args) => completions::completions(args),
        Command::Man(args) => man::man(args),
    };
    output::flush();
    match outcome {
        Ok(exit) => exit.leave(),
        Err(failure) => fail(&failure),
    }
}

fn fail(failure: &Failure) -> ExitCode {
    output::error(failure);
    failure.exit().leave()
}

/// Help and version go to standard output and are no failure; anything else is a bad argument.
fn usage(error: &clap::Error) -> ExitCode {
    // Nothing can be done for a reader that has gone away.
    error.print().ok();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Exit::Done.leave(),
        _ => Exit::Usage.leave(),
    }
}
