use std::str::FromStr;

use leasehold_core::{Error, ErrorKind, Key, Result};
use sha2::{Digest, Sha256};

/// How the text of a key becomes the number that PostgreSQL locks.
///
/// The three forms are different locks, except that [`Name`](Self::Name) and [`Bigint`](Self::Bigint)
/// share the space of bigints. Everybody who is to exclude each other must use the same form.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyForm {
    /// Any text. It is hashed: the lock is the bigint made of the first 64 bits of its SHA-256, so
    /// that other programs can take the same one. In SQL, for the key in `name`:
    ///
    /// ```sql
    /// SELECT pg_advisory_lock(
    ///     ('x' || left(encode(sha256(convert_to(name, 'UTF8')), 'hex'), 16))::bit(64)::bigint);
    /// ```
    #[default]
    Name,
    /// A bigint in decimal, as in `42` or `-7`: the lock that `pg_advisory_lock(42)` takes.
    Bigint,
    /// Two integers of 32 bits with a comma between them, as in `7,42`: the lock that
    /// `pg_advisory_lock(7, 42)` takes.
    IntPair,
}

/// What is locked: a bigint, or a pair of integers in its upper and lower half.
pub(crate) type LockId = i64;

impl KeyForm {
    /// The number of `key`.
    ///
    /// A number is accepted in one spelling only: `7` and `07` would be two keys and one lock (C6).
    pub(crate) fn id(self, key: &Key) -> Result<LockId> {
        let text = key.as_str();
        match self {
            Self::Name => Ok(hashed(text)),
            Self::Bigint => plain(text).ok_or_else(|| {
                invalid(
                    key,
                    "give a bigint in plain decimal, as in 42 or -7, or use KeyForm::Name",
                )
            }),
            Self::IntPair => text
                .split_once(',')
                .and_then(|(upper, lower)| Some(pair(plain(upper)?, plain(lower)?)))
                .ok_or_else(|| {
                    invalid(
                        key,
                        "give two integers of 32 bits, as in 7,42, or use KeyForm::Name",
                    )
                }),
        }
    }

    /// How it writes `id`: for [`Name`](Self::Name), whose text is lost, as a bigint.
    pub(crate) fn text(self, id: LockId) -> String {
        match self {
            Self::Name | Self::Bigint => id.to_string(),
            Self::IntPair => {
                let halves = id.cast_unsigned();
                let upper = i32::try_from(id >> 32).unwrap_or_default();
                // The lower half, with its sign.
                let lower = ((halves << 32).cast_signed()) >> 32;
                format!("{upper},{lower}")
            }
        }
    }

    /// The arguments of a lock function, for the SQL expression `id` of type bigint.
    pub(crate) fn arguments(self, id: &str) -> String {
        match self {
            Self::Name | Self::Bigint => id.to_owned(),
            // Shifting right keeps the sign.
            Self::IntPair => format!("(({id}) >> 32)::int, ((({id}) << 32) >> 32)::int"),
        }
    }

    /// What `pg_locks` shows so.
    pub(crate) fn from_pg_locks(class: i64, object: i64) -> LockId {
        (class << 32) | (object & LockId::from(u32::MAX))
    }

    /// How `pg_locks` shows it: `classid`, `objid`, `objsubid`.
    pub(crate) fn in_pg_locks(self, id: LockId) -> (i64, i64, i16) {
        let halves = id.cast_unsigned();
        let (upper, lower) = (halves >> 32, halves & u64::from(u32::MAX));
        let kind = match self {
            Self::Name | Self::Bigint => 1,
            Self::IntPair => 2,
        };
        (upper.cast_signed(), lower.cast_signed(), kind)
    }
}

/// The first 64 bits of the SHA-256 of `text`.
pub(crate) fn hashed(text: &str) -> LockId {
    let digest = Sha256::digest(text.as_bytes());
    digest
        .iter()
        .take(8)
        .fold(0, |id, &byte| (id << 8) | LockId::from(byte))
}

fn pair(upper: i32, lower: i32) -> LockId {
    (LockId::from(upper) << 32) | LockId::from(lower.cast_unsigned())
}

fn plain<N: FromStr + ToString>(text: &str) -> Option<N> {
    let number = text.parse::<N>().ok()?;
    (number.to_string() == text).then_some(number)
}

fn invalid(key: &Key, advice: &str) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("the key {key:?} is not of the form that this backend was set to: {advice}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(form: KeyForm, text: &str) -> Option<LockId> {
        form.id(&Key::new(text).expect("a key")).ok()
    }

    #[test]
    fn a_name_is_the_start_of_its_sha256() {
        // printf order:42 | sha256sum
        assert_eq!(
            id(KeyForm::Name, "abc"),
            Some(0xba78_16bf_8f01_cfea_u64.cast_signed())
        );
    }

    /// Nothing can be read back from a hash, and two of them may meet; that it takes more than some
    /// names that look alike can be shown.
    #[test]
    fn a_million_names_never_meet() {
        leasehold_conformance::names_never_meet(|key| hashed(key.as_str()));
    }

    #[test]
    fn numbers_have_one_spelling() {
        assert_eq!(id(KeyForm::Bigint, "42"), Some(42));
        assert_eq!(id(KeyForm::Bigint, "-9223372036854775808"), Some(i64::MIN));
        for text in ["042", "+42", " 42", "4 2", "-0", "9223372036854775808", "x"] {
            assert_eq!(id(KeyForm::Bigint, text), None, "{text:?}");
        }
        for text in ["1", "1,", "1,02", "1, 2", "2147483648,1", "1,2,3"] {
            assert_eq!(id(KeyForm::IntPair, text), None, "{text:?}");
        }
    }

    #[test]
    fn pairs_keep_both_halves() {
        assert_eq!(id(KeyForm::IntPair, "0,-1"), Some(0xffff_ffff));
        assert_eq!(id(KeyForm::IntPair, "-1,0"), Some(-1 << 32));
        assert_eq!(
            KeyForm::IntPair.in_pg_locks(pair(-1, 7)),
            (0xffff_ffff, 7, 2)
        );
    }

    #[test]
    fn numbers_are_read_back() {
        for (form, texts) in [
            (KeyForm::Bigint, ["0", "-1", "-9223372036854775808"]),
            (KeyForm::IntPair, ["0,-1", "-1,7", "-2147483648,2147483647"]),
        ] {
            for text in texts {
                let id = id(form, text).expect("a number");
                let (class, object, _) = form.in_pg_locks(id);
                assert_eq!(KeyForm::from_pg_locks(class, object), id, "{text}");
                assert_eq!(form.text(id), text);
            }
        }
    }
}
