use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Examination, Expiry, Fairness, Guarantees, Hold, Holder, Key, Result, Wakeup,
};
use redis::Value;

use crate::client::Client;
use crate::script::{self, EVICT, HOLDER};
use crate::{RedisOptions, error, examine, queue, value};

/// The locks of one Redis server.
///
/// Cheap to clone; clones share one connection. Give it to `Locks::new`.
#[derive(Debug, Clone)]
pub struct Redis {
    client: Arc<Client>,
}

impl Redis {
    /// What it promises.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Lease, *Claim::TTL_RANGE.start());
        guarantees.fairness = Fairness::Fifo;
        guarantees.wakeup = Wakeup::Push;
        guarantees
    };

    /// Connects to the server at `url`, with default options; see [`RedisOptions::new`] for its form.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with), and
    /// [`ErrorKind::Invalid`](leasehold_core::ErrorKind::Invalid) for a malformed URL.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect(url: impl AsRef<str>) -> Result<Self> {
        Self::connect_with(RedisOptions::new(url)?).await
    }

    /// Connects, and tries on the server everything that locks will need.
    ///
    /// Later on it reconnects by itself, in whichever tokio runtime it is then used.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`](leasehold_core::ErrorKind::Unavailable): not to be reached, or it
    ///   cannot serve just now.
    /// - [`ErrorKind::Unsupported`](leasehold_core::ErrorKind::Unsupported): older than Redis 6.0, a
    ///   node of a cluster, or called outside of a tokio runtime.
    /// - [`ErrorKind::Other`](leasehold_core::ErrorKind::Other): signing in was refused, or a right is
    ///   missing; the message says which ACL rules to add.
    /// - [`ErrorKind::Invalid`](leasehold_core::ErrorKind::Invalid): certificates that cannot be read.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect_with(options: RedisOptions) -> Result<Self> {
        let client = Client::connect(&options).await?;
        Ok(Self { client })
    }
}

#[async_trait]
impl Backend for Redis {
    fn guarantees(&self) -> Guarantees {
        Self::GUARANTEES
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let hold = queue::acquire(&self.client, claim).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let keys = self.client.names.of(key);
        let call = script::call(&HOLDER, &[&keys.lock]);
        let connection = self.client.connection().await?;
        let answer = connection.call(&HOLDER, &call).await;
        match answer.map_err(|e| error::map(&self.client.address, &e))? {
            Value::Nil => Ok(None),
            Value::Array(fields) => match &fields[..] {
                [
                    Value::BulkString(value),
                    Value::Int(left),
                    Value::BulkString(grant),
                ] => {
                    let grant = String::from_utf8_lossy(grant).into_owned();
                    Ok(Some(value::holder(value, *left, grant)))
                }
                _ => Err(error::unexpected(&self.client.address)),
            },
            _ => Err(error::unexpected(&self.client.address)),
        }
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let keys = self.client.names.of(key);
        let connection = self.client.connection().await?;
        let mut call = script::call(&EVICT, &[&keys.lock, &keys.queue, &keys.token]);
        call.arg(self.client.floor(&connection))
            .arg(grant.map_or("", |holder| &holder.grant));
        let answer = connection.call(&EVICT, &call).await;
        match answer.map_err(|e| error::map(&self.client.address, &e))? {
            Value::Int(evicted) => Ok(evicted == 1),
            _ => Err(error::unexpected(&self.client.address)),
        }
    }

    async fn examine(&self, _ttl: Duration) -> Result<Examination> {
        examine::examine(&self.client).await
    }

    async fn close(&self) -> Result<()> {
        self.client.close().await;
        Ok(())
    }
}
