//! The same locks for programs without async: every call blocks its thread until it is done.
//!
//! The words are those of the async API, and so are the promises. A thread of its own, one for each
//! opened store, renews the locks, however long the threads that hold them work or sleep. It ends when
//! the last [`Locks`], [`Owner`], [`Guard`] and [`Guards`] of the store are gone.
//!
//! ```
//! use std::time::Duration;
//!
//! use leasehold::blocking;
//!
//! fn main() -> leasehold::Result<()> {
//!     let url = "memory:"; // or file:/var/lib/myapp/locks, redis://localhost …
//!     let locks = blocking::open(url)?
//!         .with_ttl(Duration::from_secs(30)) // renewed in the background while the guard lives
//!         .with_wait(Duration::from_secs(3));
//!
//!     let guard = locks.lock("order:42")?; // waits its turn; Err(Timeout) after 3 s
//!     println!("locked with token {}", guard.token()); // hand it to what the lock protects
//!     guard.run(|| { /* check stock, take stock, create the order */ })?;
//!     guard.release()?; // or just drop it
//!     Ok(())
//! }
//! ```
//!
//! # Losing a lock
//!
//! No thread can be stopped from outside. Long work looks at [`Guard::is_held`] now and then, or another
//! thread waits for [`Guard::lost`]; and what the work writes is guarded by the [`Guard::token`].
//!
//! # Beside async code
//!
//! A blocked thread cannot drive other tasks, so calls that block fail with
//! [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside a task of tokio: use
//! [`leasehold::open`](crate::open()) and the async [`leasehold::Locks`](crate::Locks) there, or call them
//! in `tokio::task::spawn_blocking`. (What runs in `tokio::task::unconstrained` is not recognised: there
//! they block.) Whatever only looks, such as [`Guard::is_held`], works everywhere,
//! and everything here may be dropped everywhere.

mod guard;
mod listing;
mod locks;
mod owner;
mod runtime;

use leasehold_core::{Backend, Need, Result};

pub use guard::{Guard, Guards};
pub use listing::Listing;
pub use locks::Locks;
pub use owner::Owner;

/// Opens the store that `url` names; see [`leasehold::open`](crate::open()).
///
/// ```
/// use leasehold::blocking;
///
/// let locks = blocking::open("memory:?ttl=10s&wait=500ms")?;
/// let guard = locks.lock("order:42")?;
/// assert!(locks.try_lock("order:42")?.is_none());
/// # drop(guard);
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// # Errors
/// As [`leasehold::open`](crate::open()); [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside
/// an async task.
pub fn open(url: impl AsRef<str> + Send) -> Result<Locks> {
    Locks::start(crate::open(url))
}

/// Opens the first of the stores at `urls` that promises all of `needs`; see
/// [`leasehold::choose`](crate::choose()).
///
/// ```
/// use leasehold::{Need, blocking};
///
/// let locks = blocking::choose([Need::Order, Need::Push], ["memory:"])?;
/// assert!(locks.require([Need::Order]).is_ok());
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// # Errors
/// As [`leasehold::choose`](crate::choose()); [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported)
/// inside an async task.
pub fn choose(
    needs: impl IntoIterator<Item = Need> + Send,
    urls: impl IntoIterator<Item = impl AsRef<str>> + Send,
) -> Result<Locks> {
    Locks::start(crate::choose(needs, urls))
}

/// The locks of the backend to which `connecting` leads: for options that no URL has, and for backends of
/// your own.
///
/// ```
/// use leasehold::{Memory, blocking};
///
/// // As in `blocking::connect(Redis::connect_with(options))`.
/// let locks = blocking::connect(async { Ok(Memory::new()) })?;
/// locks.lock("order:42")?.release()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// # Errors
/// Whatever `connecting` says; [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) inside an async
/// task.
pub fn connect<B: Backend>(connecting: impl Future<Output = Result<B>>) -> Result<Locks> {
    Locks::start(async { Ok(leasehold_core::Locks::new(connecting.await?)) })
}
