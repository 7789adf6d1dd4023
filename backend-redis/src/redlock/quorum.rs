use std::collections::HashMap;
use std::time::Duration;

use leasehold_core::{Claim, Error, ErrorKind, Result, Token};

use super::fanout::Fanout;
use super::node::{Ask, Attempt, Node, Reply, Standing, Tell, Vote};
use super::time::Time;
use super::tokens::Proposals;

/// The protocol: a lock is held by whoever has the votes of a majority of independent nodes.
///
/// 1. *Attempt.* All nodes are asked at once. Each votes for one attempt at a time, until that is
///    taken back or its ttl is over. A majority of votes is the lock, from the sending of the
///    question for a ttl, less the margin for clocks that run at different speeds; silent nodes are
///    not waited for once that is decided. Without a majority, or too late, every vote is taken back,
///    from silent nodes too, before the attempt is over.
/// 2. *Token.* The question proposes one (see [`Proposals`]). Each node says the highest it knew
///    before and keeps the higher one. If every node of some majority that voted for the attempt knew
///    less, the proposal is the token: one trip. Else the least number above what such a majority
///    knew is the token, once a majority of all nodes has noted it, each while the attempt still had
///    its vote: the second trip. It makes one trip only. (Tokens rise: two majorities share a node;
///    that node let go of the earlier attempt before it voted for the later one, and had noted the
///    earlier token by then. If a node noted a token for an attempt that it no longer votes for, a
///    slow message could complete an older, lower grant after it has voted for the next.)
/// 3. *Extend.* A majority must still have the vote for this attempt, else it is lost. A failed
///    extension takes nothing back, and nothing revives what is over.
/// 4. *Release.* Every node takes its vote back; the next attempt may win once a majority has.
/// 5. *Values* on the nodes are claim and number of the attempt. A younger attempt of a claim
///    replaces an older one, and taking one back never touches a younger one; where an attempt that
///    is taken back has not arrived yet, it will get no vote. So neither a late nor a repeated message
///    blocks anybody for longer than a ttl, nor frees what it was not meant for.
/// 6. *Nodes without data.* A node that was restarted has forgotten votes that holders still count
///    on, and tokens. It does not vote until `max_ttl`, the longest ttl there is, has passed since it
///    was seen like that, so that those holders are gone; then it is [seeded](Self::tend) with the
///    highest token of a majority of the others, asked after that time. If a majority has lost its
///    data, or never had any, there is nothing left to ask for: then each waits until `max_ttl` after
///    its start, and tokens go on from the clocks of the clients.
///
/// Source: <https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/>, to which 2, 5
/// and 6 are added; 6 is its "delayed restarts", without an operator.
#[derive(Debug)]
pub(crate) struct Quorum<N, T: Time> {
    nodes: Vec<N>,
    time: T,
    proposals: Proposals<T::Moment>,
    /// How long nodes without data keep from voting.
    max_ttl: Duration,
}

/// What became of an attempt.
#[derive(Debug)]
pub(crate) enum Outcome<M> {
    /// It has the lock; how long that may be believed counts from `sent`.
    Granted {
        token: Token,
        sent: M,
        /// How often the nodes were asked, one after the other.
        trips: u32,
    },
    /// Another has the lock, or may have it.
    Held {
        /// When a majority of the nodes will have let go, if it is not extended.
        left: Option<Duration>,
    },
    /// Nobody has it: several attempts took votes from each other.
    Split,
    /// It had a majority, when its time was over already.
    Late(Error),
    /// Enough nodes are there, but too few vote yet.
    NotYet(Error),
    /// Too few nodes can be counted on.
    Missing(Error),
}

impl<N: Node, T: Time> Quorum<N, T> {
    /// Over an odd number of nodes.
    pub(crate) fn new(nodes: Vec<N>, time: T, max_ttl: Duration) -> Self {
        Self {
            nodes,
            time,
            proposals: Proposals::new(),
            max_ttl,
        }
    }

    pub(crate) fn nodes(&self) -> &[N] {
        &self.nodes
    }

    /// How many nodes decide.
    pub(crate) fn majority(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// Hears of a token that was granted to somebody.
    pub(crate) fn saw(&self, token: u64) {
        self.proposals.saw(token, &self.time);
    }

    /// Steps 1 and 2: one attempt of a claim, by its number.
    ///
    /// # Cancel safety
    /// What was asked is taken back.
    pub(crate) async fn attempt(&self, claim: &Claim, number: u32) -> Outcome<T::Moment> {
        let sent = self.time.now();
        let attempt = Attempt {
            key: claim.key.clone(),
            claim: claim.id,
            number,
        };
        let mut asking = Asking::new(self, &attempt, claim.ttl);
        let mut count = Count::default();
        let proposal = self.proposals.next(&self.time);
        let ask = Ask {
            attempt: &attempt,
            claim,
            proposal,
        };
        let mut votes = Fanout::new(self.nodes.iter().map(|node| Some(node.acquire(&ask))));
        let (nodes, majority) = (self.nodes.len(), self.majority());
        while count.known.len() < majority && count.known.len() + votes.left() >= majority {
            let Some((node, vote)) = votes.next().await else {
                break;
            };
            if let Ok(Vote::Granted { known } | Vote::Held { known, .. }) = vote {
                self.saw(known);
            }
            asking.note(node, &vote);
            count.add(vote);
        }
        let silent = votes.left();
        drop(votes);
        if count.known.len() < majority {
            asking.take_back(Tell::Nobody).await;
            return count.outcome(nodes, silent, self.max_ttl);
        }

        let (token, trips) = match count.token(proposal, majority) {
            Ok(token) => (token, 1),
            Err(higher) => match self.raise(&ask, &asking, higher).await {
                Ok(()) => (higher, 2),
                Err(error) => {
                    // It had a majority of votes: others may have taken it for the holder.
                    asking.take_back(Tell::Waiters).await;
                    return error.map_or(Outcome::Split, Outcome::Missing);
                }
            },
        };
        if self.time.is_over(sent, claim.ttl) {
            asking.take_back(Tell::Waiters).await;
            return Outcome::Late(too_late(claim.ttl));
        }
        asking.open = false;
        self.saw(token);
        Outcome::Granted {
            token: Token::new(token),
            sent,
            trips,
        }
    }

    /// Step 3; says since when the new ttl counts.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if no majority votes for it any more; [`ErrorKind::Unavailable`] if too
    /// few nodes answer to say.
    pub(crate) async fn extend(&self, attempt: &Attempt, ttl: Duration) -> Result<T::Moment> {
        let sent = self.time.now();
        let replies = self
            .nodes
            .iter()
            .map(|node| Some(node.extend(attempt, ttl)));
        let tally = self
            .tally(replies, &mut vec![false; self.nodes.len()])
            .await;
        match tally {
            Tally::Majority => Ok(sent),
            Tally::Minority => Err(lost(attempt)),
            Tally::Open { error, .. } => Err(error.unwrap_or_else(|| silent(self.nodes.len()))),
        }
    }

    /// Step 4. `freed` says which nodes have taken their vote back already, and is kept for the next
    /// call, should this one fail.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if no majority voted for it any more; [`ErrorKind::Unavailable`] if too
    /// few nodes answer for another to win.
    ///
    /// # Cancel safety
    /// Goes through by itself; may be called again.
    pub(crate) async fn release(
        &self,
        attempt: &Attempt,
        ttl: Duration,
        freed: &mut Vec<bool>,
    ) -> Result<()> {
        freed.resize(self.nodes.len(), false);
        let replies: Vec<_> = self
            .nodes
            .iter()
            .zip(&*freed)
            .map(|(node, freed)| (!freed).then(|| node.free(attempt, ttl, Tell::Waiters)))
            .collect();
        match self.tally(replies, freed).await {
            Tally::Majority => Ok(()),
            Tally::Minority => Err(lost(attempt)),
            // Those that do not answer may have had it; but they are too few to keep it from others.
            Tally::Open { answered, .. } if answered >= self.majority() => Ok(()),
            Tally::Open { error, .. } => Err(error.unwrap_or_else(|| silent(self.nodes.len()))),
        }
    }

    /// Step 6: looks at all nodes and seeds those whose time has come. Says how long to wait until it
    /// should be called again; `None` if all that answered vote.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(crate) async fn tend(&self) -> Option<Duration> {
        let first = self.look().await;
        let (mut ready, mut next) = (Vec::new(), None::<Duration>);
        let majority_lost = self.has_majority_lost_data(&first);
        for (index, standing) in first.iter().enumerate() {
            let Some(standing) = standing.as_ref().filter(|it| it.token.is_none()) else {
                continue;
            };
            let waited = match majority_lost {
                // After its start, or since it was seen without data if it has started before.
                true => standing.waiting.unwrap_or_default().max(standing.up),
                false => standing.waiting.unwrap_or_default(),
            };
            let left = self.max_ttl.saturating_sub(waited);
            if left.is_zero() {
                ready.push(index);
            } else {
                next = Some(next.map_or(left, |next| next.min(left)));
            }
            if standing.waiting.is_none() && !left.is_zero() {
                // If it is not answered, the next look does it again.
                let _marked = self.nodes[index].mark(standing).await;
            }
        }
        if ready.is_empty() {
            return next;
        }
        // Asked again: what the others knew while its time was not over yet is too old.
        let second = self.look().await;
        for index in ready {
            let seen = first[index].as_ref();
            let seeded = match (seen, self.seed_for(index, &second)) {
                (Some(seen), Some(token)) => self.nodes[index].seed(seen, token).await.is_ok(),
                _ => false,
            };
            if !seeded {
                let soon = self.max_ttl.min(Duration::from_secs(1));
                next = Some(next.map_or(soon, |next| next.min(soon)));
            }
        }
        next
    }

    /// Where each node stands; `None`: it did not say.
    async fn look(&self) -> Vec<Option<Standing>> {
        let mut standings = vec![None; self.nodes.len()];
        let mut looks = Fanout::new(self.nodes.iter().map(|node| Some(node.look())));
        while let Some((node, standing)) = looks.next().await {
            standings[node] = standing.ok();
        }
        standings
    }

    fn has_majority_lost_data(&self, standings: &[Option<Standing>]) -> bool {
        let lost = standings.iter().flatten().filter(|it| it.token.is_none());
        lost.count() >= self.majority()
    }

    /// The token that node `index` must know before it votes; `None`: too few others can say.
    fn seed_for(&self, index: usize, standings: &[Option<Standing>]) -> Option<u64> {
        let others = standings
            .iter()
            .enumerate()
            .filter(|(other, _)| *other != index);
        let tokens: Vec<u64> = others
            .filter_map(|(_, standing)| standing.as_ref()?.token)
            .collect();
        if tokens.len() >= self.majority() || self.has_majority_lost_data(standings) {
            Some(tokens.into_iter().max().unwrap_or(0))
        } else {
            None
        }
    }

    /// The second trip: to all who did not refuse. What a majority of all has noted is the token.
    ///
    /// Fails with the reason why too few answered, or with `None` if the votes are gone.
    async fn raise(
        &self,
        ask: &Ask<'_>,
        asking: &Asking<'_, N, T>,
        token: u64,
    ) -> std::result::Result<(), Option<Error>> {
        let replies = self
            .nodes
            .iter()
            .zip(&asking.votes)
            .map(|(node, voted)| (*voted != Voted::Against).then(|| node.raise(ask, token)));
        let mut noted = vec![false; self.nodes.len()];
        match self.tally(replies, &mut noted).await {
            Tally::Majority => Ok(()),
            Tally::Minority => Err(None),
            Tally::Open { error, .. } => Err(error),
        }
    }

    /// Counts the nodes that say yes, those of `yes` included, which are not asked, until it is
    /// decided.
    async fn tally(
        &self,
        replies: impl IntoIterator<Item = Option<Reply<bool>>>,
        yes: &mut [bool],
    ) -> Tally {
        let mut replies = Fanout::new(replies);
        let (mut asked_no, mut error) = (0, None);
        let mut failed = 0;
        let count = |yes: &[bool]| yes.iter().filter(|yes| **yes).count();
        loop {
            let agreed = count(yes);
            if agreed >= self.majority() {
                return Tally::Majority;
            }
            if agreed + failed + replies.left() < self.majority() {
                return Tally::Minority;
            }
            match replies.next().await {
                Some((node, Ok(true))) => yes[node] = true,
                Some((_, Ok(false))) => asked_no += 1,
                Some((_, Err(e))) => {
                    failed += 1;
                    error = Some(e);
                }
                None => {
                    let answered = agreed + asked_no;
                    return Tally::Open { answered, error };
                }
            }
        }
    }
}

/// An attempt that is neither granted nor over. Dropping it takes the votes back.
struct Asking<'a, N: Node, T: Time> {
    quorum: &'a Quorum<N, T>,
    attempt: &'a Attempt,
    ttl: Duration,
    votes: Vec<Voted>,
    open: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Voted {
    Unknown,
    For,
    Against,
}

impl<'a, N: Node, T: Time> Asking<'a, N, T> {
    fn new(quorum: &'a Quorum<N, T>, attempt: &'a Attempt, ttl: Duration) -> Self {
        Self {
            quorum,
            attempt,
            ttl,
            votes: vec![Voted::Unknown; quorum.nodes.len()],
            open: true,
        }
    }

    fn note(&mut self, node: usize, vote: &Result<Vote>) {
        self.votes[node] = match vote {
            Ok(Vote::Granted { .. }) => Voted::For,
            Ok(_) => Voted::Against,
            Err(_) => Voted::Unknown,
        };
    }

    /// Takes all votes back and waits for those nodes that have said that they gave one; the others
    /// may be down.
    async fn take_back(mut self, tell: Tell) {
        self.open = false;
        let replies = self.free(tell);
        let mut replies = Fanout::new(
            replies
                .into_iter()
                .zip(&self.votes)
                .map(|(reply, voted)| reply.filter(|_| *voted == Voted::For)),
        );
        while replies.next().await.is_some() {}
    }

    fn free(&self, tell: Tell) -> Vec<Option<Reply<bool>>> {
        let nodes = self.quorum.nodes.iter().zip(&self.votes);
        nodes
            .map(|(node, voted)| {
                (*voted != Voted::Against).then(|| node.free(self.attempt, self.ttl, tell))
            })
            .collect()
    }
}

impl<N: Node, T: Time> Drop for Asking<'_, N, T> {
    fn drop(&mut self) {
        if self.open {
            // Nobody knows how far it came: others may have taken it for the holder.
            drop(self.free(Tell::Waiters));
        }
    }
}

/// The votes of an attempt.
#[derive(Default)]
struct Count {
    /// What each node that voted for it knew before.
    known: Vec<u64>,
    /// How many others have how many votes.
    rivals: HashMap<String, usize>,
    /// When the votes for others end.
    ends: Vec<Option<Duration>>,
    unseeded: usize,
    ahead: usize,
    error: Option<Error>,
}

impl Count {
    fn add(&mut self, vote: Result<Vote>) {
        match vote {
            Ok(Vote::Granted { known }) => self.known.push(known),
            Ok(Vote::Held { by, left, .. }) => {
                *self.rivals.entry(by).or_default() += 1;
                self.ends.push(left);
            }
            Ok(Vote::Unseeded) => self.unseeded += 1,
            Ok(Vote::Ahead) => self.ahead += 1,
            Ok(Vote::Gone) => {}
            Err(error) => self.error = Some(error),
        }
    }

    /// The token: the proposal if a majority of those who voted for it knew less, else the one that
    /// has to be noted first.
    fn token(&mut self, proposal: u64, majority: usize) -> std::result::Result<u64, u64> {
        // Any majority will do: take the one that knew least.
        self.known.sort_unstable();
        let highest = self.known[majority - 1];
        if highest < proposal {
            Ok(proposal)
        } else {
            Err(highest + 1)
        }
    }

    /// Why there is no majority, when so many nodes have not been heard.
    fn outcome<M>(&self, nodes: usize, silent: usize, max_ttl: Duration) -> Outcome<M> {
        let majority = nodes / 2 + 1;
        let held: usize = self.rivals.values().sum();
        let answered = self.known.len() + held;
        let unheard = nodes - answered;
        let most = self.rivals.values().max().copied().unwrap_or(0);
        if most > 0 && most + unheard >= majority && answered + silent >= majority {
            return Outcome::Held {
                left: self.left(majority - self.known.len().min(majority)),
            };
        }
        if answered + silent >= majority {
            return Outcome::Split;
        }
        if self.unseeded > 0 && answered + silent + self.unseeded >= majority {
            return Outcome::NotYet(self.not_yet(nodes, max_ttl));
        }
        Outcome::Missing(self.missing(nodes))
    }

    /// When so many votes for others will have ended.
    fn left(&self, votes: usize) -> Option<Duration> {
        let mut ends: Vec<Duration> = self.ends.iter().copied().flatten().collect();
        ends.sort_unstable();
        ends.get(votes.saturating_sub(1)).copied()
    }

    fn not_yet(&self, nodes: usize, max_ttl: Duration) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!(
                "{} of {nodes} nodes have no data and do not vote until the locks that they may have \
                 forgotten are over, {max_ttl:?} (max_ttl) after their start",
                self.unseeded
            ),
        )
    }

    fn missing(&self, nodes: usize) -> Error {
        if self.ahead > 0 {
            return Error::new(
                ErrorKind::Other,
                format!(
                    "{} of {nodes} nodes have clocks more than a day behind ours: set the clocks",
                    self.ahead
                ),
            );
        }
        self.error.clone().unwrap_or_else(|| silent(nodes))
    }
}

/// What the nodes say to a question with yes or no.
enum Tally {
    /// Yes.
    Majority,
    /// Whatever those say that have not answered: no majority says yes.
    Minority,
    /// Not decided.
    Open {
        answered: usize,
        error: Option<Error>,
    },
}

pub(crate) fn lost(attempt: &Attempt) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!(
            "the lock {:?} is no longer held by this grant on a majority of nodes",
            attempt.key
        ),
    )
}

fn silent(nodes: usize) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("too few of {nodes} nodes answer"),
    )
}

fn too_late(ttl: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("a majority answered too late for a ttl of {ttl:?}"),
    )
}
