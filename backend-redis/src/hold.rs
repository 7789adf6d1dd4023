use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Claim, Hold, Moment, Result, Token, Validity};
use uuid::Uuid;

use crate::client::Client;
use crate::error;
use crate::names::LockKeys;
use crate::request::{Answer, Place, Request};

/// A granted lock: its claim and token stand in the lock's value, and only that value is renewed or
/// freed.
pub(crate) struct RedisHold {
    client: Arc<Client>,
    keys: LockKeys,
    claim: Uuid,
    token: Token,
    ttl: Duration,
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
            validity,
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
        let connection = self.client.connection().await?;
        let sent = Moment::now();
        let request = Request::Renew {
            claim: self.claim,
            token: self.token,
            ttl: self.ttl,
            keys: &self.keys,
        };
        match self.client.request(&connection, request).await? {
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

    async fn release(&mut self) -> Result<()> {
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
