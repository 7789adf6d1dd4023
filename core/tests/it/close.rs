//! The end of all clones.

use std::time::Duration;

use leasehold_core::{ErrorKind, Locks};
use tokio::time::{sleep, timeout};

use crate::support::{Fault, Faulty};

const TTL: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn closing_ends_guards_waiters_and_owners_and_frees_everything() {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    let (me, clone) = (locks.owner(), locks.clone());
    let a = me.lock("a").await.unwrap();
    let _b = clone.lock("b").await.unwrap();
    let waiting = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock("a").await }
    });
    let mine = tokio::spawn({
        let me = locks.owner();
        async move { me.lock("b").await }
    });
    sleep(TTL / 100).await;

    clone.close().await.unwrap();

    a.lost().await;
    assert_eq!(
        waiting.await.unwrap().unwrap_err().kind(),
        ErrorKind::Closed
    );
    assert_eq!(mine.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    for answer in [locks.lock("c").await, me.lock("a").await] {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Closed);
    }
    let others = Locks::new(store.memory);
    assert!(others.try_lock_all(["a", "b"]).await.unwrap().is_some());
    assert_eq!(a.release().await.unwrap_err().kind(), ErrorKind::Lost);
    locks.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn closing_waits_for_a_release_under_way_and_repeats_failed_ones() {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    store
        .script
        .releases(&[Fault::Silence, Fault::Refused, Fault::Silence]);
    let a = locks.lock("a").await.unwrap();
    let _b = locks.lock("b").await.unwrap();
    assert!(timeout(TTL / 100, a.release()).await.is_err());
    locks.close().await.unwrap();
    let others = Locks::new(store.memory);
    assert!(others.try_lock_all(["a", "b"]).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_does_not_hold_the_close_up_for_long() {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    store.script.releases(&[Fault::Silence; 1000]);
    let _guard = locks.lock("a").await.unwrap();
    let closing = timeout(TTL * 2, locks.close()).await.expect("bounded");
    assert_eq!(closing.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn a_close_that_is_dropped_goes_on_in_the_background() {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    store.script.releases(&[Fault::Silence]);
    let _guard = locks.lock("a").await.unwrap();
    assert!(timeout(TTL / 100, locks.close()).await.is_err());
    let others = Locks::new(store.memory);
    assert!(others.with_wait(TTL / 2).lock("a").await.is_ok());
    locks.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn closing_keeps_its_time_where_requests_have_all_the_time() {
    for is_held in [true, false] {
        let store = Faulty::default();
        let locks = Locks::new(store.clone()).with_ttl(TTL);
        store.script.releases(&[Fault::Silence; 1000]);
        let patient = locks.with_request_limit(Duration::MAX);
        let _held = patient.lock("a").await.ok().filter(|_guard| is_held);
        let closing = timeout(TTL * 2, locks.close()).await.expect("bounded");
        assert_eq!(closing.unwrap_err().kind(), ErrorKind::Unavailable);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_panics_does_not_end_the_close() {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    store.script.releases(&[Fault::Panic]);
    let _guards = locks.lock_all(["a", "b"]).await.unwrap();
    locks.close().await.unwrap();
    let others = Locks::new(store.memory);
    let both = others.with_wait(TTL).lock_all(["a", "b"]).await;
    assert!(both.is_ok());
}
