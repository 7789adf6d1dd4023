//! The lock API, the backend trait and the memory backend of Leasehold.
//!
//! Users start at [`Locks`]; those who bring a store start at [`Backend`]. The promises, rule by
//! rule (C1, C2, …), stand in `CONTRACT.md`.

mod at_once;
mod backend;
mod error;
mod examination;
mod gather;
mod guard;
mod keeper;
mod kept;
mod key;
mod listing;
mod locks;
mod memory;
mod needs;
mod owner;
mod validity;

pub use at_once::poll_once;
pub use backend::{
    Backend, Claim, Consistency, Expiry, Fairness, Guarantees, Hold, Holder, OwnerId, Token,
    Tokens, Wakeup,
};
pub use error::{Error, ErrorKind, Result};
pub use examination::{Examination, Examined, Finding, Severity};
pub use gather::{Answer, Batch, Gather, Pass, Replies, Way};
pub use guard::{Guard, Guards};
pub use key::Key;
pub use listing::{Listed, Listing, Page};
pub use locks::Locks;
pub use memory::Memory;
pub use needs::{Need, Reason};
pub use owner::Owner;
pub use validity::{Moment, Validity};
