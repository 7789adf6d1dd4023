use std::time::Duration;

use leasehold_core::{Error, ErrorKind};
use redis::{RedisError, ServerErrorKind};

/// What a failure of the client or an error answer of the server means to the caller. `server` is
/// the address to show.
///
/// Errors that a script met come as plain text, differently in each version of the server, with the
/// code at the beginning, in the middle or not at all: so it is looked for in the text.
pub(crate) fn map(server: &str, error: &RedisError) -> Error {
    let (kind, advice) = meaning(error);
    let what = describe(error);
    let advice = if advice.is_empty() {
        String::new()
    } else {
        format!(": {advice}")
    };
    Error::new(kind, format!("Redis at {server}{advice} ({what})"))
}

/// The server did not answer in time.
pub(crate) fn silent(server: &str, limit: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("Redis at {server} did not answer within {limit:?}"),
    )
}

/// The server answered something that our scripts do not answer.
pub(crate) fn unexpected(server: &str) -> Error {
    Error::new(
        ErrorKind::Other,
        format!(
            "Redis at {server} answered what was not expected; is it a proxy that changes scripts?"
        ),
    )
}

/// The store does not have this grant (any more).
pub(crate) fn lost(key: &str) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!("the lock {key:?} is no longer held by this grant: it ended or was taken away"),
    )
}

/// After `close`.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "these locks were closed")
}

/// Whether the server says that the user lacks a right.
pub(crate) fn is_right_missing(said: &str) -> bool {
    [
        "NOPERM",
        "no permissions",
        "The user executing the script",
        "ACL failure",
    ]
    .iter()
    .any(|sign| said.contains(sign))
}

/// The user lacks rights, which these ACL rules give.
pub(crate) fn rights_missing(server: &str, rules: &str) -> Error {
    Error::new(
        ErrorKind::Other,
        format!("Redis at {server}: rights are missing, add them with ACL SETUSER <user> {rules}"),
    )
}

/// Whether `error` says that a key holds a value of another type: somebody else's data.
pub(crate) fn is_wrong_type(error: &RedisError) -> bool {
    describe(error).contains("WRONGTYPE")
}

/// Whether `error` says that the server is a replica, or has just become one.
pub(crate) fn is_read_only(error: &RedisError) -> bool {
    let text = describe(error);
    ["READONLY", "UNBLOCKED", WAIT_ON_REPLICA]
        .iter()
        .any(|sign| text.contains(sign))
}

/// So few replicas have a lock.
pub(crate) fn unconfirmed(server: &str, confirmed: usize, wanted: usize) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "Redis at {server}: {confirmed} of the {wanted} replicas that must have this lock \
             confirmed it in time; see to them, or ask for fewer"
        ),
    )
}

/// The connection was given up while the answer was on its way: another server may be asked now, which
/// knows nothing of it.
pub(crate) fn superseded(server: &str) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "Redis at {server}: its answer came when the connection was given up, and is not proven"
        ),
    )
}

fn meaning(error: &RedisError) -> (ErrorKind, &'static str) {
    use redis::ErrorKind as Client;
    if error.is_io_error() || error.is_connection_dropped() || error.is_timeout() {
        let text = describe(error);
        // Which no repetition mends.
        let refused = CERTIFICATES
            .iter()
            .find(|(words, _)| words.iter().any(|word| text.contains(word)));
        return match refused {
            Some((_, advice)) => (ErrorKind::Other, *advice),
            None => (ErrorKind::Unavailable, "no connection"),
        };
    }
    match error.kind() {
        Client::RESP3NotSupported => return (ErrorKind::Unsupported, TOO_OLD),
        Client::AuthenticationFailed => return (ErrorKind::Other, SIGN_IN),
        Client::Server(ServerErrorKind::NoPerm) => return (ErrorKind::Other, NO_RIGHT),
        _ => {}
    }
    let text = describe(error);
    let found = ANSWERS
        .iter()
        .find(|(words, ..)| words.iter().any(|word| text.contains(word)));
    match found {
        Some((_, kind, advice)) => (*kind, *advice),
        None => (ErrorKind::Other, "the request failed"),
    }
}

const WAIT_ON_REPLICA: &str = "WAIT cannot be used with replica";
const TOO_OLD: &str = "Redis 6.0 or newer is needed, one that speaks RESP3";
const SIGN_IN: &str = "signing in was refused, check the username and the password";
const NO_RIGHT: &str = "a right is missing, the README of leasehold-redis lists the ACL rules";

/// What TLS says of certificates: ours of the server's, and the server of ours.
const CERTIFICATES: &[(&[&str], &str)] = &[
    (
        &["invalid peer certificate"],
        "its certificate is not trusted, name the authority that signed it with \
         with_certificate_authority",
    ),
    (
        &[
            "CertificateRequired",
            "BadCertificate",
            "CertificateUnknown",
            "CertificateExpired",
            "CertificateRevoked",
            "UnsupportedCertificate",
            "UnknownCA",
            "AccessDenied",
        ],
        "it does not accept our certificate, give one that its authority signed with \
         with_client_certificate",
    ),
];

/// What the server's words mean, the first that occurs wins.
const ANSWERS: &[(&[&str], ErrorKind, &str)] = &[
    (
        &["WRONGTYPE"],
        ErrorKind::Invalid,
        "the key holds other data, which is left alone: use another key or another prefix",
    ),
    (
        &["OOM "],
        ErrorKind::Unavailable,
        "its memory is full: raise maxmemory, no new lock can be stored",
    ),
    (
        &["READONLY", "UNBLOCKED", WAIT_ON_REPLICA],
        ErrorKind::Unavailable,
        "it is a read-only replica: connect to the primary, or by its sentinels",
    ),
    (
        &["LOADING"],
        ErrorKind::Unavailable,
        "it is loading its data",
    ),
    (
        &["MISCONF"],
        ErrorKind::Unavailable,
        "it cannot write to its disk and takes no changes",
    ),
    (
        &["NOREPLICAS"],
        ErrorKind::Unavailable,
        "it has fewer replicas than min-replicas-to-write",
    ),
    (
        &["BUSY ", "MASTERDOWN"],
        ErrorKind::Unavailable,
        "it cannot serve just now",
    ),
    (
        &["CLUSTERDOWN", "cluster is down"],
        ErrorKind::Unavailable,
        "the cluster is down, or no node of it serves the slot of this lock: see CLUSTER INFO",
    ),
    (
        &["TRYAGAIN", "non local key", "MOVED", "ASK "],
        ErrorKind::Unavailable,
        "the slot of this lock is moving from one node of the cluster to another",
    ),
    (
        &["UNKILLABLE", "max number of clients", "NOSCRIPT"],
        ErrorKind::Unavailable,
        "it cannot serve just now",
    ),
    (
        &["CROSSSLOT", "different slots", "hash to the same slot"],
        ErrorKind::Unsupported,
        "it is a node of a cluster: connect with redis+cluster://host:port, or rediss+cluster:// for TLS",
    ),
    (
        &["cluster support disabled"],
        ErrorKind::Unsupported,
        "it is a single server and no node of a cluster: connect with redis://host:port",
    ),
    (
        &["non deterministic"],
        ErrorKind::Unsupported,
        "set lua-replicate-commands to yes",
    ),
    (
        &[
            "NOPROTO",
            "unknown command `HELLO`",
            "unknown command 'HELLO'",
        ],
        ErrorKind::Unsupported,
        TOO_OLD,
    ),
    (
        &["NOAUTH", "WRONGPASS", "AUTH failed"],
        ErrorKind::Other,
        SIGN_IN,
    ),
    (
        &["NOPERM", "The user executing the script", "ACL failure"],
        ErrorKind::Other,
        NO_RIGHT,
    ),
    (
        &["not an integer", "increment or decrement would overflow"],
        ErrorKind::Other,
        "the token counter, a key of the prefix that ends in leasehold:token, holds something else",
    ),
];

/// The error in the server's or the system's own words.
pub(crate) fn describe(error: &RedisError) -> String {
    match (error.code(), error.detail()) {
        (Some(code), Some(detail)) => format!("{code} {detail}"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_error(text: &str) -> RedisError {
        let (code, detail) = text.split_once(' ').unwrap();
        redis::make_extension_error(code.into(), Some(detail.into()))
    }

    #[test]
    fn errors_inside_scripts_are_known_by_their_text() {
        let old = "ERR Error running script (call to f_1a): @user_script:9: WRONGTYPE Operation \
                   against a key holding the wrong kind of value";
        let new = "OOM command not allowed when used memory > 'maxmemory'. script: 1a, on @user_script:9.";
        assert_eq!(map("h:1", &server_error(old)).kind(), ErrorKind::Invalid);
        assert!(is_wrong_type(&server_error(old)));
        assert_eq!(
            map("h:1", &server_error(new)).kind(),
            ErrorKind::Unavailable
        );
        let else_ = map("h:1", &server_error("ERR whatever happened"));
        assert_eq!(else_.kind(), ErrorKind::Other);
        assert!(else_.to_string().contains("whatever happened"));
    }

    #[test]
    fn passing_states_of_the_server_are_transient() {
        for text in [
            "LOADING Redis is loading the dataset in memory",
            "BUSY Redis is busy running a script.",
            "READONLY You can't write against a read only replica.",
            "MISCONF Redis is configured to save RDB snapshots",
            "NOREPLICAS Not enough good replicas to write.",
            "MASTERDOWN Link with MASTER is down",
            "TRYAGAIN Multiple keys request during rehashing of slot",
            "CLUSTERDOWN The cluster is down",
        ] {
            assert!(map("h:1", &server_error(text)).is_transient(), "{text}");
        }
    }
}
