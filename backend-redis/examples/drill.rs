//! A failover drill, as operators do it: processes lock and work, the server they lock on is killed,
//! and what happens then is counted.
//!
//! `make drill`, or `cargo run -p leasehold-redis --example drill -- --rounds 20`. Each round has
//! servers of its own, on free ports of the loopback. It only counts and asserts nothing: two holders
//! at one time are what asynchronous replication can do.
//!
//! 1. Four processes want the same 50 locks. Whoever has one works for 20 ms to 30 s, looks every 5 ms
//!    whether it still holds, and writes every 50 ms to a resource that remembers the highest token of
//!    each key and refuses lower ones. Then it does something else, for up to 20 s: a lock that others
//!    always wait for stands on the replicas in any case, if only for the one who had it before.
//! 2. After eight seconds the server is killed with SIGKILL. In the cases "replicas behind" the
//!    replicas hang, with their links broken, for the three seconds before: what is granted then is on
//!    the master alone.
//! 3. The load goes on until the locks work again and four seconds more.
//! 4. A hold lasts from the first look that said held to the last that did, by the clock that all
//!    processes of the machine share. A double hold is a pair of holds of one key that overlap, so
//!    overlaps shorter than the time between two looks may be missed, and none is made up.
#![allow(clippy::unwrap_used, reason = "a drill that cannot go on ends")]

use std::collections::HashMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_conformance::fixtures::sentinel::{SentinelGroup, ask};
use leasehold_core::{Backend, ErrorKind, Guard, Locks};
use leasehold_redis::{Redis, RedisOptions, Redlock, RedlockOptions};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::sleep;

const PROCESSES: usize = 4;
const KEYS: usize = 50;
const TTL: Duration = Duration::from_secs(10);
/// Between two locks of a task, at most.
const PAUSE: Duration = Duration::from_secs(20);
const BEFORE: Duration = Duration::from_secs(8);
const BEHIND: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(4);
/// How long the locks may take to work again.
const LIMIT: Duration = Duration::from_secs(60);

const CASES: &[Case] = &[
    Case::sentinel("Sentinel", 0, false),
    Case::sentinel("Sentinel, replicas behind", 0, true),
    Case::sentinel("Sentinel, `with_replicas(1)`", 1, false),
    Case::sentinel("Sentinel, `with_replicas(1)`, replicas behind", 1, true),
    Case {
        name: "Redlock, one of five killed",
        store: Store::Redlock,
        behind: false,
    },
];

struct Case {
    name: &'static str,
    store: Store,
    /// The replicas have nothing of the last seconds.
    behind: bool,
}

enum Store {
    /// So many replicas confirm.
    Sentinel(usize),
    Redlock,
}

impl Case {
    const fn sentinel(name: &'static str, replicas: usize, behind: bool) -> Self {
        Self {
            name,
            store: Store::Sentinel(replicas),
            behind,
        }
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["worker", address, resource] => work(address, resource).await,
        ["--rounds", rounds] => drill(rounds.parse().expect("a number of rounds")).await,
        [] => drill(20).await,
        _ => panic!("usage: drill [--rounds NUMBER]"),
    }
}

async fn drill(rounds: usize) {
    let mut sums: Vec<Sum> = CASES.iter().map(|_| Sum::default()).collect();
    for round in 1..=rounds {
        // Side by side: they wait more than they work.
        let mut playing = JoinSet::new();
        for (index, case) in CASES.iter().enumerate() {
            playing.spawn(async move { (index, play(case).await) });
        }
        while let Some(played) = playing.join_next().await {
            let (index, outcome) = played.unwrap();
            eprintln!("{round}/{rounds} {}: {outcome:?}", CASES[index].name);
            sums[index].add(&outcome);
        }
    }
    println!(
        "| killed in each of {rounds} rounds | grants | double holds | in rounds | the longest \
         | writes | refused for their token | tokens that fell |\n|---|---|---|---|---|---|---|---|"
    );
    for (case, sum) in CASES.iter().zip(sums) {
        let Sum { outcome, rounds } = sum;
        println!(
            "| {} | {} | {} | {rounds} | {} ms | {} | {} | {} |",
            case.name,
            outcome.grants,
            outcome.doubles,
            outcome.longest.as_millis(),
            outcome.writes,
            outcome.refused,
            outcome.fallen,
        );
    }
}

#[derive(Default)]
struct Sum {
    outcome: Outcome,
    /// With a double hold.
    rounds: usize,
}

impl Sum {
    fn add(&mut self, other: &Outcome) {
        let sum = &mut self.outcome;
        sum.grants += other.grants;
        sum.doubles += other.doubles;
        sum.longest = sum.longest.max(other.longest);
        sum.writes += other.writes;
        sum.refused += other.refused;
        sum.fallen += other.fallen;
        self.rounds += usize::from(other.doubles > 0);
    }
}

#[derive(Debug, Default)]
struct Outcome {
    grants: usize,
    /// From the kill to the next grant of a lock that was free.
    pause: Duration,
    doubles: usize,
    longest: Duration,
    writes: usize,
    refused: usize,
    /// Grants whose token is not above those of all holds that began before.
    fallen: usize,
}

impl Outcome {
    fn judge(&mut self, holds: &[Hold]) {
        self.grants = holds.len();
        let mut by_key: HashMap<usize, Vec<&Hold>> = HashMap::new();
        for hold in holds {
            by_key.entry(hold.key).or_default().push(hold);
        }
        for holds in by_key.values_mut() {
            holds.sort_by_key(|hold| hold.from);
            let mut highest = 0;
            for (index, hold) in holds.iter().enumerate() {
                self.fallen += usize::from(hold.token <= highest);
                highest = highest.max(hold.token);
                for later in &holds[index + 1..] {
                    if later.from < hold.to {
                        self.doubles += 1;
                        let overlap = Duration::from_nanos(hold.to.min(later.to) - later.from);
                        self.longest = self.longest.max(overlap);
                    }
                }
            }
        }
    }
}

/// What a worker reports of one hold; times in ns.
struct Hold {
    key: usize,
    token: u64,
    from: u64,
    to: u64,
}

/// The servers of a round.
enum Servers {
    Sentinel(SentinelGroup),
    Redlock(Vec<RedisServer>),
}

impl Servers {
    async fn start(case: &Case) -> Self {
        match case.store {
            Store::Sentinel(_) => {
                let group = SentinelGroup::start_with([""; 0], [""; 0]).await;
                Self::Sentinel(group.unwrap())
            }
            Store::Redlock => {
                let mut nodes = Vec::new();
                for _ in 0..5 {
                    nodes.push(RedisServer::start([""; 0]).await.unwrap());
                }
                Self::Redlock(nodes)
            }
        }
    }

    /// For [`connect`].
    fn address(&self, case: &Case) -> String {
        match (self, &case.store) {
            (Self::Sentinel(group), Store::Sentinel(replicas)) => {
                format!("{replicas} {}", group.url())
            }
            (Self::Redlock(nodes), _) => {
                let urls: Vec<String> = nodes.iter().map(RedisServer::url).collect();
                format!("redlock {}", urls.join(","))
            }
            _ => unreachable!("a case has its servers"),
        }
    }

    async fn kill(&self, behind: bool) {
        match self {
            Self::Redlock(nodes) => nodes[0].process().kill(),
            Self::Sentinel(group) => {
                let (master, replicas) = group.servers().split_first().unwrap();
                if behind {
                    for replica in replicas {
                        replica.process().pause().unwrap();
                    }
                    ask(master.port(), "CLIENT KILL TYPE replica")
                        .await
                        .unwrap();
                    sleep(BEHIND).await;
                }
                master.process().kill();
                if behind {
                    for replica in replicas {
                        replica.process().resume().unwrap();
                    }
                }
            }
        }
    }
}

async fn connect(address: &str) -> leasehold_core::Result<Box<dyn Backend>> {
    let (how, url) = address.split_once(' ').unwrap();
    if how == "redlock" {
        // The killed node stays down, so there is nothing to guard against; and new ones vote at once.
        let options = RedlockOptions::new(url.split(','))?.with_restart_guard(false);
        return Ok(Box::new(Redlock::connect_with(options).await?));
    }
    let options = RedisOptions::new(url)?.with_replicas(how.parse().unwrap());
    Ok(Box::new(Redis::connect_with(options).await?))
}

async fn play(case: &Case) -> Outcome {
    let servers = Servers::start(case).await;
    let address = servers.address(case);
    let observer = loop {
        match connect(&address).await {
            Ok(backend) => break locks(backend),
            Err(e) => eprintln!("tries again: {e}"),
        }
    };
    let resource = Resource::start().await;
    let mut workers: Vec<Worker> = (0..PROCESSES)
        .map(|_| Worker::start(&address, resource.port))
        .collect();
    for worker in &mut workers {
        worker.until_ready().await;
    }
    sleep(BEFORE).await;
    servers.kill(case.behind).await;
    let killed = now();
    let mut outcome = Outcome::default();
    let works = async {
        loop {
            if let Ok(Some(guard)) = observer.try_lock(&format!("free {}", now())).await {
                drop(guard.release().await);
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    drop(tokio::time::timeout(LIMIT, works).await);
    outcome.pause = Duration::from_nanos(now() - killed);
    sleep(AFTER).await;
    let mut holds = Vec::new();
    for worker in workers {
        holds.extend(worker.stop().await);
    }
    outcome.judge(&holds);
    (outcome.writes, outcome.refused) = resource.counts();
    outcome
}

fn locks(backend: Box<dyn Backend>) -> Locks {
    Locks::new(backend)
        .with_ttl(TTL)
        .with_wait(Duration::from_secs(3))
        .with_request_limit(Duration::from_secs(1))
}

/// What the locks protect: takes a write only with a token that is not lower than one before.
struct Resource {
    port: u16,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    highest: HashMap<u64, u64>,
    writes: usize,
    refused: usize,
}

impl State {
    fn write(&mut self, key: u64, token: u64) {
        self.writes += 1;
        let highest = self.highest.entry(key).or_default();
        if token < *highest {
            self.refused += 1;
        } else {
            *highest = token;
        }
    }
}

impl Resource {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(Mutex::new(State::default()));
        let shared = state.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let state = shared.clone();
                tokio::spawn(async move {
                    while let (Ok(key), Ok(token)) =
                        (stream.read_u64().await, stream.read_u64().await)
                    {
                        state.lock().unwrap().write(key, token);
                        if stream.write_u8(1).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, state }
    }

    fn counts(&self) -> (usize, usize) {
        let state = self.state.lock().unwrap();
        (state.writes, state.refused)
    }
}

/// A process with load.
struct Worker {
    child: Child,
    lines: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
}

impl Worker {
    fn start(address: &str, resource: u16) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["worker", address, &resource.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    async fn until_ready(&mut self) {
        assert_eq!(
            self.lines.next_line().await.unwrap().as_deref(),
            Some("ready")
        );
    }

    /// Lets it end, and returns what it held.
    async fn stop(mut self) -> Vec<Hold> {
        drop(self.child.stdin.take());
        let mut holds = Vec::new();
        while let Some(line) = self.lines.next_line().await.unwrap() {
            let words: Vec<u64> = line.split(' ').map(|it| it.parse().unwrap()).collect();
            holds.push(Hold {
                key: usize::try_from(words[0]).unwrap(),
                token: words[1],
                from: words[2],
                to: words[3],
            });
        }
        self.child.wait().await.unwrap();
        holds
    }
}

/// The work of one process, until its standard input ends.
async fn work(address: &str, resource: &str) {
    let backend = loop {
        match connect(address).await {
            Ok(backend) => break backend,
            Err(e) => eprintln!("tries again: {e}"),
        }
    };
    let locks = locks(backend);
    println!("ready");
    let mut tasks = JoinSet::new();
    for key in 0..KEYS {
        let locks = locks.clone();
        let resource = TcpStream::connect(format!("127.0.0.1:{resource}")).await;
        let mut resource = resource.unwrap();
        tasks.spawn(async move {
            // Not all at the same time.
            sleep(PAUSE.mul_f64(fastrand::f64())).await;
            while !STOP.load(Ordering::Relaxed) {
                match locks.lock(&key.to_string()).await {
                    Ok(guard) => {
                        hold(key, guard, &mut resource).await;
                        sleep(PAUSE.mul_f64(fastrand::f64())).await;
                    }
                    Err(e) if e.kind() == ErrorKind::Timeout => {}
                    Err(_) => sleep(Duration::from_millis(20)).await,
                }
            }
        });
    }
    let mut end = Vec::new();
    tokio::io::stdin().read_to_end(&mut end).await.unwrap();
    // Those who hold report it; those who wait have nothing to report.
    STOP.store(true, Ordering::Relaxed);
    while HOLDING.load(Ordering::Relaxed) > 0 {
        sleep(Duration::from_millis(5)).await;
    }
    std::process::exit(0);
}

static STOP: AtomicBool = AtomicBool::new(false);
static HOLDING: AtomicUsize = AtomicUsize::new(0);

async fn hold(key: usize, guard: Guard, resource: &mut TcpStream) {
    // 20 ms to 30 s, as many short as long ones.
    let length = 0.02 * 1500_f64.powf(fastrand::f64());
    let token = guard.token().get();
    let (mut times, mut due) = (None, 0);
    HOLDING.fetch_add(1, Ordering::Relaxed);
    loop {
        let at = now();
        if !guard.is_held() {
            break;
        }
        let from = times.map_or(at, |(from, _)| from);
        times = Some((from, at));
        let held = Duration::from_nanos(at - from);
        if held.as_secs_f64() > length || STOP.load(Ordering::Relaxed) {
            break;
        }
        if at >= due {
            due = at + 50_000_000;
            resource.write_u64(key as u64).await.unwrap();
            resource.write_u64(token).await.unwrap();
            resource.read_u8().await.unwrap();
        }
        tokio::select! {
            () = guard.lost() => {}
            () = sleep(Duration::from_millis(5)) => {}
        }
    }
    if let Some((from, to)) = times {
        println!("{key} {token} {from} {to}");
    }
    HOLDING.fetch_sub(1, Ordering::Relaxed);
    drop(guard.release().await);
}

/// The clock that all processes of this machine share, in ns.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(time.tv_sec).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap()
}
