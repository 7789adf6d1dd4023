#![doc = include_str!("../README.md")]

mod nearest;
mod open;
mod options;
mod schemes;
mod setting;

pub use leasehold_core::{
    Consistency, Error, ErrorKind, Expiry, Fairness, Guarantees, Guard, Guards, Holder, Key, Locks,
    Memory, Owner, OwnerId, Result, Token, Tokens, Wakeup,
};
#[cfg(feature = "file")]
#[doc(inline)]
pub use leasehold_file as file;
#[cfg(feature = "postgres")]
#[doc(inline)]
pub use leasehold_postgres as postgres;
#[cfg(feature = "redis")]
#[doc(inline)]
pub use leasehold_redis as redis;
#[cfg(feature = "zk")]
#[doc(inline)]
pub use leasehold_zk as zk;
pub use open::open;

/// For those who bring a store of their own: the traits to implement, and what they speak of.
pub mod backend {
    pub use leasehold_core::{Backend, Claim, Hold, Moment, Validity};
}

/// The examples of the project's own page.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ProjectPage;
