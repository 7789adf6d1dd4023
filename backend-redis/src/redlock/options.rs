use std::time::Duration;

use leasehold_core::{Claim, Error, ErrorKind, Result};

use crate::RedisOptions;

/// Where the nodes are and how to talk to them.
///
/// Plain data: start from the URLs and change what differs. All clients of the same nodes must have the
/// same ones, in any order, with the same prefix and the same `max_ttl`.
///
/// ```
/// use std::time::Duration;
/// use leasehold_redis::RedlockOptions;
///
/// let options = RedlockOptions::new(["redis://one", "redis://two", "redis://three"])?
///     .with_prefix("shop:lock:")
///     .with_max_ttl(Duration::from_secs(60));
/// # drop(options);
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RedlockOptions {
    pub(super) nodes: Vec<RedisOptions>,
    pub(super) max_ttl: Duration,
    pub(super) node_timeout: Duration,
    pub(super) restart_guard: bool,
}

impl RedlockOptions {
    /// Reads the URLs of 3, 5 or 7 independent servers, each as in [`RedisOptions::new`].
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a malformed URL, another number of nodes, a node that is named
    /// twice, one behind sentinels, or a cluster.
    pub fn new(urls: impl IntoIterator<Item = impl AsRef<str>>) -> Result<Self> {
        let nodes = urls.into_iter().map(RedisOptions::new);
        Self::from_nodes(nodes.collect::<Result<Vec<_>>>()?)
    }

    /// The same with options for each node: certificates, users.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for another number of nodes than 3, 5 or 7, a node that is named twice,
    /// one behind sentinels or with replicas to wait for, or a cluster, or an option that means nothing
    /// for a single server.
    pub fn from_nodes(nodes: impl IntoIterator<Item = RedisOptions>) -> Result<Self> {
        let nodes: Vec<_> = nodes.into_iter().collect();
        if ![3, 5, 7].contains(&nodes.len()) {
            return Err(invalid(format!(
                "Redlock needs 3, 5 or 7 independent servers, {} are given: an even number bears no \
                 more failures than one less",
                nodes.len()
            )));
        }
        if let Some(cluster) = nodes.iter().find(|node| node.nodes().is_some()) {
            return Err(invalid(format!(
                "a node of Redlock is a server that is independent of the others, and {} is named as a \
                 cluster: begin it with redis:// if it is none",
                cluster.address()
            )));
        }
        for (index, node) in nodes.iter().enumerate() {
            node.check()?;
            let address = node.address();
            if !node.is_fixed() {
                return Err(invalid(format!(
                    "{address} cannot be a node of Redlock: a failover may forget its vote; name each \
                     server by its own URL, as in redis://host:6379"
                )));
            }
            if node.replicas > 0 {
                return Err(invalid(format!(
                    "{address} cannot be a node of Redlock with replicas to wait for: the nodes are \
                     independent, leave with_replicas out"
                )));
            }
            if nodes[..index].iter().any(|it| it.address() == address) {
                return Err(invalid(format!(
                    "{address} is given twice: a server has one vote"
                )));
            }
        }
        Ok(Self {
            nodes,
            max_ttl: Duration::from_secs(30),
            node_timeout: Duration::from_secs(1),
            restart_guard: true,
        })
    }

    /// What the names of all keys and channels begin with, on every node; default `lock:`.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl AsRef<str>) -> Self {
        for node in &mut self.nodes {
            node.prefix = prefix.as_ref().into();
        }
        self
    }

    /// The longest ttl of any lock on these nodes; default 30 s. A longer one is refused. A node that
    /// has lost its data keeps from voting for as long.
    #[must_use]
    pub fn with_max_ttl(mut self, max_ttl: Duration) -> Self {
        self.max_ttl = max_ttl;
        self
    }

    /// How long a node has to answer; default 1 s, and never longer than a request may take at all. It
    /// is waited for only where the others alone do not decide.
    #[must_use]
    pub fn with_node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = timeout;
        self
    }

    /// How long making a connection to a node may take; default 5 s.
    #[must_use]
    pub fn with_connect_timeout(mut self, timeout: Duration) -> Self {
        for node in &mut self.nodes {
            node.connect_timeout = timeout;
        }
        self
    }

    /// **Unsafe for the locks**: with `false`, nodes that have lost their data vote at once, and a lock
    /// that was granted before may be granted again. Only where that is excluded otherwise: in tests
    /// with fresh servers, or where whoever restarts a node keeps it down for `max_ttl`.
    #[must_use]
    pub fn with_restart_guard(mut self, guard: bool) -> Self {
        self.restart_guard = guard;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if !Claim::TTL_RANGE.contains(&self.max_ttl) {
            return Err(invalid(format!(
                "a max_ttl of {:?} is not possible: give one from {:?} to a year",
                self.max_ttl,
                Claim::TTL_RANGE.start()
            )));
        }
        if self.node_timeout.is_zero() {
            return Err(invalid(
                "a node cannot answer in no time: give a node_timeout".into(),
            ));
        }
        Ok(())
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}
