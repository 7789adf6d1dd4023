//! Which locks are held or waited for.

use std::collections::BTreeSet;
use std::sync::Arc;

use leasehold_core::{Key, Listed, Page};
use tokio::task::JoinSet;
use zookeeper_client::Error as Client;

use crate::backend::ZooKeeper;
use crate::names::{self, SESSIONS};
use crate::place;
use crate::record;
use crate::session::{Answer, Session};

/// So many locks are looked at for a page. The names of all of them come at once each time: ZooKeeper
/// has no other way.
const PAGE: usize = 100;

/// 1. The children of the prefix are the locks, among them empty ones that are not swept yet. A page has
///    the next [`PAGE`] in the order of their names.
/// 2. The children of each that contend for it are counted; the data of the first says who holds it.
///    Where we may not look, that is all that is known.
pub(crate) async fn list(
    session: &Arc<Session>,
    prefix: &str,
    after: Option<&[u8]>,
) -> Answer<Page> {
    let root = session.options().root();
    // All that was decided before now is there.
    let children = place::list(session, &root, ZooKeeper::PATIENCE).await?;
    let mut names = BTreeSet::new();
    for name in children {
        let wanted = match names::key(&name) {
            Some(key) => key.as_str().starts_with(prefix),
            None => prefix.is_empty() && name != SESSIONS,
        };
        if wanted && after.is_none_or(|last| name.as_bytes() > last) {
            names.insert(name);
            if names.len() > PAGE {
                names.pop_last();
            }
        }
    }
    let last = names.last().filter(|_| names.len() == PAGE);
    let next = last.map(|name| name.as_bytes().to_vec());
    let mut looking = JoinSet::new();
    for name in names {
        let (session, path) = (session.clone(), format!("{root}/{name}"));
        let key = names::key(&name);
        let _task = looking.spawn(async move { look(&session, key, &path).await });
    }
    let mut locks = Vec::new();
    while let Some(listed) = looking.join_next().await {
        // The runtime is ending, and so is the session.
        locks.extend(listed.map_err(|_| Client::ClientClosed)??);
    }
    Ok(Page::new(locks, next))
}

/// The lock whose contenders lie below `path`; `None`: there are none.
async fn look(session: &Session, key: Option<Key>, path: &str) -> Answer<Option<Listed>> {
    let mut listed = Listed::new(key, path);
    loop {
        let asked = session.ask(ZooKeeper::TTL, async |client| {
            client.list_children(path).await
        });
        let children = match asked.await {
            Ok(children) => children,
            Err(Client::NoNode) => return Ok(None),
            Err(Client::NoAuth) => return Ok(Some(listed)),
            Err(error) => return Err(error),
        };
        let Some(first) = names::first(&children) else {
            return Ok(None);
        };
        let others = names::contenders(&children).saturating_sub(1);
        listed.waiting = u64::try_from(others).ok();
        let node = format!("{path}/{first}");
        let read = session.ask(ZooKeeper::TTL, async |client| client.get_data(&node).await);
        match read.await {
            Ok((data, stat)) => {
                listed.holder = Some(record::holder(first, &data, &stat));
                return Ok(Some(listed));
            }
            // Released in between.
            Err(Client::NoNode) => {}
            Err(Client::NoAuth) => return Ok(Some(listed)),
            Err(error) => return Err(error),
        }
    }
}
