#![doc = include_str!("../README.md")]

mod backend;
mod client;
mod connection;
mod error;
mod examine;
mod hold;
mod holder;
mod key_form;
mod list;
mod options;
mod peer;
mod session;
mod sessions;
mod sql;
mod transaction;
mod turn;

pub use backend::Postgres;
pub use key_form::KeyForm;
pub use options::PostgresOptions;
