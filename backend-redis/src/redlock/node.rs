use std::pin::Pin;
use std::time::Duration;

use leasehold_core::{Claim, Key, Result};
use uuid::Uuid;

/// One of the independent nodes, as the protocol sees it.
///
/// A request leaves when its method is called, before the reply is polled, and goes through whether
/// or not anybody waits for the reply. A node that does not answer in time replies with
/// [`Unavailable`](leasehold_core::ErrorKind::Unavailable); what it did is then not known. Requests
/// may be lost, late, repeated and in another order: the node makes sure that none of that gives a
/// lock to two.
pub(crate) trait Node: Send + Sync + 'static {
    /// Asks for the node's vote.
    fn acquire(&self, ask: &Ask<'_>) -> Reply<Vote>;

    /// The second trip: the node knows at least `token` from now on, if this attempt still holds the
    /// lock there; says whether it does.
    fn raise(&self, ask: &Ask<'_>, token: u64) -> Reply<bool>;

    /// The lock lasts another `ttl`, if this attempt holds it there; says whether it does.
    fn extend(&self, attempt: &Attempt, ttl: Duration) -> Reply<bool>;

    /// Takes the vote for this attempt or an older one of its claim back, and tells waiters if asked
    /// to; says whether there was one. Else the attempt gets no vote there for a ttl, however late it
    /// arrives. A younger attempt keeps its vote. What is not answered is sent again, for a ttl.
    fn free(&self, attempt: &Attempt, ttl: Duration, tell: Tell) -> Reply<bool>;

    /// How it stands with the node's data.
    fn look(&self) -> Reply<Standing>;

    /// A node without data notes since when it has been waiting to vote, if it stands as it was seen.
    fn mark(&self, seen: &Standing) -> Reply<()>;

    /// A node without data knows `token` and votes from now on, if it stands as it was seen.
    fn seed(&self, seen: &Standing, token: u64) -> Reply<()>;
}

/// An answer on its way.
pub(crate) type Reply<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// What a vote is given to: the attempt with this number of a claim. It is what a node stores, so
/// that no request meant for one attempt touches another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attempt {
    pub(crate) key: Key,
    pub(crate) claim: Uuid,
    /// Counts the attempts of the claim.
    pub(crate) number: u32,
}

/// The question of an attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) attempt: &'a Attempt,
    pub(crate) claim: &'a Claim,
    /// The token that it will have if the nodes know none that is as high.
    pub(crate) proposal: u64,
}

/// What a node says to an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Vote {
    /// For it; before that, the node knew this token.
    Granted { known: u64 },
    /// Another has the node's vote.
    Held {
        known: u64,
        /// Names the attempt that has it.
        by: String,
        /// When the vote ends by itself.
        left: Option<Duration>,
    },
    /// The node has no data, or not for sure: it does not vote until it is seeded.
    Unseeded,
    /// This attempt was taken back before it arrived.
    Gone,
    /// The proposed token is more than a day ahead of the node's clock.
    Ahead,
}

/// Whether a vote that is taken back is news for those who wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tell {
    /// It may have been the lock: waiters are told.
    Waiters,
    /// It was a failed attempt: telling would only bring the next ones about.
    Nobody,
}

/// How it stands with a node's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    /// The highest token that the node knows; `None`: it has no data, or that of an earlier run that
    /// may be incomplete.
    pub(crate) token: Option<u64>,
    /// How long the server has been running.
    pub(crate) up: Duration,
    /// How long ago it was [marked](Node::mark).
    pub(crate) waiting: Option<Duration>,
    /// Which run of the server this is, and when it was marked, in the node's own words.
    pub(crate) state: String,
}
