//! The `.info` file: who holds the lock, for everybody to read without taking it.
//!
//! Only the holder of the lock writes it, in place and in one piece; readers do not lock. So a
//! reader may meet half of a new record, and a power failure may leave one: the first line carries
//! the length and a checksum of what follows, and a record that does not fit them is no record.
//!
//! ```text
//! leasehold-file 1 144 0f3d6c1e52a4b798     format version, length and checksum of the rest
//! key order:42
//! token 17
//! reserved 100                             see `lock_file.rs`
//! grant 0b5c3f0e…                           these only while it is held
//! owner web-1:4711:6a1f…
//! pid 4711
//! since 1764432000000                       milliseconds since 1970
//! label nightly import
//! ```
//! Control characters and `%` in a value are written as `%xx`. Lines of an unknown name are skipped,
//! so that a later version may add some.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::time::{Duration, SystemTime};

use leasehold_core::{Holder, Token};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::name::{push_escaped, push_hex, unescape};

const VERSION: &str = "leasehold-file 1";

/// What is kept of a label. The rest of a record is bounded by itself.
const LONGEST_LABEL: usize = 1024;

/// A record is at most this long: a key of 1 KiB and a label of 1 KiB, each with every byte escaped.
const LONGEST: u64 = 8 * 1024;

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) key: String,
    /// The token of the last grant.
    pub(crate) token: u64,
    /// Tokens up to this one are safe on the disk.
    pub(crate) reserved: u64,
    /// `None`: nobody holds it.
    pub(crate) grant: Option<Grant>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) id: Uuid,
    pub(crate) owner: String,
    pub(crate) pid: u32,
    pub(crate) since: SystemTime,
    pub(crate) label: Option<String>,
}

impl Record {
    /// Reads the record. `None`: there is none, or none that is whole and of this version.
    pub(crate) fn read(mut file: &File) -> io::Result<Option<Self>> {
        file.seek(SeekFrom::Start(0))?;
        let mut bytes = Vec::with_capacity(512);
        file.take(LONGEST).read_to_end(&mut bytes)?;
        Ok(Self::decode(&bytes))
    }

    /// Writes the record over the one before it.
    pub(crate) fn write(&self, mut file: &File) -> io::Result<()> {
        let bytes = self.encode();
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&bytes)?;
        let length = bytes.len() as u64;
        if file.metadata()?.len() > length {
            file.set_len(length)?;
        }
        Ok(())
    }

    fn encode(&self) -> Vec<u8> {
        let mut body = String::with_capacity(512);
        push_line(&mut body, "key", &self.key);
        push_line(&mut body, "token", &self.token.to_string());
        push_line(&mut body, "reserved", &self.reserved.to_string());
        if let Some(grant) = &self.grant {
            push_line(&mut body, "grant", &grant.id.to_string());
            push_line(&mut body, "owner", &grant.owner);
            push_line(&mut body, "pid", &grant.pid.to_string());
            push_line(&mut body, "since", &to_millis(grant.since).to_string());
            if let Some(label) = &grant.label {
                push_line(&mut body, "label", shortened(label));
            }
        }
        let head = format!("{VERSION} {} {}\n", body.len(), checksum(body.as_bytes()));
        [head.into_bytes(), body.into_bytes()].concat()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (head, body) = text.split_once('\n')?;
        let (length, sum) = head
            .strip_prefix(VERSION)?
            .strip_prefix(' ')?
            .split_once(' ')?;
        let body = body.get(..length.parse().ok()?)?;
        if checksum(body.as_bytes()) != sum {
            return None;
        }

        let value = |name: &str| {
            body.lines()
                .filter_map(|line| line.split_once(' '))
                .find(|(found, _)| *found == name)
                .and_then(|(_, value)| unescape(value))
        };
        let grant = match value("grant") {
            None => None,
            Some(id) => Some(Grant {
                id: id.parse().ok()?,
                owner: value("owner")?,
                pid: value("pid")?.parse().ok()?,
                since: from_millis(value("since")?.parse().ok()?)?,
                label: value("label"),
            }),
        };
        Some(Self {
            key: value("key")?,
            token: value("token")?.parse().ok()?,
            reserved: value("reserved")?.parse().ok()?,
            grant,
        })
    }
}

impl Grant {
    pub(crate) fn to_holder(&self, token: u64) -> Holder {
        let mut holder = Holder::new(self.id.to_string());
        holder.owner = Some(self.owner.clone());
        holder.label.clone_from(&self.label);
        holder.token = Some(Token::new(token));
        holder.since = Some(self.since);
        holder
    }
}

/// 64 bits of SHA-256, in hex: against chance, not against malice.
pub(crate) fn checksum(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(16);
    for byte in &Sha256::digest(bytes)[..8] {
        push_hex(&mut text, *byte);
    }
    text
}

fn push_line(body: &mut String, name: &str, value: &str) {
    body.push_str(name);
    body.push(' ');
    for character in value.chars() {
        if character.is_control() || character == '%' {
            for byte in character.encode_utf8(&mut [0; 4]).bytes() {
                push_escaped(body, byte);
            }
        } else {
            body.push(character);
        }
    }
    body.push('\n');
}

fn shortened(label: &str) -> &str {
    let end = (0..=label.len().min(LONGEST_LABEL))
        .rev()
        .find(|end| label.is_char_boundary(*end));
    &label[..end.unwrap_or(0)]
}

fn to_millis(time: SystemTime) -> u128 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis()
}

fn from_millis(millis: u64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(key: &str, label: Option<&str>) -> Record {
        Record {
            key: key.into(),
            token: 17,
            reserved: 100,
            grant: Some(Grant {
                id: Uuid::from_u128(5),
                owner: "web-1:4711:6a1f".into(),
                pid: 4711,
                since: from_millis(1_764_432_000_123).unwrap(),
                label: label.map(Into::into),
            }),
        }
    }

    #[test]
    fn a_record_reads_as_the_format_says() {
        let text = String::from_utf8(record("order:42", Some("a\nb 50%")).encode()).unwrap();
        let (head, body) = text.split_once('\n').unwrap();
        let sum = checksum(body.as_bytes());
        assert_eq!(head, format!("leasehold-file 1 {} {sum}", body.len()));
        assert_eq!(
            body,
            "key order:42\ntoken 17\nreserved 100\ngrant 00000000-0000-0000-0000-000000000005\n\
             owner web-1:4711:6a1f\npid 4711\nsince 1764432000123\nlabel a%0ab 50%25\n"
        );
    }

    #[test]
    fn a_torn_record_is_none() {
        let old = record(&"x".repeat(90), Some("the old one")).encode();
        let new = record("y", Some("the new one, which is longer in this place")).encode();
        for cut in 0..new.len() {
            assert_eq!(Record::decode(&new[..cut]), None, "cut at {cut}");
            let mut mixed = old.clone();
            mixed.resize(old.len().max(new.len()), 0);
            mixed[..cut].copy_from_slice(&new[..cut]);
            let read = Record::decode(&mixed);
            assert!(
                read.is_none() || read == Record::decode(&old),
                "mixed at {cut}"
            );
        }
    }

    #[test]
    fn what_is_left_of_a_longer_record_is_ignored() {
        let mut bytes = record("short", None).encode();
        bytes.extend_from_slice("label left over\nöö".as_bytes());
        assert_eq!(Record::decode(&bytes), Some(record("short", None)));
    }

    #[test]
    fn later_versions_may_add_lines_and_are_else_left_alone() {
        let body = "key a\ntoken 3\nreserved 9\nmode shared\n";
        let text = |version: u32| {
            let sum = checksum(body.as_bytes());
            format!("leasehold-file {version} {} {sum}\n{body}", body.len())
        };
        assert_eq!(Record::decode(text(1).as_bytes()).unwrap().token, 3);
        assert_eq!(Record::decode(text(2).as_bytes()), None);
        assert_eq!(Record::decode(text(11).as_bytes()), None);
    }

    #[test]
    fn the_longest_record_fits() {
        let worst = record(&"\u{1}".repeat(1024), Some(&"%".repeat(5000)));
        let bytes = worst.encode();
        assert!((bytes.len() as u64) < LONGEST);
        let label = Record::decode(&bytes)
            .unwrap()
            .grant
            .unwrap()
            .label
            .unwrap();
        assert_eq!(label.len(), LONGEST_LABEL);
    }

    proptest! {
        #[test]
        fn records_come_back_as_they_were(key in "(?s:.){1,60}", label in "(?s:.){0,60}") {
            let record = record(&key, Some(&label));
            prop_assert_eq!(Record::decode(&record.encode()), Some(record));
        }
    }
}
