#![doc = include_str!("../../REDLOCK.md")]

mod acquire;
mod backend;
mod examine;
mod fanout;
mod hold;
mod list;
#[cfg(test)]
mod model;
mod node;
mod options;
mod queues;
mod quorum;
mod remote;
pub(crate) mod script;
mod sent;
mod time;
mod tokens;

pub use backend::Redlock;
pub use options::RedlockOptions;
