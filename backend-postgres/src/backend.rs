use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Consistency, Error, ErrorKind, Examination, Expiry, Fairness, Guarantees, Hold,
    Holder, Key, Moment, Page, Result, Tokens, Wakeup,
};
use sqlx::{Connection as _, Row};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::PostgresOptions;
use crate::connection::{all, connect, examine};
use crate::error::explain;
use crate::hold::PostgresHold;
use crate::key_form::LockId;
use crate::list::list;
use crate::peer::{DONE, Known, NONE, Question, parts};
use crate::session::{Attempt, Common, Job, Seen, Tried, slice};
use crate::sessions::{Sessions, Taken};
use crate::sql::Sql;
use crate::turn::{Claimant, Entered, Place, Turn};

/// Locks on a PostgreSQL server, version 14 or newer.
///
/// Clones are the same client: its sessions, its limits.
#[derive(Clone)]
pub struct Postgres {
    client: Arc<Client>,
}

pub(crate) struct Client {
    pub(crate) common: Arc<Common>,
    pub(crate) sessions: Arc<Sessions>,
    /// Places for holds.
    places: Arc<Semaphore>,
    max_holds: usize,
    /// How often it was asked for a holder, and what the answer was last.
    calls: AtomicU64,
    last_answer: tokio::sync::Mutex<Option<Answer>>,
}

struct Answer {
    key: LockId,
    calls_before: u64,
    answer: Result<Option<Holder>>,
}

impl Postgres {
    /// What every such backend promises.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Session, SHORTEST_TTL);
        guarantees.consistency = Consistency::SingleNode;
        guarantees.fairness = Fairness::None;
        guarantees.wakeup = Wakeup::Push;
        guarantees.tokens = Tokens::Durable;
        guarantees
    };

    /// Connects to the server at `url`; see [`PostgresOptions::new`] for its form.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with), and [`ErrorKind::Invalid`] for a malformed URL.
    ///
    /// # Cancel safety
    /// If dropped, nothing is left but perhaps the sequence.
    pub async fn connect(url: impl AsRef<str> + Send) -> Result<Self> {
        Self::connect_with(PostgresOptions::new(url)?).await
    }

    /// Connects to a server and finds out whether it can hold locks for us.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`] if the server does not answer in time.
    /// - [`ErrorKind::Unsupported`] if it is older than 14 or a standby, if a pooler changes the
    ///   session between statements, or if tokens would not rise.
    /// - [`ErrorKind::Invalid`] for impossible options, or a database that is not there.
    /// - [`ErrorKind::Other`] if signing in fails or a right is missing; the message has the SQL that
    ///   gives it.
    ///
    /// # Cancel safety
    /// If dropped, nothing is left but perhaps the sequence.
    pub async fn connect_with(options: PostgresOptions) -> Result<Self> {
        options.check()?;
        let sql = Sql::new(options.key_form, &options.sequence)?;
        let server = examine(&options, &sql).await?;
        let max_holds = options
            .max_holds
            .unwrap_or(server.fair_share)
            .min(server.fair_share)
            .min(Semaphore::MAX_PERMITS);
        let common = Arc::new(Common {
            options,
            sql,
            turns: Arc::default(),
            highest_token: AtomicI64::new(0),
            freed: Notify::new(),
        });
        Ok(Self {
            client: Arc::new(Client {
                sessions: Arc::new(Sessions::new(common.clone())),
                places: Arc::new(Semaphore::new(max_holds)),
                max_holds,
                common,
                calls: AtomicU64::new(0),
                last_answer: tokio::sync::Mutex::default(),
            }),
        })
    }
}

#[async_trait]
impl Backend for Postgres {
    fn guarantees(&self) -> Guarantees {
        Self::GUARANTEES
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let key = self.client.common.sql.key_form.id(&claim.key)?;
        let hold = self.client.acquire(key, claim).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        self.client.sessions.check_open()?;
        let key = self.client.common.sql.key_form.id(key)?;
        self.client.holder(key).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        self.client.sessions.check_open()?;
        let key = self.client.common.sql.key_form.id(key)?;
        self.client.evict(key, grant).await
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        self.client.sessions.check_open()?;
        list(&self.client, prefix, after).await
    }

    async fn examine(&self, _ttl: Duration) -> Result<Examination> {
        self.client.sessions.check_open()?;
        crate::examine::examine(&self.client.common.options, self.client.max_holds).await
    }

    /// There is nothing but the sequence, which others use too: locks leave nothing behind.
    async fn erase(&self) -> Result<()> {
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        self.client.sessions.close().await;
        Ok(())
    }
}

/// The server counts shorter times too, but a session must live long enough to be set up.
const SHORTEST_TTL: Duration = Duration::from_millis(100);

/// How long another session's answer is waited for at least.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);

/// The same where one grant is to be taken away: a session that is ended for its silence may have
/// gone on to the next grant of the key. Far above what a session takes whose process is running.
const PATIENCE_WITH_A_GRANT: Duration = Duration::from_secs(3);

/// An answer that was not there in time, if it comes yet.
async fn answered(mut late: oneshot::Receiver<String>, patience: Duration) -> Option<String> {
    match late.try_recv() {
        Ok(text) => Some(text),
        Err(oneshot::error::TryRecvError::Empty) => timeout(patience, late).await.ok()?.ok(),
        Err(oneshot::error::TryRecvError::Closed) => None,
    }
}

/// What is asked for, in every step of an acquire.
struct Ask<'a> {
    claimant: &'a Claimant,
    /// For a single request.
    limit: Duration,
    ttl: Duration,
    wait: &'a Wait,
}

/// What a step of an acquire came to.
enum Step {
    Granted(PostgresHold),
    /// Another session has it.
    Refused(Turn),
    /// Its time is over.
    Over,
    /// The store did not serve us; the turn is gone where a session still has it.
    Failed(Error, Option<Turn>),
}

impl Client {
    /// 1. *The turn* of the key in this process: one claim at a time asks the server.
    /// 2. *Try*, on a shared session. Where there was a wait for the key a moment ago, straight to 3.
    /// 3. *Wait*, on a waiting session, until it has the lock or our time is over. If all of those are
    ///    in use: try again every now and then, and as soon as one is free.
    ///
    /// A claim that has queued once goes on through failures until its wait is over.
    async fn acquire(&self, key: LockId, claim: &Claim) -> Result<Option<PostgresHold>> {
        let ttl = session_ttl(claim.ttl);
        let wait = Wait::new(claim.wait);
        let claimant = Claimant {
            owner: claim.owner.clone(),
            label: claim.label.clone(),
        };
        let mut queued = false;
        let mut turn = None;
        loop {
            self.sessions.check_open()?;
            let mine = match turn.take() {
                Some(mine) => mine,
                None => match self
                    .common
                    .turns
                    .enter(key, ttl, &claimant, wait.is_wanted())
                {
                    Entered::Turn(mine) => mine,
                    Entered::Busy => return Ok(None),
                    Entered::Waiting(mut waiting) => {
                        queued = wait.is_wanted();
                        // Without a wait: only until the release that is on its way has gone through.
                        let limit = if queued {
                            wait.left()
                        } else {
                            claim.request_limit
                        };
                        match timeout(limit, waiting.place()).await {
                            Ok(Some(Place::Turn(mine))) => mine,
                            Ok(Some(Place::Granted(hold))) => return Ok(Some(hold)),
                            Ok(None) => continue,
                            Err(_elapsed) => return Ok(None),
                        }
                    }
                },
            };
            match self
                .step(
                    mine,
                    &Ask {
                        claimant: &claimant,
                        limit: claim.request_limit,
                        ttl,
                        wait: &wait,
                    },
                    &mut queued,
                )
                .await
            {
                Step::Granted(hold) => return Ok(Some(hold)),
                Step::Over => return Ok(None),
                Step::Refused(_) if wait.is_over() => return Ok(None),
                Step::Refused(mine) => turn = Some(mine),
                Step::Failed(error, _) if !queued || !error.is_transient() => return Err(error),
                Step::Failed(_, _) if wait.is_over() => return Ok(None),
                Step::Failed(error, mine) => {
                    debug!(target: "leasehold", key = %claim.key, %error, "a wait goes on");
                    turn = mine;
                    sleep(slice(ttl).min(wait.left())).await;
                }
            }
        }
    }

    async fn step(&self, turn: Turn, ask: &Ask<'_>, queued: &mut bool) -> Step {
        let &Ask { ttl, wait, .. } = ask;
        let attempt = match self.places.clone().try_acquire_owned() {
            Ok(place) => Attempt {
                turn,
                _place: place,
            },
            Err(_) => return Step::Failed(self.too_many(), Some(turn)),
        };
        if !wait.is_over()
            && let Some(session) = self.sessions.waited_for(attempt.turn.key(), ttl)
        {
            *queued = true;
            return self.wait_on(session, attempt, ask).await;
        }
        let trying = self.try_on_shared(attempt, ask);
        let tried = if *queued {
            match timeout(wait.left(), trying).await {
                Ok(tried) => tried,
                Err(_elapsed) => return Step::Over,
            }
        } else {
            trying.await
        };
        let attempt = match tried {
            Ok(Tried::Granted(hold)) => return Step::Granted(hold),
            Ok(Tried::Failed(attempt, error)) => return Step::Failed(error, Some(attempt.turn)),
            Ok(Tried::Refused(attempt) | Tried::NotSent(attempt)) => attempt,
            Err(error) => return Step::Failed(error, None),
        };
        if wait.is_over() {
            return Step::Refused(attempt.turn);
        }
        *queued = true;
        match timeout(wait.left(), self.sessions.waiting(ttl)).await {
            Err(_elapsed) => Step::Over,
            Ok(Err(error)) => Step::Failed(error, Some(attempt.turn)),
            Ok(Ok(Some(session))) => self.wait_on(session, attempt, ask).await,
            Ok(Ok(None)) => {
                let freed = self.common.freed.notified();
                let _either = timeout(slice(ttl).min(wait.left()), freed).await;
                Step::Refused(attempt.turn)
            }
        }
    }

    /// Asks on a shared session; once more where one ended before it was asked.
    async fn try_on_shared(&self, mut attempt: Attempt, ask: &Ask<'_>) -> Result<Tried> {
        let limit = ask.limit;
        let started = Moment::now();
        loop {
            let session = match self.sessions.shared(ask.ttl).await {
                Ok(session) => session,
                Err(error) => return Ok(Tried::Failed(attempt, error)),
            };
            let (sender, answer) = oneshot::channel();
            let job = Job::Try {
                attempt,
                claimant: ask.claimant.clone(),
                answer: sender,
            };
            attempt = match session.send(job) {
                Ok(()) => match timeout(limit, answer).await {
                    Ok(Ok(Tried::NotSent(attempt))) => attempt,
                    Ok(Ok(tried)) => return Ok(tried),
                    Ok(Err(_ended)) => {
                        return Err(self.unavailable("the session ended while it was asked"));
                    }
                    Err(_elapsed) => {
                        session.set_overdue();
                        return Err(self.unavailable(&format!("no answer within {limit:?}")));
                    }
                },
                Err(Job::Try { attempt, .. }) => attempt,
                Err(_) => return Err(self.unavailable("the session has ended")),
            };
            if started.elapsed() > self.common.options.connect_timeout {
                return Ok(Tried::NotSent(attempt));
            }
        }
    }

    async fn wait_on(&self, session: Taken, attempt: Attempt, ask: &Ask<'_>) -> Step {
        let key = attempt.turn.key();
        let claimant = ask.claimant.clone();
        let (waiter, mut waiting) = self.common.turns.waiter(key, ask.ttl, claimant);
        let session = match session.wait(attempt, waiter) {
            Ok(session) => session,
            Err(turn) => return Step::Refused(turn),
        };
        let mut interrupted = Interrupted {
            client: self,
            pid: session.pid,
            key,
            armed: true,
        };
        let place = match timeout(ask.wait.left(), waiting.place()).await {
            Ok(place) => place.ok_or(()),
            // It may have been granted just now.
            Err(_elapsed) => match waiting.give_up() {
                Some(place) => Ok(place),
                None => {
                    drop(interrupted);
                    let _slow = timeout(ask.limit, waiting.cleared()).await;
                    return Step::Over;
                }
            },
        };
        interrupted.armed = false;
        match place {
            Ok(Place::Granted(hold)) => Step::Granted(hold),
            Ok(Place::Turn(turn)) => Step::Refused(turn),
            Err(()) => Step::Failed(self.unavailable("the session ended during the wait"), None),
        }
    }

    fn too_many(&self) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!(
                "this client holds {} locks on {}, as many as it may (max_holds, at most a quarter of                  the server's lock table): hold fewer, or raise max_locks_per_transaction on the server",
                self.max_holds,
                self.common.options.address()
            ),
        )
    }

    pub(crate) fn unavailable(&self, what: &str) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!("{}: {what}", self.common.options.address()),
        )
    }
}

/// What an operator asks.
impl Client {
    /// Calls that meet share an answer: each gets one that was asked for after it came.
    async fn holder(&self, key: LockId) -> Result<Option<Holder>> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        let mut last = self.last_answer.lock().await;
        if let Some(last) = &*last
            && last.key == key
            && number < last.calls_before
        {
            return last.answer.clone();
        }
        let calls_before = self.calls.load(Ordering::SeqCst);
        let answer = self.ask_holder(key).await;
        *last = Some(Answer {
            key,
            calls_before,
            answer: answer.clone(),
        });
        answer
    }

    /// Asks the server for the session, and the session for the grant.
    pub(crate) async fn ask_holder(&self, key: LockId) -> Result<Option<Holder>> {
        // What the server saw may be gone when the session is asked; not for ever.
        const TRIES: usize = 5;
        let mut seen = None;
        for _ in 0..TRIES {
            let (found, reply, _late) = self.ask_others(key, Some(Question::Who)).await?;
            let Some(found) = found else {
                return Ok(None);
            };
            if reply.as_deref() != Some(NONE) {
                return Ok(Some(shown(found, reply.as_deref())));
            }
            seen = Some(found);
        }
        Ok(seen.map(|found| Holder::new(found.session)))
    }

    /// Asks the session to give the lock up; ends it if it does not answer.
    async fn evict(&self, key: LockId, grant: Option<&Holder>) -> Result<bool> {
        let (session, what) = match grant.map(|holder| parts(&holder.grant)) {
            Some((session, Some(token))) => (Some(session), Some(Question::Evict(Some(token)))),
            // All that is known of the grant is its session: that one must not give up another.
            Some((session, None)) => (Some(session), None),
            None => (None, Some(Question::Evict(None))),
        };
        let (found, reply, late) = self.ask_others(key, what).await?;
        let Some(found) = found else {
            return Ok(false);
        };
        match reply.as_deref() {
            Some(DONE) => return Ok(true),
            Some(NONE) => return Ok(false),
            // Not ours, or stopped, or we have no right to ask.
            _ => {}
        }
        if session.is_some_and(|session| session != found.session) {
            return Ok(false);
        }
        if self.terminate(key, &found.session).await? {
            return Ok(true);
        }
        // It does not hold it any more: perhaps because it did what it was asked, and says so late.
        Ok(answered(late, PATIENCE).await.as_deref() == Some(DONE))
    }

    /// Who has the lock, and what that session answers to a question, if it does.
    async fn ask_others(
        &self,
        key: LockId,
        what: Option<Question>,
    ) -> Result<(Option<Seen>, Option<String>, oneshot::Receiver<String>)> {
        // An answer takes a few times as long as one of the server's.
        const TIMES: u32 = 4;
        let session = self.sessions.any_shared().await?;
        let started = Moment::now();
        let ((seen, found), (replied, mut reply)) = (oneshot::channel(), oneshot::channel());
        // Not accepted: it ends just now.
        drop(session.send(Job::Ask {
            key,
            what,
            seen,
            reply: replied,
        }));
        let found = found.await.unwrap_or_else(|_ended| {
            Err(self.unavailable("the session ended while it was asked"))
        })?;
        let least = match what {
            Some(Question::Evict(Some(_))) => PATIENCE_WITH_A_GRANT,
            _ => PATIENCE,
        };
        let patience = least.max(started.elapsed() * TIMES);
        let text = match (&found, what) {
            (Some(Seen { listens: true, .. }), Some(_)) => timeout(patience, &mut reply).await,
            _ => return Ok((found, None, reply)),
        };
        Ok((found, text.ok().and_then(Result::ok), reply))
    }

    /// On a connection of its own: the session that is to be ended may be the one that would ask.
    async fn terminate(&self, key: LockId, session: &str) -> Result<bool> {
        let options = &self.common.options;
        let doing = "ending the session that holds a lock (needs its role, or pg_signal_backend)";
        let asked = timeout(options.connect_timeout, async {
            let mut connection = connect(options).await?;
            let rows = all(&mut connection, self.common.sql.terminate(key, session))
                .await
                .map_err(|error| explain(doing, error))?;
            // Failing to say goodbye is no failure.
            drop(connection.close().await);
            Ok(rows)
        });
        let rows = asked
            .await
            .unwrap_or_else(|_elapsed| Err(self.unavailable("no answer in time")))?;
        let mut ended = rows.iter().map(|row| row.try_get::<bool, _>(0));
        ended
            .try_fold(false, |any, ended| Ok(any | ended?))
            .map_err(|error| explain(doing, error))
    }
}

/// What the server knows of the session that has a lock, and what that answers, if it does.
pub(crate) fn shown(found: Seen, reply: Option<&str>) -> Holder {
    let mut holder = Holder::new(found.session);
    holder.also_ends = found.other_locks;
    if let Some(known) = reply.and_then(Known::read) {
        known.complete(&mut holder);
    }
    holder
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("options", &self.client.common.options)
            .field("sessions", &self.client.sessions)
            .finish_non_exhaustive()
    }
}

/// Ends a wait at the server when it is dropped, unless another claim of ours goes on with it.
///
/// Else the wait would go on until its slice is over, and could be granted the lock meanwhile, to give
/// it back at once.
struct Interrupted<'a> {
    client: &'a Client,
    pid: i32,
    key: LockId,
    armed: bool,
}

impl Drop for Interrupted<'_> {
    fn drop(&mut self) {
        if self.armed && !self.client.common.turns.is_wanted(self.key) {
            self.client.sessions.interrupt(self.pid);
        }
    }
}

/// The wait of a claim.
struct Wait {
    started: Moment,
    limit: Option<Duration>,
}

impl Wait {
    fn new(limit: Option<Duration>) -> Self {
        Self {
            started: Moment::now(),
            limit,
        }
    }

    fn is_wanted(&self) -> bool {
        self.limit != Some(Duration::ZERO)
    }

    fn left(&self) -> Duration {
        match self.limit {
            Some(limit) => limit.saturating_sub(self.started.elapsed()),
            None => Duration::MAX,
        }
    }

    fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

/// The idle time after which the server ends a session that serves claims of this ttl.
fn session_ttl(ttl: Duration) -> Duration {
    // The server counts in milliseconds, in 32 bits.
    const LONGEST: Duration = Duration::from_millis(i32::MAX as u64);
    ttl.clamp(SHORTEST_TTL, LONGEST)
}
