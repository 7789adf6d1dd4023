use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// The result of everything that can fail here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong: a [kind](ErrorKind) to act on and a message to read.
///
/// One pointer in size and cheap to clone, since several calls that travelled in one request may
/// share one failure. Messages never contain credentials: backends build them from the host and the
/// server's answer, never from a URL.
#[derive(Clone, thiserror::Error)]
#[error(transparent)]
pub struct Error(Arc<Inner>);

#[derive(Debug, thiserror::Error)]
#[error("{message}")]
struct Inner {
    kind: ErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What a failure means to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The store did not answer, or answered that it cannot serve just now. The same call may
    /// succeed later. A time-out of a request is this, never [`Timeout`](Self::Timeout).
    Unavailable,
    /// The caller's own `wait` ran out while somebody else held the lock.
    Timeout,
    /// The lock is no longer ours, though we did not release it.
    Lost,
    /// The store, its version or the place of the call cannot do this: a server that is too old, a
    /// call outside a tokio runtime.
    Unsupported,
    /// The call itself is wrong: an empty key, a ttl of zero, a malformed URL.
    Invalid,
    /// The [`Locks`](crate::Locks) was closed.
    Closed,
    /// Anything else, a missing right among it; the message says what to do.
    Other,
}

impl Error {
    /// Makes an error of `kind`; `message` says what happened and what to do about it.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self::build(kind, message.into(), None)
    }

    /// Makes an error of `kind` that was caused by `source`.
    ///
    /// The source is shown by error reporters: it must not contain credentials.
    #[must_use]
    pub fn with_source(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::build(kind, message.into(), Some(source.into()))
    }

    /// What the failure means to the caller.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later without anybody changing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.0.kind.is_transient()
    }

    fn build(
        kind: ErrorKind,
        message: String,
        source: Option<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self(Arc::new(Inner {
            kind,
            message,
            source,
        }))
    }
}

impl ErrorKind {
    /// Whether the same call may succeed later without anybody changing anything.
    #[must_use]
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Unavailable)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Error");
        shown.field("kind", &self.0.kind);
        shown.field("message", &self.0.message);
        if let Some(source) = &self.0.source {
            shown.field("source", source);
        }
        shown.finish()
    }
}
