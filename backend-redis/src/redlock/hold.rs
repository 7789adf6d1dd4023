use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{ErrorKind, Hold, Result, Token, Validity};

use super::backend::Nodes;
use super::node::Attempt;
use super::quorum;

/// A granted lock: the votes of a majority for one attempt.
pub(super) struct RedlockHold {
    nodes: Arc<Nodes>,
    attempt: Attempt,
    token: Token,
    ttl: Duration,
    validity: Validity,
    /// The nodes that have taken their vote back.
    freed: Vec<bool>,
    released: bool,
}

impl RedlockHold {
    pub(super) fn new(
        nodes: Arc<Nodes>,
        attempt: Attempt,
        token: Token,
        ttl: Duration,
        validity: Validity,
    ) -> Self {
        Self {
            nodes,
            attempt,
            token,
            ttl,
            validity,
            freed: Vec::new(),
            released: false,
        }
    }
}

#[async_trait]
impl Hold for RedlockHold {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        match self.nodes.quorum.extend(&self.attempt, self.ttl).await {
            Ok(sent) if self.validity.extend(sent, self.ttl) => Ok(()),
            // The nodes still have it, but we have said already that it is over.
            Ok(_) => Err(quorum::lost(&self.attempt)),
            Err(e) => {
                if e.kind() == ErrorKind::Lost {
                    self.validity.end();
                }
                Err(e)
            }
        }
    }

    async fn release(&mut self) -> Result<()> {
        if self.released {
            return Err(quorum::lost(&self.attempt));
        }
        let quorum = &self.nodes.quorum;
        quorum
            .release(&self.attempt, self.ttl, &mut self.freed)
            .await?;
        self.released = true;
        Ok(())
    }
}

impl fmt::Debug for RedlockHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockHold")
            .field("key", &self.attempt.key)
            .field("token", &self.token)
            .field("validity", &self.validity)
            .finish_non_exhaustive()
    }
}
