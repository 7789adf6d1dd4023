//! Keeps `CASES.md` true: the rules and tests that it names exist.

use std::fs;
use std::path::Path;

use leasehold_conformance::RULES;

/// The cells of each case.
fn cases() -> Vec<Vec<&'static str>> {
    let page = include_str!("../CASES.md");
    page.lines()
        .filter(|line| line.starts_with("| ") && !line.starts_with("| #"))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect()
}

#[test]
fn every_case_is_held_by_rules_and_tests_that_exist() {
    for cells in cases() {
        let [number, _case, held, _source] = cells[..] else {
            panic!("not four cells: {cells:?}");
        };
        let mut holders = 0;
        for holder in held.split([',', ';']).map(str::trim) {
            let exists = match holder.strip_prefix('`') {
                Some(test) => test_exists(test.trim_end_matches('`')),
                None => RULES.iter().any(|rule| rule.id == holder),
            };
            assert!(exists, "case {number}: there is no {holder}");
            holders += 1;
        }
        assert!(holders > 0, "case {number} is held by nothing");
    }
}

#[test]
fn the_cases_are_in_order() {
    let numbers: Vec<u32> = cases()
        .iter()
        .map(|cells| cells[0].parse().expect("a number"))
        .collect();
    assert!(numbers.len() > 50, "{numbers:?}");
    assert!(
        numbers.is_sorted_by(|before, after| before < after),
        "{numbers:?}"
    );
}

/// `test` is `path/to/file.rs::function`, from the root of the repository.
fn test_exists(test: &str) -> bool {
    let Some((file, function)) = test.split_once("::") else {
        return false;
    };
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let source = fs::read_to_string(root.join(file)).unwrap_or_default();
    source.contains(&format!("fn {function}("))
}
