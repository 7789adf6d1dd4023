use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use leasehold_core::{Claim, Error, ErrorKind, Examination, Holder, Key, Moment, Result, Token};
use redis::{Cmd, RedisError, Script, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::debug;

use super::node::{Ask, Attempt, Node, Reply, Standing, Tell, Vote};
use super::script::{ACQUIRE, EVICT, FREE, HOLDER, LOOK, PROBE, RAISE, SEED, VOTES};
use super::sent::Sent;
use crate::client::Client;
use crate::connection::{Connection, no_runtime};
use crate::erase::erase;
use crate::error;
use crate::examine::Answers;
use crate::list::scan;
use crate::names::Names;
use crate::script::{self, RENEW};
use crate::value;

/// A Redis server as a node.
#[derive(Debug, Clone)]
pub(crate) struct RemoteNode(Arc<Remote>);

struct Remote {
    client: Arc<Client>,
    /// How long it has to answer.
    limit: Duration,
    /// The name of the hash with its state.
    state: String,
    /// The server on the other end of the connection with this number.
    server: Mutex<Option<(u64, Arc<Server>)>>,
    /// Where it was last used: requests go on there when nobody waits for them.
    runtime: Mutex<Option<Handle>>,
    /// What is to be taken back and has not been answered.
    frees: watch::Sender<usize>,
    /// Set when a node says that it has no data, also after the attempt was decided without it.
    untended: Arc<AtomicBool>,
}

/// A run of a server.
#[derive(Debug)]
pub(super) struct Server {
    /// Which run its data must be of for it to vote.
    pub(super) run: String,
    /// The run itself: two nodes with the same are one server.
    pub(super) id: String,
    up: Duration,
    asked: Moment,
}

/// Who has the vote of one node.
#[derive(Debug, Clone)]
pub(super) struct Voted {
    pub(super) grant: String,
    pub(super) holder: Holder,
}

/// The run of all servers that lose nothing when they are restarted.
const DURABLE: &str = "durable";
const FORMAT: &str = "leasehold-redlock:1 ";
/// The pause before what failed is sent again.
const PAUSE: Duration = Duration::from_millis(250);

impl RemoteNode {
    pub(super) fn new(client: Arc<Client>, limit: Duration, untended: Arc<AtomicBool>) -> Self {
        let state = format!("{}leasehold:redlock", client.names.prefix());
        Self(Arc::new(Remote {
            client,
            limit,
            state,
            server: Mutex::new(None),
            runtime: Mutex::new(None),
            frees: watch::Sender::new(0),
            untended,
        }))
    }

    /// Connects, tries all that will be used, and says who it is.
    pub(super) async fn connect(&self) -> Result<Arc<Server>> {
        let client = &self.0.client;
        let connection = client.connection().await?;
        let server = self.0.server(&connection).await?;
        let probe = format!("{}leasehold:probe:{}", client.names.prefix(), client.id);
        let hash = format!("{probe}:hash");
        let mut call = script::call(&PROBE, &[&probe, &hash, &self.0.state]);
        call.arg(&probe);
        connection.probe(client, &PROBE, &call).await?;
        // Of the inbox, which a node has no use for.
        let unsubscribed = connection.unsubscribe(&client.names.inbox(client.id)).await;
        unsubscribed.map_err(|e| client.refused(&e, "+unsubscribe"))?;
        Ok(server)
    }

    /// The name of the key of a lock.
    pub(super) fn lock(&self, key: &Key) -> Arc<str> {
        self.0.client.names.of(key).lock
    }

    pub(super) fn address(&self) -> &str {
        &self.0.client.address
    }

    /// What it says of itself, and how it stands with its data.
    pub(super) fn examine(&self) -> Reply<(Examination, Answers, Standing)> {
        let (node, remote) = (self.clone(), self.0.clone());
        self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            let mut examination = Examination::new();
            let answers = Answers::ask(&remote.client, &connection, &mut examination).await?;
            let standing = node.look().await?;
            Ok((examination, answers, standing))
        })
    }

    /// The number of its connection, if that is up.
    pub(super) fn up(&self) -> Option<u64> {
        self.0.client.up()
    }

    /// Messages about `lock` come in from now on; says on which connection.
    pub(super) fn watch(&self, lock: &str) -> Reply<u64> {
        let (remote, channel) = (self.0.clone(), self.0.channel(lock));
        self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            let subscribed = connection.subscribe(&channel).await;
            subscribed.map_err(|e| remote.failed(&e))?;
            Ok(connection.number)
        })
    }

    /// They do not any more.
    pub(super) fn unwatch(&self, lock: &str) {
        if self.up().is_none() {
            return;
        }
        let (remote, channel) = (self.0.clone(), self.0.channel(lock));
        drop(self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            let done = connection.unsubscribe(&channel).await;
            done.map_err(|e| remote.failed(&e))
        }));
    }

    /// Who has its vote.
    pub(super) fn voted(&self, key: &Key) -> Reply<Option<Voted>> {
        let remote = self.0.clone();
        let lock = self.0.client.names.of(key).lock;
        self.send(self.0.limit, async move {
            let call = script::call(&HOLDER, &[&lock, &remote.state]);
            let connection = remote.client.connection().await?;
            match remote.call(&connection, &HOLDER, &call).await? {
                Value::Nil => Ok(None),
                answer => read_voted(&answer)
                    .map(Some)
                    .ok_or_else(|| error::unexpected(&remote.client.address)),
            }
        })
    }

    /// Some of the keys that it has, and where to go on: 0 is both the begin and the end.
    pub(super) fn scan(&self, from: u64) -> Reply<(u64, Vec<Vec<u8>>)> {
        let client = self.0.client.clone();
        self.send(self.0.limit, async move { scan(&client, from).await })
    }

    /// Who has its vote for each of these locks.
    pub(super) fn votes(&self, locks: &[Arc<str>]) -> Reply<Vec<Option<Voted>>> {
        let remote = self.0.clone();
        let keys: Vec<&str> = locks.iter().map(|lock| &**lock).collect();
        let call = script::call(&VOTES, &keys);
        let count = locks.len();
        self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            let answer = remote.call(&connection, &VOTES, &call).await?;
            let votes = match &answer {
                Value::Array(votes) if votes.len() == count => votes.iter().map(read_vote_of),
                _ => return Err(error::unexpected(&remote.client.address)),
            };
            let votes: Option<Vec<_>> = votes.collect();
            votes.ok_or_else(|| error::unexpected(&remote.client.address))
        })
    }

    pub(super) fn names(&self) -> &Names {
        &self.0.client.names
    }

    /// Takes the vote away from whoever has it, or from this grant only.
    pub(super) fn evict(&self, key: &Key, grant: &str) -> Reply<bool> {
        let remote = self.0.clone();
        let lock = self.0.client.names.of(key).lock;
        let grant = grant.to_owned();
        self.send(self.0.limit, async move {
            let mut call = script::call(&EVICT, &[&lock, &remote.state]);
            call.arg(grant).arg(remote.channel(&lock));
            let connection = remote.client.connection().await?;
            remote.yes(&connection, &EVICT, &call).await
        })
    }

    /// Removes all that it has under the prefix.
    pub(super) async fn erase(&self) -> Result<()> {
        erase(&self.0.client).await
    }

    /// Ends the connection once all that is to be taken back has been, or a while has passed.
    pub(super) async fn close(&self) {
        let mut frees = self.0.frees.subscribe();
        let through = frees.wait_for(|pending| *pending == 0);
        drop(timeout(2 * self.0.limit, through).await);
        self.0.client.close().await;
    }

    fn send<T: Send + Unpin + 'static>(
        &self,
        limit: Duration,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Reply<T> {
        let remote = self.0.clone();
        let Some(runtime) = remote.runtime() else {
            return Box::pin(std::future::ready(Err(no_runtime())));
        };
        Box::pin(Sent::new(runtime, async move {
            timeout(limit, request)
                .await
                .unwrap_or_else(|_elapsed| Err(error::silent(&remote.client.address, limit)))
        }))
    }
}

impl Node for RemoteNode {
    fn acquire(&self, ask: &Ask<'_>) -> Reply<Vote> {
        let remote = self.0.clone();
        let names = &self.0.client.names;
        let lock = names.of(&ask.claim.key).lock;
        let tomb = remote.tomb(ask.attempt);
        let mut start = script::call(&ACQUIRE, &[&lock, &remote.state, &tomb]);
        start
            .arg(ask.claim.id.to_string())
            .arg(ask.attempt.number)
            .arg(ask.proposal)
            .arg(millis(ask.claim.ttl));
        let who = who(ask.claim);
        self.send(self.0.limit.min(ask.claim.request_limit), async move {
            let connection = remote.client.connection().await?;
            let server = remote.server(&connection).await?;
            start.arg(&server.run).arg(who);
            let answer = remote.call(&connection, &ACQUIRE, &start).await?;
            let vote = read_vote(&answer);
            if vote == Some(Vote::Unseeded) {
                remote.untended.store(true, Ordering::Relaxed);
            }
            vote.ok_or_else(|| error::unexpected(&remote.client.address))
        })
    }

    fn raise(&self, ask: &Ask<'_>, token: u64) -> Reply<bool> {
        let remote = self.0.clone();
        let lock = self.0.client.names.of(&ask.claim.key).lock;
        let mut call = script::call(&RAISE, &[&lock, &remote.state]);
        call.arg(mine(ask.attempt)).arg(token);
        self.send(self.0.limit.min(ask.claim.request_limit), async move {
            let connection = remote.client.connection().await?;
            remote.yes(&connection, &RAISE, &call).await
        })
    }

    fn extend(&self, attempt: &Attempt, ttl: Duration) -> Reply<bool> {
        let remote = self.0.clone();
        let lock = self.0.client.names.of(&attempt.key).lock;
        let mut call = script::call(&RENEW, &[&lock]);
        call.arg(mine(attempt)).arg(millis(ttl));
        self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            remote.yes(&connection, &RENEW, &call).await
        })
    }

    fn free(&self, attempt: &Attempt, ttl: Duration, tell: Tell) -> Reply<bool> {
        let remote = self.0.clone();
        let lock = self.0.client.names.of(&attempt.key).lock;
        let tomb = remote.tomb(attempt);
        let mut call = script::call(&FREE, &[&lock, &remote.state, &tomb]);
        call.arg(attempt.claim.to_string())
            .arg(attempt.number)
            .arg(millis(ttl))
            .arg(match tell {
                Tell::Waiters => remote.channel(&lock),
                Tell::Nobody => String::new(),
            });
        let pending = Pending::new(&self.0);
        // It has a limit of its own, and goes on after it.
        self.send(Duration::MAX, async move {
            let limit = remote.limit;
            let answer = timeout(limit, remote.free(&call)).await;
            let answer =
                answer.unwrap_or_else(|_| Err(error::silent(&remote.client.address, limit)));
            if answer.as_ref().is_err_and(Error::is_transient) {
                drop(tokio::spawn(remote.free_later(call, ttl, pending)));
            }
            answer
        })
    }

    fn look(&self) -> Reply<Standing> {
        let remote = self.0.clone();
        self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            let server = remote.server(&connection).await?;
            let mut call = script::call(&LOOK, &[&remote.state]);
            call.arg(&server.run);
            let answer = remote.call(&connection, &LOOK, &call).await?;
            let Value::Array(fields) = &answer else {
                return Err(error::unexpected(&remote.client.address));
            };
            let [
                Value::BulkString(token),
                Value::Int(waiting),
                Value::BulkString(stored),
            ] = &fields[..]
            else {
                return Err(error::unexpected(&remote.client.address));
            };
            let stored = String::from_utf8_lossy(stored);
            Ok(Standing {
                token: std::str::from_utf8(token)
                    .ok()
                    .and_then(|it| it.parse().ok()),
                up: server.up + server.asked.elapsed(),
                waiting: u64::try_from(*waiting).ok().map(Duration::from_micros),
                state: format!("{} {stored}", server.run),
            })
        })
    }

    fn mark(&self, seen: &Standing) -> Reply<()> {
        self.write(seen, String::new())
    }

    fn seed(&self, seen: &Standing, token: u64) -> Reply<()> {
        self.write(seen, token.to_string())
    }
}

impl RemoteNode {
    fn write(&self, seen: &Standing, token: String) -> Reply<()> {
        let remote = self.0.clone();
        let state = seen.state.clone();
        self.send(self.0.limit, async move {
            let connection = remote.client.connection().await?;
            let server = remote.server(&connection).await?;
            let stands = state
                .split_once(' ')
                .filter(|(run, _)| *run == server.run)
                .map(|(_, stored)| stored);
            if let Some(stored) = stands {
                let mut call = script::call(&SEED, &[&remote.state]);
                call.arg(&server.run).arg(stored).arg(token);
                if remote.yes(&connection, &SEED, &call).await? {
                    return Ok(());
                }
            }
            Err(Error::new(
                ErrorKind::Unavailable,
                format!("Redis at {} has changed meanwhile", remote.client.address),
            ))
        })
    }
}

impl Remote {
    async fn call(
        &self,
        connection: &Arc<Connection>,
        script: &Script,
        call: &Cmd,
    ) -> Result<Value> {
        let answer = connection.call(script, call).await;
        answer.map_err(|e| self.failed(&e))
    }

    /// Calls a script that answers 1 or 0. Somebody else's data in the place of the lock is a no.
    async fn yes(&self, connection: &Arc<Connection>, script: &Script, call: &Cmd) -> Result<bool> {
        match connection.call(script, call).await {
            Ok(Value::Int(yes)) => Ok(yes == 1),
            Ok(_) => Err(error::unexpected(&self.client.address)),
            Err(e) if error::is_wrong_type(&e) => Ok(false),
            Err(e) => Err(self.failed(&e)),
        }
    }

    async fn free(&self, call: &Cmd) -> Result<bool> {
        let connection = self.client.connection().await?;
        self.yes(&connection, &FREE, call).await
    }

    /// Sends it again until it is answered; what is left after a ttl has ended by itself.
    async fn free_later(self: Arc<Self>, call: Cmd, ttl: Duration, pending: Pending) {
        let _pending = pending;
        let since = Moment::now();
        while since.elapsed() < ttl {
            sleep(PAUSE).await;
            match timeout(self.limit, self.free(&call)).await {
                Ok(Err(e)) if e.is_transient() => {}
                Ok(Err(e)) => {
                    let server = &self.client.address;
                    debug!(target: "leasehold", %server, error = %e, "a vote could not be taken back");
                    return;
                }
                Ok(Ok(_)) => return,
                Err(_elapsed) => {}
            }
        }
    }

    /// Which server this connection leads to.
    async fn server(&self, connection: &Arc<Connection>) -> Result<Arc<Server>> {
        let known = || {
            let known = self.server.lock().unwrap_or_else(PoisonError::into_inner);
            let (number, server) = known.as_ref()?;
            (*number == connection.number).then(|| server.clone())
        };
        if let Some(server) = known() {
            return Ok(server);
        }
        let asked = Moment::now();
        let info = connection
            .ask::<String>(redis::cmd("INFO").arg("server"))
            .await
            .map_err(|e| self.client.refused(&e, "+info"))?;
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name));
        let id = field("run_id:").map(str::trim).unwrap_or_default();
        let up = field("uptime_in_seconds:").and_then(|up| up.trim().parse::<u64>().ok());
        let (Some(up), false) = (up, id.is_empty()) else {
            return Err(error::unexpected(&self.client.address));
        };
        let durable = setting(connection, "appendonly").await.as_deref() == Some("yes")
            && setting(connection, "appendfsync").await.as_deref() == Some("always");
        let server = Arc::new(Server {
            run: if durable { DURABLE } else { id }.to_owned(),
            id: id.to_owned(),
            // Whole seconds, the difference of two that are rounded.
            up: Duration::from_secs(up.saturating_sub(1)),
            asked,
        });
        let mut known = self.server.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some((connection.number, server.clone()));
        Ok(server)
    }

    fn failed(&self, e: &RedisError) -> Error {
        error::map(&self.client.address, e)
    }

    fn channel(&self, lock: &str) -> String {
        let prefix = self.client.names.prefix();
        let name = lock.strip_prefix(prefix).unwrap_or(lock);
        format!("{prefix}leasehold:freed:{name}")
    }

    fn tomb(&self, attempt: &Attempt) -> String {
        let prefix = self.client.names.prefix();
        format!("{prefix}leasehold:gone:{}", attempt.claim)
    }

    /// The caller's runtime, or the last one.
    fn runtime(&self) -> Option<Handle> {
        let mut last = self.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(runtime) = Handle::try_current() {
            *last = Some(runtime);
        }
        last.clone()
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.client, f)
    }
}

/// A vote that is to be taken back, which `close` waits for.
struct Pending(Arc<Remote>);

impl Pending {
    fn new(remote: &Arc<Remote>) -> Self {
        remote.frees.send_modify(|pending| *pending += 1);
        Self(remote.clone())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.frees.send_modify(|pending| *pending -= 1);
    }
}

/// A setting of the server, if it tells.
async fn setting(connection: &Connection, name: &str) -> Option<String> {
    let mut cmd = redis::cmd("CONFIG");
    cmd.arg("GET").arg(name);
    let mut pairs: HashMap<String, String> = connection.ask(&cmd).await.ok()?;
    pairs.remove(name)
}

/// What the value of a lock begins with that this attempt has.
fn mine(attempt: &Attempt) -> String {
    format!("{FORMAT}{} {} ", attempt.claim, attempt.number)
}

/// The end of the value: whom to show.
fn who(claim: &Claim) -> String {
    // A host's name should have no blanks; if it has, the fields must not shift.
    let owner = claim.owner.to_string().replace(char::is_whitespace, "_");
    format!("{owner} {}", claim.label.as_deref().unwrap_or_default())
}

fn read_vote(answer: &Value) -> Option<Vote> {
    let Value::Array(fields) = answer else {
        return None;
    };
    let (Value::BulkString(word), rest) = fields.split_first()? else {
        return None;
    };
    let token = |value: &i64| u64::try_from(*value).ok();
    match (&word[..], rest) {
        (b"granted", [Value::Int(known)]) => Some(Vote::Granted {
            known: token(known)?,
        }),
        (b"held", [Value::Int(known), Value::BulkString(by), Value::Int(left)]) => {
            Some(Vote::Held {
                known: token(known)?,
                by: String::from_utf8_lossy(by).into_owned(),
                left: u64::try_from(*left).ok().map(Duration::from_millis),
            })
        }
        (b"unseeded", []) => Some(Vote::Unseeded),
        (b"gone", []) => Some(Vote::Gone),
        (b"ahead", []) => Some(Vote::Ahead),
        _ => None,
    }
}

fn read_vote_of(answer: &Value) -> Option<Option<Voted>> {
    match answer {
        Value::Nil => Some(None),
        Value::Int(_) => {
            let holder = value::other_data(-1);
            let grant = holder.grant.clone();
            Some(Some(Voted { grant, holder }))
        }
        answer => read_voted(answer).map(Some),
    }
}

fn read_voted(answer: &Value) -> Option<Voted> {
    let Value::Array(fields) = answer else {
        return None;
    };
    let [
        Value::BulkString(value),
        Value::Int(left),
        Value::BulkString(grant),
    ] = &fields[..]
    else {
        return None;
    };
    let grant = String::from_utf8_lossy(grant).into_owned();
    let holder = read_holder(value, *left, &grant);
    Some(Voted { grant, holder })
}

/// Reads a lock's value: ours, or whatever another program wrote, which is shown as the owner.
fn read_holder(value: &[u8], left: i64, grant: &str) -> Holder {
    let mut holder = Holder::new(grant);
    holder.remaining = u64::try_from(left).ok().map(Duration::from_millis);
    let text = String::from_utf8_lossy(value);
    let ours = text.strip_prefix(FORMAT).and_then(|fields| {
        let mut fields = fields.splitn(7, ' ').skip(2);
        let token = fields.next()?.parse().ok()?;
        let _ttl = fields.next()?;
        let since = fields.next()?.parse().ok()?;
        Some((token, since, fields.next()?, fields.next()?))
    });
    match ours {
        Some((token, since, owner, label)) => {
            holder.token = Some(Token::new(token));
            holder.since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(since));
            holder.owner = Some(owner.into());
            holder.label = (!label.is_empty()).then(|| label.into());
        }
        None => holder.owner = Some(text.into_owned()),
    }
    holder
}

fn millis(ttl: Duration) -> u64 {
    // At most a year, see Claim::TTL_RANGE.
    ttl.as_millis().try_into().unwrap_or(u64::MAX)
}
