//! The table of rules. The text of each is in `CONTRACT.md`.

mod ending;
mod faults;
mod holding;
mod naming;
mod owning;
mod waiting;

use crate::rule::Rule;

/// The rules, in the order of the contract.
pub const RULES: &[Rule] = &[
    holding::C1,
    holding::C2,
    holding::C3,
    ending::C4,
    waiting::C5,
    naming::C6,
    naming::C7,
    waiting::C8,
    ending::C9,
    ending::C10,
    ending::C11,
    waiting::C12,
    owning::C13,
    naming::C14,
    holding::C15,
    owning::C16,
    ending::C17,
    holding::C18,
    waiting::C19,
    waiting::C20,
    owning::C21,
    ending::C22,
    faults::F1,
    faults::F2,
    faults::F3,
    faults::F4,
    faults::F5,
    faults::F6,
    faults::F7,
    faults::F8,
    faults::F9,
];
