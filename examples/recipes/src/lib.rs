//! What the programs share.

use leasehold::{Locks, Result};

/// The locks of the store at `LEASEHOLD_URL`, else of this process alone.
///
/// # Errors
/// As [`leasehold::open`].
pub async fn locks() -> Result<Locks> {
    let url = std::env::var("LEASEHOLD_URL").ok();
    let url = url.filter(|url| !url.is_empty());
    leasehold::open(url.as_deref().unwrap_or("memory:")).await
}
