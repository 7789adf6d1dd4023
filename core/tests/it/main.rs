//! What core does for every backend, on a memory store whose answers fail, get lost or never come.

#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod close;
mod input;
mod owner;
mod release;
mod renewal;
mod support;
