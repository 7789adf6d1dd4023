use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use leasehold_core::{Error, ErrorKind, Locks, Result};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;
use tokio::task::consume_budget;

/// Where everything runs that goes on while no call is made: renewals, connections, releases that were
/// not waited for.
///
/// 1. It is a current-thread runtime that lives and dies on a thread of its own. A multi-thread runtime
///    with one worker would be a thread as well, but whoever lets go last would have to end it, and that
///    panics inside an async task.
/// 2. A call is driven by the thread that makes it. The runtime's thread only tells it when to go on.
/// 3. Everything that is handed out keeps this alive. When the last of it is gone, the thread releases
///    what is still to be released, gives back what the backend holds, and ends. Nobody waits for that.
pub(super) struct Runtime {
    handle: Handle,
    /// What the thread closes when it is told to end; taken for that.
    last: Option<(oneshot::Sender<Locks>, Locks)>,
}

impl Runtime {
    /// Starts one, and opens on it the locks that it is for.
    ///
    /// # Errors
    /// Whatever `opening` says; [`ErrorKind::Unsupported`] inside an async task.
    pub(super) fn start(
        opening: impl Future<Output = Result<Locks>>,
    ) -> Result<(Locks, Arc<Self>)> {
        may_block()?;
        let cannot =
            |error| Error::with_source(ErrorKind::Other, "no thread can be started", error);
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(cannot)?;
        let handle = runtime.handle().clone();
        let (ending, ended) = oneshot::channel::<Locks>();
        thread::Builder::new()
            .name("leasehold".into())
            .spawn(move || {
                runtime.block_on(async {
                    if let Ok(locks) = ended.await {
                        // Its answer was told to tracing; what is left ends by itself.
                        let _closed = locks.close().await;
                    }
                });
            })
            .map_err(cannot)?;
        let locks = drive(&handle, opening)?;
        let runtime = Self {
            handle,
            last: Some((ending, locks.clone())),
        };
        Ok((locks, Arc::new(runtime)))
    }

    /// Blocks this thread until `call` is done.
    ///
    /// # Errors
    /// Whatever `call` says; [`ErrorKind::Unsupported`] inside an async task.
    pub(super) fn wait<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        may_block()?;
        drive(&self.handle, call)
    }

    /// Looks at something that is there at once.
    pub(super) fn look<T>(&self, something: impl Future<Output = T>) -> T {
        drive(&self.handle, something)
    }

    /// Lets `release` go through, and waits for it where a thread may wait. Never panics, wherever it is
    /// called.
    pub(super) fn let_go(&self, release: impl Future<Output = Result<()>> + Send + 'static) {
        // Not polled: it is the drop of the guard, which frees the lock in the background.
        if may_block().is_err() {
            return;
        }
        // Polled by the other thread: this one may be panicking, and a second panic would abort.
        let released = self.handle.spawn(release);
        // Its answer was told to tracing.
        let _answer = drive(&self.handle, released);
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some((ending, locks)) = self.last.take() {
            // The thread waits for it until it comes.
            drop(ending.send(locks));
        }
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").finish_non_exhaustive()
    }
}

/// Fails where this thread is polling an async task, which must not block.
fn may_block() -> Result<()> {
    let why = match Handle::try_current() {
        Err(error) if error.is_thread_local_destroyed() => {
            "a thread that ends cannot wait any more"
        }
        Ok(_) if has_budget() => {
            "this blocks its thread, which would hold up the other tasks of this async runtime: use \
             leasehold::open and its async Locks here, or call it in tokio::task::spawn_blocking"
        }
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::Unsupported, why))
}

/// Whether tokio counts what this thread does, as it does for tasks and for `block_on`, but for nothing
/// that may block: `spawn_blocking`, `block_in_place`, other threads.
///
/// The count can only be used up. A task for which that is done yields at its next await, and then goes
/// on. One that is `unconstrained` is not seen, and blocks.
fn has_budget() -> bool {
    // More than any task ever has.
    const MOST: usize = 256;
    let mut cx = Context::from_waker(Waker::noop());
    (0..MOST).any(|_| pin!(consume_budget()).poll(&mut cx).is_pending())
}

/// Polls `future` on this thread until it is done, its timers and connections on the runtime.
///
/// Not [`Handle::block_on`]: that panics in the one task that [`has_budget`] does not see.
fn drive<F: Future>(handle: &Handle, future: F) -> F::Output {
    let _entered = handle.enter();
    let mut future = pin!(future);
    let parked = Arc::new(Parked {
        thread: thread::current(),
        woken: AtomicBool::new(false),
    });
    let waker = Waker::from(parked.clone());
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        while !parked.woken.swap(false, Ordering::Acquire) {
            thread::park();
        }
    }
}

/// A thread that waits to be woken. The flag tells a wake-up from others: what is polled may park the
/// thread too.
struct Parked {
    thread: Thread,
    woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}
