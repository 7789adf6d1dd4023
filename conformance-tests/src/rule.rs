use std::fmt;
use std::future::Future;
use std::pin::Pin;

use leasehold_core::{Consistency, Expiry, Fairness, Guarantees, Tokens, Wakeup};

use crate::cx::Cx;
use crate::harness::Store;

/// One clause of the contract, and how it is checked. `CONTRACT.md` has the text for each id.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Rule {
    /// Its id in `CONTRACT.md`: `C1` and on are owed always, `F1` and on under faults.
    pub id: &'static str,
    /// Its title in `CONTRACT.md`.
    pub title: &'static str,
    /// Each of them must hold.
    pub checks: &'static [Check],
}

/// One way in which a rule can be seen to hold, or to be broken.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Check {
    /// What is looked at, in a few words.
    pub name: &'static str,
    /// It is ignored where one of them is not met.
    pub needs: &'static [Need],
    pub(crate) run: fn(Cx) -> Running,
}

/// A check under way.
pub(crate) type Running = Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

/// What a check needs from the backend's guarantees or from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// The store lets go by itself of a lock whose holder is silent.
    Expiry,
    /// Each lock has a time limit of its own.
    Lease,
    /// A majority decides, whether by consensus or not.
    Majority,
    /// Locks are granted on when a server is lost.
    NodeLoss,
    /// Waiters are served in order.
    Fifo,
    /// Waiters are told.
    Push,
    /// Tokens rise across restarts, or the servers keep their data.
    LastingTokens,
    /// Clients in several processes reach the store.
    Processes,
    /// A proxy can be put in front of the store.
    Proxy,
    /// Locks outlive the connection that they were taken on.
    Reconnect,
    /// Servers can be stopped and restarted.
    Control,
    /// Three or more servers decide together, and one of them can be killed.
    Members,
}

/// Makes a [`Check`] of an async function of [`Cx`].
macro_rules! check {
    ($name:literal, [$($need:ident),*], $function:path) => {
        $crate::rule::Check {
            name: $name,
            needs: &[$($crate::rule::Need::$need),*],
            run: |cx| Box::pin($function(cx)),
        }
    };
}
pub(crate) use check;

impl Check {
    /// Why it is not owed, or cannot be tried here.
    pub(crate) fn unmet(&self, guarantees: &Guarantees, store: &Store) -> Option<String> {
        self.needs
            .iter()
            .find_map(|need| need.unmet(guarantees, store))
    }
}

impl Need {
    fn unmet(self, guarantees: &Guarantees, store: &Store) -> Option<String> {
        let control = || {
            let reason = store.uncontrolled.as_deref();
            reason.unwrap_or("the harness has no control over the servers")
        };
        let reason = match self {
            Self::Expiry if guarantees.expiry == Expiry::Process => {
                "not promised: a lock ends with its process only"
            }
            Self::Lease if guarantees.expiry != Expiry::Lease => {
                "not promised: locks have no lease of their own"
            }
            Self::Majority if guarantees.consistency == Consistency::SingleNode => {
                "not promised: one server decides"
            }
            Self::NodeLoss if guarantees.node_losses == 0 => "not promised: no server may be lost",
            Self::Fifo if guarantees.fairness != Fairness::Fifo => {
                "not promised: waiters are served in no order"
            }
            Self::Push if guarantees.wakeup != Wakeup::Push => "not promised: waiters poll",
            Self::LastingTokens
                if guarantees.tokens != Tokens::Durable
                    && !store.control.as_ref().is_some_and(|c| c.keeps_data()) =>
            {
                "not promised: tokens may fall when the server loses its data"
            }
            Self::Processes if !store.processes => "the store is not shared between processes",
            Self::Proxy if store.servers.is_empty() => "no proxy can be put in front of the store",
            Self::Reconnect if store.on_connections => {
                "not promised: a lock ends with its connection"
            }
            Self::Control | Self::Members if store.control.is_none() => control(),
            Self::Members if store.control.as_ref().is_some_and(|c| c.members() < 3) => {
                "there are fewer than three servers"
            }
            _ => return None,
        };
        Some(reason.to_owned())
    }
}

impl Need {
    /// The field of [`Guarantees`] that brings it, and what is claimed there.
    pub(crate) fn promise(self) -> Option<(&'static str, &'static str)> {
        Some(match self {
            Self::Majority => ("consistency", "Quorum, Linearizable"),
            Self::NodeLoss => ("node_losses", "1 or more"),
            Self::Lease => ("expiry", "Lease"),
            Self::Expiry => ("expiry", "Lease, Session"),
            Self::Fifo => ("fairness", "Fifo"),
            Self::Push => ("wakeup", "Push"),
            Self::LastingTokens => ("tokens", "Durable"),
            Self::Processes | Self::Proxy | Self::Reconnect | Self::Control | Self::Members => {
                return None;
            }
        })
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Check")
            .field("name", &self.name)
            .field("needs", &self.needs)
            .finish_non_exhaustive()
    }
}
