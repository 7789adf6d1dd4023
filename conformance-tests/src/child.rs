//! Clients in processes of their own: this binary, started again.
//!
//! A line with a number and a command goes to the child's standard input, a line with the same number
//! and the answer comes back. Commands run side by side; one that fails is answered by `error …`.

use std::collections::HashMap;
use std::future::pending;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_core::{Backend, Guard, Key, Locks, Token};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::oneshot;

use crate::cx::{drive, queued, soon};
use crate::fixtures::{Signal, Watchdog};
use crate::harness::Harness;
use crate::history::{self, Belief, Plan};

/// Set for a child: the address of the store.
const ADDRESS: &str = "LEASEHOLD_CONFORMANCE_CHILD";

/// A client in a process of its own, killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Child {
    process: tokio::process::Child,
    watchdog: Watchdog,
    input: ChildStdin,
    answers: Arc<Mutex<Answers>>,
    sent: u64,
}

type Answers = HashMap<u64, oneshot::Sender<String>>;

/// The answer to a command, when it comes.
#[derive(Debug)]
pub(crate) struct Answer(oneshot::Receiver<String>);

impl Child {
    pub(crate) async fn start(address: &str) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(ADDRESS, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("this binary cannot be started again")?;
        let watchdog = Watchdog::new(process.id().context("ended at once")?)?;
        let input = process.stdin.take().context("no standard input")?;
        let output = process.stdout.take().context("no standard output")?;
        let answers = Arc::default();
        tokio::spawn(hand_out(output, Arc::clone(&answers)));
        let mut child = Self {
            process,
            watchdog,
            input,
            answers,
            sent: 0,
        };
        child.ask("ready").await?.soon().await?;
        Ok(child)
    }

    /// Takes a free lock and keeps it; its token.
    pub(crate) async fn lock(&mut self, key: &Key, ttl: Duration) -> anyhow::Result<Token> {
        let answer = self.ask(&format!("lock {key} {}", ttl.as_millis())).await?;
        Ok(Token::new(answer.soon().await?.parse()?))
    }

    /// Whether the child believes to hold `key`.
    pub(crate) async fn is_held(&mut self, key: &Key) -> anyhow::Result<bool> {
        let answer = self.ask(&format!("held {key}")).await?;
        Ok(answer.soon().await? == "true")
    }

    /// Lets the child do what it has to do: it asks the store about `key` a dozen times meanwhile.
    pub(crate) async fn settle(&mut self, key: &Key) -> anyhow::Result<()> {
        self.ask(&format!("settle {key}")).await?.soon().await?;
        Ok(())
    }

    /// Lets so many owners of the child queue for `key`, and keep it once granted. The answer is when
    /// the first of them came to believe that it holds it.
    pub(crate) async fn queue(
        &mut self,
        key: &Key,
        ttl: Duration,
        owners: usize,
    ) -> anyhow::Result<Answer> {
        let queued = format!("queue {key} {} {owners}", ttl.as_millis());
        self.ask(&queued).await?.soon().await?;
        self.ask(&format!("granted {key}")).await
    }

    /// Lets the child write a history.
    pub(crate) async fn history(&mut self, keys: &[String], plan: Plan) -> anyhow::Result<Answer> {
        let Plan {
            ttl, length, seed, ..
        } = plan;
        let (ttl, length) = (ttl.as_millis(), length.as_millis());
        self.ask(&format!("history {ttl} {length} {seed} {}", keys.join(" ")))
            .await
    }

    /// Stops the process where it is (SIGSTOP).
    pub(crate) fn pause(&self) -> anyhow::Result<()> {
        self.signal(Signal::Stop)
    }

    /// Lets it go on.
    pub(crate) fn resume(&self) -> anyhow::Result<()> {
        self.signal(Signal::Continue)
    }

    /// Kills it (SIGKILL).
    pub(crate) async fn kill(mut self) -> anyhow::Result<()> {
        self.watchdog.dismiss();
        self.process.kill().await?;
        Ok(())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = self.process.id().context("the child has ended")?;
        Ok(signal.send_to(pid)?)
    }

    async fn ask(&mut self, command: &str) -> anyhow::Result<Answer> {
        self.sent += 1;
        let (answer, answered) = oneshot::channel();
        lock(&self.answers).insert(self.sent, answer);
        let line = format!("{} {command}\n", self.sent);
        self.input.write_all(line.as_bytes()).await?;
        self.input.flush().await?;
        Ok(Answer(answered))
    }
}

impl Answer {
    /// What the child says.
    pub(crate) async fn get(self) -> anyhow::Result<String> {
        let answer = self.0.await.context("the child has ended")?;
        match answer.strip_prefix("error ") {
            Some(error) => bail!("the child says: {error}"),
            None => Ok(answer),
        }
    }

    /// The history that the child has written.
    pub(crate) async fn beliefs(self) -> anyhow::Result<Vec<Belief>> {
        self.get()
            .await?
            .split_whitespace()
            .map(str::parse)
            .collect()
    }

    async fn soon(self) -> anyhow::Result<String> {
        soon("the child answers", self.get()).await?
    }
}

async fn hand_out(output: ChildStdout, answers: Arc<Mutex<Answers>>) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let (number, text) = line.split_once(' ').unwrap_or((&line, ""));
        let waiting = number.parse().ok().and_then(|n| lock(&answers).remove(&n));
        if let Some(waiting) = waiting {
            // Nobody may wait for it any more.
            drop(waiting.send(text.to_owned()));
        }
    }
    // Whoever still waits is told that there is nothing to come.
    lock(&answers).clear();
}

/// The store's address if this process was started to be a [`Child`].
pub(crate) fn address() -> Option<String> {
    std::env::var(ADDRESS).ok()
}

/// What a child does until its standard input ends.
pub(crate) async fn serve(harness: &dyn Harness, address: &str) -> anyhow::Result<()> {
    let client: Arc<dyn Backend> = harness.connect(address).await?.into();
    let servant = Servant {
        locks: crate::cx::locks(Arc::clone(&client)),
        client,
        kept: Arc::default(),
        granted: Arc::default(),
    };
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let servant = servant.clone();
        tokio::spawn(async move {
            let (number, command) = line.split_once(' ').unwrap_or((&line, ""));
            let answer = match servant.obey(command).await {
                Ok(answer) => answer,
                Err(error) => format!("error {}", format!("{error:#}").replace('\n', " ")),
            };
            println!("{number} {answer}");
        });
    }
    Ok(())
}

#[derive(Clone)]
struct Servant {
    client: Arc<dyn Backend>,
    locks: Locks,
    kept: Arc<Mutex<HashMap<String, Vec<Guard>>>>,
    granted: Arc<Mutex<HashMap<String, oneshot::Receiver<String>>>>,
}

impl Servant {
    async fn obey(&self, command: &str) -> anyhow::Result<String> {
        let words = command.split_whitespace().collect::<Vec<_>>();
        match words[..] {
            ["ready"] => Ok(String::new()),
            ["lock", key, ttl] => {
                let guard = self.locks.with_ttl(millis(ttl)?).lock(key).await?;
                let token = guard.token().to_string();
                self.keep(guard);
                Ok(token)
            }
            ["held", key] => {
                let kept = lock(&self.kept);
                let held = kept
                    .get(key)
                    .is_some_and(|kept| kept.iter().any(Guard::is_held));
                Ok(held.to_string())
            }
            ["settle", key] => {
                let key = Key::new(key)?;
                drive(&*self.client, &key, &mut pending::<()>()).await?;
                Ok(String::new())
            }
            ["queue", key, ttl, owners] => {
                self.queue(key, millis(ttl)?, owners.parse()?).await?;
                Ok(String::new())
            }
            ["granted", key] => {
                let granted = lock(&self.granted).remove(key);
                Ok(granted.context("nobody queues")?.await?)
            }
            ["history", ttl, length, seed, ref keys @ ..] => {
                let plan = Plan {
                    ttl: millis(ttl)?,
                    length: millis(length)?,
                    seed: seed.parse()?,
                    stalls: false,
                };
                let keys = keys.iter().map(ToString::to_string).collect::<Vec<_>>();
                let beliefs = history::write(&self.locks, &keys, plan).await?;
                let texts = beliefs.iter().map(ToString::to_string);
                Ok(texts.collect::<Vec<_>>().join(" "))
            }
            _ => bail!("not a command: {command}"),
        }
    }

    async fn queue(&self, key: &str, ttl: Duration, owners: usize) -> anyhow::Result<()> {
        ensure!(owners > 0, "nobody is to queue");
        let (first, granted) = oneshot::channel();
        let first = Arc::new(Mutex::new(Some(first)));
        lock(&self.granted).insert(key.to_owned(), granted);
        let name = Key::new(key)?;
        for _ in 0..owners {
            let locks = self.locks.with_ttl(ttl).with_wait(None);
            let key = key.to_owned();
            let mut waiter = Box::pin(async move { locks.lock(key).await });
            queued(&*self.client, &name, &mut waiter).await?;
            let (servant, first) = (self.clone(), Arc::clone(&first));
            tokio::spawn(async move {
                let answer = match waiter.await {
                    Ok(guard) => {
                        let since = history::now();
                        let held = guard.is_held();
                        servant.keep(guard);
                        held.then(|| since.as_nanos().to_string())
                    }
                    Err(error) => Some(format!("error {error}")),
                };
                if let Some(answer) = answer
                    && let Some(first) = lock(&first).take()
                {
                    // The answer may not be asked for.
                    drop(first.send(answer));
                }
            });
        }
        Ok(())
    }

    fn keep(&self, guard: Guard) {
        let key = guard.key().to_string();
        lock(&self.kept).entry(key).or_default().push(guard);
    }
}

fn millis(text: &str) -> anyhow::Result<Duration> {
    Ok(Duration::from_millis(text.parse()?))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
