#![doc = include_str!("../README.md")]

mod backend;
mod call;
mod erase;
mod error;
mod examine;
mod hold;
mod list;
mod names;
mod options;
mod place;
mod pulse;
mod queue;
mod record;
mod session;
mod sessions;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;

pub use backend::ZooKeeper;
pub use options::ZooKeeperOptions;
