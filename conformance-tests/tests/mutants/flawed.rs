//! The memory backend with one flaw, as a real backend might have it.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::{Control, Harness, Store};
use leasehold_core::{
    Backend, Claim, Consistency, Error, ErrorKind, Guarantees, Hold, Holder, Key, Memory, Moment,
    Page, Result, Token, Validity,
};
use tokio::sync::Notify;
use tokio::time::sleep;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Grants whatever is asked for.
    GrantsAll,
    /// Looks whether the key is free, and then grants.
    ChecksThenGrants,
    /// Says Ok to a release and does nothing.
    ForgetsRelease,
    /// Releases whatever holds the key, and says Ok.
    FreesByKey,
    /// Keeps locks for a year, whatever ttl was asked for.
    NeverExpires,
    /// The same, and forgets releases.
    KeepsForEver,
    /// Keeps locks for 30 s at least, and says that it lets go earlier.
    ClaimsAShortTtl,
    /// Goes on acquiring when the future is dropped.
    AcquiresInATask,
    /// Folds upper and lower case.
    FoldsCase,
    /// Cuts names at the first NUL.
    CutsAtNul,
    /// Locks the first 16 bits of a hash.
    HashesShort,
    /// Shows the same token for all grants.
    ConstantToken,
    /// Lets waiters try again and again, in no order.
    Polls,
    /// Says Ok to a renewal and does nothing.
    RenewsNothing,
    /// Believes a hundred times as long as it was promised.
    BelievesTooLong,
    /// Takes a wait below a millisecond for one without limit.
    WaitsForEver,
    /// Never repeats a release that was begun.
    ReleasesOnce,
    /// Keeps the lock alive by a task of its own until it is told to release.
    RenewsByItself,
    /// Fails with ttls of more than 24 days: milliseconds in 32 bits.
    ShortNumbers,
    /// Grants a client what it holds already.
    KnowsClientsOnly,
    /// Wakes all waiters at each release.
    WakesAll,
    /// Says that nobody holds anything.
    TellsNothing,
    /// Ends all grants of a client at a release.
    EndsAllOnRelease,
    /// Takes away whatever grant there is.
    EvictsAny,
    /// Lists what was there when it was asked first.
    ListsStale,
    /// Lists all locks, whatever their names begin with.
    ListsAll,
    /// Lists names as a store might write them.
    ListsEscaped,
    /// Needs a runtime where a hold is dropped.
    SpawnsOnDrop,
    /// When the leader of three servers is killed, the others begin with nothing, and holders go on
    /// believing the one that is gone.
    ForgetsWithItsLeader,
}

/// Starts memories with the flaw, and connects to them.
#[derive(Debug)]
pub(crate) struct Flawed {
    flaw: Flaw,
    /// A store's address is its place in here.
    stores: Mutex<Vec<Memories>>,
}

impl Flawed {
    pub(crate) fn new(flaw: Flaw) -> Self {
        Self {
            flaw,
            stores: Mutex::default(),
        }
    }
}

#[async_trait]
impl Harness for Flawed {
    async fn start(&self) -> Result<Store, Missing> {
        let memories = Memories::default();
        let members = Members(Arc::clone(&memories.leaderless));
        let mut stores = self.stores.lock().expect("sound");
        let store = Store::new(stores.len().to_string());
        stores.push(memories);
        if self.flaw != Flaw::ForgetsWithItsLeader {
            return Ok(store);
        }
        Ok(store.with_control(Arc::new(members)))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        let place: usize = address.parse().expect("the address of a store");
        let stores = self.stores.lock().expect("sound");
        Ok(Box::new(Client::new(self.flaw, stores[place].clone())))
    }
}

/// What one store keeps its locks in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memories {
    leader: Memory,
    /// What the others have when the leader is gone, for [`Flaw::ForgetsWithItsLeader`].
    others: Memory,
    leaderless: Arc<AtomicBool>,
    released: Arc<Notify>,
}

/// Three servers, of which only the leader can be killed.
struct Members(Arc<AtomicBool>);

#[async_trait]
impl Control for Members {
    async fn pause(&self) -> anyhow::Result<()> {
        anyhow::bail!("they cannot be stopped")
    }

    async fn resume(&self) -> anyhow::Result<()> {
        Ok(())
    }

    async fn restart(&self) -> anyhow::Result<()> {
        anyhow::bail!("they cannot be restarted")
    }

    fn members(&self) -> usize {
        3
    }

    async fn kill_leader(&self) -> anyhow::Result<()> {
        self.0.store(true, Ordering::SeqCst);
        Ok(())
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Client {
    flaw: Flaw,
    memories: Memories,
    /// What this client holds, for [`Flaw::KnowsClientsOnly`].
    held: Arc<Mutex<HashMap<Key, Token>>>,
    /// What it has listed first, for [`Flaw::ListsStale`].
    listed: Arc<Mutex<HashMap<String, Page>>>,
    /// What all grants end with, for [`Flaw::EndsAllOnRelease`].
    session: Validity,
}

#[async_trait]
impl Backend for Client {
    fn guarantees(&self) -> Guarantees {
        let mut guarantees = self.memory().guarantees();
        if self.flaw == Flaw::ForgetsWithItsLeader {
            guarantees.consistency = Consistency::Quorum;
            guarantees.node_losses = 1;
        }
        guarantees
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let mut inner = claim.clone();
        inner.key = self.key(&claim.key)?;
        let sent = Moment::now();
        let hold = match self.flaw {
            Flaw::GrantsAll => {
                inner.key = Key::new(claim.id.to_string())?;
                self.memory().acquire(&inner).await
            }
            Flaw::ChecksThenGrants => {
                if self.memory().holder(&claim.key).await?.is_none() {
                    tokio::task::yield_now().await;
                    let mut now = inner.clone();
                    now.wait = Some(Duration::ZERO);
                    if let Some(hold) = self.memory().acquire(&now).await? {
                        return Ok(Some(hold));
                    }
                    // Taken meanwhile, and overwritten.
                    inner.key = Key::new(claim.id.to_string())?;
                }
                self.memory().acquire(&inner).await
            }
            // A task that renews can be late on a busy machine: its lease is so long that it never is.
            Flaw::NeverExpires | Flaw::KeepsForEver | Flaw::RenewsByItself => {
                inner.ttl = *Claim::TTL_RANGE.end();
                self.memory().acquire(&inner).await
            }
            Flaw::ClaimsAShortTtl => {
                inner.ttl = inner.ttl.max(Duration::from_secs(30));
                self.memory().acquire(&inner).await
            }
            Flaw::AcquiresInATask => {
                let memory = self.memory().clone();
                let task = tokio::spawn(async move { memory.acquire(&inner).await });
                task.await.expect("no panic")
            }
            Flaw::Polls => self.poll(&inner).await,
            Flaw::WaitsForEver => {
                let short = |wait: &Duration| !wait.is_zero() && wait.as_millis() == 0;
                inner.wait = inner.wait.filter(|wait| !short(wait));
                self.memory().acquire(&inner).await
            }
            Flaw::ShortNumbers if i32::try_from(claim.ttl.as_millis()).is_err() => Err(Error::new(
                ErrorKind::Other,
                "not an integer or out of range",
            )),
            Flaw::KnowsClientsOnly => {
                let held = self.held.lock().expect("sound").get(&claim.key).copied();
                match held {
                    Some(token) => Ok(Some(Box::new(Again {
                        token,
                        validity: Validity::new(sent, claim.ttl),
                    }) as Box<dyn Hold>)),
                    None => self.memory().acquire(&inner).await,
                }
            }
            Flaw::WakesAll => self.herd(&inner).await,
            _ => self.memory().acquire(&inner).await,
        }?;
        let Some(hold) = hold else { return Ok(None) };
        if self.flaw == Flaw::KnowsClientsOnly {
            let mut held = self.held.lock().expect("sound");
            held.insert(claim.key.clone(), hold.token());
        }
        let hold = FlawedHold::new(self.clone(), claim, sent, hold);
        Ok(Some(Box::new(hold)))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        if self.flaw == Flaw::TellsNothing {
            return Ok(None);
        }
        let holder = self.memory().holder(&self.key(key)?).await?;
        Ok(holder.map(|mut holder| {
            if self.flaw == Flaw::ConstantToken {
                holder.token = Some(Token::new(1));
            }
            holder
        }))
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let grant = grant.filter(|_| self.flaw != Flaw::EvictsAny);
        self.memory().evict(&self.key(key)?, grant).await
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        let asked = if self.flaw == Flaw::ListsAll {
            ""
        } else {
            prefix
        };
        let mut page = self.memory().list(asked, after).await?;
        match self.flaw {
            Flaw::ListsStale => {
                let mut listed = self.listed.lock().expect("sound");
                page = listed.entry(prefix.to_owned()).or_insert(page).clone();
            }
            Flaw::ListsEscaped => {
                for listed in &mut page.locks {
                    let key = listed.key.take().expect("it has one");
                    let escaped = key.as_str().replace('%', "%25").replace('/', "%2F");
                    // One that has become too long is none any more.
                    listed.key = Key::new(escaped).ok();
                }
            }
            _ => {}
        }
        Ok(page)
    }
}

impl Client {
    pub(crate) fn new(flaw: Flaw, memories: Memories) -> Self {
        Self {
            flaw,
            memories,
            held: Arc::default(),
            listed: Arc::default(),
            session: Validity::until_ended(),
        }
    }

    fn memory(&self) -> &Memory {
        match self.memories.leaderless.load(Ordering::SeqCst) {
            true => &self.memories.others,
            false => &self.memories.leader,
        }
    }

    fn key(&self, key: &Key) -> Result<Key> {
        let text = key.as_str();
        match self.flaw {
            Flaw::FoldsCase => Key::new(text.to_lowercase()),
            Flaw::CutsAtNul => {
                Key::new(format!("={}", text.split('\0').next().unwrap_or_default()))
            }
            Flaw::HashesShort => {
                let mut hasher = DefaultHasher::new();
                text.hash(&mut hasher);
                Key::new(format!("{:04x}", hasher.finish() & 0xffff))
            }
            _ => Ok(key.clone()),
        }
    }

    async fn poll(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let start = Moment::now();
        let mut now = claim.clone();
        now.wait = Some(Duration::ZERO);
        loop {
            if let Some(hold) = self.memory().acquire(&now).await? {
                return Ok(Some(hold));
            }
            if claim.wait.is_some_and(|wait| start.elapsed() >= wait) {
                return Ok(None);
            }
            sleep(Duration::from_micros(fastrand::u64(100..3000))).await;
        }
    }

    async fn herd(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let mut now = claim.clone();
        now.wait = Some(Duration::ZERO);
        loop {
            let released = self.memories.released.notified();
            if let Some(hold) = self.memory().acquire(&now).await? {
                return Ok(Some(hold));
            }
            if claim.wait == Some(Duration::ZERO) {
                return Ok(None);
            }
            released.await;
        }
    }
}

#[derive(Debug)]
struct FlawedHold {
    client: Client,
    key: Key,
    ttl: Duration,
    inner: Option<Box<dyn Hold>>,
    validity: Validity,
    release_begun: AtomicBool,
}

impl FlawedHold {
    fn new(client: Client, claim: &Claim, sent: Moment, mut inner: Box<dyn Hold>) -> Self {
        let validity = match client.flaw {
            Flaw::BelievesTooLong => Validity::new(sent, claim.ttl * 100),
            Flaw::NeverExpires
            | Flaw::KeepsForEver
            | Flaw::ClaimsAShortTtl
            | Flaw::RenewsNothing => Validity::new(sent, claim.ttl),
            Flaw::EndsAllOnRelease => client.session.child(),
            _ => inner.validity().clone(),
        };
        let token = inner.token();
        let inner = match client.flaw {
            Flaw::RenewsByItself => {
                let again = Again {
                    token,
                    validity: validity.clone(),
                };
                let ttl = claim.ttl;
                tokio::spawn(async move {
                    while inner.renew().await.is_ok() {
                        sleep(ttl / 3).await;
                    }
                });
                Box::new(again)
            }
            _ => inner,
        };
        Self {
            client,
            key: claim.key.clone(),
            ttl: claim.ttl,
            inner: Some(inner),
            validity,
            release_begun: AtomicBool::new(false),
        }
    }

    fn inner(&mut self) -> &mut dyn Hold {
        self.inner.as_mut().expect("until dropped").as_mut()
    }
}

#[async_trait]
impl Hold for FlawedHold {
    fn token(&self) -> Token {
        match self.client.flaw {
            Flaw::ConstantToken => Token::new(1),
            _ => self.inner.as_ref().expect("until dropped").token(),
        }
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        let sent = Moment::now();
        match self.client.flaw {
            Flaw::RenewsNothing => {}
            Flaw::BelievesTooLong
            | Flaw::NeverExpires
            | Flaw::KeepsForEver
            | Flaw::ClaimsAShortTtl => {
                self.inner().renew().await?;
            }
            _ => return self.inner().renew().await,
        }
        let factor = if self.client.flaw == Flaw::BelievesTooLong {
            100
        } else {
            1
        };
        self.validity.extend(sent, self.ttl * factor);
        Ok(())
    }

    async fn release(&mut self) -> Result<()> {
        match self.client.flaw {
            Flaw::ForgetsRelease | Flaw::KeepsForEver => Ok(()),
            Flaw::FreesByKey => {
                let memory = self.client.memory().clone();
                memory.evict(&self.key, None).await.map(drop)
            }
            Flaw::ReleasesOnce => {
                if self.release_begun.swap(true, Ordering::Relaxed) {
                    return Ok(());
                }
                tokio::task::yield_now().await;
                self.inner().release().await
            }
            Flaw::KnowsClientsOnly => {
                self.client.held.lock().expect("sound").remove(&self.key);
                self.inner().release().await
            }
            Flaw::EndsAllOnRelease => {
                self.client.session.end();
                self.inner().release().await
            }
            Flaw::RenewsByItself => {
                let memory = self.client.memory().clone();
                memory.evict(&self.key, None).await.map(drop)
            }
            Flaw::WakesAll => {
                let released = self.inner().release().await;
                self.client.memories.released.notify_waiters();
                released
            }
            _ => self.inner().release().await,
        }
    }
}

impl Drop for FlawedHold {
    fn drop(&mut self) {
        if self.client.flaw == Flaw::SpawnsOnDrop {
            let inner = self.inner.take();
            tokio::spawn(async move { drop(inner) });
        }
    }
}

/// A grant that is only said to be one.
#[derive(Debug)]
struct Again {
    token: Token,
    validity: Validity,
}

#[async_trait]
impl Hold for Again {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        Ok(())
    }

    async fn release(&mut self) -> Result<()> {
        Ok(())
    }
}
