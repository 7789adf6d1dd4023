#![doc = include_str!("../README.md")]

mod backend;
mod call;
mod cleaner;
mod endpoints;
mod error;
mod examine;
mod hold;
mod link;
mod list;
mod names;
mod options;
mod places;
mod queue;
mod session;
mod together;
mod value;
mod watch;

pub use backend::Etcd;
pub use options::EtcdOptions;
