#![doc = include_str!("../README.md")]

mod backend;
mod client;
mod cluster;
mod connection;
mod erase;
mod error;
mod examine;
mod hold;
mod inbox;
mod list;
mod names;
mod options;
mod queue;
pub mod redlock;
mod replicas;
mod request;
mod script;
mod sentinel;
mod servers;
mod target;
mod value;

pub use backend::Redis;
pub use options::RedisOptions;
#[doc(inline)]
pub use redlock::{Redlock, RedlockOptions};
