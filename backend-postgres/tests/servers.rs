//! What the rules of the suite cannot see: connections, poolers, standbys, crashes, other programs.
#![cfg(unix)]
#![allow(clippy::unwrap_used)] // the helpers are parts of tests

mod support;

use std::time::Duration;

use leasehold_conformance::Control as _;
use leasehold_conformance::fixtures::certificates::{Authority, Certificate};
use leasehold_conformance::fixtures::postgres::{PgBouncer, PostgresServer};
use leasehold_core::{ErrorKind, Listed, Locks};
use leasehold_postgres::{KeyForm, Postgres};
use support::{
    HELD, OURS, SOON, WAITING, ask, client, foreign, locks, options, patient, run, server, soon,
    until,
};
use tokio::task::JoinSet;
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_locks_need_few_connections() {
    let server = server!();
    let mut psql = foreign(&server).await;
    let locks = locks(&server).await;
    let mut guards = Vec::new();
    for number in 0..1000 {
        guards.push(locks.lock(format!("key {number}")).await.unwrap());
    }
    let connections: i64 = ask(&mut psql, OURS).await;
    assert!(connections <= 4, "{connections} connections");
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 1000);
    for guard in guards {
        guard.release().await.unwrap();
    }
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 0);
    locks.close().await.unwrap();
    assert_eq!(ask::<i64>(&mut psql, OURS).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_waiters_need_two_connections() {
    let server = server!();
    let mut psql = foreign(&server).await;
    run(&mut psql, &format!("SELECT pg_advisory_lock({KEY_OF_JOB})")).await;
    let waiters = locks(&server).await;
    let mut tasks = JoinSet::new();
    for _ in 0..200 {
        let waiters = waiters.clone();
        tasks.spawn(async move {
            let guard = waiters.lock("job").await.unwrap();
            let token = guard.token();
            guard.release().await.unwrap();
            token
        });
    }
    until(&mut psql, "waiting at the server", WAITING, 1).await;
    assert_eq!(ask::<i64>(&mut psql, OURS).await, 2);
    run(
        &mut psql,
        &format!("SELECT pg_advisory_unlock({KEY_OF_JOB})"),
    )
    .await;
    let mut most = 0;
    while let Some(token) = soon("all are served", tasks.join_next()).await {
        token.unwrap();
        most = most.max(ask::<i64>(&mut psql, OURS).await);
    }
    assert!(most <= 2, "{most} connections");
}

/// `SELECT ('x'||left(encode(sha256(convert_to('job','UTF8')),'hex'),16))::bit(64)::bigint`
const KEY_OF_JOB: &str =
    "('x'||left(encode(sha256(convert_to('job','UTF8')),'hex'),16))::bit(64)::bigint";

#[tokio::test(flavor = "multi_thread")]
async fn other_programs_and_ours_exclude_each_other() {
    let server = server!();
    for (form, key, arguments) in [
        (KeyForm::Name, "job", KEY_OF_JOB),
        (KeyForm::Bigint, "-42", "-42"),
        (KeyForm::IntPair, "7,-1", "7,-1"),
        (
            KeyForm::IntPair,
            "-2147483648,2147483647",
            "-2147483648,2147483647",
        ),
    ] {
        let ours = Postgres::connect_with(options(&server).with_key_form(form))
            .await
            .unwrap();
        let ours = patient(ours);
        let guard = ours.lock(key).await.unwrap();
        let answer = server
            .psql(&format!("SELECT pg_try_advisory_lock({arguments})"))
            .await
            .unwrap();
        assert_eq!(answer, "f", "{form:?} {key}: psql took what we hold");
        guard.release().await.unwrap();

        let mut psql = foreign(&server).await;
        run(&mut psql, &format!("SELECT pg_advisory_lock({arguments})")).await;
        assert!(
            ours.try_lock(key).await.unwrap().is_none(),
            "{form:?} {key}"
        );
        let holder = ours.holder(key).await.unwrap().unwrap();
        let pid: i32 = ask(&mut psql, "SELECT pg_backend_pid()").await;
        assert!(holder.grant.starts_with(&format!("{pid}@")), "{holder:?}");
        assert_eq!(holder.token, None);
        let waiter = tokio::spawn({
            let ours = ours.clone();
            async move { ours.lock(key).await }
        });
        let mut watch = foreign(&server).await;
        until(&mut watch, "ours waits", WAITING, 1).await;
        run(
            &mut psql,
            &format!("SELECT pg_advisory_unlock({arguments})"),
        )
        .await;
        let guard = soon("granted", waiter).await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
    let names = client(&server).await;
    let named = options(&server).with_key_form(KeyForm::Bigint);
    let numbers = Locks::new(Postgres::connect_with(named).await.unwrap());
    let error = numbers.lock("job").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    drop(names);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_changes_sessions_is_refused() {
    let server = server!();
    for mode in ["transaction", "statement"] {
        let bouncer = PgBouncer::start(&server, mode).await.unwrap();
        let error = Postgres::connect(bouncer.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{mode}: {error}");
        assert!(error.to_string().contains("pooler"), "{mode}: {error}");
    }
    let mut psql = foreign(&server).await;
    until(&mut psql, "nothing is left locked", HELD, 0).await;
    // In session mode all works.
    let bouncer = PgBouncer::start(&server, "session").await.unwrap();
    let one = patient(Postgres::connect(bouncer.url()).await.unwrap());
    let other = patient(Postgres::connect(bouncer.url()).await.unwrap());
    let guard = one.lock("job").await.unwrap();
    assert!(other.try_lock("job").await.unwrap().is_none());
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { other.lock("job").await }
    });
    until(&mut psql, "the other waits", WAITING, 1).await;
    guard.release().await.unwrap();
    drop(soon("granted", waiter).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_is_ended_is_noticed_at_once() {
    let server = server!();
    let mut psql = foreign(&server).await;
    // So long that no heartbeat is due while this test runs.
    let one = locks(&server).await.with_ttl(Duration::from_secs(3600));
    let guard = one.lock("job").await.unwrap();
    let pid = one.holder("job").await.unwrap().unwrap().grant;
    let pid = pid.split('@').next().unwrap().to_owned();
    run(&mut psql, &format!("SELECT pg_terminate_backend({pid})")).await;
    soon("lost fires", guard.lost()).await;
    assert!(!guard.is_held());
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    // The client goes on, with another session.
    let guard = one.lock("job").await.unwrap();
    // The same for one that waited for its lock.
    let other = locks(&server).await.with_ttl(Duration::from_secs(3600));
    let waiter = tokio::spawn(async move { other.lock("job").await });
    until(&mut psql, "the other waits", WAITING, 1).await;
    guard.release().await.unwrap();
    let guard = soon("granted", waiter).await.unwrap().unwrap();
    let holder = one.holder("job").await.unwrap().unwrap();
    assert_eq!(holder.token, Some(guard.token()));
    assert_eq!(holder.owner, Some(guard.owner().to_string()));
    let pid = holder.grant.split('@').next().unwrap().to_owned();
    run(&mut psql, &format!("SELECT pg_terminate_backend({pid})")).await;
    soon("lost fires", guard.lost()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_goes_on_when_its_session_is_ended() {
    let server = server!();
    let mut psql = foreign(&server).await;
    run(&mut psql, &format!("SELECT pg_advisory_lock({KEY_OF_JOB})")).await;
    let one = locks(&server).await;
    let waiter = tokio::spawn(async move { one.lock("job").await });
    for _ in 0..3 {
        until(&mut psql, "it waits", WAITING, 1).await;
        run(
            &mut psql,
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted",
        )
        .await;
    }
    until(&mut psql, "it waits", WAITING, 1).await;
    run(
        &mut psql,
        &format!("SELECT pg_advisory_unlock({KEY_OF_JOB})"),
    )
    .await;
    drop(soon("granted", waiter).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_loses_the_lock_in_time_and_lets_go_later() {
    let server = server!();
    let ttl = Duration::from_secs(3);
    let one = locks(&server).await.with_ttl(ttl);
    let other = locks(&server).await.with_ttl(ttl);
    let guard = one.lock("job").await.unwrap();
    // Shorter than the ttl: nothing is lost. A machine that is so busy that it cannot run this in time
    // may lose it all the same, but not give it to two.
    server.pause().await.unwrap();
    tokio::time::sleep(ttl / 6).await;
    server.resume().await.unwrap();
    let first = guard.token();
    assert!(other.try_lock("job").await.unwrap().is_none() || !guard.is_held());
    // Longer.
    server.pause().await.unwrap();
    soon("lost fires", guard.lost()).await;
    assert!(!guard.is_held());
    server.resume().await.unwrap();
    let next = soon("the server has let go", other.lock("job"))
        .await
        .unwrap();
    assert!(next.token() > first);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn owners_that_wait_for_each_others_keys_are_no_deadlock() {
    let server = server!("deadlock_timeout = 100ms");
    let (one, other) = (locks(&server).await, locks(&server).await);
    let a = one.lock("a").await.unwrap();
    let b = other.lock("b").await.unwrap();
    let waits = [(one.clone(), "b"), (other.clone(), "a")].map(|(locks, key)| {
        tokio::spawn(async move {
            let locks = locks.with_wait(Duration::from_secs(3));
            locks.lock(key).await.map(drop)
        })
    });
    for wait in waits {
        let error = soon("the wait is over", wait).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
    }
    assert!(a.is_held() && b.is_held());
    let log = std::fs::read_to_string(server.output()).unwrap();
    assert!(!log.contains("deadlock"), "{log}");
    // Nor does a wait of several seconds write errors into the server's log.
    assert!(!log.contains("ERROR"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_meets_the_grant_leaves_nothing() {
    const ROUNDS: u32 = 400;
    let server = server!();
    let mut psql = foreign(&server).await;
    let (one, other) = (locks(&server).await, locks(&server).await);
    let ttl = Duration::from_secs(4); // slices of a second
    for round in 0..ROUNDS {
        let guard = one.lock("job").await.unwrap();
        let waiter = tokio::spawn({
            let other = other.with_ttl(ttl);
            async move { other.lock("job").await }
        });
        until(&mut psql, "it waits", WAITING, 1).await;
        // Some before, some at, some after the grant.
        let release = guard.release();
        let cancel = async {
            for _ in 0..round % 40 {
                tokio::task::yield_now().await;
            }
            waiter.abort();
        };
        let (released, ()) = tokio::join!(release, cancel);
        released.unwrap();
        drop(waiter.await);
        let next = soon("granted to the next", one.lock("job")).await.unwrap();
        next.release().await.unwrap();
    }
    drop((one, other));
    until(&mut psql, "nothing is left locked", HELD, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn waits_that_end_leave_nothing() {
    let server = server!();
    let mut psql = foreign(&server).await;
    run(&mut psql, &format!("SELECT pg_advisory_lock({KEY_OF_JOB})")).await;
    // Slices that end all the time.
    let one = locks(&server).await.with_ttl(Duration::from_millis(100));
    let mut tasks = JoinSet::new();
    for number in 0..40 {
        let one = one.with_wait(Duration::from_millis(5 * number));
        tasks.spawn(async move { one.lock("job").await.map(drop).unwrap_err().kind() });
    }
    while let Some(kind) = soon("all are over", tasks.join_next()).await {
        assert_eq!(kind.unwrap(), ErrorKind::Timeout);
    }
    run(
        &mut psql,
        &format!("SELECT pg_advisory_unlock({KEY_OF_JOB})"),
    )
    .await;
    // The slice under way when the last wait ended may still be granted: then it is unlocked at once.
    until(&mut psql, "no slice is under way", WAITING, 0).await;
    until(&mut psql, "nothing is left locked", HELD, 0).await;
    let free: bool = ask(
        &mut psql,
        &format!("SELECT pg_try_advisory_lock({KEY_OF_JOB})"),
    )
    .await;
    assert!(free);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_across_a_crash_and_a_promotion() {
    // Here the disk matters: what was not flushed is lost with the memory of the server.
    let server = server!("synchronous_commit = off", "wal_writer_delay = 10s");
    let standby = server.standby().await.unwrap();
    let mut highest = 0;
    let one = locks(&server).await;
    for round in 0..3 {
        for _ in 0..400 {
            let guard = soon("granted", one.lock("job")).await.unwrap();
            let token = guard.token().get();
            assert!(token > highest, "{token} after {highest}, round {round}");
            highest = token;
            guard.release().await.unwrap();
        }
        if round < 2 {
            server.kill().await;
            server.start_again().await.unwrap();
        }
    }
    server.kill().await;
    standby.promote().await.unwrap();
    // One that has seen nothing.
    let stranger = locks(&standby).await;
    let guard = stranger.lock("job").await.unwrap();
    assert!(
        guard.token().get() > highest,
        "{} after {highest}",
        guard.token()
    );
}

/// At a standby that lacks the last sessions the clock is all that a stranger knows of their tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_sessions_takes_tokens_ahead_of_the_clock_by_seconds_at_most() {
    const SESSIONS: usize = 50;
    let server = server!();
    let mut psql = foreign(&server).await;
    for _ in 0..SESSIONS {
        let one = locks(&server).await;
        one.lock("job").await.unwrap().release().await.unwrap();
        one.close().await.unwrap();
    }
    let guard = locks(&server).await.lock("job").await.unwrap();
    let clock: i64 = ask(
        &mut psql,
        "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
    )
    .await;
    let ahead = i64::try_from(guard.token().get()).unwrap() - clock;
    assert!(ahead < 10_000_000, "{ahead} µs");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_rise_through_a_thousand_grants_however_they_end() {
    const CYCLES: u32 = 1000;
    let server = server!();
    let (one, two) = (locks(&server).await, locks(&server).await);
    let mut last = None;
    for cycle in 0..CYCLES {
        let locks = if cycle % 3 == 0 { &one } else { &two };
        let owner = locks.owner();
        // A client that has just lost its session may say so once.
        let granted = async {
            loop {
                match owner.lock("job").await {
                    Ok(guard) => return guard,
                    Err(error) => assert!(error.is_transient(), "{error:?}"),
                }
            }
        };
        let guard = soon("granted", granted).await;
        let again = owner.lock("job").await.unwrap();
        assert_eq!(again.token(), guard.token(), "equal on re-entry");
        assert!(last < Some(guard.token()), "cycle {cycle}: {last:?}");
        last = Some(guard.token());
        match cycle % 250 {
            50 => assert!(one.evict("job", None).await.unwrap()),
            100 => {
                let ours = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                            WHERE application_name LIKE 'leasehold %'";
                server.psql(ours).await.unwrap();
            }
            150 => server.restart().await.unwrap(),
            _ => {
                again.release().await.unwrap();
                guard.release().await.unwrap();
                continue;
            }
        }
        soon("lost fires", guard.lost()).await;
        assert!(!again.is_held());
    }
    one.close().await.unwrap();
    two.close().await.unwrap();
    let mut psql = foreign(&server).await;
    assert_eq!(ask::<i64>(&mut psql, HELD).await, 0);
    let left = "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace";
    assert_eq!(ask::<i64>(&mut psql, left).await, 1, "the sequence alone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_lock_table_is_an_error_and_lets_others_connect() {
    let server = server!("max_connections = 20", "max_locks_per_transaction = 10");
    let mut filler = foreign(&server).await;
    let postgres = client(&server).await;
    let one = patient(postgres.clone());
    let warm = one.lock("warm").await.unwrap();
    // Fill it to the brim, then free a little less than 500 need.
    run(
        &mut filler,
        "DO $$ DECLARE n int := 0; BEGIN LOOP \
           BEGIN PERFORM pg_advisory_lock(1000, n); EXCEPTION WHEN out_of_memory THEN EXIT; END; \
           n := n + 1; END LOOP; \
           FOR i IN 0..29 LOOP PERFORM pg_advisory_unlock(1000, i); END LOOP; END $$",
    )
    .await;
    let mut tasks = JoinSet::new();
    for number in 0..500 {
        let one = one.clone();
        tasks.spawn(async move { one.try_lock(format!("key {number}")).await });
    }
    let (mut guards, mut refused) = (Vec::new(), 0);
    while let Some(answer) = soon("all are answered", tasks.join_next()).await {
        match answer.unwrap() {
            Ok(guard) => guards.push(guard.unwrap()),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
                let text = error.to_string();
                assert!(text.contains("max_locks_per_transaction"), "{text}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
    // A neighbour can connect, though we hold what we got.
    let mut neighbour = foreign(&server).await;
    let ours: i64 = ask(
        &mut neighbour,
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' \
         AND objsubid = 1",
    )
    .await;
    assert_eq!(ours, i64::try_from(guards.len()).unwrap() + 1, "no orphans");
    assert!(warm.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_than_a_quarter_of_the_lock_table_is_taken() {
    let server = server!("max_connections = 20", "max_locks_per_transaction = 10");
    let one = locks(&server).await;
    let mut guards = Vec::new();
    let error = loop {
        match one.lock(format!("key {}", guards.len())).await {
            Ok(guard) => guards.push(guard),
            Err(error) => break error,
        }
    };
    assert_eq!(guards.len(), 50, "a quarter of 10 × 20");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.to_string().contains("max_locks_per_transaction"),
        "{error}"
    );
    guards.pop().unwrap().release().await.unwrap();
    drop(one.lock("another").await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_of_the_role_do_no_harm() {
    let server = server!();
    server
        .psql(
            "CREATE ROLE app LOGIN; GRANT CREATE ON SCHEMA public TO app; \
             ALTER ROLE app SET lock_timeout = '100ms'; \
             ALTER ROLE app SET statement_timeout = '100ms'; \
             ALTER ROLE app SET idle_session_timeout = '500ms'; \
             ALTER ROLE app SET idle_in_transaction_session_timeout = '100ms'; \
             ALTER ROLE app SET default_transaction_read_only = on; \
             ALTER ROLE app SET default_transaction_isolation = 'serializable'; \
             ALTER ROLE app SET synchronous_commit = on; \
             ALTER ROLE app SET standard_conforming_strings = off; \
             ALTER ROLE app SET search_path = ''",
        )
        .await
        .unwrap();
    let app = Postgres::connect(server.url_for("app")).await.unwrap();
    let app = patient(app);
    let mut psql = foreign(&server).await;
    run(&mut psql, &format!("SELECT pg_advisory_lock({KEY_OF_JOB})")).await;
    let waiter = tokio::spawn({
        let app = app.clone();
        async move { app.lock("job").await }
    });
    until(&mut psql, "it waits", WAITING, 1).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    run(
        &mut psql,
        &format!("SELECT pg_advisory_unlock({KEY_OF_JOB})"),
    )
    .await;
    let guard = soon("granted", waiter).await.unwrap().unwrap();
    guard.release().await.unwrap();
    app.lock("free").await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_work_is_refused_with_the_remedy() {
    let server = server!();
    let standby = server.standby().await.unwrap();
    let error = Postgres::connect(standby.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("standby"), "{error}");
    drop(standby);

    // A role that may not make the sequence.
    server.psql("CREATE ROLE app LOGIN").await.unwrap();
    let url = server.url_for("app");
    let error = Postgres::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    let remedy = |error: &leasehold_core::Error| {
        let text = error.to_string();
        let (_, sql) = text.split_once("run: ").unwrap();
        sql.to_owned()
    };
    // What the message says helps.
    server.psql(&remedy(&error)).await.unwrap();
    let app = patient(Postgres::connect(&url).await.unwrap());
    drop(app.lock("job").await.unwrap());
    // Nor use it.
    server
        .psql("REVOKE UPDATE ON SEQUENCE public.leasehold_token FROM app")
        .await
        .unwrap();
    let error = Postgres::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    server.psql(&remedy(&error)).await.unwrap();
    Postgres::connect(&url).await.unwrap();

    // A sequence whose numbers would not rise.
    for (wrong, right) in [
        ("CACHE 10", ""),
        ("CYCLE", ""),
        ("AS int MAXVALUE 100000", "MAXVALUE 9223372036854775807"),
    ] {
        server
            .psql(&format!("CREATE SEQUENCE public.tokens {wrong}"))
            .await
            .unwrap();
        let tokens = || options(&server).with_sequence("public.tokens");
        let error = Postgres::connect_with(tokens()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{wrong}: {error}");
        server.psql(&remedy(&error)).await.unwrap();
        if !right.is_empty() {
            server
                .psql(&format!("ALTER SEQUENCE public.tokens {right}"))
                .await
                .unwrap();
        }
        Postgres::connect_with(tokens()).await.unwrap();
        server.psql("DROP SEQUENCE public.tokens").await.unwrap();
    }
    server.psql("CREATE TABLE public.tokens ()").await.unwrap();
    let table = options(&server).with_sequence("public.tokens");
    let error = Postgres::connect_with(table).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");

    let nowhere = format!("postgres://postgres@127.0.0.1:{}/nowhere", server.port());
    let error = Postgres::connect(nowhere).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let options = options(&server).with_max_sessions(1);
    let error = Postgres::connect_with(options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_never_shows_in_an_error() {
    let server = server!();
    server
        .psql("CREATE ROLE app LOGIN PASSWORD 'right'")
        .await
        .unwrap();
    let rules = server.data().join("pg_hba.conf");
    let before = std::fs::read_to_string(&rules).unwrap();
    std::fs::write(
        &rules,
        format!("host all app 127.0.0.1/32 scram-sha-256\n{before}"),
    )
    .unwrap();
    server.psql("SELECT pg_reload_conf()").await.unwrap();
    let url = server.url_for("app:geheim");
    let error = Postgres::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other, "{error:?}");
    let shown = format!("{error} {error:?}");
    assert!(!shown.contains("geheim"), "{shown}");
    let port = server.port();
    server.kill().await;
    let error = Postgres::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let shown = format!("{error} {error:?}");
    assert!(
        !shown.contains("geheim") && shown.contains(&port.to_string()),
        "{shown}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn work_under_the_lock_is_not_held_up_by_its_waiters() {
    let server = server!();
    let mut psql = foreign(&server).await;
    run(
        &mut psql,
        "CREATE TABLE orders AS SELECT n, n % 7 AS kind FROM generate_series(1, 20000) AS n",
    )
    .await;
    let (one, other) = (locks(&server).await, locks(&server).await);
    let guard = one.lock("migration").await.unwrap();
    let waiter = tokio::spawn(async move { other.lock("migration").await });
    until(&mut psql, "the other waits", WAITING, 1).await;
    soon(
        "an index is built",
        run(
            &mut psql,
            "CREATE INDEX CONCURRENTLY by_kind ON orders (kind)",
        ),
    )
    .await;
    run(&mut psql, "DELETE FROM orders").await;
    // The space comes back once no snapshot is old enough to see the rows: in the pause between slices.
    let size = "SELECT pg_relation_size('orders')";
    soon("VACUUM cleans up", async {
        while ask::<i64>(&mut psql, size).await > 0 {
            run(&mut psql, "VACUUM orders").await;
        }
    })
    .await;
    assert!(!waiter.is_finished());
    assert!(guard.is_held());
    guard.release().await.unwrap();
    drop(soon("granted", waiter).await.unwrap().unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_without_a_session_are_served_all_the_same() {
    let server = server!();
    let mut psql = foreign(&server).await;
    run(
        &mut psql,
        "SELECT pg_advisory_lock(n) FROM generate_series(1, 10) AS n",
    )
    .await;
    let few = options(&server)
        .with_key_form(KeyForm::Bigint)
        .with_max_sessions(3);
    let few = patient(Postgres::connect_with(few).await.unwrap());
    let mut tasks = JoinSet::new();
    for key in 1..=10 {
        let few = few.clone();
        tasks.spawn(async move { few.lock(key.to_string()).await });
    }
    until(&mut psql, "some wait at the server", WAITING, 2).await;
    assert_eq!(ask::<i64>(&mut psql, OURS).await, 3);
    run(&mut psql, "SELECT pg_advisory_unlock_all()").await;
    let mut guards = Vec::new();
    while let Some(guard) = soon("all are served", tasks.join_next()).await {
        guards.push(guard.unwrap().unwrap());
    }
    // All at a time: the waiting sessions are held by the first ones meanwhile.
    assert!(guards.iter().all(leasehold_core::Guard::is_held));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_ttls_do_not_use_up_the_sessions() {
    let server = server!();
    let few = options(&server).with_max_sessions(4);
    let few = patient(Postgres::connect_with(few).await.unwrap());
    for seconds in 10..20 {
        let locks = few.with_ttl(Duration::from_secs(seconds));
        let guard = soon("granted", locks.lock("job")).await.unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_with_the_right_to_it_take_locks_away() {
    let server = server!();
    server
        .psql("CREATE ROLE app LOGIN; CREATE ROLE nosy LOGIN; GRANT CREATE ON SCHEMA public TO app")
        .await
        .unwrap();
    let app = patient(Postgres::connect(server.url_for("app")).await.unwrap());
    server
        .psql("GRANT ALL ON SEQUENCE public.leasehold_token TO nosy")
        .await
        .unwrap();
    let nosy = patient(Postgres::connect(server.url_for("nosy")).await.unwrap());
    let guard = app.with_label("night\0ly").lock("job").await.unwrap();
    let beside = app.lock("beside").await.unwrap();
    let seen = nosy.holder("job").await.unwrap().unwrap();
    assert_eq!((seen.owner, seen.label, seen.token), (None, None, None));
    let error = nosy.evict("job", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    assert!(guard.is_held());
    // The superuser may, and takes this lock alone.
    let operator = locks(&server).await;
    let seen = operator.holder("job").await.unwrap().unwrap();
    // The server takes no zero.
    assert_eq!(seen.label.as_deref(), Some("night\u{fffd}ly"));
    assert_eq!(seen.also_ends, 0);
    assert!(operator.evict("job", Some(&seen)).await.unwrap());
    soon("lost fires", guard.lost()).await;
    assert!(beside.is_held());
    assert!(operator.try_lock("job").await.unwrap().is_some());
}

/// More than a page of them, those of another program and of somebody who must not ask among them; what
/// sessions lock for themselves is not there.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_all_locks_by_their_numbers() {
    const LOCKS: usize = 250;
    let server = server!();
    let numbers = options(&server).with_key_form(KeyForm::Bigint);
    let numbers = patient(Postgres::connect_with(numbers).await.unwrap());
    let pairs = options(&server).with_key_form(KeyForm::IntPair);
    let pairs = patient(Postgres::connect_with(pairs).await.unwrap());
    let names = locks(&server).await.with_label("nightly");

    let guard = names.lock("job").await.unwrap();
    let mut held = Vec::new();
    for number in 0..LOCKS {
        held.push(numbers.lock(format!("-{}", number + 1)).await.unwrap());
    }
    let pair = pairs.lock("7,-1").await.unwrap();
    let mut psql = foreign(&server).await;
    run(
        &mut psql,
        "SELECT pg_advisory_lock(42), pg_advisory_lock_shared(43)",
    )
    .await;
    let pid: i32 = ask(&mut psql, "SELECT pg_backend_pid()").await;

    let all = listed(&numbers, "").await;
    let found: std::collections::BTreeSet<_> = all.iter().map(|it| it.raw.as_str()).collect();
    assert_eq!(all.len(), LOCKS + 3, "{all:?}");
    assert_eq!(found.len(), LOCKS + 3);
    for guard in &held {
        let listed = all.iter().find(|it| it.key.as_ref() == Some(guard.key()));
        let holder = listed.unwrap().holder.as_ref().unwrap();
        assert_eq!(holder.owner, Some(guard.owner().to_string()));
        assert_eq!(holder.token, Some(guard.token()));
    }
    for theirs in ["42", "43"] {
        let listed = all.iter().find(|it| it.raw == theirs).unwrap();
        let holder = listed.holder.as_ref().unwrap();
        assert!(holder.grant.starts_with(&format!("{pid}@")), "{holder:?}");
        assert_eq!((holder.token, holder.also_ends), (None, 1));
    }
    let few = listed(&numbers, "-24").await;
    assert_eq!(few.len(), 11, "{few:?}");

    let only = listed(&pairs, "").await;
    assert_eq!(only.len(), 1, "{only:?}");
    assert_eq!(only[0].key.as_ref(), Some(pair.key()));

    // Names are hashed: it is known by its number alone, and can be taken away by that.
    let hashed = listed(&names, "").await;
    assert_eq!(hashed.len(), LOCKS + 3);
    let labelled = |it: &&Listed| it.holder.as_ref().unwrap().label.as_deref() == Some("nightly");
    let job = hashed.iter().find(labelled).unwrap();
    assert_eq!((&job.key, job.waiting), (&None, None));
    let error = names.list("jo").next().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(numbers.evict(&job.raw, job.holder.as_ref()).await.unwrap());
    soon("lost fires", guard.lost()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_shows_what_may_not_be_asked_as_far_as_the_server_knows_it() {
    let server = server!();
    server
        .psql("CREATE ROLE nosy LOGIN; GRANT CREATE ON SCHEMA public TO nosy")
        .await
        .unwrap();
    let nosy = patient(Postgres::connect(server.url_for("nosy")).await.unwrap());
    let own = nosy.lock("own").await.unwrap();
    let _theirs = locks(&server).await.lock("theirs").await.unwrap();
    let mut tokens = Vec::new();
    for listed in listed(&nosy, "").await {
        tokens.push(listed.holder.unwrap().token);
    }
    tokens.sort();
    assert_eq!(tokens, [None, Some(own.token())]);
}

async fn listed(locks: &Locks, prefix: &str) -> Vec<Listed> {
    let mut listing = locks.list(prefix);
    let mut all = Vec::new();
    while let Some(listed) = soon("listed", listing.next()).await.unwrap() {
        all.push(listed);
    }
    all
}

/// One session has many grants, and what the server can end is the session.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_is_busy_keeps_the_next_grant_when_the_last_is_evicted() {
    let server = server!();
    let operator = locks(&server).await;
    let url = server.url_for("postgres");
    let (named, next) = tokio::sync::oneshot::channel();
    let (busy, is_busy) = tokio::sync::oneshot::channel();
    // What happens on its only thread cannot answer while that thread is busy.
    let application = std::thread::spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(async {
            let locks = patient(Postgres::connect(url).await.unwrap());
            let last = locks.lock("job").await.unwrap();
            named
                .send(locks.holder("job").await.unwrap().unwrap())
                .unwrap();
            last.release().await.unwrap();
            let guard = locks.lock("job").await.unwrap();
            busy.send(()).unwrap();
            #[expect(clippy::disallowed_methods, reason = "it is to be busy")]
            std::thread::sleep(Duration::from_secs(1));
            guard.release().await
        })
    });
    let last = soon("the first grant", next).await.unwrap();
    soon("the second grant", is_busy).await.unwrap();
    assert!(!operator.evict("job", Some(&last)).await.unwrap());
    application.join().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_in_a_transaction_is_freed_with_the_commit() {
    let server = server!();
    let (mut one, mut psql) = (foreign(&server).await, foreign(&server).await);
    let locks = locks(&server).await;
    let form = KeyForm::Name;
    run(&mut one, "SET lock_timeout = '7s'").await;
    // Not without a transaction: the lock would be freed at once.
    let error = form
        .lock_in_transaction(&mut one, "job", SOON)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let error = form
        .try_lock_in_transaction(&mut one, "job")
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);

    run(&mut one, "BEGIN").await;
    form.lock_in_transaction(&mut one, "job", SOON)
        .await
        .unwrap();
    let limit: String = ask(&mut one, "SHOW lock_timeout").await;
    assert_eq!(limit, "7s", "the caller's own setting is back");
    assert!(locks.try_lock("job").await.unwrap().is_none());
    let waiter = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lock("job").await }
    });
    until(&mut psql, "ours waits", WAITING, 1).await;
    run(&mut one, "COMMIT").await;
    let guard = soon("granted", waiter).await.unwrap().unwrap();

    // The reverse; the transaction goes on after a wait that ended.
    run(&mut one, "BEGIN; CREATE TABLE work ()").await;
    for wait in [0, 1, 400_000, 1_000_000, 50_000_000] {
        let wait = Duration::from_nanos(wait);
        let error = soon(
            "the wait is over",
            form.lock_in_transaction(&mut one, "job", wait),
        )
        .await
        .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{wait:?}: {error:?}");
    }
    assert!(!form.try_lock_in_transaction(&mut one, "job").await.unwrap());
    guard.release().await.unwrap();
    assert!(form.try_lock_in_transaction(&mut one, "job").await.unwrap());
    run(&mut one, "COMMIT").await;
    assert_eq!(ask::<i64>(&mut psql, "SELECT count(*) FROM work").await, 0);
    // A rollback frees it too.
    run(&mut one, "BEGIN").await;
    form.lock_in_transaction(&mut one, "job", None)
        .await
        .unwrap();
    run(&mut one, "ROLLBACK").await;
    assert!(locks.try_lock("job").await.unwrap().is_some());
    // A statement_timeout of the caller's ends a wait without spoiling the transaction.
    let guard = locks.lock("job").await.unwrap();
    run(&mut one, "BEGIN; SET LOCAL statement_timeout = '50ms'").await;
    let error = form
        .lock_in_transaction(&mut one, "job", SOON)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert_eq!(ask::<i32>(&mut one, "SELECT 1").await, 1);
    run(&mut one, "COMMIT").await;
    assert!(guard.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_use_none_of_the_applications_connections() {
    // As many as the application's own need, and ours.
    let server = server!("max_connections = 10");
    let one = locks(&server).await;
    let (mut first, mut second) = (foreign(&server).await, foreign(&server).await);
    let mut tasks = JoinSet::new();
    for _ in 0..50 {
        let one = one.clone();
        tasks.spawn(async move {
            let guard = one.lock("job").await.unwrap();
            guard.release().await.unwrap();
        });
    }
    run(&mut first, "SELECT 1").await;
    run(&mut second, "SELECT 1").await;
    while let Some(served) = soon("all are served", tasks.join_next()).await {
        served.unwrap();
    }
}

#[test]
fn another_runtime_gets_sessions_of_its_own() {
    leasehold_conformance::skip_without!(PostgresServer::missing());
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let first = runtime();
    let started = first.block_on(async {
        let server = PostgresServer::start([""; 0]).await.unwrap();
        let locks = locks(&server).await;
        locks.lock("job").await.unwrap().release().await.unwrap();
        (server, locks)
    });
    let (server, locks) = started;
    // The first is still there, but nobody drives it.
    let second = runtime();
    second.block_on(async {
        let guard = soon("granted", locks.lock("job")).await.unwrap();
        guard.release().await.unwrap();
    });
    drop(second);
    drop(first);
    let third = runtime();
    third.block_on(async {
        let guard = soon("granted", locks.lock("job")).await.unwrap();
        guard.release().await.unwrap();
        drop(server);
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_gone_is_an_error_at_once_and_back_when_it_is() {
    let server = server!();
    let one = locks(&server).await;
    let guard = one.lock("job").await.unwrap();
    server.kill().await;
    soon("lost fires", guard.lost()).await;
    let error = soon("an answer", one.try_lock("job")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    server.start_again().await.unwrap();
    drop(one.lock("job").await.unwrap());
    // A claim that has queued outlives a restart.
    let other = locks(&server).await;
    let _guard = other.lock("late").await.unwrap();
    let mut psql = foreign(&server).await;
    let waiter = tokio::spawn({
        let one = one.clone();
        async move { one.lock("late").await }
    });
    until(&mut psql, "it waits", WAITING, 1).await;
    server.restart().await.unwrap();
    drop(soon("granted", waiter).await.unwrap().unwrap());
    let short = one.with_wait(Duration::from_millis(200));
    server.kill().await;
    let failed = timeout(SOON, short.lock("late")).await.unwrap();
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Unavailable);
}

/// Who may come in by TLS, and what is said to the others.
#[tokio::test(flavor = "multi_thread")]
async fn tls_with_certificates_for_both_sides() {
    leasehold_conformance::skip_without!(Authority::missing("postgres"));
    let server = server!();
    let (ours, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    // The superuser as before; the others by TLS only, with a certificate in their name.
    let rules = "hostssl all app 127.0.0.1/32 cert\n\
                 hostssl all careful 127.0.0.1/32 trust clientcert=verify-full\n\
                 host all postgres 127.0.0.1/32 trust\n";
    let own = ours.sign("server").unwrap();
    server
        .psql("CREATE ROLE app LOGIN; CREATE ROLE careful LOGIN; GRANT CREATE ON SCHEMA public TO app")
        .await
        .unwrap();
    server.speak_tls(&ours, &own, rules).await.unwrap();

    let app = ours.sign("app").unwrap();
    let url = |role: &str, authority: &Authority, certificate: Option<&Certificate>| {
        let authority = authority.certificate();
        let mut url = format!(
            "{}?sslmode=verify-full&sslrootcert={}",
            server.url_for(role),
            authority.display()
        );
        if let Some(certificate) = certificate {
            url += &format!(
                "&sslcert={}&sslkey={}",
                certificate.certificate.display(),
                certificate.key.display()
            );
        }
        url
    };
    let locks = patient(
        Postgres::connect(url("app", &ours, Some(&app)))
            .await
            .unwrap(),
    );
    let other_client = Postgres::connect(url("app", &ours, Some(&app)));
    let next = patient(other_client.await.unwrap());
    let guard = locks.lock("job").await.unwrap();
    let waiter = tokio::spawn(async move { next.lock("job").await });
    let mut psql = foreign(&server).await;
    until(&mut psql, "it waits", WAITING, 1).await;
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                     WHERE usename = 'app' AND NOT ssl";
    assert_eq!(ask::<i64>(&mut psql, encrypted).await, 0);
    guard.release().await.unwrap();
    let guard = soon("granted", waiter).await.unwrap().unwrap();
    guard.release().await.unwrap();

    let stranger = other.sign("app").unwrap();
    let plain = format!("{}?sslmode=disable", server.url_for("app"));
    for (url, says) in [
        (url("app", &other, Some(&app)), "sslrootcert"),
        (url("app", &ours, None), "sslcert"),
        (url("careful", &ours, Some(&app)), "sslcert"),
        (url("app", &ours, Some(&stranger)), "sslcert"),
        (plain, "sslmode"),
    ] {
        let error = soon("it is refused", Postgres::connect(&url)).await;
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Other, "{url}: {error:?}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    // One that is for another host; the server takes it up when it sees fit.
    let named = ours.sign_for("named", "DNS:elsewhere.example").unwrap();
    server.speak_tls(&ours, &named, rules).await.unwrap();
    let refused = async {
        loop {
            if let Err(error) = Postgres::connect(url("app", &ours, Some(&app))).await {
                return error;
            }
        }
    };
    let error = soon("the certificate is another", refused).await;
    assert_eq!(error.kind(), ErrorKind::Other, "{error:?}");
    assert!(error.to_string().contains("verify-full"), "{error}");
}
