use leasehold_core::{Error, ErrorKind};
use sqlx::postgres::{PgDatabaseError, PgSeverity};

/// What PostgreSQL's error codes mean to whoever asked for a lock.
///
/// The codes are those of the manual, "PostgreSQL Error Codes". sqlx puts neither user nor password
/// into its messages, and the server does not know the password.
pub(crate) fn explain(doing: &str, error: sqlx::Error) -> Error {
    let Some(answer) = answer(&error) else {
        return not_from_the_server(doing, error);
    };
    let message = answer.message();
    let (kind, advice) = match answer.code() {
        "53200" => (
            ErrorKind::Unavailable,
            "; the server's lock table is full: raise max_locks_per_transaction there, or hold fewer \
             locks (max_holds)",
        ),
        "53300" => (
            ErrorKind::Unavailable,
            "; raise max_connections on the server, or lower max_sessions here",
        ),
        "25006" => (
            ErrorKind::Unsupported,
            "; tokens need a server that can be written to: connect to the primary",
        ),
        "28000" => (
            ErrorKind::Other,
            "; check the user, and what pg_hba.conf on the server asks for: TLS (sslmode=verify-full), or \
             a certificate too (sslcert, sslkey)",
        ),
        "28P01" => (
            ErrorKind::Other,
            "; check user and password, and pg_hba.conf on the server",
        ),
        "3D000" => (ErrorKind::Invalid, "; name a database that is there"),
        "42501" => (ErrorKind::Other, "; the role lacks a right"),
        code => (
            match &code[..2] {
                // Connection, resources, intervention of an operator, conflict, object not ready.
                "08" | "53" | "57" | "58" | "40" | "55" => ErrorKind::Unavailable,
                _ => ErrorKind::Other,
            },
            "",
        ),
    };
    Error::with_source(kind, format!("{doing}: {message}{advice}"), error)
}

/// The code of a server's error.
pub(crate) fn code(error: &sqlx::Error) -> Option<&str> {
    answer(error).map(PgDatabaseError::code)
}

/// Whether the session goes on after this error: the server refused the statement, no more.
pub(crate) fn is_survived(error: &sqlx::Error) -> bool {
    answer(error)
        .is_some_and(|answer| !matches!(answer.severity(), PgSeverity::Fatal | PgSeverity::Panic))
}

fn answer(error: &sqlx::Error) -> Option<&PgDatabaseError> {
    error
        .as_database_error()
        .and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
}

const TLS: &str = "; the server's certificate must be signed by the authority in sslrootcert and, for \
                   sslmode=verify-full, be for this host; ours (sslcert, sslkey) by the one that the \
                   server trusts";

fn not_from_the_server(doing: &str, error: sqlx::Error) -> Error {
    let (kind, advice) = match &error {
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => (ErrorKind::Invalid, ""),
        // A certificate that is not accepted stays so.
        sqlx::Error::Tls(_) => (ErrorKind::Other, TLS),
        // The same, where the other side says so after the handshake.
        sqlx::Error::Io(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            (ErrorKind::Other, TLS)
        }
        sqlx::Error::Decode(_) | sqlx::Error::ColumnDecode { .. } => (ErrorKind::Other, ""),
        _ => (ErrorKind::Unavailable, ""),
    };
    Error::with_source(kind, format!("{doing}: {error}{advice}"), error)
}
