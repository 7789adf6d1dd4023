//! The blocking API: on threads, in `spawn_blocking`, and refused inside async tasks.
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use leasehold::backend::{Backend, Claim, Hold, Validity};
use leasehold::blocking::{self, Guard, Locks};
use leasehold::{Error, ErrorKind, Guarantees, Holder, Key, Memory, Need, Result, Token};
use tokio::runtime;

/// How long anything may take that should happen at once, on a busy machine too.
const LIMIT: Duration = Duration::from_secs(60);

fn memory() -> Locks {
    blocking::open("memory:").unwrap().with_wait(LIMIT)
}

/// On a store that lives in this process, one of files, and one at the end of a connection.
fn on_each_store(test: impl Fn(&Locks)) {
    test(&memory());
    #[cfg(feature = "file")]
    {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("file:{}/locks", folder.path().display());
        test(&blocking::open(url).unwrap().with_wait(LIMIT));
    }
    #[cfg(feature = "redis")]
    {
        use leasehold_conformance::fixtures::redis::Redis;
        let servers = runtime::Runtime::new().unwrap();
        match servers.block_on(Redis::find()) {
            Ok(server) => {
                let prefix = format!("blocking-{}:", thread::current().name().unwrap_or("test"));
                let url = format!("{}?prefix={prefix}&connect_timeout=20s", server.url());
                // A machine with much to do may let a request wait.
                let locks = blocking::open(url).unwrap().with_request_limit(LIMIT);
                test(&locks.with_wait(LIMIT));
            }
            Err(missing) => missing.skip(),
        }
    }
}

fn is_free(locks: &Locks, key: &str) -> bool {
    locks.try_lock(key).unwrap().is_some()
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    match result {
        Err(error) => error.kind(),
        Ok(_) => panic!("it says Ok"),
    }
}

#[test]
fn the_words_are_those_of_the_async_api() {
    on_each_store(|locks| {
        let locks = locks.with_label("nightly");
        let guard = locks.lock("a").unwrap();
        assert_eq!(guard.key().as_str(), "a");
        assert!(guard.is_held() && guard.remaining() > Duration::ZERO);
        assert!(locks.try_lock("a").unwrap().is_none());
        let busy = locks.with_wait(Duration::from_millis(50)).lock("a");
        assert_eq!(kind(busy), ErrorKind::Timeout);
        let holder = locks.holder("a").unwrap().unwrap();
        assert_eq!(holder.label.as_deref(), Some("nightly"));
        assert_eq!(holder.owner.unwrap(), guard.owner().to_string());
        let first = guard.token();
        guard.release().unwrap();
        assert!(locks.holder("a").unwrap().is_none());
        let guard = locks.try_lock("a").unwrap().unwrap();
        assert!(guard.token() > first);
        assert!(
            !locks.examine().unwrap().servers.is_empty()
                || locks.guarantees() == Memory::GUARANTEES
        );
        locks.require([Need::Ttl(Duration::from_secs(30))]).unwrap();
    });
}

#[test]
fn an_owner_enters_again() {
    on_each_store(|locks| {
        let me = locks.owner();
        let first = me.lock("a").unwrap();
        let again = me.try_lock("a").unwrap().unwrap();
        assert_eq!(first.token(), again.token());
        assert_eq!(first.owner(), me.id());
        drop(first);
        assert!(!is_free(locks, "a"));
        let both = me.lock_all(["a", "b"]).unwrap();
        drop(again);
        assert!(!is_free(locks, "a"));
        assert!(locks.owner().try_lock_all(["b"]).unwrap().is_none());
        drop(both);
        assert!(is_free(locks, "a") && is_free(locks, "b"));
    });
}

#[test]
fn several_are_locked_all_or_none() {
    on_each_store(|locks| {
        let guards = locks.lock_all(["b", "a", "b"]).unwrap();
        let keys: Vec<_> = guards.iter().map(|guard| guard.key().as_str()).collect();
        assert_eq!((keys, guards.len()), (vec!["a", "b"], 2));
        assert!(guards.is_held() && guards.remaining() > Duration::ZERO);
        assert!(guards.get("b").is_some() && guards.get("c").is_none());
        assert!(locks.try_lock_all(["a", "c"]).unwrap().is_none());
        assert!(is_free(locks, "c"), "nothing is held of what was not got");
        assert_eq!(guards.run(|| 7).unwrap(), 7);
        assert!(!guards.lost_within(Duration::ZERO).unwrap());
        assert!(locks.evict("b", None).unwrap());
        guards.lost().unwrap();
        assert!(guards.lost_within(Duration::ZERO).unwrap());
        assert_eq!(kind(guards.run(|| 7)), ErrorKind::Lost);
        assert_eq!(kind(guards.release()), ErrorKind::Lost);
        assert!(is_free(locks, "a"), "the others are released all the same");
    });
}

/// Nobody but the thread of the locks can have renewed it.
#[test]
fn a_lock_is_renewed_while_its_thread_does_something_else() {
    on_each_store(|locks| {
        let ttl = Duration::from_secs(2);
        let guard = locks.with_ttl(ttl).lock("a").unwrap();
        let locked = Instant::now();
        // For longer than the lock would last.
        while locked.elapsed() < 4 * ttl {
            thread::park_timeout(ttl / 100);
            assert!(guard.is_held());
        }
        assert!(!is_free(locks, "a"));
        guard.release().unwrap();
    });
}

#[test]
fn a_loss_is_heard_and_work_that_met_it_is_not_done() {
    on_each_store(|locks| {
        let guard = locks.lock("a").unwrap();
        assert!(!guard.lost_within(Duration::from_millis(50)).unwrap());
        assert_eq!(guard.run(|| 7).unwrap(), 7);
        // It is lost in the middle of the work.
        let lost = guard.run(|| {
            assert!(locks.evict("a", None).unwrap());
            guard.lost()
        });
        assert_eq!(kind(lost), ErrorKind::Lost);
        let begun = AtomicBool::new(false);
        let late = guard.run(|| begun.store(true, Ordering::Relaxed));
        assert_eq!(kind(late), ErrorKind::Lost);
        assert!(
            !begun.into_inner(),
            "what is lost before it begins is not done"
        );
        assert_eq!(kind(guard.release()), ErrorKind::Lost);

        let fixed = locks.with_fixed_lease(Duration::from_millis(300));
        let guard = fixed.lock("a").unwrap();
        guard.lost().unwrap();
        assert!(!guard.is_held());
    });
}

#[test]
fn a_drop_releases_before_it_comes_back() {
    on_each_store(|locks| {
        for _ in 0..20 {
            drop(locks.lock("a").unwrap());
            assert!(is_free(locks, "a"));
        }
        drop(locks.lock_all(["a", "b"]).unwrap());
        assert!(is_free(locks, "a") && is_free(locks, "b"));
    });
}

#[test]
fn a_thread_that_panics_frees_its_lock() {
    on_each_store(|locks| {
        let here = locks.clone();
        let panics = thread::spawn(move || {
            let _guard = here.lock("a").unwrap();
            let _both = here.lock_all(["b", "c"]).unwrap();
            panic!("as it should");
        });
        panics.join().unwrap_err();
        assert!(["a", "b", "c"].iter().all(|key| is_free(locks, key)));
        // And one that goes on.
        let guard = locks.lock("a").unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = guard;
            panic!("as it should");
        }));
        panicked.unwrap_err();
        assert!(is_free(locks, "a"));
    });
}

#[test]
fn many_threads_contend_and_one_at_a_time_has_it() {
    on_each_store(|locks| {
        const THREADS: u32 = 12;
        const ROUNDS: u32 = 10;
        let (inside, count) = (AtomicBool::new(false), AtomicU32::new(0));
        let contend = || {
            let mut last = None;
            for _ in 0..ROUNDS {
                let guard = locks.lock("a").unwrap();
                assert!(!inside.swap(true, Ordering::SeqCst), "two at a time");
                assert!(last < Some(guard.token()));
                last = Some(guard.token());
                // Whoever comes in between would overwrite it.
                let before = count.load(Ordering::Relaxed);
                thread::yield_now();
                count.store(before + 1, Ordering::Relaxed);
                inside.store(false, Ordering::SeqCst);
            }
        };
        thread::scope(|scope| (0..THREADS).for_each(|_| drop(scope.spawn(contend))));
        assert_eq!(count.into_inner(), THREADS * ROUNDS);
    });
}

#[test]
fn a_waiting_thread_is_woken_by_a_release() {
    on_each_store(|locks| {
        let guard = locks.lock("a").unwrap();
        thread::scope(|scope| {
            let (sender, entering) = mpsc::channel();
            let waiter = scope.spawn(move || {
                sender.send(()).unwrap();
                locks.lock("a")
            });
            entering.recv().unwrap();
            let first = guard.token();
            guard.release().unwrap();
            assert!(waiter.join().unwrap().unwrap().token() > first);
        });
    });
}

#[test]
fn closing_ends_everything() {
    on_each_store(|locks| {
        let guard = locks.lock("a").unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| locks.lock("a"));
            let hears = scope.spawn(|| guard.lost());
            locks.close().unwrap();
            hears.join().unwrap().unwrap();
            assert_eq!(kind(waiter.join().unwrap()), ErrorKind::Closed);
        });
        assert_eq!(kind(locks.lock("b")), ErrorKind::Closed);
        assert!(!guard.is_held());
    });
}

/// Nothing that blocks is done there, and nothing panics; all that is asked is asked of `locks`.
fn is_refused(locks: &Locks, guard: Guard) {
    let refused = |result: Result<()>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("leasehold::open"), "{error}");
    };
    refused(blocking::open("memory:").map(drop));
    refused(blocking::choose([], ["memory:"]).map(drop));
    refused(blocking::connect(async { Ok(Memory::new()) }).map(drop));
    refused(Locks::new(Memory::new()).map(drop));
    refused(locks.lock("b").map(drop));
    refused(locks.try_lock("b").map(drop));
    refused(locks.lock_all(["b"]).map(drop));
    refused(locks.owner().try_lock("b").map(drop));
    refused(locks.holder("b").map(drop));
    refused(locks.evict("b", None).map(drop));
    refused(locks.examine().map(drop));
    refused(locks.close());
    refused(guard.lost());
    refused(guard.lost_within(Duration::ZERO).map(drop));
    // What only looks is allowed.
    assert!(guard.is_held() && guard.remaining() > Duration::ZERO);
    assert_eq!(guard.run(|| 7).unwrap(), 7);
    locks.require([]).unwrap();
    refused(guard.release());
}

/// The different ways in which a thread comes to poll an async task.
fn in_each_kind_of_task(test: impl Fn() + Clone + Send + 'static) {
    let single = runtime::Builder::new_current_thread().build().unwrap();
    let many = runtime::Builder::new_multi_thread();
    let many = { many }.worker_threads(2).build().unwrap();
    for runtime in [&single, &many] {
        runtime.block_on(async { test() });
        let task = test.clone();
        runtime
            .block_on(runtime.spawn(async move { task() }))
            .unwrap();
        let local = tokio::task::LocalSet::new();
        let task = test.clone();
        local
            .block_on(runtime, async {
                tokio::task::spawn_local(async move { task() }).await
            })
            .unwrap();
    }
}

#[test]
fn inside_of_async_a_call_is_refused_and_a_drop_goes_through() {
    on_each_store(|locks| {
        let locks = locks.clone();
        in_each_kind_of_task({
            let locks = locks.clone();
            move || {
                let here = locks.clone();
                // Whoever locks is a thread.
                let guard = thread::spawn(move || here.lock("a")).join().unwrap();
                is_refused(&locks, guard.unwrap());
                let here = locks.clone();
                let both = thread::spawn(move || here.lock_all(["a", "b"])).join();
                drop(both.unwrap().unwrap());
            }
        });
        // They are free, and at once: the ttl is half a minute, and so many were taken since.
        assert!(locks.lock("a").unwrap().is_held());
        assert!(locks.lock("b").unwrap().is_held());
    });
}

/// A task may also have no budget: it blocks then, and nothing panics.
#[test]
fn a_task_without_a_budget_is_served() {
    let runtime = runtime::Builder::new_current_thread().build().unwrap();
    let task = tokio::task::unconstrained(async {
        let locks = memory();
        let guard = locks.lock("a").unwrap();
        assert!(!is_free(&locks, "a"));
        drop(guard);
        assert!(is_free(&locks, "a"));
    });
    runtime.block_on(task);
}

/// The task that was refused goes on, though its budget is used up.
#[test]
fn a_task_that_was_refused_goes_on() {
    let runtime = runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        assert_eq!(kind(blocking::open("memory:")), ErrorKind::Unsupported);
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        sender.send(7).unwrap();
        assert_eq!(receiver.recv().await, Some(7));
    });
}

#[test]
fn where_a_task_may_block_the_calls_work() {
    on_each_store(|locks| {
        let work = |locks: &Locks| {
            let guard = locks.lock("a").unwrap();
            assert!(!is_free(locks, "a"));
            assert_eq!(guard.run(|| 7).unwrap(), 7);
            drop(guard);
            assert!(is_free(locks, "a"));
            let opened = blocking::open("memory:").unwrap();
            drop(opened.lock("a").unwrap());
        };
        let single = runtime::Builder::new_current_thread().build().unwrap();
        let many = runtime::Runtime::new().unwrap();
        for runtime in [&single, &many] {
            let here = locks.clone();
            let blocking = runtime.spawn_blocking(move || work(&here));
            runtime.block_on(blocking).unwrap();
            let _entered = runtime.enter();
            work(locks);
        }
        let here = locks.clone();
        let task = many.spawn(async move { tokio::task::block_in_place(|| work(&here)) });
        many.block_on(task).unwrap();
    });
}

/// A backend that is slow to release, and tells when it has, when it is closed and when it is gone.
#[derive(Debug)]
struct Telling {
    memory: Memory,
    tell: mpsc::Sender<&'static str>,
}

impl Telling {
    fn new() -> (Self, mpsc::Receiver<&'static str>) {
        let (tell, told) = mpsc::channel();
        let memory = Memory::new();
        (Self { memory, tell }, told)
    }
}

#[async_trait]
impl Backend for Telling {
    fn guarantees(&self) -> Guarantees {
        self.memory.guarantees()
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let tell = self.tell.clone();
        let hold = self.memory.acquire(claim).await?;
        Ok(hold.map(|hold| Box::new(Slow { hold, tell }) as Box<dyn Hold>))
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        self.memory.holder(key).await
    }

    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        self.memory.evict(key, grant).await
    }

    async fn close(&self) -> Result<()> {
        self.tell.send("closed").unwrap();
        Ok(())
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        self.tell.send("gone").ok();
    }
}

#[derive(Debug)]
struct Slow {
    hold: Box<dyn Hold>,
    tell: mpsc::Sender<&'static str>,
}

#[async_trait]
impl Hold for Slow {
    fn token(&self) -> Token {
        self.hold.token()
    }

    fn validity(&self) -> &Validity {
        self.hold.validity()
    }

    async fn renew(&mut self) -> Result<()> {
        self.hold.renew().await
    }

    async fn release(&mut self) -> Result<()> {
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.hold.release().await?;
        self.tell.send("released").unwrap();
        Ok(())
    }
}

#[test]
fn a_drop_waits_for_the_release() {
    let (telling, told) = Telling::new();
    let locks = blocking::connect(async { Ok(telling) }).unwrap();
    drop(locks.lock("a").unwrap());
    assert_eq!(told.try_recv(), Ok("released"));
    drop(locks.lock_all(["a", "b"]).unwrap());
    assert_eq!([told.try_recv(), told.try_recv()], [Ok("released"); 2]);
    // Also while the thread panics.
    let guard = locks.lock("a").unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _guard = guard;
        panic!("as it should");
    }));
    panicked.unwrap_err();
    assert_eq!(told.try_recv(), Ok("released"));
}

/// Whatever is left last keeps everything alive, wherever it is dropped.
#[test]
fn what_is_left_last_ends_it_all() {
    type Take = fn(&Locks) -> Box<dyn Send>;
    let left: [(Take, usize); 4] = [
        (|locks| Box::new(locks.clone()), 0),
        (|locks| Box::new(locks.owner()), 0),
        (|locks| Box::new(locks.lock("a").unwrap()), 1),
        (|locks| Box::new(locks.lock_all(["a", "b"]).unwrap()), 2),
    ];
    for (left, held) in left {
        for in_async in [false, true] {
            let (telling, told) = Telling::new();
            let locks = blocking::connect(async { Ok(telling) }).unwrap();
            let last = left(&locks);
            drop(locks);
            assert_eq!(told.try_recv(), Err(mpsc::TryRecvError::Empty));
            if in_async {
                let runtime = runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(async { drop(last) });
            } else {
                drop(last);
            }
            for _ in 0..held {
                assert_eq!(told.recv_timeout(LIMIT), Ok("released"));
            }
            assert_eq!(told.recv_timeout(LIMIT), Ok("closed"));
            assert_eq!(told.recv_timeout(LIMIT), Ok("gone"));
            assert!(told.recv_timeout(LIMIT).is_err(), "nobody tells any more");
        }
    }
}

/// The store that was not opened leaves no thread that keeps it.
#[test]
fn what_cannot_be_opened_says_why() {
    let kept = Arc::new(());
    let here = kept.clone();
    let failed = blocking::connect(async move {
        let _here = here;
        Err::<Memory, _>(Error::new(ErrorKind::Unavailable, "away"))
    });
    assert_eq!(kind(failed), ErrorKind::Unavailable);
    assert_eq!(Arc::strong_count(&kept), 1);
    assert_eq!(kind(blocking::open("memory:?tll=1s")), ErrorKind::Invalid);
    let none = blocking::choose([Need::Consensus], ["memory:"]);
    assert_eq!(kind(none), ErrorKind::Unsupported);
}
