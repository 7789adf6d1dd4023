//! Users, their rights and tokens; TLS.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use etcd_client::{Client, Permission};
use leasehold_conformance::fixtures::certificates::{Authority, Certificate, read};
use leasehold_conformance::fixtures::etcd::EtcdCluster;
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{ErrorKind, Locks, Moment};
use leasehold_etcd::{Etcd, EtcdOptions};

use crate::Test;
use crate::support::{SOON, below, options, servers, test, until_below, within};

const TTL: Duration = Duration::from_secs(30);

pub(crate) const TESTS: &[Test] = &[
    test!("rights, and what is said without them", rights),
    test!(
        "a lock is held for longer than a token lasts",
        tokens_expire
    ),
    test!("rights that change meanwhile", rights_change),
    test!(
        "a user where there are none, and nobody where there are",
        who_is_asked
    ),
    test!("TLS with certificates for both sides", &["openssl"], tls),
    test!("nobody listens", nobody_listens),
];

/// Users `root` and `shop`, each with the name and `-secret` as the password; `shop` may use what
/// begins with `shop/`. Returns root's client.
pub(crate) async fn with_users(servers: &EtcdCluster) -> anyhow::Result<Client> {
    let endpoint = servers.endpoint(0);
    let mut client = Client::connect([&endpoint], None).await?;
    for user in ["root", "shop"] {
        client
            .user_add(user, format!("{user}-secret"), None)
            .await?;
        client.role_add(user).await?;
        client.user_grant_role(user, user).await?;
    }
    let rights = Permission::read_write("shop/").with_prefix();
    client.role_grant_permission("shop", rights).await?;
    client.auth_enable().await?;
    let root = etcd_client::ConnectOptions::new()
        .with_user("root", "root-secret")
        .with_auto_token_refresh(true);
    Ok(Client::connect([&endpoint], Some(root)).await?)
}

pub(crate) fn as_shop(endpoints: &str) -> anyhow::Result<EtcdOptions> {
    Ok(options(endpoints)?
        .with_user("shop", "shop-secret")
        .with_prefix("shop/"))
}

async fn refused(options: EtcdOptions) -> anyhow::Result<leasehold_core::Error> {
    let Err(error) = within(SOON, "an answer", Etcd::connect_with(options)).await? else {
        bail!("connected without a right to");
    };
    let shown = format!("{error} {error:?}");
    ensure!(!shown.contains("-secret"), "a password is shown: {shown}");
    Ok(error)
}

async fn rights() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let root = with_users(&servers).await?;
    let shop = as_shop(&servers.endpoints())?;
    let locks = Locks::new(Etcd::connect_with(shop.clone()).await?).with_ttl(TTL);
    let guard = locks.lock("k").await?;
    ensure!(locks.holder("k").await?.is_some());
    ensure!(locks.try_lock("k").await?.is_none());
    guard.release().await?;

    let error = refused(shop.clone().with_prefix("locks/")).await?;
    ensure!(error.kind() == ErrorKind::Other, "{error:?}");
    ensure!(
        error.to_string().contains("role grant-permission"),
        "{error}"
    );
    let error = refused(shop.with_user("shop", "guessed-secret")).await?;
    ensure!(error.to_string().contains("password"), "{error}");
    ensure!(
        below(&root, "locks/").await?.is_empty(),
        "nothing is written without the right to"
    );
    Ok(())
}

async fn tokens_expire() -> anyhow::Result<()> {
    let servers = EtcdCluster::start(1, ["--auth-token-ttl", "1"]).await?;
    let root = with_users(&servers).await?;
    let proxy = Proxy::start(&servers.endpoint(0)).await?;
    let locks = Locks::new(Etcd::connect_with(as_shop(&proxy.address().to_string())?).await?);
    let guard = locks.lock("k").await?;
    let other = locks.clone();
    let waiting = tokio::spawn(async move { other.lock("k").await });
    until_below(&root, "shop/k/", 2).await?;
    // A token lasts for a second after its last use; every connection is made anew after that.
    tokio::time::sleep(Duration::from_secs(4)).await;
    proxy.set(Flow::Cut);
    proxy.set(Flow::Pass);
    tokio::time::sleep(Duration::from_secs(4)).await;
    guard.release().await?;
    let next = within(SOON, "the waiter is granted", waiting).await???;
    tokio::time::sleep(Duration::from_secs(4)).await;
    Ok(next.release().await?)
}

async fn rights_change() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let mut root = with_users(&servers).await?;
    let locks = Locks::new(Etcd::connect_with(as_shop(&servers.endpoints())?).await?);
    let guard = locks.lock("k").await?;
    // Any change makes the tokens from before it too old.
    root.role_add("other").await?;
    guard.release().await?;
    let guard = locks.lock("k").await?;
    root.user_revoke_role("shop", "shop").await?;
    let error = locks
        .lock("more")
        .await
        .err()
        .context("locked without the right to")?;
    ensure!(error.kind() == ErrorKind::Other, "{error:?}");
    root.user_grant_role("shop", "shop").await?;
    Ok(guard.release().await?)
}

async fn who_is_asked() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let nobody = options(&servers.endpoints())?;
    let error = refused(nobody.clone().with_user("shop", "shop-secret")).await?;
    ensure!(error.kind() == ErrorKind::Invalid, "{error:?}");
    with_users(&servers).await?;
    let error = refused(nobody).await?;
    ensure!(error.to_string().contains("user name"), "{error}");
    Ok(())
}

async fn tls() -> anyhow::Result<()> {
    let (ours, other) = (Authority::new()?, Authority::new()?);
    let member = ours.sign("member")?;
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let arguments = [
        "--cert-file".into(),
        path(&member.certificate),
        "--key-file".into(),
        path(&member.key),
        "--client-cert-auth".into(),
        "--trusted-ca-file".into(),
        path(&ours.certificate()),
    ];
    let servers = EtcdCluster::start(1, arguments).await?;
    let with = |authority: &Authority, own: &Certificate| {
        let options = options(&servers.endpoints())?
            .with_certificate_authority(read(&authority.certificate())?)
            .with_client_certificate(read(&own.certificate)?, read(&own.key)?);
        anyhow::Ok(options)
    };
    let client = ours.sign("client")?;
    let locks = Locks::new(Etcd::connect_with(with(&ours, &client)?).await?);
    locks.lock("k").await?.release().await?;

    let (limit, known) = (Duration::from_secs(3), read(&ours.certificate())?);
    let known = options(&servers.endpoints())?.with_certificate_authority(known);
    let stranger = with(&ours, &other.sign("client")?)?;
    let https = EtcdOptions::new([format!("https://{}", servers.endpoint(0))])?;
    // A server that refuses our certificate may do so by just closing the connection.
    let (certain, maybe) = (
        &[ErrorKind::Other][..],
        &[ErrorKind::Other, ErrorKind::Unavailable][..],
    );
    for (options, kinds, says) in [
        (
            with(&other, &client)?,
            certain,
            "with_certificate_authority",
        ),
        (https, certain, "with_certificate_authority"),
        (known, maybe, "with_client_certificate"),
        (stranger, maybe, "with_client_certificate"),
    ] {
        let started = Moment::now();
        let error = refused(options.with_connect_timeout(limit)).await?;
        ensure!(kinds.contains(&error.kind()), "{error:?}");
        ensure!(error.to_string().contains(says), "{error}");
        ensure!(started.elapsed() < limit + SOON);
    }
    let plain = options(&servers.endpoints())?.with_connect_timeout(limit);
    let error = refused(plain).await?;
    ensure!(error.kind() == ErrorKind::Unavailable, "{error:?}");
    ensure!(error.to_string().contains("https://"), "{error}");
    Ok(())
}

async fn nobody_listens() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    servers.member(0).kill();
    let error = refused(options(&servers.endpoints())?).await?;
    ensure!(error.kind() == ErrorKind::Unavailable, "{error:?}");
    ensure!(error.to_string().contains(&servers.endpoint(0)), "{error}");
    Ok(())
}
