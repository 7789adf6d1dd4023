//! Which locks a majority says are held.

use std::sync::Arc;

use leasehold_core::{Page, Result};

use super::backend::{Count, Nodes, unreached};
use super::fanout::Fanout;
use super::remote::Voted;
use crate::list::{Place, places};

/// 1. The keys of one node after the other are gone through by `SCAN`. A lock that a majority voted for
///    is on at least one of any majority of the nodes, so silent ones may be left out as long as they are
///    fewer.
/// 2. All nodes are asked for their votes for the locks of a page. Whoever has a majority, together with
///    the nodes that are silent, holds the lock, as with `holder`.
/// 3. A lock that an earlier node has too came there, and does not come again.
///
/// How many wait is known to no node: a client that waits is counted once, whoever waits in it.
pub(super) async fn list(nodes: &Nodes, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
    let all = nodes.quorum.nodes();
    let majority = nodes.quorum.majority();
    let mut cursor = Cursor::read(after).unwrap_or_default();
    let keys = loop {
        let Some(node) = all.get(cursor.node) else {
            return Ok(Page::default());
        };
        match node.scan(cursor.scan).await {
            Ok((scan, keys)) => {
                cursor.scan = scan;
                break keys;
            }
            Err(e) if !e.is_transient() => return Err(e),
            Err(e) => {
                cursor.silent.push(cursor.node);
                if all.len() - cursor.silent.len() < majority {
                    return Err(e);
                }
                cursor.node += 1;
                cursor.scan = 0;
            }
        }
    };
    let here = cursor.node;
    let found = places(all[here].names(), &keys, prefix);
    let places: Vec<Place> = found.known.into_values().collect();
    let mut locks = found.strange;
    if !places.is_empty() {
        let votes = Votes::ask(nodes, &places, &cursor.silent).await?;
        let silent = all.len() - votes.0.len();
        for (index, place) in places.iter().enumerate() {
            let of_nodes = || votes.0.iter().map(|(node, votes)| (*node, &votes[index]));
            let came = of_nodes().any(|(node, vote)| node < here && vote.is_some());
            let mut count = Count::default();
            for vote in of_nodes().filter_map(|(_, vote)| vote.clone()) {
                count.add(vote);
            }
            if let Some(holder) = count.holder(majority.saturating_sub(silent).max(1))
                && !came
            {
                let mut listed = place.listed();
                listed.holder = Some(holder);
                locks.push(listed);
            }
        }
    }
    if cursor.scan == 0 {
        cursor.node += 1;
    }
    let more = cursor.node < all.len();
    Ok(Page::new(locks, more.then(|| cursor.write())))
}

/// The votes of each node that answered, by its index.
struct Votes(Vec<(usize, Vec<Option<Voted>>)>);

impl Votes {
    async fn ask(nodes: &Nodes, places: &[Place], silent: &[usize]) -> Result<Self> {
        let all = nodes.quorum.nodes();
        let locks: Vec<Arc<str>> = places.iter().map(|place| place.keys.lock.clone()).collect();
        let asked = all.iter().enumerate();
        let mut asking = Fanout::new(
            asked.map(|(index, node)| (!silent.contains(&index)).then(|| node.votes(&locks))),
        );
        let (mut votes, mut error) = (Vec::new(), None);
        while let Some((index, answer)) = asking.next().await {
            match answer {
                Ok(answer) => votes.push((index, answer)),
                Err(e) => error = Some(e),
            }
        }
        if votes.len() < nodes.quorum.majority() {
            return Err(error.unwrap_or_else(|| unreached(all.len())));
        }
        Ok(Self(votes))
    }
}

/// A place to go on from.
#[derive(Debug, Default)]
struct Cursor {
    node: usize,
    scan: u64,
    /// Nodes that did not answer when it was their turn.
    silent: Vec<usize>,
}

impl Cursor {
    fn read(bytes: Option<&[u8]>) -> Option<Self> {
        let text = std::str::from_utf8(bytes?).ok()?;
        let mut numbers = text.split(' ');
        Some(Self {
            node: numbers.next()?.parse().ok()?,
            scan: numbers.next()?.parse().ok()?,
            silent: numbers.filter_map(|it| it.parse().ok()).collect(),
        })
    }

    fn write(&self) -> Vec<u8> {
        let mut text = format!("{} {}", self.node, self.scan);
        for node in &self.silent {
            text.push_str(&format!(" {node}"));
        }
        text.into_bytes()
    }
}
