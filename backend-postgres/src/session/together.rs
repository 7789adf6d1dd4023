use leasehold_core::{Error, Result, Token};
use sqlx::{PgConnection, Row};
use tokio::sync::oneshot;
use tracing::warn;

use super::task::{End, Failure, Held, TABLE_FULL, Task};
use super::{Attempt, Job, Kind, Tried};
use crate::error::{code, explain};
use crate::hold::gone;
use crate::key_form::LockId;
use crate::turn::Claimant;

/// Calls that meet on a session travel together: the keys to be freed, those to be locked and the
/// checks of some holds, in one statement.
///
/// 1. *Alone.* A call that comes while the session does nothing is sent at once, as a statement of its
///    own: nobody waits for company.
/// 2. *Together.* What comes while a statement is under way collects in the inbox, and leaves as one
///    statement when that has been answered; at most [`Together::MOST`] calls, in order, up to the
///    first that is of another kind.
/// 3. *A key once.* Whoever locks a key has its turn in this process, and so has whoever holds it; the
///    calls that travel carry those turns. So no key is in a statement twice, which would lock it
///    twice, or free what a neighbour has just locked.
/// 4. *Each key its own answer*, in the order of the keys. A check needs none: any answer shows that the
///    server has the session.
/// 5. *Nobody there any more.* A claim that is gone is not sent; if it goes while it is under way, its
///    hold is dropped instead of handed over, and so frees the key with the next statement.
/// 6. *An error* ends the statement somewhere between two keys, and what it has locked and freed by
///    then it does not take back, for locks of a session are outside of transactions. So all its keys
///    are freed once: with this the releases are done. Then the claims are tried again, each alone, so
///    that one that cannot be served fails none of its neighbours.
///
/// This is the group commit of `DeWitt` et al., "Implementation techniques for main memory database
/// systems" (1984), without its timer, as in [`leasehold_core::Gather`]; with a single task to send
/// things, its inbox is the queue.
#[derive(Default)]
struct Together {
    releases: Vec<Release>,
    claims: Vec<TryLock>,
    checks: Vec<oneshot::Sender<Result<()>>>,
}

struct Release {
    key: LockId,
    held: Held,
    answer: Option<oneshot::Sender<Result<()>>>,
}

struct TryLock {
    attempt: Attempt,
    claimant: Claimant,
    answer: oneshot::Sender<Tried>,
}

/// What the server says to each of the calls.
#[derive(Default)]
struct Answers {
    unlocked: Vec<bool>,
    tokens: Vec<Option<i64>>,
}

impl Together {
    /// Takes the server a fraction of a millisecond.
    const MOST: usize = 256;

    fn len(&self) -> usize {
        self.releases.len() + self.claims.len() + self.checks.len()
    }
}

impl Task {
    /// Does this job and those of its kind that are waiting.
    pub(super) async fn together(&mut self, first: Job) -> Result<(), End> {
        // A waiting session has one lock at most.
        let most = match self.kind {
            Kind::Shared => Together::MOST,
            Kind::Waiting => 1,
        };
        let mut together = Together::default();
        let mut next = Some(first);
        while let Some(job) = next {
            if let Err(other) = self.take(&mut together, job) {
                self.inbox.put_back(other);
                break;
            }
            if together.len() == most {
                break;
            }
            next = self.inbox.try_recv();
        }
        self.send(together).await
    }

    /// Frees the lock of this grant. False: it was not there.
    pub(super) async fn unlock(&mut self, key: LockId, token: Token) -> Result<bool, End> {
        let (answer, unlocked) = oneshot::channel();
        let job = Job::Unlock {
            key,
            token,
            answer: Some(answer),
        };
        let mut together = Together::default();
        // Always of the right kind.
        drop(self.take(&mut together, job));
        self.send(together).await?;
        Ok(matches!(unlocked.await, Ok(Ok(()))))
    }

    /// Answers a job that needs no statement; gives back one that goes alone.
    fn take(&mut self, together: &mut Together, job: Job) -> Result<(), Job> {
        match job {
            Job::Try { answer, .. } if answer.is_closed() => self.discount(),
            Job::Try {
                attempt,
                claimant,
                answer,
            } => together.claims.push(TryLock {
                attempt,
                claimant,
                answer,
            }),
            Job::Unlock { key, token, answer } => {
                let ours = self.has(key, token);
                match ours.then(|| self.held.remove(&key)).flatten() {
                    Some(held) => together.releases.push(Release { key, held, answer }),
                    None => say(answer, Err(gone())),
                }
            }
            Job::Check { key, token, answer } => {
                if self.has(key, token) {
                    together.checks.push(answer);
                } else {
                    say(Some(answer), Err(gone()));
                }
            }
            other => return Err(other),
        }
        Ok(())
    }

    async fn send(&mut self, mut together: Together) -> Result<(), End> {
        if !together.claims.is_empty()
            && !self.has_reserve
            && let Err(error) = self.take_reserve().await?
        {
            let error = self.explain_lock(error);
            for claim in together.claims.drain(..) {
                self.fail(claim, error.clone());
            }
        }
        if together.len() == 0 {
            return Ok(());
        }
        match self.ask_together(&together).await {
            Ok(answers) => self.answer_all(together, answers),
            Err(Failure::Ended(end)) => Err(end),
            Err(Failure::Refused(error)) => {
                let claims = self.after_an_error(together, error).await?;
                for claim in claims {
                    let alone = Together {
                        claims: vec![claim],
                        ..Together::default()
                    };
                    Box::pin(self.send(alone)).await?;
                }
                Ok(())
            }
        }
    }

    /// Frees all keys. The claims that are returned are to be tried again, each alone; one that was
    /// alone has failed.
    async fn after_an_error(
        &mut self,
        mut together: Together,
        error: sqlx::Error,
    ) -> Result<Vec<TryLock>, End> {
        let claimed = together.claims.iter().map(|claim| claim.attempt.turn.key());
        let released = together.releases.iter().map(|release| release.key);
        let keys: Vec<_> = released.chain(claimed).collect();
        match keys[..] {
            [] => {}
            [key] => self.unlock_once(key).await?,
            _ => {
                self.ask_all(keys, Vec::new())
                    .await
                    .map_err(Failure::of_an_unlock)?;
            }
        }
        let was_alone = together.len() == 1;
        let full = code(&error) == Some(TABLE_FULL);
        let error = self.explain_lock(error);
        warn!(target: "leasehold", pid = self.pid, %error, "a statement was interrupted");
        let claims = std::mem::take(&mut together.claims);
        let unlocked = vec![true; together.releases.len()];
        self.answer_all(
            together,
            Answers {
                unlocked,
                tokens: Vec::new(),
            },
        )?;
        if !was_alone {
            return Ok(claims);
        }
        if full {
            self.give_up_reserve().await?;
        }
        for claim in claims {
            self.fail(claim, error.clone());
        }
        Ok(Vec::new())
    }

    async fn ask_together(&mut self, together: &Together) -> Result<Answers, Failure> {
        let mut answers = Answers::default();
        match (&together.releases[..], &together.claims[..]) {
            ([], []) => self.heartbeat().await.map_err(Failure::Ended)?,
            ([release], []) => answers.unlocked.push(self.ask_unlock(release.key).await?),
            ([], [claim]) => {
                let token = self.ask_try(claim.attempt.turn.key()).await?;
                answers.tokens.push(token);
            }
            (releases, claims) => {
                let unlock = releases.iter().map(|release| release.key).collect();
                let lock = claims
                    .iter()
                    .map(|claim| claim.attempt.turn.key())
                    .collect();
                answers = self.ask_all(unlock, lock).await?;
            }
        }
        Ok(answers)
    }

    async fn ask_try(&mut self, key: LockId) -> Result<Option<i64>, Failure> {
        let sql = self.common.sql.try_lock.clone();
        let row = self
            .ask(async |connection: &mut PgConnection| {
                sqlx::query(sql).bind(key).fetch_one(connection).await
            })
            .await?;
        row.try_get(1).map_err(Failure::Refused)
    }

    async fn ask_all(
        &mut self,
        unlock: Vec<LockId>,
        lock: Vec<LockId>,
    ) -> Result<Answers, Failure> {
        let counts = (unlock.len(), lock.len());
        let sql = self.common.sql.together.clone();
        let row = self
            .ask(async |connection: &mut PgConnection| {
                let query = sqlx::query(sql).bind(unlock).bind(lock);
                query.fetch_one(connection).await
            })
            .await?;
        let read = || -> sqlx::Result<Answers> {
            Ok(Answers {
                unlocked: row.try_get(1)?,
                tokens: row.try_get(2)?,
            })
        };
        let answers = read().map_err(Failure::Refused)?;
        if (answers.unlocked.len(), answers.tokens.len()) != counts {
            let reason = "the server has not answered for each key";
            return Err(Failure::Ended(End::Lost(reason.into())));
        }
        Ok(answers)
    }

    fn answer_all(&mut self, together: Together, answers: Answers) -> Result<(), End> {
        for (release, unlocked) in together.releases.into_iter().zip(answers.unlocked) {
            // Before the answer goes out: who hears it may ask again at once.
            match self.kind {
                Kind::Shared => self.discount(),
                Kind::Waiting => self.now_idle(),
            }
            drop(release.held);
            say(release.answer, if unlocked { Ok(()) } else { Err(gone()) });
        }
        for (claim, token) in together.claims.into_iter().zip(answers.tokens) {
            let TryLock {
                attempt,
                claimant,
                answer,
            } = claim;
            let tried = match token {
                Some(token) => match self.grant(attempt, claimant, token) {
                    Some(hold) => Tried::Granted(hold),
                    None => return Err(End::Unused),
                },
                None => {
                    self.discount();
                    Tried::Refused(attempt)
                }
            };
            // The claim is gone: dropped, a hold frees its lock, and an attempt passes its turn on.
            drop(answer.send(tried));
        }
        for check in together.checks {
            say(Some(check), Ok(()));
        }
        Ok(())
    }

    fn fail(&self, claim: TryLock, error: Error) {
        self.discount();
        drop(claim.answer.send(Tried::Failed(claim.attempt, error)));
    }

    fn explain_lock(&self, error: sqlx::Error) -> Error {
        explain(
            &format!("locking on {}", self.common.options.address()),
            error,
        )
    }
}

/// Answers, where somebody wants to hear it.
fn say(answer: Option<oneshot::Sender<Result<()>>>, said: Result<()>) {
    if let Some(answer) = answer {
        let _unheard = answer.send(said);
    }
}
