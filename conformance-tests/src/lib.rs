#![doc = include_str!("../README.md")]

mod child;
mod cx;
mod faulty;
pub mod fixtures;
mod harness;
mod history;
mod names;
mod promise;
mod proxy;
mod rule;
mod rules;
mod runner;
mod steps;

pub use harness::{Control, Harness, Store};
pub use names::names_never_meet;
pub use promise::{Promise, promised_fields, promises};
pub use proxy::{Flow, Proxy};
pub use rule::{Check, Need, Rule};
pub use rules::RULES;
pub use runner::{Outcome, SEED, Tally, Verdict, be_child, judge, main, run};
