//! Which locks are held or waited for.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasehold_core::{Holder, Key, Listed, Page, Result};
use redis::Value;
use tokio::task::JoinSet;

use crate::client::Client;
use crate::connection::no_runtime;
use crate::error;
use crate::names::{LockKeys, Names};
use crate::script::{self, LISTED};
use crate::servers::Servers;
use crate::value;

/// 1. `SCAN` goes through all keys of a server and gives back some of them at a time, of a cluster
///    through those of one node after the other. What is there all the time comes at least once.
/// 2. Each key that begins with our prefix is a lock, or a queue, or none of these. A queue is looked at
///    because its lock may be free: that of a holder who died, until the next one asks for it. If it is
///    held, it comes by its own key.
/// 3. One script says what there is of all locks of a page, in a cluster one for each slot. While a slot
///    moves, who holds them is asked of each alone.
pub(crate) async fn list(servers: &Servers, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
    let (client, from) = match Cursor::read(after) {
        None => (first(servers).await?, 0),
        Some(Cursor { node, scan: 0 }) => (next(servers, &node)?, 0),
        Some(Cursor { node, scan }) => {
            let here = servers.clients()?.into_iter();
            let same = here.into_iter().find(|client| *client.address == *node);
            match same {
                Some(client) => (Some(client), scan),
                // It has no slots any more.
                None => (next(servers, &node)?, 0),
            }
        }
    };
    let Some(client) = client else {
        return Ok(Page::default());
    };
    let (scan, keys) = scan(&client, from).await?;
    let places = places(servers.names(), &keys, prefix);
    let mut locks = look(servers, places.known).await?;
    locks.extend(places.strange);
    let last = scan == 0 && next(servers, &client.address)?.is_none();
    let node = &client.address;
    Ok(Page::new(
        locks,
        (!last).then(|| format!("{scan} {node}").into_bytes()),
    ))
}

/// Some of the keys that begin with our prefix, and where to go on: 0 is both the begin and the end.
pub(crate) async fn scan(client: &Arc<Client>, from: u64) -> Result<(u64, Vec<Vec<u8>>)> {
    /// How many keys the server goes through at a time, be they ours or not.
    const COUNT: usize = 1000;
    let connection = client.connection().await?;
    let mut scan = redis::cmd("SCAN");
    scan.arg(from)
        .arg("MATCH")
        .arg(pattern(client.names.prefix()));
    scan.arg("COUNT").arg(COUNT);
    let answer = connection.command(&scan).await;
    let answer = answer.map_err(|e| client.refused(&e, "+scan"))?;
    redis::from_redis_value(answer).map_err(|_| error::unexpected(&client.address))
}

/// What a part of a server's keys are.
pub(crate) struct Places {
    /// Of locks and queues, by the key of the lock.
    pub(crate) known: BTreeMap<Arc<str>, Place>,
    /// Those that are no text.
    pub(crate) strange: Vec<Listed>,
}

/// A lock that is held or waited for.
pub(crate) struct Place {
    pub(crate) keys: LockKeys,
    /// Its own key was there, not its queue alone.
    by_lock: bool,
    name: String,
}

impl Place {
    pub(crate) fn listed(&self) -> Listed {
        Listed::new(Key::new(&self.name).ok(), &*self.keys.lock)
    }
}

/// The locks among `keys` whose names begin with `prefix`.
pub(crate) fn places(names: &Names, keys: &[Vec<u8>], prefix: &str) -> Places {
    let mut places = Places {
        known: BTreeMap::new(),
        strange: Vec::new(),
    };
    for key in keys {
        let Ok(text) = std::str::from_utf8(key) else {
            if prefix.is_empty() {
                let raw = String::from_utf8_lossy(key);
                places.strange.push(Listed::new(None, raw));
            }
            continue;
        };
        let (name, by_lock) = match (names.locked(text), names.queued(text)) {
            (Some(name), _) => (name, true),
            (None, Some(name)) => (name, false),
            (None, None) => continue,
        };
        if name.starts_with(prefix) {
            let keys = names.of_name(name);
            let place = places.known.entry(keys.lock.clone());
            let place = place.or_insert_with(|| Place {
                keys,
                by_lock,
                name: name.to_owned(),
            });
            place.by_lock |= by_lock;
        }
    }
    places
}

/// A place to go on from.
struct Cursor {
    node: String,
    /// 0: it is done.
    scan: u64,
}

impl Cursor {
    fn read(bytes: Option<&[u8]>) -> Option<Self> {
        let (scan, node) = std::str::from_utf8(bytes?).ok()?.split_once(' ')?;
        Some(Self {
            node: node.to_owned(),
            scan: scan.parse().ok()?,
        })
    }
}

/// The server to begin with.
async fn first(servers: &Servers) -> Result<Option<Arc<Client>>> {
    if let Servers::Cluster(cluster) = servers {
        // It may have changed since it was last asked for anything.
        cluster.look().await?;
    }
    next(servers, "")
}

/// The server that comes after the one at `address`, in the order of their addresses.
fn next(servers: &Servers, address: &str) -> Result<Option<Arc<Client>>> {
    let clients = servers.clients()?.into_iter();
    let later = clients.filter(|client| *client.address > *address);
    Ok(later.min_by(|one, other| one.address.cmp(&other.address)))
}

/// What there is of each of these locks; what is neither held nor waited for any more is left out.
async fn look(servers: &Servers, places: BTreeMap<Arc<str>, Place>) -> Result<Vec<Listed>> {
    let mut slots: BTreeMap<u16, Vec<Place>> = BTreeMap::new();
    for place in places.into_values() {
        slots.entry(place.keys.slot).or_default().push(place);
    }
    let mut asking = JoinSet::new();
    for places in slots.into_values() {
        let servers = servers.clone();
        let _task = asking.spawn(async move {
            match look_at(&servers, &places).await {
                Err(e) if e.is_transient() && matches!(servers, Servers::Cluster(_)) => {
                    look_at_each(&servers, &places).await
                }
                listed => listed,
            }
        });
    }
    let mut locks = Vec::new();
    while let Some(listed) = asking.join_next().await {
        // The runtime is ending.
        locks.extend(listed.map_err(|_| no_runtime())??);
    }
    Ok(locks)
}

/// All of them are in one slot, if this is a cluster.
async fn look_at(servers: &Servers, places: &[Place]) -> Result<Vec<Listed>> {
    let Some(first) = places.first() else {
        return Ok(Vec::new());
    };
    let keys: Vec<&str> = places
        .iter()
        .flat_map(|place| [&*place.keys.lock, &*place.keys.queue])
        .collect();
    let make = |_| (&*LISTED, script::call(&LISTED, &keys));
    let looked = servers.call(&first.keys, true, make).await?;
    let unexpected = || error::unexpected(&looked.line.client.address);
    let Value::Array(found) = &looked.answer else {
        return Err(unexpected());
    };
    if found.len() != places.len() {
        return Err(unexpected());
    }
    let mut locks = Vec::new();
    for (place, found) in places.iter().zip(found) {
        let (holder, waiting) = read(found).ok_or_else(unexpected)?;
        // Held, it has a key of its own, which comes by itself.
        let is_there = match holder {
            Some(_) => place.by_lock,
            None => waiting.is_some_and(|waiting| waiting > 0),
        };
        if is_there {
            let mut listed = place.listed();
            listed.holder = holder;
            listed.waiting = waiting;
            locks.push(listed);
        }
    }
    Ok(locks)
}

async fn look_at_each(servers: &Servers, places: &[Place]) -> Result<Vec<Listed>> {
    let mut locks = Vec::new();
    for place in places.iter().filter(|place| place.by_lock) {
        if let Some(holder) = servers.holder(&place.keys).await? {
            let mut listed = place.listed();
            listed.holder = Some(holder);
            locks.push(listed);
        }
    }
    Ok(locks)
}

/// Who holds it, and how many wait.
fn read(found: &Value) -> Option<(Option<Holder>, Option<u64>)> {
    let Value::Array(fields) = found else {
        return None;
    };
    let [
        value,
        Value::Int(left),
        Value::BulkString(grant),
        Value::Int(waiting),
    ] = &fields[..]
    else {
        return None;
    };
    let holder = match value {
        Value::Nil => None,
        Value::BulkString(value) => {
            let grant = String::from_utf8_lossy(grant).into_owned();
            Some(value::holder(value, *left, grant))
        }
        Value::Int(_) => Some(value::other_data(*left)),
        _ => return None,
    };
    Some((holder, u64::try_from(*waiting).ok()))
}

/// All keys that begin with `prefix`.
fn pattern(prefix: &str) -> String {
    let mut pattern = String::with_capacity(prefix.len() + 1);
    for char in prefix.chars() {
        if matches!(char, '*' | '?' | '[' | ']' | '^' | '-' | '\\') {
            pattern.push('\\');
        }
        pattern.push(char);
    }
    pattern.push('*');
    pattern
}
