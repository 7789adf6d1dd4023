use std::time::{Duration, SystemTime};

use leasehold_core::{Claim, Holder, Token};

/// What the value of a place begins with: ours, and the version of its form. Other versions exclude
/// us and we them, since a place counts whatever its value is.
const FORMAT: &str = "leasehold:1 ";

/// The value of a place: whom to show, and, where the lock is granted in the same step, since when.
/// A place that was queued first says nothing of its time: it is not written again when its turn
/// comes.
pub(crate) fn of(claim: &Claim, granted: bool) -> String {
    let since = if granted { milliseconds() } else { 0 };
    // A host's name should have no blanks; if it has, the fields must not shift.
    let owner = claim.owner.to_string().replace(char::is_whitespace, "_");
    let label = claim.label.as_deref().unwrap_or_default();
    format!("{FORMAT}{since} {owner} {label}")
}

/// Reads a place's value: ours, or whatever another program wrote, which is shown as the owner.
/// `revision` is the one that created the place.
pub(crate) fn holder(value: &[u8], revision: Token, grant: String) -> Holder {
    let mut holder = Holder::new(grant);
    holder.token = Some(revision);
    let text = String::from_utf8_lossy(value);
    match text.strip_prefix(FORMAT).and_then(ours) {
        Some((since, owner, label)) => {
            let since = (since > 0).then(|| Duration::from_millis(since));
            holder.since = since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
            holder.owner = Some(owner.into());
            holder.label = (!label.is_empty()).then(|| label.into());
        }
        // `etcdctl lock` writes nothing.
        None => holder.owner = (!text.is_empty()).then(|| text.into_owned()),
    }
    holder
}

fn ours(fields: &str) -> Option<(u64, &str, &str)> {
    let mut fields = fields.splitn(3, ' ');
    let since = fields.next()?.parse().ok()?;
    Some((since, fields.next()?, fields.next()?))
}

#[expect(
    clippy::disallowed_methods,
    reason = "shown to people, decides nothing"
)]
fn milliseconds() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use leasehold_core::Key;

    use super::*;

    #[test]
    fn our_value_is_read_back() {
        let mut claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(1)).unwrap();
        claim.label = Some("nightly  run\nwith lines".into());
        for granted in [true, false] {
            let value = of(&claim, granted);
            let holder = holder(value.as_bytes(), Token::new(17), "g".into());
            assert_eq!(holder.token, Some(Token::new(17)));
            assert_eq!(holder.owner, Some(claim.owner.to_string()));
            assert_eq!(holder.label.as_deref(), Some("nightly  run\nwith lines"));
            assert_eq!(holder.since.is_some(), granted);
        }
    }

    #[test]
    fn a_foreign_value_is_shown_as_it_is() {
        for value in [
            &b"1"[..],
            b"leasehold:1 ",
            b"leasehold:2 a b c",
            b"\xff\xfe",
        ] {
            let holder = holder(value, Token::new(1), "g".into());
            assert_eq!(
                holder.owner.as_deref(),
                Some(&*String::from_utf8_lossy(value))
            );
            assert_eq!(holder.since, None);
        }
        assert_eq!(holder(b"", Token::new(1), "g".into()).owner, None);
    }
}
