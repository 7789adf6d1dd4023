use std::fmt;
use std::sync::Arc;

use leasehold_core::Result;
use redis::{ConnectionAddr, Value};
use tokio::time::timeout;

use super::slot::SLOTS;
use crate::RedisOptions;
use crate::connection::Connection;
use crate::error;
use crate::target::without_limits;

/// A node of a cluster, by where it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Node {
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
}

/// Which node has which slot, by what one node says.
#[derive(Clone)]
pub(crate) struct Topology {
    /// For each slot, the index of its node.
    slots: Box<[u16]>,
    owners: Vec<Node>,
    /// Those that have no slots.
    replicas: Vec<Node>,
}

/// The index of a slot that no node has.
const NOBODY: u16 = u16::MAX;

impl Topology {
    /// Nothing is known.
    pub(crate) fn empty() -> Self {
        Self {
            slots: vec![NOBODY; usize::from(SLOTS)].into(),
            owners: Vec::new(),
            replicas: Vec::new(),
        }
    }

    /// Asks the node that `options` name, on `connection` if it is there, else on one for this only.
    ///
    /// # Errors
    /// As [`error::map`] has it.
    pub(crate) async fn ask(
        options: &RedisOptions,
        connection: Option<Arc<Connection>>,
    ) -> Result<Self> {
        let address = options.address();
        let mut slots = redis::cmd("CLUSTER");
        slots.arg("SLOTS");
        let asking = async {
            match connection {
                Some(connection) => connection.ask::<Value>(&slots).await,
                None => {
                    let (opener, config) = (options.client()?, without_limits());
                    let opened = opener.get_multiplexed_async_connection_with_config(&config);
                    match opened.await {
                        Ok(mut connection) => slots.query_async(&mut connection).await,
                        Err(e) => Err(e),
                    }
                }
            }
            .map_err(|e| match error::is_right_missing(&error::describe(&e)) {
                true => error::rights_missing(&address, "+cluster|slots"),
                false => error::map(&address, &e),
            })
        };
        let limit = options.connect_timeout;
        let answer = timeout(limit, asking)
            .await
            .unwrap_or_else(|_elapsed| Err(error::silent(&address, limit)))?;
        let host = match options.server.addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host,
            _ => "",
        };
        Self::read(&answer, host).ok_or_else(|| error::unexpected(&address))
    }

    /// The node that has this slot.
    pub(crate) fn owner(&self, slot: u16) -> Option<&Node> {
        let index = self.slots.get(usize::from(slot))?;
        self.owners.get(usize::from(*index))
    }

    /// All nodes that have slots.
    pub(crate) fn owners(&self) -> &[Node] {
        &self.owners
    }

    /// All nodes that are known.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.owners.iter().chain(&self.replicas)
    }

    /// Whether both give every slot to the same node.
    pub(crate) fn agrees(&self, other: &Self) -> bool {
        (0..SLOTS).all(|slot| self.owner(slot) == other.owner(slot))
    }

    /// The same, but that this slot is now at `node`.
    pub(crate) fn with(&self, slot: u16, node: &Node) -> Self {
        let mut moved = self.clone();
        let index = moved.owners.iter().position(|owner| owner == node);
        let index = index.unwrap_or_else(|| {
            moved.owners.push(node.clone());
            moved.owners.len() - 1
        });
        if let Some(entry) = moved.slots.get_mut(usize::from(slot)) {
            *entry = index.try_into().unwrap_or(NOBODY);
        }
        moved
    }

    /// Reads what `CLUSTER SLOTS` answers: `[first, last, [host, port, …], replicas …]` for each range.
    /// A node that does not know its own host says nothing or `""`: it is `asked`, where it was reached.
    fn read(answer: &Value, asked: &str) -> Option<Self> {
        let Value::Array(ranges) = answer else {
            return None;
        };
        let mut topology = Self::empty();
        for range in ranges {
            let Value::Array(fields) = range else {
                return None;
            };
            let [Value::Int(first), Value::Int(last), nodes @ ..] = &fields[..] else {
                return None;
            };
            let (first, last) = (usize::try_from(*first).ok()?, usize::try_from(*last).ok()?);
            let mut nodes = nodes.iter().map(|node| Node::read(node, asked));
            if let Some(Some(owner)) = nodes.next() {
                let known = topology.owners.iter().position(|known| *known == owner);
                let index = known.unwrap_or(topology.owners.len());
                if known.is_none() {
                    topology.owners.push(owner);
                }
                let index = index.try_into().unwrap_or(NOBODY);
                topology.slots.get_mut(first..=last)?.fill(index);
            }
            for replica in nodes.flatten() {
                if !topology.replicas.contains(&replica) {
                    topology.replicas.push(replica);
                }
            }
        }
        Some(topology)
    }
}

impl fmt::Debug for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Topology")
            .field("owners", &self.owners)
            .field("replicas", &self.replicas)
            .finish_non_exhaustive()
    }
}

impl Node {
    pub(crate) fn new(host: &str, port: u16) -> Self {
        let host = host.into();
        Self { host, port }
    }

    /// The node that an error of the server redirects to, as `host:port`; `asked` as in
    /// [`Topology::read`]. `None` if the server does not know it.
    pub(crate) fn redirected(to: &str, asked: &str) -> Option<Self> {
        let (host, port) = to.rsplit_once(':')?;
        Self::known(host, port.parse().ok()?, asked)
    }

    /// One entry of `CLUSTER SLOTS`.
    fn read(entry: &Value, asked: &str) -> Option<Self> {
        let Value::Array(fields) = entry else {
            return None;
        };
        let [host, Value::Int(port), more @ ..] = &fields[..] else {
            return None;
        };
        let port = u16::try_from(*port).ok()?;
        let host = text(host)?;
        Self::known(host, port, asked).or_else(|| {
            // It should have a name and has none: its address stands behind its id.
            let more = match more.get(1)? {
                Value::Map(more) => more,
                _ => return None,
            };
            let ip = more.iter().find(|(name, _)| text(name) == Some("ip"))?;
            Self::known(text(&ip.1)?, port, asked)
        })
    }

    fn known(host: &str, port: u16, asked: &str) -> Option<Self> {
        match host {
            "?" => None,
            "" => Some(Self::new(asked, port)),
            host => Some(Self::new(host, port)),
        }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::Nil => Some(""),
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.into())
    }

    fn node(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), bulk("id")])
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        let mut fields = vec![Value::Int(first), Value::Int(last)];
        fields.extend(nodes);
        Value::Array(fields)
    }

    #[test]
    fn what_a_node_says_is_read() {
        let named = Value::Array(vec![
            bulk("?"),
            Value::Int(3),
            bulk("id"),
            Value::Map(vec![(bulk("ip"), bulk("10.0.0.3"))]),
        ]);
        let answer = Value::Array(vec![
            range(0, 9, vec![node(bulk("a"), 1), node(bulk("b"), 2)]),
            range(20, 29, vec![node(Value::Nil, 1)]),
            range(30, 39, vec![named]),
            range(40, 40, vec![node(bulk("?"), 4)]),
            range(16_000, 16_383, vec![node(bulk("a"), 1), node(bulk("b"), 2)]),
        ]);
        let topology = Topology::read(&answer, "::1").unwrap();
        let owner = |slot| topology.owner(slot).map(ToString::to_string);
        assert_eq!(owner(0).as_deref(), Some("a:1"));
        assert_eq!(owner(16_383).as_deref(), Some("a:1"));
        assert_eq!(owner(25).as_deref(), Some("[::1]:1"));
        assert_eq!(owner(30).as_deref(), Some("10.0.0.3:3"));
        for nobody in [10, 19, 40, 41, 15_999] {
            assert_eq!(owner(nobody), None, "{nobody}");
        }
        assert_eq!(topology.owners().len(), 3);
        assert_eq!(topology.nodes().count(), 4);
    }

    #[test]
    fn a_slot_that_moves_takes_no_other_with_it() {
        let answer = Value::Array(vec![range(0, 9, vec![node(bulk("a"), 1)])]);
        let topology = Topology::read(&answer, "h").unwrap();
        assert!(topology.agrees(&topology.with(3, &Node::new("a", 1))));
        let moved = topology.with(3, &Node::new("b", 2));
        assert!(!topology.agrees(&moved));
        assert_eq!(moved.owner(3), Some(&Node::new("b", 2)));
        assert_eq!(moved.owner(4), Some(&Node::new("a", 1)));
    }

    #[test]
    fn what_is_no_answer_is_refused() {
        for answer in [
            Value::Nil,
            Value::Okay,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 16_384, vec![node(bulk("a"), 1)])]),
            Value::Array(vec![range(9, 0, vec![node(bulk("a"), 1)])]),
            Value::Array(vec![range(-1, 0, vec![node(bulk("a"), 1)])]),
        ] {
            assert!(Topology::read(&answer, "h").is_none(), "{answer:?}");
        }
    }

    #[test]
    fn redirections_are_read() {
        let to = |text| Node::redirected(text, "asked").map(|node| node.to_string());
        assert_eq!(to("127.0.0.1:6381").as_deref(), Some("127.0.0.1:6381"));
        assert_eq!(to("::1:6381").as_deref(), Some("[::1]:6381"));
        assert_eq!(to(":6381").as_deref(), Some("asked:6381"));
        assert_eq!(to("?:6381"), None);
        assert_eq!(to("host"), None);
        assert_eq!(to("host:0x1"), None);
    }
}
