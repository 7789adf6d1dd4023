//! Redis Cluster: which node a lock is on, and requests that find it.

mod router;
mod slot;
mod topology;

pub(crate) use router::Cluster;
pub(crate) use slot::{slot, tag};
pub(crate) use topology::Node;
