//! Which locks are held.
//!
//! A folder cannot be read in an order, and files of locks stay for ever. So a page goes through all
//! names in the folder, keeps the next ten thousand after the page before, in the order of their names,
//! and looks at these: a look that lasts, but not for ever, and memory for so many.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use leasehold_core::{Key, Listed, Page, Result};

use crate::error::io_error;
use crate::look::{Found, LOOKS, Look, look};
use crate::name::Names;

const PAGE: usize = 10_000;

/// The locks that are held and whose names in the folder follow `after`. It reads many files: not for a
/// thread that others wait for.
pub(crate) fn list(folder: &Path, prefix: &str, after: Option<&str>) -> Result<Page> {
    let stems = stems(folder, prefix, after).map_err(|error| io_error("read", folder, error))?;
    let next = (stems.len() == PAGE).then(|| stems.last().cloned());
    let names = stems.into_iter().map(|stem| Names::of_stem(folder, stem));
    let locks = names.filter_map(|names| listed(&names, prefix)).collect();
    Ok(Page::new(locks, next.flatten().map(String::into_bytes)))
}

/// The next names of locks in the folder, held or not.
fn stems(folder: &Path, prefix: &str, after: Option<&str>) -> io::Result<BTreeSet<String>> {
    let mut stems = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        // Without a record nothing is known, which is as with `holder`.
        let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(".info")) else {
            continue;
        };
        if after.is_some_and(|after| stem <= after) {
            continue;
        }
        let names = Names::of_stem(folder, stem.to_owned());
        if names
            .key()
            .is_some_and(|key| !key.as_str().starts_with(prefix))
        {
            continue;
        }
        stems.insert(names.stem);
        if stems.len() > PAGE {
            stems.pop_last();
        }
    }
    Ok(stems)
}

/// `None`: it is free, or its name begins otherwise.
fn listed(names: &Names, prefix: &str) -> Option<Listed> {
    let found = settled(names)?;
    let key = names.key().or_else(|| {
        // One that was renamed or copied is no lock of that key.
        let key = Key::new(&found.as_ref()?.key).ok()?;
        names.belongs_to(&key).then_some(key)
    });
    let begins = |key: &Key| key.as_str().starts_with(prefix);
    if !key.as_ref().map_or(prefix.is_empty(), begins) {
        return None;
    }
    let mut listed = Listed::new(key, names.lock.display().to_string());
    listed.holder = found.map(|found| found.grant.to_holder(found.token));
    Some(listed)
}

/// Who holds it, `Some(None)` if that cannot be read; `None`: nobody.
fn settled(names: &Names) -> Option<Option<Found>> {
    for _ in 0..LOOKS {
        match look(names) {
            Ok(Look::Free) => return None,
            Ok(Look::Held(found)) => return Some(Some(found)),
            Ok(Look::Unclear) => std::thread::yield_now(),
            // Somebody else's file, perhaps.
            Err(_) => return Some(None),
        }
    }
    Some(None)
}
