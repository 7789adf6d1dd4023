use std::fmt::{self, Write as _};
use std::time::{Duration, SystemTime};

use leasehold_core::{Claim, Holder, OwnerId, Token};
use uuid::Uuid;

/// What the value of a lock begins with: ours, and the version of its form. Writers of other
/// versions exclude us and we them, since a lock is taken whatever its value is.
const FORMAT: &str = "leasehold:1 ";

/// The value of a lock in front of the token.
pub(crate) fn mine(claim: Uuid) -> String {
    written(|text| write_mine(text, claim))
}

/// The value behind the token; `since` is the time of the grant in ms since 1970.
pub(crate) fn rest(claim: &Claim, since: u64, inbox: Uuid) -> String {
    written(|text| write_rest(text, claim, since, inbox))
}

/// The beginning of the value of the lock that this grant holds.
pub(crate) fn grant(claim: Uuid, token: Token) -> String {
    written(|text| write_grant(text, claim, token))
}

/// As [`mine`].
pub(crate) fn write_mine(text: &mut String, claim: Uuid) -> fmt::Result {
    text.push_str(FORMAT);
    text.push_str(claim.hyphenated().encode_lower(&mut Uuid::encode_buffer()));
    text.push(' ');
    Ok(())
}

/// As [`rest`].
pub(crate) fn write_rest(text: &mut String, claim: &Claim, since: u64, inbox: Uuid) -> fmt::Result {
    write!(text, " {} {since} ", claim.ttl.as_millis())?;
    text.push_str(inbox.hyphenated().encode_lower(&mut Uuid::encode_buffer()));
    let owner = one_word(&claim.owner);
    let label = claim.label.as_deref().unwrap_or_default();
    write!(text, " {owner} {label}")
}

/// As [`grant`].
pub(crate) fn write_grant(text: &mut String, claim: Uuid, token: Token) -> fmt::Result {
    write_mine(text, claim)?;
    write!(text, "{token} ")
}

fn written(write: impl FnOnce(&mut String) -> fmt::Result) -> String {
    let mut text = String::with_capacity(192);
    // A string takes all that is written.
    write(&mut text).ok();
    text
}

/// Reads a lock's value: ours, or whatever another program wrote, which is shown as the owner.
pub(crate) fn holder(value: &[u8], left: i64, grant: String) -> Holder {
    let mut holder = Holder::new(grant);
    holder.remaining = u64::try_from(left).ok().map(Duration::from_millis);
    let text = String::from_utf8_lossy(value);
    match text.strip_prefix(FORMAT).and_then(ours) {
        Some((token, since, owner, label)) => {
            holder.token = Some(Token::new(token));
            holder.since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(since));
            holder.owner = Some(owner.into());
            holder.label = (!label.is_empty()).then(|| label.into());
        }
        None => holder.owner = Some(text.into_owned()),
    }
    holder
}

/// What holds a lock whose key has data of another type: it is somebody else's, and no more is known.
pub(crate) fn other_data(left: i64) -> Holder {
    let mut holder = Holder::new("data of another type");
    holder.remaining = u64::try_from(left).ok().map(Duration::from_millis);
    holder
}

fn ours(fields: &str) -> Option<(u64, u64, &str, &str)> {
    let mut fields = fields.splitn(7, ' ');
    let _claim: Uuid = fields.next()?.parse().ok()?;
    let token = fields.next()?.parse().ok()?;
    let _ttl: u64 = fields.next()?.parse().ok()?;
    let since = fields.next()?.parse().ok()?;
    let _inbox = fields.next()?;
    let owner = fields.next()?;
    let label = fields.next()?;
    Some((token, since, owner, label))
}

/// A host's name should have no blanks; if it has, the fields must not shift.
fn one_word(owner: &OwnerId) -> String {
    let mut text = owner.to_string();
    if text.contains(char::is_whitespace) {
        text = text.replace(char::is_whitespace, "_");
    }
    text
}

#[cfg(test)]
mod tests {
    use leasehold_core::Key;

    use super::*;

    #[test]
    fn our_value_is_read_back() {
        let mut claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(1)).unwrap();
        claim.label = Some("nightly  run\nwith lines".into());
        let inbox = Uuid::new_v4();
        let rest = rest(&claim, 1_700_000_000_123, inbox);
        let value = format!("{}17{rest}", mine(claim.id));
        assert!(value.starts_with(&grant(claim.id, Token::new(17))));
        let holder = holder(value.as_bytes(), 900, "g".into());
        assert_eq!(holder.token, Some(Token::new(17)));
        assert_eq!(holder.owner, Some(claim.owner.to_string()));
        assert_eq!(holder.label.as_deref(), Some("nightly  run\nwith lines"));
        assert_eq!(holder.remaining, Some(Duration::from_millis(900)));
        let since = holder.since.unwrap().duration_since(SystemTime::UNIX_EPOCH);
        assert_eq!(since.unwrap(), Duration::from_millis(1_700_000_000_123));
    }

    #[test]
    fn a_foreign_value_is_shown_as_it_is() {
        for value in [
            &b"1"[..],
            b"",
            b"leasehold:1 ",
            b"leasehold:2 a b c",
            b"\xff\xfe",
        ] {
            let holder = holder(value, -1, "g".into());
            assert_eq!(
                holder.owner.as_deref(),
                Some(&*String::from_utf8_lossy(value))
            );
            assert_eq!(holder.token, None);
            assert_eq!(holder.remaining, None);
        }
    }
}
