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
use leasehold::{Guarantees, Memory};

/// Name, page (relative to the workspace), guarantees.
fn backends() -> Vec<(&'static str, Option<&'static str>, Guarantees)> {
    vec![
        ("Memory", None, Memory::GUARANTEES),
        ("File", Some("backend-file/README.md"), Folder::GUARANTEES),
        (
            "Redis, Redis Cluster",
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
    let mut table = String::from(
        "| backend | consistency | expiry | fairness | wake-up | tokens |\n|---|---|---|---|---|---|\n",
    );
    for (name, page, guarantees) in backends() {
        let name = page.map_or(name.into(), |page| format!("[{name}]({page})"));
        let words = words(&guarantees).map(|(_, word)| word).join(" | ");
        table += &format!("| {name} | {words} |\n");
    }

    let path = workspace().join("README.md");
    let readme = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- guarantees: begin -->\n", "<!-- guarantees: end -->\n");
    let (before, rest) = readme.split_once(begin).unwrap();
    let (shown, after) = rest.split_once(end).unwrap();
    if std::env::var_os("LEASEHOLD_UPDATE").is_some() {
        fs::write(&path, [before, begin, &table, end, after].concat()).unwrap();
    } else {
        assert_eq!(shown, table);
    }
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

fn words(guarantees: &Guarantees) -> [(&'static str, String); 5] {
    [
        ("consistency", format!("{:?}", guarantees.consistency)),
        ("expiry", format!("{:?}", guarantees.expiry)),
        ("fairness", format!("{:?}", guarantees.fairness)),
        ("wake-up", format!("{:?}", guarantees.wakeup)),
        ("tokens", format!("{:?}", guarantees.tokens)),
    ]
}

fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}
