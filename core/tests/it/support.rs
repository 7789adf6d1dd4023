//! A memory store whose answers can be made to fail, get lost or never come.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Error, ErrorKind, Guarantees, Hold, Holder, Key, Memory, Moment, Result, Token,
    Validity,
};

/// What becomes of one call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// It fails before it reaches the store.
    Refused,
    /// It reaches the store, and the answer never comes.
    ReplyLost,
    /// It never reaches the store, and no answer comes.
    Silence,
    /// The backend has a fault.
    Panic,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Faulty {
    pub(crate) memory: Memory,
    pub(crate) script: Arc<Script>,
}

#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) renewals: Mutex<VecDeque<Fault>>,
    pub(crate) releases: Mutex<VecDeque<Fault>>,
    /// What happened, in order: `acquire`, `renew`, `release`.
    pub(crate) log: Mutex<Vec<&'static str>>,
    pub(crate) ids: Mutex<Vec<uuid::Uuid>>,
    /// Grants are delivered as if they had been sent so long ago.
    pub(crate) grants_late_by: Mutex<VecDeque<Duration>>,
}

impl Script {
    pub(crate) fn renewals(&self, faults: &[Fault]) {
        self.renewals.lock().unwrap().extend(faults);
    }

    pub(crate) fn releases(&self, faults: &[Fault]) {
        self.releases.lock().unwrap().extend(faults);
    }

    pub(crate) fn count(&self, what: &str) -> usize {
        let log = self.log.lock().unwrap();
        log.iter().filter(|entry| **entry == what).count()
    }

    fn note(&self, what: &'static str) {
        self.log.lock().unwrap().push(what);
    }
}

#[async_trait]
impl Backend for Faulty {
    fn guarantees(&self) -> Guarantees {
        self.memory.guarantees()
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        self.script.note("acquire");
        self.script.ids.lock().unwrap().push(claim.id);
        let Some(hold) = self.memory.acquire(claim).await? else {
            return Ok(None);
        };
        let late = self.script.grants_late_by.lock().unwrap().pop_front();
        let validity = match late {
            Some(late) => {
                let sent = Moment::now();
                tokio::time::sleep(late).await;
                Validity::new(sent, claim.ttl)
            }
            None => hold.validity().clone(),
        };
        Ok(Some(Box::new(FaultyHold {
            hold,
            validity,
            ttl: claim.ttl,
            script: self.script.clone(),
        })))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        self.memory.holder(key).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        self.memory.evict(key, grant).await
    }
}

#[derive(Debug)]
struct FaultyHold {
    hold: Box<dyn Hold>,
    validity: Validity,
    ttl: Duration,
    script: Arc<Script>,
}

#[async_trait]
impl Hold for FaultyHold {
    fn token(&self) -> Token {
        self.hold.token()
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        self.script.note("renew");
        let fault = self.script.renewals.lock().unwrap().pop_front();
        let sent = Moment::now();
        if matches!(fault, None | Some(Fault::ReplyLost)) {
            self.hold.renew().await?;
        }
        answer(fault).await?;
        self.validity.extend(sent, self.ttl);
        Ok(())
    }

    async fn release(&mut self) -> Result<()> {
        self.script.note("release");
        let fault = self.script.releases.lock().unwrap().pop_front();
        if matches!(fault, None | Some(Fault::ReplyLost)) {
            self.hold.release().await?;
        }
        answer(fault).await
    }
}

async fn answer(fault: Option<Fault>) -> Result<()> {
    match fault {
        None => Ok(()),
        Some(Fault::Refused) => Err(Error::new(ErrorKind::Unavailable, "refused")),
        Some(Fault::Panic) => panic!("as it was told"),
        Some(Fault::ReplyLost | Fault::Silence) => std::future::pending().await,
    }
}
