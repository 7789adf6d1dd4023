//! Which locks are held or waited for.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{GetOptions, GetResponse, KeyValue};
use leasehold_core::{Error, ErrorKind, Listed, Page, Result};
use tokio::task::JoinSet;

use crate::backend::{REQUEST_LIMIT, first_in, left_of, shown};
use crate::endpoints::Channel;
use crate::link::Link;
use crate::names;

/// So many places are read at a time.
const PLACES: usize = 500;

/// 1. The places of all locks lie below the prefix, those of one lock beside each other: one range has
///    the next [`PLACES`] of them. Of each lock the place that was created first holds it, the others
///    wait.
/// 2. The last lock of a range may have more places than came: the next page begins with it.
/// 3. A lock with more places than a range has is asked for its first and for their number.
/// 4. How long a holder lasts is known of its lease, which many of them share.
pub(crate) async fn list(
    link: &Arc<Link>,
    prefix: &str,
    name: &str,
    after: Option<&[u8]>,
) -> Result<Page> {
    let begin = names::begin(prefix, name).into_bytes();
    let from = after.unwrap_or(&begin).to_vec();
    let found = range(link, from, end_of(&begin)).await?;
    let mut places = found.kvs();
    let mut next = None;
    if found.more()
        && let Some(last) = places.last()
    {
        next = Some(match names::folder_of(prefix, last.key()) {
            Some(folder) => {
                let inside = |place: &KeyValue| place.key().starts_with(folder);
                let whole = places.iter().position(inside).unwrap_or(0);
                places = &places[..whole];
                folder.to_vec()
            }
            None => [last.key(), b"\0"].concat(),
        });
    }
    let mut queues: BTreeMap<&[u8], (&KeyValue, u64)> = BTreeMap::new();
    for place in places {
        if let Some(folder) = names::folder_of(prefix, place.key()) {
            let (first, count) = queues.entry(folder).or_insert((place, 0));
            *count += 1;
            if place.create_revision() < first.create_revision() {
                *first = place;
            }
        }
    }
    let mut locks = Vec::new();
    for (folder, (first, count)) in queues {
        locks.push(listed(prefix, folder, first, count));
    }
    if places.is_empty()
        && let Some(folder) = &mut next
        && names::folder_of(prefix, folder).is_some()
    {
        let places = count(link, folder).await?;
        if let Some(first) = first_in(link, folder).await? {
            locks.push(listed(prefix, folder, &first, places));
        }
        *folder = end_of(folder);
    }
    let locks = with_times(link, locks).await?;
    Ok(Page::new(locks, next))
}

/// A lock, and the lease that it ends with.
type Leased = (Listed, i64);

fn listed(prefix: &str, folder: &[u8], first: &KeyValue, places: u64) -> Leased {
    let raw = String::from_utf8_lossy(folder);
    let mut listed = Listed::new(names::key(prefix, folder), raw);
    listed.holder = Some(shown(first));
    listed.waiting = Some(places.saturating_sub(1));
    (listed, first.lease())
}

async fn range(link: &Link, from: Vec<u8>, end: Vec<u8>) -> Result<GetResponse> {
    let request = |channel: Arc<Channel>, _| {
        let limit = i64::try_from(PLACES).unwrap_or(i64::MAX);
        let options = GetOptions::new().with_range(end.clone()).with_limit(limit);
        // No key is empty.
        let from = if from.is_empty() {
            vec![0]
        } else {
            from.clone()
        };
        async move { channel.kv.clone().get(from, Some(options)).await }
    };
    Ok(link.endpoints.request(REQUEST_LIMIT, request).await?)
}

/// How many places lie in a folder.
async fn count(link: &Link, folder: &[u8]) -> Result<u64> {
    let request = |channel: Arc<Channel>, _| {
        let options = GetOptions::new().with_prefix().with_count_only();
        let folder = folder.to_vec();
        async move { channel.kv.clone().get(folder, Some(options)).await }
    };
    let found = link.endpoints.request(REQUEST_LIMIT, request).await?;
    Ok(found.count().unsigned_abs())
}

/// Each lease is asked for once.
async fn with_times(link: &Arc<Link>, locks: Vec<Leased>) -> Result<Vec<Listed>> {
    let mut left: HashMap<i64, Option<Duration>> = HashMap::new();
    let mut asking = JoinSet::new();
    for (_, lease) in &locks {
        if *lease != 0 && left.insert(*lease, None).is_none() {
            let (link, lease) = (link.clone(), *lease);
            let _task = asking.spawn(async move { (lease, left_of(&link, lease).await) });
        }
    }
    while let Some(answer) = asking.join_next().await {
        let (lease, answer) = answer.map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "the runtime is ending", error)
        })?;
        left.insert(lease, answer?);
    }
    let complete = |(mut listed, lease): Leased| {
        if let Some(holder) = &mut listed.holder {
            holder.remaining = left.get(&lease).copied().flatten();
        }
        listed
    };
    Ok(locks.into_iter().map(complete).collect())
}

/// The first key behind all that begin with `prefix`, as the end of a range; for none, of all keys.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_ends_behind_its_prefix() {
        assert_eq!(end_of(b"locks/"), b"locks0");
        assert_eq!(end_of(b"a\xff\xff"), b"b");
        for all in [&b""[..], b"\xff"] {
            assert_eq!(end_of(all), [0], "{all:?}");
        }
    }
}
