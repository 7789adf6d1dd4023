//! Re-entry goes by owner.

use std::time::Duration;

use leasehold_core::{ErrorKind, Locks};
use tokio::time::{sleep, timeout};

use crate::support::{Fault, Faulty};

const TTL: Duration = Duration::from_secs(30);

fn store() -> (Faulty, Locks) {
    let store = Faulty::default();
    let locks = Locks::new(store.clone()).with_ttl(TTL);
    (store, locks)
}

#[tokio::test(start_paused = true)]
async fn a_reentry_asks_nobody_and_has_the_same_token() {
    let (store, locks) = store();
    let me = locks.owner();
    let a = me.lock("a").await.unwrap();
    let b = me.clone().lock("a").await.unwrap();
    let c = me.try_lock("a").await.unwrap().unwrap();
    assert_eq!(store.script.count("acquire"), 1);
    assert_eq!((a.token(), b.token()), (b.token(), c.token()));
    a.release().await.unwrap();
    drop(c);
    assert!(locks.try_lock("a").await.unwrap().is_none());
    b.release().await.unwrap();
    assert!(locks.try_lock("a").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn tasks_of_one_owner_share_its_first_acquire() {
    let (store, locks) = store();
    let other = locks.lock("a").await.unwrap();
    let me = locks.owner();
    let task = || {
        let me = me.clone();
        tokio::spawn(async move { me.lock("a").await })
    };
    let (first, second, third) = (task(), task(), task());
    sleep(TTL / 100).await;
    assert_eq!(store.script.count("acquire"), 2, "only one of them asks");
    assert!(
        me.try_lock("a").await.unwrap().is_none(),
        "one is under way"
    );
    first.abort();
    drop(other);
    let (second, third) = (
        second.await.unwrap().unwrap(),
        third.await.unwrap().unwrap(),
    );
    assert_eq!(second.token(), third.token());
}

#[tokio::test(start_paused = true)]
async fn a_second_acquire_keeps_its_own_wait() {
    let (_store, locks) = store();
    let _other = locks.lock("a").await.unwrap();
    let patient = locks.with_wait(TTL).owner();
    let mut first = Box::pin(patient.lock("a"));
    assert!(timeout(TTL / 100, first.as_mut()).await.is_err());
    let second = timeout(TTL * 2, patient.lock("a"))
        .await
        .expect("its wait is one ttl");
    assert_eq!(second.unwrap_err().kind(), ErrorKind::Timeout);
}

#[tokio::test(start_paused = true)]
async fn a_release_under_way_is_waited_for() {
    let (store, locks) = store();
    let me = locks.owner();
    let guard = me.lock("a").await.unwrap();
    let token = guard.token();
    store.script.releases(&[Fault::Silence]);
    assert!(timeout(TTL / 100, guard.release()).await.is_err());
    assert!(me.try_lock("a").await.unwrap().is_none());
    let again = me.lock("a").await.unwrap();
    assert!(again.token() > token, "a new grant");
}

#[tokio::test(start_paused = true)]
async fn a_lost_hold_loses_all_its_guards_and_leaves_the_next_alone() {
    let (_store, locks) = store();
    let me = locks.owner();
    let (a, b) = (me.lock("a").await.unwrap(), me.lock("a").await.unwrap());
    assert!(locks.evict("a", None).await.unwrap());
    a.lost().await;
    b.lost().await;
    let again = me.lock("a").await.unwrap();
    assert!(again.token() > a.token());
    assert_eq!(a.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(b.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(again.is_held());
    again.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn two_owners_exclude_each_other() {
    let (_store, locks) = store();
    let (one, other) = (locks.owner(), locks.owner());
    let _guard = one.lock("a").await.unwrap();
    assert!(other.try_lock("a").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn all_keys_or_none() {
    let (_store, locks) = store();
    let c = locks.lock("c").await.unwrap();
    assert!(locks.try_lock_all(["b", "c", "a"]).await.unwrap().is_none());
    let all = locks
        .with_wait(TTL)
        .lock_all(["b", "a", "b"])
        .await
        .unwrap();
    let keys: Vec<_> = all.iter().map(|guard| guard.key().as_str()).collect();
    assert_eq!(keys, ["a", "b"]);
    let waiting = locks.with_wait(TTL);
    let error = waiting.lock_all(["a", "c"]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    all.release().await.unwrap();
    c.release().await.unwrap();
    let me = locks.owner();
    let both = me.lock_all(["a", "c"]).await.unwrap();
    let again = me.lock_all(["c", "d"]).await.unwrap();
    assert_eq!(
        both.get("c").unwrap().token(),
        again.get("c").unwrap().token()
    );
}

#[tokio::test(start_paused = true)]
async fn a_key_lost_while_others_are_waited_for_frees_all() {
    let (_store, locks) = store();
    let _b = locks.lock("b").await.unwrap();
    let gathering = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock_all(["a", "b"]).await }
    });
    sleep(TTL / 100).await;
    assert!(locks.evict("a", None).await.unwrap());
    let error = gathering.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(locks.try_lock("a").await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn any_lost_is_lost() {
    let (_store, locks) = store();
    let all = locks.lock_all(["a", "b"]).await.unwrap();
    let work = all.run(std::future::pending::<()>());
    let evict = async {
        sleep(TTL).await;
        locks.evict("b", None).await.unwrap()
    };
    let (outcome, evicted) = tokio::join!(work, evict);
    assert!(evicted);
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Lost);
    assert!(!all.is_held());
}
