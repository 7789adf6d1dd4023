use std::sync::Arc;

use leasehold_core::{Listed, Result};

use super::runtime::Runtime;

/// The locks of a store, one after the other: [`leasehold::Listing`](crate::Listing) for programs without
/// async. Ends after the first failure.
#[derive(Debug)]
pub struct Listing {
    listing: crate::Listing,
    failed: bool,
    runtime: Arc<Runtime>,
}

impl Listing {
    pub(super) fn new(listing: crate::Listing, runtime: &Arc<Runtime>) -> Self {
        Self {
            listing,
            failed: false,
            runtime: runtime.clone(),
        }
    }
}

impl Iterator for Listing {
    type Item = Result<Listed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.runtime.wait(self.listing.next());
        self.failed = next.is_err();
        next.transpose()
    }
}
