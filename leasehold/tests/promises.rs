//! What the pages say of a backend's guarantees is what its code says.
//!
//! `LEASEHOLD_UPDATE=1 cargo test -p leasehold --all-features --test promises` writes the table anew.

#![cfg(all(
    feature = "file",
    feature = "redis",
    feature = "etcd",
    feature = "zk",
    feature = "postgres"
))]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::fs;
use std::path::Path;

use leasehold::etcd::Etcd;
use leasehold::file::Folder;
use leasehold::postgres::Postgres;
use leasehold::redis::{Redis, Redlock};
use leasehold::zk::ZooKeeper;
use leasehold::{Answer, Candidate, Guarantees, Memory, Need};

/// Name, page (relative to the workspace), guarantees.
fn backends() -> Vec<(&'static str, Option<&'static str>, Guarantees)> {
    vec![
        ("Memory", None, Memory::GUARANTEES),
        ("File", Some("backend-file/README.md"), Folder::GUARANTEES),
        ("Redis", Some("backend-redis/README.md"), Redis::GUARANTEES),
        (
            "Redis behind Sentinel",
            Some("backend-redis/README.md"),
            Redis::GUARANTEES,
        ),
        (
            "Redis Cluster",
            Some("backend-redis/README.md"),
            Redis::GUARANTEES,
        ),
        (
            "Redlock",
            Some("backend-redis/REDLOCK.md"),
            Redlock::GUARANTEES,
        ),
        ("etcd", Some("backend-etcd/README.md"), Etcd::GUARANTEES),
        (
            "ZooKeeper",
            Some("backend-zk/README.md"),
            ZooKeeper::GUARANTEES,
        ),
        (
            "PostgreSQL",
            Some("backend-postgres/README.md"),
            Postgres::GUARANTEES,
        ),
    ]
}

#[test]
fn the_table_of_the_readme_is_made_from_the_code() {
    let needs = Need::ALL.map(|need| need.to_string());
    let mut table = format!(
        "| backend | {} | shortest ttl |\n|---|{}\n",
        needs.join(" | "),
        "---|".repeat(needs.len() + 1)
    );
    for (candidate, page) in candidates() {
        let cells = Need::ALL.map(|need| match candidate.judge(need) {
            it if it.answer == Answer::Depends => candidate.at_best.as_ref().unwrap().0.to_string(),
            it => it.answer.to_string(),
        });
        table += &row(&candidate, page, "", &cells);
    }
    holds("README.md", "needs", &table);
}

#[test]
fn the_tables_of_the_page_on_choosing_are_made_from_the_code() {
    let needs = Need::ALL.map(|need| need.to_string());
    let mut table = format!(
        "| backend | {} | shortest ttl |\n|---|{}\n",
        needs.join(" | "),
        "---|".repeat(needs.len() + 1)
    );
    for (candidate, page) in candidates() {
        let cells = Need::ALL.map(|need| {
            let judgement = candidate.judge(need);
            format!("*{}*: {}", judgement.answer, judgement.reason)
        });
        table += &row(&candidate, page, "../", &cells);
    }
    holds("docs/choosing.md", "needs", &table);

    let mut table = String::from(
        "| backend | consistency | node losses | expiry | fairness | wake-up | tokens |\n|---|---|---|---|---|---|---|\n",
    );
    for (name, page, guarantees) in backends() {
        let name = page.map_or(name.into(), |page| format!("[{name}](../{page})"));
        let words = words(&guarantees).map(|(_, word)| word).join(" | ");
        table += &format!("| {name} | {words} |\n");
    }
    holds("docs/choosing.md", "guarantees", &table);
}

#[test]
fn every_kind_of_store_is_known() {
    let known: Vec<String> = candidates().into_iter().map(|(it, _)| it.name).collect();
    let expected: Vec<&str> = backends().into_iter().map(|(name, ..)| name).collect();
    assert_eq!(known, expected);
}

#[test]
fn each_backends_page_says_what_its_code_says() {
    for (name, page, guarantees) in backends() {
        let Some(page) = page else { continue };
        let readme = fs::read_to_string(workspace().join(page)).unwrap();
        for (field, word) in words(&guarantees) {
            let row = format!("| {field} | `{word}`");
            assert!(readme.contains(&row), "{name}: its page has no row {row}");
        }
    }
}

/// What `leasehold choose` shows, with the page of each.
fn candidates() -> Vec<(Candidate, Option<&'static str>)> {
    let known = Candidate::known().into_iter();
    known
        .map(|candidate| {
            let mut pages = backends().into_iter();
            let page = pages.find(|(name, ..)| *name == candidate.name);
            (candidate, page.and_then(|(_, page, _)| page))
        })
        .collect()
}

fn row(candidate: &Candidate, page: Option<&str>, up: &str, cells: &[String]) -> String {
    let name = &candidate.name;
    let name = page.map_or(name.clone(), |page| format!("[{name}]({up}{page})"));
    let shortest = candidate.guarantees.shortest_ttl;
    format!("| {name} | {} | {shortest:?} |\n", cells.join(" | "))
}

/// Checks what stands between the marks of `name` in the page at `path`, or writes it.
fn holds(path: &str, name: &str, table: &str) {
    let path = workspace().join(path);
    let page = fs::read_to_string(&path).unwrap();
    let begin = format!("<!-- {name}: begin -->\n");
    let end = format!("<!-- {name}: end -->\n");
    let (before, rest) = page.split_once(&begin).unwrap();
    let (shown, after) = rest.split_once(&end).unwrap();
    if std::env::var_os("LEASEHOLD_UPDATE").is_some() {
        fs::write(&path, [before, &begin, table, &end, after].concat()).unwrap();
    } else {
        assert_eq!(shown, table, "{}", path.display());
    }
}

fn words(guarantees: &Guarantees) -> [(&'static str, String); 6] {
    [
        ("consistency", format!("{:?}", guarantees.consistency)),
        ("node losses", guarantees.node_losses.to_string()),
        ("expiry", format!("{:?}", guarantees.expiry)),
        ("fairness", format!("{:?}", guarantees.fairness)),
        ("wake-up", format!("{:?}", guarantees.wakeup)),
        ("tokens", format!("{:?}", guarantees.tokens)),
    ]
}

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
