use std::collections::HashSet;
use std::fmt;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use etcd_client::{LeaseKeepAliveStream, LeaseKeeper, LeaseTimeToLiveOptions};
use leasehold_core::{ErrorKind, Moment, Result, Validity};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::cleaner::Cleaning;
use crate::endpoints::{Channel, Endpoints};
use crate::error;
use crate::link::Link;
use crate::places::Places;

/// A lease at the server, shared by the claims of one ttl, and what stands under it.
///
/// 1. *Granted* with the ttl in whole seconds, rounded down, so that a dead client's locks do not
///    outlive their ttl; the server's shortest if that is longer. Then the holds still end on time at
///    the client.
/// 2. *Kept alive* every third of the ttl, at the leader, without a write. The answer names the lease
///    and not the request, so that there is only ever one request on a stream, and one that was not
///    answered takes its stream with it. Its validity counts from the sending of an answered request.
/// 3. *Lost* when the server says that the lease is gone, or when the validity is over; all holds are
///    its children and end with it.
/// 4. *Roll call*, every third of the ttl while there are holds: the server lists the keys under the
///    lease. A hold whose key is not there was taken away, and hears of it. A key that belongs to
///    nobody here is a request that was carried out late, and is deleted.
/// 5. *Given back*, once nobody uses it any more: the lease is revoked.
///
/// A request that puts a key and is not answered may still be carried out at any time: no later
/// deletion is sure to come after it. So a session in which this has happened takes no new claims; it
/// lives while it has holds, the roll call sweeps it, and its revocation refuses whatever is still on
/// the way.
pub(crate) struct Session {
    pub(crate) lease: i64,
    /// Of the claims; that of the lease may be longer.
    pub(crate) ttl: Duration,
    pub(crate) validity: Validity,
    pub(crate) link: Arc<Link>,
    places: Mutex<Places>,
    retired: AtomicBool,
    /// The server said that the lease is gone.
    gone: Arc<AtomicBool>,
    orders: mpsc::UnboundedSender<Order>,
}

enum Order {
    /// Keeps it alive once more if so asked, says so, and never does again.
    Last {
        beat: bool,
        done: oneshot::Sender<()>,
    },
    /// Revokes the lease.
    End(oneshot::Sender<Result<()>>),
}

impl Session {
    /// Has a lease granted for claims of `ttl`.
    pub(crate) async fn grant(
        link: &Arc<Link>,
        ttl: Duration,
        limit: Duration,
    ) -> Result<Arc<Self>> {
        let seconds = i64::try_from(ttl.as_secs()).unwrap_or(i64::MAX).max(1);
        let (sent, granted) = link
            .endpoints
            .request(limit, |channel, _| async move {
                let sent = Moment::now();
                let answer = channel.lease.clone().grant(seconds, None).await?;
                Ok((sent, answer))
            })
            .await?;
        let Some(term) = seconds_of(granted.ttl()) else {
            return Err(error::unexpected("a lease that lasts no time"));
        };
        let term = term.min(ttl);
        let (orders, received) = mpsc::unbounded_channel();
        let session = Arc::new(Self {
            lease: granted.id(),
            ttl,
            validity: Validity::new(sent, term),
            link: link.clone(),
            places: Mutex::new(Places::new(granted.id())),
            retired: AtomicBool::new(false),
            gone: Arc::default(),
            orders,
        });
        let keeper = Keeper {
            endpoints: link.endpoints.clone(),
            lease: session.lease,
            ttl,
            term,
            validity: session.validity.clone(),
            gone: session.gone.clone(),
            stream: None,
        };
        let roll_calls = roll_calls(Arc::downgrade(&session), (ttl / 3).max(SHORTEST_BEAT));
        drop(link.runtime.spawn(async move {
            // The keeper ends with the session; the roll calls never do.
            tokio::select! {
                () = keeper.run(received) => {}
                () = roll_calls => {}
            }
        }));
        debug!(target: "leasehold", lease = %format_args!("{:x}", session.lease), ?ttl, "etcd lease granted");
        Ok(session)
    }

    /// Whether new claims may use it.
    pub(crate) fn is_open(&self) -> bool {
        /// The client library takes no answer above 4 MiB, and the list of keys has to fit, even if
        /// each is as long as can be.
        const MOST_KEYS: usize = 1_000;
        !self.retired.load(Ordering::Relaxed)
            && !self.validity.is_ended()
            && self.places().len() < MOST_KEYS
    }

    /// The server says that the lease is gone.
    pub(crate) fn taken_away(&self) {
        self.gone.store(true, Ordering::Relaxed);
        self.validity.end();
    }

    /// Whether it is over because it was not kept alive, and not because the server said so.
    pub(crate) fn ended_silently(&self) -> bool {
        self.validity.is_ended() && !self.gone.load(Ordering::Relaxed)
    }

    /// It takes no new claims.
    pub(crate) fn retire(&self) {
        if !self.retired.swap(true, Ordering::Relaxed) {
            self.link.sessions.forget(self);
        }
    }

    /// The key that a claim in this session is about to put.
    pub(crate) fn take(&self, folder: &str) -> String {
        self.places().take(folder)
    }

    /// `key` has the lock: the validity of the hold.
    pub(crate) fn hold(&self, key: &str) -> Validity {
        let validity = self.validity.child();
        self.places().hold(key, validity.clone());
        validity
    }

    /// `key` is not there any more, or was never put; `certain`: all requests that named it were answered.
    pub(crate) fn give_back(&self, key: &str, certain: bool) {
        let held = self.places().give_back(key, certain);
        drop(held);
    }

    /// Nothing is to be kept alive any more; with `beat`, once more before that.
    pub(crate) async fn keep_alive_last(&self, beat: bool) {
        let (done, heard) = oneshot::channel();
        if self.orders.send(Order::Last { beat, done }).is_ok() {
            // Without an answer it has ended.
            let _outcome = heard.await;
        }
    }

    /// Revokes the lease, and with it all that stands under it.
    pub(crate) async fn end(&self) -> Result<()> {
        let (done, heard) = oneshot::channel();
        if self.orders.send(Order::End(done)).is_err() {
            return Ok(());
        }
        heard.await.unwrap_or(Ok(()))
    }

    /// How long a request of its own may take.
    pub(crate) fn request_limit(&self) -> Duration {
        request_limit(self.ttl)
    }

    async fn roll_call(self: &Arc<Self>) -> Result<()> {
        let held = self.places().held();
        if held.is_empty() && !self.retired.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (lease, limit) = (self.lease, self.request_limit());
        let request = |channel: Arc<Channel>, _| async move {
            let options = LeaseTimeToLiveOptions::new().with_keys();
            channel
                .lease
                .clone()
                .time_to_live(lease, Some(options))
                .await
        };
        let listed = self.link.endpoints.request(limit, request).await?;
        let listed: HashSet<&[u8]> = listed.keys().iter().map(Vec::as_slice).collect();
        for (key, validity) in held {
            if listed.contains(key.as_bytes()) || validity.is_ended() {
                continue;
            }
            // The list is that of the leader, who may be behind another member: ask all of them.
            let request = |channel: Arc<Channel>, _| {
                let key = key.clone();
                async move { channel.kv.clone().get(key, None).await }
            };
            let there = self.link.endpoints.request(limit, request).await?;
            if there.kvs().is_empty() && self.places().contains(&key) {
                debug!(target: "leasehold", %key, "taken away");
                validity.end();
            }
        }
        for key in listed {
            let Ok(key) = std::str::from_utf8(key) else {
                continue;
            };
            if self.places().is_orphan(key) {
                debug!(target: "leasehold", %key, "a claim that nobody has was carried out late: deleted");
                self.link.clean(Cleaning {
                    session: self.clone(),
                    key: key.to_owned(),
                    certain: false,
                });
            }
        }
        Ok(())
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("lease", &format_args!("{:x}", self.lease))
            .field("ttl", &self.ttl)
            .field("validity", &self.validity)
            .finish_non_exhaustive()
    }
}

const SHORTEST_BEAT: Duration = Duration::from_millis(5);

/// No timer sleeps longer: time that a machine was suspended does not count for it.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

async fn roll_calls(session: Weak<Session>, every: Duration) {
    loop {
        after(every).await;
        let Some(session) = session.upgrade() else {
            return pending().await;
        };
        if let Err(error) = session.roll_call().await {
            debug!(target: "leasehold", %error, "etcd did not list the keys of a lease");
        }
    }
}

/// The task that keeps a lease alive; it ends with the session.
struct Keeper {
    endpoints: Arc<Endpoints>,
    lease: i64,
    ttl: Duration,
    /// What an answered request is good for.
    term: Duration,
    validity: Validity,
    gone: Arc<AtomicBool>,
    stream: Option<Stream>,
}

struct Stream {
    channel: Arc<Channel>,
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl Keeper {
    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>) {
        let mut beating = true;
        loop {
            // Two thirds of the term are left for the attempts.
            let wait = if self.validity.is_ended() {
                Duration::MAX
            } else {
                (self.validity.remaining() / 3).max(SHORTEST_BEAT)
            };
            let order = tokio::select! {
                biased;
                order = orders.recv() => order,
                () = after(wait), if beating => {
                    self.beat().await;
                    beating = !self.validity.is_ended();
                    continue;
                }
            };
            match order {
                Some(Order::Last { beat, done }) => {
                    if beat {
                        self.beat().await;
                    }
                    beating = false;
                    // Whoever asked may have gone.
                    let _outcome = done.send(());
                }
                Some(Order::End(done)) => {
                    self.validity.end();
                    let outcome = self.revoke().await;
                    let _outcome = done.send(outcome);
                    return;
                }
                None => {
                    self.validity.end();
                    if let Err(error) = self.revoke().await {
                        debug!(target: "leasehold", %error, "an etcd lease was not revoked: it ends by itself");
                    }
                    return;
                }
            }
        }
    }

    /// Keeps it alive once; attempts follow until one is answered or it is too late.
    async fn beat(&mut self) {
        loop {
            let left = self.validity.remaining();
            if left.is_zero() {
                warn!(target: "leasehold", lease = %format_args!("{:x}", self.lease), ttl = ?self.ttl,
                    "etcd lease not kept alive in time: its locks are lost");
                return;
            }
            // The rest is for further attempts; where there are other members, for more of them.
            let limit = left / if self.endpoints.are_several() { 4 } else { 2 };
            let sent = Moment::now();
            match self.attempt(limit).await {
                Some(Some(term)) => {
                    self.validity.extend(sent, term.min(self.term));
                    return;
                }
                Some(None) => {
                    warn!(target: "leasehold", lease = %format_args!("{:x}", self.lease), ttl = ?self.ttl,
                        "etcd lease is gone: its locks are lost");
                    self.gone.store(true, Ordering::Relaxed);
                    self.validity.end();
                    return;
                }
                None => {
                    debug!(target: "leasehold", lease = %format_args!("{:x}", self.lease), ?left,
                        "etcd lease not kept alive, trying again");
                }
            }
            tokio::time::sleep((self.ttl / 20).min(left / 16).min(LONGEST_SLEEP)).await;
        }
    }

    /// One request and its answer: the term, or that there is no such lease. `None`: no answer; then
    /// the stream is given up, for the answer must not be taken for the next one's, and the member is
    /// left.
    async fn attempt(&mut self, limit: Duration) -> Option<Option<Duration>> {
        // Others may have found that it hangs.
        let stream = self.stream.take();
        let stream = stream.filter(|stream| self.endpoints.is_preferred(&stream.channel));
        let started = Moment::now();
        let channel = match &stream {
            Some(stream) => stream.channel.clone(),
            None => self.endpoints.connect(limit).await.ok()?,
        };
        let limit = limit.saturating_sub(started.elapsed());
        match timeout(limit, ask(&channel, self.lease, stream)).await {
            Ok(Ok((stream, term))) => {
                self.stream = Some(stream);
                // The first answer on a stream does not tell the term, but that never changes.
                Some(Some(term.unwrap_or(self.term)))
            }
            Ok(Err(error)) if is_gone(&error) => Some(None),
            Ok(Err(error)) => {
                let failure = self.endpoints.map(&channel, &error);
                debug!(target: "leasehold", error = %failure.error, "etcd's keepalive stream broke");
                self.endpoints.leave_channel(&channel);
                None
            }
            Err(_elapsed) => {
                self.endpoints.leave_channel(&channel);
                None
            }
        }
    }

    async fn revoke(&mut self) -> Result<()> {
        self.stream = None;
        let lease = self.lease;
        let revoked = self
            .endpoints
            .request(request_limit(self.ttl), |channel, _| async move {
                channel.lease.clone().revoke(lease).await
            })
            .await;
        match revoked {
            Err(failure) if failure.error.kind() != ErrorKind::Lost => Err(failure.error),
            _ => Ok(()),
        }
    }
}

/// Sends a keepalive on `stream`, or on a new one, which sends and awaits the first by its opening.
async fn ask(
    channel: &Arc<Channel>,
    lease: i64,
    stream: Option<Stream>,
) -> Result<(Stream, Option<Duration>), etcd_client::Error> {
    let Some(mut stream) = stream else {
        let (keeper, answers) = channel.lease.clone().keep_alive(lease).await?;
        let channel = channel.clone();
        let stream = Stream {
            channel,
            keeper,
            answers,
        };
        return Ok((stream, None));
    };
    stream.keeper.keep_alive().await?;
    let broken = || etcd_client::Error::LeaseKeepAliveError("the stream ended".into());
    let answer = stream.answers.message().await?.ok_or_else(broken)?;
    match seconds_of(answer.ttl()) {
        Some(term) => Ok((stream, Some(term))),
        None => Err(etcd_client::Error::LeaseKeepAliveError(NOT_FOUND.into())),
    }
}

/// How the client library says that there is no such lease.
const NOT_FOUND: &str = "lease not found";

fn is_gone(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::LeaseKeepAliveError(reason) => reason == NOT_FOUND,
        etcd_client::Error::GRpcStatus(status) => status.message().contains(NOT_FOUND),
        _ => false,
    }
}

fn request_limit(ttl: Duration) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(5);
    (ttl / 3).clamp(SHORTEST, LONGEST)
}

fn seconds_of(ttl: i64) -> Option<Duration> {
    let seconds = u64::try_from(ttl).ok().filter(|seconds| *seconds > 0)?;
    Some(Duration::from_secs(seconds))
}

/// Resolves after `wait`, also if the machine was suspended in between.
pub(crate) async fn after(wait: Duration) {
    let started = Moment::now();
    loop {
        let left = wait.saturating_sub(started.elapsed());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(LONGEST_SLEEP)).await;
    }
}
