//! The protocol on nodes in memory: see `tests`.
//!
//! Everything runs on one thread and one virtual clock, from one seed: clients are futures, messages
//! are events. So a run takes a fraction of a millisecond, and a seed brings the same run again.

mod node;
mod scripts;
mod tests;
mod world;
