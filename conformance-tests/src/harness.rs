use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_core::{Backend, Claim, Key, Result};

use crate::fixtures::Missing;

/// What the suite needs to know about a backend to test it: two functions.
///
/// The same binary is started again to be a client in a process of its own. There [`start`] is not
/// called, only [`connect`] with the address that the first process got: so making a harness should
/// do nothing yet.
///
/// [`start`]: Harness::start
/// [`connect`]: Harness::connect
#[async_trait]
pub trait Harness: fmt::Debug + Send + Sync + 'static {
    /// Starts a store, or finds one that runs, and says what can be done with it.
    ///
    /// Called once for the whole run, and once more for each rule that stops or restarts servers, if
    /// the first store has a [`Control`]. It need not be empty: each check uses keys of its own.
    ///
    /// # Errors
    /// What is missing: then every rule is listed as ignored, or fails if the environment
    /// [requires](Missing::is_required) the store.
    async fn start(&self) -> Result<Store, Missing>;

    /// Connects a new client to the store at `address`. It shares nothing with the others: what is
    /// lost with one is lost with it alone, as if it ran in another process.
    ///
    /// # Errors
    /// If the store is not reached; every check that needs the client then fails.
    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>>;
}

/// A store that the suite can run on, and what can be done with it.
#[derive(Clone)]
pub struct Store {
    pub(crate) address: String,
    pub(crate) key_prefix: String,
    pub(crate) ttl: Duration,
    pub(crate) longest_ttl: Duration,
    pub(crate) processes: bool,
    pub(crate) servers: Vec<String>,
    pub(crate) on_connections: bool,
    pub(crate) control: Option<Arc<dyn Control>>,
    pub(crate) uncontrolled: Option<String>,
    pub(crate) description: Option<String>,
}

impl Store {
    /// A store at `address` (anything that [`Harness::connect`] understands), of which no more is
    /// known: checks that need more are ignored, with the reason.
    ///
    /// ```
    /// # use leasehold_conformance::Store;
    /// # use std::time::Duration;
    /// let store = Store::new("mystore://127.0.0.1:4711")
    ///     .with_ttl(Duration::from_millis(500))
    ///     .with_processes()
    ///     .with_servers(["127.0.0.1:4711"]);
    /// ```
    #[must_use]
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            key_prefix: String::new(),
            ttl: Duration::ZERO,
            longest_ttl: *Claim::TTL_RANGE.end(),
            processes: false,
            servers: Vec::new(),
            on_connections: false,
            control: None,
            uncontrolled: None,
            description: None,
        }
    }

    /// What the store is and how it was found or started, for the report: "Redis 8.0.2 in a container".
    #[must_use]
    pub fn with_description(mut self, description: impl Into<String>) -> Self {
        self.description = Some(description.into());
        self
    }

    /// The shortest ttl to test with, where that is longer than the shortest that the backend
    /// [guarantees](leasehold_core::Guarantees::shortest_ttl) or the suite's own 300 ms: shorter is
    /// faster, longer bears a busier machine.
    #[must_use]
    pub fn with_ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// The longest ttl that the store was set up for, where it was; default: the longest that there is.
    #[must_use]
    pub fn with_longest_ttl(mut self, ttl: Duration) -> Self {
        self.longest_ttl = ttl;
        self
    }

    /// What the name of every key begins with, where others use the store too and it has no prefix of its
    /// own. Of the longest names that C6 tries, so much less is random.
    #[must_use]
    pub fn with_key_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.key_prefix = prefix.into();
        self
    }

    /// Clients in several processes reach this store by its address, so that the suite can kill and
    /// stop processes that hold locks.
    #[must_use]
    pub fn with_processes(mut self) -> Self {
        self.processes = true;
        self
    }

    /// The store is reached by plain TCP at these places, each written `host:port` as in the address.
    /// The suite puts a proxy of its own in their place to cut connections and lose replies.
    #[must_use]
    pub fn with_servers(mut self, servers: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.servers = servers.into_iter().map(Into::into).collect();
        self
    }

    /// Locks end with the connection that they were taken on: to lose it is to lose them.
    #[must_use]
    pub fn with_locks_on_connections(mut self) -> Self {
        self.on_connections = true;
        self
    }

    /// The servers can be stopped and restarted. They live as long as `control`.
    #[must_use]
    pub fn with_control(mut self, control: Arc<dyn Control>) -> Self {
        self.control = Some(control);
        self
    }

    /// Why the servers cannot be controlled, for the report: "the server was given by URL".
    #[must_use]
    pub fn without_control(mut self, reason: impl Into<String>) -> Self {
        self.control = None;
        self.uncontrolled = Some(reason.into());
        self
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the address: there may be a password in it.
        f.debug_struct("Store")
            .field("description", &self.description)
            .field("ttl", &self.ttl)
            .field("processes", &self.processes)
            .field("servers", &self.servers)
            .field("control", &self.control.is_some())
            .finish_non_exhaustive()
    }
}

/// Power over the servers of a [`Store`].
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// Stops all servers where they are, as SIGSTOP does: connections stay, nothing is answered.
    ///
    /// # Errors
    /// If it cannot be done; the check fails.
    async fn pause(&self) -> anyhow::Result<()>;

    /// Lets paused servers go on.
    ///
    /// # Errors
    /// If it cannot be done; the check fails.
    async fn resume(&self) -> anyhow::Result<()>;

    /// Kills all servers and starts them again at the same addresses, with what they had on disk.
    ///
    /// # Errors
    /// If it cannot be done; the check fails.
    async fn restart(&self) -> anyhow::Result<()>;

    /// Whether locks and tokens are still there after [`restart`](Self::restart).
    fn keeps_data(&self) -> bool {
        false
    }

    /// How many servers decide together. One by one of them may be killed if there are three or more.
    fn members(&self) -> usize {
        1
    }

    /// Kills the server that leads the others, for good.
    ///
    /// # Errors
    /// If it cannot be done; the check fails. Called only if there are three members or more.
    async fn kill_leader(&self) -> anyhow::Result<()> {
        anyhow::bail!("there is no leader among {} servers", self.members())
    }
    /// Kills, for good, the server that leads the others where this key is, if keys are on different
    /// servers.
    ///
    /// # Errors
    /// As [`kill_leader`](Self::kill_leader).
    async fn kill_leader_of(&self, key: &Key) -> anyhow::Result<()> {
        let _everywhere = key;
        self.kill_leader().await
    }
}
