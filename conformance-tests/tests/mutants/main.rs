//! The suite itself is tested: each rule must catch a backend that breaks it, and each check of it must
//! fail for one.

mod flawed;
#[path = "../server/mod.rs"]
mod server;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use flawed::{Client, Flaw, Flawed, Memories};
use leasehold_conformance::{Harness, Outcome, RULES, be_child, judge, promised_fields};
use leasehold_core::{Backend, Memory};
use libtest_mimic::{Arguments, Failed, Trial};
use server::{Flaw as ServerFlaw, Served};

/// Which flaws each rule must catch. The same backends without a flaw pass in `tests/memory.rs` and
/// `tests/served.rs`.
const MUTANTS: &[(&str, Mutant)] = &[
    ("C1", Mutant::Memory(Flaw::GrantsAll)),
    ("C1", Mutant::Memory(Flaw::ChecksThenGrants)),
    ("C2", Mutant::Memory(Flaw::ForgetsRelease)),
    ("C3", Mutant::Memory(Flaw::FreesByKey)),
    ("C4", Mutant::Memory(Flaw::NeverExpires)),
    ("C5", Mutant::Memory(Flaw::AcquiresInATask)),
    ("C6", Mutant::Memory(Flaw::FoldsCase)),
    ("C6", Mutant::Memory(Flaw::CutsAtNul)),
    ("C6", Mutant::Memory(Flaw::HashesShort)),
    ("C7", Mutant::Memory(Flaw::ConstantToken)),
    ("C8", Mutant::Memory(Flaw::Polls)),
    ("C8", Mutant::Server(ServerFlaw::ServesTheDead)),
    ("C9", Mutant::Server(ServerFlaw::NeverExpires)),
    ("C10", Mutant::Memory(Flaw::RenewsNothing)),
    ("C11", Mutant::Memory(Flaw::BelievesTooLong)),
    ("C11", Mutant::Memory(Flaw::RenewsNothing)),
    ("C11", Mutant::Memory(Flaw::EndsAllOnRelease)),
    ("C12", Mutant::Memory(Flaw::WaitsForEver)),
    ("C13", Mutant::Memory(Flaw::ReleasesOnce)),
    ("C13", Mutant::Memory(Flaw::RenewsByItself)),
    ("C14", Mutant::Memory(Flaw::ShortNumbers)),
    ("C15", Mutant::Memory(Flaw::BelievesTooLong)),
    ("C15", Mutant::Memory(Flaw::ConstantToken)),
    ("C15", Mutant::Server(ServerFlaw::BelievesTooLong)),
    ("C16", Mutant::Memory(Flaw::KnowsClientsOnly)),
    ("C17", Mutant::Memory(Flaw::RenewsByItself)),
    ("C18", Mutant::Memory(Flaw::KnowsClientsOnly)),
    ("C19", Mutant::Memory(Flaw::AcquiresInATask)),
    ("C20", Mutant::Memory(Flaw::WakesAll)),
    ("C21", Mutant::Memory(Flaw::EvictsAny)),
    ("C21", Mutant::Memory(Flaw::TellsNothing)),
    ("C21", Mutant::Memory(Flaw::RenewsNothing)),
    ("C21", Mutant::Memory(Flaw::ListsStale)),
    ("C21", Mutant::Memory(Flaw::ListsAll)),
    ("C21", Mutant::Memory(Flaw::ListsEscaped)),
    ("C22", Mutant::Memory(Flaw::SpawnsOnDrop)),
    ("C22", Mutant::Memory(Flaw::NeverExpires)),
    ("C22", Mutant::Memory(Flaw::KeepsForEver)),
    ("F1", Mutant::Server(ServerFlaw::EndsAtFirstError)),
    ("F2", Mutant::Server(ServerFlaw::BelievesTooLong)),
    ("F3", Mutant::Server(ServerFlaw::NeverReconnects)),
    ("F3", Mutant::Server(ServerFlaw::RenewsBlindly)),
    ("F3", Mutant::Server(ServerFlaw::ForgetsTokens)),
    ("F4", Mutant::Server(ServerFlaw::BelievesTooLong)),
    ("F5", Mutant::Server(ServerFlaw::KeepsOrphans)),
    ("F6", Mutant::Memory(Flaw::ForgetsWithItsLeader)),
    ("F7", Mutant::Server(ServerFlaw::NeverExpires)),
    ("F7", Mutant::Server(ServerFlaw::KeepsOrphans)),
    ("F8", Mutant::Server(ServerFlaw::TrustsTheWire)),
    ("F8", Mutant::Server(ServerFlaw::MissesWakeUps)),
    ("F9", Mutant::Server(ServerFlaw::ConstantToken)),
    ("F9", Mutant::Server(ServerFlaw::BelievesTooLong)),
    ("F9", Mutant::Server(ServerFlaw::BelievesLateGrants)),
];

/// For each field of `Guarantees` one that claims more than it keeps, and the rule that must catch it.
/// `expiry`, `fairness` and `wakeup`: the memory backend claims the most.
const CLAIMS: &[(&str, &str, Mutant)] = &[
    (
        "consistency",
        "F6",
        Mutant::Server(ServerFlaw::ClaimsAMajority),
    ),
    (
        "node_losses",
        "F6",
        Mutant::Server(ServerFlaw::ClaimsASpare),
    ),
    ("expiry", "C4", Mutant::Memory(Flaw::NeverExpires)),
    ("shortest_ttl", "C4", Mutant::Memory(Flaw::ClaimsAShortTtl)),
    ("fairness", "C8", Mutant::Memory(Flaw::Polls)),
    ("wakeup", "C20", Mutant::Memory(Flaw::WakesAll)),
    (
        "tokens",
        "F3",
        Mutant::Server(ServerFlaw::ClaimsDurableTokens),
    ),
];

/// Checks that fail for none of them, and why.
const WITHOUT: &[(&str, &str, &str)] = &[
    ("C6", "no name, and one too long", BY_CORE),
    ("C13", "its first attempt fails", BY_CORE),
    ("C13", "its first attempt fails after a drop", BY_CORE),
    ("C14", "bad ones", BY_CORE),
    ("C16", "counted, and without a round trip", BY_CORE),
    ("C16", "while the first acquire is under way", BY_CORE),
];
const BY_CORE: &str = "core alone sees to it: no backend could break it";

/// The checks that have failed for a mutant.
static CAUGHT: Mutex<BTreeSet<(&'static str, &'static str)>> = Mutex::new(BTreeSet::new());

#[derive(Debug, Clone, Copy)]
enum Mutant {
    Memory(Flaw),
    Server(ServerFlaw),
}

fn main() -> ExitCode {
    if let Some(code) = server::be_server(store) {
        return code;
    }
    // A child learns its flaw from the address.
    if let Some(code) = be_child(&Served(ServerFlaw::None)) {
        return code;
    }
    let mut arguments = Arguments::from_args();
    // They wait more than they work.
    arguments.test_threads.get_or_insert(16);
    let mut trials = vec![
        Trial::test("every rule has a mutant", every_rule_has_one),
        Trial::test(
            "every field of the guarantees has a mutant",
            every_field_has_one,
        ),
    ];
    trials.extend(CLAIMS.iter().map(|&(field, rule, mutant)| {
        let name = format!("{field}: {rule} catches {mutant:?}");
        Trial::test(name, move || catches(rule, mutant))
    }));
    trials.extend(MUTANTS.iter().map(|&(rule, mutant)| {
        let name = format!("{rule} catches {mutant:?}");
        Trial::test(name, move || catches(rule, mutant))
    }));
    let conclusion = libtest_mimic::run(&arguments, trials);
    let all = !arguments.list && arguments.filter.is_none() && arguments.skip.is_empty();
    if all {
        report_checks_that_catch_none();
    }
    conclusion.exit_code()
}

fn catches(rule: &'static str, mutant: Mutant) -> Result<(), Failed> {
    let harness: Arc<dyn Harness> = match mutant {
        Mutant::Memory(flaw) => Arc::new(Flawed::new(flaw)),
        Mutant::Server(flaw) => Arc::new(Served(flaw)),
    };
    let verdicts = judge(harness, rule);
    let failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed(_));
    for verdict in &verdicts {
        eprintln!("{rule}, {}: {:?}", verdict.check, verdict.outcome);
        if failed(&verdict.outcome) {
            CAUGHT.lock().expect("sound").insert((rule, verdict.check));
        }
    }
    if verdicts.iter().any(|verdict| failed(&verdict.outcome)) {
        return Ok(());
    }
    Err(format!("{rule} holds for a backend that breaks it: {verdicts:?}").into())
}

fn every_rule_has_one() -> Result<(), Failed> {
    for rule in RULES {
        if !MUTANTS.iter().any(|(id, _)| *id == rule.id) {
            return Err(format!("{} has no mutant", rule.id).into());
        }
    }
    Ok(())
}

/// Names the checks that have failed for no mutant. Only that: a machine that is too busy can keep a
/// mutant from breaking its rule in time.
fn report_checks_that_catch_none() {
    let caught = CAUGHT.lock().expect("sound");
    for rule in RULES {
        for check in rule.checks {
            let without = WITHOUT
                .iter()
                .find(|(id, name, _)| (*id, *name) == (rule.id, check.name));
            match (caught.contains(&(rule.id, check.name)), without) {
                (false, None) => eprintln!("{}, {}: failed for no mutant", rule.id, check.name),
                (true, Some((.., reason))) => eprintln!(
                    "{}, {}: failed for a mutant, though {reason}",
                    rule.id, check.name
                ),
                _ => {}
            }
        }
    }
}

fn every_field_has_one() -> Result<(), Failed> {
    let claimed: BTreeSet<&str> = CLAIMS.iter().map(|(field, ..)| *field).collect();
    if claimed != promised_fields() {
        return Err(format!("{claimed:?} in place of {:?}", promised_fields()).into());
    }
    Ok(())
}

/// What a server with this flaw keeps its locks in.
fn store(flaw: ServerFlaw) -> Arc<dyn Backend> {
    match flaw {
        ServerFlaw::NeverExpires | ServerFlaw::KeepsOrphans => {
            Arc::new(Client::new(Flaw::NeverExpires, Memories::default()))
        }
        _ => Arc::new(Memory::new()),
    }
}
