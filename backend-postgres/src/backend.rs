use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Consistency, Error, ErrorKind, Expiry, Fairness, Guarantees, Hold, Holder, Key,
    Moment, Result, Tokens, Wakeup,
};
use sqlx::postgres::PgRow;
use sqlx::{Connection as _, Row};
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::PostgresOptions;
use crate::connection::{all, connect, examine};
use crate::error::explain;
use crate::hold::PostgresHold;
use crate::key_form::LockId;
use crate::session::{Attempt, Common, Job, Tried, slice};
use crate::sessions::{Sessions, Taken};
use crate::sql::{Sql, literal};
use crate::turn::{Entered, Place, Turn};

/// Locks on a PostgreSQL server, version 14 or newer.
///
/// Clones are the same client: its sessions, its limits.
#[derive(Clone)]
pub struct Postgres {
    client: Arc<Client>,
}

struct Client {
    common: Arc<Common>,
    sessions: Arc<Sessions>,
    /// Places for holds.
    places: Arc<Semaphore>,
    max_holds: usize,
}

impl Postgres {
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
            }),
        })
    }
}

#[async_trait]
impl Backend for Postgres {
    fn guarantees(&self) -> Guarantees {
        let mut guarantees = Guarantees::new(Expiry::Session, SHORTEST_TTL);
        guarantees.consistency = Consistency::SingleNode;
        guarantees.fairness = Fairness::None;
        guarantees.wakeup = Wakeup::Push;
        guarantees.tokens = Tokens::Durable;
        guarantees
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

    async fn close(&self) -> Result<()> {
        self.client.sessions.close().await;
        Ok(())
    }
}

/// The server counts shorter times too, but a session must live long enough to be set up.
const SHORTEST_TTL: Duration = Duration::from_millis(100);

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
        let mut queued = false;
        let mut turn = None;
        loop {
            self.sessions.check_open()?;
            let mine = match turn.take() {
                Some(mine) => mine,
                None => match self.common.turns.enter(key, ttl, wait.is_wanted()) {
                    Entered::Turn(mine) => mine,
                    Entered::Busy => return Ok(None),
                    Entered::Waiting(mut waiting) => {
                        queued = wait.is_wanted();
                        // Without a wait: only until the release that is on its way has gone through.
                        let limit = if queued { wait.left() } else { claim.request_limit };
                        match timeout(limit, waiting.place()).await {
                            Ok(Some(Place::Turn(mine))) => mine,
                            Ok(Some(Place::Granted(hold))) => return Ok(Some(hold)),
                            Ok(None) => continue,
                            Err(_elapsed) => return Ok(None),
                        }
                    }
                },
            };
            match self.step(mine, claim, ttl, &wait, &mut queued).await {
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

    async fn step(
        &self,
        turn: Turn,
        claim: &Claim,
        ttl: Duration,
        wait: &Wait,
        queued: &mut bool,
    ) -> Step {
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
            return self.wait_on(session, attempt, ttl, wait).await;
        }
        let trying = self.try_on_shared(attempt, ttl, claim.request_limit);
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
            Ok(Ok(Some(session))) => self.wait_on(session, attempt, ttl, wait).await,
            Ok(Ok(None)) => {
                let freed = self.common.freed.notified();
                let _either = timeout(slice(ttl).min(wait.left()), freed).await;
                Step::Refused(attempt.turn)
            }
        }
    }

    /// Asks on a shared session; once more where one ended before it was asked.
    async fn try_on_shared(
        &self,
        mut attempt: Attempt,
        ttl: Duration,
        limit: Duration,
    ) -> Result<Tried> {
        let started = Moment::now();
        loop {
            let session = match self.sessions.shared(ttl).await {
                Ok(session) => session,
                Err(error) => return Ok(Tried::Failed(attempt, error)),
            };
            let (sender, answer) = oneshot::channel();
            let job = Job::Try {
                attempt,
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

    async fn wait_on(&self, session: Taken, attempt: Attempt, ttl: Duration, wait: &Wait) -> Step {
        let (waiter, mut waiting) = self.common.turns.waiter(attempt.turn.key(), ttl);
        if let Err(turn) = session.wait(attempt, waiter) {
            return Step::Refused(turn);
        }
        match timeout(wait.left(), waiting.place()).await {
            Ok(Some(Place::Granted(hold))) => Step::Granted(hold),
            Ok(Some(Place::Turn(turn))) => Step::Refused(turn),
            Ok(None) => Step::Failed(self.unavailable("the session ended during the wait"), None),
            // The slice goes on for whoever is next in the queue, or ends.
            Err(_elapsed) => Step::Over,
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

    fn unavailable(&self, what: &str) -> Error {
        Error::new(
            ErrorKind::Unavailable,
            format!("{}: {what}", self.common.options.address()),
        )
    }
}

/// What an operator asks; on a connection of its own, since the holder's session may be one of ours.
impl Client {
    async fn holder(&self, key: LockId) -> Result<Option<Holder>> {
        let statement = format!(
            "SELECT pid, start, (SELECT count(*) - 1 FROM pg_locks AS other \
               WHERE other.pid = holder.pid AND other.locktype = 'advisory' AND other.granted) \
             FROM ({}) AS holder LIMIT 1",
            self.holders(key)
        );
        let rows = self.ask_apart("who holds a lock", statement).await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let read = || -> sqlx::Result<Holder> {
            let (pid, start): (i32, String) = (row.try_get(0)?, row.try_get(1)?);
            let mut holder = Holder::new(format!("{pid}@{start}"));
            let others: i64 = row.try_get(2)?;
            holder.also_ends = others.unsigned_abs();
            Ok(holder)
        };
        read().map(Some).map_err(|error| explain("who holds a lock", error))
    }

    async fn evict(&self, key: LockId, grant: Option<&Holder>) -> Result<bool> {
        // How long the server waits until the session has really ended.
        const PATIENCE_MS: u32 = 3000;
        let named = match grant {
            Some(holder) => format!("pid || '@' || start = {}", literal(&holder.grant)),
            None => "true".into(),
        };
        // Materialized: the function is called for the rows that are left, and once for each.
        let statement = format!(
            "WITH holder AS MATERIALIZED (SELECT pid FROM ({}) AS holder WHERE {named}) \
             SELECT pg_terminate_backend(pid, {PATIENCE_MS}) FROM holder",
            self.holders(key)
        );
        let doing = "ending the session that holds a lock (needs its role, or pg_signal_backend)";
        let rows = self.ask_apart(doing, statement).await?;
        let ended = rows.iter().map(|row| row.try_get::<bool, _>(0));
        ended
            .into_iter()
            .try_fold(false, |any, ended| Ok(any | ended?))
            .map_err(|error| explain(doing, error))
    }

    /// The backends that hold `key`: `pid`, and `start` in microseconds, empty where it is not shown
    /// to us. The two name a session for ever, and with it all that it holds.
    fn holders(&self, key: LockId) -> String {
        let (class, object, kind) = self.common.sql.key_form.in_pg_locks(key);
        format!(
            "SELECT l.pid, \
               coalesce((extract(epoch FROM a.backend_start) * 1000000)::bigint::text, '') AS start \
             FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid \
             WHERE l.locktype = 'advisory' AND l.granted AND l.classid = {class}::bigint::oid \
               AND l.objid = {object}::bigint::oid AND l.objsubid = {kind} \
               AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
    }

    async fn ask_apart(&self, doing: &str, statement: String) -> Result<Vec<PgRow>> {
        let options = &self.common.options;
        let asked = timeout(options.connect_timeout, async {
            let mut connection = connect(options).await?;
            let rows = all(&mut connection, statement)
                .await
                .map_err(|error| explain(doing, error))?;
            // Failing to say goodbye is no failure.
            drop(connection.close().await);
            Ok(rows)
        });
        asked
            .await
            .unwrap_or_else(|_elapsed| Err(self.unavailable("no answer in time")))
    }
}

impl fmt::Debug for Postgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Postgres")
            .field("options", &self.client.common.options)
            .field("sessions", &self.client.sessions)
            .finish_non_exhaustive()
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
