use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Consistency, Examination, Expiry, Fairness, Guarantees, Hold, Holder, Key,
    Moment, Page, Result, Tokens, Wakeup,
};
use tokio::time::sleep;
use zookeeper_client::Error as Client;

use crate::erase::erase;
use crate::error;
use crate::examine::{Ensemble, examine};
use crate::hold::ZooKeeperHold;
use crate::list;
use crate::names;
use crate::options::ZooKeeperOptions;
use crate::place::{self, PAUSE};
use crate::queue;
use crate::record;
use crate::session::{Answer, Session};
use crate::sessions::Sessions;

/// Locks on an ensemble of ZooKeeper servers, 3.5 or newer.
///
/// See the [crate](crate) for how it works, what it promises and when it can fail.
pub struct ZooKeeper {
    sessions: Sessions,
    guarantees: Guarantees,
}

impl ZooKeeper {
    /// What it promises, a single server too. The servers may only grant a longer shortest ttl than
    /// this: [`Backend::guarantees`] says what they do, and how many of them may be lost.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Session, Session::SHORTEST);
        guarantees.consistency = Consistency::Linearizable;
        guarantees.fairness = Fairness::Fifo;
        guarantees.wakeup = Wakeup::Push;
        guarantees.tokens = Tokens::Durable;
        guarantees
    };

    /// Connects to the servers of `url` with the default options; for the form of the URL see
    /// [`ZooKeeperOptions::new`].
    ///
    /// # Errors
    /// As [`connect_with`](Self::connect_with); [`ErrorKind::Invalid`](leasehold_core::ErrorKind)
    /// also for a malformed URL.
    ///
    /// # Cancel safety
    /// Nothing is left if dropped.
    pub async fn connect(url: impl AsRef<str> + Send) -> Result<Self> {
        Self::connect_with(ZooKeeperOptions::new(url)?).await
    }

    /// Connects, and sees what the servers promise and whether the prefix can be used.
    ///
    /// # Errors
    /// [`ErrorKind`](leasehold_core::ErrorKind): `Invalid` if the options do not fit together,
    /// `Unavailable` if no server answers within the
    /// [connect timeout](ZooKeeperOptions::with_connect_timeout), `Unsupported` if they are older
    /// than 3.5, TLS is asked for and not built in, or this is not called in a tokio runtime, `Other` if
    /// a right is missing or one side does not accept the other's certificate.
    ///
    /// # Cancel safety
    /// Nothing is left if dropped.
    pub async fn connect_with(options: ZooKeeperOptions) -> Result<Self> {
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(error::no_runtime());
        }
        let options = Arc::new(options.check()?);
        let limit = options.connect_timeout();
        // The shortest that the servers grant; too short to be used for anything else.
        let session = Session::open(options.clone(), Session::SHORTEST, limit).await?;
        let mut guarantees = Self::GUARANTEES;
        guarantees.shortest_ttl = session.timeout();
        // Who may not ask is promised nothing.
        if let Ok(ensemble) = Ensemble::ask(&session, limit).await {
            guarantees.node_losses = ensemble.spare;
        }
        session.close(Session::SHORTEST).await;
        Ok(Self {
            sessions: Sessions::new(options),
            guarantees,
        })
    }

    /// For requests that are no claims: core limits the time that they take.
    pub(crate) const TTL: Duration = Duration::from_secs(30);

    /// How long they are tried again when they are not answered.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

    /// Any session, for a request that is no claim.
    async fn session(&self) -> Result<Arc<Session>> {
        self.sessions.any(Self::TTL, Self::TTL).await
    }

    /// None: it has to be asked again, in another session if that was just over.
    async fn settled<T>(
        &self,
        session: &Session,
        answer: Answer<T>,
        started: Moment,
    ) -> Option<Result<T>> {
        match answer {
            Err(error) if error::is_session_over(&error) => {
                session.end();
                None
            }
            Err(error) if error::is_unanswered(&error) && started.elapsed() < Self::PATIENCE => {
                sleep(PAUSE).await;
                None
            }
            answer => {
                let servers = self.sessions.options().servers();
                Some(answer.map_err(|error| error::map(servers, &error)))
            }
        }
    }
}

#[async_trait]
impl Backend for ZooKeeper {
    fn guarantees(&self) -> Guarantees {
        self.guarantees
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let place = queue::acquire(&self.sessions, claim).await?;
        Ok(place.map(|place| Box::new(ZooKeeperHold::new(place)) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let started = Moment::now();
        loop {
            let session = self.session().await?;
            let answer = holder(&session, key).await;
            if let Some(holder) = self.settled(&session, answer, started).await {
                return holder;
            }
        }
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let started = Moment::now();
        loop {
            let session = self.session().await?;
            let answer = target(&session, key, grant).await;
            let Some(target) = self.settled(&session, answer, started).await else {
                continue;
            };
            let Some(path) = target? else {
                return Ok(false);
            };
            // Once: if this is not answered, the next one would say that there is nothing to do.
            let deleted = session.ask(Self::TTL, async |client| client.delete(&path, None).await);
            match deleted.await {
                Ok(()) => {}
                Err(Client::NoNode) => return Ok(false),
                Err(error) => return Err(error::map(self.sessions.options().servers(), &error)),
            }
            // One of our own hears of it before the server's event.
            for session in self.sessions.open() {
                session.taken(&path);
            }
            return Ok(true);
        }
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        let started = Moment::now();
        loop {
            let session = self.session().await?;
            let answer = list::list(&session, prefix, after).await;
            if let Some(page) = self.settled(&session, answer, started).await {
                return page;
            }
        }
    }

    async fn examine(&self, ttl: Duration) -> Result<Examination> {
        examine(self.sessions.shared_options(), ttl).await
    }

    /// Its own sessions too are over then.
    async fn erase(&self) -> Result<()> {
        self.sessions.close(Self::PATIENCE).await;
        erase(self.sessions.shared_options()).await
    }

    async fn close(&self) -> Result<()> {
        self.sessions.close(Duration::from_secs(5)).await;
        Ok(())
    }
}

async fn holder(session: &Session, key: &Key) -> Answer<Option<Holder>> {
    let parent = session.options().parent(key);
    loop {
        let children = place::list(session, &parent, ZooKeeper::PATIENCE).await?;
        let Some(first) = names::first(&children) else {
            return Ok(None);
        };
        let path = format!("{parent}/{first}");
        let read = session.ask(ZooKeeper::TTL, async |client| client.get_data(&path).await);
        match read.await {
            Ok((data, stat)) => return Ok(Some(record::holder(first, &data, &stat))),
            // Released in between.
            Err(Client::NoNode) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The node that holds the lock, by its path, if it is the one that is named.
async fn target(session: &Session, key: &Key, grant: Option<&Holder>) -> Answer<Option<String>> {
    let parent = session.options().parent(key);
    let children = place::list(session, &parent, ZooKeeper::PATIENCE).await?;
    let first =
        names::first(&children).filter(|first| grant.is_none_or(|grant| grant.grant == *first));
    Ok(first.map(|first| format!("{parent}/{first}")))
}

impl fmt::Debug for ZooKeeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZooKeeper")
            .field("options", self.sessions.options())
            .finish_non_exhaustive()
    }
}
