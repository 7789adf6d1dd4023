//! The command as its users meet it: real processes, real stores, a real terminal.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod docs;
mod lost;
mod operators;
mod run;
mod signals;
mod support;
mod terminal;
