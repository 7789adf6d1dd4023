//! The lock API, the backend trait and the memory backend of Leasehold.

mod backend;
mod error;
mod key;
mod validity;

pub use backend::{
    Backend, Claim, Consistency, Expiry, Fairness, Guarantees, Hold, Holder, OwnerId, Token,
    Tokens, Wakeup,
};
pub use error::{Error, ErrorKind, Result};
pub use key::Key;
pub use validity::{Moment, Validity};
