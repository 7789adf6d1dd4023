use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use leasehold_core::{Moment, Result};
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::client::Client;
use crate::connection::no_runtime;
use crate::error;
use crate::request::{Answer, Request, Sender};
use crate::script::RENEW;
use crate::target::without_limits;

/// How many replicas must have a lock before it counts as granted or renewed, and the connection on
/// which they are waited for.
///
/// 1. `WAIT` speaks of what its own connection has written, and holds up what comes behind it there. So
///    it has a connection of its own, on which the holder renews first: the lock of a waiter was
///    written by whoever released it, and a `WAIT` without a write of its own answers at once.
/// 2. What meets travels together: while one `WAIT` is under way the next renewals gather, then go out
///    as one pipeline with one `WAIT` behind them.
/// 3. A replica takes in its master's writes in order: one that has the renewal has the lock.
/// 4. Renewals are confirmed as well. Else a replica that went away just after the grant would let the
///    lock end at its first ttl, take over, and grant it to another while it is still renewed here.
///
/// Source: the manual of Redis on `WAIT`.
pub(crate) struct Replicas {
    wanted: usize,
    /// To the task that has the connection.
    task: Mutex<Option<mpsc::UnboundedSender<Ask>>>,
}

/// One renewal that is to be confirmed.
struct Ask {
    cmd: Cmd,
    limit: Duration,
    answer: oneshot::Sender<Result<(Moment, Answer)>>,
}

/// No WAIT is longer: the server adds its clock to it, and the sum has to fit.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// How many renewals share a `WAIT`.
const MOST: usize = 128;
/// How much longer than its `WAIT` an answer may take.
const PATIENCE: Duration = Duration::from_millis(250);

impl Replicas {
    pub(crate) fn new(wanted: usize) -> Self {
        Self {
            wanted,
            task: Mutex::new(None),
        }
    }

    pub(crate) fn are_asked(&self) -> bool {
        self.wanted > 0
    }

    /// Hands over to the task, which is started in the caller's runtime if there is none.
    fn send(&self, client: &Arc<Client>, ask: Ask) -> Result<()> {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        let ask = match &*task {
            None => ask,
            Some(running) => match running.send(ask) {
                Ok(()) => return Ok(()),
                // It ended with its runtime.
                Err(unsent) => unsent.0,
            },
        };
        let runtime = Handle::try_current().map_err(|_| no_runtime())?;
        let (sender, asks) = mpsc::unbounded_channel();
        drop(runtime.spawn(run(Arc::downgrade(client), self.wanted, asks)));
        // It listens as long as its runtime lives.
        drop(sender.send(ask));
        *task = Some(sender);
        Ok(())
    }
}

impl fmt::Debug for Replicas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicas")
            .field("wanted", &self.wanted)
            .finish_non_exhaustive()
    }
}

/// Sends the renewal `request` and waits, for `limit`, until the replicas have it. Says when it was
/// sent and what the server answered.
///
/// # Errors
/// [`Unavailable`](leasehold_core::ErrorKind::Unavailable) if too few replicas confirm it; else as
/// [`error::map`] has it.
///
/// # Cancel safety
/// A request that was handed over goes on.
pub(crate) async fn renew(
    client: &Arc<Client>,
    request: Request<'_>,
    limit: Duration,
) -> Result<(Moment, Answer)> {
    let (_renew, cmd) = request.command(Sender {
        minting: client.minting,
        inbox: client.id,
        floor: 0,
        server_now: 0,
    });
    let (answer, answered) = oneshot::channel();
    client.replicas.send(client, Ask { cmd, limit, answer })?;
    match answered.await {
        Ok(answer) => answer,
        // The task's runtime has ended.
        Err(_) => Err(no_runtime()),
    }
}

async fn run(client: Weak<Client>, wanted: usize, mut asks: mpsc::UnboundedReceiver<Ask>) {
    let mut apart = None;
    let mut batch = Vec::new();
    while asks.recv_many(&mut batch, MOST).await > 0 {
        let Some(client) = client.upgrade() else {
            return;
        };
        // Nobody waits any more for those that were dropped.
        batch.retain(|ask: &Ask| !ask.answer.is_closed());
        let Some(limit) = batch.iter().map(|ask| ask.limit).max() else {
            continue;
        };
        let limit = limit.min(LONGEST);
        let cmds: Vec<&Cmd> = batch.iter().map(|ask| &ask.cmd).collect();
        let asking = confirm(&client, &mut apart, &cmds, wanted, limit);
        // The next one is opened, to whoever is the master then, if this one is silent.
        let confirmed = match timeout(limit + PATIENCE, asking).await {
            Ok(confirmed) => confirmed,
            Err(_elapsed) => {
                client.suspect_up();
                Err(error::silent(&client.address, limit))
            }
        };
        match confirmed {
            Ok(Confirmed {
                sent,
                answers,
                replicas,
            }) => {
                if replicas < wanted {
                    // They may have gone over to another master.
                    apart = None;
                }
                for (ask, answer) in batch.drain(..).zip(answers) {
                    let answer = match answer {
                        Ok(Answer::Done) if replicas < wanted => {
                            Err(error::unconfirmed(&client.address, replicas, wanted))
                        }
                        answer => answer.map(|answer| (sent, answer)),
                    };
                    drop(ask.answer.send(answer));
                }
            }
            Err(e) => {
                apart = None;
                for ask in batch.drain(..) {
                    drop(ask.answer.send(Err(e.clone())));
                }
            }
        }
    }
}

struct Confirmed {
    sent: Moment,
    answers: Vec<Result<Answer>>,
    replicas: usize,
}

/// The connection apart, and the number of the client's other one: both go to the same server.
type Apart = Option<(u64, MultiplexedConnection)>;

/// Renews all and waits for the replicas, on the connection apart, which is opened if need be.
async fn confirm(
    client: &Arc<Client>,
    apart: &mut Apart,
    cmds: &[&Cmd],
    wanted: usize,
    limit: Duration,
) -> Result<Confirmed> {
    let failed = |e: &RedisError| error::map(&client.address, e);
    let begun = Moment::now();
    let number = client.connection().await?.number;
    let mut redis = match apart.take() {
        Some((beside, redis)) if beside == number => redis,
        _ => open(client).await?,
    };
    loop {
        let mut pipeline = Pipeline::with_capacity(cmds.len() + 1);
        for cmd in cmds {
            pipeline.add_command((*cmd).clone());
        }
        // At least one: zero is for ever.
        let left = limit.saturating_sub(begun.elapsed()).as_millis().max(1);
        let left = u64::try_from(left).unwrap_or(u64::MAX);
        pipeline.cmd("WAIT").arg(wanted).arg(left);
        let sent = Moment::now();
        let answers = redis.req_packed_commands(&pipeline, 0, cmds.len() + 1);
        let mut answers = answers.await.map_err(|e| failed(&e))?;
        let replicas = answers.pop().unwrap_or_default().extract_error();
        let replicas = match replicas.map_err(|e| failed(&e))? {
            Value::Int(replicas) => usize::try_from(replicas).unwrap_or(0),
            _ => return Err(error::unexpected(&client.address)),
        };
        let answers: Vec<_> = answers.into_iter().map(Value::extract_error).collect();
        if answers.iter().any(is_forgotten) {
            RENEW.load_async(&mut redis).await.map_err(|e| failed(&e))?;
            continue;
        }
        let answers = answers.into_iter().map(|answer| match answer {
            Ok(value) => Answer::read(&value).ok_or_else(|| error::unexpected(&client.address)),
            Err(e) if error::is_wrong_type(&e) => Ok(Answer::NotHeld),
            Err(e) => Err(failed(&e)),
        });
        let answers = answers.collect();
        if client.up() != Some(number) {
            return Err(error::superseded(&client.address));
        }
        *apart = Some((number, redis));
        return Ok(Confirmed {
            sent,
            answers,
            replicas,
        });
    }
}

async fn open(client: &Client) -> Result<MultiplexedConnection> {
    let (mut redis, _watcher) = client.target.connect(client, &without_limits()).await?;
    let loaded = RENEW.load_async(&mut redis).await;
    loaded.map_err(|e| client.refused(&e, "+script|load"))?;
    Ok(redis)
}

/// Whether the server has forgotten the script.
fn is_forgotten(answer: &Result<Value, RedisError>) -> bool {
    matches!(answer, Err(e) if e.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
}
