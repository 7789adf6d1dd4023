use std::fmt::{self, Write as _};
use std::time::{Duration, SystemTime};

use leasehold_core::{Claim, Holder, OwnerId, Token};
use redis::Value;
use uuid::Uuid;

/// What the value of a lock begins with: ours, and the version of its form. Writers of other
/// versions exclude us and we them, since a lock is taken whatever its value is.
const FORMAT: &str = "leasehold:1 ";

/// The value of a lock in front of the token.
pub(crate) fn mine(claim: Uuid) -> String {
    written(|text| write_mine(text, claim))
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

/// The value behind the token; `since` is the time of the grant in ms since 1970.
pub(crate) fn write_rest(text: &mut String, claim: &Claim, since: u64, inbox: Uuid) -> fmt::Result {
    write!(text, " {} {since} ", claim.ttl.as_millis())?;
    text.push_str(inbox.hyphenated().encode_lower(&mut Uuid::encode_buffer()));
    text.push(' ');
    write_owner(text, &claim.owner)?;
    text.push(' ');
    text.push_str(claim.label.as_deref().unwrap_or_default());
    Ok(())
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

/// What a lock's value says of its holder: token, since when in ms since 1970, owner, label.
pub(crate) type Said<'a> = (u64, u64, &'a str, &'a str);

/// Reads what `holder.lua` answers: nobody, or the lock's value, how many ms are left, and what names the
/// grant. `ours` reads values of our own; what another program wrote is shown as the owner. `None` if it
/// is no such answer.
pub(crate) fn holder(
    answer: &Value,
    ours: impl Fn(&str) -> Option<Said<'_>>,
) -> Option<Option<Holder>> {
    let fields = match answer {
        Value::Nil => return Some(None),
        Value::Array(fields) => fields,
        _ => return None,
    };
    let [
        Value::BulkString(value),
        Value::Int(left),
        Value::BulkString(grant),
    ] = &fields[..]
    else {
        return None;
    };
    Some(Some(held(value, *left, grant, ours)))
}

/// Reads a lock's value in the same way.
pub(crate) fn held(
    value: &[u8],
    left: i64,
    grant: &[u8],
    ours: impl Fn(&str) -> Option<Said<'_>>,
) -> Holder {
    let mut holder = Holder::new(String::from_utf8_lossy(grant));
    holder.remaining = u64::try_from(left).ok().map(Duration::from_millis);
    let text = String::from_utf8_lossy(value);
    match ours(&text) {
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

/// Reads a value of the form that is described in `hand_over.lua`.
pub(crate) fn ours(value: &str) -> Option<Said<'_>> {
    let mut fields = value.strip_prefix(FORMAT)?.splitn(7, ' ');
    let _claim: Uuid = fields.next()?.parse().ok()?;
    let token = fields.next()?.parse().ok()?;
    let _ttl: u64 = fields.next()?.parse().ok()?;
    let since = fields.next()?.parse().ok()?;
    let _inbox = fields.next()?;
    let owner = fields.next()?;
    let label = fields.next()?;
    Some((token, since, owner, label))
}

/// The owner as one word: a host's name should have no blanks; if it has, the fields must not shift.
pub(crate) fn one_word(owner: &OwnerId) -> String {
    written(|text| write_owner(text, owner))
}

fn write_owner(text: &mut String, owner: &OwnerId) -> fmt::Result {
    let from = text.len();
    write!(text, "{owner}")?;
    if !text.as_bytes()[from..].iter().all(u8::is_ascii_graphic) {
        let word = text[from..].replace(char::is_whitespace, "_");
        text.replace_range(from.., &word);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use leasehold_core::Key;

    use super::*;

    fn read(value: &[u8], left: i64) -> Holder {
        let bulk = |text: &[u8]| Value::BulkString(text.to_vec());
        let answer = Value::Array(vec![bulk(value), Value::Int(left), bulk(b"g")]);
        holder(&answer, ours).unwrap().unwrap()
    }

    #[test]
    fn our_value_is_read_back() {
        let mut claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(1)).unwrap();
        claim.label = Some("nightly  run\nwith lines".into());
        let inbox = Uuid::new_v4();
        let rest = written(|text| write_rest(text, &claim, 1_700_000_000_123, inbox));
        let value = format!("{}17{rest}", mine(claim.id));
        assert!(value.starts_with(&grant(claim.id, Token::new(17))));
        let holder = read(value.as_bytes(), 900);
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
            let holder = read(value, -1);
            assert_eq!(
                holder.owner.as_deref(),
                Some(&*String::from_utf8_lossy(value))
            );
            assert_eq!(holder.token, None);
            assert_eq!(holder.remaining, None);
        }
    }
}
