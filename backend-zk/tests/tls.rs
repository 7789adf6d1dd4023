//! Who may connect by TLS, and what is said to the others.

mod support;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold_conformance::fixtures::certificates::{Authority, Certificate, read};
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{ErrorKind, Locks, Moment};
use leasehold_zk::{ZooKeeper, ZooKeeperOptions};
use support::{LONG, SOON, claim, granted, operator, run, soon, until_contenders, within};

fn main() -> ExitCode {
    support::main(
        ZooKeeperEnsemble::missing().or_else(|| Authority::missing("zookeeper")),
        &[
            ("locks_by_tls", || run(locks_by_tls())),
            ("tls_1_3", || run(tls_1_3())),
            ("what_is_refused_says_what_to_do", || run(refused())),
        ],
    )
}

struct Servers {
    ensemble: ZooKeeperEnsemble,
    ours: Authority,
    client: Certificate,
}

impl Servers {
    async fn start(more: &str) -> anyhow::Result<Self> {
        let ours = Authority::new()?;
        let tls = ZooKeeperEnsemble::with_tls(&ours, &ours.sign("server")?);
        Ok(Self {
            ensemble: ZooKeeperEnsemble::start(1, &format!("{tls}{more}")).await?,
            client: ours.sign("client")?,
            ours,
        })
    }

    fn options(&self) -> anyhow::Result<ZooKeeperOptions> {
        let at = self.ensemble.secure_server(0);
        with(&at, &self.ours, Some(&self.client))
    }
}

fn with(
    at: &str,
    authority: &Authority,
    client: Option<&Certificate>,
) -> anyhow::Result<ZooKeeperOptions> {
    let options = ZooKeeperOptions::new(format!("zks://{at}"))?
        .with_certificate_authority(read(&authority.certificate())?)
        .with_connect_timeout(SOON);
    Ok(match client {
        Some(client) => {
            options.with_client_certificate(read(&client.certificate)?, read(&client.key)?)
        }
        None => options,
    })
}

async fn locks_by_tls() -> anyhow::Result<()> {
    let servers = Servers::start("").await?;
    let proxy = Proxy::start(&servers.ensemble.secure_server(0)).await?;
    let at = proxy.address().to_string();
    let options = with(&at, &servers.ours, Some(&servers.client))?;
    let (one, two) = (
        Locks::new(ZooKeeper::connect_with(options.clone()).await?),
        Locks::new(ZooKeeper::connect_with(options.clone()).await?),
    );
    let (one, two) = (one.with_ttl(LONG), two.with_ttl(LONG).with_wait(SOON * 2));
    // Hand-offs, and a connection that breaks in between: it is made again by TLS.
    let operator = operator(&servers.ensemble.servers()).await?;
    let guard = soon("granted", one.lock("k")).await?;
    let waiter = tokio::spawn(async move { two.lock("k").await });
    until_contenders(&operator, "k", 2).await?;
    proxy.set(Flow::Cut);
    proxy.set(Flow::Pass);
    soon("released", guard.release()).await?;
    let guard = within(SOON * 2, "served", waiter).await???;
    ensure!(guard.is_held());
    soon("released", guard.release()).await?;

    let client = ZooKeeper::connect_with(options).await?;
    let mut hold = granted(&client, &claim("renewed", LONG)?).await?;
    soon("renewed", hold.renew()).await?;
    soon("released", hold.release()).await?;
    Ok(())
}

/// There a server refuses a client only after the client has seen the handshake done.
async fn tls_1_3() -> anyhow::Result<()> {
    let servers = Servers::start(
        "ssl.protocol=TLSv1.3\nssl.enabledProtocols=TLSv1.3\n\
         ssl.ciphersuites=TLS_AES_128_GCM_SHA256\n",
    )
    .await?;
    let locks = Locks::new(ZooKeeper::connect_with(servers.options()?).await?);
    let guard = soon("granted", locks.lock("k")).await?;
    soon("released", guard.release()).await?;
    let examination = soon("examined", locks.examine()).await?;
    let found = examination.findings.iter().map(|it| it.id);
    ensure!(
        found.collect::<Vec<_>>() == ["too-few-servers", "not-asked"],
        "{examination:?}"
    );
    let at = servers.ensemble.secure_server(0);
    let error = failed(with(&at, &servers.ours, None)?).await?;
    ensure!(error.kind() == ErrorKind::Other, "{error:?}");
    ensure!(
        error.to_string().contains("with_client_certificate"),
        "{error}"
    );
    Ok(())
}

async fn refused() -> anyhow::Result<()> {
    let servers = Servers::start("").await?;
    let (at, plain) = (
        servers.ensemble.secure_server(0),
        servers.ensemble.server(0),
    );
    let (ours, client) = (&servers.ours, &servers.client);
    let other = Authority::new()?;
    let stranger = other.sign("client")?;
    let untold = ZooKeeperOptions::new(format!("zks://{at}"))?;
    for (options, kind, says) in [
        (
            with(&at, &other, Some(client))?,
            ErrorKind::Other,
            "with_certificate_authority",
        ),
        (untold, ErrorKind::Other, "with_certificate_authority"),
        (
            with(&at, ours, None)?,
            ErrorKind::Other,
            "with_client_certificate",
        ),
        (
            with(&at, ours, Some(&stranger))?,
            ErrorKind::Other,
            "with_client_certificate",
        ),
        // What answers there is not what was meant; it may just be starting, so this passes for
        // unavailable.
        (
            with(&plain, ours, Some(client))?,
            ErrorKind::Unavailable,
            "secureClientPort",
        ),
        (
            ZooKeeperOptions::new(format!("zk://{at}"))?,
            ErrorKind::Unavailable,
            "zks://",
        ),
    ] {
        let limit = Duration::from_secs(4);
        let started = Moment::now();
        let error = failed(options.with_connect_timeout(limit)).await?;
        ensure!(error.kind() == kind, "{error:?}");
        ensure!(error.to_string().contains(says), "{error}");
        ensure!(started.elapsed() < limit + SOON);
    }

    // With one that is down nobody knows; but what the other says is not kept back.
    let limit = Duration::from_secs(2);
    let both = with(&format!("{at},127.0.0.1:1"), &other, Some(client))?;
    let error = failed(both.with_connect_timeout(limit)).await?;
    ensure!(error.kind() == ErrorKind::Unavailable, "{error:?}");
    ensure!(
        error.to_string().contains("with_certificate_authority"),
        "{error}"
    );

    // Its certificate is of another kind than the only cipher it may use.
    let tls = ZooKeeperEnsemble::with_tls(ours, &ours.sign("alien")?);
    let more = "ssl.protocol=TLSv1.2\nssl.enabledProtocols=TLSv1.2\n\
                ssl.ciphersuites=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256\n";
    let ensemble = ZooKeeperEnsemble::start(1, &format!("{tls}{more}")).await?;
    let error = failed(with(&ensemble.secure_server(0), ours, Some(client))?).await?;
    ensure!(error.kind() == ErrorKind::Other, "{error:?}");
    ensure!(error.to_string().contains("ssl.ciphersuites"), "{error}");

    // One that is for another host, and a name that no certificate could have.
    let elsewhere = ours.sign_for("elsewhere", "DNS:elsewhere.example")?;
    let tls = ZooKeeperEnsemble::with_tls(ours, &elsewhere);
    let ensemble = ZooKeeperEnsemble::start(1, &tls).await?;
    let error = failed(with(&ensemble.secure_server(0), ours, Some(client))?).await?;
    ensure!(error.kind() == ErrorKind::Other, "{error:?}");
    ensure!(error.to_string().contains("other names"), "{error}");
    let error = failed(with("a..b:1", ours, Some(client))?).await?;
    ensure!(error.kind() == ErrorKind::Invalid, "{error:?}");
    Ok(())
}

async fn failed(options: ZooKeeperOptions) -> anyhow::Result<leasehold_core::Error> {
    let connecting = within(SOON, "it is refused", ZooKeeper::connect_with(options)).await?;
    connecting.err().context("connected without a right to")
}
