use leasehold_core::{Error, ErrorKind};
use zookeeper_client::Error as Client;

/// What a failure of the client or an error answer of the servers means to the caller. `servers` are
/// the addresses to show.
pub(crate) fn map(servers: &str, error: &Client) -> Error {
    let (kind, advice) = match error {
        Client::NoAuth => (
            ErrorKind::Other,
            "a right is missing: the credentials must be those of the nodes' creator, or the prefix \
             must be one on which they may create, read and delete",
        ),
        Client::AuthFailed => (
            ErrorKind::Other,
            "signing in was refused, check the user and the password",
        ),
        Client::InvalidAcl => (
            ErrorKind::Invalid,
            "the servers know no such user: with_creator_only needs credentials that they accept",
        ),
        Client::Unimplemented => (
            ErrorKind::Unsupported,
            "ZooKeeper 3.5 or newer is needed, one with container nodes",
        ),
        Client::QuotaExceeded => (
            ErrorKind::Other,
            "a quota on the prefix is used up: raise it, or take another prefix",
        ),
        Client::NoChildrenForEphemerals => (
            ErrorKind::Invalid,
            "the prefix lies below an ephemeral node: take another prefix",
        ),
        Client::BadArguments(_) => (
            ErrorKind::Invalid,
            "the client refuses the request: check the addresses and the prefix",
        ),
        error if is_unanswered(error) || is_session_over(error) => {
            (ErrorKind::Unavailable, "no answer")
        }
        _ => (ErrorKind::Other, "the request failed"),
    };
    Error::new(kind, format!("ZooKeeper at {servers}: {advice} ({error})"))
}

/// As [`map`], for the first request of all; `hint` is what to look at where it is not answered.
pub(crate) fn map_opening(servers: &str, hint: &str, error: &Client) -> Error {
    if !is_unanswered(error) && !is_session_over(error) {
        return map(servers, error);
    }
    Error::new(
        ErrorKind::Unavailable,
        format!("ZooKeeper at {servers}: no answer ({error}); {hint}"),
    )
}

/// One side does not accept the other's certificate, or the like; `why` says what to do.
pub(crate) fn no_tls(servers: &str, why: &str) -> Error {
    Error::new(ErrorKind::Other, format!("ZooKeeper at {servers}: {why}"))
}

/// Whether the request may have been carried out, or may be if it is sent again.
pub(crate) fn is_unanswered(error: &Client) -> bool {
    matches!(
        error,
        Client::ConnectionLoss
            | Client::Timeout
            | Client::NoHosts
            | Client::SessionMoved
            | Client::NotReadOnly
            | Client::Throttled
            | Client::UnmarshalError { .. }
            // The client's ways to say that it broke, or that its task is gone.
            | Client::UnexpectedError(_)
            | Client::RuntimeInconsistent
            | Client::Custom(_)
    )
}

/// Whether the session is over, and all of its nodes with it.
pub(crate) fn is_session_over(error: &Client) -> bool {
    matches!(error, Client::SessionExpired | Client::ClientClosed)
}

/// The servers do not have this grant (any more).
pub(crate) fn lost() -> Error {
    Error::new(
        ErrorKind::Lost,
        "the lock's node is gone: its session ended, or it was taken away",
    )
}

/// After `close`.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "these locks were closed")
}

/// Where there is no runtime.
pub(crate) fn no_runtime() -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "called outside of a tokio runtime: use it within one",
    )
}
