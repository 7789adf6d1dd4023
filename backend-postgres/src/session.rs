use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use leasehold_core::{Error, Moment, Result, Token, Validity};
use sqlx::postgres::{PgNotification, PgRow};
use sqlx::{Executor, PgConnection, Row, raw_sql};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, oneshot, watch};
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::PostgresOptions;
use crate::connection::{Connection, connecting, in_recovery_error, one};
use crate::error::{code, explain, is_survived};
use crate::hold::{PostgresHold, gone};
use crate::key_form::LockId;
use crate::peer::{DONE, Known, Message, NONE, Question, channel};
use crate::sql::{Reserve, Sql};
use crate::turn::{Claimant, Place, Turn, Turns, Waiter};

/// One connection to the server with the locks that it has, owned by a task of its own.
///
/// 1. *One task, one statement at a time.* Whoever wants something sends a [`Job`] and may go away;
///    the task drives every statement to its end, since sqlx cannot take one back, and frees what
///    nobody wants any more. A statement that is still not answered when the session's validity is
///    over is dropped together with the connection.
/// 2. *Validity.* The server ends a session that has been idle for a ttl (`idle_session_timeout`).
///    Any answered statement proves that it was not idle when the statement was sent, so it counts
///    from there; if nothing else was sent for a third of the ttl, the task sends a heartbeat. All
///    holds on the session have children of its validity.
/// 3. *Loss.* The server's farewell, the end of the connection, the end of the validity, or another
///    backend's id in an answer (a pooler) end the session and with it all its holds.
/// 4. *Shared* sessions carry many locks and never wait. *Waiting* ones wait for one key at a time
///    and then carry that lock only: else other holds could not be kept alive during the wait, and
///    the server would see deadlocks between owners that have none.
/// 5. *Waiting in slices.* A statement that waits holds a snapshot, behind which VACUUM cannot clean
///    and for which `CREATE INDEX CONCURRENTLY` waits, for ever if it is the lock's holder who runs
///    it. So it waits for at most a second and comes again. A slice is also short against the ttl: so
///    a grant that was waited for, which counts from the sending of its slice, is still fresh.
/// 6. *Errors of a lock statement* leave it open whether the lock was taken (10 of 400 cancels took
///    it), so its keys are unlocked once. If that fails too, the session is closed.
pub(crate) struct Session {
    pub(crate) pid: i32,
    kind: Kind,
    ttl: Duration,
    validity: Validity,
    turns: Arc<Turns>,
    jobs: mpsc::UnboundedSender<Job>,
    /// Holds and attempts.
    load: AtomicUsize,
    /// A waiting session that has something to do.
    taken: AtomicBool,
    /// An answer is overdue: others had better use another session.
    overdue: AtomicBool,
    /// The key that a waiting session waited for last.
    last_key: AtomicI64,
    /// Tells the task to let go of everything.
    closing: Arc<Notify>,
    /// Its other end is the task's.
    over: watch::Receiver<()>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Shared,
    Waiting,
}

/// What a session's task does for others.
#[derive(Debug)]
pub(crate) enum Job {
    /// Takes the lock if it is free.
    Try {
        attempt: Attempt,
        claimant: Claimant,
        answer: oneshot::Sender<Tried>,
    },
    /// Waits for the lock, for this claim or for those that queue behind it in this process.
    Wait { attempt: Attempt, waiter: Waiter },
    /// Frees the lock, if this grant still has it.
    Unlock {
        key: LockId,
        token: Token,
        answer: Option<oneshot::Sender<Result<()>>>,
    },
    /// What the server knows about who has the lock; and asks that session, where it listens.
    Ask {
        key: LockId,
        what: Option<Question>,
        seen: oneshot::Sender<Result<Option<Seen>>>,
        reply: oneshot::Sender<String>,
    },
    /// Whether the session still has this grant, and the server the session.
    Check {
        key: LockId,
        token: Token,
        answer: oneshot::Sender<Result<()>>,
    },
    /// Interrupts the wait of another session of this client.
    Interrupt { pid: i32 },
    /// Ends the session if it has nothing to do.
    Retire,
}

/// The right to take a lock: the turn of its key in this process, and a place among the holds.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) turn: Turn,
    /// Given back when it is dropped.
    pub(crate) _place: OwnedSemaphorePermit,
}

/// What the server knows about a lock that is held.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) pid: i32,
    /// Names the session.
    pub(crate) session: String,
    pub(crate) other_locks: u64,
    pub(crate) listens: bool,
}

/// What became of a [`Job::Try`].
#[derive(Debug)]
pub(crate) enum Tried {
    Granted(PostgresHold),
    /// Another session has it.
    Refused(Attempt),
    Failed(Attempt, Error),
    /// The session ended before anything was sent.
    NotSent(Attempt),
}

/// What all sessions of a client have in common.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) options: PostgresOptions,
    pub(crate) sql: Sql,
    pub(crate) turns: Arc<Turns>,
    /// The highest token that was given to us.
    pub(crate) highest_token: AtomicI64,
    /// A waiting session has become idle, or has ended.
    pub(crate) freed: Notify,
}

impl Session {
    /// The most locks that a session carries: each one makes its heartbeat slower (0.17 ms with 100,
    /// 0.88 ms with 10,000).
    pub(crate) const MAX_HOLDS: usize = 2500;

    /// Connects; the task that is returned must be run for the session to live.
    pub(crate) async fn open(
        common: Arc<Common>,
        kind: Kind,
        ttl: Duration,
        permits: Vec<OwnedSemaphorePermit>,
    ) -> Result<(Arc<Self>, Task)> {
        let options = &common.options;
        let failed = |error| explain(&connecting(options), error);
        let mut connection = Connection::open(options).await?;
        let raw = connection.get().await.map_err(failed)?;
        let set_up = Sql::set_up(ttl, slice(ttl));
        let rows = raw.fetch_all(raw_sql(set_up)).await.map_err(failed)?;
        let last = rows
            .last()
            .ok_or(sqlx::Error::RowNotFound)
            .map_err(failed)?;
        let pid: i32 = last.try_get(0).map_err(failed)?;
        if last.try_get(1).map_err(failed)? {
            return Err(in_recovery_error(options));
        }
        let seen = common.highest_token.load(Ordering::Acquire);
        // The server counts the idle time from after this.
        let sent = Moment::now();
        let reserve = (kind == Kind::Shared).then_some(Reserve { pid });
        raw.execute(raw_sql(common.sql.begin(pid, seen, reserve)))
            .await
            .map_err(failed)?;
        let (jobs, inbox) = mpsc::unbounded_channel();
        let (not_over, over) = watch::channel(());
        let session = Arc::new(Self {
            pid,
            kind,
            ttl,
            validity: Validity::new(sent, ttl),
            turns: common.turns.clone(),
            jobs,
            load: AtomicUsize::new(0),
            taken: AtomicBool::new(kind == Kind::Waiting),
            overdue: AtomicBool::new(false),
            last_key: AtomicI64::new(0),
            closing: Arc::default(),
            over,
        });
        let task = Task {
            connection: Some(connection),
            common,
            me: Arc::downgrade(&session),
            validity: session.validity.clone(),
            closing: session.closing.clone(),
            inbox,
            pid,
            kind,
            ttl,
            held: HashMap::new(),
            has_reserve: kind == Kind::Shared,
            asked: HashMap::new(),
            questions: 0,
            known: HashMap::new(),
            last_sent: sent,
            last_used: Moment::now(),
            _permits: permits,
            _not_over: not_over,
        };
        debug!(target: "leasehold", pid, ?kind, ?ttl, "session opened");
        Ok((session, task))
    }

    pub(crate) fn validity(&self) -> &Validity {
        &self.validity
    }

    /// The release of `key`, which it holds, is on the way.
    pub(crate) fn leaving(&self, key: LockId) {
        if self.is_open() {
            self.turns.leaving(key);
        }
    }

    /// Hands a job to the task; gives it back if the session has ended.
    pub(crate) fn send(&self, job: Job) -> Result<(), Job> {
        self.jobs.send(job).map_err(|returned| returned.0)
    }

    /// Whether it serves claims of this ttl.
    pub(crate) fn serves(&self, kind: Kind, ttl: Duration) -> bool {
        self.kind == kind && self.ttl == ttl && self.is_open()
    }

    pub(crate) fn is_shared(&self) -> bool {
        self.kind == Kind::Shared
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.jobs.is_closed() && !self.validity.is_ended()
    }

    /// Whether one more lock may be tried on it.
    pub(crate) fn has_room(&self) -> bool {
        !self.overdue.load(Ordering::Acquire) && self.load.load(Ordering::Acquire) < Self::MAX_HOLDS
    }

    /// Whether nobody uses it.
    pub(crate) fn is_idle(&self) -> bool {
        match self.kind {
            Kind::Shared => self.load.load(Ordering::Acquire) == 0,
            Kind::Waiting => !self.taken.load(Ordering::Acquire),
        }
    }

    /// Takes an idle waiting session for oneself.
    pub(crate) fn take(&self) -> bool {
        !self.taken.swap(true, Ordering::AcqRel)
    }

    /// Lets others take it.
    pub(crate) fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }

    pub(crate) fn waited_for(&self, key: LockId) -> bool {
        self.last_key.load(Ordering::Acquire) == key
    }

    /// A claim has given up waiting for an answer.
    pub(crate) fn set_overdue(&self) {
        self.overdue.store(true, Ordering::Release);
    }

    pub(crate) fn count(&self, more: usize) {
        self.load.fetch_add(more, Ordering::AcqRel);
    }

    pub(crate) fn discount(&self, less: usize) {
        self.load.fetch_sub(less, Ordering::AcqRel);
    }

    /// Ends it, whatever it is doing.
    pub(crate) fn close(&self) {
        self.closing.notify_one();
    }

    /// Resolves when its connection is closed.
    pub(crate) async fn closed(&self) {
        // Nothing is ever sent; the other end is dropped with the task.
        let _over = self.over.clone().changed().await;
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("kind", &self.kind)
            .field("ttl", &self.ttl)
            .field("load", &self.load)
            .field("validity", &self.validity)
            .finish_non_exhaustive()
    }
}

/// How long a statement waits in the server.
pub(crate) fn slice(ttl: Duration) -> Duration {
    const LONGEST: Duration = Duration::from_secs(1);
    (ttl / 4).min(LONGEST)
}

/// The session's own side: its connection and its locks.
pub(crate) struct Task {
    /// There until the end.
    connection: Option<Connection>,
    common: Arc<Common>,
    me: std::sync::Weak<Session>,
    validity: Validity,
    closing: Arc<Notify>,
    inbox: mpsc::UnboundedReceiver<Job>,
    pid: i32,
    kind: Kind,
    ttl: Duration,
    held: HashMap<LockId, Held>,
    /// Whether it has its reserve in the lock table.
    has_reserve: bool,
    /// Questions of ours that others have not answered yet.
    asked: HashMap<u64, (i32, oneshot::Sender<String>)>,
    questions: u64,
    /// Who has asked of late, since when we know, and whether it may.
    known: HashMap<i32, (Moment, bool)>,
    /// When the last statement that was answered was sent.
    last_sent: Moment,
    last_used: Moment,
    _permits: Vec<OwnedSemaphorePermit>,
    _not_over: watch::Sender<()>,
}

/// A lock that is ours.
struct Held {
    token: Token,
    validity: Validity,
    claimant: Claimant,
    since: SystemTime,
    _attempt: Attempt,
}

/// `out_of_memory`, which the lock table is said to be when it is full.
const TABLE_FULL: &str = "53200";

/// Why a session ended.
#[derive(Debug)]
enum End {
    /// Nobody needs it.
    Unused,
    /// The backend is being closed.
    Closed,
    Lost(String),
}

/// What came of a statement.
enum Failure {
    /// The server refused it; the session goes on.
    Refused(sqlx::Error),
    Ended(End),
}

impl Task {
    pub(crate) async fn run(mut self) {
        let end = self.serve().await;
        self.validity.end();
        match &end {
            End::Lost(reason) => warn!(
                target: "leasehold",
                pid = self.pid, held = self.held.len(), reason, "session lost"
            ),
            end => debug!(target: "leasehold", pid = self.pid, ?end, "session ends"),
        }
        // Whoever waits for a turn may go on elsewhere meanwhile.
        self.let_go();
        if let Some(connection) = self.connection.take() {
            match end {
                End::Unused | End::Closed => connection.close().await,
                End::Lost(_) => drop(connection),
            }
        }
        self.common.freed.notify_waiters();
    }

    async fn serve(&mut self) -> End {
        /// So long a session that nobody uses is kept for the next claim.
        const SPARE: Duration = Duration::from_secs(60);
        loop {
            let Some(connection) = &mut self.connection else {
                return End::Unused;
            };
            if let Some(notification) = connection.heard() {
                match self.hear(&notification).await {
                    Ok(()) => continue,
                    Err(end) => return end,
                }
            }
            let heartbeat = (self.ttl / 3).saturating_sub(self.last_sent.elapsed());
            let done = tokio::select! {
                biased;
                () = self.closing.notified() => return End::Closed,
                job = self.inbox.recv() => match job {
                    Some(job) => self.handle(job).await,
                    None => return End::Unused,
                },
                heard = connection.hear() => match heard {
                    Some(notification) => self.hear(&notification).await,
                    None => return End::Lost("the connection was lost".into()),
                },
                () = sleep(heartbeat) => {
                    if self.held.is_empty() && self.last_used.elapsed() > SPARE {
                        return self.retire();
                    }
                    self.heartbeat().await
                }
            };
            if let Err(end) = done {
                return end;
            }
        }
    }

    async fn handle(&mut self, job: Job) -> Result<(), End> {
        self.last_used = Moment::now();
        match job {
            Job::Try {
                attempt,
                claimant,
                answer,
            } => self.try_lock(attempt, claimant, answer).await,
            Job::Wait { attempt, waiter } => self.wait(attempt, waiter).await,
            Job::Unlock { key, token, answer } => {
                let (answered, end) = match self.unlock(key, token).await {
                    Ok(answered) => (answered, Ok(())),
                    Err(end) => (Err(gone()), Err(end)),
                };
                if let Some(answer) = answer {
                    // Nobody needs to hear it.
                    let _unheard = answer.send(answered);
                }
                end
            }
            Job::Ask {
                key,
                what,
                seen,
                reply,
            } => self.ask_others(key, what, seen, reply).await,
            Job::Check { key, token, answer } => {
                if !self.has(key, token) {
                    let _unheard = answer.send(Err(gone()));
                    return Ok(());
                }
                self.heartbeat().await?;
                let _unheard = answer.send(Ok(()));
                Ok(())
            }
            Job::Interrupt { pid } => {
                let sql = Sql::interrupt(pid);
                match self
                    .ask(async |connection: &mut PgConnection| one(connection, sql).await)
                    .await
                {
                    Err(Failure::Ended(end)) => Err(end),
                    // The wait ends by itself.
                    Ok(_) | Err(Failure::Refused(_)) => Ok(()),
                }
            }
            Job::Retire if self.held.is_empty() => Err(self.retire()),
            Job::Retire => Ok(()),
        }
    }

    async fn try_lock(
        &mut self,
        attempt: Attempt,
        claimant: Claimant,
        answer: oneshot::Sender<Tried>,
    ) -> Result<(), End> {
        let key = attempt.turn.key();
        let tried = match self.ask_try(key).await {
            Ok(Some(token)) => match self.grant(attempt, claimant, token) {
                Some(hold) => Tried::Granted(hold),
                None => return Err(End::Unused),
            },
            Ok(None) => {
                self.discount();
                Tried::Refused(attempt)
            }
            Err(Failure::Ended(end)) => return Err(end),
            Err(Failure::Refused(error)) => {
                self.discount();
                self.unlock_once(key).await?;
                if code(&error) == Some(TABLE_FULL) {
                    self.give_up_reserve().await?;
                }
                let doing = format!("locking on {}", self.common.options.address());
                Tried::Failed(attempt, explain(&doing, error))
            }
        };
        // The claim is gone: dropped, a hold frees its lock, and an attempt passes its turn on.
        drop(answer.send(tried));
        Ok(())
    }

    async fn ask_try(&mut self, key: LockId) -> Result<Option<i64>, Failure> {
        if !self.has_reserve {
            let take = Reserve { pid: self.pid }.take();
            let taken = self
                .ask(async |connection: &mut PgConnection| one(connection, take).await)
                .await;
            if let Err(Failure::Refused(error)) = taken {
                // Some of it may have been taken.
                self.give_up_reserve().await.map_err(Failure::Ended)?;
                return Err(Failure::Refused(error));
            }
            taken?;
            self.has_reserve = true;
        }
        let sql = self.common.sql.try_lock.clone();
        let row = self
            .ask(async |connection: &mut PgConnection| {
                sqlx::query(sql).bind([key]).fetch_one(connection).await
            })
            .await?;
        row.try_get(1).map_err(Failure::Refused)
    }

    async fn give_up_reserve(&mut self) -> Result<(), End> {
        self.has_reserve = false;
        let give_up = Reserve { pid: self.pid }.give_up();
        let given = self
            .ask(async |connection: &mut PgConnection| one(connection, give_up).await)
            .await;
        match given {
            Ok(_row) => Ok(()),
            Err(Failure::Ended(end)) => Err(end),
            Err(Failure::Refused(error)) => Err(End::Lost(error.to_string())),
        }
    }

    /// Waits in slices, for this claim or for whoever is next in the queue when it is gone; a slice
    /// that nobody wants any more is let end.
    async fn wait(&mut self, attempt: Attempt, waiter: Waiter) -> Result<(), End> {
        let key = attempt.turn.key();
        if let Some(me) = self.me.upgrade() {
            me.last_key.store(key, Ordering::Release);
        }
        let sql = self.common.sql.wait(key);
        let mut waiter = Some(waiter).filter(|waiter| !waiter.is_gone());
        if waiter.is_none() {
            waiter = attempt.turn.next().filter(|waiter| waiter.ttl == self.ttl);
        }
        let place = loop {
            if waiter.is_none() {
                break Place::Turn(attempt.turn);
            }
            let slice = self
                .ask(async |connection: &mut PgConnection| one(connection, sql.clone()).await)
                .await;
            let token = match slice.and_then(|row| token_of(&row).map_err(Failure::Refused)) {
                Ok(token) => token,
                Err(Failure::Ended(end)) => {
                    // It asks again, elsewhere, and has not lost its place among us.
                    if let Some(waiter) = waiter {
                        drop(waiter.answer(Place::Turn(attempt.turn)));
                    }
                    return Err(end);
                }
                Err(Failure::Refused(error)) => {
                    let error = explain("waiting for a lock", error);
                    warn!(target: "leasehold", pid = self.pid, %error, "a wait was interrupted");
                    self.unlock_once(key).await?;
                    break Place::Turn(attempt.turn);
                }
            };
            self.last_used = Moment::now();
            // Kept until all is cleared up: it may be waiting for that.
            let mut gone = None;
            if waiter.as_ref().is_none_or(Waiter::is_gone) {
                gone = std::mem::replace(&mut waiter, attempt.turn.next());
            }
            // The server's side of this session has the ttl of the first claim.
            let served = waiter.as_ref().filter(|waiter| waiter.ttl == self.ttl);
            match (token, served) {
                (Some(token), Some(served)) => {
                    let claimant = served.claimant.clone();
                    match self.grant(attempt, claimant, token) {
                        Some(hold) => break Place::Granted(hold),
                        None => return Err(End::Unused),
                    }
                }
                (None, Some(_)) => {}
                (token, None) => {
                    if token.is_some() {
                        self.unlock_once(key).await?;
                    }
                    drop(gone);
                    break Place::Turn(attempt.turn);
                }
            }
        };
        if matches!(place, Place::Turn(_)) {
            self.now_idle();
        }
        // Dropped where nobody wants it: a hold is then freed, a turn passed on.
        if let Some(waiter) = waiter {
            drop(waiter.answer(place));
        }
        Ok(())
    }

    /// The lock is ours. `None`: nobody is left who could have it.
    fn grant(&mut self, attempt: Attempt, claimant: Claimant, token: i64) -> Option<PostgresHold> {
        let session = self.me.upgrade()?;
        let key = attempt.turn.key();
        self.common.highest_token.fetch_max(token, Ordering::AcqRel);
        let token = Token::new(token.unsigned_abs());
        let hold = PostgresHold::new(session, key, token);
        let held = Held {
            token,
            validity: leasehold_core::Hold::validity(&hold).clone(),
            claimant,
            since: wall_clock(),
            _attempt: attempt,
        };
        self.held.insert(key, held);
        Some(hold)
    }

    /// Frees the lock of this grant.
    async fn unlock(&mut self, key: LockId, token: Token) -> Result<Result<()>, End> {
        if !self.has(key, token) {
            return Ok(Err(gone()));
        }
        let asked = self.ask_unlock(key).await;
        let unlocked = match asked {
            Ok(unlocked) => unlocked,
            Err(Failure::Ended(end)) => return Err(end),
            Err(Failure::Refused(error)) => {
                let error = explain("unlocking", error);
                warn!(target: "leasehold", pid = self.pid, %error, "an unlock was interrupted");
                self.unlock_once(key).await?;
                true
            }
        };
        // Before the answer goes out: who hears it may ask again at once.
        match self.kind {
            Kind::Shared => self.discount(),
            Kind::Waiting => self.now_idle(),
        }
        drop(self.held.remove(&key));
        Ok(if unlocked { Ok(()) } else { Err(gone()) })
    }

    /// After a statement that was refused: makes sure that the lock is not held. It usually is not.
    async fn unlock_once(&mut self, key: LockId) -> Result<(), End> {
        match self.ask_unlock(key).await {
            Ok(_was_held) => Ok(()),
            Err(Failure::Ended(end)) => Err(end),
            Err(Failure::Refused(error)) => {
                Err(End::Lost(format!("a lock could not be freed: {error}")))
            }
        }
    }

    async fn ask_unlock(&mut self, key: LockId) -> Result<bool, Failure> {
        let sql = match self.kind {
            Kind::Shared => &self.common.sql.unlock,
            Kind::Waiting => &self.common.sql.unlock_alone,
        }
        .clone();
        let row = self
            .ask(async |connection: &mut PgConnection| {
                sqlx::query(sql).bind([key]).fetch_one(connection).await
            })
            .await?;
        row.try_get(1).map_err(Failure::Refused)
    }

    async fn ask_others(
        &mut self,
        key: LockId,
        what: Option<Question>,
        seen: oneshot::Sender<Result<Option<Seen>>>,
        reply: oneshot::Sender<String>,
    ) -> Result<(), End> {
        self.questions += 1;
        let number = self.questions;
        let question = what.map(|what| Message::Question {
            number,
            reply_to: self.pid,
            key,
            what,
        });
        let (sql, (class, object, kind)) = {
            let sql = &self.common.sql;
            (sql.holder.clone(), sql.key_form.in_pg_locks(key))
        };
        let asked = self
            .ask(async |connection: &mut PgConnection| {
                let question = question.map(|question| question.write());
                let query = sqlx::query(sql).bind(class).bind(object).bind(kind);
                query.bind(question).fetch_one(connection).await
            })
            .await;
        let found = match asked.and_then(|row| seen_in(&row).map_err(Failure::Refused)) {
            Ok(found) => Ok(found),
            Err(Failure::Ended(end)) => return Err(end),
            Err(Failure::Refused(error)) => Err(explain("who holds a lock", error)),
        };
        if let Ok(Some(found)) = &found
            && found.listens
        {
            self.asked.retain(|_, (_, asked)| !asked.is_closed());
            self.asked.insert(number, (found.pid, reply));
        }
        let _unheard = seen.send(found);
        Ok(())
    }

    async fn hear(&mut self, notification: &PgNotification) -> Result<(), End> {
        let from = i32::try_from(notification.process_id()).unwrap_or_default();
        match Message::read(notification.payload()) {
            Some(Message::Answer { number, text }) => {
                // Anybody may send one; it counts from the one who was asked.
                if let Some((pid, asked)) = self.asked.remove(&number)
                    && pid == from
                {
                    let _unheard = asked.send(text);
                }
                Ok(())
            }
            Some(Message::Question {
                number,
                reply_to,
                key,
                what,
            }) => {
                if from != reply_to || !self.may_end_us(from).await? {
                    debug!(target: "leasehold", from, "a question without the right to ask it");
                    return Ok(());
                }
                let text = self.answer(key, what).await?;
                self.notify(reply_to, &Message::Answer { number, text })
                    .await
            }
            None => Ok(()),
        }
    }

    async fn answer(&mut self, key: LockId, what: Question) -> Result<String, End> {
        let Some(held) = self.held.get(&key) else {
            return Ok(NONE.into());
        };
        match what {
            Question::Who => {
                let known = Known {
                    token: held.token,
                    owner: held.claimant.owner.to_string(),
                    label: held.claimant.label.as_deref().map(Into::into),
                    since: held.since,
                    remaining: held.validity.remaining(),
                };
                Ok(known.write())
            }
            Question::Evict(named) if named.is_none_or(|token| token == held.token) => {
                let token = held.token;
                // Before the next one can have it.
                held.validity.end();
                warn!(target: "leasehold", %token, "a lock was taken away by an operator");
                let unlocked = self.unlock(key, token).await?;
                Ok(if unlocked.is_ok() { DONE } else { NONE }.into())
            }
            Question::Evict(_) => Ok(NONE.into()),
        }
    }

    async fn may_end_us(&mut self, pid: i32) -> Result<bool, End> {
        /// So long an answer is good for further questions.
        const KNOWN: Duration = Duration::from_secs(1);
        self.known.retain(|_, (since, _)| since.elapsed() < KNOWN);
        if let Some((_, may)) = self.known.get(&pid) {
            return Ok(*may);
        }
        let since = Moment::now();
        let sql = self.common.sql.may_end_us.clone();
        let asked = self
            .ask(async |connection: &mut PgConnection| {
                sqlx::query(sql).bind(pid).fetch_one(connection).await
            })
            .await;
        let may = match asked {
            Ok(row) => row.try_get(1).unwrap_or(false),
            Err(Failure::Ended(end)) => return Err(end),
            Err(Failure::Refused(_)) => false,
        };
        self.known.insert(pid, (since, may));
        Ok(may)
    }

    async fn notify(&mut self, pid: i32, message: &Message) -> Result<(), End> {
        let sql = self.common.sql.notify.clone();
        let asked = self
            .ask(async |connection: &mut PgConnection| {
                let query = sqlx::query(sql).bind(channel(pid)).bind(message.write());
                query.fetch_one(connection).await
            })
            .await;
        match asked {
            Err(Failure::Ended(end)) => Err(end),
            // Who waits for it hears nothing, which may happen anyway.
            Ok(_) | Err(Failure::Refused(_)) => Ok(()),
        }
    }

    async fn heartbeat(&mut self) -> Result<(), End> {
        let sql = self.common.sql.heartbeat.clone();
        let asked = self
            .ask(async |connection: &mut PgConnection| sqlx::query(sql).fetch_one(connection).await)
            .await;
        match asked {
            Ok(_row) => Ok(()),
            Err(Failure::Ended(end)) => Err(end),
            // Cancelled by somebody; the answer proves as much.
            Err(Failure::Refused(error)) if code(&error) == Some("57014") => Ok(()),
            Err(Failure::Refused(error)) => Err(End::Lost(error.to_string())),
        }
    }

    /// The one place through which statements go: drives one to its end.
    async fn ask(
        &mut self,
        statement: impl AsyncFnOnce(&mut PgConnection) -> sqlx::Result<PgRow>,
    ) -> Result<PgRow, Failure> {
        let lost = |reason: String| Failure::Ended(End::Lost(reason));
        let Some(connection) = &mut self.connection else {
            return Err(Failure::Ended(End::Unused));
        };
        let sent = Moment::now();
        let answer = tokio::select! {
            biased;
            answer = async { statement(connection.get().await?).await } => answer,
            () = self.validity.ended() => return Err(lost("the server did not answer in time".into())),
            () = self.closing.notified() => return Err(Failure::Ended(End::Closed)),
        };
        match &answer {
            Err(error) if !is_survived(error) => return Err(lost(error.to_string())),
            Ok(row) if row.try_get::<i32, _>(0).ok() != Some(self.pid) => {
                return Err(lost(
                    "another session has answered: there is a pooler in between that changes them"
                        .into(),
                ));
            }
            _ => {}
        }
        if !self.validity.extend(sent, self.ttl) {
            return Err(lost("the answer came too late".into()));
        }
        self.last_sent = sent;
        if let Some(me) = self.me.upgrade() {
            me.overdue.store(false, Ordering::Release);
        }
        answer.map_err(Failure::Refused)
    }

    fn has(&self, key: LockId, token: Token) -> bool {
        self.held.get(&key).is_some_and(|held| held.token == token)
    }

    fn discount(&self) {
        if let Some(me) = self.me.upgrade() {
            me.discount(1);
        }
    }

    /// A waiting session may be taken by the next claim.
    fn now_idle(&self) {
        if let Some(me) = self.me.upgrade() {
            me.give_back();
        }
        self.common.freed.notify_waiters();
    }

    /// Ends, unless there is something to do after all.
    fn retire(&mut self) -> End {
        self.inbox.close();
        End::Unused
    }

    /// Gives up all locks, and gives back all jobs that were not begun.
    fn let_go(&mut self) {
        self.inbox.close();
        while let Ok(job) = self.inbox.try_recv() {
            match job {
                Job::Try {
                    attempt, answer, ..
                } => drop(answer.send(Tried::NotSent(attempt))),
                Job::Wait { attempt, waiter } => drop(waiter.answer(Place::Turn(attempt.turn))),
                Job::Unlock { answer, .. } => {
                    if let Some(answer) = answer {
                        let _unheard = answer.send(Err(gone()));
                    }
                }
                Job::Check { answer, .. } => {
                    let _unheard = answer.send(Err(gone()));
                }
                // Who asked hears that nobody answers.
                Job::Ask { .. } | Job::Interrupt { .. } | Job::Retire => {}
            }
        }
        self.held.clear();
    }
}

/// The runtime may end, and the task with it.
impl Drop for Task {
    fn drop(&mut self) {
        self.validity.end();
        self.let_go();
    }
}

fn seen_in(row: &PgRow) -> sqlx::Result<Option<Seen>> {
    let Some(pid) = row.try_get::<Option<i32>, _>(1)? else {
        return Ok(None);
    };
    let start: String = row.try_get(2)?;
    let others: i64 = row.try_get(3)?;
    Ok(Some(Seen {
        pid,
        session: format!("{pid}@{start}"),
        other_locks: others.unsigned_abs(),
        listens: row.try_get(4)?,
    }))
}

#[expect(
    clippy::disallowed_methods,
    reason = "shown to people, decides nothing"
)]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

fn token_of(row: &PgRow) -> sqlx::Result<Option<i64>> {
    let token: String = row.try_get(1)?;
    if token.is_empty() {
        return Ok(None);
    }
    token
        .parse()
        .map(Some)
        .map_err(|error| sqlx::Error::Decode(Box::new(error)))
}
