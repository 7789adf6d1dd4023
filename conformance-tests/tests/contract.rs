//! Holds `CONTRACT.md` and the table of rules together.

use std::collections::BTreeSet;
use std::time::Duration;

use leasehold_conformance::{RULES, promised_fields, promises};
use leasehold_core::{Expiry, Guarantees};

/// The ids and titles in the headings of the contract.
fn headings() -> Vec<(String, String)> {
    let contract = include_str!("../../CONTRACT.md");
    let headings = contract
        .lines()
        .filter_map(|line| line.strip_prefix("### "));
    headings
        .map(|heading| heading.split_once(" · ").expect("an id and a title"))
        .map(|(id, title)| (id.to_owned(), title.to_owned()))
        .collect()
}

#[test]
fn every_rule_is_in_the_contract_and_in_the_table_with_one_title() {
    let mut written = headings();
    let mut checked: Vec<_> = RULES
        .iter()
        .map(|rule| (rule.id.to_owned(), rule.title.to_owned()))
        .collect();
    written.sort();
    checked.sort();
    assert_eq!(written, checked);
}

#[test]
fn the_table_has_all_rules_in_order() {
    let expected = (1..=22)
        .map(|number| format!("C{number}"))
        .chain((1..=9).map(|number| format!("F{number}")));
    let ids: Vec<_> = RULES.iter().map(|rule| rule.id.to_owned()).collect();
    assert_eq!(ids, expected.collect::<Vec<_>>());
}

#[test]
fn every_rule_has_checks_of_different_names() {
    for rule in RULES {
        let mut names: Vec<_> = rule.checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert!(!names.is_empty(), "{} checks nothing", rule.id);
        assert_eq!(names.len(), rule.checks.len(), "{}", rule.id);
    }
}

#[test]
fn the_page_shows_the_example_that_is_run() {
    let example = include_str!("../../examples/sqlite/tests/conformance.rs");
    let (_title, example) = example.split_once("\n\n").expect("a title");
    let page = include_str!("../README.md");
    assert!(
        page.contains(example),
        "examples/sqlite/tests/conformance.rs is not on the page"
    );
}

/// What a rule says and whom it binds.
#[test]
fn every_rule_says_who_owes_it_and_why() {
    let contract = include_str!("../../CONTRACT.md");
    for section in contract.split("### ").skip(1) {
        let id = section.split_whitespace().next().unwrap_or_default();
        assert!(section.contains("*Owed by*"), "{id}");
        assert!(section.contains("*Why*"), "{id}");
    }
}

/// `LEASEHOLD_UPDATE=1` writes it anew.
#[test]
fn the_contract_has_the_table_of_what_each_guarantee_switches_on() {
    let mut table = String::from("| field | claim | rules it switches on |\n|---|---|---|\n");
    for promise in promises() {
        assert!(
            !promise.rules.is_empty(),
            "{promise:?} is tested by nothing"
        );
        let rules = promise.rules.join(", ");
        table += &format!("| `{}` | {} | {rules} |\n", promise.field, promise.claim);
    }
    let contract = include_str!("../../CONTRACT.md");
    let (begin, end) = ("<!-- promises: begin -->\n", "<!-- promises: end -->\n");
    let (before, rest) = contract.split_once(begin).expect("a place for it");
    let (shown, after) = rest.split_once(end).expect("its end");
    if std::env::var_os("LEASEHOLD_UPDATE").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../CONTRACT.md");
        let text = [before, begin, &table, end, after].concat();
        std::fs::write(path, text).expect("written");
    } else {
        assert_eq!(shown, table);
    }
}

#[test]
fn every_field_of_the_guarantees_is_in_that_table() {
    // Printed over several lines, each field begins one.
    let printed = format!("{:#?}", Guarantees::new(Expiry::Lease, Duration::ZERO));
    let fields: BTreeSet<&str> = printed
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter_map(|line| line.split_once(':'))
        .map(|(field, _)| field)
        .collect();
    assert_eq!(fields, promised_fields());
}
