#![doc = include_str!("../README.md")]

mod backend;
mod cleaner;
mod endpoints;
mod error;
mod examine;
mod hold;
mod link;
mod list;
mod names;
mod options;
mod queue;
mod session;
mod value;
mod watch;

pub use backend::Etcd;
pub use options::EtcdOptions;
