//! Calls of one client that meet, in one statement.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // the helpers are parts of tests

mod support;

use leasehold_conformance::Control as _;
use leasehold_conformance::fixtures::postgres::PostgresServer;
use leasehold_core::{ErrorKind, Guard, Locks, Result};
use leasehold_postgres::{KeyForm, Postgres};
use support::{HELD, ask, foreign, locks, options, patient, run, server, soon, until};
use tokio::task::{JoinHandle, JoinSet, yield_now};

/// What a statement for several keys begins with when the server writes down that it begins; a space
/// more and it has failed.
const TOGETHER: &str = ": SELECT pg_backend_pid(), ARRAY(";
/// Tokens are drawn from it.
const LAST_TOKEN: &str = "SELECT last_value FROM public.leasehold_token";
/// Sessions that wait for a token.
const WAIT_FOR_A_TOKEN: &str =
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";

/// A server that writes down what it is asked.
macro_rules! writing_server {
    () => {
        server!("log_statement = all")
    };
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_need_few_statements() {
    const TASKS: usize = 64;
    const PAIRS: usize = 50;
    let server = writing_server!();
    let one = locks(&server).await;
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let one = one.clone();
        tasks.spawn(async move {
            for _ in 0..PAIRS {
                let guard = one.lock(format!("key {task}")).await.unwrap();
                guard.release().await.unwrap();
            }
        });
    }
    while let Some(done) = soon("all are done", tasks.join_next()).await {
        done.unwrap();
    }
    one.close().await.unwrap();
    let statements = written(&server, "execute ");
    let calls = TASKS * PAIRS * 2;
    assert!(
        statements * 4 < calls,
        "{statements} statements for {calls} calls"
    );
    let mut psql = foreign(&server).await;
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 0);
}

#[tokio::test]
async fn claims_and_releases_travel_together_and_each_has_its_own_answer() {
    let server = writing_server!();
    let mut psql = foreign(&server).await;
    let numbers = options(&server).with_key_form(KeyForm::Bigint);
    let ours = patient(Postgres::connect_with(numbers.clone()).await.unwrap());
    let other = patient(Postgres::connect_with(numbers).await.unwrap());
    run(&mut psql, "SELECT pg_advisory_lock(3)").await;
    let others = other.lock("5").await.unwrap();
    let first = ours.lock("0").await.unwrap();
    let mine = ours.lock("7").await.unwrap();
    let mut held = Vec::new();
    for key in 100..110 {
        held.push(ours.lock(key.to_string()).await.unwrap());
    }
    let highest = held.iter().map(Guard::token).max().unwrap();
    let tokens: i64 = ask(&mut psql, LAST_TOKEN).await;

    let (claims, rival, releases) = meet(&server, first, async || {
        let claims: Vec<_> = (1..=20).map(|key| attempt(&ours, key)).collect();
        let rival = attempt(&ours, 1);
        let releases = held.into_iter().map(|guard| tokio::spawn(guard.release()));
        (claims, rival, releases.collect::<Vec<_>>())
    })
    .await;
    let mut granted = Vec::new();
    for (claim, key) in claims.into_iter().zip(1..) {
        let guard = soon("answered", claim).await.unwrap().unwrap();
        assert_eq!(guard.is_some(), ![3, 5, 7].contains(&key), "{key}");
        granted.extend(guard);
    }
    assert!(soon("answered", rival).await.unwrap().unwrap().is_none());
    for release in releases {
        soon("answered", release).await.unwrap().unwrap();
    }
    assert_eq!(written(&server, TOGETHER), 1, "one statement");
    // One token for each that was granted, none for the others.
    let drawn = ask::<i64>(&mut psql, LAST_TOKEN).await - tokens;
    assert_eq!(usize::try_from(drawn).unwrap(), granted.len());
    assert!(granted.iter().all(|guard| guard.token() > highest));
    // A lock that was taken twice would have to be freed twice.
    for guard in granted {
        guard.release().await.unwrap();
    }
    mine.release().await.unwrap();
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 2, "those of the others");
    others.release().await.unwrap();
}

#[tokio::test]
async fn callers_that_leave_before_their_claims_are_sent_leave_nothing() {
    let server = server!();
    let mut psql = foreign(&server).await;
    let ours = locks(&server).await;
    let first = ours.lock("first").await.unwrap();
    let tokens: i64 = ask(&mut psql, LAST_TOKEN).await;
    let claims = meet(&server, first, async || {
        let claims: Vec<_> = (0..20).map(|key| attempt(&ours, key)).collect();
        settle().await;
        claims[..10].iter().for_each(JoinHandle::abort);
        claims
    })
    .await;
    let mut kept = Vec::new();
    for claim in claims {
        if let Ok(answer) = soon("answered", claim).await {
            kept.push(answer.unwrap().unwrap());
        }
    }
    assert_eq!(kept.len(), 10);
    let drawn = ask::<i64>(&mut psql, LAST_TOKEN).await - tokens;
    assert_eq!(drawn, 10, "nothing was asked for those who were gone");
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 10);
    for key in 0..10 {
        assert!(attempt(&ours, key).await.unwrap().unwrap().is_some());
    }
}

#[tokio::test]
async fn callers_that_leave_while_their_claims_are_under_way_leave_nothing() {
    let server = server!();
    let (mut psql, mut other) = (foreign(&server).await, foreign(&server).await);
    let ours = locks(&server).await;
    let first = ours.lock("first").await.unwrap();
    run(&mut other, HOLD_TOKENS).await;
    let claims = meet(&server, first, async || {
        (0..20).map(|key| attempt(&ours, key)).collect::<Vec<_>>()
    })
    .await;
    // The first of them is locked.
    until(&mut psql, "under way", WAIT_FOR_A_TOKEN, 1).await;
    claims[..19].iter().for_each(JoinHandle::abort);
    settle().await;
    run(&mut other, "COMMIT").await;
    let mut kept = None;
    for claim in claims {
        if let Ok(answer) = soon("answered", claim).await {
            kept = Some(answer.unwrap().unwrap());
        }
    }
    until(&mut psql, "only what is wanted", HELD, 1).await;
    for key in 0..19 {
        assert!(attempt(&ours, key).await.unwrap().unwrap().is_some());
    }
    kept.unwrap().release().await.unwrap();
}

/// A statement that fails has locked some of its keys, and freed some.
#[tokio::test]
async fn a_statement_that_fails_half_way_fails_no_neighbour() {
    const CLAIMS: usize = 100;
    let server = writing_server!();
    let (mut psql, mut other) = (foreign(&server).await, foreign(&server).await);
    let ours = locks(&server).await;
    let first = ours.lock("first").await.unwrap();
    let held = ours.lock("held").await.unwrap();
    run(&mut other, HOLD_TOKENS).await;
    let (claims, release) = meet(&server, first, async || {
        let claims: Vec<_> = (0..CLAIMS).map(|key| attempt(&ours, key)).collect();
        (claims, tokio::spawn(held.release()))
    })
    .await;
    // The server gives up waiting for the lock on the sequence, a second after it was asked.
    soon("the release goes through", release)
        .await
        .unwrap()
        .unwrap();
    let failed = written(&server, "canceling statement due to lock timeout");
    assert!(failed >= 1, "nothing has failed");
    assert_eq!(written(&server, TOGETHER), 2, "and one that frees its keys");
    run(&mut other, "COMMIT").await;
    let mut granted = Vec::new();
    for claim in claims {
        match soon("answered", claim).await.unwrap() {
            Ok(guard) => granted.push(guard.unwrap()),
            // The first of them, each alone: until the commit.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}"),
        }
    }
    assert!(granted.len() > CLAIMS / 2, "{} granted", granted.len());
    let held: i64 = ask(&mut psql, HELD).await;
    assert_eq!(usize::try_from(held).unwrap(), granted.len(), "no orphans");
    for guard in granted {
        guard.release().await.unwrap();
    }
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 0);
}

#[tokio::test]
async fn claims_that_are_denied_keep_no_release_from_going_through() {
    let server = server!();
    let grant = "GRANT USAGE, SELECT, UPDATE ON SEQUENCE public.leasehold_token TO app";
    let prepare = format!("CREATE ROLE app LOGIN; CREATE SEQUENCE public.leasehold_token; {grant}");
    let mut psql = foreign(&server).await;
    run(&mut psql, &prepare).await;
    let ours = patient(Postgres::connect(server.url_for("app")).await.unwrap());
    let first = ours.lock("first").await.unwrap();
    let held = ours.lock("held").await.unwrap();
    run(
        &mut psql,
        "REVOKE ALL ON SEQUENCE public.leasehold_token FROM app",
    )
    .await;
    let (claims, release) = meet(&server, first, async || {
        let claims: Vec<_> = (0..5).map(|key| attempt(&ours, key)).collect();
        (claims, tokio::spawn(held.release()))
    })
    .await;
    for claim in claims {
        let error = soon("answered", claim).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    }
    soon("answered", release).await.unwrap().unwrap();
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 0);
    run(&mut psql, grant).await;
    for key in 0..5 {
        assert!(attempt(&ours, key).await.unwrap().unwrap().is_some());
    }
}

/// So that nobody else draws a token.
const HOLD_TOKENS: &str = "BEGIN; ALTER SEQUENCE public.leasehold_token OWNED BY NONE";

/// Begins calls while one is under way: the release of `first`.
async fn meet<T>(server: &PostgresServer, first: Guard, calls: impl AsyncFnOnce() -> T) -> T {
    server.pause().await.unwrap();
    let first = tokio::spawn(first.release());
    settle().await;
    let begun = calls().await;
    settle().await;
    server.resume().await.unwrap();
    soon("released", first).await.unwrap().unwrap();
    begun
}

/// Lets all tasks of the one thread come to where they wait for the server.
async fn settle() {
    for _ in 0..100 {
        yield_now().await;
    }
}

fn attempt(locks: &Locks, key: usize) -> JoinHandle<Result<Option<Guard>>> {
    let locks = locks.clone();
    tokio::spawn(async move { locks.try_lock(key.to_string()).await })
}

/// How often the server has written this.
fn written(server: &PostgresServer, text: &str) -> usize {
    let log = std::fs::read_to_string(server.output()).unwrap();
    log.lines().filter(|line| line.contains(text)).count()
}
