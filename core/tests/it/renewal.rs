//! What keeps a lock alive, and what ends it.

use std::time::Duration;

use leasehold_core::{Backend, ErrorKind, Key, Locks};
use tokio::time::{Instant, sleep};

use crate::support::{Fault, Faulty};

const TTL: Duration = Duration::from_secs(30);

fn store() -> (Faulty, Locks) {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    (store, locks)
}

#[tokio::test(start_paused = true)]
async fn a_lock_outlives_many_ttls_at_three_renewals_each() {
    let (store, locks) = store();
    let guard = locks.lock("a").await.unwrap();
    sleep(TTL * 20).await;
    assert!(guard.is_held());
    let renewals = store.script.count("renew");
    assert!(
        (59..=64).contains(&renewals),
        "{renewals} renewals in 20 ttls"
    );
}

#[tokio::test(start_paused = true)]
async fn two_failed_renewals_lose_nothing() {
    let (store, locks) = store();
    store.script.renewals(&[Fault::Refused, Fault::Silence]);
    let guard = locks.lock("a").await.unwrap();
    sleep(TTL * 3).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_silent_store_loses_the_lock_before_it_lets_go() {
    let (store, locks) = store();
    store.script.renewals(&[Fault::Silence; 100]);
    let guard = locks.lock("a").await.unwrap();
    let start = Instant::now();
    guard.lost().await;
    let after = start.elapsed();
    assert!(after < TTL && after > TTL * 9 / 10, "lost after {after:?}");
    let key = Key::new("a").unwrap();
    assert!(
        store.holder(&key).await.unwrap().is_some(),
        "the store still has it"
    );
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_at_once_is_not_stormed() {
    let (store, locks) = store();
    store.script.renewals(&[Fault::Refused; 1000]);
    let guard = locks.lock("a").await.unwrap();
    guard.lost().await;
    let renewals = store.script.count("renew");
    assert!((3..=60).contains(&renewals), "{renewals} attempts");
}

#[tokio::test(start_paused = true)]
async fn nothing_renews_after_a_loss_a_release_or_a_drop() {
    let (store, locks) = store();
    let lost = locks.lock("lost").await.unwrap();
    let released = locks.lock("released").await.unwrap();
    let dropped = locks.lock("dropped").await.unwrap();
    assert!(locks.evict("lost", None).await.unwrap());
    lost.lost().await;
    released.release().await.unwrap();
    drop(dropped);
    let before = store.script.count("renew");
    sleep(TTL * 5).await;
    assert_eq!(store.script.count("renew"), before);
}

#[tokio::test(start_paused = true)]
async fn a_fixed_lease_is_never_renewed() {
    let (store, locks) = store();
    let guard = locks.with_fixed_lease(TTL / 3).lock("a").await.unwrap();
    let start = Instant::now();
    guard.lost().await;
    assert!(start.elapsed() <= TTL / 3);
    assert_eq!(store.script.count("renew"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_maximum_hold_ends_in_time_and_frees_the_lock_within_a_ttl() {
    let (store, locks) = store();
    let max = TTL * 10;
    let guard = locks.with_max_hold(max).lock("a").await.unwrap();
    let start = Instant::now();
    guard.lost().await;
    assert!(start.elapsed() >= max && start.elapsed() < max + TTL / 10);
    let renewals = store.script.count("renew");
    let _next = locks.lock("a").await.unwrap();
    assert!(start.elapsed() <= max + TTL);
    assert_eq!(
        store.script.count("renew"),
        renewals,
        "nothing renews towards the maximum"
    );
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_late_is_confirmed_by_one_renewal() {
    let (store, locks) = store();
    store
        .script
        .grants_late_by
        .lock()
        .unwrap()
        .push_back(TTL * 2 / 3);
    let guard = locks.lock("a").await.unwrap();
    assert_eq!(store.script.count("renew"), 1);
    assert!(guard.remaining() > TTL * 9 / 10);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_comes_too_late_is_claimed_again_with_a_new_id() {
    let (store, locks) = store();
    store
        .script
        .grants_late_by
        .lock()
        .unwrap()
        .push_back(TTL * 2);
    let guard = locks.lock("a").await.unwrap();
    assert!(guard.is_held());
    let ids = store.script.ids.lock().unwrap().clone();
    assert_eq!(ids.len(), 2);
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test(start_paused = true)]
async fn a_confirmation_that_says_lost_goes_back_to_waiting() {
    let (store, locks) = store();
    store
        .script
        .grants_late_by
        .lock()
        .unwrap()
        .push_back(TTL * 2 / 3);
    let waiting = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock("a").await }
    });
    sleep(TTL / 10).await;
    // The grant is still on its way to its process: another takes the lock meanwhile.
    let key = Key::new("a").unwrap();
    assert!(store.evict(&key, None).await.unwrap());
    let other = Locks::new(store.memory.clone())
        .try_lock("a")
        .await
        .unwrap();
    sleep(TTL * 2).await;
    assert!(!waiting.is_finished(), "granted while another holds it");
    drop(other);
    assert!(waiting.await.unwrap().unwrap().is_held());
}
