//! Holds `CONTRACT.md` and the table of rules together.

use leasehold_conformance::RULES;

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
