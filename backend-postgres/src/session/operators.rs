use std::time::Duration;

use leasehold_core::{Moment, Result};
use sqlx::postgres::{PgNotification, PgRow};
use sqlx::{PgConnection, Row};
use tokio::sync::oneshot;
use tracing::{debug, warn};

use super::task::{End, Failure, Task};
use super::{LISTED, Seen, SeenLock};
use crate::KeyForm;
use crate::error::explain;
use crate::key_form::LockId;
use crate::peer::{DONE, Known, Message, NONE, Question, channel};

/// What operators ask: of the server, of other sessions, of this one. See [`Message`].
impl Task {
    pub(super) async fn ask_others(
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

    pub(super) async fn list(
        &mut self,
        after: Option<(i64, i64)>,
        seen: oneshot::Sender<Result<Vec<SeenLock>>>,
    ) -> Result<(), End> {
        let sql = self.common.sql.list.clone();
        let asked = self
            .ask(async |connection: &mut PgConnection| {
                let query = sqlx::query(sql);
                let query = query.bind(after.map(|(class, _)| class));
                let query = query.bind(after.map(|(_, object)| object));
                let count = i64::try_from(LISTED).unwrap_or(i64::MAX);
                query.bind(count).fetch_one(connection).await
            })
            .await;
        let found = match asked.and_then(|row| listed_in(&row).map_err(Failure::Refused)) {
            Ok(found) => found,
            Err(Failure::Ended(end)) => return Err(end),
            Err(Failure::Refused(error)) => {
                let _unheard = seen.send(Err(explain("which locks are held", error)));
                return Ok(());
            }
        };
        self.asked.retain(|_, (_, asked)| !asked.is_closed());
        let (mut questions, mut locks) = (Vec::new(), Vec::new());
        for (place, found) in found {
            let (replied, reply) = oneshot::channel();
            if found.listens {
                self.questions += 1;
                let number = self.questions;
                let question = Message::Question {
                    number,
                    reply_to: self.pid,
                    key: KeyForm::from_pg_locks(place.0, place.1),
                    what: Question::Who,
                };
                questions.push((found.pid, question));
                self.asked.insert(number, (found.pid, replied));
            }
            locks.push(SeenLock {
                place,
                seen: found,
                reply,
            });
        }
        self.notify(&questions).await?;
        let _unheard = seen.send(Ok(locks));
        Ok(())
    }

    pub(super) async fn hear(&mut self, notification: &PgNotification) -> Result<(), End> {
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
                self.notify(&[(reply_to, Message::Answer { number, text })])
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
                Ok(if unlocked { DONE } else { NONE }.into())
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

    /// Sends each message to its backend.
    async fn notify(&mut self, messages: &[(i32, Message)]) -> Result<(), End> {
        if messages.is_empty() {
            return Ok(());
        }
        let sql = self.common.sql.notify.clone();
        let channels: Vec<String> = messages.iter().map(|(pid, _)| channel(*pid)).collect();
        let texts: Vec<String> = messages.iter().map(|(_, text)| text.write()).collect();
        let asked = self
            .ask(async |connection: &mut PgConnection| {
                let query = sqlx::query(sql).bind(channels).bind(texts);
                query.fetch_one(connection).await
            })
            .await;
        match asked {
            Err(Failure::Ended(end)) => Err(end),
            // Who waits for it hears nothing, which may happen anyway.
            Ok(_) | Err(Failure::Refused(_)) => Ok(()),
        }
    }
}

fn listed_in(row: &PgRow) -> sqlx::Result<Vec<((i64, i64), Seen)>> {
    let (classes, objects): (Vec<i64>, Vec<i64>) = (row.try_get(1)?, row.try_get(2)?);
    let (pids, starts): (Vec<i32>, Vec<String>) = (row.try_get(3)?, row.try_get(4)?);
    let (others, listens): (Vec<i64>, Vec<bool>) = (row.try_get(5)?, row.try_get(6)?);
    let places = classes.into_iter().zip(objects);
    let sessions = pids.into_iter().zip(starts);
    let seen = sessions.zip(others.into_iter().zip(listens));
    let seen = seen.map(|((pid, start), (others, listens))| Seen {
        pid,
        session: format!("{pid}@{start}"),
        other_locks: others.unsigned_abs(),
        listens,
    });
    Ok(places.zip(seen).collect())
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
