//! Locks in a SQLite database, for the processes of one Linux machine that share its file.
//!
//! 1. A client has one thread with one connection, which carries out what it is sent in this order. So
//!    what undoes a request comes after it, whenever the request was dropped.
//! 2. An acquire writes a row for its key, in one transaction, unless there is one whose time is not up;
//!    its token is one more than the last. Else it looks again, some times a second.
//! 3. Whose row it is goes by the claim: a row of a successor is neither renewed nor deleted.
//! 4. Time is that since the machine was started, which all processes see alike, which nobody sets, and
//!    which goes on while the machine sleeps. A row from before the last start holds nothing: nobody has
//!    survived it.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Error, ErrorKind, Expiry, Guarantees, Hold, Holder, Key, Listed, Moment, Page,
    Result, Token, Tokens, Validity,
};
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, TransactionBehavior, params};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::oneshot;

/// A client of a database.
#[derive(Debug, Clone)]
pub struct Sqlite {
    database: Database,
}

impl Sqlite {
    /// Opens the database file at `path`, and makes what is missing.
    ///
    /// # Errors
    /// `Unavailable`, if that cannot be done.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let database = Database::open(path.as_ref()).map_err(|e| unavailable(&e))?;
        Ok(Self { database })
    }
}

#[async_trait]
impl Backend for Sqlite {
    fn guarantees(&self) -> Guarantees {
        // No order, and waiters poll.
        let mut guarantees = Guarantees::new(Expiry::Lease, Duration::from_millis(500));
        guarantees.tokens = Tokens::Durable;
        guarantees
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        const PAUSE: Duration = Duration::from_millis(10);
        let start = Moment::now();
        let mut undo = Undo {
            database: self.database.clone(),
            claim: Some(claim.clone()),
        };
        loop {
            let sent = Moment::now();
            let row = claim.clone();
            let granted = self.database.run(move |db| insert(db, &row)).await?;
            if let Some(token) = granted {
                undo.claim = None;
                return Ok(Some(Box::new(SqliteHold {
                    database: self.database.clone(),
                    claim: claim.clone(),
                    token: Token::new(token),
                    validity: Validity::new(sent, claim.ttl),
                })));
            }
            let pause = match claim.wait {
                Some(wait) => match wait.saturating_sub(start.elapsed()) {
                    Duration::ZERO => return Ok(None),
                    left => left.min(PAUSE),
                },
                None => PAUSE,
            };
            tokio::time::sleep(pause).await;
        }
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let key = key.clone();
        self.database.run(move |db| holder(db, &key)).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let (key, claim) = (key.clone(), grant.map(|grant| grant.grant.clone()));
        self.database
            .run(move |db| {
                let sql = "DELETE FROM locks WHERE key = ?1 AND boot = ?2 AND until > ?3 \
                           AND (?4 IS NULL OR claim = ?4)";
                db.execute(sql, params![key.as_str(), boot(), now(), claim])
            })
            .await
            .map(|deleted| deleted > 0)
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        let prefix = prefix.to_owned();
        let after = String::from_utf8_lossy(after.unwrap_or_default()).into_owned();
        self.database.run(move |db| list(db, &prefix, &after)).await
    }
}

#[derive(Debug)]
struct SqliteHold {
    database: Database,
    claim: Claim,
    token: Token,
    validity: Validity,
}

#[async_trait]
impl Hold for SqliteHold {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        let (sent, claim) = (Moment::now(), self.claim.clone());
        let changed = self.database.run(move |db| {
            let sql = "UPDATE locks SET until = ?3 + ?4 \
                       WHERE claim = ?1 AND boot = ?2 AND until > ?3";
            let ttl = nanoseconds(claim.ttl);
            db.execute(sql, params![claim.id.to_string(), boot(), now(), ttl])
        });
        ours(changed.await?)?;
        self.validity.extend(sent, self.claim.ttl);
        Ok(())
    }

    async fn release(&mut self) -> Result<()> {
        let claim = self.claim.clone();
        ours(self.database.run(move |db| delete(db, &claim)).await?)
    }
}

/// Deletes the row of an acquire that was dropped or failed, if it was written.
#[derive(Debug)]
struct Undo {
    database: Database,
    claim: Option<Claim>,
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            // What cannot be undone ends with its time.
            self.database.send(move |db| drop(delete(db, &claim)));
        }
    }
}

/// The thread with the connection; it ends with the last clone of this.
#[derive(Debug, Clone)]
struct Database {
    jobs: mpsc::Sender<Job>,
}

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

impl Database {
    fn open(path: &Path) -> rusqlite::Result<Self> {
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(Duration::from_secs(5))?;
        connection.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; \
             BEGIN IMMEDIATE; \
             CREATE TABLE IF NOT EXISTS locks (key TEXT PRIMARY KEY, claim TEXT UNIQUE NOT NULL, \
               owner TEXT NOT NULL, label TEXT, token INTEGER NOT NULL, boot TEXT NOT NULL, \
               until INTEGER NOT NULL); \
             CREATE TABLE IF NOT EXISTS tokens (last INTEGER NOT NULL); \
             INSERT INTO tokens SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM tokens); \
             COMMIT;",
        )?;
        let (jobs, queue) = mpsc::channel::<Job>();
        std::thread::spawn(move || {
            for job in queue {
                job(&mut connection);
            }
        });
        Ok(Self { jobs })
    }

    async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        // Nobody may be waiting for it any more.
        self.send(move |db| drop(answer.send(job(db))));
        match answered.await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(unavailable(&error)),
            Err(_) => Err(Error::new(ErrorKind::Other, "the database's thread ended")),
        }
    }

    fn send(&self, job: impl FnOnce(&mut Connection) + Send + 'static) {
        // If the thread ended, whoever waits sees that his answer cannot come.
        drop(self.jobs.send(Box::new(job)));
    }
}

/// Writes the row of a claim and says its token, unless another holds the key.
fn insert(db: &mut Connection, claim: &Claim) -> rusqlite::Result<Option<u64>> {
    let write = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    if is_held(&write, &claim.key)? {
        return Ok(None);
    }
    let next = "UPDATE tokens SET last = last + 1 RETURNING last";
    let token: u64 = write.query_row(next, [], |row| row.get(0))?;
    let (id, owner) = (claim.id.to_string(), claim.owner.to_string());
    let until = now() + nanoseconds(claim.ttl);
    write.execute(
        "INSERT OR REPLACE INTO locks VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        params![
            claim.key.as_str(),
            id,
            owner,
            claim.label.as_deref(),
            token,
            boot(),
            until
        ],
    )?;
    write.commit()?;
    Ok(Some(token))
}

fn is_held(db: &Transaction<'_>, key: &Key) -> rusqlite::Result<bool> {
    let sql = "SELECT 1 FROM locks WHERE key = ?1 AND boot = ?2 AND until > ?3";
    db.prepare_cached(sql)?
        .exists(params![key.as_str(), boot(), now()])
}

/// How many rows there were of this very claim, its time not up.
fn delete(db: &mut Connection, claim: &Claim) -> rusqlite::Result<usize> {
    let sql = "DELETE FROM locks WHERE claim = ?1 AND boot = ?2 AND until > ?3";
    db.execute(sql, params![claim.id.to_string(), boot(), now()])
}

fn holder(db: &mut Connection, key: &Key) -> rusqlite::Result<Option<Holder>> {
    let sql = "SELECT claim, owner, label, token, until - ?3 FROM locks \
               WHERE key = ?1 AND boot = ?2 AND until > ?3";
    db.query_row(sql, params![key.as_str(), boot(), now()], shown)
        .optional()
}

/// The next locks behind `after`. Waiters poll, so nobody knows how many there are.
fn list(db: &mut Connection, prefix: &str, after: &str) -> rusqlite::Result<Page> {
    const PAGE: usize = 500;
    // In bytes: SQLite's own ends of a text are those of C.
    let sql = "SELECT claim, owner, label, token, until - ?3, key FROM locks \
               WHERE key > ?1 AND boot = ?2 AND until > ?3 \
                 AND substr(CAST(key AS BLOB), 1, length(?4)) = ?4 \
               ORDER BY key LIMIT ?5";
    let mut rows = db.prepare_cached(sql)?;
    let asked = params![after, boot(), now(), prefix.as_bytes(), PAGE];
    let locks = rows.query_map(asked, |row| {
        let name: String = row.get(5)?;
        let mut listed = Listed::new(Key::new(&name).ok(), name);
        listed.holder = Some(shown(row)?);
        Ok(listed)
    })?;
    let locks: Vec<Listed> = locks.collect::<Result<_, _>>()?;
    let last = locks.last().filter(|_| locks.len() == PAGE);
    let next = last.map(|last| last.raw.clone().into_bytes());
    Ok(Page::new(locks, next))
}

fn shown(row: &Row<'_>) -> rusqlite::Result<Holder> {
    let mut holder = Holder::new(row.get::<_, String>(0)?);
    holder.owner = row.get(1)?;
    holder.label = row.get(2)?;
    holder.token = Some(Token::new(row.get(3)?));
    holder.remaining = Some(Duration::from_nanos(row.get(4)?));
    Ok(holder)
}

/// Nanoseconds since the machine was started.
fn now() -> i64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// This start of the machine.
fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("Linux")
}

fn nanoseconds(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_nanos()).unwrap_or(i64::MAX / 2)
}

fn ours(rows: usize) -> Result<()> {
    match rows {
        0 => Err(Error::new(ErrorKind::Lost, "the row is not ours any more")),
        _ => Ok(()),
    }
}

fn unavailable(error: &rusqlite::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the database: {error}"))
}
