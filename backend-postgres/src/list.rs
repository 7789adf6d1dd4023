//! Which locks are held.

use std::collections::HashSet;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Key, Listed, Moment, Page, Result};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::KeyForm;
use crate::client::Client;
use crate::holder::shown;
use crate::key_form::LockId;
use crate::peer::NONE;
use crate::session::{Job, LISTED, SeenLock};

/// 1. `pg_locks` shows which sessions have which locks, in the order of their numbers. Where names are
///    hashed, their texts are known to nobody.
/// 2. All of those sessions that listen are asked at once, as for [`holder`](crate::peer); a session
///    that does not answer is not waited for again.
///
/// How many wait is not known: of the claims of a client on one key only the first waits at the server,
/// and not between two slices.
pub(crate) async fn list(client: &Client, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
    /// An answer takes a few times as long as one of the server's.
    const TIMES: u32 = 4;
    /// Of a busy process too, which may be asked for all that it holds.
    const PATIENCE: Duration = Duration::from_secs(3);
    /// In all.
    const LONGEST: Duration = Duration::from_secs(10);
    let form = client.common.sql.key_form;
    if form == KeyForm::Name && !prefix.is_empty() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "PostgreSQL has hashes of names, and none that begin with others: list all of them, or ask \
             for one lock by its whole key",
        ));
    }
    let session = client.sessions.any_shared().await?;
    let started = Moment::now();
    let (seen, found) = oneshot::channel();
    // Not accepted: it ends just now.
    drop(session.send(Job::List {
        after: after.and_then(read),
        seen,
    }));
    let found = found
        .await
        .unwrap_or_else(|_ended| Err(client.unavailable("the session ended while it was asked")))?;
    let last = found.last().filter(|_| found.len() == LISTED);
    let next = last.map(|last| format!("{} {}", last.place.0, last.place.1).into_bytes());

    let patience = PATIENCE.max(started.elapsed() * TIMES);
    let (mut silent, mut locks) = (HashSet::new(), Vec::new());
    for SeenLock {
        place,
        seen,
        mut reply,
    } in found
    {
        let id = KeyForm::from_pg_locks(place.0, place.1);
        let text = form.text(id);
        if !text.starts_with(prefix) {
            continue;
        }
        let patience = match silent.contains(&seen.pid) || started.elapsed() > LONGEST {
            true => Duration::ZERO,
            false => patience,
        };
        let answer = match seen.listens {
            true => timeout(patience, &mut reply)
                .await
                .ok()
                .and_then(Result::ok),
            false => None,
        };
        if answer.is_none() {
            silent.insert(seen.pid);
        }
        let holder = match answer.as_deref() {
            // Freed, or in other hands by now.
            Some(NONE) => client.ask_holder(id).await?,
            answer => Some(shown(seen, answer)),
        };
        if holder.is_none() {
            continue;
        }
        let key = match form {
            KeyForm::Name => None,
            KeyForm::Bigint | KeyForm::IntPair => Key::new(&text).ok(),
        };
        let mut listed = Listed::new(key, text);
        listed.holder = holder;
        locks.push(listed);
    }
    Ok(Page::new(locks, next))
}

/// The last lock of the page before.
fn read(cursor: &[u8]) -> Option<(LockId, LockId)> {
    let (class, object) = std::str::from_utf8(cursor).ok()?.split_once(' ')?;
    Some((class.parse().ok()?, object.parse().ok()?))
}
