use std::time::Duration;

use leasehold_core::{Error, ErrorKind, OwnerId, Result};
use sqlx::pool::PoolOptions;
use sqlx::postgres::{PgConnectOptions, PgListener, PgNotification, PgRow};
use sqlx::{
    Acquire, AssertSqlSafe, Connection as _, Executor, PgConnection, Pool, Postgres, Row,
    SqlSafeStr, SqlStr, raw_sql,
};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use crate::PostgresOptions;
use crate::error::{code, explain};
use crate::sql::{Sql, literal};

/// One connection that notices its loss at once, also while it is idle.
///
/// sqlx reads from a connection only during a query; except in a `PgListener`, which reads while it
/// waits for notifications and can run queries in between. It connects through a pool and would
/// connect again by itself, to a session that has none of our locks: so its pool is closed once it
/// has its connection.
pub(crate) struct Connection {
    listener: PgListener,
    pool: Pool<Postgres>,
}

impl Connection {
    /// Connects; fails at once where nobody listens.
    ///
    /// # Cancel safety
    /// If dropped, the connection is closed.
    pub(crate) async fn open(options: &PostgresOptions) -> Result<Self> {
        let limit = options.connect_timeout;
        let pool = PoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(limit)
            .connect_lazy_with(options.server.clone());
        let listener = tokio::select! {
            listener = PgListener::connect_with(&pool) => listener,
            error = unreachable(&options.server) => Err(error.into()),
        };
        let mut listener = listener.map_err(|error| match error {
            sqlx::Error::PoolTimedOut => silent(options, limit),
            error => explain(&connecting(options), error),
        })?;
        listener.ignore_pool_close_event(true);
        listener.eager_reconnect(false);
        // Calling it closes the pool; awaiting it would wait for the connection to come back.
        drop(pool.close());
        Ok(Self { listener, pool })
    }

    /// For a query. Once begun, the query must be driven to its end, or the whole thing dropped.
    pub(crate) async fn get(&mut self) -> sqlx::Result<&mut PgConnection> {
        (&mut self.listener).acquire().await
    }

    /// Waits for a notification. `None`: the connection is lost, and nothing may be done with it.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(crate) async fn hear(&mut self) -> Option<PgNotification> {
        self.listener.try_recv().await.ok().flatten()
    }

    /// A notification that came with the answer to a query.
    pub(crate) fn heard(&mut self) -> Option<PgNotification> {
        self.listener.next_buffered()
    }

    /// Closes it and waits until that is done.
    pub(crate) async fn close(self) {
        const LIMIT: Duration = Duration::from_secs(2);
        let Self { listener, pool } = self;
        // In a task of sqlx. A server that does not answer ends the session by itself.
        drop(listener);
        let _late = timeout(LIMIT, pool.close()).await;
    }
}

/// What was found out about the server when the backend connected.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Server {
    /// A quarter of the lock table.
    pub(crate) fair_share: usize,
}

/// Finds out whether the server can do what is needed, and makes the sequence if it is not there.
pub(crate) async fn examine(options: &PostgresOptions, sql: &Sql) -> Result<Server> {
    let limit = options.connect_timeout;
    timeout(limit, async {
        let mut first = connect(options).await?;
        let server = check_server(options, sql, &mut first).await?;
        let mut second = connect(options).await?;
        check_pooler(options, &mut first, &mut second).await?;
        // Failing to say goodbye is no failure.
        let _closed = (first.close().await, second.close().await);
        Ok(server)
    })
    .await
    .unwrap_or_else(|_elapsed| Err(silent(options, limit)))
}

/// A plain connection, for a single question.
pub(crate) async fn connect(options: &PostgresOptions) -> Result<PgConnection> {
    PgConnection::connect_with(&options.server)
        .await
        .map_err(|error| explain(&connecting(options), error))
}

async fn check_server(
    options: &PostgresOptions,
    sql: &Sql,
    connection: &mut PgConnection,
) -> Result<Server> {
    let asking = format!("asking {} about itself", options.address());
    let row = one(
        connection,
        "SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), \
           current_setting('max_locks_per_transaction')::bigint * \
             (current_setting('max_connections')::bigint + \
              current_setting('max_prepared_transactions')::bigint), \
           has_language_privilege('plpgsql', 'USAGE'), current_user::text",
    )
    .await
    .map_err(|error| explain(&asking, error))?;
    let read = || -> sqlx::Result<(i32, bool, i64, bool, String)> {
        Ok((
            row.try_get(0)?,
            row.try_get(1)?,
            row.try_get(2)?,
            row.try_get(3)?,
            row.try_get(4)?,
        ))
    };
    let (version, in_recovery, lock_table, may_wait, role) =
        read().map_err(|error| explain(&asking, error))?;
    if version < 140_000 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} is PostgreSQL {}: 14 or newer is needed, which ends idle sessions by itself \
                 (idle_session_timeout)",
                options.address(),
                version / 10_000
            ),
        ));
    }
    if in_recovery {
        return Err(in_recovery_error(options));
    }
    if !may_wait {
        return Err(Error::new(
            ErrorKind::Other,
            format!(
                "the role {role:?} may not use the language plpgsql, in which waits are written; \
                 let somebody with the right to do so run: GRANT USAGE ON LANGUAGE plpgsql TO PUBLIC;"
            ),
        ));
    }
    check_sequence(options, sql, connection, &role).await?;
    Ok(Server {
        fair_share: usize::try_from(lock_table / 4).unwrap_or(usize::MAX).max(1),
    })
}

async fn check_sequence(
    options: &PostgresOptions,
    sql: &Sql,
    connection: &mut PgConnection,
    role: &str,
) -> Result<()> {
    let name = literal(&sql.sequence);
    let found = format!("SELECT to_regclass({name}) IS NOT NULL");
    let doing = format!("preparing the tokens of {}", options.address());
    let failed = |error| explain(&doing, error);
    let denied = |error: sqlx::Error| match code(&error) {
        Some("42501" | "3F000" | "25006") => Error::new(
            ErrorKind::Other,
            format!(
                "the role {role:?} cannot make or use the sequence {} that the tokens come from; let \
                 somebody with the right to do so run: {}",
                sql.sequence,
                sql.remedy(role)
            ),
        ),
        _ => explain(&doing, error),
    };
    let there: bool = one(connection, found)
        .await
        .and_then(|row| row.try_get(0))
        .map_err(&denied)?;
    if !there {
        // Roles may be set to read only; it takes effect with the next statement.
        let writable = "SET default_transaction_read_only = off";
        connection
            .execute(raw_sql(writable))
            .await
            .map_err(failed)?;
        let create = format!("CREATE SEQUENCE IF NOT EXISTS {}", sql.sequence);
        let made = connection.execute(raw_sql(AssertSqlSafe(create))).await;
        match made {
            // Another client made it at the same time.
            Err(error) if matches!(code(&error), Some("23505" | "42P07")) => {}
            made => {
                made.map_err(&denied)?;
            }
        }
    }
    let row = one(
        connection,
        format!(
            "SELECT seqcache = 1, seqincrement > 0 AND NOT seqcycle AND seqtypid = 'bigint'::regtype, \
               has_sequence_privilege(seqrelid, 'USAGE') AND has_sequence_privilege(seqrelid, 'SELECT') \
                 AND has_sequence_privilege(seqrelid, 'UPDATE') \
             FROM pg_sequence WHERE seqrelid = to_regclass({name})"
        ),
    )
    .await
    .map_err(|error| match error {
        sqlx::Error::RowNotFound => Error::new(
            ErrorKind::Invalid,
            format!("{} is there, but is no sequence: name another", sql.sequence),
        ),
        error => denied(error),
    })?;
    let uncached: bool = row.try_get(0).map_err(failed)?;
    let rising: bool = row.try_get(1).map_err(failed)?;
    let allowed: bool = row.try_get(2).map_err(failed)?;
    if !allowed {
        return Err(Error::new(
            ErrorKind::Other,
            format!(
                "the role {role:?} may not use the sequence {} that the tokens come from; let its \
                 owner run: {}",
                sql.sequence,
                sql.remedy(role)
            ),
        ));
    }
    if !uncached || !rising {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "tokens from the sequence {} would not rise: sessions would draw from caches of their \
                 own, or it counts down, goes round or is too small; run: ALTER SEQUENCE {} AS bigint \
                 INCREMENT BY 1 CACHE 1 NO CYCLE;",
                sql.sequence, sql.sequence
            ),
        ));
    }
    Ok(())
}

/// A pooler that changes the session between statements would give one lock to all its clients.
///
/// Comparing backend ids does not find an idle one: it gives the same session again and again. So: A
/// locks, B must be refused, and A's unlock must say true. Nothing is prepared before, for a prepared
/// statement fails there in ways that nobody would understand.
async fn check_pooler(
    options: &PostgresOptions,
    first: &mut PgConnection,
    second: &mut PgConnection,
) -> Result<()> {
    let key = OwnerId::new().uuid().as_u64_pair().0.cast_signed();
    let refused = |error| explain(&format!("trying locks out on {}", options.address()), error);
    let ask = async |connection: &mut PgConnection, function: &str| -> Result<bool> {
        one(connection, format!("SELECT {function}({key})"))
            .await
            .and_then(|row| row.try_get(0))
            .map_err(refused)
    };
    let locked = ask(first, "pg_try_advisory_lock").await?;
    let locked_twice = ask(second, "pg_try_advisory_lock").await?;
    let unlocked = ask(first, "pg_advisory_unlock").await?;
    if locked && !locked_twice && unlocked {
        return Ok(());
    }
    if locked_twice {
        // Whichever session has it now.
        let _unlocked = ask(second, "pg_advisory_unlock").await;
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!(
            "between us and the server of {} is a pooler that changes the session between statements \
             (pgbouncer with pool_mode = transaction or statement): session locks do not work through \
             it; connect to the server itself, or set pool_mode = session",
            options.address()
        ),
    ))
}

/// The first row of the last statement, without preparing anything.
pub(crate) async fn one(
    connection: &mut PgConnection,
    statement: impl Into<Text>,
) -> sqlx::Result<PgRow> {
    connection.fetch_one(raw_sql(statement.into().0)).await
}

/// All rows of the last statement, without preparing anything.
pub(crate) async fn all(
    connection: &mut PgConnection,
    statement: impl Into<Text>,
) -> sqlx::Result<Vec<PgRow>> {
    connection.fetch_all(raw_sql(statement.into().0)).await
}

/// A statement, or the text of one.
pub(crate) struct Text(SqlStr);

impl From<&'static str> for Text {
    fn from(text: &'static str) -> Self {
        Self(text.into_sql_str())
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(AssertSqlSafe(text).into_sql_str())
    }
}

impl From<SqlStr> for Text {
    fn from(text: SqlStr) -> Self {
        Self(text)
    }
}

pub(crate) fn in_recovery_error(options: &PostgresOptions) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{} is a standby: it would grant locks that its primary grants to others; connect to the \
             primary",
            options.address()
        ),
    )
}

pub(crate) fn connecting(options: &PostgresOptions) -> String {
    format!("connecting to {}", options.address())
}

/// Resolves if nobody listens there. The pool would go on trying until its time is up.
async fn unreachable(server: &PgConnectOptions) -> std::io::Error {
    // Most connections are made by then, and nothing is asked twice.
    const PATIENCE: Duration = Duration::from_millis(100);
    loop {
        sleep(PATIENCE).await;
        let reached = match server.get_socket() {
            #[cfg(unix)]
            Some(folder) => {
                let path = folder.join(format!(".s.PGSQL.{}", server.get_port()));
                tokio::net::UnixStream::connect(path).await.map(drop)
            }
            _ => TcpStream::connect((server.get_host(), server.get_port()))
                .await
                .map(drop),
        };
        match reached {
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => return error,
            _ => {}
        }
    }
}

pub(crate) fn silent(options: &PostgresOptions, limit: Duration) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!("{} was not ready within {limit:?}", options.address()),
    )
}
