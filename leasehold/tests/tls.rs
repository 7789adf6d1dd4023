//! TLS with every store in one process. rustls wants one cryptography library to be picked where several
//! are built in, as they are here, and panics if nobody has: whoever comes first must have picked one.

#![cfg(all(
    unix,
    feature = "redis",
    feature = "etcd",
    feature = "zk-tls",
    feature = "postgres"
))]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use leasehold::open;
use leasehold_conformance::fixtures::certificates::Authority;
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_conformance::fixtures::postgres::PostgresServer;
use leasehold_conformance::fixtures::redis::RedisServer;
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_conformance::skip_without;

#[tokio::test(flavor = "multi_thread")]
async fn every_store_is_opened_by_tls_in_one_process() {
    skip_without!(RedisServer::missing().or_else(|| Authority::missing("redis")));
    skip_without!(EtcdCluster::missing());
    skip_without!(ZooKeeperEnsemble::missing());
    skip_without!(PostgresServer::missing());
    let authority = Authority::new().unwrap();
    let (server, client) = (
        authority.sign("server").unwrap(),
        authority.sign("client").unwrap(),
    );
    let text = |path: &std::path::Path| path.display().to_string();
    let (ca, certificate, key) = (
        text(&authority.certificate()),
        text(&server.certificate),
        text(&server.key),
    );

    let redis = RedisServer::start([
        "--port",
        "0",
        "--tls-port",
        "{port}",
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &ca,
    ])
    .await
    .unwrap();
    let etcd = EtcdCluster::start(
        1,
        [
            "--cert-file",
            &certificate,
            "--key-file",
            &key,
            "--client-cert-auth",
            "--trusted-ca-file",
            &ca,
        ],
    )
    .await
    .unwrap();
    let tls = ZooKeeperEnsemble::with_tls(&authority, &server);
    let zookeeper = ZooKeeperEnsemble::start(1, &tls).await.unwrap();
    let postgres = PostgresServer::start([""; 0]).await.unwrap();
    let rules = "hostssl all client 127.0.0.1/32 cert\nhost all postgres 127.0.0.1/32 trust\n";
    postgres
        .psql("CREATE ROLE client LOGIN; GRANT CREATE ON SCHEMA public TO client")
        .await
        .unwrap();
    postgres
        .speak_tls(&authority, &server, rules)
        .await
        .unwrap();

    let own = format!(
        "certificate_authority={ca}&client_certificate={}&client_key={}",
        text(&client.certificate),
        text(&client.key)
    );
    for url in [
        format!("rediss://127.0.0.1:{}?{own}", redis.port()),
        format!("etcds://{}?{own}", etcd.endpoints()),
        format!("zks://{}?{own}", zookeeper.secure_server(0)),
        format!(
            "{}?sslmode=verify-full&sslrootcert={ca}&sslcert={}&sslkey={}",
            postgres.url_for("client"),
            text(&client.certificate),
            text(&client.key)
        ),
    ] {
        let locks = open(&url).await.unwrap();
        let guard = locks.lock("order:42").await.unwrap();
        assert!(locks.try_lock("order:42").await.unwrap().is_none());
        guard.release().await.unwrap();
        locks.close().await.unwrap();
    }
}
