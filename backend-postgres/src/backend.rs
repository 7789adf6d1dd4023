use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Consistency, Examination, Expiry, Fairness, Guarantees, Hold, Holder, Key,
    Page, Result, Tokens, Wakeup,
};
use tokio::sync::{Notify, Semaphore};

use crate::PostgresOptions;
use crate::client::{Client, SHORTEST_TTL};
use crate::connection::examine;
use crate::list::list;
use crate::session::Common;
use crate::sql::Sql;

/// Locks on a PostgreSQL server, version 14 or newer.
///
/// Clones are the same client: its sessions, its limits.
#[derive(Clone)]
pub struct Postgres {
    client: Arc<Client>,
}

impl Postgres {
    /// What every such backend promises.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Session, SHORTEST_TTL);
        guarantees.consistency = Consistency::SingleNode;
        guarantees.fairness = Fairness::None;
        guarantees.wakeup = Wakeup::Push;
        guarantees.tokens = Tokens::Durable;
        guarantees
    };

    /// Connects to the server at `url`; see [`PostgresOptions::new`] for its form.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with), and [`Invalid`](leasehold_core::ErrorKind::Invalid)
    /// for a malformed URL.
    ///
    /// # Cancel safety
    /// If dropped, nothing is left but perhaps the sequence.
    pub async fn connect(url: impl AsRef<str> + Send) -> Result<Self> {
        Self::connect_with(PostgresOptions::new(url)?).await
    }

    /// Connects to a server and finds out whether it can hold locks for us.
    ///
    /// # Errors
    /// Of the [kind](leasehold_core::ErrorKind)
    /// - `Unavailable` if the server does not answer in time.
    /// - `Unsupported` if it is older than 14 or a standby, if a pooler changes the session between
    ///   statements, or if tokens would not rise.
    /// - `Invalid` for impossible options, or a database that is not there.
    /// - `Other` if signing in fails or a right is missing; the message has the SQL that gives it.
    ///
    /// # Cancel safety
    /// If dropped, nothing is left but perhaps the sequence.
    pub async fn connect_with(options: PostgresOptions) -> Result<Self> {
        options.check()?;
        let sql = Sql::new(options.key_form, &options.sequence)?;
        let server = examine(&options, &sql).await?;
        let max_holds = options
            .max_holds
            .unwrap_or(server.fair_share)
            .min(server.fair_share)
            .min(Semaphore::MAX_PERMITS);
        let common = Arc::new(Common {
            options,
            sql,
            turns: Arc::default(),
            highest_token: AtomicI64::new(0),
            freed: Notify::new(),
        });
        Ok(Self {
            client: Arc::new(Client::new(common, max_holds)),
        })
    }
}

#[async_trait]
impl Backend for Postgres {
    fn guarantees(&self) -> Guarantees {
        Self::GUARANTEES
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let key = self.client.common.sql.key_form.id(&claim.key)?;
        let hold = self.client.acquire(key, claim).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        self.client.sessions.check_open()?;
        let key = self.client.common.sql.key_form.id(key)?;
        self.client.holder(key).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        self.client.sessions.check_open()?;
        let key = self.client.common.sql.key_form.id(key)?;
        self.client.evict(key, grant).await
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        self.client.sessions.check_open()?;
        list(&self.client, prefix, after).await
    }

    async fn examine(&self, _ttl: Duration) -> Result<Examination> {
        self.client.sessions.check_open()?;
        crate::examine::examine(&self.client.common.options, self.client.max_holds).await
    }

    /// There is nothing but the sequence, which others use too: locks leave nothing behind.
    async fn erase(&self) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        self.client.sessions.close().await;
        Ok(())
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("options", &self.client.common.options)
            .field("sessions", &self.client.sessions)
            .finish_non_exhaustive()
    }
}
