use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_core::{Error, Holder, Moment, Result, poll_once};
use redis::{Cmd, RedisError, RedisResult, Script, Value};
use tokio::time::{sleep, timeout};
use tracing::debug;
use uuid::Uuid;

use crate::client::{Client, Shared};
use crate::cluster::{Cluster, Node};
use crate::connection::Connection;
use crate::error;
use crate::inbox::Inbox;
use crate::names::{LockKeys, Names};
use crate::request::{Answer, Place, Request, Sender};
use crate::script::{self, HOLDER};
use crate::value;

/// What is behind one [`Redis`](crate::Redis), and sends each request to the server that it is for.
#[derive(Debug, Clone)]
pub(crate) enum Servers {
    One(Arc<Client>),
    Cluster(Arc<Cluster>),
}

/// Where a request goes.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) client: Arc<Client>,
    pub(crate) connection: Arc<Connection>,
    /// In a cluster: the slot of the lock is just coming to this node.
    pub(crate) asking: bool,
    /// In a cluster: which node had the slot then.
    pub(crate) owner: Option<Node>,
}

/// Which connection is there for a lock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// In a cluster: the node that has its slot.
    pub(crate) owner: Option<Node>,
    /// The number of the connection that is up.
    pub(crate) up: Option<u64>,
}

/// What a server said to a request.
#[derive(Debug)]
pub(crate) struct Answered<T> {
    pub(crate) answer: T,
    /// From before it left.
    pub(crate) sent: Moment,
    pub(crate) line: Line,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The server, or the connection to it, says so.
    Said(Arc<Client>, RedisError),
    /// The lock's slot is moving to another node, and the request needs keys that may be on either: the
    /// store was reached, and will do it later.
    Moving(Error),
    Else(Error),
}

/// How long a cancel waits for an answer before it looks again.
const CANCEL_LIMIT: Duration = Duration::from_secs(2);
/// How long it waits before it tries again.
const CANCEL_PAUSE: Duration = Duration::from_millis(250);

impl Servers {
    pub(crate) fn names(&self) -> &Names {
        match self {
            Self::One(client) => &client.names,
            Self::Cluster(cluster) => &cluster.names,
        }
    }

    pub(crate) fn inbox(&self) -> &Inbox {
        &self.shared().inbox
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        match self {
            Self::One(client) => &client.shared,
            Self::Cluster(cluster) => &cluster.shared,
        }
    }

    /// A client for each server that has locks.
    pub(crate) fn clients(&self) -> Result<Vec<Arc<Client>>> {
        match self {
            Self::One(client) => Ok(vec![client.clone()]),
            Self::Cluster(cluster) => cluster.of_owners(),
        }
    }

    /// Whether replicas must confirm grants and renewals.
    pub(crate) fn replicas_are_asked(&self) -> bool {
        match self {
            Self::One(client) => client.replicas.are_asked(),
            Self::Cluster(cluster) => cluster.replicas_are_asked(),
        }
    }

    /// How errors call the server that these keys are on.
    pub(crate) fn address(&self, keys: &LockKeys) -> String {
        match self {
            Self::One(client) => client.address.clone(),
            Self::Cluster(cluster) => cluster.address(keys.slot),
        }
    }

    pub(crate) fn standing(&self, keys: &LockKeys) -> Standing {
        match self {
            Self::One(client) => Standing {
                owner: None,
                up: client.up(),
            },
            Self::Cluster(cluster) => cluster.standing(keys.slot),
        }
    }

    /// Whether requests about these keys go where `line` goes.
    pub(crate) fn stands(&self, line: &Line, keys: &LockKeys) -> bool {
        let here = line.client.up() == Some(line.connection.number);
        match self {
            Self::One(_) => here,
            Self::Cluster(cluster) => here && cluster.owner(keys.slot) == line.owner,
        }
    }

    /// Sends one request. All acquires, renewals and releases go through here; on a single server those
    /// that meet travel together.
    ///
    /// `at` says where it was sent last, from before it leaves.
    ///
    /// # Errors
    /// As [`error::map`] has it.
    pub(crate) async fn request(
        &self,
        request: Request<'_>,
        at: &mut Option<Line>,
    ) -> Result<Answered<Answer>, Failed> {
        self.request_from(None, request, at).await
    }

    /// The same, down `line` if there is one: then it is on its way after the first poll, in order with
    /// all others on that connection.
    async fn request_from(
        &self,
        line: Option<Line>,
        request: Request<'_>,
        at: &mut Option<Line>,
    ) -> Result<Answered<Answer>, Failed> {
        let answered = match self {
            Self::One(client) => {
                let line = match line {
                    Some(line) => line,
                    None => Line::new(client.clone(), client.connection().await?),
                };
                let line = at.insert(line).clone();
                let sent = Moment::now();
                let sender = client.sender(&line.connection, sent);
                let said = line.connection.request(&request, sender).await;
                line.answered(sent, said)
            }
            // In a box: what goes to a single server is passed on without the room that this needs.
            Self::Cluster(cluster) => Box::pin(cluster.request(line, request, at)).await,
        };
        let Answered { answer, sent, line } = match answered {
            Ok(answered) => answered,
            // Somebody has put other data in the place of our lock.
            Err(Failed::Said(client, e))
                if error::is_wrong_type(&e) && !matches!(request, Request::Acquire { .. }) =>
            {
                let line = at.clone().ok_or_else(|| error::map(&client.address, &e))?;
                return Ok(Answered {
                    answer: Answer::NotHeld,
                    sent: Moment::now(),
                    line,
                });
            }
            Err(failed) => return Err(failed),
        };
        let answer =
            Answer::read(&answer).ok_or_else(|| error::unexpected(&line.client.address))?;
        // The master of before may go on answering; grants are judged by whoever asked for them.
        if line.connection.is_over() && !matches!(request, Request::Acquire { .. }) {
            return Err(error::superseded(&line.client.address).into());
        }
        if let Answer::Granted(token) = answer {
            self.shared().saw(token.get());
        }
        Ok(Answered { answer, sent, line })
    }

    /// Who has this lock. It names no other key, so it is answered while a slot moves too.
    ///
    /// # Errors
    /// As [`error::map`] has it.
    pub(crate) async fn holder(&self, keys: &LockKeys) -> Result<Option<Holder>> {
        let make = |_| (&*HOLDER, script::call(&HOLDER, &[&keys.lock]));
        let held = self.call(keys, true, make).await?;
        value::holder(&held.answer, value::ours)
            .ok_or_else(|| error::unexpected(&held.line.client.address))
    }

    /// Calls a script that is no [`Request`]. `again`: it may be sent again if the first was not
    /// answered.
    ///
    /// # Errors
    /// As [`error::map`] has it.
    pub(crate) async fn call(
        &self,
        keys: &LockKeys,
        again: bool,
        make: impl Fn(Sender) -> (&'static Script, Cmd) + Send + Sync,
    ) -> Result<Answered<Value>> {
        let called = match self {
            Self::One(client) => {
                let line = Line::new(client.clone(), client.connection().await?);
                let sent = Moment::now();
                let said = line.send(make).await;
                line.answered(sent, said)
            }
            Self::Cluster(cluster) => cluster.call(keys.slot, again, make).await,
        };
        Ok(called?)
    }

    /// Makes sure that `claim` neither holds the lock nor waits for it, in the background: the request
    /// leaves before this returns, down the connection that the claim asked on, and again after a
    /// reconnect, until it is answered. What is then left ends within the claim's ttl.
    pub(crate) fn cancel(
        &self,
        line: &Line,
        keys: LockKeys,
        claim: Uuid,
        place: Place,
        ttl: Duration,
    ) {
        let pending = self.shared().pending();
        let mut first = {
            let (servers, line, keys) = (self.clone(), line.clone(), keys.clone());
            Box::pin(async move {
                let request = Request::Release {
                    claim,
                    place,
                    keys: &keys,
                };
                let answered = servers.request_from(Some(line), request, &mut None).await;
                answered.map(drop).map_err(Error::from)
            })
        };
        let begun = poll_once(&line.connection.runtime, first.as_mut());
        if let Poll::Ready(Ok(())) = begun {
            return;
        }
        let servers = self.downgrade();
        let task = async move {
            let _pending = pending;
            let since = Moment::now();
            // One that failed at once is not polled again: it goes out anew below.
            let mut answer = match begun {
                Poll::Ready(answer) => Ok(answer),
                Poll::Pending => timeout(CANCEL_LIMIT, first).await,
            };
            while !matches!(answer, Ok(Ok(()))) && since.elapsed() < ttl {
                if let Ok(Err(e)) = &answer {
                    if !e.is_transient() {
                        debug!(target: "leasehold", lock = %keys.lock, error = %e, "cancel failed");
                        return;
                    }
                    sleep(CANCEL_PAUSE).await;
                }
                let Some(servers) = servers() else {
                    return;
                };
                let request = Request::Release {
                    claim,
                    place,
                    keys: &keys,
                };
                let again = async {
                    let answered = servers.request(request, &mut None).await;
                    answered.map(drop).map_err(Error::from)
                };
                answer = timeout(CANCEL_LIMIT, again).await;
            }
        };
        drop(line.connection.runtime.spawn(task));
    }

    /// Ends all connections once all cancels are through, or a while has passed.
    pub(crate) async fn close(&self) {
        match self {
            Self::One(client) => client.close().await,
            Self::Cluster(cluster) => cluster.close().await,
        }
    }

    /// The same, as long as others hold on to it.
    fn downgrade(&self) -> Box<dyn Fn() -> Option<Self> + Send + Sync> {
        match self {
            Self::One(client) => {
                let client = Arc::downgrade(client);
                Box::new(move || client.upgrade().map(Self::One))
            }
            Self::Cluster(cluster) => {
                let cluster = Arc::downgrade(cluster);
                Box::new(move || cluster.upgrade().map(Self::Cluster))
            }
        }
    }
}

impl Line {
    /// To a server that has all slots, if there are any.
    pub(crate) fn new(client: Arc<Client>, connection: Arc<Connection>) -> Self {
        Self {
            client,
            connection,
            asking: false,
            owner: None,
        }
    }

    /// Calls a script on it.
    pub(crate) async fn send(
        &self,
        make: impl Fn(Sender) -> (&'static Script, Cmd) + Send + Sync,
    ) -> RedisResult<Value> {
        let (script, cmd) = make(self.client.sender(&self.connection, Moment::now()));
        self.connection.call_as(script, &cmd, self.asking).await
    }

    fn answered(self, sent: Moment, said: RedisResult<Value>) -> Result<Answered<Value>, Failed> {
        match said {
            Ok(answer) => Ok(Answered {
                answer,
                sent,
                line: self,
            }),
            Err(e) => Err(Failed::Said(self.client, e)),
        }
    }
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Else(error)
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Said(client, e) => error::map(&client.address, &e),
            Failed::Moving(error) | Failed::Else(error) => error,
        }
    }
}
