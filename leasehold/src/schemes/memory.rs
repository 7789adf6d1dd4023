use std::future::ready;

use leasehold_core::{Backend, Memory};

use super::Scheme;
use crate::setting::invalid;

pub(super) const SCHEME: Scheme = Scheme {
    name: "memory",
    form: "memory:",
    options: &[],
    feature: "",
    open: Some(|address| {
        Box::pin(ready(match address.text.split_once(':') {
            Some((_, "")) => Ok(Box::new(Memory::new()) as Box<dyn Backend>),
            _ => Err(invalid(
                "nothing comes after memory: but options: each such store is one of its own; to share \
                 it clone the Locks",
            )),
        }))
    }),
};
