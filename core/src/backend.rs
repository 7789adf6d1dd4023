use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use uuid::Uuid;

use crate::{Error, ErrorKind, Examination, Key, Page, Result, Validity};

/// A store that can hold locks.
///
/// Implementors: this trait and [`Hold`] are all there is. What must hold is written, rule by rule,
/// in `CONTRACT.md`; the crate `leasehold-conformance` runs those rules against an implementation.
///
/// A backend knows single claims only. Owners and their re-entry, renewal, retries of a release,
/// several keys at once, limits on the holding time: all of it is done by core, once, for every
/// backend.
#[async_trait]
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// What this backend promises. It may depend on the server, but not change while connected.
    fn guarantees(&self) -> Guarantees;

    /// Grants `claim.key`, waiting at most [`claim.wait`](Claim::wait). `None`: somebody else still
    /// held it then.
    ///
    /// Every single request to the store is answered within [`claim.request_limit`](Claim::request_limit)
    /// or counts as failed. The [`Validity`] of the hold counts from before the granting request was
    /// sent; if the grant was waited for, from the sending of the last answered request that still
    /// saw it waiting.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the first attempt does not reach the store; once queued, a
    /// claim reconnects until its wait is over and then answers `None`. [`ErrorKind::Invalid`] for a
    /// claim that this store can never serve. [`ErrorKind::Lost`] at once if the session in which the
    /// claim waits was taken away.
    ///
    /// # Cancel safety
    /// Dropping the future at any await leaves nothing queued and nothing held (C5). Where the store
    /// is out of reach, what is left there ends within a ttl.
    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>>;

    /// Who holds `key` now, as far as the store knows. `None`: nobody.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store cannot be asked.
    ///
    /// # Cancel safety
    /// Only reads.
    async fn holder(&self, key: &Key) -> Result<Option<Holder>>;

    /// Takes the lock away from whoever holds it, or only from `grant` if one is named. The next
    /// waiter gets it, and the holder's `lost` fires: at once where the store can tell, else at the
    /// next check (C21). Says whether something was taken away.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store cannot be reached; [`ErrorKind::Unsupported`] if it
    /// cannot take a lock away.
    ///
    /// # Cancel safety
    /// If dropped, the lock may or may not have been taken away.
    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool>;

    /// Some of the locks that are held or waited for and whose keys begin with `prefix`, for operators:
    /// the first of them, or those that follow `after`, the [`next`](Page::next) of the page before.
    ///
    /// A page is bounded, and so is what is kept in memory for it. The pages together are no
    /// snapshot: a lock that changes hands meanwhile may be there twice, or not at all, but what is
    /// held or waited for all the time is there (C21). Names are given back as they were claimed. An
    /// entry that cannot be read, or is somebody else's, is shown as far as it is known, and fails no
    /// other.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the store cannot list its locks, which is what this does unless
    /// it is written anew, or not by a prefix; [`ErrorKind::Unavailable`] if it cannot be asked;
    /// [`ErrorKind::Other`], naming the right, if one is missing that locks do not need.
    ///
    /// # Cancel safety
    /// Only reads.
    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        let _ = (prefix, after);
        Err(Error::new(
            ErrorKind::Unsupported,
            "this store does not list its locks: ask for each by its key",
        ))
    }

    /// Asks the store about itself, for operators: who it is, how it is set up, and what of that
    /// endangers locks of this `ttl`. What cannot be asked (a right is missing, a command is turned
    /// off) is a finding, not an error.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if the store cannot be asked at all.
    ///
    /// # Cancel safety
    /// Leaves nothing but what ends within a ttl.
    async fn examine(&self, ttl: Duration) -> Result<Examination> {
        let _ = ttl;
        Ok(Examination::new())
    }

    /// Removes all that there is under the backend's own prefix, tokens too, whoever it belongs to. For
    /// tests, which use a prefix of their own, and for nothing else; only [`close`](Self::close) follows.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the backend cannot; [`ErrorKind::Invalid`] if the prefix is empty,
    /// so that it would be everything on the server; [`ErrorKind::Unavailable`] if others are still
    /// writing there.
    ///
    /// # Cancel safety
    /// If dropped, some of it may be left.
    async fn erase(&self) -> Result<()> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "this backend cannot remove what it has left in the store",
        ))
    }

    /// Gives back what the backend itself keeps: sessions, connections, background tasks. Called
    /// once, after every hold was released.
    ///
    /// # Errors
    /// Whatever could not be given back; the backend is closed all the same.
    ///
    /// # Cancel safety
    /// If dropped, what is left ends by itself within a ttl.
    async fn close(&self) -> Result<()> {
        Ok(())
    }
}

/// The backend's side of a granted lock.
///
/// Dropping it abandons the lock: the store lets go by itself within the ttl (C4), or the backend's
/// own cleaner frees it earlier.
#[async_trait]
pub trait Hold: fmt::Debug + Send + 'static {
    /// The fencing token of this grant (C7).
    fn token(&self) -> Token;

    /// How long this grant may be believed.
    fn validity(&self) -> &Validity;

    /// Lease: extends the lock and this hold's validity by the claim's ttl. Session: checks. Core
    /// calls it only for a validity that has a term of its own, limits the time it may take, and
    /// tries again until the validity ends.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the store says that it is no longer ours. Anything else leaves it open.
    ///
    /// # Cancel safety
    /// May be dropped at any await; the request may still be on the wire when the release goes out,
    /// so both name the grant, never the key or owner alone.
    async fn renew(&mut self) -> Result<()>;

    /// Frees the lock. Core limits the time it may take and calls it again after a failure, also
    /// after one that it dropped half-way.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the store does not have this grant (any more). Core takes that for
    /// success when it is the answer to a retry of an unanswered attempt.
    ///
    /// # Cancel safety
    /// May be dropped at any await and called again (C13).
    async fn release(&mut self) -> Result<()>;
}

/// One request for a lock.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Claim {
    /// Unique for each claim. A backend knows a hold by this or by its token, never by its owner:
    /// else an owner whose lock was lost and granted again would free the new one with the old guard.
    pub id: Uuid,
    /// What is to be locked.
    pub key: Key,
    /// Who asks. Shown to operators; never decides anything in a backend.
    pub owner: OwnerId,
    /// How long a grant lasts unrenewed. Whole milliseconds, within [`Claim::TTL_RANGE`].
    pub ttl: Duration,
    /// How long to wait at most. `Some(ZERO)`: never wait, leave no place in a queue. `None`: no limit.
    pub wait: Option<Duration>,
    /// Never renewed once granted: it ends by itself after `ttl`.
    pub fixed: bool,
    /// The user's own words about the holder, for operators: at most [`Claim::MAX_LABEL_LEN`] bytes.
    pub label: Option<Arc<str>>,
    /// How long a single request to the store may take.
    pub request_limit: Duration,
}

impl Claim {
    /// The ttls that are accepted: below a few milliseconds a lease ends before its grant arrives;
    /// above a year it is no lease.
    pub const TTL_RANGE: std::ops::RangeInclusive<Duration> =
        Duration::from_millis(10)..=Duration::from_secs(366 * 24 * 60 * 60);

    /// The longest label, in bytes of UTF-8: stores keep it beside the lock.
    pub const MAX_LABEL_LEN: usize = 1024;

    /// A claim of `key` with a new id and an owner of its own, for `ttl` rounded down to whole
    /// milliseconds; it does not wait, and its request limit is the default for the ttl.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if `ttl` lies outside [`Claim::TTL_RANGE`] (C14).
    pub fn new(key: Key, ttl: Duration) -> Result<Self> {
        if !Self::TTL_RANGE.contains(&ttl) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "a ttl of {ttl:?} is not possible: give one from {:?} to a year",
                    Self::TTL_RANGE.start()
                ),
            ));
        }
        let id = Uuid::new_v4();
        Ok(Self {
            id,
            key,
            owner: OwnerId::from_uuid(id),
            ttl: Duration::from_secs(ttl.as_secs())
                + Duration::from_millis(ttl.subsec_millis().into()),
            wait: Some(Duration::ZERO),
            fixed: false,
            label: None,
            request_limit: Self::default_request_limit(ttl),
        })
    }

    /// A third of the ttl, so that a renewal that is not answered leaves time for another; at most
    /// 5 s.
    pub(crate) fn default_request_limit(ttl: Duration) -> Duration {
        (ttl / 3).min(Duration::from_secs(5))
    }
}

/// Who holds a lock: the host, the process and a unique id, as in `web-1:4711:0b5c…`.
///
/// A new one is made for every [`Locks::owner`](crate::Locks::owner) and for every lock that is
/// taken without one. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct OwnerId {
    id: Uuid,
}

impl OwnerId {
    /// A new owner in this process.
    #[must_use]
    pub fn new() -> Self {
        Self::from_uuid(Uuid::new_v4())
    }

    /// The unique part.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.id
    }

    pub(crate) fn from_uuid(id: Uuid) -> Self {
        Self { id }
    }
}

impl Default for OwnerId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&PROCESS)?;
        f.write_str(
            self.id
                .hyphenated()
                .encode_lower(&mut Uuid::encode_buffer()),
        )
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What the names of all owners in this process begin with; made once, since each claim carries one.
static PROCESS: LazyLock<String> = LazyLock::new(|| format!("{}:{}:", host(), std::process::id()));

#[cfg(unix)]
fn host() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    if name.is_empty() {
        "unknown".into()
    } else {
        name
    }
}

#[cfg(not(unix))]
fn host() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "unknown".into())
}

/// Fencing token: rises with every grant of a key (C7). Hand it to the resource that the lock
/// protects, and let that refuse a token lower than the highest it has seen: then a holder that was
/// stopped past its lease can do no harm (F9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(u64);

impl Token {
    /// A token with this value.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value, to be stored with what the lock protects.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Who holds a lock, as far as the store knows: what it does not know is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Names this very grant, for [`Backend::evict`]; its form is the backend's own.
    pub grant: String,
    /// The [`OwnerId`], as text; or whatever a foreign program wrote there.
    pub owner: Option<String>,
    /// The user's own words about the holder.
    pub label: Option<String>,
    /// The fencing token of the grant.
    pub token: Option<Token>,
    /// When it was granted, on the store's clock.
    pub since: Option<SystemTime>,
    /// How long the store keeps it if it is not renewed.
    pub remaining: Option<Duration>,
    /// How many other locks end with this one when it is evicted.
    pub also_ends: u64,
}

impl Holder {
    /// A holder of which no more is known than its grant.
    #[must_use]
    pub fn new(grant: impl Into<String>) -> Self {
        Self {
            grant: grant.into(),
            owner: None,
            label: None,
            token: None,
            since: None,
            remaining: None,
            also_ends: 0,
        }
    }
}

/// What a backend promises. Each field is there because rules test it; a higher claim adds rules:
/// `CONTRACT.md` has the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Guarantees {
    /// Which failures of servers it survives without giving one lock to two.
    pub consistency: Consistency,
    /// How many of its servers may be lost at the same time: what is held stays held, or is known to
    /// be lost in time, and locks are granted on (F6). 0 also where it is not known. Counted when the
    /// client connects.
    pub node_losses: u32,
    /// How the store lets go of a lock whose holder is gone.
    pub expiry: Expiry,
    /// The shortest ttl after which the store really lets go by itself. Shorter ones are accepted,
    /// and end on time for a living client.
    pub shortest_ttl: Duration,
    /// In which order waiters are served.
    pub fairness: Fairness,
    /// How a waiter learns that it is its turn.
    pub wakeup: Wakeup,
    /// How long tokens keep rising.
    pub tokens: Tokens,
}

impl Guarantees {
    /// The least that a backend can promise, with leases of `shortest_ttl` or longer: one server, no
    /// order, polling, tokens until its data is lost. Raise the fields from there.
    #[must_use]
    pub const fn new(expiry: Expiry, shortest_ttl: Duration) -> Self {
        Self {
            consistency: Consistency::SingleNode,
            node_losses: 0,
            expiry,
            shortest_ttl,
            fairness: Fairness::None,
            wakeup: Wakeup::Poll,
            tokens: Tokens::UntilDataLoss,
        }
    }
}

/// Which failures of servers a backend survives without giving one lock to two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Consistency {
    /// One server decides. Fail over to a replica, or lose its data, and two may hold.
    SingleNode,
    /// A majority of independent servers decides.
    Quorum,
    /// A consensus protocol decides.
    Linearizable,
}

/// How a store lets go of a lock whose holder is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expiry {
    /// Each lock has a time limit of its own.
    Lease,
    /// All locks of a session end with it.
    Session,
    /// Only the end of the holder's process frees it; one that is merely stopped keeps its lock.
    Process,
}

/// In which order waiters are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fairness {
    /// No order is promised.
    None,
    /// First come, first served (C8).
    Fifo,
}

/// How a waiter learns that it is its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Wakeup {
    /// It asks again and again.
    Poll,
    /// It is told (C20).
    Push,
}

/// How long fencing tokens keep rising.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Tokens {
    /// As long as the store keeps its data.
    UntilDataLoss,
    /// Always, also after the crash or restart of a server.
    Durable,
}

macro_rules! forward {
    ($($pointer:ident),*) => {$(
        #[async_trait]
        impl<B: Backend + ?Sized> Backend for $pointer<B> {
            fn guarantees(&self) -> Guarantees {
                (**self).guarantees()
            }

            async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
                (**self).acquire(claim).await
            }

            async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
                (**self).holder(key).await
            }

            async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
                (**self).evict(key, grant).await
            }

            async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
                (**self).list(prefix, after).await
            }

            async fn examine(&self, ttl: Duration) -> Result<Examination> {
                (**self).examine(ttl).await
            }

            async fn erase(&self) -> Result<()> {
                (**self).erase().await
            }

            async fn close(&self) -> Result<()> {
                (**self).close().await
            }
        }
    )*};
}

forward!(Arc, Box);
