use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Claim, Hold, Moment, Result, Token, Validity};
use uuid::Uuid;

use crate::client::Client;
use crate::error;
use crate::names::LockKeys;
use crate::replicas;
use crate::request::{Answer, Place, Request};

/// A granted lock: its claim and token stand in the lock's value, and only that value is renewed or
/// freed.
pub(crate) struct RedisHold {
    client: Arc<Client>,
    keys: LockKeys,
    claim: Uuid,
    token: Token,
    ttl: Duration,
    request_limit: Duration,
    validity: Validity,
}

impl RedisHold {
    /// The inbox must know of it already; it forgets it when this is dropped.
    pub(crate) fn new(
        client: Arc<Client>,
        keys: LockKeys,
        claim: &Claim,
        token: Token,
        validity: Validity,
    ) -> Self {
        Self {
            client,
            keys,
            claim: claim.id,
            token,
            ttl: claim.ttl,
            request_limit: claim.request_limit,
            validity,
        }
    }

    /// Renews it, and where replicas are asked, waits until they have it.
    ///
    /// # Errors
    /// [`Lost`](leasehold_core::ErrorKind::Lost) if the server does not have it;
    /// [`Unavailable`](leasehold_core::ErrorKind::Unavailable) if it is not reached, or too few
    /// replicas confirm.
    pub(crate) async fn confirm(&mut self) -> Result<()> {
        let request = Request::Renew {
            claim: self.claim,
            token: self.token,
            ttl: self.ttl,
            keys: &self.keys,
        };
        let (sent, answer) = if self.client.replicas.are_asked() {
            replicas::renew(&self.client, request, self.request_limit).await?
        } else {
            let connection = self.client.connection().await?;
            let sent = Moment::now();
            (sent, self.client.request(&connection, request).await?)
        };
        match answer {
            Answer::Done if self.validity.extend(sent, self.ttl) => Ok(()),
            // The server still has it, but we have said already that it is over.
            Answer::Done => Err(error::lost(&self.keys.lock)),
            Answer::NotHeld => {
                self.validity.end();
                Err(error::lost(&self.keys.lock))
            }
            _ => Err(error::unexpected(&self.client.address)),
        }
    }
}

#[async_trait]
impl Hold for RedisHold {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        self.confirm().await
    }

    async fn release(&mut self) -> Result<()> {
        // From now on it is no loss if the server does not have it.
        self.client.inbox.forget(self.claim);
        let connection = self.client.connection().await?;
        let request = Request::Release {
            claim: self.claim,
            place: Place::None,
            keys: &self.keys,
        };
        match self.client.request(&connection, request).await? {
            Answer::Done => Ok(()),
            Answer::NotHeld => Err(error::lost(&self.keys.lock)),
            _ => Err(error::unexpected(&self.client.address)),
        }
    }
}

impl Drop for RedisHold {
    fn drop(&mut self) {
        self.client.inbox.forget(self.claim);
    }
}

impl fmt::Debug for RedisHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisHold")
            .field("lock", &self.keys.lock)
            .field("token", &self.token)
            .field("validity", &self.validity)
            .finish_non_exhaustive()
    }
}
