use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Examination, Expiry, Fairness, Guarantees, Hold, Holder, Key, Page, Result,
    Wakeup,
};
use redis::Value;

use crate::client::Client;
use crate::cluster::Cluster;
use crate::erase::erase;
use crate::request::Sender;
use crate::script;
use crate::servers::Servers;
use crate::{RedisOptions, error, examine, list, queue};

/// The locks of one Redis server, or of a Redis Cluster.
///
/// Cheap to clone; clones share their connections, of which there is one to each server. Give it to
/// `Locks::new`.
#[derive(Debug, Clone)]
pub struct Redis {
    servers: Servers,
}

impl Redis {
    /// What it promises.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Lease, *Claim::TTL_RANGE.start());
        guarantees.fairness = Fairness::Fifo;
        guarantees.wakeup = Wakeup::Push;
        guarantees
    };

    /// Connects to the server or cluster at `url`, with default options; see [`RedisOptions::new`] for its form.
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

    /// Connects, and tries on the server, of a cluster on one node, everything that locks will need.
    ///
    /// Later on it reconnects by itself, in whichever tokio runtime it is then used.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`](leasehold_core::ErrorKind::Unavailable): not to be reached, of a
    ///   cluster no node that was named, or it cannot serve just now.
    /// - [`ErrorKind::Unsupported`](leasehold_core::ErrorKind::Unsupported): older than Redis 6.0, a
    ///   node of a cluster where a single server was named or the reverse, or called outside of a tokio
    ///   runtime.
    /// - [`ErrorKind::Other`](leasehold_core::ErrorKind::Other): signing in was refused, or a right is
    ///   missing; the message says which ACL rules to add.
    /// - [`ErrorKind::Invalid`](leasehold_core::ErrorKind::Invalid): certificates that cannot be read, or a
    ///   prefix that cannot be used in a cluster.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect_with(options: RedisOptions) -> Result<Self> {
        let servers = match options.nodes() {
            None => Servers::One(Client::connect(&options).await?),
            Some(_) => Servers::Cluster(Cluster::connect(&options).await?),
        };
        Ok(Self { servers })
    }
}

#[async_trait]
impl Backend for Redis {
    fn guarantees(&self) -> Guarantees {
        Self::GUARANTEES
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let hold = queue::acquire(&self.servers, claim).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        self.servers.holder(&self.servers.names().of(key)).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let keys = self.servers.names().of(key);
        let grant = grant.map_or("", |holder| &holder.grant);
        let make = |sender: Sender| {
            let script = &sender.minting.evict;
            let mut call = script::call(script, &[&keys.lock, &keys.queue, &keys.token]);
            call.arg(sender.floor).arg(grant);
            (script, call)
        };
        let evicted = self.servers.call(&keys, false, make).await?;
        match evicted.answer {
            Value::Int(evicted) => Ok(evicted == 1),
            _ => Err(error::unexpected(&evicted.line.client.address)),
        }
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        list::list(&self.servers, prefix, after).await
    }

    async fn examine(&self, _ttl: Duration) -> Result<Examination> {
        examine::examine(&self.servers.clients()?).await
    }

    async fn erase(&self) -> Result<()> {
        for client in self.servers.clients()? {
            erase(&client).await?;
        }
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        self.servers.close().await;
        Ok(())
    }
}
