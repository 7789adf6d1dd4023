use std::sync::Arc;

use async_trait::async_trait;
use leasehold_core::{Hold, Result, Token, Validity};
use zookeeper_client::Error as Client;

use crate::error;
use crate::place::Place;

/// A place at the head of the queue. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct ZooKeeperHold {
    place: Place,
    servers: Arc<str>,
}

impl ZooKeeperHold {
    pub(crate) fn new(place: Place) -> Self {
        Self {
            servers: place.session().options().servers().into(),
            place,
        }
    }

    fn fail(&self, error: &Client) -> leasehold_core::Error {
        if error::is_session_over(error) {
            error::lost()
        } else {
            error::map(&self.servers, error)
        }
    }
}

#[async_trait]
impl Hold for ZooKeeperHold {
    fn token(&self) -> Token {
        self.place.token()
    }

    fn validity(&self) -> &Validity {
        self.place.validity()
    }

    /// The session is renewed, not its locks: this only looks whether the node is there.
    async fn renew(&mut self) -> Result<()> {
        match self.place.is_there().await {
            Ok(true) if !self.validity().is_ended() => Ok(()),
            Ok(_) => {
                self.validity().end();
                Err(error::lost())
            }
            Err(error) => Err(self.fail(&error)),
        }
    }

    async fn release(&mut self) -> Result<()> {
        match self.place.leave().await {
            Ok(true) => Ok(()),
            Ok(false) => Err(error::lost()),
            Err(error) => Err(self.fail(&error)),
        }
    }
}
