#![doc = include_str!("../README.md")]

mod backend;
mod error;
mod examine;
mod hold;
mod list;
mod lock_file;
mod look;
mod name;
mod record;
mod watch;

pub use backend::Folder;
