use std::fmt::Write as _;

use leasehold_core::Key;
use percent_encoding::percent_decode_str;
use uuid::Uuid;

/// What the sequence number of a node of ours follows, as Curator's mutex names it.
const LOCK: &str = "-lock-";

/// The folder of the sessions' own nodes. No key is written so: a percent sign is always followed by
/// two digits.
pub(crate) const SESSIONS: &str = "%sessions";

/// The key as the name of one node: percent-encoded is what would be another level of the tree and
/// what ZooKeeper refuses (control characters, some private and special ones, everything beyond the
/// basic plane, `.` and `..`), and the percent sign itself, so that different keys never meet (C6).
pub(crate) fn node(key: &Key) -> String {
    let key = key.as_str();
    let dots = matches!(key, "." | "..");
    let mut name = String::with_capacity(key.len());
    for char in key.chars() {
        if refused(char) || dots {
            for byte in char.encode_utf8(&mut [0; 4]).bytes() {
                write!(name, "%{byte:02X}").expect("a string takes everything");
            }
        } else {
            name.push(char);
        }
    }
    name
}

/// The key that has this name; `None` if none is written so.
pub(crate) fn key(name: &str) -> Option<Key> {
    let key = percent_decode_str(name).decode_utf8().ok()?;
    let key = Key::new(&*key).ok()?;
    (node(&key) == name).then_some(key)
}

fn refused(char: char) -> bool {
    matches!(char,
        '/' | '%'
        | '\u{0}'..='\u{1f}'
        | '\u{7f}'..='\u{9f}'
        | '\u{e000}'..='\u{f8ff}'
        | '\u{fff0}'..='\u{10ffff}')
}

/// What the names of the nodes that were created with this id begin with.
pub(crate) fn own(id: Uuid) -> String {
    format!("_c_{id}{LOCK}")
}

/// The name that ZooKeeper made of it.
pub(crate) fn numbered(own: &str, sequence: i64) -> String {
    format!("{own}{sequence:010}")
}

/// The node that stands directly ahead of `own` in the queue, and whether there is no other ahead of
/// that; `None`: `own` is the first.
///
/// Every child that ends in a sequence number is a contender, whatever its prefix, so that locks of
/// Curator and kazoo count too. The numbers are compared as the server counts them: in 32 bits,
/// going on below zero after 2,147,483,647.
pub(crate) fn ahead<'a>(children: &'a [String], own: &str) -> Option<(&'a str, bool)> {
    let own = sequence(own)?;
    let ahead = || {
        children.iter().filter_map(|child| {
            let before = own.wrapping_sub(sequence(child)?);
            (before > 0).then_some((before, child.as_str()))
        })
    };
    let (_, nearest) = ahead().min()?;
    Some((nearest, ahead().count() == 1))
}

/// How many contend for the lock.
pub(crate) fn contenders(children: &[String]) -> usize {
    children.iter().filter_map(|child| sequence(child)).count()
}

/// The contender that all others stand behind.
pub(crate) fn first(children: &[String]) -> Option<&str> {
    let mut contenders = children
        .iter()
        .filter_map(|child| Some((sequence(child)?, child)));
    let mut first = contenders.next()?;
    for contender in contenders {
        if first.0.wrapping_sub(contender.0) > 0 {
            first = contender;
        }
    }
    Some(first.1)
}

/// The sequence number at the end of a name: ten characters or more, as `%010d` prints an `int`.
fn sequence(name: &str) -> Option<i32> {
    let digits = name.len()
        - name
            .trim_end_matches(|char: char| char.is_ascii_digit())
            .len();
    let before = &name.as_bytes()[..name.len() - digits];
    let negative = match digits {
        // Shorter than ten digits: the sign is the tenth.
        9 => before.last() == Some(&b'-'),
        // A hyphen may belong to the prefix, but not one that follows the prefix's own separator.
        10 => matches!(before, [.., b'-' | b'_', b'-']),
        11.. => false,
        _ => return None,
    };
    let number = &name[name.len() - digits.min(10)..];
    match negative {
        true => format!("-{number}").parse().ok(),
        false if digits >= 10 => number.parse().ok(),
        false => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn name_of(key: &str) -> String {
        node(&Key::new(key).unwrap())
    }

    #[test]
    fn names_are_such_as_zookeeper_takes_and_never_meet() {
        let keys = [
            "order:42",
            "a",
            "a/b",
            "a%2Fb",
            "a%b",
            ".",
            "..",
            "%2E",
            "...",
            "\u{85}",
            "\u{f8ff}",
            "\u{fff0}",
            "\u{1f512}",
            "\0",
            "ä",
            "a b",
            "%sessions",
            "/",
            "//",
            "\u{e000}",
            "\u{ffff}",
            "\u{ffef}",
            "\u{a0}",
        ];
        let names: HashSet<String> = keys.iter().map(|key| name_of(key)).collect();
        assert_eq!(names.len(), keys.len());
        for name in &names {
            assert!(
                !name
                    .chars()
                    .any(|char| char == '/' || refused(char) && char != '%')
            );
            assert!(!matches!(name.as_str(), "." | ".." | SESSIONS));
        }
        assert_eq!(name_of("order:42"), "order:42");
        assert_eq!(name_of("a/b"), "a%2Fb");
        assert_eq!(name_of(".."), "%2E%2E");
    }

    #[test]
    fn a_million_names_never_meet() {
        leasehold_conformance::names_never_meet(node);
    }

    proptest! {
        /// What can be read back from a node's name was not lost in it.
        #[test]
        fn a_name_can_be_read_back(
            name in "([/%.]|%2E|[\u{80}-\u{9f}\u{e000}-\u{f8ff}\u{fff0}-\u{10ffff}]|\\PC|(?s:.)){1,12}"
        ) {
            let written = name_of(&name);
            prop_assert!(!written.contains('/') && written != SESSIONS, "{written}");
            let read = key(&written).unwrap();
            prop_assert_eq!(read.as_str(), name);
        }
    }

    #[test]
    fn a_foreign_node_is_no_key() {
        for name in ["%2f", "%61", "%", "%2", "%FF", "%xy", SESSIONS, ".", "a/b"] {
            assert_eq!(key(name), None, "{name}");
        }
    }

    #[test]
    fn sequence_numbers_are_read_whatever_the_prefix() {
        let id = Uuid::nil();
        for number in [0, 42, i32::MAX, -1, -999_999_999, -1_000_000_000, i32::MIN] {
            let own = numbered(&own(id), number.into());
            assert_eq!(sequence(&own), Some(number), "{own}");
            let kazoo = format!("0123456789abcdef__lock__{number:010}");
            assert_eq!(sequence(&kazoo), Some(number), "{kazoo}");
        }
        assert_eq!(sequence("lock-0000000007"), Some(7));
        assert_eq!(sequence("n-10000000007"), Some(7));
        for other in ["", "lock", "lock-7", "0000000007x", "lock-9999999999"] {
            assert_eq!(sequence(other), None, "{other}");
        }
    }

    #[test]
    fn the_order_goes_on_where_the_numbers_wrap() {
        let children: Vec<String> = [i32::MIN + 1, i32::MAX - 1, i32::MIN, i32::MAX]
            .iter()
            .map(|number| format!("x-lock-{number:010}"))
            .collect();
        assert_eq!(first(&children), Some("x-lock-2147483646"));
        assert_eq!(ahead(&children, "x-lock-2147483646"), None);
        assert_eq!(
            ahead(&children, "x-lock-2147483647"),
            Some(("x-lock-2147483646", true))
        );
        assert_eq!(
            ahead(&children, "x-lock--2147483648"),
            Some(("x-lock-2147483647", false))
        );
        assert_eq!(
            ahead(&children, "x-lock--2147483647"),
            Some(("x-lock--2147483648", false))
        );
        assert_eq!(first(&["config".into()]), None);
        assert_eq!(contenders(&["config".into()]), 0);
        assert_eq!(contenders(&children), 4);
    }
}
