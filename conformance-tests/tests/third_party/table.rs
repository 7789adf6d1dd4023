//! A small backend: a table with one row for each lock, and clients that ask again and again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Error, ErrorKind, Expiry, Guarantees, Hold, Holder, Key, Moment, Result, Token,
    Validity,
};
use uuid::Uuid;

/// The table. Clones are clients of the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    rows: Arc<Mutex<Rows>>,
}

#[derive(Debug, Default)]
struct Rows {
    held: HashMap<Key, Row>,
    last_token: u64,
}

#[derive(Debug)]
struct Row {
    claim: Claim,
    token: Token,
    since: Moment,
}

#[async_trait]
impl Backend for Table {
    fn guarantees(&self) -> Guarantees {
        // No order, waiters poll, tokens rise as long as the table lives.
        Guarantees::new(Expiry::Lease, Duration::from_millis(10))
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let start = Moment::now();
        loop {
            let sent = Moment::now();
            if let Some(token) = self.rows().insert(claim) {
                return Ok(Some(Box::new(TableHold {
                    table: self.clone(),
                    claim: claim.clone(),
                    token,
                    validity: Validity::new(sent, claim.ttl),
                })));
            }
            if claim.wait.is_some_and(|wait| start.elapsed() >= wait) {
                return Ok(None);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        Ok(self.rows().get(key).map(|row| {
            let mut holder = Holder::new(row.claim.id.to_string());
            holder.owner = Some(row.claim.owner.to_string());
            holder.label = row.claim.label.as_deref().map(Into::into);
            holder.token = Some(row.token);
            holder
        }))
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let mut rows = self.rows();
        let named = |row: &mut Row| grant.is_none_or(|g| g.grant == row.claim.id.to_string());
        let found = rows.get(key).is_some_and(named);
        if found {
            rows.held.remove(key);
        }
        Ok(found)
    }
}

impl Table {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rows {
    /// The row of `key`, unless its time is up.
    fn get(&mut self, key: &Key) -> Option<&mut Row> {
        let row = self.held.get_mut(key)?;
        (row.since.elapsed() < row.claim.ttl).then_some(row)
    }

    fn insert(&mut self, claim: &Claim) -> Option<Token> {
        if self.get(&claim.key).is_some() {
            return None;
        }
        self.last_token += 1;
        let row = Row {
            claim: claim.clone(),
            token: Token::new(self.last_token),
            since: Moment::now(),
        };
        let token = row.token;
        self.held.insert(claim.key.clone(), row);
        Some(token)
    }

    /// The row of this very claim: never that of a successor.
    fn held_by(&mut self, key: &Key, claim: Uuid) -> Result<&mut Row> {
        let row = self.get(key).filter(|row| row.claim.id == claim);
        row.ok_or_else(|| Error::new(ErrorKind::Lost, "the row is not ours any more"))
    }
}

#[derive(Debug)]
struct TableHold {
    table: Table,
    claim: Claim,
    token: Token,
    validity: Validity,
}

#[async_trait]
impl Hold for TableHold {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        let sent = Moment::now();
        let mut rows = self.table.rows();
        rows.held_by(&self.claim.key, self.claim.id)?.since = Moment::now();
        self.validity.extend(sent, self.claim.ttl);
        Ok(())
    }

    async fn release(&mut self) -> Result<()> {
        let mut rows = self.table.rows();
        rows.held_by(&self.claim.key, self.claim.id)?;
        rows.held.remove(&self.claim.key);
        Ok(())
    }
}
