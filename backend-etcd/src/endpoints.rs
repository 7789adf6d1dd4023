use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{Client, KvClient, LeaseClient, Member, StatusResponse, WatchClient};
use leasehold_core::Moment;
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::EtcdOptions;
use crate::error::{self, Cause, Failure};

/// The members of the cluster, and the one function through which requests go.
///
/// Each member has a channel of its own, for the client library's balancer goes on sending a part of
/// the requests to a member that hangs. One member is preferred: all requests go to it until it fails
/// or does not answer; then the next one is.
pub(crate) struct Endpoints {
    servers: Vec<Server>,
    preferred: AtomicUsize,
    options: EtcdOptions,
}

struct Server {
    /// Host and port, to be shown.
    name: String,
    url: String,
    channel: Mutex<Option<Arc<Channel>>>,
    /// Held while one connects; the others wait for it.
    connecting: tokio::sync::Mutex<()>,
}

/// A connection to one member.
pub(crate) struct Channel {
    index: usize,
    pub(crate) kv: KvClient,
    pub(crate) lease: LeaseClient,
    pub(crate) watch: WatchClient,
    client: Client,
}

impl Endpoints {
    pub(crate) fn new(options: EtcdOptions) -> Self {
        let servers = options
            .servers()
            .map(|(name, url)| Server {
                name,
                url,
                channel: Mutex::default(),
                connecting: tokio::sync::Mutex::default(),
            })
            .collect();
        Self {
            servers,
            preferred: AtomicUsize::new(0),
            options,
        }
    }

    /// Sends a request until it is answered, at most for `limit`.
    ///
    /// `send` makes one attempt. Its second argument says whether an earlier attempt was sent and not
    /// answered: then it may have been carried out, or be carried out yet.
    ///
    /// 1. With several members, an attempt has half of the time that is left; so one that hangs
    ///    leaves time for the others.
    /// 2. A member that was not reached or did not answer is left for the next one, and its connection
    ///    is given up: a new one may get through where the old one is stuck.
    /// 3. When all of them failed in turn there is nothing to wait for. But "no leader" and its like
    ///    pass within a second or two: the request is repeated as long as the limit allows.
    pub(crate) async fn request<T, F>(
        &self,
        limit: Duration,
        send: impl FnMut(Arc<Channel>, bool) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Send,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        self.request_again(limit, false, send).await
    }

    /// The same; `unanswered`: an attempt before this was sent and not answered.
    pub(crate) async fn request_again<T, F>(
        &self,
        limit: Duration,
        mut unanswered: bool,
        mut send: impl FnMut(Arc<Channel>, bool) -> F + Send,
    ) -> Result<T, Failure>
    where
        T: Send,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        let started = Moment::now();
        let mut out_of_reach = 0;
        let mut pause = Duration::from_millis(10);
        loop {
            let left = limit.saturating_sub(started.elapsed());
            let share = if self.servers.len() == 1 || left < limit / 8 {
                left
            } else {
                left / 2
            };
            let index = self.preferred();
            let (channel, outcome) = self.attempt(index, share, &mut send, unanswered).await;
            let mut failure = match outcome {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            match failure.cause {
                Cause::Refused => {}
                Cause::NotNow => self.leave(index, None),
                Cause::OldToken => {
                    out_of_reach += 1;
                    if let Some(channel) = &channel {
                        // If it fails, so will the next attempt.
                        let _outcome = timeout(share, channel.client.refresh_token()).await;
                    }
                }
                Cause::NotReached => {
                    out_of_reach += 1;
                    self.leave(index, channel.as_ref());
                }
                Cause::Unanswered => {
                    out_of_reach += 1;
                    unanswered = true;
                    self.leave(index, channel.as_ref());
                }
            }
            let left = limit.saturating_sub(started.elapsed());
            if failure.cause == Cause::Refused
                || out_of_reach > self.servers.len()
                || left <= limit / 50
            {
                if unanswered {
                    failure.cause = Cause::Unanswered;
                }
                return Err(failure);
            }
            // The first failure may just have been a connection that had ended meanwhile.
            if failure.cause == Cause::NotNow || out_of_reach > 1 {
                sleep(pause.min(left / 4)).await;
                pause = (pause * 2).min(Duration::from_millis(200));
            }
        }
    }

    /// A connection to the preferred member.
    pub(crate) async fn connect(&self, limit: Duration) -> Result<Arc<Channel>, Failure> {
        let index = self.preferred();
        let outcome = timeout(limit, self.channel(index)).await;
        let outcome = outcome.unwrap_or_else(|_elapsed| Err(self.silent(index, limit)));
        if outcome.is_err() {
            self.leave(index, None);
        }
        outcome
    }

    /// A request on `channel` failed, or was not answered: others go to the next member.
    pub(crate) fn leave_channel(&self, channel: &Arc<Channel>) {
        self.leave(channel.index, Some(channel));
    }

    /// How many members were named.
    pub(crate) fn count(&self) -> usize {
        self.servers.len()
    }

    /// Host and port of one of them.
    pub(crate) fn name(&self, index: usize) -> &str {
        &self.servers[index].name
    }

    /// Whether there is another member to turn to.
    pub(crate) fn are_several(&self) -> bool {
        self.servers.len() > 1
    }

    /// Whether requests go by this channel now.
    pub(crate) fn is_preferred(&self, channel: &Arc<Channel>) -> bool {
        let current = self.servers[channel.index].channel();
        channel.index == self.preferred()
            && current
                .as_ref()
                .is_some_and(|current| Arc::ptr_eq(current, channel))
    }

    pub(crate) fn map(&self, channel: &Channel, error: &etcd_client::Error) -> Failure {
        error::map(&self.servers[channel.index].name, error)
    }

    /// Signs in again, where there is a user.
    pub(crate) async fn refresh_token(&self, channel: &Channel) {
        if self.options.has_user() {
            // If it fails, so will what follows.
            let _outcome = channel.client.refresh_token().await;
        }
    }

    async fn attempt<T, F>(
        &self,
        index: usize,
        share: Duration,
        send: &mut (impl FnMut(Arc<Channel>, bool) -> F + Send),
        unanswered: bool,
    ) -> (Option<Arc<Channel>>, Result<T, Failure>)
    where
        T: Send,
        F: Future<Output = Result<T, etcd_client::Error>> + Send,
    {
        let started = Moment::now();
        let channel = match timeout(share, self.channel(index)).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(failure)) => return (None, Err(failure)),
            Err(_elapsed) => {
                let mut failure = self.silent(index, share);
                failure.cause = Cause::NotReached;
                return (None, Err(failure));
            }
        };
        let left = share.saturating_sub(started.elapsed());
        let outcome = match timeout(left, send(channel.clone(), unanswered)).await {
            Ok(outcome) => outcome.map_err(|error| self.map(&channel, &error)),
            Err(_elapsed) => Err(self.silent(index, share)),
        };
        (Some(channel), outcome)
    }

    /// The connection to this member.
    pub(crate) async fn channel(&self, index: usize) -> Result<Arc<Channel>, Failure> {
        let server = &self.servers[index];
        if let Some(channel) = &*server.channel() {
            return Ok(channel.clone());
        }
        let _connecting = server.connecting.lock().await;
        if let Some(channel) = &*server.channel() {
            return Ok(channel.clone());
        }
        let options = self.options.client(&server.url);
        // Without a user this sends nothing yet.
        let client = Client::connect([&server.url], Some(options))
            .await
            .map_err(|error| error::map(&server.name, &error))?;
        let channel = Arc::new(Channel {
            index,
            kv: client.kv_client(),
            lease: client.lease_client(),
            watch: client.watch_client(),
            client,
        });
        *server.channel() = Some(channel.clone());
        Ok(channel)
    }

    fn leave(&self, index: usize, channel: Option<&Arc<Channel>>) {
        let server = &self.servers[index];
        if let Some(channel) = channel {
            let mut current = server.channel();
            let same = |current: &Arc<Channel>| Arc::ptr_eq(current, channel);
            if current.as_ref().is_some_and(same) {
                *current = None;
            }
        }
        let next = (index + 1) % self.servers.len();
        let left =
            self.preferred
                .compare_exchange(index, next, Ordering::Relaxed, Ordering::Relaxed);
        if left.is_ok() && next != index {
            debug!(target: "leasehold", from = %server.name, to = %self.servers[next].name, "changed to another etcd member");
        }
    }

    pub(crate) fn silent(&self, index: usize, limit: Duration) -> Failure {
        error::silent(&self.servers[index].name, limit)
    }

    fn preferred(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }
}

impl Server {
    fn channel(&self) -> MutexGuard<'_, Option<Arc<Channel>>> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channel {
    /// The version of the member, as in `3.4.23`.
    pub(crate) async fn version(&self) -> Result<String, etcd_client::Error> {
        Ok(self.status().await?.version().to_owned())
    }

    /// What the member says of itself.
    pub(crate) async fn status(&self) -> Result<StatusResponse, etcd_client::Error> {
        self.client.clone().status().await
    }

    /// The members of the cluster.
    pub(crate) async fn members(&self) -> Result<Vec<Member>, etcd_client::Error> {
        let list = self.client.clone().member_list().await?;
        Ok(list.members().to_vec())
    }
}

impl fmt::Debug for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.servers.iter().map(|server| &server.name).collect();
        f.debug_struct("Endpoints")
            .field("servers", &names)
            .field("preferred", &self.preferred())
            .finish_non_exhaustive()
    }
}
