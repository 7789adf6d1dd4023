use std::collections::BTreeSet;

use crate::rule::Need;
use crate::rules::RULES;

/// What a field of `Guarantees` claims, and the rules that the claim switches on, as a whole or some of
/// their checks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Promise {
    /// The field of `Guarantees`.
    pub field: &'static str,
    /// The values that claim it.
    pub claim: &'static str,
    /// The ids of the rules, in the order of the contract.
    pub rules: Vec<&'static str>,
}

/// Every claim that switches rules on, read off the checks themselves. `CONTRACT.md` has the table.
#[must_use]
pub fn promises() -> Vec<Promise> {
    const NEEDS: [Need; 7] = [
        Need::Majority,
        Need::NodeLoss,
        Need::Expiry,
        Need::Lease,
        Need::Fifo,
        Need::Push,
        Need::LastingTokens,
    ];
    let mut promises: Vec<Promise> = NEEDS
        .iter()
        .filter_map(|need| {
            let (field, claim) = need.promise()?;
            let rules = RULES
                .iter()
                .filter(|rule| rule.checks.iter().any(|it| it.needs.contains(need)))
                .map(|rule| rule.id)
                .collect();
            Some(Promise {
                field,
                claim,
                rules,
            })
        })
        .collect();
    // No check asks for it: those that let a lock run out are run with this ttl.
    promises.push(Promise {
        field: "shortest_ttl",
        claim: "the shorter, the more",
        rules: vec!["C4", "C9"],
    });
    promises
}

/// The fields of `Guarantees` that [`promises`] covers.
#[must_use]
pub fn promised_fields() -> BTreeSet<&'static str> {
    promises().iter().map(|it| it.field).collect()
}
