//! Requests of one client that meet travel as one, and each is answered as if it were alone.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use std::collections::HashSet;
use std::future::poll_fn;
use std::task::Poll;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, Claim, ErrorKind, Hold};
use leasehold_redis::{Redis, RedisOptions};
use support::*;
use tokio::task::JoinSet;

/// Acquires that meet: all of them leave before the first is answered.
async fn together(client: &Redis, claims: impl IntoIterator<Item = Claim>) -> Vec<Granted> {
    let mut asking = JoinSet::new();
    for (n, claim) in claims.into_iter().enumerate() {
        let client = client.clone();
        asking.spawn(async move { (n, client.acquire(&claim).await) });
    }
    let mut answers = within(SOON, "all are answered", asking.join_all()).await;
    answers.sort_by_key(|(n, _)| *n);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

fn held(answers: Vec<Granted>) -> Vec<Box<dyn Hold>> {
    answers
        .into_iter()
        .map(|answer| answer.unwrap().unwrap())
        .collect()
}

#[tokio::test]
async fn many_locks_are_taken_renewed_and_freed_in_few_requests() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let mut raw = raw(&server).await;
    raw.run("CONFIG RESETSTAT").await;

    let claims = (0..300).map(|n| claim(&format!("k{n}"), LONG));
    let mut holds = held(together(&client, claims).await);
    let tokens: HashSet<_> = holds.iter().map(|hold| hold.token()).collect();
    assert_eq!(tokens.len(), 300);

    let mut renewing = JoinSet::new();
    for mut hold in holds.drain(..) {
        renewing.spawn(async move {
            hold.renew().await.unwrap();
            hold
        });
    }
    let mut freeing = JoinSet::new();
    for mut hold in renewing.join_all().await {
        freeing.spawn(async move { hold.release().await.unwrap() });
    }
    freeing.join_all().await;

    // Four go straight, and at most 128 travel as one: of each kind 4 + 3.
    assert_eq!(raw.script_calls().await, 3 * 7);
    assert_eq!(raw.get::<usize>("DBSIZE").await, 1, "the counter is left");
}

#[tokio::test]
async fn of_claims_for_one_lock_in_one_request_one_is_granted_and_the_others_queue_in_order() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let mut asking = Vec::new();
    for n in 0..50 {
        asking.push((n, spawn(&client, waiting("a", LONG))));
    }
    let mut last = None;
    for (n, waiter) in asking {
        let mut hold = served(SOON, waiter).await;
        assert!(last < Some(hold.token()), "{n} came out of turn");
        last = Some(hold.token());
        hold.release().await.unwrap();
    }
}

/// They leave in one request, mixed.
#[tokio::test]
async fn calls_of_all_kinds_are_each_given_their_own_answer() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let other = connect(&server).await;
    let claims = |names: std::ops::Range<usize>| names.map(|n| claim(&format!("k{n}"), LONG));
    let held_here = held(together(&client, claims(0..40)).await);
    let _held_there = held(together(&other, claims(40..60)).await);
    let mut raw = raw(&server).await;
    raw.run("CONFIG RESETSTAT").await;

    let mut running = JoinSet::new();
    let mut holds = held_here.into_iter();
    for n in 0..20 {
        let (mut renewed, mut freed) = (holds.next().unwrap(), holds.next().unwrap());
        running.spawn(async move {
            renewed.renew().await.unwrap();
            Some(renewed)
        });
        running.spawn(async move {
            freed.release().await.unwrap();
            None
        });
        for (name, free) in [(40 + n, false), (60 + n, true)] {
            let (client, claim) = (client.clone(), claim(&format!("k{name}"), LONG));
            running.spawn(async move {
                let hold = client.acquire(&claim).await.unwrap();
                assert_eq!(hold.is_some(), free, "k{name}");
                hold
            });
        }
    }
    let _held = within(SOON, "all are answered", running.join_all()).await;
    // Four went straight.
    assert_eq!(raw.script_calls().await, 5);
    for n in 0..80 {
        let freed = n < 40 && n % 2 == 1;
        assert_eq!(is_taken(&other, &format!("k{n}")).await, !freed, "k{n}");
    }
}

/// As it is in a `select!` that is busy with another branch.
#[tokio::test]
async fn claims_whose_futures_are_left_alone_hold_up_nobody() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let claims = ["a", "b", "c", "d"].map(|name| claim(name, LONG));
    let mut left_alone = claims.each_ref().map(|claim| client.acquire(claim));
    for acquire in &mut left_alone {
        let once = poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx)));
        assert!(once.await.is_pending());
    }
    let mut hold = granted(&client, &claim("e", LONG)).await;
    within(SOON, "an answer", hold.release()).await.unwrap();
    for acquire in left_alone {
        within(SOON, "its own answer", acquire).await.unwrap();
    }
}

#[tokio::test]
async fn tries_for_one_lock_in_one_request_are_told_apart() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    // Those that go straight are about others, so that it is free when they leave.
    let straight = ["b", "c", "d", "e"].into_iter();
    let names = straight.chain(std::iter::repeat_n("a", 46));
    let answers = together(&client, names.map(|name| claim(name, LONG))).await;
    let granted = answers.into_iter().filter_map(|answer| answer.unwrap());
    assert_eq!(granted.count(), 4 + 1);
}

#[tokio::test]
async fn what_goes_wrong_with_one_lock_leaves_its_neighbours_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let mut raw = raw(&server).await;
    raw.run("RPUSH lock:k7 theirs").await;
    raw.run("SET lock:k8 theirs").await;
    raw.run("RPUSH lock:leasehold:queue:k9 theirs").await;

    let claims = (0..20).map(|n| claim(&format!("k{n}"), LONG));
    for (n, answer) in together(&client, claims).await.into_iter().enumerate() {
        match n {
            7 | 9 => assert_eq!(failed(answer).kind(), ErrorKind::Invalid, "{n}"),
            8 => assert!(answer.unwrap().is_none()),
            _ => assert!(answer.unwrap().is_some(), "{n}"),
        }
    }
    assert_eq!(
        raw.get::<Vec<String>>("LRANGE lock:k7 0 -1").await,
        ["theirs"]
    );
}

#[tokio::test]
async fn a_right_that_is_missing_for_one_lock_leaves_its_neighbours_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let mut raw = raw(&server).await;
    raw.run("ACL SETUSER locks on >secret +@all &lock:* ~lock:leasehold:* ~lock:a* ~lock:b*")
        .await;
    let options = RedisOptions::new(server.url())
        .unwrap()
        .with_username("locks")
        .with_password("secret");
    let client = Redis::connect_with(options).await.unwrap();
    let names = (0..20).map(|n| match n {
        7 => "z7".to_owned(),
        n => format!("a{n}"),
    });
    let claims = names.map(|name| claim(&name, LONG));
    for (n, answer) in together(&client, claims).await.into_iter().enumerate() {
        match n {
            7 => assert_eq!(failed(answer).kind(), ErrorKind::Other),
            _ => assert!(answer.unwrap().is_some(), "{n}"),
        }
    }
}

#[tokio::test]
async fn tokens_rise_though_the_counter_was_lost_before_they_were_asked_for() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let mut raw = raw(&server).await;
    let before = granted(&client, &claim("before", LONG)).await.token();
    raw.run("DEL lock:leasehold:token").await;
    let mut holds = held(together(&client, (0..20).map(|n| claim(&format!("k{n}"), LONG))).await);
    assert!(holds.iter().all(|hold| hold.token() > before));

    // The same where what goes straight does not touch the counter.
    let before = holds.iter().map(|hold| hold.token()).max().unwrap();
    raw.run("DEL lock:leasehold:token").await;
    let mut straight = JoinSet::new();
    for mut hold in holds.drain(..4) {
        straight.spawn(async move { hold.renew().await.unwrap() });
    }
    let holds = held(together(&client, (20..40).map(|n| claim(&format!("k{n}"), LONG))).await);
    within(SOON, "they are renewed", straight.join_all()).await;
    assert_eq!(holds.len(), 20);
    assert!(holds.iter().all(|hold| hold.token() > before));
}

/// The claim and what withdraws it travel in that order, however they travel.
#[tokio::test]
async fn a_claim_that_is_dropped_while_it_collects_leaves_nothing() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let client = connect(&server).await;
    let other = connect(&server).await;
    let mut kept: Vec<_> = (0..5)
        .map(|n| spawn(&client, claim(&format!("k{n}"), LONG)))
        .collect();
    let claim = claim("a", LONG);
    let mut dropped = client.acquire(&claim);
    tokio::task::yield_now().await;
    assert!(once(&mut dropped).await.is_none());
    drop(dropped);
    for kept in kept.drain(..) {
        let _hold = served(SOON, kept).await;
    }
    let free = async {
        while is_taken(&other, "a").await {
            tokio::task::yield_now().await;
        }
    };
    within(SOON, "it is free", free).await;
}
