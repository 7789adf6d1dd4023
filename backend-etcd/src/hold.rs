use async_trait::async_trait;
use leasehold_core::{Hold, Result, Token, Validity};

use crate::error;
use crate::queue::Place;

/// A granted lock: the first place in its queue, for as long as the session lives.
#[derive(Debug)]
pub(crate) struct EtcdHold {
    /// Leaves the queue when it is dropped.
    place: Place,
    token: Token,
    validity: Validity,
}

impl EtcdHold {
    pub(crate) fn new(place: Place, token: Token) -> Self {
        let validity = place.session.hold(&place.key);
        Self {
            place,
            token,
            validity,
        }
    }
}

#[async_trait]
impl Hold for EtcdHold {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        if self.place.is_there(self.token).await? {
            Ok(())
        } else {
            Err(error::lost(&self.place.key))
        }
    }

    async fn release(&mut self) -> Result<()> {
        if self.place.leave().await? {
            Ok(())
        } else {
            Err(error::lost(&self.place.key))
        }
    }
}
