use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_core::{Error, Moment, Result, Token, Validity};
use sqlx::{Executor, Row, raw_sql};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, oneshot, watch};
use tracing::debug;

use crate::PostgresOptions;
use crate::connection::{Connection, connecting, in_recovery_error};
use crate::error::explain;
use crate::hold::PostgresHold;
use crate::key_form::LockId;
use crate::peer::Question;
use crate::sql::{Reserve, Sql};
use crate::turn::{Claimant, Turn, Turns, Waiter};

mod operators;
mod task;
mod together;

pub(crate) use task::Task;

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
/// 6. *Together.* What is asked of a shared session while a statement is under way leaves as one: see
///    `together.rs`.
/// 7. *Errors of a lock statement* leave it open whether the lock was taken (10 of 400 cancels took
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
    /// What the server knows about who has which locks, some of them; and asks those sessions.
    List {
        /// The last lock of the page before, as `pg_locks` shows it.
        after: Option<(i64, i64)>,
        seen: oneshot::Sender<Result<Vec<SeenLock>>>,
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

/// A lock that is held, and what its holder answers.
#[derive(Debug)]
pub(crate) struct SeenLock {
    /// As `pg_locks` shows it.
    pub(crate) place: (i64, i64),
    pub(crate) seen: Seen,
    pub(crate) reply: oneshot::Receiver<String>,
}

/// How many locks a [`Job::List`] has at most.
pub(crate) const LISTED: usize = 100;

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
        let task = Task::new(connection, common, &session, inbox, sent, permits, not_over);
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
