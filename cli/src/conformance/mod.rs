//! The suite on a store that the user already has, in a place of its own there.
//!
//! 1. The place is a prefix, or a folder, with a random name. Whatever the suite leaves lies below it.
//! 2. The suite runs in a process of its own, this program started again, in a process group of its own.
//!    It starts clients in processes of their own, which are this program once more.
//! 3. When it has ended, or a signal asks us to leave, the whole group is killed. Only when nobody is left
//!    in it can nothing new be written to the place.
//! 4. Then all that lies there is removed.

mod place;

use std::ffi::OsString;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use async_trait::async_trait;
use leasehold::backend::{self, Backend};
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::{Harness, RULES, Rule, Store};
use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep, timeout};

use self::place::Place;
use crate::child::{self, Child, Ended, Event};
use crate::cli::{ConformanceArgs, StoreArgs};
use crate::exit::{Exit, Failure};
use crate::output::{self, BOLD};
use crate::run::leave_by;
use crate::signals::Signals;
use crate::terminal::Terminal;
use crate::{launch, store};

/// Set for the process of the suite: the URL of its place.
const PLACE: &str = "LEASEHOLD_CONFORMANCE_PLACE";

/// How long it may take until a Redlock votes: longer than its longest ttl.
const VOTE_LIMIT: Duration = Duration::from_secs(60);

/// How long removing what was left may take.
const ERASE_LIMIT: Duration = Duration::from_secs(60);

/// If this process was started by the suite to be a client of its own, it is that until it is told to end.
pub(crate) fn requested() -> Option<ExitCode> {
    leasehold_conformance::be_child(&Given::default())
}

/// Runs the rules on the store.
pub(crate) fn conformance(store: &StoreArgs, args: &ConformanceArgs) -> Result<Exit, Failure> {
    let rules = args.chosen()?;
    if args.list {
        let lines: String = rules
            .iter()
            .map(|rule| format!("{BOLD}{:3}{BOLD:#} {}\n", rule.id, rule.title))
            .collect();
        return output::written(anstream::stdout().write_all(lines.as_bytes()));
    }
    if let Ok(url) = std::env::var(PLACE) {
        return suite(url, &rules, args);
    }
    // Before there are other threads.
    let signals = Signals::block()
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot hear signals: {error}")))?;
    let runtime = store::runtime()?;
    let outcome = runtime.block_on(supervise(store, signals));
    // Whatever still blocks somewhere does not keep us.
    runtime.shutdown_background();
    outcome
}

impl ConformanceArgs {
    /// The rules that were asked for.
    fn chosen(&self) -> Result<Vec<Rule>, Failure> {
        let known = |id: &&String| RULES.iter().any(|rule| rule.id.eq_ignore_ascii_case(id));
        let named = self.rules.iter().chain(&self.skip);
        if let Some(unknown) = named.clone().find(|id| !known(id)) {
            return Err(Failure::new(
                Exit::Usage,
                format!(
                    "there is no rule {}: see leasehold conformance --list",
                    output::printable(unknown)
                ),
            ));
        }
        let among =
            |ids: &[String], rule: &Rule| ids.iter().any(|id| rule.id.eq_ignore_ascii_case(id));
        let chosen = RULES.iter().filter(|rule| {
            (self.rules.is_empty() || among(&self.rules, rule)) && !among(&self.skip, rule)
        });
        Ok(chosen.copied().collect())
    }
}

/// Starts the process of the suite, and removes what is left of it, however it ends.
async fn supervise(store: &StoreArgs, mut signals: Signals) -> Result<Exit, Failure> {
    let terminal = Terminal::open();
    let place = Place::in_store(&store.url()?);
    let leave = |signal| leave_by(signal, terminal.as_ref());
    // Whatever is wrong with the store is said in one line, before there are any rules.
    tokio::select! {
        biased;
        signal = signals.next_to_leave() => return Ok(leave(signal)),
        connected = backend::connect(place.url()) => drop(connected?.close().await),
    }
    let suite = std::iter::once(launch::this_program())
        .chain(std::env::args_os().skip(1).map(Ok))
        .collect::<std::io::Result<Vec<OsString>>>();
    let url = place.url().to_owned();
    let child = suite.and_then(|suite| Child::start(&suite, [(PLACE, url)], false));
    let mut child = child
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot start the suite: {error}")))?;
    let outcome = tokio::select! {
        biased;
        signal = signals.next_to_leave() => Ok(leave(signal)),
        ended = end(&mut child) => exit_like(ended),
    };
    // Those that it has stopped for a check would stay, and those that hold locks would write.
    child.signal(Signal::SIGKILL);
    child::gone(child.group()).await;
    tokio::select! {
        biased;
        // Whoever asks twice is in a hurry.
        signal = signals.next_to_leave() => {
            output::warning(format_args!("left behind: {place}"));
            Ok(leave(signal))
        }
        erased = erase(&place) => match erased {
            Ok(()) => outcome,
            Err(failure) => {
                output::warning(format_args!("left behind: {place}: {failure}"));
                outcome.map(|exit| if exit == Exit::Done { Exit::Failed } else { exit })
            }
        },
    }
}

async fn end(child: &mut Child) -> Ended {
    loop {
        if let Event::Ended(ended) = child.next().await {
            return ended;
        }
    }
}

fn exit_like(ended: Ended) -> Result<Exit, Failure> {
    match ended {
        Ended::Exited(code) if code == Exit::Done.code() => Ok(Exit::Done),
        Ended::Exited(code) if code == Exit::No.code() => Ok(Exit::No),
        // It has said why.
        Ended::Exited(_) => Ok(Exit::Failed),
        Ended::Died(signal) => Err(Failure::new(
            Exit::Failed,
            format!("the suite died of {signal}"),
        )),
    }
}

async fn erase(place: &Place) -> Result<(), Failure> {
    let erasing = async {
        let backend = backend::connect(place.url()).await?;
        let erased = backend.erase().await;
        // Nothing is held: what cannot be given back ends by itself.
        backend.close().await.ok();
        erased
    };
    match timeout(ERASE_LIMIT, erasing).await {
        Ok(erased) => Ok(erased?),
        Err(_elapsed) => Err(Failure::new(
            Exit::Unavailable,
            format!("the store did not answer within {ERASE_LIMIT:?}"),
        )),
    }
}

/// What the process of the suite does.
fn suite(url: String, rules: &[Rule], args: &ConformanceArgs) -> Result<Exit, Failure> {
    let given = Given {
        place: Some(Place::of_suite(url)),
        ttl: args.ttl,
    };
    let tally = leasehold_conformance::run(given, rules, args.threads.map(usize::from))
        .map_err(|error| Failure::new(Exit::Failed, format!("{error:#}")))?;
    Ok(if tally.failed == 0 {
        Exit::Done
    } else {
        Exit::No
    })
}

/// Waits until the nodes of a Redlock vote: under a new prefix they are without data, and those that were
/// started a moment ago may have forgotten locks.
async fn vote(place: &Place) -> leasehold::Result<()> {
    const PAUSE: Duration = Duration::from_millis(200);
    let locks = leasehold::open(place.url()).await?;
    let started = Instant::now();
    loop {
        match locks.try_lock("first").await {
            Ok(_) => return locks.close().await,
            Err(error) if error.is_transient() && started.elapsed() < VOTE_LIMIT => {
                sleep(PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// A store that was given to us.
#[derive(Debug, Default)]
struct Given {
    /// `None` in a client of its own.
    place: Option<Place>,
    ttl: Option<Duration>,
}

#[async_trait]
impl Harness for Given {
    async fn start(&self) -> Result<Store, Missing> {
        let place = self.place.as_ref();
        let place = place.ok_or_else(|| Missing::new("the store", "it was not named"))?;
        let ready = if place.is_redlock() {
            vote(place).await
        } else {
            Ok(())
        };
        ready.map_err(|error| Missing::new("the store", error.to_string()))?;
        Ok(place.store(self.ttl))
    }

    async fn connect(&self, address: &str) -> leasehold::Result<Box<dyn Backend>> {
        backend::connect(address).await
    }
}
