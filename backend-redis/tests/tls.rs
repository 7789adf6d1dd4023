//! TLS to servers of every kind, with an authority and certificates of our own.
#![allow(clippy::unwrap_used, reason = "the helpers are parts of tests")]

mod support;

use leasehold_conformance::fixtures::Missing;
use leasehold_conformance::fixtures::certificates::{Authority, Certificate, read};
use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_conformance::fixtures::redis_cluster::RedisCluster;
use leasehold_conformance::fixtures::sentinel::{SentinelGroup, ask};
use leasehold_core::{Backend, ErrorKind};
use leasehold_redis::{Redis, RedisOptions, Redlock, RedlockOptions};
use support::*;

fn missing() -> Option<Missing> {
    RedisServer::missing().or_else(|| Authority::missing("redis"))
}

/// Who signs what the servers and we show each other, and somebody else.
struct Signed {
    authority: Authority,
    other: Authority,
    server: Certificate,
    client: Certificate,
}

impl Signed {
    fn new() -> Self {
        let authority = Authority::new().unwrap();
        Self {
            server: authority.sign("server").unwrap(),
            client: authority.sign("client").unwrap(),
            authority,
            other: Authority::new().unwrap(),
        }
    }

    /// What servers must be told: they want to see a certificate, too.
    fn settings(&self) -> [(&'static str, String); 3] {
        let certificate = self.server.certificate.display().to_string();
        let authority = self.authority.certificate().display().to_string();
        [
            ("tls-cert-file", certificate),
            ("tls-key-file", self.server.key.display().to_string()),
            ("tls-ca-cert-file", authority),
        ]
    }

    /// The same as arguments, behind these.
    fn arguments(&self, first: &[&str]) -> Vec<String> {
        let settings = self.settings();
        let settings = settings.iter();
        let settings = settings.flat_map(|(name, value)| [format!("--{name}"), value.clone()]);
        let first = first.iter().map(ToString::to_string);
        first.chain(settings).collect()
    }

    /// A server that speaks nothing but TLS.
    async fn server(&self) -> RedisServer {
        let arguments = self.arguments(&["--port", "0", "--tls-port", "{port}"]);
        RedisServer::start(arguments).await.unwrap()
    }

    fn trusting(&self, options: RedisOptions) -> RedisOptions {
        options.with_certificate_authority(read(&self.authority.certificate()).unwrap())
    }

    fn whole(&self, options: RedisOptions) -> RedisOptions {
        let (certificate, key) = (&self.client.certificate, &self.client.key);
        self.trusting(options)
            .with_client_certificate(read(certificate).unwrap(), read(key).unwrap())
    }

    fn misled(&self, options: RedisOptions) -> RedisOptions {
        self.whole(options)
            .with_certificate_authority(read(&self.other.certificate()).unwrap())
    }

    /// Nobody vouches for the server; another does; the server asks for a certificate of ours.
    #[expect(clippy::future_not_send, reason = "it stays in its test")]
    async fn refuses<T>(&self, connect: impl AsyncFn(&Set<'_>) -> leasehold_core::Result<T>) {
        let refusals: [(&Set<'_>, _); 3] = [
            (&|options| options, "with_certificate_authority"),
            (
                &|options| self.misled(options),
                "with_certificate_authority",
            ),
            (&|options| self.trusting(options), "with_client_certificate"),
        ];
        for (set, advice) in refusals {
            let error = failed(within(SOON, "it is refused", connect(set)).await);
            assert_eq!(error.kind(), ErrorKind::Other, "{error}");
            says(&error, advice);
        }
    }
}

/// Gives options their certificates.
type Set<'a> = dyn Fn(RedisOptions) -> RedisOptions + 'a;

fn at(url: &str) -> RedisOptions {
    RedisOptions::new(url).unwrap().with_connect_timeout(SOON)
}

#[tokio::test]
async fn a_server() {
    leasehold_conformance::skip_without!(missing());
    let signed = Signed::new();
    let server = signed.server().await;
    let url = format!("rediss://127.0.0.1:{}", server.port());
    let whole = signed.whole(at(&url));

    let client = Redis::connect_with(whole.clone()).await.unwrap();
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    hold.renew().await.unwrap();
    let other = Redis::connect_with(whole.clone()).await.unwrap();
    assert!(is_taken(&other, "a").await);
    server.restart().await.unwrap();
    // What is held is gone with the data, and the waiter is served over a new connection.
    served(SOON, waiter).await;

    let connect = async |set: &Set<'_>| Redis::connect_with(set(at(&url))).await;
    signed.refuses(connect).await;
    // Plain text to a TLS port, and certificates without TLS.
    let plain = url.replace("rediss", "redis");
    failed(Redis::connect(&plain).await);
    let error = failed(Redis::connect_with(signed.trusting(at(&plain))).await);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    says(&error, "rediss://");
    let garbage = whole.with_client_certificate("garbage", "garbage");
    let error = failed(Redis::connect_with(garbage).await);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    says(&error, "PEM");
}

#[tokio::test]
async fn each_node_of_a_redlock() {
    leasehold_conformance::skip_without!(missing());
    let signed = Signed::new();
    let mut servers = Vec::new();
    for _ in 0..3 {
        servers.push(signed.server().await);
    }
    let options = |set: &Set<'_>| {
        let nodes = servers.iter().map(|server| {
            let url = format!("rediss://127.0.0.1:{}", server.port());
            set(RedisOptions::new(url).unwrap())
        });
        for_new(RedlockOptions::from_nodes(nodes).unwrap())
    };
    let whole = |node: RedisOptions| signed.whole(node);

    let client = redlock(options(&whole)).await;
    let mut hold = granted(&client, &claim("a", LONG)).await;
    hold.renew().await.unwrap();
    let waiter = spawn(&client, waiting("a", LONG));
    let other = redlock(options(&whole)).await;
    assert!(is_taken(&other, "a").await);
    hold.release().await.unwrap();
    served(SOON, waiter).await;
    // A node that was restarted is connected to again: with the third one gone, it takes its vote.
    servers[0].restart().await.unwrap();
    // Whoever connects sees to it that the node knows what the others know.
    redlock(options(&whole)).await;
    servers[1].process().kill();
    let again = claim("b", LONG);
    until("the node votes again", async || {
        matches!(client.acquire(&again).await, Ok(Some(_)))
    })
    .await;
    servers[1].start_again().await.unwrap();

    let connect = async |set: &Set<'_>| Redlock::connect_with(options(set)).await;
    signed.refuses(connect).await;
}

/// The sentinels are spoken to by TLS as well, and a failover is followed by TLS.
#[tokio::test(flavor = "multi_thread")]
async fn sentinels_and_the_servers_behind_them() {
    leasehold_conformance::skip_without!(missing());
    let signed = Signed::new();
    let both = ["--tls-port", "{tls_port}", "--tls-replication", "yes"];
    let lines = [
        ("tls-port", "{tls_port}".to_owned()),
        ("tls-replication", "yes".to_owned()),
    ];
    let lines = lines.into_iter().chain(signed.settings());
    let lines = lines.map(|(name, value)| format!("{name} {value}"));
    let group = SentinelGroup::start_with(signed.arguments(&both), lines).await;
    let group = group.unwrap();
    let whole = signed.whole(at(&group.tls_url()));

    let client = Redis::connect_with(whole.clone()).await.unwrap();
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    raw(&group.servers()[0]).await.until_queued("a", 1).await;
    group.until_replicated(0).await.unwrap();
    let sentinel = group.sentinels()[0].port(0);
    ask(sentinel, "SENTINEL FAILOVER mymaster").await.unwrap();
    let moved = async {
        while group.master_by(0).await.unwrap() == 0 || group.master_by(1).await.unwrap() == 0 {}
    };
    within(4 * SOON, "another server is the master", moved).await;
    // A sentinel that has not heard of it yet is outvoted.
    let other = Redis::connect_with(whole).await;
    eventually(async || hold.renew().await).await;
    assert!(is_taken(&other.unwrap(), "a").await);
    eventually(async || hold.release().await).await;
    served(SOON, waiter).await;

    let connect = async |set: &Set<'_>| Redis::connect_with(set(at(&group.tls_url()))).await;
    signed.refuses(connect).await;
}

/// Nodes are found by one of them, and a slot is followed to another, where they say that TLS is spoken.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster() {
    leasehold_conformance::skip_without!(missing());
    let signed = Signed::new();
    let arguments = signed.arguments(&[
        "--tls-port",
        "{tls_port}",
        "--tls-cluster",
        "yes",
        "--tls-replication",
        "yes",
    ]);
    let cluster = RedisCluster::start(arguments).await.unwrap();
    let url = cluster.tls_url();
    let one = url.split(',').next().unwrap();
    let client = Redis::connect_with(signed.whole(at(one))).await.unwrap();
    let mut holds = Vec::new();
    for number in 0..20 {
        holds.push(granted(&client, &claim(&format!("n{number}"), LONG)).await);
    }
    for hold in &mut holds {
        hold.renew().await.unwrap();
        hold.release().await.unwrap();
    }

    // A lock whose slot has moved is found by a redirection.
    let slot = cluster.slot("lock:a").await.unwrap();
    let from = cluster.owner(slot).await.unwrap();
    let to = (from + 1) % 3;
    granted(&client, &claim("a", LONG))
        .await
        .release()
        .await
        .unwrap();
    let target = cluster.id(to).await.unwrap();
    let counter = format!("CLUSTER GETKEYSINSLOT {slot} 10");
    for key in ask(cluster.port(from), &counter).await.unwrap() {
        ask(cluster.port(from), &format!("DEL {key}"))
            .await
            .unwrap();
    }
    let source = cluster.id(from).await.unwrap();
    let set = format!("CLUSTER SETSLOT {slot} IMPORTING {source}");
    cluster.ask(to, &set).await.unwrap();
    for node in [to, from, 3 - from - to] {
        let set = format!("CLUSTER SETSLOT {slot} NODE {target}");
        cluster.ask(node, &set).await.unwrap();
    }
    let mut hold = granted(&client, &claim("a", LONG)).await;
    let waiter = spawn(&client, waiting("a", LONG));
    let queued = format!("CLUSTER COUNTKEYSINSLOT {slot}");
    until("it is queued at the new node", async || {
        // The lock, its queue and the counter.
        cluster.ask(to, &queued).await.unwrap() == "3"
    })
    .await;
    hold.release().await.unwrap();
    served(SOON, waiter).await;

    let connect = async |set: &Set<'_>| Redis::connect_with(set(at(&url))).await;
    signed.refuses(connect).await;
}
