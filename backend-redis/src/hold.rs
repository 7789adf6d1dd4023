use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Claim, Hold, Result, Token, Validity};
use uuid::Uuid;

use crate::error;
use crate::names::LockKeys;
use crate::replicas;
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
    request_limit: Duration,
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
        let limit = self.request_limit;
        let (sent, answer) = match &self.servers {
            Servers::One(client) if client.replicas.are_asked() => {
                replicas::renew(client, request, limit).await?
            }
            servers => {
                let answered = servers.request(request, &mut None).await?;
                // Of a cluster this has found the node.
                if servers.replicas_are_asked() && answered.answer == Answer::Done {
                    replicas::renew(&answered.line.client, request, limit).await?
                } else {
                    (answered.sent, answered.answer)
                }
            }
        };
        match answer {
            Answer::Done if self.validity.extend(sent, self.ttl) => Ok(()),
            // The server still has it, but we have said already that it is over.
            Answer::Done => Err(error::lost(&self.keys.lock)),
            Answer::NotHeld => {
                self.validity.end();
                Err(error::lost(&self.keys.lock))
            }
            _ => Err(error::unexpected(&self.servers.address(&self.keys))),
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
        self.servers.inbox().forget(self.claim);
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
