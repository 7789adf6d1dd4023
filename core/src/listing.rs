use std::fmt;
use std::vec;

use crate::{Holder, Key, Locks, Result};

/// A lock that is held or waited for, as far as the store knows: what it does not know is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// What is locked. `None` where the store does not know: PostgreSQL has hashes of names, and a
    /// foreign program may lock what is no key.
    pub key: Option<Key>,
    /// What the store itself calls it, for the store's own tools.
    pub raw: String,
    /// Who holds it. `None`: nobody just now, or we may not look.
    pub holder: Option<Holder>,
    /// How many wait for it.
    pub waiting: Option<u64>,
}

impl Listed {
    /// A lock of which no more is known than what the store calls it.
    #[must_use]
    pub fn new(key: Option<Key>, raw: impl Into<String>) -> Self {
        Self {
            key,
            raw: raw.into(),
            holder: None,
            waiting: None,
        }
    }
}

/// Some of the locks of a store: what [`Backend::list`](crate::Backend::list) answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Page {
    /// The locks, in no order; there may be none although more follow.
    pub locks: Vec<Listed>,
    /// Where the next page begins, in the backend's own words; `None`: this was the last.
    pub next: Option<Vec<u8>>,
}

impl Page {
    /// A page of these locks.
    #[must_use]
    pub fn new(locks: Vec<Listed>, next: Option<Vec<u8>>) -> Self {
        Self { locks, next }
    }
}

/// The locks of a store, one after the other: see [`Locks::list`]. No more of them are kept in memory
/// than the store answers at a time.
#[derive(Clone)]
pub struct Listing {
    locks: Locks,
    prefix: String,
    page: vec::IntoIter<Listed>,
    rest: Rest,
}

/// What has not been asked for yet.
#[derive(Debug, Clone)]
enum Rest {
    All,
    After(Vec<u8>),
    Nothing,
}

impl Listing {
    pub(crate) fn new(locks: Locks, prefix: String) -> Self {
        Self {
            locks,
            prefix,
            page: Vec::new().into_iter(),
            rest: Rest::All,
        }
    }

    /// The next lock; `None`: that was all.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the store does not answer; a
    ///   later call asks again from there.
    /// - [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) where the store cannot list its
    ///   locks, or not by their names, or outside of a tokio runtime.
    /// - [`ErrorKind::Other`](crate::ErrorKind::Other) if a right is missing that locks do not need;
    ///   it says which.
    /// - [`ErrorKind::Closed`](crate::ErrorKind::Closed) after [`Locks::close`].
    ///
    /// # Cancel safety
    /// Only reads; no lock is left out if dropped.
    pub async fn next(&mut self) -> Result<Option<Listed>> {
        loop {
            if let Some(listed) = self.page.next() {
                return Ok(Some(listed));
            }
            let after = match &self.rest {
                Rest::All => None,
                Rest::After(last) => Some(last.as_slice()),
                Rest::Nothing => return Ok(None),
            };
            let page = self.locks.page(&self.prefix, after).await?;
            self.page = page.locks.into_iter();
            self.rest = page.next.map_or(Rest::Nothing, Rest::After);
        }
    }
}

impl fmt::Debug for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listing")
            .field("locks", &self.locks)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}
