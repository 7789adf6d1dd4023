use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Consistency, Error, ErrorKind, Examination, Expiry, Fairness, Guarantees, Hold,
    Holder, Key, Moment, Page, Result, Tokens, Wakeup,
};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use super::acquire::acquire;
use super::examine::examine;
use super::fanout::Fanout;
use super::list::list;
use super::node::Reply;
use super::options::RedlockOptions;
use super::queues::Queues;
use super::quorum::{Outcome, Quorum};
use super::remote::{RemoteNode, Voted};
use super::time::SystemTimes;
use crate::client::Client;

/// Locks that a majority of 3, 5 or 7 independent Redis servers grants.
///
/// Cheap to clone; clones share their connections. Give it to `Locks::new`.
#[derive(Debug, Clone)]
pub struct Redlock {
    nodes: Arc<Nodes>,
}

/// The nodes of one client, and who waits here.
pub(super) struct Nodes {
    pub(super) quorum: Quorum<RemoteNode, SystemTimes>,
    pub(super) queues: Arc<Queues>,
    pub(super) max_ttl: Duration,
    /// Nodes without data are kept from voting.
    pub(super) restart_guard: bool,
    /// A node without data was met.
    untended: Arc<AtomicBool>,
    /// Somebody seeds nodes already.
    tending: AtomicBool,
}

impl Redlock {
    /// What these locks promise, whatever the servers: with 3 of them. Of 5 and 7 more may be lost, as
    /// each client [says](Backend::guarantees).
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Lease, *Claim::TTL_RANGE.start());
        guarantees.consistency = Consistency::Quorum;
        guarantees.node_losses = 1;
        guarantees.fairness = Fairness::None;
        guarantees.wakeup = Wakeup::Push;
        guarantees.tokens = Tokens::UntilDataLoss;
        guarantees
    };

    /// Connects to the servers at these URLs, with default options; see [`RedlockOptions::new`].
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with), and [`ErrorKind::Invalid`] for what cannot be a set of
    /// nodes.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect(urls: impl IntoIterator<Item = impl AsRef<str>> + Send) -> Result<Self> {
        let options = RedlockOptions::new(urls)?;
        Self::connect_with(options).await
    }

    /// Connects to all nodes at once, and tries on each everything that locks will need. Nodes that are
    /// down may be a minority; they are used as soon as they are there.
    ///
    /// Later on it reconnects by itself, in whichever tokio runtime it is then used.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`]: a majority is not to be reached.
    /// - [`ErrorKind::Unsupported`]: a node is older than Redis 6.0 or part of a cluster, or this is
    ///   called outside of a tokio runtime.
    /// - [`ErrorKind::Other`]: signing in was refused on a node, or a right is missing; the message says
    ///   which ACL rules to add.
    /// - [`ErrorKind::Invalid`]: options that cannot be, or two addresses of one server.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect_with(options: RedlockOptions) -> Result<Self> {
        options.check()?;
        let queues = Arc::new(Queues::default());
        let untended = Arc::new(AtomicBool::new(false));
        let mut nodes = Vec::new();
        for (index, node) in options.nodes.iter().enumerate() {
            let hears = queues.clone();
            let listener = Box::new(move |text: &str| hears.message(index, text));
            let client = Client::new(node, Some(listener))?;
            nodes.push(RemoteNode::new(
                client,
                options.node_timeout,
                untended.clone(),
            ));
        }
        let pause = match options.restart_guard {
            true => options.max_ttl,
            false => Duration::ZERO,
        };
        let nodes = Arc::new(Nodes {
            quorum: Quorum::new(nodes, SystemTimes, pause),
            queues,
            max_ttl: options.max_ttl,
            restart_guard: options.restart_guard,
            untended,
            tending: AtomicBool::new(false),
        });
        nodes.connect(&options).await?;
        nodes.tend().await;
        Ok(Self { nodes })
    }
}

#[async_trait]
impl Backend for Redlock {
    fn guarantees(&self) -> Guarantees {
        let mut guarantees = Self::GUARANTEES;
        let spare = self.nodes.quorum.nodes().len() - self.nodes.quorum.majority();
        guarantees.node_losses = u32::try_from(spare).unwrap_or(u32::MAX);
        guarantees
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let hold = acquire(&self.nodes, claim).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }

    /// Whoever has the most votes, if that may be a majority with those of the nodes that are silent.
    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let all = self.nodes.quorum.nodes();
        let majority = self.nodes.quorum.majority();
        let mut votes = Fanout::new(all.iter().map(|node| Some(node.voted(key))));
        let mut counted = Count::default();
        let (mut answered, mut silent, mut error) = (0, 0, None);
        while let Some((_, vote)) = votes.next().await {
            match vote {
                Ok(vote) => {
                    answered += 1;
                    let Some(vote) = vote else { continue };
                    counted.add(vote);
                }
                Err(e) => {
                    silent += 1;
                    error = Some(e);
                }
            }
            let most = counted.most();
            let possible = most + votes.left() + silent;
            if most >= majority || possible < majority && answered >= majority {
                break;
            }
        }
        if answered < majority {
            return Err(error.unwrap_or_else(|| unreached(all.len())));
        }
        Ok(counted.holder(majority.saturating_sub(silent)))
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let name = grant.map_or("", |holder| &holder.grant);
        let all = self.nodes.quorum.nodes();
        let mut replies = Fanout::new(all.iter().map(|node| Some(node.evict(key, name))));
        let (mut evicted, mut answered, mut error) = (0, 0, None);
        while let Some((_, reply)) = replies.next().await {
            match reply {
                Ok(yes) => {
                    answered += 1;
                    evicted += usize::from(yes);
                }
                Err(e) => error = Some(e),
            }
        }
        if answered < self.nodes.quorum.majority() {
            return Err(error.unwrap_or_else(|| unreached(all.len())));
        }
        // Fewer were left over from a release or a failed attempt: nobody held the lock by them.
        let silent = all.len() - answered;
        Ok(evicted > 0 && evicted + silent >= self.nodes.quorum.majority())
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        list(&self.nodes, prefix, after).await
    }

    async fn examine(&self, ttl: Duration) -> Result<Examination> {
        examine(&self.nodes, ttl).await
    }

    /// On all nodes: one that is not reached keeps what it has.
    async fn erase(&self) -> Result<()> {
        for node in self.nodes.quorum.nodes() {
            node.erase().await?;
        }
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        let all = self.nodes.quorum.nodes().iter().cloned();
        let closing = all.map(|node| {
            let closing: Reply<()> = Box::pin(async move {
                node.close().await;
                Ok(())
            });
            Some(closing)
        });
        let mut closing = Fanout::new(closing);
        while closing.next().await.is_some() {}
        Ok(())
    }
}

impl Nodes {
    /// The name of the key of a lock, the same on all nodes.
    pub(super) fn lock(&self, key: &Key) -> Arc<str> {
        self.quorum.nodes()[0].lock(key)
    }

    /// One attempt of a claim. Nodes without data that it met are looked after.
    pub(super) async fn attempt(self: &Arc<Self>, claim: &Claim, number: u32) -> Outcome<Moment> {
        self.quorum.saw(self.queues.newest_token());
        let outcome = self.quorum.attempt(claim, number).await;
        if let Outcome::Granted { token, trips, .. } = &outcome {
            debug!(target: "leasehold", key = %claim.key, %token, trips, "a majority voted for it");
        }
        if self.untended.swap(false, Ordering::Relaxed) {
            self.tend().await;
        }
        outcome
    }

    /// Seeds nodes without data, in the background from the second look on.
    async fn tend(self: &Arc<Self>) {
        if self.tending.swap(true, Ordering::AcqRel) {
            return;
        }
        let tending = Tending(Arc::downgrade(self));
        if let Some(next) = self.quorum.tend().await {
            warn!(
                target: "leasehold",
                wait = ?next,
                "nodes without data do not vote yet: they may have forgotten locks"
            );
            drop(tokio::spawn(tending.go_on(next)));
        }
    }

    async fn connect(&self, options: &RedlockOptions) -> Result<()> {
        let all = self.quorum.nodes();
        let limit = options
            .nodes
            .iter()
            .map(|node| node.connect_timeout)
            .max()
            .unwrap_or_default();
        let mut connecting = Fanout::new(all.iter().cloned().map(|node| {
            let connecting: Reply<_> = Box::pin(async move { node.connect().await });
            Some(connecting)
        }));
        let (mut connected, mut error) = (Vec::new(), None);
        let started = Moment::now();
        while connecting.left() > 0 {
            let patience = match connected.len() >= self.quorum.majority() {
                true => options.node_timeout,
                false => limit.saturating_sub(started.elapsed()),
            };
            let Ok(Some((index, server))) = timeout(patience, connecting.next()).await else {
                break;
            };
            match server {
                Ok(server) => connected.push((index, server)),
                Err(e) if e.is_transient() => {
                    warn!(target: "leasehold", server = all[index].address(), error = %e, "a node is down");
                    error = Some(e);
                }
                Err(e) => return Err(e),
            }
        }
        if connected.len() < self.quorum.majority() {
            return Err(error.unwrap_or_else(|| unreached(all.len())));
        }
        for (place, (index, server)) in connected.iter().enumerate() {
            let twin = connected[..place].iter().find(|(_, it)| it.id == server.id);
            if let Some((twin, _)) = twin {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "{} and {} are one server, which has one vote: name independent servers",
                        all[*twin].address(),
                        all[*index].address()
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes")
            .field("nodes", &self.quorum.nodes())
            .field("max_ttl", &self.max_ttl)
            .finish_non_exhaustive()
    }
}

/// The votes for one lock.
#[derive(Default)]
pub(super) struct Count(HashMap<String, (usize, Holder)>);

impl Count {
    pub(super) fn add(&mut self, vote: Voted) {
        let (count, holder) = self
            .0
            .entry(vote.grant)
            .or_insert_with(|| (0, vote.holder.clone()));
        *count += 1;
        // A node that took no part in the second trip has noted the proposal only.
        if vote.holder.token > holder.token {
            *holder = vote.holder;
        }
    }

    /// How many whoever has the most has.
    fn most(&self) -> usize {
        self.0.values().map(|(count, _)| *count).max().unwrap_or(0)
    }

    /// Whoever has the most votes, if those are `enough`.
    pub(super) fn holder(self, enough: usize) -> Option<Holder> {
        let first = self.0.into_values().max_by_key(|(count, _)| *count);
        first
            .filter(|(count, _)| *count >= enough)
            .map(|(_, holder)| holder)
    }
}

/// Whoever seeds nodes; another may when it is dropped.
struct Tending(Weak<Nodes>);

impl Tending {
    async fn go_on(self, first: Duration) {
        const LONGEST: Duration = Duration::from_secs(1);
        let mut next = Some(first);
        while let Some(wait) = next {
            // Also a node that has come back by now is to be seen early.
            sleep(wait.clamp(Duration::from_millis(10), LONGEST)).await;
            let Some(nodes) = self.0.upgrade() else {
                return;
            };
            next = nodes.quorum.tend().await;
        }
    }
}

impl Drop for Tending {
    fn drop(&mut self) {
        if let Some(nodes) = self.0.upgrade() {
            nodes.tending.store(false, Ordering::Release);
        }
    }
}

pub(super) fn unreached(nodes: usize) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("no majority of {nodes} nodes can be reached"),
    )
}
