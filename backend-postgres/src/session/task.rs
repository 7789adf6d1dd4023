use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use leasehold_core::{Hold as _, Moment, Result, Token, Validity};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, oneshot, watch};
use tokio::time::sleep;
use tracing::{debug, warn};

use super::{Attempt, Common, Job, Kind, Session, Tried, slice};
use crate::connection::{Connection, one};
use crate::error::{code, explain, is_survived};
use crate::hold::{PostgresHold, gone};
use crate::key_form::LockId;
use crate::sql::{Reserve, Sql};
use crate::turn::{Claimant, Place, Waiter};

/// The session's own side: its connection and its locks.
pub(crate) struct Task {
    /// There until the end.
    connection: Option<Connection>,
    pub(super) common: Arc<Common>,
    me: Weak<Session>,
    validity: Validity,
    closing: Arc<Notify>,
    pub(super) inbox: Inbox,
    pub(super) pid: i32,
    pub(super) kind: Kind,
    ttl: Duration,
    pub(super) held: HashMap<LockId, Held>,
    /// Whether it has its reserve in the lock table.
    pub(super) has_reserve: bool,
    /// Questions of ours that others have not answered yet.
    pub(super) asked: HashMap<u64, (i32, oneshot::Sender<String>)>,
    pub(super) questions: u64,
    /// Who has asked of late, since when we know, and whether it may.
    pub(super) known: HashMap<i32, (Moment, bool)>,
    /// When the last statement that was answered was sent.
    last_sent: Moment,
    last_used: Moment,
    _permits: Vec<OwnedSemaphorePermit>,
    _not_over: watch::Sender<()>,
}

/// A lock that is ours.
pub(super) struct Held {
    pub(super) token: Token,
    pub(super) validity: Validity,
    pub(super) claimant: Claimant,
    pub(super) since: SystemTime,
    _attempt: Attempt,
}

/// The jobs that are waiting, in order.
pub(super) struct Inbox {
    jobs: mpsc::UnboundedReceiver<Job>,
    /// Was taken out and is to be done next.
    put_back: Option<Job>,
}

/// `out_of_memory`, which the lock table is said to be when it is full.
pub(super) const TABLE_FULL: &str = "53200";

/// Why a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// Nobody needs it.
    Unused,
    /// The backend is being closed.
    Closed,
    Lost(String),
}

/// What came of a statement.
pub(super) enum Failure {
    /// The server refused it; the session goes on.
    Refused(sqlx::Error),
    Ended(End),
}

impl Task {
    pub(super) fn new(
        connection: Connection,
        common: Arc<Common>,
        session: &Arc<Session>,
        inbox: mpsc::UnboundedReceiver<Job>,
        sent: Moment,
        permits: Vec<OwnedSemaphorePermit>,
        not_over: watch::Sender<()>,
    ) -> Self {
        Self {
            connection: Some(connection),
            common,
            me: Arc::downgrade(session),
            validity: session.validity.clone(),
            closing: session.closing.clone(),
            inbox: Inbox {
                jobs: inbox,
                put_back: None,
            },
            pid: session.pid,
            kind: session.kind,
            ttl: session.ttl,
            held: HashMap::new(),
            has_reserve: session.kind == Kind::Shared,
            asked: HashMap::new(),
            questions: 0,
            known: HashMap::new(),
            last_sent: sent,
            last_used: Moment::now(),
            _permits: permits,
            _not_over: not_over,
        }
    }

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
            Job::Try { .. } | Job::Unlock { .. } | Job::Check { .. } => self.together(job).await,
            Job::Wait { attempt, waiter } => self.wait(attempt, waiter).await,
            Job::Ask {
                key,
                what,
                seen,
                reply,
            } => self.ask_others(key, what, seen, reply).await,
            Job::List { after, seen } => self.list(after, seen).await,
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

    /// Takes its reserve in the lock table again; the inner error says why it could not.
    pub(super) async fn take_reserve(&mut self) -> Result<Result<(), sqlx::Error>, End> {
        let take = Reserve { pid: self.pid }.take();
        let taken = self
            .ask(async |connection: &mut PgConnection| one(connection, take).await)
            .await;
        match taken {
            Ok(_row) => {
                self.has_reserve = true;
                Ok(Ok(()))
            }
            Err(Failure::Ended(end)) => Err(end),
            Err(Failure::Refused(error)) => {
                // Some of it may have been taken.
                self.give_up_reserve().await?;
                Ok(Err(error))
            }
        }
    }

    pub(super) async fn give_up_reserve(&mut self) -> Result<(), End> {
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
            waiter = attempt.turn.next();
        }
        let place = loop {
            // The server's side of this session has the ttl of the first claim.
            if waiter.as_ref().is_none_or(|next| next.ttl != self.ttl) {
                break Place::Turn(attempt.turn);
            }
            let row = self
                .ask(async |connection: &mut PgConnection| one(connection, sql.clone()).await)
                .await;
            let token = match row.and_then(|row| token_of(&row).map_err(Failure::Refused)) {
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
                    // What fails at once must not be tried again at once, for ever.
                    sleep(slice(self.ttl)).await;
                    break Place::Turn(attempt.turn);
                }
            };
            self.last_used = Moment::now();
            // Kept until all is cleared up: it may be waiting for that.
            let mut gone = None;
            if waiter.as_ref().is_none_or(Waiter::is_gone) {
                gone = std::mem::replace(&mut waiter, attempt.turn.next());
            }
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
    pub(super) fn grant(
        &mut self,
        attempt: Attempt,
        claimant: Claimant,
        token: i64,
    ) -> Option<PostgresHold> {
        let session = self.me.upgrade()?;
        let key = attempt.turn.key();
        self.common.highest_token.fetch_max(token, Ordering::AcqRel);
        let token = Token::new(token.unsigned_abs());
        let hold = PostgresHold::new(session, key, token);
        let held = Held {
            token,
            validity: hold.validity().clone(),
            claimant,
            since: wall_clock(),
            _attempt: attempt,
        };
        self.held.insert(key, held);
        Some(hold)
    }

    /// After a statement that was refused: makes sure that the lock is not held. It usually is not.
    pub(super) async fn unlock_once(&mut self, key: LockId) -> Result<(), End> {
        match self.ask_unlock(key).await {
            Ok(_was_held) => Ok(()),
            Err(failure) => Err(failure.of_an_unlock()),
        }
    }

    pub(super) async fn ask_unlock(&mut self, key: LockId) -> Result<bool, Failure> {
        let sql = match self.kind {
            Kind::Shared => &self.common.sql.unlock,
            Kind::Waiting => &self.common.sql.unlock_alone,
        }
        .clone();
        let row = self
            .ask(async |connection: &mut PgConnection| {
                sqlx::query(sql).bind(key).fetch_one(connection).await
            })
            .await?;
        row.try_get(1).map_err(Failure::Refused)
    }

    pub(super) async fn heartbeat(&mut self) -> Result<(), End> {
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
    pub(super) async fn ask(
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

    pub(super) fn has(&self, key: LockId, token: Token) -> bool {
        self.held.get(&key).is_some_and(|held| held.token == token)
    }

    pub(super) fn discount(&self) {
        if let Some(me) = self.me.upgrade() {
            me.discount(1);
        }
    }

    /// A waiting session may be taken by the next claim.
    pub(super) fn now_idle(&self) {
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
        while let Some(job) = self.inbox.try_recv() {
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
                Job::Ask { .. } | Job::List { .. } | Job::Interrupt { .. } | Job::Retire => {}
            }
        }
        self.held.clear();
    }
}

impl Failure {
    /// What it means where a lock had to be freed after another failure.
    pub(super) fn of_an_unlock(self) -> End {
        match self {
            Self::Ended(end) => end,
            Self::Refused(error) => End::Lost(format!("a lock could not be freed: {error}")),
        }
    }
}

impl Inbox {
    /// `None`: there will be no more.
    ///
    /// # Cancel safety
    /// If dropped, no job is lost.
    async fn recv(&mut self) -> Option<Job> {
        match self.put_back.take() {
            Some(job) => Some(job),
            None => self.jobs.recv().await,
        }
    }

    /// A job that is waiting already.
    pub(super) fn try_recv(&mut self) -> Option<Job> {
        let put_back = self.put_back.take();
        put_back.or_else(|| self.jobs.try_recv().ok())
    }

    /// The next one to be done.
    pub(super) fn put_back(&mut self, job: Job) {
        self.put_back = Some(job);
    }

    /// Takes no more.
    fn close(&mut self) {
        self.jobs.close();
    }
}

/// The runtime may end, and the task with it.
impl Drop for Task {
    fn drop(&mut self) {
        self.validity.end();
        self.let_go();
    }
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
