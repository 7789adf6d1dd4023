use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Claim, Error, ErrorKind, Moment, Result};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::hold::PostgresHold;
use crate::holder::LastAnswer;
use crate::key_form::LockId;
use crate::session::{Attempt, Common, Job, Tried, slice};
use crate::sessions::{Sessions, Taken};
use crate::turn::{Claimant, Entered, Place, Turn};

/// What one client has at a server: its sessions, and places for holds.
pub(crate) struct Client {
    pub(crate) common: Arc<Common>,
    pub(crate) sessions: Arc<Sessions>,
    /// Places for holds.
    places: Arc<Semaphore>,
    pub(crate) max_holds: usize,
    pub(crate) last_answer: LastAnswer,
}

/// The server counts shorter times too, but a session must live long enough to be set up.
pub(crate) const SHORTEST_TTL: Duration = Duration::from_millis(100);

impl Client {
    pub(crate) fn new(common: Arc<Common>, max_holds: usize) -> Self {
        Self {
            sessions: Arc::new(Sessions::new(common.clone())),
            places: Arc::new(Semaphore::new(max_holds)),
            max_holds,
            common,
            last_answer: LastAnswer::default(),
        }
    }

    /// 1. *The turn* of the key in this process: one claim at a time asks the server.
    /// 2. *Try*, on a shared session. Where there was a wait for the key a moment ago, straight to 3.
    /// 3. *Wait*, on a waiting session, until it has the lock or our time is over. If all of those are
    ///    in use: try again every now and then, and as soon as one is free.
    ///
    /// A claim that has queued once goes on through failures until its wait is over.
    pub(crate) async fn acquire(&self, key: LockId, claim: &Claim) -> Result<Option<PostgresHold>> {
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
                "this client holds {} locks on {}, as many as it may (max_holds, at most a quarter of \
                 the server's lock table): hold fewer, or raise max_locks_per_transaction on the server",
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
