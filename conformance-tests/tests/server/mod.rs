//! A small lock server over TCP and its client, so that the suite can be tried with processes,
//! proxies and restarts where no other server is at hand.
//!
//! Each request is a line on a connection of its own. An acquire ends in three steps, so that neither
//! side is left with a lock that the other does not know of:
//! 1. the server says `granted` and the token; while the claim waits it says `waiting` now and then,
//!    so that a silent connection is noticed;
//! 2. the client takes the time, then says `mine`;
//! 3. the server renews the lease and says `yours`. If `mine` does not come soon, or the connection
//!    ends before, the lock goes to the next. From the time of step 2 the client may believe; if it
//!    is cancelled from then on, it releases.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::net::Ipv4Addr;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_conformance::fixtures::{Missing, Process};
use leasehold_conformance::{Control, Harness, Store};
use leasehold_core::{
    Backend, Claim, Consistency, Error, ErrorKind, Expiry, Fairness, Guarantees, Hold, Holder, Key,
    Moment, Result, Token, Tokens, Validity, Wakeup,
};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{sleep, timeout};
use uuid::Uuid;

/// What is wrong with the server or its client, if anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    None,
    /// The server keeps locks for a year, whatever ttl was asked for.
    NeverExpires,
    /// The server keeps locks for a year, and does not look whether the client got the answer.
    KeepsOrphans,
    /// The server does not look whether a waiter lives.
    ServesTheDead,
    /// The client takes a renewal that failed, or is not answered at once, for the end.
    EndsAtFirstError,
    /// The client goes on believing whatever the answer to a renewal is.
    RenewsBlindly,
    /// The client believes a hundred times as long as it was promised.
    BelievesTooLong,
    /// The server does not look whether the client got the answer, and the client counts from the
    /// time when it got it.
    BelievesLateGrants,
    /// The client never recovers from a failed request.
    NeverReconnects,
    /// The client waits for its wake-up for ever.
    TrustsTheWire,
    /// The client does not hear that its turn has come, once it waits.
    MissesWakeUps,
    /// The client shows the same token for all grants.
    ConstantToken,
    /// The server is said to keep its data and does not.
    ForgetsTokens,
    /// The server forgets its tokens when it restarts, and the client says that they last.
    ClaimsDurableTokens,
    /// The client says that a majority decides; the one server is replaced by one that knows nothing.
    ClaimsAMajority,
    /// The client says that a server may be lost; there is only one.
    ClaimsASpare,
}

impl Flaw {
    const ALL: [Self; 16] = [
        Self::None,
        Self::NeverExpires,
        Self::KeepsOrphans,
        Self::ServesTheDead,
        Self::EndsAtFirstError,
        Self::RenewsBlindly,
        Self::BelievesTooLong,
        Self::BelievesLateGrants,
        Self::NeverReconnects,
        Self::TrustsTheWire,
        Self::MissesWakeUps,
        Self::ConstantToken,
        Self::ForgetsTokens,
        Self::ClaimsDurableTokens,
        Self::ClaimsAMajority,
        Self::ClaimsASpare,
    ];

    fn named(name: &str) -> Self {
        let named = |flaw: &&Self| format!("{flaw:?}") == name;
        *Self::ALL.iter().find(named).expect("a flaw")
    }
}

/// The server runs in a process of its own: this binary, started again.
#[derive(Debug)]
pub(crate) struct Served(pub(crate) Flaw);

/// The server keeps locks at least so long.
const SHORTEST: Duration = Duration::from_millis(300);

/// Set for a server: its port and its flaw.
const SERVE: &str = "LEASEHOLD_TEST_SERVER";

#[async_trait]
impl Harness for Served {
    async fn start(&self) -> Result<Store, Missing> {
        let flaw = self.0;
        let process = Process::start("the test server", 1, move |place| {
            let mut command = Command::new(std::env::current_exe().expect("this binary"));
            command.env(SERVE, format!("{} {flaw:?}", place.port(0)));
            command
        });
        let process = process.await.expect("the test server starts");
        let server = format!("127.0.0.1:{}", process.port(0));
        Ok(Store::new(format!("{server}/{flaw:?}"))
            .with_processes()
            .with_servers([server])
            .with_control(Arc::new(Running(process, flaw))))
    }

    async fn connect(&self, address: &str) -> Result<Box<dyn Backend>> {
        let (server, flaw) = address.split_once('/').expect("an address");
        Ok(Box::new(Client {
            server: server.into(),
            flaw: Flaw::named(flaw),
            broken: Arc::default(),
        }))
    }
}

struct Running(Process, Flaw);

#[async_trait]
impl Control for Running {
    async fn pause(&self) -> anyhow::Result<()> {
        Ok(self.0.pause()?)
    }

    async fn resume(&self) -> anyhow::Result<()> {
        Ok(self.0.resume()?)
    }

    async fn restart(&self) -> anyhow::Result<()> {
        self.0.restart().await
    }

    fn keeps_data(&self) -> bool {
        self.1 == Flaw::ForgetsTokens
    }

    /// Two of them are only said to be there.
    fn members(&self) -> usize {
        match self.1 {
            Flaw::ClaimsAMajority | Flaw::ClaimsASpare => 3,
            _ => 1,
        }
    }

    async fn kill_leader(&self) -> anyhow::Result<()> {
        match self.1 {
            // As if it had failed over to a replica that had nothing yet.
            Flaw::ClaimsAMajority => self.0.restart().await,
            _ => {
                self.0.kill();
                Ok(())
            }
        }
    }
}

/// If this process was started to be the server, it is that for ever.
pub(crate) fn be_server(store: impl Fn(Flaw) -> Arc<dyn Backend>) -> Option<ExitCode> {
    let asked = std::env::var(SERVE).ok()?;
    let (port, flaw) = asked.split_once(' ')?;
    let flaw = Flaw::named(flaw);
    let server = Arc::new(Server {
        store: store(flaw),
        flaw,
        holds: Mutex::default(),
        given_up: Mutex::default(),
    });
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let address = (Ipv4Addr::LOCALHOST, port.parse().expect("a port"));
        let listener = TcpListener::bind(address).await.expect("a free port");
        while let Ok((stream, _)) = listener.accept().await {
            let server = Arc::clone(&server);
            tokio::spawn(async move { server.answer(Line::new(stream)).await });
        }
    });
    Some(ExitCode::FAILURE)
}

struct Server {
    store: Arc<dyn Backend>,
    flaw: Flaw,
    holds: Mutex<HashMap<Uuid, Shared>>,
    /// Released before their acquire was through.
    given_up: Mutex<HashSet<Uuid>>,
}

type Shared = Arc<AsyncMutex<Box<dyn Hold>>>;

impl Server {
    async fn answer(&self, mut line: Line) -> io::Result<()> {
        let request = line.read().await?;
        let words = request.split(' ').collect::<Vec<_>>();
        let answer = match words[..] {
            ["acquire", id, key, ttl, wait, label] => {
                let ttl = millis(ttl).max(SHORTEST);
                let mut claim = Claim::new(text(key), ttl).expect("a ttl");
                claim.id = id.parse().expect("an id");
                claim.wait = (wait != "-").then(|| micros(wait));
                claim.label = (label != "-").then(|| text(label).as_str().into());
                return self.acquire(line, claim).await;
            }
            ["renew", id] => said(self.renew(id).await),
            ["release", id] => said(self.release(id).await),
            ["give-up", id] => {
                // First noted, then tried: in whichever order the two meet, one of them frees it.
                let noted = id.parse().expect("an id");
                self.given_up.lock().expect("sound").insert(noted);
                said(self.release(id).await)
            }
            ["holder", key] => match self.store.holder(&text(key)).await {
                Ok(Some(holder)) => show(&holder),
                Ok(None) => "nobody".into(),
                Err(error) => error.to_string(),
            },
            ["evict", key, grant] => {
                let grant = (grant != "-").then(|| Holder::new(text(grant).as_str()));
                said(self.store.evict(&text(key), grant.as_ref()).await)
            }
            _ => format!("what is {request}?"),
        };
        line.write(&answer).await
    }

    async fn acquire(&self, mut line: Line, claim: Claim) -> io::Result<()> {
        let mut granted = self.store.acquire(&claim);
        let mut pause = Duration::ZERO;
        let hold = loop {
            tokio::select! {
                biased;
                hold = granted.as_mut() => break hold,
                () = sleep(pause) => {
                    let written = line.write("waiting").await;
                    if self.flaw != Flaw::ServesTheDead {
                        written?;
                    }
                    pause = claim.ttl / 6;
                }
                // The client has gone; nothing else is sent meanwhile.
                gone = line.read(), if self.flaw != Flaw::ServesTheDead => {
                    return gone.map(drop);
                }
            }
        };
        let mut hold = match hold {
            Ok(Some(hold)) => hold,
            Ok(None) => return line.write("busy").await,
            Err(error) => return line.write(&error.to_string()).await,
        };
        let patience = match self.flaw {
            Flaw::ServesTheDead => claim.ttl,
            _ => (claim.ttl / 8).clamp(SHORTEST / 4, Duration::from_secs(1)),
        };
        let granted = format!("granted {}", hold.token());
        let answer = async {
            let asked = line.write(&granted).await;
            let mine = match asked {
                Ok(()) => line.read().await,
                Err(error) => Err(error),
            };
            if mine.is_err() && self.flaw == Flaw::ServesTheDead {
                sleep(patience).await;
            }
            mine
        };
        let mine = timeout(patience, answer).await;
        let careless = matches!(self.flaw, Flaw::KeepsOrphans | Flaw::BelievesLateGrants);
        if !careless && !matches!(&mine, Ok(Ok(mine)) if mine == "mine") {
            // Lost is as good: it has run out meanwhile.
            drop(hold.release().await);
            return line.write("too late").await;
        }
        let kept = hold.renew().await.is_ok();
        let hold = Arc::new(AsyncMutex::new(hold));
        self.holds.lock().expect("sound").insert(claim.id, hold);
        if self.given_up.lock().expect("sound").remove(&claim.id) {
            return self
                .release(&claim.id.to_string())
                .await
                .map_err(io::Error::other);
        }
        line.write(if kept { "yours" } else { "lost" }).await
    }

    async fn renew(&self, id: &str) -> Result<()> {
        let hold = self.hold(id)?;
        let mut hold = hold.lock().await;
        hold.renew().await
    }

    async fn release(&self, id: &str) -> Result<()> {
        let hold = self.hold(id)?;
        let mut hold = hold.lock().await;
        hold.release().await
    }

    fn hold(&self, id: &str) -> Result<Shared> {
        let id = id.parse::<Uuid>().expect("an id");
        let holds = self.holds.lock().expect("sound");
        holds.get(&id).cloned().ok_or_else(lost)
    }
}

fn said(done: Result<impl fmt::Debug>) -> String {
    match done {
        Ok(done) => format!("ok {done:?}"),
        Err(error) if error.kind() == ErrorKind::Lost => "lost".into(),
        Err(error) => error.to_string(),
    }
}

fn show(holder: &Holder) -> String {
    let token = holder.token.expect("known").get();
    let left = holder.remaining.unwrap_or_default().as_millis();
    let label = holder.label.as_deref().map_or("-".into(), hex);
    format!("holder {} {token} {left} {label}", hex(&holder.grant))
}

/// The client: no connection is kept.
#[derive(Debug, Clone)]
struct Client {
    server: Arc<str>,
    flaw: Flaw,
    broken: Arc<AtomicBool>,
}

/// For requests that nobody else limits.
const LIMIT: Duration = Duration::from_secs(10);

#[async_trait]
impl Backend for Client {
    fn guarantees(&self) -> Guarantees {
        let mut guarantees = Guarantees::new(Expiry::Lease, SHORTEST);
        guarantees.fairness = Fairness::Fifo;
        guarantees.wakeup = Wakeup::Push;
        match self.flaw {
            Flaw::ClaimsDurableTokens => guarantees.tokens = Tokens::Durable,
            Flaw::ClaimsAMajority => guarantees.consistency = Consistency::Quorum,
            Flaw::ClaimsASpare => guarantees.node_losses = 1,
            _ => {}
        }
        guarantees
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let start = Moment::now();
        let mut queued = false;
        loop {
            let left = claim.wait.map(|wait| wait.saturating_sub(start.elapsed()));
            let claiming = self.claim(claim, left, &mut queued);
            match claiming.await {
                Ok(Claimed::Granted(hold)) => return Ok(Some(Box::new(hold))),
                Ok(Claimed::Busy) => return Ok(None),
                // Granted, and the answer to it came too late.
                Ok(Claimed::Again) => {}
                Err(error) if !queued || self.flaw == Flaw::NeverReconnects => {
                    return Err(self.broken(error));
                }
                Err(_) if self.flaw == Flaw::TrustsTheWire => std::future::pending().await,
                Err(_) if left.is_some_and(|left| left.is_zero()) => return Ok(None),
                Err(_) => sleep(Duration::from_millis(10)).await,
            }
        }
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let answer = self.ask(&format!("holder {}", hex(key.as_str()))).await?;
        let words = answer.split(' ').collect::<Vec<_>>();
        match words[..] {
            ["holder", grant, token, left, label] => {
                let mut holder = Holder::new(text(grant).as_str());
                holder.token = token.parse().ok().map(Token::new);
                if self.flaw == Flaw::ConstantToken {
                    holder.token = Some(Token::new(1));
                }
                holder.remaining = Some(millis(left));
                holder.label = (label != "-").then(|| text(label).to_string());
                Ok(Some(holder))
            }
            ["nobody"] => Ok(None),
            _ => Err(Error::new(ErrorKind::Other, answer)),
        }
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let grant = grant.map_or("-".into(), |grant| hex(&grant.grant));
        let key = hex(key.as_str());
        let answer = self.ask(&format!("evict {key} {grant}")).await?;
        Ok(answer == "ok true")
    }
}

enum Claimed {
    Granted(Remote),
    Busy,
    Again,
}

impl Client {
    async fn claim(
        &self,
        claim: &Claim,
        left: Option<Duration>,
        queued: &mut bool,
    ) -> io::Result<Claimed> {
        let wait = left.map_or("-".into(), |left| micros_of(left).to_string());
        let label = claim.label.as_deref().map_or("-".into(), hex);
        let (key, ttl) = (hex(claim.key.as_str()), claim.ttl.as_millis());
        let mut line = self.connect(claim.request_limit).await?;
        // Of its own for each attempt, so that what is left of one never meets the next.
        let id = Uuid::new_v4();
        let request = format!("acquire {id} {key} {ttl} {wait} {label}");
        line.write(&request).await?;
        let token = loop {
            let silence = match self.flaw {
                Flaw::TrustsTheWire | Flaw::BelievesLateGrants => Duration::MAX,
                _ if *queued => (claim.ttl / 3).max(Duration::from_millis(200)),
                _ => claim.request_limit.max(claim.ttl / 3),
            };
            let answer = timeout(silence, line.read()).await??;
            match answer.split_once(' ') {
                Some(("granted", _)) if *queued && self.flaw == Flaw::MissesWakeUps => {
                    std::future::pending::<()>().await;
                }
                Some(("granted", token)) => break token.parse().map_err(io::Error::other)?,
                _ if answer == "waiting" => *queued = true,
                _ if answer == "busy" => return Ok(Claimed::Busy),
                _ if answer == "too late" => return Ok(Claimed::Again),
                _ => return Err(io::Error::other(answer)),
            }
        };
        let sent = Moment::now();
        let mut unanswered = Unanswered(Some((self.clone(), id)));
        line.write("mine").await?;
        let answer = timeout(claim.request_limit, line.read()).await??;
        unanswered.0 = None;
        if answer != "yours" && self.flaw != Flaw::BelievesLateGrants {
            return Ok(Claimed::Again);
        }
        let believed = match self.flaw {
            Flaw::BelievesTooLong => claim.ttl * 100,
            _ => claim.ttl,
        };
        Ok(Claimed::Granted(Remote {
            client: self.clone(),
            id,
            ttl: believed,
            token: Token::new(if self.flaw == Flaw::ConstantToken {
                1
            } else {
                token
            }),
            validity: Validity::new(sent, believed),
        }))
    }

    async fn ask(&self, request: &str) -> Result<String> {
        let answer = async {
            let mut line = self.connect(LIMIT).await?;
            line.write(request).await?;
            line.read().await
        };
        let answer = timeout(LIMIT, answer).await.map_err(io::Error::from);
        answer.flatten().map_err(|error| self.broken(error))
    }

    async fn connect(&self, limit: Duration) -> io::Result<Line> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let stream = timeout(limit, TcpStream::connect(&*self.server)).await??;
        stream.set_nodelay(true)?;
        Ok(Line::new(stream))
    }

    fn broken(&self, error: io::Error) -> Error {
        if self.flaw == Flaw::NeverReconnects {
            self.broken.store(true, Ordering::Relaxed);
        }
        Error::with_source(ErrorKind::Unavailable, "the server does not answer", error)
    }
}

/// A claim that may have been granted, and nobody waits for the answer any more: it is released.
struct Unanswered(Option<(Client, Uuid)>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let (Some((client, id)), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            // If it does not get through, the lease runs out.
            runtime.spawn(async move { client.ask(&format!("give-up {id}")).await });
        }
    }
}

#[derive(Debug)]
struct Remote {
    client: Client,
    id: Uuid,
    ttl: Duration,
    token: Token,
    validity: Validity,
}

#[async_trait]
impl Hold for Remote {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        let sent = Moment::now();
        let patience = match self.client.flaw {
            Flaw::EndsAtFirstError => self.ttl / 12,
            _ => LIMIT,
        };
        let renewed = timeout(patience, self.ask("renew")).await;
        let renewed = renewed.unwrap_or_else(|late| {
            Err(Error::with_source(ErrorKind::Unavailable, "too slow", late))
        });
        match &renewed {
            _ if self.client.flaw == Flaw::RenewsBlindly => {
                self.validity.extend(sent, self.ttl);
                return Ok(());
            }
            Ok(()) => drop(self.validity.extend(sent, self.ttl)),
            Err(error) if error.kind() == ErrorKind::Lost => self.validity.end(),
            Err(_) if self.client.flaw == Flaw::EndsAtFirstError => self.validity.end(),
            Err(_) => {}
        }
        renewed
    }

    async fn release(&mut self) -> Result<()> {
        self.ask("release").await
    }
}

impl Remote {
    async fn ask(&self, what: &str) -> Result<()> {
        let answer = self.client.ask(&format!("{what} {}", self.id)).await?;
        match answer.as_str() {
            "ok ()" => Ok(()),
            "lost" => Err(lost()),
            _ => Err(Error::new(ErrorKind::Other, answer)),
        }
    }
}

/// A connection that carries lines.
struct Line(BufReader<TcpStream>);

impl Line {
    fn new(stream: TcpStream) -> Self {
        Self(BufReader::new(stream))
    }

    async fn read(&mut self) -> io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }

    async fn write(&mut self, line: &str) -> io::Result<()> {
        self.0.write_all(format!("{line}\n").as_bytes()).await?;
        self.0.flush().await
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::Lost, "the server does not have this grant")
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

/// Whatever was written by [`hex`]; a grant is taken for a key, since it is as short.
fn text(hex: &str) -> Key {
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
    let bytes = (0..hex.len()).step_by(2).map(byte).collect();
    Key::new(String::from_utf8(bytes).expect("text")).expect("a key")
}

/// Rounded up, so that nobody gives up early.
fn micros_of(wait: Duration) -> u128 {
    wait.as_nanos().div_ceil(1000)
}

fn micros(text: &str) -> Duration {
    Duration::from_micros(text.parse().expect("a number"))
}

fn millis(text: &str) -> Duration {
    Duration::from_millis(text.parse().expect("a number"))
}
