use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::kept::Kept;
use crate::{Error, ErrorKind, Key, OwnerId, Result, Token};

/// A held lock. It is renewed in the background while this lives; dropping it releases the lock.
///
/// A lock can end while you hold it: the store was silent for too long, an operator took it away, a
/// maximum was reached. Then [`lost`](Self::lost) resolves, before the store may hand the lock to
/// somebody else. Work that must not overlap is best driven by [`run`](Self::run), and what it
/// writes guarded by the [`token`](Self::token).
///
/// ```
/// # use leasehold_core::{Locks, Memory};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> leasehold_core::Result<()> {
/// let locks = Locks::new(Memory::new());
/// let guard = locks.lock("order:42").await?;
/// assert!(guard.is_held());
/// guard.release().await?; // or just drop it
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released as soon as the guard is dropped"]
pub struct Guard {
    held: Arc<Held>,
}

impl Guard {
    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.held.0.key
    }

    /// The fencing token of this grant: higher than that of every earlier grant of the key, the same
    /// for every re-entry (C7).
    #[must_use]
    pub fn token(&self) -> Token {
        self.held.0.token
    }

    /// Who holds it.
    #[must_use]
    pub fn owner(&self) -> &OwnerId {
        &self.held.0.owner
    }

    /// Whether the lock is still ours, by our own clock. Asks nobody.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.held.0.validity.is_ended()
    }

    /// How long the lock stays ours if nothing is heard of the store any more; zero once it is lost,
    /// `Duration::MAX` where only the end of this process ends it.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.held.0.validity.remaining()
    }

    /// Resolves when the lock is lost: at the latest before the store may hand it to somebody else,
    /// at once when the store says so (C11). Never resolves while it is held.
    ///
    /// # Cancel safety
    /// May be dropped and called again at any time.
    pub async fn lost(&self) {
        self.held.0.validity.ended().await;
    }

    /// Drives `work` for as long as the lock is held, and gives back its output.
    ///
    /// Before each poll of `work` it looks at the clock; once the lock is lost, `work` is dropped
    /// where it stands and not polled again. What `work` does between two awaits is not interrupted:
    /// let the resource check the [`token`](Self::token) where that is not enough.
    ///
    /// ```
    /// # use leasehold_core::{Locks, Memory};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> leasehold_core::Result<()> {
    /// # let locks = Locks::new(Memory::new());
    /// let guard = locks.lock("report").await?;
    /// let rows = guard.run(async { 7 }).await?;
    /// guard.release().await?;
    /// assert_eq!(rows, 7);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock was lost before `work` was done.
    ///
    /// # Cancel safety
    /// Dropping it drops `work`; the lock stays held by the guard.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        run_while(|| self.is_held(), self.lost(), work)
            .await
            .ok_or_else(|| self.held.0.lost())
    }

    /// Releases the lock and waits for the store's answer. If other guards of the same owner hold
    /// the key too, it stays locked until the last of them is gone (C16).
    ///
    /// Nothing renews from its first poll on.
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if the lock was no longer ours, so that somebody else may have held it in
    /// the meantime. [`ErrorKind::Unavailable`] if the store did not answer: the release is repeated
    /// in the background until it is answered or the lock has ended.
    ///
    /// # Cancel safety
    /// Once polled, it goes through by itself, also when the future is dropped (C13); dropped before
    /// that, it is the drop of the guard.
    pub async fn release(self) -> Result<()> {
        match Arc::try_unwrap(self.held) {
            Ok(held) => held.0.clone().release().await,
            // Another guard of the owner holds the key on.
            Err(shared) if shared.0.validity.is_ended() => Err(shared.0.lost()),
            Err(_shared) => Ok(()),
        }
    }

    pub(crate) fn new(held: Arc<Held>) -> Self {
        Self { held }
    }

    pub(crate) fn held(&self) -> &Arc<Held> {
        &self.held
    }
}

/// Several held locks, all or none: any lost = lost. Dropping it releases them.
///
/// Made by [`Locks::lock_all`](crate::Locks::lock_all).
#[derive(Debug)]
#[must_use = "the locks are released as soon as the guards are dropped"]
pub struct Guards {
    guards: Vec<Guard>,
}

impl Guards {
    /// The guards, in the order of their keys.
    pub fn iter(&self) -> std::slice::Iter<'_, Guard> {
        self.guards.iter()
    }

    /// The guard of `key`, if it is among them.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Guard> {
        self.guards.iter().find(|guard| guard.key().as_str() == key)
    }

    /// How many locks these are; keys that were named twice count once.
    #[must_use]
    pub fn len(&self) -> usize {
        self.guards.len()
    }

    /// Whether no key was named at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.guards.is_empty()
    }

    /// Whether all of them are still ours.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(Guard::is_held)
    }

    /// How long all of them stay ours if nothing is heard of the store any more.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let remaining = self.guards.iter().map(Guard::remaining);
        remaining.min().unwrap_or(Duration::MAX)
    }

    /// Resolves when the first of them is lost.
    ///
    /// # Cancel safety
    /// May be dropped and called again at any time.
    pub async fn lost(&self) {
        let mut losses: Vec<_> = self
            .guards
            .iter()
            .map(|guard| Box::pin(guard.lost()))
            .collect();
        poll_fn(|cx| {
            // All are polled, so that each of them wakes this task.
            let lost = losses
                .iter_mut()
                .fold(false, |lost, loss| loss.as_mut().poll(cx).is_ready() | lost);
            if lost { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Drives `work` for as long as all of them are held; see [`Guard::run`].
    ///
    /// # Errors
    /// [`ErrorKind::Lost`] if one of them was lost before `work` was done.
    ///
    /// # Cancel safety
    /// Dropping it drops `work`; the locks stay held.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        run_while(|| self.is_held(), self.lost(), work)
            .await
            .ok_or_else(|| self.first_lost())
    }

    /// Releases all of them at the same time and waits for the answers; see [`Guard::release`].
    ///
    /// # Errors
    /// The first failure in the order of the keys; the others are released all the same.
    ///
    /// # Cancel safety
    /// As for [`Guard::release`].
    pub async fn release(self) -> Result<()> {
        let mut releases: Vec<Release> = self
            .guards
            .into_iter()
            .map(|guard| Release::Running(Box::pin(guard.release())))
            .collect();
        poll_fn(|cx| {
            for release in &mut releases {
                if let Release::Running(running) = release
                    && let Poll::Ready(answer) = running.as_mut().poll(cx)
                {
                    *release = Release::Done(answer);
                }
            }
            let running = |release: &Release| matches!(release, Release::Running(_));
            if releases.iter().any(running) {
                return Poll::Pending;
            }
            let answers = releases.drain(..).map(|release| match release {
                Release::Done(answer) => answer,
                Release::Running(_) => Ok(()),
            });
            Poll::Ready(answers.fold(Ok(()), Result::and))
        })
        .await
    }

    pub(crate) fn new() -> Self {
        Self { guards: Vec::new() }
    }

    pub(crate) fn push(&mut self, guard: Guard) {
        self.guards.push(guard);
    }

    pub(crate) fn first_lost(&self) -> Error {
        let lost = self.guards.iter().find(|guard| !guard.is_held());
        lost.map_or_else(
            || Error::new(ErrorKind::Lost, "a lock was lost"),
            |guard| guard.held.0.lost(),
        )
    }
}

impl<'a> IntoIterator for &'a Guards {
    type Item = &'a Guard;
    type IntoIter = std::slice::Iter<'a, Guard>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

enum Release {
    Running(Pin<Box<dyn Future<Output = Result<()>> + Send>>),
    Done(Result<()>),
}

/// What all guards of one grant share; the last one to go releases it.
#[derive(Debug)]
pub(crate) struct Held(pub(crate) Arc<Kept>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.let_go();
    }
}

/// Polls `work` while `held`; `None` once it is not.
async fn run_while<F: Future>(
    held: impl Fn() -> bool + Send + Sync,
    lost: impl Future<Output = ()> + Send,
    work: F,
) -> Option<F::Output> {
    let mut work = pin!(work);
    let mut lost = pin!(lost);
    poll_fn(|cx| {
        // The process may have been stopped since the last poll: the clock first, the work then.
        if !held() {
            return Poll::Ready(None);
        }
        if let Poll::Ready(output) = work.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        lost.as_mut().poll(cx).map(|()| None)
    })
    .await
}
