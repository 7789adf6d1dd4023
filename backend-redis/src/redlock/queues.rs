use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::timeout;

/// The waiters of this client: those of one lock stand in line, and the first of them asks for all.
///
/// So a hand-off costs the same however many wait here, and they do not take votes from each other.
#[derive(Debug, Default)]
pub(super) struct Queues {
    lines: Mutex<HashMap<Arc<str>, Arc<Line>>>,
    /// The newest token that a message told of.
    newest: AtomicU64,
}

/// Those who wait for one lock.
#[derive(Debug)]
pub(super) struct Line {
    turn: Semaphore,
    users: AtomicU64,
    news: Mutex<News>,
    changed: Notify,
}

/// What is known of a lock since it was last asked for.
#[derive(Debug, Default)]
struct News {
    /// The nodes that have said that it is free.
    heard: Vec<usize>,
    /// How many clients they told.
    waiting: u32,
    /// The connection of each node on which messages come in.
    watched: HashMap<usize, u64>,
}

impl Queues {
    /// Stands in line for `lock`.
    pub(super) fn join(self: &Arc<Self>, lock: &Arc<str>) -> Place {
        let line = {
            let mut lines = self.lines();
            let line = lines.entry(lock.clone()).or_insert_with(|| {
                Arc::new(Line {
                    turn: Semaphore::new(1),
                    users: AtomicU64::new(0),
                    news: Mutex::default(),
                    changed: Notify::new(),
                })
            });
            line.users.fetch_add(1, Ordering::Relaxed);
            line.clone()
        };
        Place {
            queues: self.clone(),
            lock: lock.clone(),
            line,
        }
    }

    /// Takes in a message of node `node`. What it does not know it leaves alone, so that later versions
    /// may say more.
    pub(super) fn message(&self, node: usize, text: &str) {
        let mut words = text.splitn(4, ' ');
        let (Some("freed"), Some(token), Some(waiting), Some(lock)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return;
        };
        if let Ok(token) = token.parse() {
            self.newest.fetch_max(token, Ordering::Relaxed);
        }
        let Some(line) = self.lines().get(lock).cloned() else {
            return;
        };
        let mut news = line.news();
        if !news.heard.contains(&node) {
            news.heard.push(node);
        }
        news.waiting = news.waiting.max(waiting.parse().unwrap_or(1));
        drop(news);
        line.changed.notify_waiters();
    }

    pub(super) fn newest_token(&self) -> u64 {
        self.newest.load(Ordering::Relaxed)
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Line>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Line {
    /// Waits for its turn, at most so long; `None`: that was not enough.
    pub(super) async fn turn(&self, wait: Option<Duration>) -> Option<SemaphorePermit<'_>> {
        let turn = self.turn.acquire();
        match wait {
            Some(wait) => timeout(wait, turn).await.ok()?.ok(),
            None => turn.await.ok(),
        }
    }

    /// It is about to be asked for: what was heard before says nothing any more.
    pub(super) fn forget(&self) {
        let mut news = self.news();
        news.heard.clear();
        news.waiting = 0;
    }

    /// Resolves once `majority` nodes have said that it is free, or a while after one has; says how many
    /// clients wait for it.
    pub(super) async fn freed(&self, majority: usize) -> u32 {
        const WHILE: Duration = Duration::from_millis(25);
        let any = self.heard(1).await;
        timeout(WHILE, self.heard(majority)).await.unwrap_or(any)
    }

    async fn heard(&self, nodes: usize) -> u32 {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Listen first, look then: nothing in between is missed.
            changed.as_mut().enable();
            {
                let news = self.news();
                if news.heard.len() >= nodes {
                    return news.waiting;
                }
            }
            changed.await;
        }
    }

    /// The nodes in `up` whose messages do not come in, each with the number of its connection.
    pub(super) fn unwatched(&self, up: impl Iterator<Item = (usize, Option<u64>)>) -> Vec<usize> {
        let news = self.news();
        up.filter(|(node, number)| {
            number.is_some_and(|number| news.watched.get(node) != Some(&number))
        })
        .map(|(node, _)| node)
        .collect()
    }

    pub(super) fn watched(&self, node: usize, connection: u64) {
        self.news().watched.insert(node, connection);
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in a line. Whoever leaves last closes it.
#[derive(Debug)]
pub(super) struct Place {
    queues: Arc<Queues>,
    pub(super) lock: Arc<str>,
    pub(super) line: Arc<Line>,
}

impl Place {
    /// Leaves; says which nodes need not send messages about the lock any more.
    pub(super) fn leave(&mut self) -> Vec<usize> {
        let mut lines = self.queues.lines();
        if self.line.users.fetch_sub(1, Ordering::Relaxed) > 1 {
            return Vec::new();
        }
        let line = lines.remove(&self.lock);
        drop(lines);
        drop(line);
        self.line.news().watched.keys().copied().collect()
    }
}
