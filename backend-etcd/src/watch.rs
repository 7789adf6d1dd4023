use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use etcd_client::{
    EventType, WatchFilterType, WatchOptions, WatchRequestSender, WatchResponse,
    WatchResponseStream,
};
use leasehold_core::{Error, ErrorKind, Result};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tracing::debug;

use crate::endpoints::{Channel, Endpoints};

/// Wakes those who wait for a key to be deleted: one watch stream for all waiters of a client.
///
/// 1. A waiter watches two keys, its predecessor's and its own, from the revision that follows the
///    one at which it saw them: whatever has happened since is told, too. (A watch without a revision
///    on a key that is already gone would stay silent for ever.) It is woken once, looks, and if its
///    turn has not come watches anew.
/// 2. When the stream breaks, another is opened, at the next member, and every watch is made again
///    from its revision: nothing is missed. If etcd has compacted that revision away it cancels the
///    watch, and the waiter looks.
/// 3. A stream that says nothing may be dead: after a beat (a third of the shortest ttl among the
///    waiters) without a message it is asked for its progress; after another it is given up.
/// 4. A watch that is refused may have met a token that has expired, for the stream signs in only when
///    it is opened: so it is opened once more with a new one, then the waiter hears of it.
pub(crate) struct Watches {
    watchers: Arc<Mutex<Watchers>>,
    orders: mpsc::UnboundedSender<Order>,
}

/// One waiter's place among the [`Watches`]; leaves it when dropped.
#[derive(Debug)]
pub(crate) struct Watching<'a> {
    watches: &'a Watches,
    id: i64,
    woken: oneshot::Receiver<Result<()>>,
}

#[derive(Debug, Default)]
struct Watchers {
    all: BTreeMap<i64, Watcher>,
    last_id: i64,
}

#[derive(Debug)]
struct Watcher {
    keys: [Vec<u8>; 2],
    from: i64,
    beat: Duration,
    refused: bool,
    wake: oneshot::Sender<Result<()>>,
}

/// What has changed among the watchers.
#[derive(Debug)]
enum Order {
    Add(i64),
    Remove(i64),
}

/// Why a stream ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// Nobody will watch any more.
    Closed,
    Broken,
    /// A watch was refused.
    Refused,
}

impl Watches {
    /// Watches over `endpoints`, in a task of the current runtime that ends when this is dropped.
    pub(crate) fn start(endpoints: Arc<Endpoints>) -> Self {
        let watchers = Arc::new(Mutex::new(Watchers::default()));
        let (orders, received) = mpsc::unbounded_channel();
        let stream = Stream {
            endpoints,
            watchers: watchers.clone(),
            orders: received,
        };
        drop(tokio::spawn(stream.run()));
        Self { watchers, orders }
    }

    /// Watches for the deletion of either of `keys` from the revision `from` on, and looks every
    /// `beat` whether the stream is alive.
    pub(crate) fn watch(&self, keys: [Vec<u8>; 2], from: i64, beat: Duration) -> Watching<'_> {
        let (wake, woken) = oneshot::channel();
        let watcher = Watcher {
            keys,
            from,
            beat,
            refused: false,
            wake,
        };
        let id = {
            let mut watchers = lock(&self.watchers);
            watchers.last_id += 1;
            let id = watchers.last_id;
            watchers.all.insert(id, watcher);
            id
        };
        self.order(Order::Add(id));
        Watching {
            watches: self,
            id,
            woken,
        }
    }

    fn order(&self, order: Order) {
        // Without a task the runtime has ended; then nobody waits there.
        let _outcome = self.orders.send(order);
    }
}

impl Watching<'_> {
    /// Resolves when it is time to look again.
    ///
    /// # Errors
    /// If the watch was refused for good.
    ///
    /// # Cancel safety
    /// May be dropped and called again.
    pub(crate) async fn woken(&mut self) -> Result<()> {
        (&mut self.woken).await.unwrap_or_else(|_gone| {
            Err(Error::new(
                ErrorKind::Unavailable,
                "the runtime that watched etcd has ended",
            ))
        })
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        let watcher = lock(&self.watches.watchers).all.remove(&self.id);
        drop(watcher);
        self.watches.order(Order::Remove(self.id));
    }
}

impl fmt::Debug for Watches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watches")
            .field("watchers", &lock(&self.watchers).all.len())
            .finish_non_exhaustive()
    }
}

/// The task.
struct Stream {
    endpoints: Arc<Endpoints>,
    watchers: Arc<Mutex<Watchers>>,
    orders: mpsc::UnboundedReceiver<Order>,
}

impl Stream {
    async fn run(mut self) {
        const LONGEST_PAUSE: Duration = Duration::from_secs(1);
        let mut pause = Duration::ZERO;
        let mut sign_in = false;
        loop {
            // The orders tell of changes only; what is to be watched stands in the table.
            while lock(&self.watchers).all.is_empty() {
                if self.orders.recv().await.is_none() {
                    return;
                }
            }
            sleep(pause).await;
            let beat = beat(&self.watchers);
            let Ok(channel) = self.endpoints.connect(beat).await else {
                pause = (pause * 2).clamp(Duration::from_millis(10), LONGEST_PAUSE.min(beat));
                continue;
            };
            if sign_in
                && timeout(beat, self.endpoints.refresh_token(&channel))
                    .await
                    .is_err()
            {
                self.endpoints.leave_channel(&channel);
                continue;
            }
            let (heard, end) = self.follow(&channel).await;
            if end == End::Closed {
                return;
            }
            sign_in = end == End::Refused;
            if !sign_in {
                debug!(target: "leasehold", "etcd's watch stream broke: it is opened again");
                self.endpoints.leave_channel(&channel);
            }
            pause = if heard > 1 {
                Duration::ZERO
            } else {
                (pause * 2).clamp(Duration::from_millis(10), LONGEST_PAUSE.min(beat))
            };
        }
    }

    /// Opens a stream and follows it until it ends; how many messages it brought, and why it ended.
    async fn follow(&mut self, channel: &Arc<Channel>) -> (u64, End) {
        let heard = AtomicU64::new(0);
        let watchers = self.watchers.clone();
        let first = {
            let watchers = lock(&watchers);
            watchers
                .all
                .iter()
                .next()
                .map(|(id, watcher)| (*id, watcher.keys[0].clone(), watcher.from))
        };
        let Some((first, key, from)) = first else {
            return (0, End::Broken);
        };
        let mut client = channel.watch.clone();
        let opening = client.watch(key, Some(options(server_id(first, 0), from)));
        let stream = match timeout(beat(&watchers), opening).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                let failure = self.endpoints.map(channel, &error);
                debug!(target: "leasehold", error = %failure.error, "etcd's watch stream was not opened");
                return (0, End::Broken);
            }
            Err(_elapsed) => return (0, End::Broken),
        };
        let (sender, responses) = stream.split();
        let writing = write(sender, &mut self.orders, &watchers, &heard, first);
        let reading = read(responses, &watchers, &heard);
        let end = tokio::select! {
            end = writing => end,
            end = reading => end,
        };
        (heard.load(Ordering::Relaxed), end)
    }
}

/// Makes and cancels watches on an open stream, and looks whether it is alive. Of the watcher `first`
/// one watch is there already.
async fn write(
    mut sender: WatchRequestSender,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    watchers: &Mutex<Watchers>,
    heard: &AtomicU64,
    first: i64,
) -> End {
    let mut there = HashSet::new();
    let ids: Vec<i64> = lock(watchers).all.keys().copied().collect();
    let mut due = ids.into_iter();
    let mut heard_before = 0;
    let mut asked = false;
    let mut next_beat = tokio::time::Instant::now() + beat(watchers);
    loop {
        let order = match due.next() {
            Some(id) => Some(Order::Add(id)),
            None => tokio::select! {
                order = orders.recv() => match order {
                    Some(order) => Some(order),
                    None => return End::Closed,
                },
                () = tokio::time::sleep_until(next_beat) => None,
            },
        };
        let sending = async {
            match order {
                Some(Order::Add(id)) if there.insert(id) => {
                    let watcher = {
                        let watchers = lock(watchers);
                        let watcher = watchers.all.get(&id);
                        watcher.map(|watcher| (watcher.keys.clone(), watcher.from))
                    };
                    let Some((keys, from)) = watcher else {
                        // Left in the meantime; its removal is on the way.
                        there.remove(&id);
                        return Ok(());
                    };
                    for (which, key) in (0..).zip(keys) {
                        if id != first || which != 0 {
                            let options = options(server_id(id, which), from);
                            sender.watch(key, Some(options)).await?;
                        }
                    }
                }
                Some(Order::Remove(id)) if there.remove(&id) => {
                    sender.cancel(server_id(id, 0)).await?;
                    sender.cancel(server_id(id, 1)).await?;
                }
                Some(_) => {}
                None => {
                    let heard_now = heard.load(Ordering::Relaxed);
                    let waited_for = !lock(watchers).all.is_empty();
                    let silent = waited_for && heard_now == heard_before;
                    heard_before = heard_now;
                    if silent && asked {
                        return Err(etcd_client::Error::WatchError("silent".into()));
                    }
                    asked = silent;
                    if silent {
                        sender.request_progress().await?;
                    }
                }
            }
            Ok(())
        };
        let is_beat = order.is_none();
        if !matches!(timeout(beat(watchers), sending).await, Ok(Ok(()))) {
            return End::Broken;
        }
        if is_beat {
            next_beat = tokio::time::Instant::now() + beat(watchers);
        }
    }
}

/// Hears what the stream says and wakes those whom it concerns.
async fn read(
    mut responses: WatchResponseStream,
    watchers: &Mutex<Watchers>,
    heard: &AtomicU64,
) -> End {
    while let Ok(Some(response)) = responses.message().await {
        heard.fetch_add(1, Ordering::Relaxed);
        let id = response.watch_id() / 2;
        if response.canceled() {
            if !cancelled(&mut lock(watchers), id, &response) {
                return End::Refused;
            }
        } else if response
            .events()
            .iter()
            .any(|event| event.event_type() == EventType::Delete)
        {
            lock(watchers).wake(id, Ok(()));
        }
    }
    End::Broken
}

/// A watch has ended: as asked, because its revision is compacted away, or because it was refused.
/// False: it is worth another try with a new token.
fn cancelled(watchers: &mut Watchers, id: i64, response: &WatchResponse) -> bool {
    let Some(watcher) = watchers.all.get_mut(&id) else {
        return true;
    };
    if response.compact_revision() != 0 {
        watchers.wake(id, Ok(()));
        return true;
    }
    if !std::mem::replace(&mut watcher.refused, true) {
        return false;
    }
    let reason = response.cancel_reason();
    let refused = Error::new(
        ErrorKind::Other,
        format!(
            "etcd refuses to let {:?} be watched ({reason}): may the user read all keys of the prefix?",
            String::from_utf8_lossy(&watcher.keys[0])
        ),
    );
    watchers.wake(id, Err(refused));
    true
}

impl Watchers {
    fn wake(&mut self, id: i64, outcome: Result<()>) {
        if let Some(watcher) = self.all.remove(&id) {
            // It may have stopped waiting at this very moment.
            let _outcome = watcher.wake.send(outcome);
        }
    }
}

fn options(id: i64, from: i64) -> WatchOptions {
    WatchOptions::new()
        .with_watch_id(id)
        .with_start_revision(from)
        .with_filters([WatchFilterType::NoPut])
}

/// Each waiter has two watches at the server.
fn server_id(id: i64, which: i64) -> i64 {
    id * 2 + which
}

fn beat(watchers: &Mutex<Watchers>) -> Duration {
    const SHORTEST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(5);
    let watchers = lock(watchers);
    let beats = watchers.all.values().map(|watcher| watcher.beat);
    beats.min().unwrap_or(LONGEST).clamp(SHORTEST, LONGEST)
}

fn lock(watchers: &Mutex<Watchers>) -> MutexGuard<'_, Watchers> {
    watchers.lock().unwrap_or_else(PoisonError::into_inner)
}
