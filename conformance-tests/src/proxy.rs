use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::harness::Store;

/// The network between one client and the servers of a store: a proxy for each of them.
#[derive(Debug)]
pub(crate) struct Line {
    proxies: Vec<Proxy>,
    address: String,
}

impl Line {
    /// Puts a proxy in front of every server of `store`.
    pub(crate) async fn to(store: &Store) -> io::Result<Self> {
        let mut proxies = Vec::new();
        let mut address = store.address.clone();
        for server in &store.servers {
            let proxy = Proxy::start(server).await?;
            address = put_in_place(&address, server, &proxy.address().to_string());
            proxies.push(proxy);
        }
        Ok(Self { proxies, address })
    }

    /// The store's address, by way of the proxies.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Sets all proxies to `flow`.
    pub(crate) fn set(&self, flow: Flow) {
        for proxy in &self.proxies {
            proxy.set(flow);
        }
    }

    /// How many bytes went through, both ways.
    pub(crate) fn bytes(&self) -> u64 {
        self.proxies.iter().map(Proxy::bytes).sum()
    }
}

/// Puts `proxy` in the place of `server`, but not of a part of a longer port.
fn put_in_place(address: &str, server: &str, proxy: &str) -> String {
    let mut parts = address.split(server);
    let mut whole = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let longer = part.starts_with(|next: char| next.is_ascii_digit());
        whole.push_str(if longer { server } else { proxy });
        whole.push_str(part);
    }
    whole
}

/// A TCP proxy that can be told to break what it carries.
///
/// Dropping it closes its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    flow: watch::Sender<Flow>,
    bytes: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

/// What a [`Proxy`] does with what it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Flow {
    /// Passes it on.
    Pass,
    /// Keeps it, both ways, and passes it on later: a network that delivers nothing for a while.
    Hold,
    /// Passes requests on and keeps the replies, to be passed on later.
    HoldReplies,
    /// Closes all connections, and each new one at once.
    Cut,
    /// Passes requests on and drops the replies. A connection that lost some is closed when the flow
    /// changes: nothing sensible can follow.
    LoseReplies,
}

impl Proxy {
    /// Listens on a free port of loopback and connects to `server` (`host:port`) for each client.
    ///
    /// # Errors
    /// If it cannot listen.
    ///
    /// # Cancel safety
    /// Nothing is left if dropped.
    pub async fn start(server: &str) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let (flow, watched) = watch::channel(Flow::Pass);
        let bytes = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(serve(listener, server.to_owned(), watched, bytes.clone()));
        Ok(Self {
            address,
            flow,
            bytes,
            task,
        })
    }

    /// Where clients connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes what happens to all connections, old and new.
    pub fn set(&self, flow: Flow) {
        self.flow.send_replace(flow);
    }

    /// How many bytes were received, both ways together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Takes the tasks of the connections with it: the set is in there.
        self.task.abort();
    }
}

async fn serve(
    listener: TcpListener,
    server: String,
    flow: watch::Receiver<Flow>,
    bytes: Arc<AtomicU64>,
) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok((client, _)) = listener.accept().await else {
            // Too many open files: the client waits, as it would at a busy server.
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        connections.spawn(carry(client, server.clone(), flow.clone(), bytes.clone()));
    }
}

/// Carries one connection until either side closes it or it is cut.
async fn carry(
    client: TcpStream,
    server: String,
    mut flow: watch::Receiver<Flow>,
    bytes: Arc<AtomicU64>,
) {
    if *flow.borrow_and_update() == Flow::Cut {
        return;
    }
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    // The latency of a request is not to depend on what was sent before.
    if client.set_nodelay(true).is_err() || server.set_nodelay(true).is_err() {
        return;
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // When one way ends, so does the other: dropping the halves closes both connections.
    tokio::select! {
        () = pump(from_client, to_server, Way::Requests, flow.clone(), &bytes) => {}
        () = pump(from_server, to_client, Way::Replies, flow.clone(), &bytes) => {}
        _ = flow.wait_for(|flow| *flow == Flow::Cut) => {}
    }
}

impl Flow {
    fn keeps(self, way: Way) -> bool {
        self == Self::Hold || self == Self::HoldReplies && way == Way::Replies
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Requests,
    Replies,
}

async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    way: Way,
    mut flow: watch::Receiver<Flow>,
    bytes: &AtomicU64,
) {
    let mut buffer = vec![0; 16 * 1024];
    let mut lost = false;
    loop {
        let length = tokio::select! {
            read = from.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return,
                Ok(length) => length,
            },
            _ = flow.wait_for(|flow| lost && *flow != Flow::LoseReplies) => return,
        };
        bytes.fetch_add(length as u64, Ordering::Relaxed);
        let Ok(now) = flow
            .wait_for(|flow| !flow.keeps(way))
            .await
            .map(|flow| *flow)
        else {
            return;
        };
        if now == Flow::LoseReplies && way == Way::Replies {
            lost = true;
        } else if lost || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_takes_the_place_of_its_server_only() {
        let address = "quorum://u:p@h:63,h:634,h:63/0?ttl=63";
        let expected = "quorum://u:p@p:1,h:634,p:1/0?ttl=63";
        assert_eq!(put_in_place(address, "h:63", "p:1"), expected);
    }

    #[tokio::test]
    async fn what_is_held_arrives_later_and_what_is_lost_ends_the_connection() {
        let server = TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let address = server.local_addr().expect("bound").to_string();
        let proxy = Proxy::start(&address).await.expect("starts");
        let mut client = TcpStream::connect(proxy.address()).await.expect("connects");
        let (mut server, _) = server.accept().await.expect("accepts");
        let mut seen = [0; 4];

        proxy.set(Flow::Hold);
        client.write_all(b"held").await.expect("written");
        // Received by the proxy, so only the flow keeps it.
        while proxy.bytes() < 4 {
            tokio::task::yield_now().await;
        }
        proxy.set(Flow::Pass);
        server.read_exact(&mut seen).await.expect("arrives");
        assert_eq!(&seen, b"held");

        proxy.set(Flow::HoldReplies);
        server.write_all(b"kept").await.expect("written");
        client.write_all(b"pass").await.expect("written");
        server.read_exact(&mut seen).await.expect("requests pass");
        assert_eq!(&seen, b"pass");
        while proxy.bytes() < 12 {
            tokio::task::yield_now().await;
        }
        proxy.set(Flow::Pass);
        client.read_exact(&mut seen).await.expect("arrives");
        assert_eq!(&seen, b"kept");

        proxy.set(Flow::LoseReplies);
        server.write_all(b"lost").await.expect("written");
        while proxy.bytes() < 16 {
            tokio::task::yield_now().await;
        }
        client.write_all(b"pass").await.expect("written");
        server.read_exact(&mut seen).await.expect("requests pass");
        assert_eq!(&seen, b"pass");
        proxy.set(Flow::Pass);
        assert_eq!(client.read(&mut seen).await.expect("closed in order"), 0);

        proxy.set(Flow::Cut);
        let mut refused = TcpStream::connect(proxy.address()).await.expect("connects");
        assert!(matches!(refused.read(&mut seen).await, Ok(0) | Err(_)));
    }
}
