//! A release goes through, whatever becomes of the guard, its future or its runtime.

use std::time::Duration;

use leasehold_core::{Backend, ErrorKind, Guard, Key, Locks};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::{sleep, timeout};

use crate::support::{Fault, Faulty};

const TTL: Duration = Duration::from_secs(30);

fn store() -> (Faulty, Locks) {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    (store, locks)
}

async fn is_free(store: &Faulty) -> bool {
    let key = Key::new("a").unwrap();
    store.holder(&key).await.unwrap().is_none()
}

async fn becomes_free(store: &Faulty) {
    let freed = async {
        while !is_free(store).await {
            sleep(TTL / 1000).await;
        }
    };
    timeout(TTL * 9 / 10, freed)
        .await
        .expect("freed before its ttl is over");
}

#[tokio::test(start_paused = true)]
async fn a_drop_frees_at_once_on_a_quick_store() {
    let (_store, locks) = store();
    drop(locks.lock("a").await.unwrap());
    assert!(locks.try_lock("a").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_failed_release_is_repeated_in_the_background() {
    for fault in [Fault::Refused, Fault::Silence] {
        let (store, locks) = store();
        store.script.releases(&[fault, fault]);
        let guard = locks.lock("a").await.unwrap();
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        becomes_free(&store).await;
    }
}

/// However long a request may take: once the lock has ended there is nothing to be released.
#[tokio::test(start_paused = true)]
async fn a_release_that_nobody_answers_is_given_up() {
    let (store, locks) = store();
    let locks = locks.with_request_limit(Duration::MAX);
    store.script.releases(&[Fault::Silence]);
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let guard = locks.lock("a").await.unwrap();
    let before = tasks();
    drop(guard);
    assert_eq!(tasks(), before + 1);
    sleep(TTL * 2).await;
    assert!(tasks() <= before);
}

#[tokio::test(start_paused = true)]
async fn a_release_dropped_half_way_goes_through() {
    let (store, locks) = store();
    store.script.releases(&[Fault::Silence]);
    let guard = locks.lock("a").await.unwrap();
    assert!(timeout(TTL / 100, guard.release()).await.is_err());
    becomes_free(&store).await;
    assert_eq!(store.script.count("renew"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_was_never_polled_is_the_drop_of_the_guard() {
    let (store, locks) = store();
    let guard = locks.lock("a").await.unwrap();
    drop(guard.release());
    assert!(is_free(&store).await);
}

#[tokio::test(start_paused = true)]
async fn the_retry_of_a_release_leaves_the_next_grant_alone() {
    let (store, locks) = store();
    store.script.releases(&[Fault::ReplyLost]);
    let guard = locks.lock("a").await.unwrap();
    assert_eq!(
        guard.release().await.unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    let next = locks
        .try_lock("a")
        .await
        .unwrap()
        .expect("the store let go");
    sleep(TTL).await;
    assert!(store.script.count("release") > 1, "it was retried");
    assert!(next.is_held());
    next.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_release_under_a_renewal_that_hangs_does_not_wait_for_it() {
    let (store, locks) = store();
    store.script.renewals(&[Fault::Silence; 10]);
    let guard = locks.lock("a").await.unwrap();
    while store.script.count("renew") == 0 {
        sleep(TTL / 100).await;
    }
    timeout(TTL / 100, guard.release())
        .await
        .expect("at once")
        .unwrap();
    assert!(is_free(&store).await);
}

#[tokio::test(start_paused = true)]
async fn a_release_of_an_evicted_lock_says_lost() {
    let (_store, locks) = store();
    let guard = locks.lock("a").await.unwrap();
    assert!(locks.evict("a", None).await.unwrap());
    let next = locks.lock("a").await.unwrap();
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.is_held());
}

fn runtime() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

fn locked_in(runtime: &Runtime, locks: &Locks) -> Guard {
    runtime.block_on(locks.lock("a")).unwrap()
}

#[test]
fn a_guard_dropped_outside_of_any_runtime_is_released() {
    let (store, locks) = store();
    let runtime = runtime();
    drop(locked_in(&runtime, &locks));
    assert!(runtime.block_on(is_free(&store)));
}

#[test]
fn a_guard_released_under_another_executor_is_released() {
    let (store, locks) = store();
    let runtime = runtime();
    let guard = locked_in(&runtime, &locks);
    let mut release = Box::pin(guard.release());
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let answer = release.as_mut().poll(&mut context);
    assert!(matches!(answer, std::task::Poll::Ready(Ok(()))));
    assert!(runtime.block_on(is_free(&store)));
}

#[test]
fn a_guard_that_outlives_its_runtime_is_dropped_without_panic() {
    let (store, locks) = store();
    let first = runtime();
    store.script.releases(&[Fault::Silence; 10]);
    let guard = locked_in(&first, &locks);
    drop(first);
    drop(guard);
    let second = runtime();
    let guard = second.block_on(locks.lock("b")).unwrap();
    drop(second);
    std::thread::spawn(move || drop(guard)).join().unwrap();
}

#[test]
fn a_runtime_that_ends_with_guards_in_its_tasks_does_not_panic() {
    let (_store, locks) = store();
    for _round in 0..20 {
        let runtime = runtime();
        let guard = runtime.block_on(locks.try_lock("a")).unwrap();
        let guard = guard.expect("freed by the round before");
        drop(runtime.spawn(async move { guard.lost().await }));
        drop(runtime);
    }
}

#[test]
fn a_guard_in_a_thread_local_is_released_without_panic() {
    thread_local! {
        static GUARD: std::cell::RefCell<Option<Guard>> = const { std::cell::RefCell::new(None) };
    }
    let (store, locks) = store();
    let runtime = runtime();
    for tokio_is_gone_first in [false, true] {
        let guard = locked_in(&runtime, &locks);
        let ending = std::thread::spawn(move || {
            GUARD.set(Some(guard));
            if tokio_is_gone_first {
                // What a thread used last it destroys first.
                drop(tokio::runtime::Handle::try_current());
            }
        });
        ending.join().unwrap();
        runtime.block_on(becomes_free(&store));
    }
}

#[test]
fn a_panicking_task_frees_its_lock() {
    let (store, locks) = store();
    let runtime = runtime();
    let guard = locked_in(&runtime, &locks);
    let task = runtime.spawn(async move {
        let _guard = guard;
        panic!("on purpose");
    });
    assert!(runtime.block_on(task).unwrap_err().is_panic());
    runtime.block_on(becomes_free(&store));
}

#[test]
fn a_lock_taken_on_a_second_runtime_outlives_the_first() {
    let store = Faulty::default();
    let locks = Locks::new(store).with_ttl(Duration::from_millis(300));
    let (first, second) = (runtime(), runtime());
    drop(locked_in(&first, &locks));
    let guard = locked_in(&second, &locks);
    drop(first);
    second.block_on(async { sleep(Duration::from_millis(900)).await });
    assert!(guard.is_held());
}

#[test]
fn outside_of_a_runtime_an_acquire_is_refused() {
    let (_store, locks) = store();
    let mut acquire = Box::pin(locks.lock("a"));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = acquire.as_mut().poll(&mut context) else {
        panic!("not refused");
    };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}
