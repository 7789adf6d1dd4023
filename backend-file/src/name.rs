//! From keys to file names, so that two keys never share a file.
//!
//! 1. Kept as they are: `a` to `z`, `0` to `9`, `_`, `-` and `.`. Everything else, byte by byte of
//!    its UTF-8, becomes `%` and two lower-case hex digits. Capitals are among "everything else", and
//!    nothing outside ASCII stays: file systems that fold case or normalise Unicode cannot make two
//!    names one.
//! 2. Windows takes `con`, `nul`, `com1` and their like for devices, whatever extension follows: of
//!    those the first letter is escaped too.
//! 3. A name that has become longer than [`LONGEST`] keeps its first [`KEPT`] characters, then `~` and
//!    the SHA-256 of the whole key in hex. `~` never comes out of steps 1 and 2, so short and long
//!    names never meet; for two long ones to meet, SHA-256 would have to collide, and then the key
//!    that the file records shows it, and the second key is refused.
//!
//! Steps 1 and 2 can be undone without knowing the key (replace each `%xx` by its byte), so they are
//! injective. The longest file name that comes of it has 138 bytes (a mark, see `watch.rs`): every
//! file system in use takes that, the encrypting ones, which stop at 143, included.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use leasehold_core::Key;
use sha2::{Digest as _, Sha256};

/// Longest escaped name that is used as it is.
const LONGEST: usize = 100;

/// What is kept of a longer one, for people to recognise it by.
const KEPT: usize = 40;

/// Where the files of one key are.
#[derive(Debug)]
pub(crate) struct Names {
    /// The name of the files without their extension.
    pub(crate) stem: String,
    /// The file that is locked; it also counts the tokens.
    pub(crate) lock: PathBuf,
    /// The file that says who holds the lock. Apart from the other, because on Windows nobody but
    /// the holder can read a locked file.
    pub(crate) info: PathBuf,
}

impl Names {
    pub(crate) fn new(folder: &Path, key: &Key) -> Self {
        Self::of_stem(folder, stem(key.as_str()))
    }

    pub(crate) fn of_stem(folder: &Path, stem: String) -> Self {
        Self {
            lock: folder.join(format!("{stem}.lock")),
            info: folder.join(format!("{stem}.info")),
            stem,
        }
    }

    /// The key that has these names. `None`: only the record in the file knows, since it was cut.
    pub(crate) fn key(&self) -> Option<Key> {
        let key = Key::new(unescape(&self.stem)?).ok()?;
        self.belongs_to(&key).then_some(key)
    }

    /// Whether these are the names of `key`.
    pub(crate) fn belongs_to(&self, key: &Key) -> bool {
        stem(key.as_str()) == self.stem
    }
}

fn stem(key: &str) -> String {
    let mut stem = String::with_capacity(key.len() + 8);
    let device = is_device(key);
    for (at, byte) in key.bytes().enumerate() {
        let plain = matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.');
        if plain && !(device && at == 0) {
            stem.push(char::from(byte));
        } else {
            push_escaped(&mut stem, byte);
        }
    }
    if stem.len() > LONGEST {
        stem.truncate(KEPT);
        stem.push('~');
        for byte in Sha256::digest(key) {
            push_hex(&mut stem, byte);
        }
    }
    stem
}

/// `text` with each `%xx` as the byte that it stands for; `None` if that is no text.
pub(crate) fn unescape(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let high = char::from(rest.next()?).to_digit(16)?;
            let low = char::from(rest.next()?).to_digit(16)?;
            bytes.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// `%` and the byte in hex.
pub(crate) fn push_escaped(text: &mut String, byte: u8) {
    text.push('%');
    push_hex(text, byte);
}

/// Two lower-case hex digits.
pub(crate) fn push_hex(text: &mut String, byte: u8) {
    // Writing to a String cannot fail.
    let _ = write!(text, "{byte:02x}");
}

/// Whether Windows would take a file of this name, with any extension, for a device. Only the lower
/// case matters: capitals are escaped anyway.
fn is_device(key: &str) -> bool {
    let base = key.split('.').next().unwrap_or(key);
    match base {
        "con" | "prn" | "aux" | "nul" => true,
        _ => match base.strip_prefix("com").or(base.strip_prefix("lpt")) {
            Some(digit) => digit.len() == 1 && digit.as_bytes()[0].is_ascii_digit(),
            None => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_readable() {
        assert_eq!(stem("order:42"), "order%3a42");
        assert_eq!(stem("backup.sh"), "backup.sh");
        assert_eq!(stem("../../etc/passwd"), "..%2f..%2fetc%2fpasswd");
        assert_eq!(stem("Ä"), "%c3%84");
        assert_eq!(stem("100%"), "100%25");
    }

    #[test]
    fn names_that_a_file_system_would_fold_stay_apart() {
        let keys = [
            "a",
            "A",
            "%41",
            "a.",
            "a ",
            "a..",
            " a",
            "ä",
            "a\u{308}",
            "Ä",
            "ß",
            "ss",
            "ſ",
            "s",
            "K",
            "\u{212a}",
            "k",
            ".",
            "..",
            "...",
            "a/b",
            "a\\b",
            "a:b",
            "a\0b",
            "con",
            "Con",
            "%63on",
            "nul.lock",
            "com1",
            "com1.x",
            "\u{feff}a",
            "a\u{200d}",
        ];
        let folded: HashSet<String> = keys.iter().map(|key| stem(key).to_lowercase()).collect();
        assert_eq!(folded.len(), keys.len());
    }

    #[test]
    fn a_million_names_never_meet_also_where_case_is_folded() {
        leasehold_conformance::names_never_meet(|key| stem(key.as_str()).to_lowercase());
    }

    #[test]
    fn devices_of_windows_are_no_files() {
        for key in ["con", "nul.tar.gz", "com1", "lpt9.x", "aux", "prn"] {
            assert!(stem(key).starts_with('%'), "{key}");
        }
        for key in ["cone", "com", "com10", "lptx", "nu"] {
            assert!(!stem(key).starts_with('%'), "{key}");
        }
    }

    #[test]
    fn long_names_fit_and_stay_apart() {
        let mut stems = HashSet::new();
        for filler in ["a", "A", "ä"] {
            for length in 1..=Key::MAX_LEN / filler.len() {
                stems.insert(stem(&filler.repeat(length)));
            }
            let almost = filler.repeat(Key::MAX_LEN / filler.len() - 1);
            stems.insert(stem(&format!("{almost}b")));
        }
        assert_eq!(stems.len(), 1024 + 1024 + 512 + 3);
        assert!(stems.iter().all(|stem| stem.len() <= 105));
    }

    proptest! {
        #[test]
        fn short_names_can_be_read_back(key in "\\PC{1,30}|[a-z.%~]{1,30}|(?s:.){1,20}") {
            let key = Key::new(key).unwrap();
            let names = Names::new(Path::new(""), &key);
            let read = names.key();
            if names.stem.contains('~') {
                prop_assert_eq!(names.stem.len(), KEPT + 1 + 64);
                prop_assert_eq!(read, None);
            } else {
                prop_assert!(names.stem.len() <= LONGEST);
                prop_assert_eq!(read, Some(key));
            }
        }
    }
}
