use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Key, Result};
use sqlx::{AssertSqlSafe, Executor, PgConnection, raw_sql};

use crate::KeyForm;
use crate::error::{code, explain};
use crate::key_form::LockId;

/// Locks in a transaction of the caller's own.
impl KeyForm {
    /// Locks `key` until the transaction that is under way on `connection` ends, waiting at most
    /// `wait` (`None`: no limit).
    ///
    /// The lock is freed with the commit, so that no other owner sees the state before it; or with
    /// the rollback. It is the same lock as that of a [`Postgres`](crate::Postgres) backend with this
    /// key form on the same database, and the two exclude each other. It needs no guard, token or
    /// renewal: what is written under it is written by the transaction that holds it, or not at all.
    ///
    /// Take it first, in a transaction at `READ COMMITTED` (the default): at the higher levels the
    /// transaction goes on seeing what was there before it waited.
    ///
    /// ```
    /// # #[cfg(unix)]
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// # use leasehold_conformance::fixtures::postgres::PostgresServer;
    /// # let Ok(server) = PostgresServer::start(["";0]).await else { return anyhow::Ok(()) };
    /// # let url = server.url();
    /// use leasehold_postgres::KeyForm;
    /// use sqlx::{Connection, PgConnection};
    /// use std::time::Duration;
    ///
    /// let mut connection = PgConnection::connect(&url).await?;
    /// let mut transaction = connection.begin().await?;
    /// let wait = Duration::from_secs(3);
    /// KeyForm::Name
    ///     .lock_in_transaction(&mut transaction, "order:42", wait)
    ///     .await?;
    /// // … read, decide, write …
    /// transaction.commit().await?; // frees the lock
    /// # anyhow::Ok(()) })?;
    /// # anyhow::Ok(())
    /// ```
    ///
    /// # Errors
    /// The transaction goes on as before after each of them, unless the connection is lost.
    /// - [`ErrorKind::Timeout`] if another still held it when `wait` was over.
    /// - [`ErrorKind::Invalid`] for an impossible key, or if no transaction is under way: the lock
    ///   would be freed as soon as it is taken.
    /// - [`ErrorKind::Unavailable`] if the server does not serve us, its `statement_timeout` ended the
    ///   wait, or PostgreSQL found a deadlock with other locks of the transaction.
    ///
    /// # Cancel safety
    /// If dropped, the transaction may get the lock later; roll it back.
    pub async fn lock_in_transaction(
        self,
        connection: &mut PgConnection,
        key: impl AsRef<str> + Send,
        wait: impl Into<Option<Duration>> + Send,
    ) -> Result<()> {
        let key = Key::new(key)?;
        let id = self.id(&key)?;
        let wait = wait.into();
        if wait == Some(Duration::ZERO) {
            return match self.try_xact_lock(connection, id).await? {
                true => Ok(()),
                false => Err(timed_out(&key, Duration::ZERO)),
            };
        }
        // Zero would be for ever; the longest is 24 days.
        let limit = wait.map_or(0, |wait| {
            let limit = wait.as_millis() + u128::from(wait.subsec_nanos() % 1_000_000 > 0);
            limit.clamp(1, i32::MAX as u128)
        });
        // Within a savepoint: a wait that fails would spoil the whole transaction. A lock that was
        // taken within outlives its release.
        let arguments = self.arguments(&format!("({id})::bigint"));
        let locked = run(
            connection,
            format!(
                "SAVEPOINT leasehold; \
                 SELECT set_config('leasehold.lock_timeout', current_setting('lock_timeout'), true); \
                 SET LOCAL lock_timeout = {limit}; \
                 SELECT pg_advisory_xact_lock({arguments}); \
                 SELECT set_config('lock_timeout', current_setting('leasehold.lock_timeout'), true); \
                 RELEASE SAVEPOINT leasehold"
            ),
        )
        .await;
        let Err(error) = locked else { return Ok(()) };
        if code(&error) == Some(NO_TRANSACTION) {
            return Err(no_transaction());
        }
        // If this fails too, the first failure says more.
        drop(
            run(
                connection,
                "ROLLBACK TO SAVEPOINT leasehold; RELEASE SAVEPOINT leasehold",
            )
            .await,
        );
        match (code(&error), wait) {
            (Some(LOCK_TIMEOUT), Some(wait)) => Err(timed_out(&key, wait)),
            _ => Err(explain("locking in a transaction", error)),
        }
    }

    /// Locks `key` as [`lock_in_transaction`](Self::lock_in_transaction), without waiting; `false` if
    /// another holds it.
    ///
    /// # Errors
    /// As there, but never [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// If dropped, the transaction may or may not have the lock; roll it back.
    pub async fn try_lock_in_transaction(
        self,
        connection: &mut PgConnection,
        key: impl AsRef<str> + Send,
    ) -> Result<bool> {
        let id = self.id(&Key::new(key)?)?;
        self.try_xact_lock(connection, id).await
    }

    async fn try_xact_lock(self, connection: &mut PgConnection, id: LockId) -> Result<bool> {
        let arguments = self.arguments(&format!("({id})::bigint"));
        // The savepoint fails outside of a transaction, before anything is locked.
        let tried = format!(
            "SAVEPOINT leasehold; SELECT pg_try_advisory_xact_lock({arguments}); \
             RELEASE SAVEPOINT leasehold"
        );
        let tried = connection.fetch_one(raw_sql(AssertSqlSafe(tried))).await;
        match tried.and_then(|row| sqlx::Row::try_get(&row, 0)) {
            Ok(locked) => Ok(locked),
            Err(error) if code(&error) == Some(NO_TRANSACTION) => Err(no_transaction()),
            Err(error) => {
                drop(run(connection, "ROLLBACK TO SAVEPOINT leasehold").await);
                Err(explain("locking in a transaction", error))
            }
        }
    }
}

/// `no_active_sql_transaction`
const NO_TRANSACTION: &str = "25P01";
/// `lock_not_available`
const LOCK_TIMEOUT: &str = "55P03";

async fn run(connection: &mut PgConnection, statements: impl Into<String>) -> sqlx::Result<()> {
    let statements = AssertSqlSafe(statements.into());
    connection.execute(raw_sql(statements)).await.map(drop)
}

fn no_transaction() -> Error {
    Error::new(
        ErrorKind::Invalid,
        "no transaction is under way on this connection, so that the lock would be freed at once: \
         begin one before",
    )
}

fn timed_out(key: &Key, wait: Duration) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!("{key:?} was still held by another after {wait:?}"),
    )
}
