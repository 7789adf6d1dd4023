use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};
use uuid::Uuid;

use super::super::node::{Ask, Attempt, Node, Reply, Standing, Tell, Vote};
use super::super::time::Time;
use super::node::{Flaw, Store};

/// A network of nodes with faults, and a clock, in µs.
#[derive(Clone)]
pub(super) struct World(Arc<Mutex<State>>);

/// What may happen in a world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Faults {
    /// Of 1,000 messages so many are lost, come twice, or take about as long as the time-out.
    pub(super) lost: u32,
    pub(super) twice: u32,
    pub(super) slow: u32,
    /// A node restarts with its data, or loses it, about every so many µs; 0: never.
    pub(super) restarts: u64,
    pub(super) data_losses: u64,
    pub(super) flaw: Option<Flaw>,
}

/// How long a node has to answer.
pub(super) const TIMEOUT: u64 = 10_000;
/// The clock of the world begins here.
pub(super) const EPOCH: u64 = 1_700_000_000_000_000;

pub(super) struct State {
    pub(super) now: u64,
    pub(super) rng: fastrand::Rng,
    faults: Faults,
    nodes: Vec<Machine>,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    queue: Vec<Option<Event>>,
    /// How many requests of each kind were sent.
    pub(super) acquires: u64,
    pub(super) raises: u64,
    pub(super) losses: u64,
}

struct Machine {
    store: Store,
    /// Its clock is ahead of ours by so much, and so many millionths faster.
    ahead: i64,
    fast: i64,
}

enum Event {
    Request(usize, Request, Slot),
    Reply(Slot, Answer),
    Timeout(Slot),
    Restart,
    DataLoss,
    Wake(Waker),
}

#[derive(Clone)]
enum Request {
    Acquire((Uuid, u32), u64, u64),
    Raise((Uuid, u32), u64),
    Extend((Uuid, u32), u64),
    Free((Uuid, u32), u64),
    Look,
    Mark(String),
    Seed(String, u64),
}

#[derive(Clone)]
enum Answer {
    Vote(Vote),
    Is(bool),
    Standing(Standing),
    Done,
}

type Slot = Arc<Mutex<Awaited>>;

#[derive(Default)]
struct Awaited {
    answer: Option<Result<Answer>>,
    waker: Option<Waker>,
    over: bool,
}

impl World {
    pub(super) fn new(seed: u64, nodes: usize, faults: Faults) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let hour = 3_600_000_000;
        let nodes = (0..nodes)
            .map(|_| {
                let mut store = Store::default();
                store.flaw = faults.flaw;
                // One or the other node knows a token that is ahead of all clocks.
                let known = match rng.u32(..3) {
                    0 => EPOCH + rng.u64(..50_000),
                    _ => 0,
                };
                store.put(Some(known));
                Machine {
                    store,
                    ahead: rng.i64(-hour..hour),
                    fast: rng.i64(-4_000..4_000),
                }
            })
            .collect();
        let world = Self(Arc::new(Mutex::new(State {
            now: EPOCH,
            rng,
            faults,
            nodes,
            events: BinaryHeap::new(),
            queue: Vec::new(),
            acquires: 0,
            raises: 0,
            losses: 0,
        })));
        let mut state = world.state();
        state.next_restart();
        state.next_data_loss();
        drop(state);
        world
    }

    /// The nodes as one client sees them; `untended` is set when one says that it has no data.
    pub(super) fn nodes(&self, untended: &Arc<AtomicBool>) -> Vec<ModelNode> {
        let count = self.state().nodes.len();
        (0..count)
            .map(|index| ModelNode {
                world: self.clone(),
                index,
                untended: untended.clone(),
            })
            .collect()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn now(&self) -> u64 {
        self.state().now
    }

    pub(super) async fn sleep(&self, micros: u64) {
        let until = self.now() + micros;
        let mut set = false;
        std::future::poll_fn(|cx| {
            let mut state = self.state();
            if state.now >= until {
                return Poll::Ready(());
            }
            if !set {
                set = true;
                state.at(until, Event::Wake(cx.waker().clone()));
            }
            Poll::Pending
        })
        .await;
    }

    /// Drives all clients to their end.
    pub(super) fn run(&self, clients: Vec<Pin<Box<dyn Future<Output = ()> + '_>>>) {
        let ready = Arc::new(Mutex::new((0..clients.len()).collect::<Vec<_>>()));
        let wakers: Vec<Waker> = (0..clients.len())
            .map(|index| {
                let ready = ready.clone();
                Arc::new(Client { index, ready }).into()
            })
            .collect();
        let mut clients: Vec<_> = clients.into_iter().map(Some).collect();
        let mut running = clients.len();
        loop {
            loop {
                let next = ready.lock().unwrap().pop();
                let Some(index) = next else { break };
                let Some(client) = &mut clients[index] else {
                    continue;
                };
                let mut cx = Context::from_waker(&wakers[index]);
                if client.as_mut().poll(&mut cx).is_ready() {
                    clients[index] = None;
                    running -= 1;
                }
            }
            if running == 0 {
                return;
            }
            let woken = self.state().step();
            if let Some(waker) = woken {
                waker.wake();
            }
        }
    }
}

struct Client {
    index: usize,
    ready: Arc<Mutex<Vec<usize>>>,
}

impl Wake for Client {
    fn wake(self: Arc<Self>) {
        self.ready.lock().unwrap().push(self.index);
    }
}

impl State {
    fn at(&mut self, time: u64, event: Event) {
        let number = self.queue.len() as u64;
        self.queue.push(Some(event));
        self.events.push(Reverse((time, number)));
    }

    fn send(&mut self, node: usize, request: &Request, slot: &Slot) {
        self.at(self.now + TIMEOUT, Event::Timeout(slot.clone()));
        let copies = 1 + u32::from(self.chance(self.faults.twice));
        for _ in 0..copies {
            if !self.chance(self.faults.lost) {
                let arrives = self.now + self.delay();
                self.at(arrives, Event::Request(node, request.clone(), slot.clone()));
            }
        }
    }

    fn chance(&mut self, of_thousand: u32) -> bool {
        self.rng.u32(..1000) < of_thousand
    }

    /// Random delays alone do not find much: many are none, and the slow ones just make the time-out.
    fn delay(&mut self) -> u64 {
        if self.chance(self.faults.slow) {
            return match self.rng.u32(..4) {
                0 => TIMEOUT / 2 - self.rng.u64(..400),
                1 => self.rng.u64(TIMEOUT..3 * TIMEOUT),
                _ => TIMEOUT - self.rng.u64(1..800),
            };
        }
        match self.rng.u32(..4) {
            0 => 0,
            _ => self.rng.u64(20..300),
        }
    }

    /// The next thing happens; says who is to be woken.
    fn step(&mut self) -> Option<Waker> {
        let Reverse((time, number)) = self.events.pop().expect("somebody waits for nothing");
        self.now = self.now.max(time);
        let event = self.queue[usize::try_from(number).unwrap()].take()?;
        match event {
            Event::Request(node, request, slot) => {
                let answer = self.serve(node, request);
                if !self.chance(self.faults.lost) {
                    let arrives = self.now + self.delay();
                    self.at(arrives, Event::Reply(slot, answer));
                }
                None
            }
            Event::Reply(slot, answer) => settle(&slot, Ok(answer)),
            Event::Timeout(slot) => {
                if slot.lock().unwrap().over {
                    return None;
                }
                settle(
                    &slot,
                    Err(Error::new(ErrorKind::Unavailable, "no answer in time")),
                )
            }
            Event::Restart => {
                let node = self.rng.usize(..self.nodes.len());
                let now = self.nodes[node].clock(self.now);
                self.nodes[node].store.restart(now, true);
                self.next_restart();
                None
            }
            Event::DataLoss => {
                let node = self.rng.usize(..self.nodes.len());
                let now = self.nodes[node].clock(self.now);
                // A minority: tokens are promised until a majority has lost its data.
                let lost = self.nodes.iter().filter(|it| !it.store.is_seeded()).count();
                if lost < self.nodes.len() / 2 || self.faults.flaw == Some(Flaw::VotesWithoutData) {
                    self.losses += 1;
                    if self.rng.bool() {
                        self.nodes[node].store.restart(now, false);
                    } else {
                        self.nodes[node].store.flush();
                    }
                }
                self.next_data_loss();
                None
            }
            Event::Wake(waker) => Some(waker),
        }
    }

    fn next_restart(&mut self) {
        if self.faults.restarts > 0 {
            let time = self.now + self.rng.u64(..2 * self.faults.restarts);
            self.at(time, Event::Restart);
        }
    }

    fn next_data_loss(&mut self) {
        if self.faults.data_losses > 0 {
            let time = self.now + self.rng.u64(..2 * self.faults.data_losses);
            self.at(time, Event::DataLoss);
        }
    }

    fn serve(&mut self, node: usize, request: Request) -> Answer {
        let machine = &mut self.nodes[node];
        let now = machine.clock(self.now);
        let clock = (EPOCH + now).saturating_add_signed(machine.ahead);
        let store = &mut machine.store;
        match request {
            Request::Acquire(attempt, proposal, ttl) => {
                Answer::Vote(store.acquire(now, clock, attempt, proposal, ttl))
            }
            Request::Raise(attempt, token) => Answer::Is(store.raise(now, attempt, token)),
            Request::Extend(attempt, ttl) => Answer::Is(store.extend(now, attempt, ttl)),
            Request::Free(attempt, ttl) => Answer::Is(store.free(now, attempt, ttl)),
            Request::Look => Answer::Standing(store.look(now)),
            Request::Mark(state) => {
                store.mark(now, &state);
                Answer::Done
            }
            Request::Seed(state, token) => {
                store.seed(&state, token);
                Answer::Done
            }
        }
    }
}

impl Machine {
    /// The clock that its ttls run on.
    fn clock(&self, now: u64) -> u64 {
        rated(now - EPOCH, self.fast)
    }
}

/// A length of time on a clock that is so many millionths faster. Never before 0, so no start is.
pub(super) fn rated(length: u64, fast: i64) -> u64 {
    let off = i64::try_from(length)
        .unwrap_or(i64::MAX)
        .saturating_mul(fast)
        / 1_000_000;
    length.saturating_add_signed(off)
}

fn settle(slot: &Slot, answer: Result<Answer>) -> Option<Waker> {
    let mut slot = slot.lock().unwrap();
    if slot.over {
        return None;
    }
    slot.over = true;
    slot.answer = Some(answer);
    slot.waker.take()
}

/// A node as a client sees it.
pub(super) struct ModelNode {
    world: World,
    index: usize,
    untended: Arc<AtomicBool>,
}

impl ModelNode {
    /// It has data, and never gave a token.
    pub(super) fn forget_tokens(&self) {
        self.world.state().nodes[self.index].store.put(Some(0));
    }

    fn send<T: 'static>(
        &self,
        request: &Request,
        read: impl Fn(&Answer) -> T + Send + 'static,
    ) -> Reply<T> {
        let slot = Slot::default();
        self.world.state().send(self.index, request, &slot);
        Box::pin(std::future::poll_fn(move |cx| {
            let mut slot = slot.lock().unwrap();
            match slot.answer.take() {
                Some(answer) => Poll::Ready(answer.map(|answer| read(&answer))),
                None => {
                    slot.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

impl Node for ModelNode {
    fn acquire(&self, ask: &Ask<'_>) -> Reply<Vote> {
        self.world.state().acquires += 1;
        let request = Request::Acquire(id(ask.attempt), ask.proposal, micros(ask.claim.ttl));
        let untended = self.untended.clone();
        self.send(&request, move |answer| match answer {
            Answer::Vote(vote) => {
                if *vote == Vote::Unseeded {
                    untended.store(true, Ordering::Relaxed);
                }
                vote.clone()
            }
            _ => unreachable!(),
        })
    }

    fn raise(&self, ask: &Ask<'_>, token: u64) -> Reply<bool> {
        self.world.state().raises += 1;
        self.send(&Request::Raise(id(ask.attempt), token), yes)
    }

    fn extend(&self, attempt: &Attempt, ttl: Duration) -> Reply<bool> {
        self.send(&Request::Extend(id(attempt), micros(ttl)), yes)
    }

    fn free(&self, attempt: &Attempt, ttl: Duration, _tell: Tell) -> Reply<bool> {
        self.send(&Request::Free(id(attempt), micros(ttl)), yes)
    }

    fn look(&self) -> Reply<Standing> {
        self.send(&Request::Look, |answer| match answer {
            Answer::Standing(standing) => standing.clone(),
            _ => unreachable!(),
        })
    }

    fn mark(&self, seen: &Standing) -> Reply<()> {
        self.send(&Request::Mark(seen.state.clone()), |_| ())
    }

    fn seed(&self, seen: &Standing, token: u64) -> Reply<()> {
        self.send(&Request::Seed(seen.state.clone(), token), |_| ())
    }
}

/// The clocks of a client: one that nobody sets but that runs a little fast or slow, and one that is
/// anything.
#[derive(Clone)]
pub(super) struct ModelTime {
    pub(super) world: World,
    pub(super) ahead: i64,
    pub(super) fast: i64,
}

impl Time for ModelTime {
    type Moment = u64;

    fn now(&self) -> u64 {
        rated(self.world.now() - EPOCH, self.fast)
    }

    fn since(&self, moment: u64) -> Duration {
        Duration::from_micros(self.now() - moment)
    }

    fn is_over(&self, sent: u64, ttl: Duration) -> bool {
        self.since(sent) >= believed(ttl)
    }

    fn clock(&self) -> u64 {
        self.world.now().saturating_add_signed(self.ahead)
    }
}

/// How long a grant is believed.
pub(super) fn believed(ttl: Duration) -> Duration {
    ttl.saturating_sub(ttl / 100 + Duration::from_millis(2))
}

fn id(attempt: &Attempt) -> (Uuid, u32) {
    (attempt.claim, attempt.number)
}

fn micros(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_micros()).unwrap()
}

fn yes(answer: &Answer) -> bool {
    match answer {
        Answer::Is(yes) => *yes,
        _ => unreachable!(),
    }
}
