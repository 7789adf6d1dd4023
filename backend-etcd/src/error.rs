use std::error::Error as _;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind};

/// A request that failed: what to tell the caller, and what may have come of it.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) error: Error,
    pub(crate) cause: Cause,
    /// The last answer was a refusal, whatever an earlier attempt may have done.
    pub(crate) refused: bool,
}

impl Failure {
    pub(crate) fn unanswered(error: Error) -> Self {
        Self {
            error,
            cause: Cause::Unanswered,
            refused: false,
        }
    }
}

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The server answered: nothing was done, and asking again would not help.
    Refused,
    /// The server answered: nothing was done, but it may do it soon.
    NotNow,
    /// The token is older than the latest change of rights: nothing was done.
    OldToken,
    /// No connection: nothing was done.
    NotReached,
    /// It was sent and not answered: it may have been done, or be done later.
    Unanswered,
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// What a failure of the client or an error answer of the server means. `server` is the host and port
/// to show.
pub(crate) fn map(server: &str, error: &etcd_client::Error) -> Failure {
    let (cause, kind, advice) = meaning(error);
    let advice = if advice.is_empty() {
        String::new()
    } else {
        format!(": {advice}")
    };
    Failure {
        error: Error::new(kind, format!("etcd at {server}{advice} ({})", text(error))),
        cause,
        refused: cause == Cause::Refused,
    }
}

/// The server did not answer in time.
pub(crate) fn silent(server: &str, limit: Duration) -> Failure {
    Failure::unanswered(Error::new(
        ErrorKind::Unavailable,
        format!("etcd at {server} did not answer within {limit:?}"),
    ))
}

/// The runtime has ended with a request on the way.
pub(crate) fn ended() -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "the tokio runtime that carried a request to etcd has ended",
    )
}

/// The store does not have this grant or this place (any more).
pub(crate) fn lost(key: &str) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!("the place {key:?} is no longer there: its lease ended or it was taken away"),
    )
}

/// The server answered what it should not.
pub(crate) fn unexpected(what: &str) -> Error {
    Error::new(
        ErrorKind::Other,
        format!("etcd answered what was not expected: {what}"),
    )
}

fn meaning(error: &etcd_client::Error) -> (Cause, ErrorKind, &'static str) {
    use etcd_client::Error as Client;
    match error {
        Client::GRpcStatus(status) => of_status(i32::from(status.code()), &text(error)),
        Client::InvalidArgs(_) | Client::InvalidUri(_) => (
            Cause::Refused,
            ErrorKind::Invalid,
            "the endpoint cannot be used",
        ),
        // It comes from the making of a connection, before anything is sent.
        Client::TransportError(_) => (
            Cause::Refused,
            ErrorKind::Invalid,
            "the certificates cannot be used",
        ),
        Client::InvalidMetadataValue(_) => (
            Cause::Refused,
            ErrorKind::Other,
            "the server gave a token that cannot be sent back",
        ),
        _ => (Cause::Unanswered, ErrorKind::Unavailable, ""),
    }
}

/// The texts are etcd's own (`rpctypes`): several errors share a code, and some lose it on the way
/// through a proxy or another member.
fn of_status(code: i32, text: &str) -> (Cause, ErrorKind, &'static str) {
    const PERMISSION_DENIED: i32 = 7;
    const UNIMPLEMENTED: i32 = 12;
    const UNAUTHENTICATED: i32 = 16;
    let says = |what: &str| text.contains(what);
    if says("requested lease not found") {
        (Cause::Refused, ErrorKind::Lost, "the lease has ended")
    } else if says("no leader") || says("too many requests") || says("not supported for learner") {
        (Cause::NotNow, ErrorKind::Unavailable, "")
    } else if says("revision of auth store is old") {
        (Cause::OldToken, ErrorKind::Unavailable, "")
    } else if says("database space exceeded") {
        (
            Cause::Refused,
            ErrorKind::Other,
            "its space is used up: compact, defragment and disarm the alarm, and turn on automatic compaction",
        )
    } else if code == PERMISSION_DENIED || says("permission denied") {
        (
            Cause::Refused,
            ErrorKind::Other,
            "the user may not use these keys: grant its role the prefix, as in \
             etcdctl role grant-permission ROLE readwrite locks/ --prefix",
        )
    } else if says("invalid user ID or password") {
        (
            Cause::Refused,
            ErrorKind::Other,
            "user name or password is wrong",
        )
    } else if says("user name is empty") {
        (
            Cause::Refused,
            ErrorKind::Other,
            "it wants to know who asks: give a user name and password",
        )
    } else if says("authentication is not enabled") {
        (
            Cause::Refused,
            ErrorKind::Invalid,
            "it has no users: leave user name and password out, or turn authentication on",
        )
    } else if code == UNAUTHENTICATED || says("invalid auth token") {
        (
            Cause::Refused,
            ErrorKind::Other,
            "it does not accept the token",
        )
    } else if code == UNIMPLEMENTED {
        (
            Cause::Refused,
            ErrorKind::Unsupported,
            "it does not know this request: is it etcd 3.4 or newer?",
        )
    } else if says("invalid peer certificate") {
        (
            Cause::NotReached,
            ErrorKind::Other,
            "its certificate is not accepted: name the authority that signed it \
             (with_certificate_authority), and the host as it is named there",
        )
    } else if says("received fatal alert") {
        (
            Cause::NotReached,
            ErrorKind::Other,
            "it does not accept who we are: show a certificate that its authority signed \
             (with_client_certificate)",
        )
    } else if says("received corrupt message") {
        (
            Cause::NotReached,
            ErrorKind::Other,
            "it does not speak TLS: begin the endpoint with http://, or with etcd:// in a URL",
        )
    } else if says("request timed out") || says("leader changed") || says("server stopped") {
        (Cause::Unanswered, ErrorKind::Unavailable, "")
    } else if says("etcdserver: ") || says("larger than max") {
        (Cause::Refused, ErrorKind::Other, "")
    } else if says("connect error") || says("dns error") || says("worker closed") {
        (Cause::NotReached, ErrorKind::Unavailable, "no connection")
    } else {
        (Cause::Unanswered, ErrorKind::Unavailable, "no connection")
    }
}

/// What happened, with what caused it: the client's own words for a failed connection are just
/// "transport error". Credentials never travel in these.
fn text(error: &etcd_client::Error) -> String {
    use etcd_client::Error as Client;
    let (mut text, mut source) = match error {
        Client::GRpcStatus(status) => (status.message().to_owned(), status.source()),
        Client::TransportError(error) => (error.to_string(), error.source()),
        error => (error.to_string(), None),
    };
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}
