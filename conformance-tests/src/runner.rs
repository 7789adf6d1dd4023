use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold_core::Guarantees;
use libtest_mimic::{Arguments, Completion, Conclusion, Failed, Trial};
use tokio::runtime::{self, Runtime};

use crate::child;
use crate::cx::{Cx, Skip};
use crate::fixtures::Missing;
use crate::harness::{Harness, Store};
use crate::rule::{Check, Rule};
use crate::rules;

/// The environment variable with the seed of all random choices; the one in use is printed.
pub const SEED: &str = "LEASEHOLD_SEED";

/// Runs the suite on a backend: the whole `main` of a test target with `harness = false`.
///
/// Takes the arguments of a usual test binary (`--list`, a filter, `--test-threads` …). A rule that
/// the backend does not owe, or that cannot be tried on this store, is shown as ignored with the
/// reason.
#[must_use]
pub fn main(harness: impl Harness) -> ExitCode {
    if let Some(code) = be_child(&harness) {
        return code;
    }
    match Suite::start(Arc::new(harness)) {
        Ok(suite) => suite.run(rules::RULES, Arguments::from_args()).exit_code(),
        Err(reason) => {
            eprintln!("{reason:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs `rules`, some or all of [`RULES`](crate::RULES), on a backend, so many checks at a time (8 if that
/// is not given), and shows what becomes of each: for a program with a `main` of its own, which calls
/// [`be_child`] first.
///
/// # Errors
/// If the store is missing or not reached.
pub fn run(
    harness: impl Harness,
    rules: &[Rule],
    at_a_time: Option<usize>,
) -> anyhow::Result<Tally> {
    let suite = Suite::start(Arc::new(harness))?;
    if let Err(missing) = &suite.found {
        bail!("{missing}");
    }
    let arguments = Arguments {
        test_threads: at_a_time,
        ..Arguments::default()
    };
    let Conclusion {
        num_passed: passed,
        num_failed: failed,
        num_ignored: ignored,
        ..
    } = suite.run(rules, arguments);
    Ok(Tally {
        passed,
        failed,
        ignored,
    })
}

/// How many checks of a [`run`] passed, and how many did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Those that passed.
    pub passed: u64,
    /// Those that did not.
    pub failed: u64,
    /// Those that are not owed, or cannot be tried on this store.
    pub ignored: u64,
}

/// If this process was started by the suite to be a client of its own, it is that until it is told to
/// end. [`main`] does this; a program with a `main` of its own that uses [`judge`] or [`run`] does it first.
#[must_use]
pub fn be_child(harness: &impl Harness) -> Option<ExitCode> {
    let address = child::address()?;
    let served =
        new_runtime().and_then(|runtime| runtime.block_on(child::serve(harness, &address)));
    Some(match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("a client in a process of its own: {error:#}");
            ExitCode::FAILURE
        }
    })
}

/// What became of one check.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Verdict {
    /// The name of the [`Check`].
    pub check: &'static str,
    /// Whether it passed.
    pub outcome: Outcome,
}

/// Whether a check passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It did.
    Passed,
    /// It is not owed, or cannot be tried, for this reason.
    Ignored(String),
    /// It did not, for this reason.
    Failed(String),
}

/// Runs the checks of the rule with this id, all at the same time, and says what became of each.
///
/// # Panics
/// If there is no such rule, or the store is missing or not reached.
#[must_use]
pub fn judge(harness: Arc<dyn Harness>, id: &str) -> Vec<Verdict> {
    let rule = rules::RULES.iter().find(|rule| rule.id == id);
    let rule = rule.unwrap_or_else(|| panic!("there is no rule {id}"));
    let suite = Suite::start(harness).unwrap_or_else(|error| panic!("{error:#}"));
    let (store, guarantees) = match &suite.found {
        Ok(found) => found,
        Err(missing) => panic!("{missing}"),
    };
    let judge = |check: &'static Check| {
        let case = suite.case(rule, check, store, guarantees);
        std::thread::spawn(move || case.run())
    };
    let running = rule.checks.iter().map(|check| {
        let unmet = check.unmet(guarantees, store);
        (check.name, unmet.map_or_else(|| Ok(judge(check)), Err))
    });
    let running = running.collect::<Vec<_>>();
    let verdicts = running.into_iter().map(|(check, running)| {
        let outcome = match running {
            Ok(running) => running
                .join()
                .unwrap_or_else(|_panic| Outcome::Failed("it panicked".into())),
            Err(reason) => Outcome::Ignored(reason),
        };
        Verdict { check, outcome }
    });
    let verdicts = verdicts.collect();
    suite.end();
    verdicts
}

impl From<Outcome> for Result<Completion, Failed> {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Passed => Ok(Completion::Completed),
            Outcome::Ignored(reason) => Ok(Completion::ignored_with(reason)),
            Outcome::Failed(reason) => Err(reason.into()),
        }
    }
}

/// The rules on one store.
struct Suite {
    harness: Arc<dyn Harness>,
    found: Result<(Store, Guarantees), Missing>,
    seed: u64,
    /// Where the store was started: it lives as long.
    runtime: Runtime,
}

impl Suite {
    fn start(harness: Arc<dyn Harness>) -> anyhow::Result<Self> {
        let runtime = new_runtime()?;
        let found = match runtime.block_on(harness.start()) {
            Ok(store) => {
                let client = runtime.block_on(harness.connect(&store.address));
                let client = client.context("the store is there, but a client cannot connect")?;
                let guarantees = client.guarantees();
                runtime.block_on(async { drop(client) });
                Ok((store, guarantees))
            }
            Err(missing) => Err(missing),
        };
        Ok(Self {
            harness,
            found,
            seed: seed()?,
            runtime,
        })
    }

    fn run(self, rules: &[Rule], mut arguments: Arguments) -> Conclusion {
        // Checks wait more than they work.
        arguments.test_threads.get_or_insert(8);
        if !arguments.list {
            if let Ok((store, _)) = &self.found
                && let Some(description) = &store.description
            {
                eprint!("\nstore: {description}");
            }
            eprintln!("\nrandom choices: {SEED}={}", self.seed);
        }
        let mut trials = Vec::new();
        if let Err(missing) = &self.found
            && missing.is_required()
        {
            let reason = missing.to_string();
            trials.push(Trial::test("the store is there", move || {
                Err(Failed::from(reason))
            }));
        }
        for rule in rules {
            trials.extend(rule.checks.iter().map(|check| self.trial(rule, check)));
        }
        let conclusion = libtest_mimic::run(&arguments, trials);
        self.end();
        conclusion
    }

    fn trial(&self, rule: &Rule, check: &Check) -> Trial {
        let name = format!("{} {}: {}", rule.id, rule.title, check.name);
        let unmet = match &self.found {
            Ok((store, guarantees)) => match check.unmet(guarantees, store) {
                None => {
                    let case = self.case(rule, check, store, guarantees);
                    return Trial::ignorable_test(name, || case.run().into());
                }
                Some(reason) => reason,
            },
            Err(missing) => missing.to_string(),
        };
        Trial::ignorable_test(name, || Ok(Completion::ignored_with(unmet)))
    }

    fn case(&self, rule: &Rule, check: &Check, store: &Store, guarantees: &Guarantees) -> Case {
        let label = format!("{} {}", rule.id, check.name);
        let harness = Arc::clone(&self.harness);
        Case {
            check: *check,
            cx: Cx::new(harness, store.clone(), *guarantees, &label, self.seed),
        }
    }

    /// Stops the servers; what is left of a container is awaited.
    fn end(self) {
        let Self { found, runtime, .. } = self;
        runtime.block_on(async { drop(found) });
    }
}

/// One check that is about to run.
struct Case {
    check: Check,
    cx: Cx,
}

impl Case {
    /// Far beyond what any check takes, so that nothing hangs for ever.
    const LIMIT: Duration = Duration::from_secs(300);

    /// On a runtime of its own: what is left running there ends with it.
    fn run(self) -> Outcome {
        match self.try_run() {
            Ok(()) => Outcome::Passed,
            Err(reason) if reason.is::<Skip>() => Outcome::Ignored(reason.to_string()),
            Err(reason) => Outcome::Failed(format!("{reason:#}")),
        }
    }

    fn try_run(self) -> anyhow::Result<()> {
        let runtime = new_runtime()?;
        let outcome = runtime.block_on(async {
            let running = tokio::spawn((self.check.run)(self.cx));
            match tokio::time::timeout(Self::LIMIT, running).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(panic)) => bail!("{panic}"),
                Err(_) => bail!("not over after {:?}", Self::LIMIT),
            }
        });
        runtime.shutdown_timeout(Duration::from_secs(10));
        outcome
    }
}

fn new_runtime() -> anyhow::Result<Runtime> {
    let mut builder = runtime::Builder::new_multi_thread();
    Ok(builder.worker_threads(2).enable_all().build()?)
}

fn seed() -> anyhow::Result<u64> {
    match crate::fixtures::from_environment(SEED) {
        Some(seed) => seed
            .parse()
            .with_context(|| format!("{SEED} is not a number")),
        None => Ok(fastrand::u64(..)),
    }
}
