use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use sqlx::ConnectOptions;
use sqlx::postgres::PgConnectOptions;

use crate::KeyForm;

/// Where the server is and how to use it.
///
/// Plain data: start from a URL and change what differs. Nothing is sent before
/// [`Postgres::connect_with`](crate::Postgres::connect_with). Neither `Debug` nor any error shows the
/// password.
///
/// ```
/// use leasehold_postgres::PostgresOptions;
///
/// let options = PostgresOptions::new("postgres://app:secret@localhost/shop")?.with_max_sessions(8);
/// assert!(!format!("{options:?}").contains("secret"));
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Clone)]
pub struct PostgresOptions {
    pub(crate) server: PgConnectOptions,
    pub(crate) key_form: KeyForm,
    pub(crate) sequence: String,
    pub(crate) max_sessions: usize,
    pub(crate) max_holds: Option<usize>,
    pub(crate) connect_timeout: Duration,
}

impl PostgresOptions {
    /// Reads a URL, `postgres://[user[:password]@]host[:port][/database][?name=value&…]`, with the
    /// names that libpq knows: `sslmode`, `sslrootcert`, `sslcert`, `sslkey`, `host`, `hostaddr`,
    /// `port`, `dbname`, `user`, `password`, `application_name`, `options`. What it does not say is
    /// taken from the environment (`PGHOST`, `PGUSER`, `PGPASSWORD`, …) and from `~/.pgpass`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the URL is not of this form.
    pub fn new(url: impl AsRef<str>) -> Result<Self> {
        let url = url.as_ref();
        let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
        if !["postgres", "postgresql"]
            .iter()
            .any(|known| scheme.eq_ignore_ascii_case(known))
        {
            return Err(invalid(
                "the URL must begin with postgres://, as in postgres://user@localhost:5432/database",
            ));
        }
        check_parameters(url)?;
        // The parser's own message may quote parts of the URL, and a password with them.
        let server = PgConnectOptions::from_str(url).map_err(|_| {
            invalid(
                "the URL is not of the form postgres://[user[:password]@]host[:port][/database]: \
                 whatever has a meaning in a URL must be percent-encoded in the user and password",
            )
        })?;
        Ok(Self::from(server))
    }

    /// How keys become numbers; default [`KeyForm::Name`].
    #[must_use]
    pub fn with_key_form(mut self, form: KeyForm) -> Self {
        self.key_form = form;
        self
    }

    /// The sequence that the tokens come from, as `schema.name`; default `public.leasehold_token`.
    /// Everybody who is to see rising tokens for a key must use the same one. It is made if it is
    /// not there.
    #[must_use]
    pub fn with_sequence(mut self, name: impl Into<String>) -> Self {
        self.sequence = name.into();
        self
    }

    /// How many connections this client may have in all, at least 2; default 16. Locks that are free
    /// when asked for share one; a lock that had to be waited for has one of its own. At most three
    /// quarters are spent on those.
    #[must_use]
    pub fn with_max_sessions(mut self, sessions: usize) -> Self {
        self.max_sessions = sessions;
        self
    }

    /// How many locks this client may hold at a time. Default, and most: a quarter of the server's
    /// lock table, `max_locks_per_transaction × (max_connections + max_prepared_transactions)`. When
    /// that table is full nobody can connect to the server any more, in any of its databases.
    #[must_use]
    pub fn with_max_holds(mut self, holds: impl Into<Option<usize>>) -> Self {
        self.max_holds = holds.into();
        self
    }

    /// How long making a connection may take, signing in included; default 5 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Server and database, as errors and logs name them.
    pub(crate) fn address(&self) -> String {
        let server = &self.server;
        let database = server
            .get_database()
            .unwrap_or_else(|| server.get_username());
        match server.get_socket() {
            Some(folder) => format!("{}:{}/{database}", folder.display(), server.get_port()),
            None => format!("{}:{}/{database}", server.get_host(), server.get_port()),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.max_sessions < 2 {
            return Err(invalid(
                "max_sessions must be at least 2: one session that is shared and one that waits",
            ));
        }
        if self.max_holds == Some(0) || self.connect_timeout.is_zero() {
            return Err(invalid("max_holds and connect_timeout must not be zero"));
        }
        Ok(())
    }
}

/// From the options of sqlx: for certificates from memory, or whatever a URL cannot say.
impl From<PgConnectOptions> for PostgresOptions {
    fn from(server: PgConnectOptions) -> Self {
        let name = format!("leasehold {}", std::process::id());
        let server = match server.get_application_name() {
            Some(_) => server,
            None => server.application_name(&name),
        };
        Self {
            // pgbouncer refuses the parameter that sqlx would send by itself.
            server: server.extra_float_digits(None).disable_statement_logging(),
            key_form: KeyForm::default(),
            sequence: "public.leasehold_token".into(),
            max_sessions: 16,
            max_holds: None,
            connect_timeout: Duration::from_secs(5),
        }
    }
}

impl fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the connection itself: it shows the password.
        f.debug_struct("PostgresOptions")
            .field("server", &self.address())
            .field("key_form", &self.key_form)
            .field("sequence", &self.sequence)
            .field("max_sessions", &self.max_sessions)
            .field("max_holds", &self.max_holds)
            .field("connect_timeout", &self.connect_timeout)
            .finish_non_exhaustive()
    }
}

/// sqlx ignores a parameter that it does not know, and logs its value: a misspelt password too.
fn check_parameters(url: &str) -> Result<()> {
    const KNOWN: [&str; 19] = [
        "sslmode",
        "ssl-mode",
        "sslrootcert",
        "ssl-root-cert",
        "ssl-ca",
        "sslcert",
        "ssl-cert",
        "sslkey",
        "ssl-key",
        "host",
        "hostaddr",
        "port",
        "dbname",
        "user",
        "password",
        "application_name",
        "options",
        "statement-cache-capacity",
        "options[",
    ];
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let query = query.split('#').next().unwrap_or_default();
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let name = parameter.split('=').next().unwrap_or_default();
        if !KNOWN.contains(&name) && !name.starts_with("options[") {
            return Err(invalid(&format!(
                "the URL has a parameter {name:?} that is not known: see PostgresOptions::new"
            )));
        }
    }
    Ok(())
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_never_shows() {
        for url in [
            "postgres://app:geheim@localhost:1/db",
            "postgres://app@localhost/db?password=geheim",
        ] {
            let options = PostgresOptions::new(url).expect("a URL");
            assert!(!format!("{options:?}").contains("geheim"));
        }
        for url in [
            "postgres://app:geheim@localhost:port/db",
            "postgres://app@localhost/db?passwrod=geheim",
            "postgres://app@localhost/db?sslmode=geheim",
            "mysql://app:geheim@localhost/db",
            "postgres://app:geheim@[::1/db",
        ] {
            let error = PostgresOptions::new(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(
                !format!("{error:?} {error}").contains("geheim"),
                "{error:?}"
            );
        }
    }

    #[test]
    fn the_address_names_server_and_database() {
        let options = PostgresOptions::new("postgres://app@db.example:6000/shop").expect("a URL");
        assert_eq!(options.address(), "db.example:6000/shop");
    }
}
