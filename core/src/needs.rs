use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use crate::{Consistency, Error, ErrorKind, Expiry, Fairness, Guarantees, Result, Tokens, Wakeup};

/// Something that a store must promise for a piece of work: one question to one field of
/// [`Guarantees`].
///
/// ```
/// use std::time::Duration;
/// use leasehold_core::{Locks, Memory, Need};
///
/// let locks = Locks::new(Memory::new());
/// locks.require([Need::Order, Need::Ttl(Duration::from_secs(10))])?;
///
/// let error = locks.require([Need::Order, Need::NodeLoss]).unwrap_err();
/// assert!(error.to_string().contains("survives the loss of a node"));
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Need {
    /// A server may be lost: what is held stays held, and locks are granted on.
    /// ([`node_losses`](Guarantees::node_losses))
    NodeLoss,
    /// A consensus protocol decides who holds, not clocks. ([`consistency`](Guarantees::consistency))
    Consensus,
    /// Tokens rise although a server crashed. ([`tokens`](Guarantees::tokens))
    DurableTokens,
    /// First come, first served. ([`fairness`](Guarantees::fairness))
    Order,
    /// A holder that hangs is thrown out by the store, though its process lives on.
    /// ([`expiry`](Guarantees::expiry))
    Expiry,
    /// Waiters are told that it is their turn. ([`wakeup`](Guarantees::wakeup))
    Push,
    /// The store lets go of a dead holder's lock after a ttl as short as this.
    /// ([`shortest_ttl`](Guarantees::shortest_ttl))
    Ttl(Duration),
}

impl Need {
    /// All that are answered by yes or no; [`Need::Ttl`] asks for a time.
    pub const ALL: [Self; 6] = [
        Self::NodeLoss,
        Self::Consensus,
        Self::DurableTokens,
        Self::Order,
        Self::Expiry,
        Self::Push,
    ];

    /// Whether a store with these guarantees does it, and why.
    ///
    /// # Errors
    /// What is missing, in words.
    pub fn check(self, guarantees: &Guarantees) -> Result<Reason, Reason> {
        let rule = match self {
            Self::NodeLoss => match (guarantees.node_losses, guarantees.consistency) {
                (1, _) => Ok("one node may be lost"),
                (2.., _) => {
                    return Ok(format!("{} nodes may be lost", guarantees.node_losses).into());
                }
                (0, Consistency::SingleNode) => {
                    Err("all locks are in one place: lost with it, or given to two by a failover")
                }
                (0, _) => Err("there is no node to spare, or too few of them were named"),
            },
            Self::Consensus => match guarantees.consistency {
                Consistency::SingleNode => Err("one node decides"),
                Consistency::Quorum => Err("a majority decides, by clocks and not by consensus"),
                Consistency::Linearizable => Ok("a consensus protocol decides"),
            },
            Self::DurableTokens => match guarantees.tokens {
                Tokens::UntilDataLoss => Err("tokens may fall when the store loses its data"),
                Tokens::Durable => Ok("tokens rise also after a crash"),
            },
            Self::Order => match guarantees.fairness {
                Fairness::None => Err("waiters are served in no order"),
                Fairness::Fifo => Ok("first come, first served"),
            },
            Self::Expiry => match guarantees.expiry {
                Expiry::Lease => Ok("each lock has a time limit of its own"),
                Expiry::Session => Ok("all locks of a client end with its session"),
                Expiry::Process => Err("a holder that hangs keeps its lock until its process ends"),
            },
            Self::Push => match guarantees.wakeup {
                Wakeup::Poll => Err("waiters ask again and again"),
                Wakeup::Push => Ok("waiters are told"),
            },
            Self::Ttl(ttl) => {
                let shortest = guarantees.shortest_ttl;
                let reason = format!("the shortest ttl is {shortest:?}").into();
                return if shortest <= ttl {
                    Ok(reason)
                } else {
                    Err(reason)
                };
            }
        };
        rule.map(Into::into).map_err(Into::into)
    }

    /// Fails if a store with these guarantees lacks one of `needs`; names all that it lacks.
    pub(crate) fn require(
        needs: impl IntoIterator<Item = Self>,
        guarantees: &Guarantees,
    ) -> Result<()> {
        let missing: Vec<String> = needs
            .into_iter()
            .filter_map(|need| {
                let reason = need.check(guarantees).err()?;
                Some(format!("{need} ({reason})"))
            })
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "this store lacks what is needed: {}; take another store, or need less",
                missing.join(", ")
            ),
        ))
    }
}

/// Why a store does what is needed, or does not.
pub type Reason = Cow<'static, str>;

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::NodeLoss => "survives the loss of a node",
            Self::Consensus => "consensus",
            Self::DurableTokens => "tokens outlive a crash",
            Self::Order => "order",
            Self::Expiry => "a hung holder is thrown out",
            Self::Push => "wake-up by push",
            Self::Ttl(ttl) => return write!(f, "a ttl of {ttl:?}"),
        };
        f.pad(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least, and what each need asks for beyond it.
    fn least() -> Guarantees {
        Guarantees::new(Expiry::Process, Duration::from_secs(2))
    }

    fn met(need: Need, change: impl FnOnce(&mut Guarantees)) -> Result<Reason, Reason> {
        let mut guarantees = least();
        change(&mut guarantees);
        need.check(&guarantees)
    }

    #[test]
    fn the_least_meets_nothing() {
        for need in Need::ALL {
            assert!(need.check(&least()).is_err(), "{need}");
        }
        assert!(
            Need::Ttl(Duration::from_millis(1999))
                .check(&least())
                .is_err()
        );
        assert!(Need::Ttl(Duration::from_secs(2)).check(&least()).is_ok());
    }

    #[test]
    fn each_need_asks_one_field() {
        assert!(met(Need::NodeLoss, |it| it.node_losses = 1).is_ok());
        assert!(
            met(Need::NodeLoss, |it| it.consistency =
                Consistency::Linearizable)
            .is_err()
        );
        assert!(met(Need::Consensus, |it| it.consistency = Consistency::Quorum).is_err());
        assert!(
            met(Need::Consensus, |it| it.consistency =
                Consistency::Linearizable)
            .is_ok()
        );
        assert!(met(Need::DurableTokens, |it| it.tokens = Tokens::Durable).is_ok());
        assert!(met(Need::Order, |it| it.fairness = Fairness::Fifo).is_ok());
        assert!(met(Need::Expiry, |it| it.expiry = Expiry::Lease).is_ok());
        assert!(met(Need::Expiry, |it| it.expiry = Expiry::Session).is_ok());
        assert!(met(Need::Push, |it| it.wakeup = Wakeup::Push).is_ok());
        let short = Duration::from_millis(10);
        assert!(met(Need::Ttl(short), |it| it.shortest_ttl = short).is_ok());
    }

    #[test]
    fn a_refusal_names_all_that_is_missing_and_nothing_else() {
        let mut guarantees = least();
        guarantees.fairness = Fairness::Fifo;
        assert!(Need::require([Need::Order], &guarantees).is_ok());
        assert!(Need::require([], &guarantees).is_ok());
        let needs = [
            Need::Order,
            Need::Push,
            Need::Consensus,
            Need::Ttl(Duration::from_millis(500)),
        ];
        let error = Need::require(needs, &guarantees).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(
            error.to_string(),
            "this store lacks what is needed: wake-up by push (waiters ask again and again), \
             consensus (one node decides), a ttl of 500ms (the shortest ttl is 2s); take another \
             store, or need less"
        );
    }
}
