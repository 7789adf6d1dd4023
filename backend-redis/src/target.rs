use std::fmt;
use std::sync::Arc;

use leasehold_core::Result;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, FromRedisValue as _, Value};

use crate::client::Client;
use crate::sentinel::{Master, Sentinels};

/// Where a client connects to. Asked at each opening of a connection.
pub(crate) enum Target {
    /// Always there.
    Fixed(Box<redis::Client>),
    /// To the master that the sentinels name at the time.
    Watched(Arc<Sentinels>),
}

/// For requests that have their own limits, on connections whose opening has one.
pub(crate) fn without_limits() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_response_timeout(None)
        .set_connection_timeout(None)
}

/// Who says when a connection is no longer one to the master.
pub(crate) struct Watcher {
    sentinels: Arc<Sentinels>,
    master: Master,
}

impl Target {
    pub(crate) fn watched(sentinels: Sentinels) -> Self {
        Self::Watched(Arc::new(sentinels))
    }

    /// Connects and signs in.
    ///
    /// # Errors
    /// As [`Client::refused`] has it; [`Unavailable`](leasehold_core::ErrorKind::Unavailable) if there
    /// is no master just now.
    pub(crate) async fn connect(
        &self,
        client: &Client,
        config: &AsyncConnectionConfig,
    ) -> Result<(MultiplexedConnection, Option<Watcher>)> {
        match self {
            Self::Fixed(server) => {
                let opening = server.get_multiplexed_async_connection_with_config(config);
                let opened = opening.await.map_err(|e| client.refused(&e, "+hello"))?;
                Ok((opened, None))
            }
            Self::Watched(sentinels) => {
                let (master, server) = sentinels.find().await?;
                let name = sentinels.describe(&master);
                let opening = server.get_multiplexed_async_connection_with_config(config);
                let opened = opening.await;
                let mut opened = opened.map_err(|e| client.refused_at(&name, &e, "+hello"))?;
                let role = redis::cmd("ROLE")
                    .query_async::<Vec<Value>>(&mut opened)
                    .await;
                let role = role.map_err(|e| client.refused_at(&name, &e, "+role"))?;
                let role = role.into_iter().next().map(String::from_redis_value);
                if !matches!(role, Some(Ok(role)) if role == "master") {
                    return Err(sentinels.not_yet(&master));
                }
                let sentinels = sentinels.clone();
                Ok((opened, Some(Watcher { sentinels, master })))
            }
        }
    }
}

impl Watcher {
    /// Resolves when another server is the master.
    pub(crate) async fn until_moved(&self) {
        self.sentinels.until_moved(&self.master).await;
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the clients: they know the password.
        match self {
            Self::Fixed(_) => f.write_str("Fixed"),
            Self::Watched(_) => f.write_str("Watched"),
        }
    }
}
