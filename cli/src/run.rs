use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use leasehold::{ErrorKind, Guard, Locks};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::getpgrp;
use tokio::time::{sleep, timeout};

use crate::child::{Child, Ended};
use crate::cli::{OnBusy, RunArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::job::{Cause, Grace, Job, Outcome};
use crate::output::{self, WaitingLine};
use crate::signals::Signals;
use crate::store;
use crate::terminal::Terminal;

/// How long to go on giving back what could not be given back at once.
const LAST_TRY: Duration = Duration::from_secs(2);

/// Runs a command while holding a lock.
pub(crate) fn run(store: &StoreArgs, args: &RunArgs) -> Result<Exit, Failure> {
    // Before there are other threads.
    let signals = Signals::block()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot hear signals: {error}")))?;
    let runtime = store::runtime()?;
    let outcome = runtime.block_on(run_locked(store, args, signals));
    // Whatever still blocks somewhere does not keep us.
    runtime.shutdown_background();
    outcome
}

async fn run_locked(
    store: &StoreArgs,
    args: &RunArgs,
    mut signals: Signals,
) -> Result<Exit, Failure> {
    let terminal = Terminal::open();
    let locks = tokio::select! {
        biased;
        signal = signals.next_to_leave() => return Ok(leave_by(signal, terminal.as_ref())),
        locks = store.open() => with_options(locks?, args),
    };
    let grace = grace(locks.ttl(), args.grace)?;
    let got = tokio::select! {
        biased;
        signal = signals.next_to_leave() => Err(signal),
        got = get(&locks, args) => Ok(got),
    };
    let result = match got {
        Err(signal) => Ok(leave_by(signal, terminal.as_ref())),
        Ok(Err(failure)) => Err(failure),
        Ok(Ok(None)) => busy(&locks, args).await,
        Ok(Ok(Some(guard))) => {
            run_command(args, guard, grace, &mut signals, terminal.as_ref()).await
        }
    };
    // Nothing stays queued, no release stays undone; but a store that is silent does not keep us.
    if !matches!(timeout(LAST_TRY, locks.close()).await, Ok(Ok(()))) {
        tracing::warn!("the store did not confirm that all was given back");
    }
    result
}

/// What was not given stays as the URL has it.
fn with_options(mut locks: Locks, args: &RunArgs) -> Locks {
    if let Some(ttl) = args.ttl {
        locks = locks.with_ttl(ttl);
    }
    if let Some(wait) = args.wait {
        locks = locks.with_wait(wait);
    }
    if let Some(label) = &args.label {
        locks = locks.with_label(label);
    }
    locks
}

/// Waits for the lock as the user asked. `None`: somebody else held it.
async fn get(locks: &Locks, args: &RunArgs) -> Result<Option<Guard>, Failure> {
    if args.no_wait {
        return Ok(locks.try_lock(&args.key).await?);
    }
    let locked = tokio::select! {
        biased;
        locked = locks.lock(&args.key) => locked,
        never = show_waiting(locks, &args.key) => match never {},
    };
    match locked {
        Ok(guard) => Ok(Some(guard)),
        Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Says on a terminal what is waited for, if it takes a while.
async fn show_waiting(locks: &Locks, key: &str) -> Infallible {
    sleep(Duration::from_millis(500)).await;
    let Some(line) = WaitingLine::start() else {
        return pending().await;
    };
    let name = output::printable(key);
    line.show(format_args!("waiting for {name} …"));
    loop {
        // A store that cannot be asked is the business of the lock that is waited for.
        if let Ok(Some(holder)) = locks.holder(key).await {
            line.show(format_args!(
                "waiting for {name}, held by {} …",
                output::who(&holder)
            ));
        }
        sleep(Duration::from_secs(2)).await;
    }
}

async fn busy(locks: &Locks, args: &RunArgs) -> Result<Exit, Failure> {
    if args.on_busy == OnBusy::Skip {
        return Ok(Exit::Done);
    }
    let key = output::printable(&args.key);
    let holder = timeout(Duration::from_secs(1), locks.holder(&args.key)).await;
    Err(Failure::new(
        Exit::Busy,
        match holder {
            Ok(Ok(Some(holder))) => format!("{key} is held by {}", output::who(&holder)),
            _ => format!("{key} was held by somebody else"),
        },
    ))
}

async fn run_command(
    args: &RunArgs,
    guard: Guard,
    grace: Grace,
    signals: &mut Signals,
    terminal: Option<&Terminal>,
) -> Result<Exit, Failure> {
    let key = output::printable(&args.key);
    let env = [
        ("LEASEHOLD_KEY", args.key.clone()),
        ("LEASEHOLD_TOKEN", guard.token().to_string()),
        ("LEASEHOLD_OWNER", guard.owner().to_string()),
    ];
    let child = Child::start(
        &args.command,
        env,
        terminal.is_some_and(Terminal::is_for_command),
    )
    .map_err(|error| Failure::new(Exit::Failed, format!("cannot start the command: {error}")))?;
    let outcome = Job::new(child, &guard, signals, terminal, grace)
        .finish()
        .await;
    let released = guard.release().await;
    let cause = match &released {
        Err(error) if error.kind() == ErrorKind::Lost => outcome.cause.or(Some(Cause::Lost)),
        _ => outcome.cause,
    };
    if let Some(cause) = cause {
        return Err(Failure::new(
            Exit::Lost,
            format!(
                "{} {key}: the command {}",
                match cause {
                    Cause::Lost => "lost the lock",
                    Cause::NotRenewed => "could not renew the lock",
                },
                match outcome.ended {
                    Ended::Exited(code) => format!("ended with {code}"),
                    Ended::Died(signal) => format!("died of {signal}"),
                }
            ),
        ));
    }
    if let Err(error) = released {
        output::warning(format_args!(
            "the lock {key} could not be freed and ends by itself: {}",
            Failure::from(error)
        ));
    }
    Ok(exit_like(&outcome, terminal))
}

fn exit_like(outcome: &Outcome, terminal: Option<&Terminal>) -> Exit {
    match outcome.ended {
        Ended::Exited(code) => Exit::Child(code),
        Ended::Died(Signal::SIGINT) => {
            if outcome.had_terminal {
                // Ctrl-C reached the command alone. The others of our group (a script, the rest of
                // a pipeline) would have had it too, had the command been one of them.
                killpg(getpgrp(), Signal::SIGINT).ok();
            }
            leave_by(Signal::SIGINT, terminal)
        }
        Ended::Died(signal) => Exit::Signal(signal),
    }
}

/// At a terminal INT is really died of: a shell that runs a script goes on with it unless what it
/// waits for does so.
pub(crate) fn leave_by(signal: Signal, terminal: Option<&Terminal>) -> Exit {
    match (signal, terminal) {
        (Signal::SIGINT, Some(_)) => Exit::By(signal),
        _ => Exit::Signal(signal),
    }
}

/// How the time before the end of the lock is divided. Renewal is due when two thirds of the ttl are
/// left, and must have the time to fail and be tried again before the command is ended.
fn grace(ttl: Duration, wanted: Option<Duration>) -> Result<Grace, Failure> {
    let longest = ttl / 3;
    let time = wanted.unwrap_or_else(|| (ttl / 6).min(Duration::from_secs(10)));
    if time > longest {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "a grace of {} leaves too little of the ttl for renewals: give at most a third of the ttl, {}",
                humantime::format_duration(time),
                humantime::format_duration(longest)
            ),
        ));
    }
    Ok(Grace {
        time,
        margin: (ttl / 10).min(Duration::from_millis(500)),
    })
}
