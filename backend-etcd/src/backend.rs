use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{
    Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, LeaseTimeToLiveOptions, SortOrder,
    SortTarget, Txn, TxnOp,
};
use leasehold_core::{
    Backend, Claim, Consistency, Error, ErrorKind, Examination, Expiry, Fairness, Guarantees, Hold,
    Holder, Key, Page, Result, Token, Tokens, Wakeup,
};
use tokio::runtime::Handle;

use crate::endpoints::Channel;
use crate::examine::{Members, examine};
use crate::link::Link;
use crate::list::list;
use crate::{EtcdOptions, names, queue, value};

/// Locks in an etcd cluster.
///
/// One of these is one client: its locks of one ttl share a lease. Hand it to
/// [`Locks::new`](leasehold_core::Locks::new).
pub struct Etcd {
    options: EtcdOptions,
    guarantees: Guarantees,
    /// One for each runtime that uses it.
    links: Mutex<Vec<Arc<Link>>>,
}

impl Etcd {
    /// What every cluster promises, one of a single member too; the shortest ttl is that of etcd's
    /// default settings. Each client [says](Backend::guarantees) what its own cluster grants, and how
    /// many members that may lose.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Session, Duration::from_secs(2));
        guarantees.consistency = Consistency::Linearizable;
        guarantees.fairness = Fairness::Fifo;
        guarantees.wakeup = Wakeup::Push;
        guarantees.tokens = Tokens::Durable;
        guarantees
    };

    /// Connects to a cluster by some of its members, each `host:port`, without user or TLS.
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with), and [`ErrorKind::Invalid`] if an endpoint is not of
    /// this form.
    ///
    /// # Cancel safety
    /// Nothing is left if dropped but a lease without keys, which ends by itself.
    pub async fn connect(
        endpoints: impl IntoIterator<Item = impl AsRef<str>> + Send,
    ) -> Result<Self> {
        Self::connect_with(EtcdOptions::new(endpoints)?).await
    }

    /// Connects to the cluster that `options` names, and looks whether it will do: its version, the
    /// rights of the user, and the shortest lease that it grants.
    ///
    /// # Errors
    /// - [`ErrorKind::Unavailable`] if no member answers, or there is no majority.
    /// - [`ErrorKind::Unsupported`] if the server is older than etcd 3.4, or outside of a tokio runtime.
    /// - [`ErrorKind::Invalid`] for options that contradict each other or cannot be read.
    /// - [`ErrorKind::Other`] if user or password is wrong, or the user may not use the prefix; it says
    ///   which right to grant. Or if one side does not accept the other's certificate.
    ///
    /// # Cancel safety
    /// As [`connect`](Self::connect).
    pub async fn connect_with(options: EtcdOptions) -> Result<Self> {
        options.check()?;
        runtime()?;
        let link = Link::start(options.clone());
        let mut guarantees = Self::GUARANTEES;
        guarantees.shortest_ttl = look_whether_it_will_do(&link, &options)
            .await
            .map_err(|error| hinted(&error, &options))?;
        // Who may not ask is promised nothing.
        if let Ok(members) = Members::ask(&link, &options).await {
            guarantees.node_losses = members.spare;
        }
        Ok(Self {
            options,
            guarantees,
            links: Mutex::new(vec![link]),
        })
    }

    fn link(&self) -> Result<Arc<Link>> {
        let runtime = runtime()?;
        let mut links = self.links();
        if let Some(link) = links.iter().find(|link| link.runtime.id() == runtime.id()) {
            return Ok(link.clone());
        }
        let (dead, living): (Vec<_>, Vec<_>) = links.drain(..).partition(|link| link.is_dead());
        *links = living;
        let link = Link::start(self.options.clone());
        links.push(link.clone());
        drop(links);
        for link in dead {
            drop(link.sessions.take());
        }
        Ok(link)
    }

    fn links(&self) -> MutexGuard<'_, Vec<Arc<Link>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first in the queue of `key`.
    async fn first(&self, link: &Link, key: &Key) -> Result<Option<KeyValue>> {
        let folder = names::folder(&self.options.prefix, key);
        first_in(link, folder.as_bytes()).await
    }
}

/// The first in the queue of the lock with this folder.
pub(crate) async fn first_in(link: &Link, folder: &[u8]) -> Result<Option<KeyValue>> {
    let request = |channel: Arc<Channel>, _| {
        let options = GetOptions::new()
            .with_prefix()
            .with_sort(SortTarget::Create, SortOrder::Ascend)
            .with_limit(1);
        let folder = folder.to_vec();
        async move { channel.kv.clone().get(folder, Some(options)).await }
    };
    let mut found = link.endpoints.request(REQUEST_LIMIT, request).await?;
    Ok(found.take_kvs().into_iter().next())
}

/// How long a lease lasts if it is not renewed.
pub(crate) async fn left_of(link: &Link, lease: i64) -> Result<Option<Duration>> {
    let request = |channel: Arc<Channel>, _| async move {
        let options = LeaseTimeToLiveOptions::new();
        let mut leases = channel.lease.clone();
        leases.time_to_live(lease, Some(options)).await
    };
    let left = link.endpoints.request(REQUEST_LIMIT, request).await?.ttl();
    Ok(u64::try_from(left).ok().map(Duration::from_secs))
}

/// What the place of a holder says of him.
pub(crate) fn shown(first: &KeyValue) -> Holder {
    value::holder(first.value(), token(first), grant(first))
}

/// Servers that want TLS, or a certificate, often just close the connection: then the first error of all
/// says what to look at.
fn hinted(error: &Error, options: &EtcdOptions) -> Error {
    match options.tls_hint() {
        hint if error.kind() == ErrorKind::Unavailable => {
            Error::new(ErrorKind::Unavailable, format!("{error}; {hint}"))
        }
        _ => error.clone(),
    }
}

/// For requests that belong to no claim; core has a limit of its own.
pub(crate) const REQUEST_LIMIT: Duration = Duration::from_secs(5);

#[async_trait]
impl Backend for Etcd {
    fn guarantees(&self) -> Guarantees {
        self.guarantees
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let link = self.link()?;
        let hold = queue::acquire(&link, &self.options.prefix, claim).await?;
        Ok(hold.map(|hold| Box::new(hold) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let link = self.link()?;
        let Some(first) = self.first(&link, key).await? else {
            return Ok(None);
        };
        let mut holder = shown(&first);
        if first.lease() != 0 {
            holder.remaining = left_of(&link, first.lease()).await?;
        }
        Ok(Some(holder))
    }

    async fn evict(&self, key: &Key, named: Option<&Holder>) -> Result<bool> {
        let link = self.link()?;
        loop {
            let Some(first) = self.first(&link, key).await? else {
                return Ok(false);
            };
            if named.is_some_and(|named| named.grant != grant(&first)) {
                return Ok(false);
            }
            let request = |channel: Arc<Channel>, again: bool| {
                let place = first.key().to_vec();
                let same = Compare::create_revision(
                    place.clone(),
                    CompareOp::Equal,
                    first.create_revision(),
                );
                let txn = Txn::new()
                    .when([same])
                    .and_then([TxnOp::delete(place, None)]);
                async move {
                    let answer = channel.kv.clone().txn(txn).await?;
                    Ok(answer.succeeded() || again)
                }
            };
            if link.endpoints.request(REQUEST_LIMIT, request).await? {
                return Ok(true);
            }
            // It left by itself meanwhile; without a name the next one is meant as well.
        }
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        list(&self.link()?, &self.options.prefix, prefix, after).await
    }

    async fn examine(&self, _ttl: Duration) -> Result<Examination> {
        Ok(examine(&*self.link()?, &self.options).await)
    }

    async fn erase(&self) -> Result<()> {
        if self.options.prefix.is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "without a prefix everything in the cluster would be removed: give one",
            ));
        }
        let request = |channel: Arc<Channel>, _| {
            let prefix = self.options.prefix.clone();
            let all = DeleteOptions::new().with_prefix();
            async move { channel.kv.clone().delete(prefix, Some(all)).await }
        };
        let link = self.link()?;
        link.endpoints.request(REQUEST_LIMIT, request).await?;
        Ok(())
    }

    async fn close(&self) -> Result<()> {
        let links = std::mem::take(&mut *self.links());
        let mut outcome = Ok(());
        for link in links {
            if link.is_dead() {
                drop(link.sessions.take());
            } else {
                outcome = outcome.and(link.close().await);
            }
        }
        outcome
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for link in self.links().drain(..) {
            // Each ends, and revokes its lease, once the last hold on it is gone.
            drop(link.sessions.take());
        }
    }
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// The shortest ttl that the cluster grants, if it will do.
async fn look_whether_it_will_do(link: &Link, options: &EtcdOptions) -> Result<Duration> {
    let limit = options.connect_timeout;
    let version = |channel: Arc<Channel>, _| async move { channel.version().await };
    let version = link.endpoints.request(limit, version).await?;
    if is_too_old(&version) {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("this server is etcd {version}: locks need etcd 3.4 or newer"),
        ));
    }
    // Rights are judged for both ways that a transaction may go; this one always goes the second.
    let rights = |channel: Arc<Channel>, _| {
        let probe = format!("{}leasehold-probe", options.prefix);
        let never = Compare::create_revision(&*probe, CompareOp::Less, 0);
        let all = GetOptions::new()
            .with_prefix()
            .with_limit(1)
            .with_keys_only();
        let read = if options.prefix.is_empty() {
            TxnOp::get(
                "",
                Some(
                    GetOptions::new()
                        .with_all_keys()
                        .with_limit(1)
                        .with_keys_only(),
                ),
            )
        } else {
            TxnOp::get(&*options.prefix, Some(all))
        };
        let txn = Txn::new()
            .when([never])
            .and_then([TxnOp::put(probe, "", None)])
            .or_else([read]);
        async move { channel.kv.clone().txn(txn).await }
    };
    let _answer = link.endpoints.request(limit, rights).await?;
    let shortest = |channel: Arc<Channel>, _| async move {
        let mut lease = channel.lease.clone();
        let granted = lease.grant(1, None).await?;
        lease.revoke(granted.id()).await?;
        Ok(granted.ttl())
    };
    let shortest = link.endpoints.request(limit, shortest).await?;
    Ok(Duration::from_secs(u64::try_from(shortest).unwrap_or(1)))
}

fn is_too_old(version: &str) -> bool {
    let mut numbers = version.split(['.', '-']).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < (3, 4),
        // A fork with versions of its own.
        _ => false,
    }
}

fn token(place: &KeyValue) -> Token {
    Token::new(place.create_revision().unsigned_abs())
}

/// Names a grant: the revision that created its place, and the place.
fn grant(place: &KeyValue) -> String {
    format!(
        "{}:{}",
        place.create_revision(),
        String::from_utf8_lossy(place.key())
    )
}

fn runtime() -> Result<Handle> {
    Handle::try_current().map_err(|_none| {
        Error::new(
            ErrorKind::Unsupported,
            "etcd needs a tokio runtime: call this from within one",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::is_too_old;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(is_too_old("3.3.27"));
        assert!(is_too_old("2.3.8"));
        for good in ["3.4.0", "3.10.1", "3.6.0-rc.1", "4.0.0", "dev"] {
            assert!(!is_too_old(good), "{good}");
        }
    }
}
