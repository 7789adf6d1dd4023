use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Claim, Hold, Result, Token, Validity};
use uuid::Uuid;

use crate::error;
use crate::names::LockKeys;
use crate::request::{Answer, Place, Request};
use crate::servers::Servers;

/// A granted lock: its claim and token stand in the lock's value, and only that value is renewed or
/// freed.
pub(crate) struct RedisHold {
    servers: Servers,
    keys: LockKeys,
    claim: Uuid,
    token: Token,
    ttl: Duration,
    validity: Validity,
}

impl RedisHold {
    /// The inbox must know of it already; it forgets it when this is dropped.
    pub(crate) fn new(
        servers: Servers,
        keys: LockKeys,
        claim: &Claim,
        token: Token,
        validity: Validity,
    ) -> Self {
        Self {
            servers,
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
        let request = Request::Renew {
            claim: self.claim,
            token: self.token,
            ttl: self.ttl,
            keys: &self.keys,
        };
        let answered = self.servers.request(request, &mut None).await?;
        match answered.answer {
            Answer::Done if self.validity.extend(answered.sent, self.ttl) => Ok(()),
            // The server still has it, but we have said already that it is over.
            Answer::Done => Err(error::lost(&self.keys.lock)),
            Answer::NotHeld => {
                self.validity.end();
                Err(error::lost(&self.keys.lock))
            }
            _ => Err(error::unexpected(&answered.line.client.address)),
        }
    }

    async fn release(&mut self) -> Result<()> {
        let request = Request::Release {
            claim: self.claim,
            place: Place::None,
            keys: &self.keys,
        };
        let answered = self.servers.request(request, &mut None).await?;
        match answered.answer {
            Answer::Done => Ok(()),
            Answer::NotHeld => Err(error::lost(&self.keys.lock)),
            _ => Err(error::unexpected(&answered.line.client.address)),
        }
    }
}

impl Drop for RedisHold {
    fn drop(&mut self) {
        self.servers.inbox().forget(self.claim);
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
