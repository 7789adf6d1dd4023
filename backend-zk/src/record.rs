use std::time::{Duration, SystemTime};

use leasehold_core::{Claim, Holder, Token};
use zookeeper_client::Stat;

/// What the data of our nodes begins with: ours, and the version of its form. Nodes of other
/// versions exclude us and we them, since a node counts whatever its data is.
const FORMAT: &str = "leasehold:1 ";

/// The data of the node of a claim.
pub(crate) fn write(claim: &Claim) -> String {
    // A host's name should have no blanks; if it has, the fields must not shift.
    let owner = claim.owner.to_string().replace(char::is_whitespace, "_");
    let ttl = claim.ttl.as_millis();
    let label = claim.label.as_deref().unwrap_or_default();
    format!("{FORMAT}{} {ttl} {owner} {label}", claim.id)
}

/// What the holder of the lock by the node `name` writes to the key's own node when it releases.
pub(crate) fn released(name: &str) -> String {
    format!("{FORMAT}released {name}")
}

/// Reads the data of a node: ours, or whatever another program wrote, which is shown as the owner.
pub(crate) fn holder(node: &str, data: &[u8], stat: &Stat) -> Holder {
    let mut holder = Holder::new(node);
    holder.token = u64::try_from(stat.czxid).ok().map(Token::new);
    // The server's clock at the creation: for a lock that was waited for, since when it waited.
    holder.since = u64::try_from(stat.ctime)
        .ok()
        .and_then(|since| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(since)));
    let text = String::from_utf8_lossy(data);
    match text.strip_prefix(FORMAT).and_then(ours) {
        Some((owner, label)) => {
            holder.owner = Some(owner.into());
            holder.label = (!label.is_empty()).then(|| label.into());
        }
        None => holder.owner = (!text.is_empty()).then(|| text.into_owned()),
    }
    holder
}

fn ours(fields: &str) -> Option<(&str, &str)> {
    let mut fields = fields.splitn(4, ' ');
    let _claim: uuid::Uuid = fields.next()?.parse().ok()?;
    let _ttl: u64 = fields.next()?.parse().ok()?;
    Some((fields.next()?, fields.next()?))
}

#[cfg(test)]
mod tests {
    use leasehold_core::Key;

    use super::*;

    #[test]
    fn our_data_is_read_back_and_foreign_data_is_shown() {
        let mut claim = Claim::new(Key::new("k").unwrap(), Duration::from_secs(1)).unwrap();
        claim.label = Some("nightly  run\nwith lines".into());
        assert_eq!(
            ours(write(&claim).strip_prefix(FORMAT).unwrap()),
            Some((claim.owner.to_string().as_str(), "nightly  run\nwith lines"))
        );
        for foreign in ["", "127.0.0.1", "x 1 y z"] {
            assert_eq!(ours(foreign), None, "{foreign}");
        }
    }
}
