#![doc = include_str!("../README.md")]

pub mod blocking;
mod candidate;
mod choose;
mod nearest;
mod open;
mod options;
mod schemes;
mod setting;

pub use candidate::{Answer, Candidate, Judgement};
pub use choose::{choose, shown};
pub use leasehold_core::{
    Consistency, Error, ErrorKind, Examination, Examined, Expiry, Fairness, Finding, Guarantees,
    Guard, Guards, Holder, Key, Listed, Listing, Locks, Memory, Need, Owner, OwnerId, Reason,
    Result, Severity, Token, Tokens, Wakeup,
};
#[cfg(feature = "etcd")]
#[doc(inline)]
pub use leasehold_etcd as etcd;
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

/// For those who bring a store of their own, and for tools: the traits to implement, and what they speak
/// of.
pub mod backend {
    pub use leasehold_core::{Backend, Claim, Hold, Moment, Page, Validity};

    pub use crate::open::connect;
}

/// The examples of the project's own pages.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct ProjectPage;

/// The pages for those who come with a problem.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../docs/choosing.md")]
    struct Choosing;
    #[doc = include_str!("../../docs/scheduled-job.md")]
    struct ScheduledJob;
    #[doc = include_str!("../../docs/payment-callback.md")]
    struct PaymentCallback;
    #[doc = include_str!("../../docs/flash-sale.md")]
    struct FlashSale;
    #[doc = include_str!("../../docs/leader.md")]
    struct Leader;
}
