use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Moment, Result};
use redis::{Cmd, RedisError, Script, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, info};
use uuid::Uuid;

use super::slot::SLOTS;
use super::topology::{Node, Topology};
use crate::RedisOptions;
use crate::client::{Client, Shared};
use crate::error;
use crate::names::Names;
use crate::request::{Place, Request, Sender};
use crate::script::{self, FREE, LEAVE};
use crate::servers::{Answered, Failed, Line, Standing};
use crate::value;

/// The nodes of a Redis Cluster, and the way of each request to the node that has its lock.
///
/// 1. *Who has what.* Each key belongs to a slot, and each slot to one node. All that a lock needs is in
///    one slot. Which node has which slot is asked of all nodes at once when connecting, and again
///    ([`look_again`](Self::look_again)) when something shows that it has changed; most of them have to
///    agree, or what most of those say that answer in time is taken.
/// 2. *A client for each node* that has slots, made when it is first needed, with an inbox of its own. A
///    waiter stands in its queue with the inbox of the node that it asked: only that node counts it as
///    alive. Whoever waits asks again, on the new node and with its old ticket, as soon as its slot is
///    known to be elsewhere, and at least every third of its ttl.
/// 3. *`MOVED`.* The slot is at the node that the answer names. The request goes there, under the same
///    claim: to repeat it is harmless.
/// 4. *`ASK`.* The slot is moving, and this node has none of the keys any more. The request goes to the
///    other node, once, announced by `ASKING` on the same connection.
/// 5. *`TRYAGAIN`*, or a script that fails half-way since a key of it is no longer here: the slot is
///    moving, and some of the keys are here, some there or nowhere. What names one key goes through
///    (renewals, and who holds); an acquire is repeated for a while, then fails as unavailable or goes
///    on waiting; a release leaves the queue and then frees the lock, each alone (`leave.lua`,
///    `free.lua`), so that whoever asks next from the queue serves it.
/// 6. *The node is gone or silent*, the cluster is down, or nobody has the slot. One look who has it now;
///    if that is another node, what may be repeated is sent there, else the request fails. A release
///    that was not answered is never sent again here: what the first one did is for its sender to judge.
///
/// Source: the Redis Cluster specification, "Client and Server roles", "Redirection and resharding".
pub(crate) struct Cluster {
    pub(crate) names: Names,
    pub(crate) shared: Arc<Shared>,
    options: RedisOptions,
    topology: watch::Sender<Arc<Topology>>,
    clients: Mutex<HashMap<Node, Arc<Client>>>,
    /// A look is under way.
    looking: AtomicBool,
    /// Looks that are over.
    looks: watch::Sender<u64>,
    pace: Mutex<Pace>,
    closed: AtomicBool,
}

/// When the next look may begin.
#[derive(Debug, Default)]
struct Pace {
    last: Option<Moment>,
    pause: Duration,
}

/// So many redirections in a row are followed.
const REDIRECTIONS: u32 = 8;
/// So long a slot that moves, or a cluster that is down, is waited for within one request.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long an answer may still come from a node that no longer has the slot.
const LATE: Duration = Duration::from_millis(250);
/// How long further nodes may take to answer after the first.
const GRACE: Duration = Duration::from_millis(250);
/// So many nodes are asked at a time who has what.
const ASKED: usize = 9;
/// The pause between two looks grows from this to the longest, while nothing changes.
const SHORTEST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(1);

impl Cluster {
    /// Connects to the nodes that `options` name, learns of the others, and tries on one of them all
    /// that will be used.
    pub(crate) async fn connect(options: &RedisOptions) -> Result<Arc<Self>> {
        const TRIES: u32 = 3;
        let cluster = Arc::new(Self {
            names: Names::in_cluster(&options.prefix)?,
            shared: Arc::default(),
            options: options.clone(),
            topology: watch::Sender::new(Arc::new(Topology::empty())),
            clients: Mutex::default(),
            looking: AtomicBool::new(false),
            looks: watch::Sender::new(0),
            pace: Mutex::default(),
            closed: AtomicBool::new(false),
        });
        let mut tried = 1;
        loop {
            match cluster.try_connect().await {
                // It is just being made, or changed.
                Err(e) if e.is_transient() && tried < TRIES => sleep(SHORTEST * tried).await,
                outcome => return outcome.map(|()| cluster),
            }
            tried += 1;
        }
    }

    async fn try_connect(self: &Arc<Self>) -> Result<()> {
        self.look().await?;
        if self.topology.borrow().owners().is_empty() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "no node of the Redis Cluster has slots yet: make it with redis-cli --cluster create",
            ));
        }
        // Any slot that somebody has; most clusters miss none.
        let mut keys = self.names.probe(Uuid::new_v4());
        for _ in 0..SLOTS {
            if self.owner(keys.slot).is_some() {
                break;
            }
            keys = self.names.probe(Uuid::new_v4());
        }
        let line = self.line(keys.slot).await?;
        line.connection.may_ask(&line.client).await?;
        line.client.probe(&keys).await
    }

    /// Sends one request about a claim, at first down `line` if there is one; `at` says where it was
    /// sent last, from before it leaves.
    pub(crate) async fn request(
        self: &Arc<Self>,
        line: Option<Line>,
        request: Request<'_>,
        at: &mut Option<Line>,
    ) -> Result<Answered<Value>, Failed> {
        let slot = request.keys().slot;
        let make = |sender| request.command(sender);
        let Request::Release { claim, place, keys } = request else {
            return self.route(slot, Manner::AGAIN, make, line, at).await;
        };
        match self.route(slot, Manner::IMPATIENT, make, line, at).await {
            Err(Failed::Moving(_)) => {}
            answered => return answered,
        }
        // In this order: out of the queue, it is handed nothing any more.
        if matches!(place, Place::Ticket(_) | Place::Unknown) {
            let leave = |_| {
                let mut call = script::call(&LEAVE, &[&keys.queue]);
                call.arg(claim.to_string()).arg(place.to_string());
                (&*LEAVE, call)
            };
            self.route(slot, Manner::AGAIN, leave, None, at).await?;
        }
        let free = |_| {
            let mut call = script::call(&FREE, &[&keys.lock]);
            call.arg(value::mine(claim));
            (&*FREE, call)
        };
        self.route(slot, Manner::ONCE, free, None, at).await
    }

    /// Calls a script that is no [`Request`]. `again`: it may be sent again if the first was not
    /// answered.
    pub(crate) async fn call(
        self: &Arc<Self>,
        slot: u16,
        again: bool,
        make: impl Fn(Sender) -> (&'static Script, Cmd) + Send + Sync,
    ) -> Result<Answered<Value>, Failed> {
        let manner = if again { Manner::AGAIN } else { Manner::ONCE };
        self.route(slot, manner, make, None, &mut None).await
    }

    /// The node that has this slot, as far as is known.
    pub(crate) fn owner(&self, slot: u16) -> Option<Node> {
        self.topology.borrow().owner(slot).cloned()
    }

    pub(crate) fn standing(&self, slot: u16) -> Standing {
        let owner = self.owner(slot);
        let client = owner.as_ref().and_then(|node| {
            let clients = self.clients();
            clients.get(node).cloned()
        });
        Standing {
            owner,
            up: client.and_then(|client| client.up()),
        }
    }

    /// The clients of all nodes that have slots.
    pub(crate) fn of_owners(self: &Arc<Self>) -> Result<Vec<Arc<Client>>> {
        let topology = self.topology.borrow().clone();
        let owners = topology.owners().iter();
        owners.map(|node| self.client(node)).collect()
    }

    /// Whether replicas must confirm grants and renewals.
    pub(crate) fn replicas_are_asked(&self) -> bool {
        self.options.replicas > 0
    }

    /// How errors call the node that has this slot.
    pub(crate) fn address(&self, slot: u16) -> String {
        match self.owner(slot) {
            Some(node) => node.to_string(),
            None => format!("the cluster of {}", self.options.address()),
        }
    }

    /// Something has changed: looks soon who has which slot, in the background and in the caller's
    /// runtime. One look at a time.
    pub(crate) fn look_again(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        if self.is_closed() || self.looking.swap(true, Ordering::AcqRel) {
            return;
        }
        let looking = Looking(Arc::downgrade(self));
        let pause = self.pace().next();
        let task = async move {
            sleep(pause).await;
            if let Some(cluster) = looking.0.upgrade()
                && let Err(e) = cluster.look().await
            {
                debug!(target: "leasehold", error = %e, "no node says who has which slot");
            }
        };
        drop(runtime.spawn(task));
    }

    /// Ends all connections once all cancels are through, or a while has passed.
    pub(crate) async fn close(&self) {
        self.shared.cancelled().await;
        self.closed.store(true, Ordering::Release);
        let clients = std::mem::take(&mut *self.clients());
        for client in clients.into_values() {
            client.end();
        }
        self.shared.inbox.wake_all();
    }

    /// Sends what `make` makes to the node that has the slot, wherever that is.
    async fn route(
        self: &Arc<Self>,
        slot: u16,
        manner: Manner,
        make: impl Fn(Sender) -> (&'static Script, Cmd) + Send + Sync,
        mut next: Option<Line>,
        at: &mut Option<Line>,
    ) -> Result<Answered<Value>, Failed> {
        let mut redirected = 0;
        let mut waiting = Waiting::default();
        loop {
            let line = match next.take() {
                Some(line) => line,
                None => self.line(slot).await?,
            };
            let line = at.insert(line).clone();
            let sent = Moment::now();
            let late = async {
                self.until_moved(slot, line.owner.as_ref()).await;
                sleep(LATE).await;
            };
            let said = tokio::select! {
                biased;
                said = line.send(&make) => said,
                () = late => {
                    if manner.again {
                        continue;
                    }
                    return Err(unanswered(slot, &line).into());
                }
            };
            let e = match said {
                Ok(answer) => return Ok(Answered { answer, sent, line }),
                Err(e) => e,
            };
            match Refusal::of(&e) {
                Refusal::Moved | Refusal::Ask if redirected == REDIRECTIONS => {
                    return Err(Failed::Said(line.client, e));
                }
                Refusal::Moved => {
                    redirected += 1;
                    match self.named(&e, &line) {
                        Some(node) => self.moved(slot, &node),
                        None => self.looked_again().await,
                    }
                }
                Refusal::Ask => {
                    redirected += 1;
                    let Some(node) = self.named(&e, &line) else {
                        return Err(Failed::Said(line.client, e));
                    };
                    let client = self.client(&node)?;
                    next = Some(Line {
                        connection: client.connection().await?,
                        client,
                        asking: true,
                        owner: line.owner,
                    });
                }
                Refusal::Moving if !manner.wait => return Err(Failed::Moving(moving(slot, &line))),
                Refusal::Moving if waiting.is_over() => return Err(moving(slot, &line).into()),
                Refusal::Moving => waiting.pause().await,
                Refusal::Down if waiting.is_over() => return Err(Failed::Said(line.client, e)),
                Refusal::Down => {
                    self.looked_again().await;
                    waiting.pause().await;
                }
                Refusal::Gone if !manner.again => return Err(Failed::Said(line.client, e)),
                Refusal::Gone => {
                    self.looked_again().await;
                    if self.owner(slot) == line.owner {
                        return Err(Failed::Said(line.client, e));
                    }
                }
                Refusal::Other => return Err(Failed::Said(line.client, e)),
            }
        }
    }

    /// A connection to the node that has the slot.
    async fn line(self: &Arc<Self>, slot: u16) -> Result<Line> {
        let mut looked = false;
        loop {
            if self.is_closed() {
                return Err(error::closed());
            }
            let owner = self.owner(slot);
            let failed = match &owner {
                Some(node) => {
                    let client = self.client(node)?;
                    let opened = tokio::select! {
                        biased;
                        opened = client.connection() => opened,
                        () = self.until_moved(slot, owner.as_ref()) => continue,
                    };
                    match opened {
                        Ok(connection) => {
                            return Ok(Line {
                                client,
                                connection,
                                asking: false,
                                owner,
                            });
                        }
                        Err(e) if !e.is_transient() => return Err(e),
                        Err(e) => e,
                    }
                }
                None => Error::new(
                    ErrorKind::Unavailable,
                    format!(
                        "no node of the Redis Cluster has slot {slot}, which this lock is in: see \
                         redis-cli --cluster check {}",
                        self.options.address()
                    ),
                ),
            };
            if looked {
                return Err(failed);
            }
            looked = true;
            self.looked_again().await;
            if self.owner(slot) == owner {
                return Err(failed);
            }
        }
    }

    /// The client of a node.
    fn client(self: &Arc<Self>, node: &Node) -> Result<Arc<Client>> {
        let mut clients = self.clients();
        if let Some(client) = clients.get(node) {
            return Ok(client.clone());
        }
        // Under the lock, after which `close` finds what is there.
        if self.is_closed() {
            return Err(error::closed());
        }
        let client = Client::of_node(
            &self.options.at_node(node),
            self.names.clone(),
            self.shared.clone(),
            Arc::downgrade(self),
        )?;
        clients.insert(node.clone(), client.clone());
        Ok(client)
    }

    /// The node that a redirection names.
    fn named(&self, e: &RedisError, line: &Line) -> Option<Node> {
        let (to, _slot) = e.redirect_node()?;
        let (host, _port) = line.client.address.rsplit_once(':')?;
        Node::redirected(to, host)
    }

    /// A node says that this slot is at `node`.
    fn moved(self: &Arc<Self>, slot: u16, node: &Node) {
        let changed = self.topology.send_if_modified(|topology| {
            let changed = topology.owner(slot) != Some(node);
            if changed {
                *topology = Arc::new(topology.with(slot, node));
            }
            changed
        });
        if changed {
            debug!(target: "leasehold", slot, %node, "a slot has moved");
            self.shared.inbox.wake_all();
            self.look_again();
        }
    }

    /// Resolves when the slot is at another node than `owner`.
    async fn until_moved(&self, slot: u16, owner: Option<&Node>) {
        let mut topology = self.topology.subscribe();
        let moved = topology.wait_for(|topology| topology.owner(slot) != owner);
        if moved.await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until a look that is under way, or the next one, is over, or a while has passed.
    async fn looked_again(self: &Arc<Self>) {
        let mut looks = self.looks.subscribe();
        self.look_again();
        drop(timeout(LONGEST + GRACE, looks.changed()).await);
    }

    /// Asks all nodes who has which slot.
    pub(crate) async fn look(self: &Arc<Self>) -> Result<()> {
        let mut nodes: Vec<Node> = self.topology.borrow().nodes().cloned().collect();
        for named in self.options.nodes().unwrap_or_default() {
            if !nodes.iter().any(|node| self.options.reached(node) == named) {
                nodes.push(named.clone());
            }
        }
        fastrand::shuffle(&mut nodes);
        let mut failed = None;
        for nodes in nodes.chunks(ASKED) {
            match self.ask(nodes).await {
                Ok(topology) => {
                    self.learn(&topology);
                    return Ok(());
                }
                Err(e) => failed = Some(e),
            }
        }
        Err(failed.unwrap_or_else(error::closed))
    }

    /// What most of these nodes say, or if they do not agree, what most of those say that answer in time.
    async fn ask(self: &Arc<Self>, nodes: &[Node]) -> Result<Topology> {
        let mut asking = JoinSet::new();
        for node in nodes {
            let options = self.options.at_node(node);
            let connection = self.clients().get(node).and_then(|client| client.current());
            asking.spawn(async move { Topology::ask(&options, connection).await });
        }
        let mut votes: Vec<(Topology, usize)> = Vec::new();
        let mut failed: Option<Error> = None;
        loop {
            let answer = match votes.is_empty() {
                true => asking.join_next().await,
                false => timeout(GRACE, asking.join_next()).await.unwrap_or(None),
            };
            let topology = match answer {
                Some(Ok(Ok(topology))) => topology,
                Some(Ok(Err(e))) => {
                    // Rather a reason that does not pass by itself.
                    if failed.as_ref().is_none_or(Error::is_transient) {
                        failed = Some(e);
                    }
                    continue;
                }
                // The runtime is ending.
                Some(Err(_)) => continue,
                None => break,
            };
            match votes.iter_mut().find(|(other, _)| other.agrees(&topology)) {
                Some((_, votes)) => *votes += 1,
                None => votes.push((topology, 1)),
            }
            if votes.iter().any(|(_, votes)| *votes > nodes.len() / 2) {
                break;
            }
        }
        let most = votes.into_iter().max_by_key(|(_, votes)| *votes);
        match most {
            Some((topology, _)) => Ok(topology),
            None => Err(failed.unwrap_or_else(crate::connection::no_runtime)),
        }
    }

    fn learn(&self, topology: &Topology) {
        let changed = self.topology.send_if_modified(|known| {
            let changed = !known.agrees(topology);
            *known = Arc::new(topology.clone());
            changed
        });
        if changed {
            info!(target: "leasehold", nodes = ?topology.owners(), "slots have moved");
            let gone: Vec<_> = {
                let mut clients = self.clients();
                let gone = clients.extract_if(|node, _| !topology.owners().contains(node));
                gone.collect()
            };
            // What still uses their connections ends first.
            drop(gone);
            self.pace().pause = Duration::ZERO;
            self.shared.inbox.wake_all();
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<Node, Arc<Client>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("nodes", &self.topology.borrow().owners())
            .field("prefix", &self.names.prefix())
            .finish_non_exhaustive()
    }
}

/// What may be done about a request that is not answered as it should be.
#[derive(Debug, Clone, Copy)]
struct Manner {
    /// It may be sent again if it was not answered.
    again: bool,
    /// It waits a while for a slot that moves.
    wait: bool,
}

impl Manner {
    const AGAIN: Self = Self {
        again: true,
        wait: true,
    };
    const ONCE: Self = Self {
        again: false,
        wait: true,
    };
    const IMPATIENT: Self = Self {
        again: false,
        wait: false,
    };
}

/// What an answer says about slots.
enum Refusal {
    Moved,
    Ask,
    Moving,
    /// The cluster, or this part of it, or this node does not serve just now.
    Down,
    /// The node is not reached.
    Gone,
    Other,
}

impl Refusal {
    fn of(e: &RedisError) -> Self {
        use redis::ErrorKind::Server;
        if e.is_io_error() || e.is_connection_dropped() || e.is_unrecoverable_error() {
            return Self::Gone;
        }
        match e.kind() {
            Server(ServerErrorKind::Moved) => return Self::Moved,
            Server(ServerErrorKind::Ask) => return Self::Ask,
            Server(ServerErrorKind::TryAgain) => return Self::Moving,
            Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::ReadOnly
                | ServerErrorKind::MasterDown,
            ) => return Self::Down,
            _ => {}
        }
        // Within a script they are plain text.
        let text = error::describe(e);
        if text.contains("non local key") || text.contains("TRYAGAIN") {
            Self::Moving
        } else if ["cluster is down", "CLUSTERDOWN", "READONLY"]
            .iter()
            .any(|sign| text.contains(sign))
        {
            Self::Down
        } else {
            Self::Other
        }
    }
}

/// Waits within one request, in growing steps.
#[derive(Default)]
struct Waiting {
    since: Option<Moment>,
    step: Duration,
}

impl Waiting {
    fn is_over(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > PATIENCE)
    }

    async fn pause(&mut self) {
        self.since.get_or_insert_with(Moment::now);
        self.step = (self.step * 2).clamp(Duration::from_millis(10), Duration::from_millis(200));
        sleep(self.step).await;
    }
}

impl Pace {
    /// How long from now the next look begins.
    fn next(&mut self) -> Duration {
        let rested = self.last.is_none_or(|last| last.elapsed() > 2 * LONGEST);
        let pause = match rested {
            true => Duration::ZERO,
            false => (self.pause * 2).clamp(SHORTEST, LONGEST),
        };
        self.pause = pause;
        self.last = Some(Moment::now());
        pause
    }
}

/// A look; another may begin when it is dropped.
struct Looking(Weak<Cluster>);

impl Drop for Looking {
    fn drop(&mut self) {
        if let Some(cluster) = self.0.upgrade() {
            cluster.looking.store(false, Ordering::Release);
            cluster.looks.send_modify(|looks| *looks += 1);
        }
    }
}

fn moving(slot: u16, line: &Line) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "slot {slot} is moving to or from the Redis node {}: its locks can be taken when it has \
             arrived",
            line.client.address
        ),
    )
}

fn unanswered(slot: u16, line: &Line) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        format!(
            "Redis at {} did not answer before slot {slot} moved to another node",
            line.client.address
        ),
    )
}
