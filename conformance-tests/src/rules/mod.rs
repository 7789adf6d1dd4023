//! The table of rules. The text of each is in `CONTRACT.md`.

mod holding;

use crate::rule::Rule;

/// The rules, in the order of the contract.
pub const RULES: &[Rule] = &[
    holding::C1,
    holding::C2,
    holding::C3,
    holding::C15,
    holding::C18,
];
