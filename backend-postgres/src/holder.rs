//! What an operator asks: who holds a lock, and to take it away.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold_core::{Holder, Moment, Result};
use sqlx::{Connection as _, Row};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::client::Client;
use crate::connection::{all, connect};
use crate::error::explain;
use crate::key_form::LockId;
use crate::peer::{DONE, Known, NONE, Question, parts};
use crate::session::{Job, Seen};

/// How often a client was asked for a holder, and what the answer was last.
#[derive(Default)]
pub(crate) struct LastAnswer {
    calls: AtomicU64,
    answer: tokio::sync::Mutex<Option<Answer>>,
}

struct Answer {
    key: LockId,
    calls_before: u64,
    answer: Result<Option<Holder>>,
}

impl Client {
    /// Calls that meet share an answer: each gets one that was asked for after it came.
    pub(crate) async fn holder(&self, key: LockId) -> Result<Option<Holder>> {
        let LastAnswer { calls, answer } = &self.last_answer;
        let number = calls.fetch_add(1, Ordering::SeqCst);
        let mut last = answer.lock().await;
        if let Some(last) = &*last
            && last.key == key
            && number < last.calls_before
        {
            return last.answer.clone();
        }
        let calls_before = calls.load(Ordering::SeqCst);
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
    pub(crate) async fn evict(&self, key: LockId, grant: Option<&Holder>) -> Result<bool> {
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
