use std::hash::{DefaultHasher, Hash, Hasher};

use leasehold_core::Key;

/// What stores, escapes and file systems have a meaning for, fold, or refuse. No name can be put
/// together from them in two ways.
const SYMBOLS: [&str; 16] = [
    "a",
    "A",
    "%",
    "2",
    "F",
    "/",
    ".",
    ":",
    " ",
    "\0",
    "\u{85}",
    "\u{e9}",
    "e\u{301}",
    "\u{1f512}",
    "leasehold:",
    "key:",
];
const LONGEST: u32 = 5;

/// Writes more than a million names as a store would see them, and makes sure that no two meet (C6):
/// the suite itself locks only a thousand on the store. For the unit tests of a backend.
///
/// They are all names of one to five symbols out of sixteen. What becomes of them is compared by 64
/// bits of a hash, which are different for all of them.
///
/// ```
/// leasehold_conformance::names_never_meet(|key| format!("locks/{}", key.as_str()));
/// ```
///
/// # Panics
/// If two of them meet.
pub fn names_never_meet<T: Hash>(form: impl Fn(&Key) -> T) {
    let mut written = Vec::new();
    for length in 1..=LONGEST {
        for number in 0..SYMBOLS.len().pow(length) {
            let symbols = (0..length).map(|place| {
                let shifted = number / SYMBOLS.len().pow(place);
                SYMBOLS[shifted % SYMBOLS.len()]
            });
            let key = Key::new(symbols.collect::<String>()).expect("a key");
            let mut hasher = DefaultHasher::new();
            form(&key).hash(&mut hasher);
            written.push(hasher.finish());
        }
    }
    let names = written.len();
    written.sort_unstable();
    written.dedup();
    let met = names - written.len();
    assert!(met == 0, "{met} of {names} names meet another");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "meet another")]
    fn names_that_meet_are_found() {
        names_never_meet(|key| key.as_str().to_lowercase());
    }
}
