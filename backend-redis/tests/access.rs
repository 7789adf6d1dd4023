//! Who may connect, how, and what is said to those who may not.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_core::{Backend, ErrorKind};
use leasehold_redis::{Redis, RedisOptions, Redlock, RedlockOptions};
use support::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const PASSWORD: &str = "p@ss:w/rd#1";
/// The same in a URL.
const ENCODED: &str = "p%40ss%3Aw%2Frd%231";

fn hides(text: &str) {
    for secret in [PASSWORD, ENCODED, "p@ss", "w/rd", "rd#1"] {
        assert!(!text.contains(secret), "it shows the password: {text}");
    }
}

#[test]
fn malformed_urls_are_refused_with_what_to_do_and_without_the_password() {
    let secret = |rest: &str| format!("redis://user:{PASSWORD}@{rest}");
    for url in [
        "",
        "localhost",
        "http://localhost",
        "redis:",
        "redis://",
        "redis://localhost/zero",
        "redis://localhost/-1",
        "redis://localhost/1/2",
        "redis://localhost:0x1",
        "redis://localhost:99999",
        "redis://localhost?protocol=2",
        "redis://localhost#insecure",
        "redis://0.0.0.0",
        &secret("localhost"),
        &secret("localhost/x"),
        &format!("redis://user:{ENCODED}@localhost/x"),
        &format!("redis://user:{ENCODED}@localhost:99999/"),
        &format!("redis://user:{ENCODED}%ff@localhost/"),
    ] {
        let error = failed(RedisOptions::new(url));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
        hides(&format!("{error} {error:?}"));
    }
    for url in [
        "redis://localhost:99999",
        "rediss://[::1",
        "valkey://[::1]:x",
    ] {
        says(
            &failed(RedisOptions::new(url)),
            "a port up to 65535 and an IPv6 address in brackets",
        );
    }
}

#[test]
fn urls_of_every_form_are_read() {
    for url in [
        "redis://localhost",
        "redis://localhost:6380/15",
        "redis://[::1]:6380",
        "redis://:secret@127.0.0.1",
        "rediss://user:secret@example.org:6390/2",
        "valkey://localhost",
        "unix:///run/redis.sock",
    ] {
        let options = RedisOptions::new(url).unwrap();
        assert!(!format!("{options:?}").contains("secret"), "{options:?}");
    }
    // As a URL has it, also where the address is all colons.
    for url in [
        "rediss://[::1]",
        "redis+sentinel://[::1]:6379/m",
        "redis+cluster://[::1]:6379",
    ] {
        let options = RedisOptions::new(url).unwrap();
        assert!(format!("{options:?}").contains("[::1]:6379"), "{options:?}");
    }
}

/// Nothing listens there, so nothing can be sent: the options alone decide.
#[tokio::test]
async fn an_option_that_means_nothing_there_is_refused() {
    const SINGLE: &str = "redis://127.0.0.1:1";
    const CLUSTER: &str = "redis+cluster://127.0.0.1:1";
    const SENTINEL: &str = "redis+sentinel://127.0.0.1:1/m";
    const SOCKET: &str = "unix:///nowhere";
    type With = fn(RedisOptions) -> RedisOptions;
    let username: With = |options| options.with_sentinel_username("me");
    let password: With = |options| options.with_sentinel_password(PASSWORD);
    let address: With = |options| options.with_node_address(("a", 1), ("b", 2));
    let database: With = |options| options.with_database(1);
    for (with, urls, option) in [
        (
            username,
            &[SINGLE, CLUSTER, SOCKET][..],
            "with_sentinel_username",
        ),
        (
            password,
            &[SINGLE, CLUSTER, SOCKET],
            "with_sentinel_password",
        ),
        (address, &[SINGLE, SENTINEL, SOCKET], "with_node_address"),
        (database, &[CLUSTER], "with_database"),
    ] {
        for url in urls {
            let options = with(RedisOptions::new(url).unwrap());
            let error = failed(Redis::connect_with(options).await);
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
            says(&error, option);
            hides(&format!("{error} {error:?}"));
        }
    }
    for with in [username, password, address] {
        let nodes = ["a", "b", "c"].map(|host| RedisOptions::new(format!("redis://{host}")));
        let nodes = nodes.map(|node| with(node.unwrap()));
        let error = failed(RedlockOptions::from_nodes(nodes));
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

#[tokio::test]
async fn a_password_is_asked_for_and_never_shown() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(["--requirepass", PASSWORD]).await;
    let address = format!("127.0.0.1:{}", server.port());

    let error = failed(Redis::connect(server.url()).await);
    assert_eq!(error.kind(), ErrorKind::Other);
    says(&error, "the username and the password");
    let wrong = format!("redis://:{ENCODED}x@{address}");
    let error = failed(Redis::connect(wrong).await);
    assert_eq!(error.kind(), ErrorKind::Other);
    says(&error, "the username and the password");
    hides(&format!("{error} {error:?}"));

    let client = Redis::connect(format!("redis://:{ENCODED}@{address}/1"))
        .await
        .unwrap();
    hides(&format!("{client:?}"));
    let hold = granted(&client, &claim("a", LONG)).await;
    hides(&format!("{hold:?}"));
    let options = RedisOptions::new(server.url())
        .unwrap()
        .with_password(PASSWORD);
    hides(&format!("{options:?}"));
    let other = Redis::connect_with(options.clone().with_database(1))
        .await
        .unwrap();
    assert!(is_taken(&other, "a").await);

    server.process().kill();
    let error = failed(Redis::connect_with(options).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    says(&error, &address);
    hides(&format!("{error} {error:?}"));
}

/// The rights that a page lists.
fn listed_rights(page: &'static str) -> Vec<&'static str> {
    let rule = page.split("ACL SETUSER locks ").nth(1).unwrap();
    rule.split("```")
        .next()
        .unwrap()
        .split_whitespace()
        .collect()
}

/// Case 30: an ACL user limited to the prefix can do everything, with exactly the rights that are
/// listed; each one that is taken away is asked for by name.
#[tokio::test]
async fn a_user_with_the_listed_rights_can_do_everything_and_a_missing_one_is_named() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let mut raw = raw(&server).await;
    let rights = listed_rights(include_str!("../README.md"));
    raw.run(&format!("ACL SETUSER locks {}", rights.join(" ")))
        .await;
    let options = RedisOptions::new(server.url())
        .unwrap()
        .with_username("locks")
        .with_password("secret");

    // Everything: queue, hand over, renew, cancel, look, evict, fall out of the queue and come back.
    let client = Redis::connect_with(options.clone()).await.unwrap();
    let mut first = granted(&client, &claim("a", LONG)).await;
    first.renew().await.unwrap();
    let second = spawn(&client, waiting("a", LONG));
    raw.until_queued("a", 1).await;
    let cancelled = spawn(&client, waiting("a", LONG));
    raw.until_queued("a", 2).await;
    cancelled.abort();
    raw.until_queued("a", 1).await;
    first.release().await.unwrap();
    let second = served(SOON, second).await;
    let holder = client.holder(&key("a")).await.unwrap();
    assert_eq!(holder.as_ref().unwrap().token, Some(second.token()));
    let many: Vec<_> = (0..40)
        .map(|_| spawn(&client, waiting("a", LONG)))
        .collect();
    raw.until_queued("a", 40).await;
    assert!(client.evict(&key("a"), holder.as_ref()).await.unwrap());
    within(SOON, "lost fires", second.validity().ended()).await;
    raw.until_queued("a", 39).await;
    raw.run("DEL lock:leasehold:token").await;
    for waiter in many {
        waiter.abort();
    }
    raw.until_queued("a", 0).await;

    // And without one of them.
    let spared = ["on", ">secret", "resetchannels", "+info"];
    for right in rights.iter().filter(|right| !spared.contains(right)) {
        let rest: Vec<_> = rights
            .iter()
            .filter(|other| other != &right)
            .copied()
            .collect();
        raw.run(&format!("ACL SETUSER poor reset {}", rest.join(" ")))
            .await;
        let error = failed(Redis::connect_with(options.clone().with_username("poor")).await);
        assert_eq!(error.kind(), ErrorKind::Other, "{right}: {error}");
        says(&error, right);
        says(&error, "ACL SETUSER");
    }
    let selecting = options.clone().with_database(1);
    let error = failed(Redis::connect_with(selecting).await);
    says(&error, "+select");
    // The one that may be left out.
    raw.run("ACL SETUSER locks -info").await;
    Redis::connect_with(options).await.unwrap();
}

/// The same for a user on each node of a Redlock.
#[tokio::test]
async fn a_user_with_the_listed_rights_on_each_node_can_do_everything_and_a_missing_one_is_named() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let servers = servers(3, []).await;
    let mut raws = raws(&servers).await;
    let rights = listed_rights(include_str!("../REDLOCK.md"));
    for raw in &mut raws {
        raw.run(&format!("ACL SETUSER locks {}", rights.join(" ")))
            .await;
    }
    let options = |user: &str| {
        let nodes = servers.iter().map(|server| {
            let node = RedisOptions::new(server.url()).unwrap();
            node.with_username(user).with_password("secret")
        });
        for_new(RedlockOptions::from_nodes(nodes).unwrap())
    };

    // Everything: seed new nodes, vote, renew, wait, be woken, note a higher token, look, evict, take
    // back.
    let (logs, _logging) = logs();
    let client = redlock(options("locks")).await;
    let mut first = granted(&client, &claim("a", LONG)).await;
    first.renew().await.unwrap();
    let waiter = spawn(&client, waiting("a", LONG));
    let cancelled = spawn(&client, waiting("a", LONG));
    for raw in &mut raws {
        until("it waits", async || {
            let waiting: (String, u64) = raw.get("PUBSUB NUMSUB lock:leasehold:freed:a").await;
            waiting.1 == 1
        })
        .await;
        let hour = 3_600_000_000_u64;
        raw.run(&format!("HINCRBY lock:leasehold:redlock token {}", hour))
            .await;
    }
    cancelled.abort();
    first.release().await.unwrap();
    let second = served(SOON, waiter).await;
    assert!(second.token().get() > first.token().get() + 1_000_000_000);
    let holder = client.holder(&key("a")).await.unwrap();
    assert_eq!(holder.as_ref().unwrap().token, Some(second.token()));
    assert!(client.evict(&key("a"), holder.as_ref()).await.unwrap());
    let mut third = granted(&client, &claim("a", LONG)).await;
    third.release().await.unwrap();
    client.close().await.unwrap();
    for raw in &mut raws {
        let log: Vec<redis::Value> = raw.get("ACL LOG").await;
        assert!(log.is_empty(), "refused: {log:?}");
    }
    assert_eq!(logs.take_warnings(""), Vec::<String>::new());

    // And without one of them, on one node.
    let spared = ["on", ">secret", "resetchannels", "+config|get"];
    for raw in &mut raws {
        raw.run(&format!("ACL SETUSER poor {}", rights.join(" ")))
            .await;
    }
    for right in rights.iter().filter(|right| !spared.contains(right)) {
        let rest: Vec<_> = rights
            .iter()
            .filter(|other| other != &right)
            .copied()
            .collect();
        raws[1]
            .run(&format!("ACL SETUSER poor reset {}", rest.join(" ")))
            .await;
        let error = match Redlock::connect_with(options("poor")).await {
            Ok(_) => panic!("it does without {right}"),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::Other, "{right}: {error}");
        says(&error, right);
        says(&error, "ACL SETUSER");
        says(&error, &servers[1].port().to_string());
    }
    // The one that may be left out.
    for raw in &mut raws {
        raw.run("ACL SETUSER locks -config|get").await;
    }
    let client = redlock(options("locks")).await;
    granted(&client, &claim("a", LONG)).await;
}

/// Case 30: the key holds a list, or the queue's place is taken: an error, and the data is left alone.
#[tokio::test]
async fn other_data_in_the_place_of_a_lock_is_left_alone() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server([]).await;
    let (client, mut raw) = (connect(&server).await, raw(&server).await);
    raw.run("RPUSH lock:list one two").await;
    for claim in [claim("list", LONG), waiting("list", LONG)] {
        let error = failed(client.acquire(&claim).await);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        says(&error, "other data");
    }
    let error = failed(client.evict(&key("list"), None).await);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    failed(client.holder(&key("list")).await);
    let list: Vec<String> = raw.get("LRANGE lock:list 0 -1").await;
    assert_eq!(list, ["one", "two"]);

    // While it is held.
    let mut hold = granted(&client, &claim("a", LONG)).await;
    raw.run("DEL lock:a").await;
    raw.run("RPUSH lock:a one").await;
    assert_eq!(failed(hold.renew().await).kind(), ErrorKind::Lost);
    assert_eq!(failed(hold.release().await).kind(), ErrorKind::Lost);
    assert_eq!(raw.get::<u64>("LLEN lock:a").await, 1);

    // In the place of the queue, and of the counter.
    let _hold = granted(&client, &claim("b", LONG)).await;
    raw.run("SET lock:leasehold:queue:b mine").await;
    let error = failed(client.acquire(&waiting("b", LONG)).await);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(
        raw.get::<String>("GET lock:leasehold:queue:b").await,
        "mine"
    );
    raw.run("SET lock:leasehold:token mine").await;
    let error = failed(client.acquire(&claim("c", LONG)).await);
    says(&error, "leasehold:token");
    assert_eq!(raw.get::<String>("GET lock:leasehold:token").await, "mine");
}

/// Servers that are too old do not know HELLO, or not version 3 of the protocol.
#[tokio::test]
async fn a_server_without_resp3_is_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    for answer in [
        "-ERR unknown command `HELLO`\r\n",
        "-NOPROTO unsupported protocol version\r\n",
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = listener.accept().await {
                let mut request = [0; 1024];
                while connection
                    .read(&mut request)
                    .await
                    .is_ok_and(|read| read > 0)
                {
                    connection
                        .write_all(answer.repeat(3).as_bytes())
                        .await
                        .unwrap();
                }
            }
        });
        let error = failed(Redis::connect(format!("redis://127.0.0.1:{port}")).await);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        says(&error, "6.0");
    }
}

#[tokio::test]
async fn a_node_of_a_cluster_is_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(["--cluster-enabled", "yes", "--cluster-port", "{tls_port}"]).await;
    raw(&server)
        .await
        .run("CLUSTER ADDSLOTSRANGE 0 16383")
        .await;
    let mut error = failed(Redis::connect(server.url()).await);
    // Until it has noticed that all slots are served.
    while error.is_transient() {
        error = failed(Redis::connect(server.url()).await);
    }
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    says(&error, "cluster");
}

#[tokio::test]
async fn a_read_only_replica_is_refused() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let primary = server([]).await;
    let port = primary.port().to_string();
    let replica = server(["--replicaof", &format!("127.0.0.1 {port}")]).await;
    let error = failed(Redis::connect(replica.url()).await);
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    says(&error, "primary");
}

#[tokio::test]
async fn a_server_that_never_answers_is_given_up_in_time() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap());
    let limit = std::time::Duration::from_millis(200);
    let options = RedisOptions::new(url).unwrap().with_connect_timeout(limit);
    let error = within(SOON, "it gives up", Redis::connect_with(options)).await;
    let error = failed(error);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    says(&error, "200ms");
}

#[test]
fn outside_of_a_runtime_it_is_an_error() {
    let mut connecting = Box::pin(Redis::connect("redis://localhost"));
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    match connecting.as_mut().poll(&mut cx) {
        std::task::Poll::Ready(answer) => {
            assert_eq!(failed(answer).kind(), ErrorKind::Unsupported);
        }
        std::task::Poll::Pending => panic!("it waits for a runtime that is not there"),
    }
}

#[cfg(unix)]
#[tokio::test]
async fn a_unix_socket_will_do() {
    leasehold_conformance::skip_without!(RedisServer::missing());
    let server = server(["--unixsocket", "{folder}/socket"]).await;
    let socket = server.process().folder().join("socket");
    let client = Redis::connect(format!("unix://{}", socket.display()))
        .await
        .unwrap();
    let _hold = granted(&client, &claim("a", LONG)).await;
    assert!(is_taken(&connect(&server).await, "a").await);
}
