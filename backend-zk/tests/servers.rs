//! What only real ZooKeeper servers can show: nodes that an operator touches, sessions that end,
//! replies that are lost, rights, and what is left on the servers.

mod support;

use std::future::poll_fn;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;
use leasehold_conformance::{Flow, Proxy};
use leasehold_core::{Backend, ErrorKind, Locks, Moment};
use leasehold_zk::{ZooKeeper, ZooKeeperOptions};
use support::{
    LONG, SOON, claim, client, contenders, granted, locks, metric, operator, run, soon, until,
    until_contenders, waiting, within,
};
use tokio::task::JoinSet;
use zookeeper_client::{Acls, CreateMode};

fn main() -> ExitCode {
    support::main(
        ZooKeeperEnsemble::missing(),
        &[
            ("lost_when_the_servers_are_silent", || {
                run(lost_when_silent())
            }),
            ("nothing_is_lost_by_a_short_cut", || run(short_cut())),
            ("an_old_node_is_not_ours", || run(old_node())),
            ("a_deleted_node_is_lost", || run(deleted_node())),
            ("the_one_ahead_goes_at_any_step", || run(ahead_goes())),
            ("an_ended_session_queues_again", || run(queues_again())),
            ("tokens_rise_and_nothing_is_left", || {
                run(tokens_and_storage())
            }),
            ("one_waiter_wakes_for_each_release", || run(one_wakes())),
            ("watches_leave_the_server", || run(watches_leave())),
            ("a_lost_create_leaves_no_orphan", || run(lost_create())),
            ("names_that_zookeeper_refuses", || run(names())),
            ("a_list_has_every_contender", || run(list())),
            ("nodes_for_their_creator_only", || run(creator_only())),
            ("a_chroot_is_made", || run(chroot())),
            ("nobody_listens", || run(nobody_listens())),
            ("close_gives_everything_back", || run(close())),
        ],
    )
}

async fn one_server() -> anyhow::Result<ZooKeeperEnsemble> {
    ZooKeeperEnsemble::start(1, "").await
}

/// Renewals go out, their answers are swallowed: lost by the local deadline, before the servers let
/// go of it.
async fn lost_when_silent() -> anyhow::Result<()> {
    const TTL: Duration = Duration::from_secs(3);
    let servers = one_server().await?;
    let proxy = Proxy::start(&servers.server(0)).await?;
    let holder = locks(&proxy.address().to_string(), TTL).await?;
    let other = locks(&servers.servers(), TTL).await?;
    for flow in [Flow::LoseReplies, Flow::Hold, Flow::Cut] {
        let key = format!("silent-{flow:?}");
        let guard = soon("granted", holder.lock(&key)).await?;
        let waiter = tokio::spawn({
            let (other, key) = (other.clone(), key.clone());
            async move { other.lock(&key).await }
        });
        proxy.set(flow);
        within(TTL * 2 + SOON, "lost fires", guard.lost()).await?;
        // What the waiter was told up to here was told before.
        ensure!(!waiter.is_finished(), "{flow:?}: granted before lost fired");
        proxy.set(Flow::Pass);
        let next = within(TTL * 3 + SOON, "the waiter is served", waiter).await???;
        ensure!(next.token() > guard.token());
        let released = guard.release().await;
        ensure!(released.is_err_and(|error| error.kind() == ErrorKind::Lost));
        next.release().await?;
    }
    Ok(())
}

/// The connection is cut and held up for less than there is left.
async fn short_cut() -> anyhow::Result<()> {
    const TTL: Duration = Duration::from_secs(12);
    let servers = one_server().await?;
    let proxy = Proxy::start(&servers.server(0)).await?;
    let holder = locks(&proxy.address().to_string(), TTL).await?;
    let guard = soon("granted", holder.lock("short")).await?;
    for flow in [Flow::Cut, Flow::Hold, Flow::LoseReplies, Flow::Cut] {
        proxy.set(flow);
        tokio::time::sleep(TTL / 6).await;
        proxy.set(Flow::Pass);
        // Until it may be believed for most of the ttl again.
        let fresh = async || Ok(guard.remaining() > TTL * 6 / 10 || !guard.is_held());
        tokio::time::sleep(TTL / 4).await;
        until("a sign of life", fresh).await?;
        ensure!(guard.is_held(), "lost by {flow:?}");
    }
    soon("released", guard.release()).await
}

/// A node of a session that is over, still listed, with our own id: it is never taken as ours.
async fn old_node() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let (client, operator) = (
        client(&servers.servers()).await?,
        operator(&servers.servers()).await?,
    );
    // So that the folder is there.
    let mut first = granted(&client, &claim("old", LONG)?).await?;
    let wanted = waiting("old", LONG)?;
    let old = format!("/locks/old/_c_{}-lock-", wanted.id);
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let (_, sequence) = operator.create(&old, b"", &options).await?;
    let mut waiter = pin!(client.acquire(&wanted));
    let queued = async {
        tokio::select! {
            _ = &mut waiter => bail!("granted, though two stand ahead"),
            queued = until_contenders(&operator, "old", 3) => queued,
        }
    };
    queued.await?;
    first.release().await?;
    let taken = tokio::time::timeout(Duration::from_secs(1), &mut waiter).await;
    ensure!(taken.is_err(), "the old node was taken for our own");
    operator.delete(&format!("{old}{sequence}"), None).await?;
    let mut hold = soon("granted", waiter).await?.context("granted")?;
    hold.release().await?;
    Ok(())
}

/// An operator deletes the node of a waiter and that of a holder.
async fn deleted_node() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let operator = operator(&servers.servers()).await?;
    let one = locks(&servers.servers(), LONG).await?;
    let other = locks(&servers.servers(), LONG).await?;
    let guard = soon("granted", one.lock("deleted")).await?;
    let waiter = tokio::spawn(async move { other.with_wait(None).lock("deleted").await });
    until_contenders(&operator, "deleted", 2).await?;
    let nodes = contenders(&operator, "deleted").await?;
    operator
        .delete(&format!("/locks/deleted/{}", nodes[1]), None)
        .await?;
    match within(SOON, "the waiter hears of it", waiter).await?? {
        Err(error) => ensure!(error.kind() == ErrorKind::Lost, "{error}"),
        Ok(_) => bail!("granted, because it is not in the list"),
    }
    ensure!(guard.is_held());
    operator
        .delete(&format!("/locks/deleted/{}", nodes[0]), None)
        .await?;
    within(SOON, "the holder hears of it", guard.lost()).await?;
    let released = guard.release().await;
    ensure!(released.is_err_and(|error| error.kind() == ErrorKind::Lost));
    Ok(())
}

/// The one ahead vanishes after any number of steps of the waiter, between list and watch too: no
/// wake-up is lost.
async fn ahead_goes() -> anyhow::Result<()> {
    const STEPS: usize = 24;
    let servers = one_server().await?;
    let (one, other) = (
        client(&servers.servers()).await?,
        client(&servers.servers()).await?,
    );
    let warm = granted(&one, &claim("warm", LONG)?).await?;
    let warm_too = granted(&other, &claim("warm-too", LONG)?).await?;
    let before = metric(&servers, 0, "zk_packets_received").await?;
    for steps in 0..STEPS {
        let key = format!("ahead-{steps}");
        let mut hold = granted(&one, &claim(&key, LONG)?).await?;
        let wanted = waiting(&key, LONG)?;
        let mut waiter = pin!(other.acquire(&wanted));
        let mut taken = 0;
        // Steps beyond those that it has to take come by themselves, once a second at least.
        let stepping = poll_fn(|cx| {
            if taken == steps {
                return Poll::Ready(true);
            }
            taken += 1;
            match waiter.as_mut().poll(cx) {
                Poll::Ready(_) => Poll::Ready(false),
                Poll::Pending => Poll::Pending,
            }
        });
        let idle = tokio::time::timeout(Duration::from_millis(300), stepping);
        ensure!(idle.await.unwrap_or(true), "granted while another holds it");
        hold.release().await?;
        let mut hold = soon("granted", waiter).await?.context("granted")?;
        hold.release().await?;
    }
    let sent = metric(&servers, 0, "zk_packets_received").await? - before;
    // Signs of life and the like included.
    ensure!(
        sent < 60 * STEPS as u64,
        "{sent} requests for {STEPS} hand-offs"
    );
    drop((warm, warm_too));
    Ok(())
}

/// A session ends while a claim waits in it: the claim queues again and is served.
async fn queues_again() -> anyhow::Result<()> {
    const TTL: Duration = Duration::from_secs(2);
    let servers = one_server().await?;
    let operator = operator(&servers.servers()).await?;
    let proxy = Proxy::start(&servers.server(0)).await?;
    let one = locks(&servers.servers(), LONG).await?;
    let other = locks(&proxy.address().to_string(), TTL).await?;
    let guard = soon("granted", one.lock("again")).await?;
    let waiter = tokio::spawn(async move { other.with_wait(None).lock("again").await });
    until_contenders(&operator, "again", 2).await?;
    let nodes = contenders(&operator, "again").await?;
    proxy.set(Flow::Cut);
    until_contenders(&operator, "again", 1).await?;
    ensure!(!waiter.is_finished(), "it has given up");
    proxy.set(Flow::Pass);
    until_contenders(&operator, "again", 2).await?;
    ensure!(contenders(&operator, "again").await?[1] != nodes[1]);
    guard.release().await?;
    let guard = soon("served", waiter).await??;
    guard.release().await?;
    Ok(())
}

/// Many cycles of every kind, the server restarted in between: tokens rise, and in the end there is
/// nothing left.
async fn tokens_and_storage() -> anyhow::Result<()> {
    const CYCLES: u32 = 1000;
    let servers = one_server().await?;
    let mut last = 0;
    let mut rises = |token: leasehold_core::Token| {
        let before = std::mem::replace(&mut last, token.get());
        ensure!(token.get() > before, "{token} after {before}");
        anyhow::Ok(())
    };
    let one = locks(&servers.servers(), LONG).await?;
    let two = locks(&servers.servers(), LONG).await?;
    for cycle in 0..CYCLES {
        if cycle % 400 == 300 {
            leasehold_conformance::Control::restart(&servers).await?;
        }
        let locks = if cycle % 3 == 0 { &one } else { &two };
        let owner = locks.owner();
        let guard = soon("granted", owner.lock("cycle")).await?;
        rises(guard.token())?;
        if cycle % 5 == 0 {
            let again = soon("re-entered", owner.lock("cycle")).await?;
            ensure!(again.token() == guard.token());
        }
        match cycle % 100 {
            7 => {
                let evicted = soon("evicted", one.evict("cycle", None)).await?;
                ensure!(evicted);
                within(SOON, "lost", guard.lost()).await?;
            }
            _ => soon("released", guard.release()).await?,
        }
    }
    one.close().await?;
    two.close().await?;
    let operator = operator(&servers.servers()).await?;
    until_contenders(&operator, "cycle", 0).await?;
    until("no session is left", async || {
        Ok(operator.list_children("/locks/%sessions").await?.is_empty())
    })
    .await
}

/// With 200 waiting, a release wakes one: what the server is asked and what it tells does not grow
/// with those who wait.
async fn one_wakes() -> anyhow::Result<()> {
    const WAITERS: u64 = 200;
    let servers = one_server().await?;
    let holder = client(&servers.servers()).await?;
    let operator = operator(&servers.servers()).await?;
    let mut hold = granted(&holder, &claim("herd", LONG)?).await?;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(Arc::new(client(&servers.servers()).await?));
    }
    let mut waiters = JoinSet::new();
    for index in 0..WAITERS {
        let client = clients[usize::try_from(index)? % clients.len()].clone();
        let wanted = waiting("herd", LONG)?;
        waiters.spawn(async move { client.acquire(&wanted).await });
    }
    until_contenders(&operator, "herd", 201).await?;
    // The last of them have set their watches: two each, but one where both are of one client.
    let mut watches = 0;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = metric(&servers, 0, "zk_watch_count").await?;
        if now > WAITERS && now == std::mem::replace(&mut watches, now) {
            break;
        }
    }
    let counted = async || {
        let asked = metric(&servers, 0, "zk_packets_received").await?;
        let told = metric(&servers, 0, "zk_sum_node_deleted_watch_count")
            .await
            .unwrap_or(0);
        anyhow::Ok((asked, told))
    };
    let (asked, told) = counted().await?;
    let started = Moment::now();
    let mut served = 0_u64;
    loop {
        soon("released", hold.release()).await?;
        let Some(next) = within(SOON, "the next is served", waiters.join_next()).await? else {
            break;
        };
        hold = next??.context("granted")?;
        served += 1;
        ensure!(
            waiters.is_empty() || waiters.try_join_next().is_none(),
            "two were served"
        );
    }
    ensure!(served == WAITERS);
    let (asked_then, told_then) = counted().await?;
    // Signs of life: six sessions, eight in a ttl, and pings.
    let signs = 6 * 10 * (1 + started.elapsed().as_secs());
    let asked = asked_then - asked;
    ensure!(
        asked < 6 * WAITERS + signs,
        "{asked} requests for {WAITERS} releases"
    );
    let told = told_then - told;
    ensure!(
        told <= 2 * WAITERS + 2,
        "{told} watches for {WAITERS} releases"
    );
    Ok(())
}

/// Waiters that are cancelled take their watches with them.
async fn watches_leave() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let (one, other) = (
        client(&servers.servers()).await?,
        client(&servers.servers()).await?,
    );
    let operator = operator(&servers.servers()).await?;
    let _hold = granted(&one, &claim("watched", LONG)?).await?;
    let watches = async || metric(&servers, 0, "zk_watch_count").await;
    for _ in 0..20 {
        let wanted = waiting("watched", LONG)?;
        let waiter = other.acquire(&wanted);
        let queued = async {
            until_contenders(&operator, "watched", 2).await?;
            until("it watches", async || Ok(watches().await? >= 2)).await
        };
        tokio::select! {
            _ = waiter => bail!("granted while another holds it"),
            queued = queued => queued?,
        }
    }
    until_contenders(&operator, "watched", 1).await?;
    // The holder watches its own node.
    until("no watch is left", async || Ok(watches().await? <= 1)).await
}

/// The answer to a create is lost, the connection with it: the node is found again, or there is one
/// only; a claim that gives up leaves none.
async fn lost_create() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let operator = operator(&servers.servers()).await?;
    let proxy = Proxy::start(&servers.server(0)).await?;
    let client = client(&proxy.address().to_string()).await?;
    let warm = granted(&client, &claim("warm", LONG)?).await?;
    for round in 0..5 {
        let key = format!("create-{round}");
        let wanted = waiting(&key, LONG)?;
        let nobody = soon("the connection stands", client.holder(&wanted.key)).await?;
        ensure!(nobody.is_none());
        proxy.set(Flow::LoseReplies);
        let mut acquire = pin!(client.acquire(&wanted));
        let created = async {
            until_contenders(&operator, &key, 1).await?;
            proxy.set(Flow::Cut);
            proxy.set(Flow::Pass);
            anyhow::Ok(())
        };
        tokio::select! {
            _ = &mut acquire => bail!("answered, though the answer was lost"),
            created = created => created?,
        }
        if round % 2 == 0 {
            let mut hold = soon("granted", acquire).await?.context("granted")?;
            ensure!(
                contenders(&operator, &key).await?.len() == 1,
                "an orphan is left"
            );
            hold.release().await?;
        }
        // Else it is dropped here.
    }
    drop(warm);
    for round in 0..5 {
        until_contenders(&operator, &format!("create-{round}"), 0).await?;
    }
    Ok(())
}

/// More locks than a page has, other programs' among them, and nodes that are no locks.
async fn list() -> anyhow::Result<()> {
    const LOCKS: usize = 250;
    let servers = one_server().await?;
    let (client, operator) = (
        client(&servers.servers()).await?,
        operator(&servers.servers()).await?,
    );
    let mut held = Vec::new();
    for number in 0..LOCKS {
        held.push(granted(&client, &claim(&format!("n/{number:03}"), LONG)?).await?);
    }
    let all = Acls::anyone_all();
    let (folder, contender) = (
        CreateMode::Persistent.with_acls(all),
        CreateMode::EphemeralSequential.with_acls(all),
    );
    // No lock, an empty one, one of kazoo's, one that we would write otherwise, and with another waiting.
    for path in ["plain", "plain/child", "empty", "theirs", "%2f"] {
        operator
            .create(&format!("/locks/{path}"), b"", &folder)
            .await?;
    }
    let kazoo = "/locks/theirs/0123456789abcdef__lock__";
    operator.create(kazoo, b"host-7", &contender).await?;
    operator.create("/locks/%2f/lock-", b"", &contender).await?;
    operator
        .create("/locks/n%2F007/lock-", b"", &contender)
        .await?;

    let locks = Locks::new(client);
    let mut listing = locks.list("");
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    while let Some(listed) = soon("listed", listing.next()).await? {
        match &listed.key {
            Some(key) if key.as_str().starts_with("n/") => ours.push(listed),
            _ => others.push(listed),
        }
    }
    ours.sort_by_key(|listed| listed.key.clone());
    ensure!(ours.len() == LOCKS, "{} in place of {LOCKS}", ours.len());
    for (number, (listed, hold)) in ours.iter().zip(&held).enumerate() {
        let holder = listed.holder.as_ref().context("held")?;
        ensure!(holder.token == Some(hold.token()), "{listed:?}");
        ensure!(listed.waiting == Some((number == 7).into()), "{listed:?}");
        ensure!(listed.raw == format!("/locks/n%2F{number:03}"));
    }
    others.sort_by_key(|listed| listed.raw.clone());
    let [odd, theirs] = &others[..] else {
        bail!("{others:?}");
    };
    ensure!(odd.key.is_none() && odd.raw == "/locks/%2f", "{odd:?}");
    ensure!(odd.holder.is_some());
    let holder = theirs.holder.as_ref().context("held")?;
    ensure!(holder.owner.as_deref() == Some("host-7"), "{theirs:?}");
    let mut few = locks.list("n/00");
    let mut count = 0;
    while soon("listed", few.next()).await?.is_some() {
        count += 1;
    }
    ensure!(count == 10, "{count} that begin with n/00");
    Ok(())
}

async fn names() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let one = locks(&servers.servers(), LONG).await?;
    let other = locks(&servers.servers(), LONG).await?;
    let long = "\u{1f512}".repeat(256);
    let names = [
        "\u{1f512}",
        "\u{85}",
        "\u{f8ff}",
        "\u{fff0}",
        "\u{ffff}",
        ".",
        "..",
        "a",
        "a/b",
        "a%2Fb",
        "/",
        "\0",
        "zookeeper",
        "%sessions",
        &long,
    ];
    let mut guards = Vec::new();
    for name in names {
        let guard = soon("granted", one.try_lock(name)).await?;
        guards.push(guard.with_context(|| format!("{name:?} meets another name"))?);
    }
    for name in names {
        ensure!(
            soon("tried", other.try_lock(name)).await?.is_none(),
            "{name:?} is held"
        );
    }
    for guard in guards {
        guard.release().await?;
    }
    Ok(())
}

async fn creator_only() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let options =
        ZooKeeperOptions::new(format!("zk://{}", servers.servers()))?.with_prefix("/private/locks");
    let ours = options
        .clone()
        .with_credentials("us", "secret")
        .with_creator_only(true);
    let one = Locks::new(ZooKeeper::connect_with(ours.clone()).await?).with_wait(SOON);
    let two = Locks::new(ZooKeeper::connect_with(ours).await?);
    let guard = soon("granted", one.lock("k")).await?;
    ensure!(soon("tried", two.try_lock("k")).await?.is_none());
    for theirs in [
        options.clone(),
        options
            .with_credentials("them", "secret")
            .with_creator_only(true),
    ] {
        let Err(error) = ZooKeeper::connect_with(theirs).await else {
            bail!("somebody else may use the nodes");
        };
        ensure!(error.kind() == ErrorKind::Other, "{error}");
        let text = format!("{error} {error:?}");
        ensure!(
            text.contains("right is missing") && !text.contains("secret"),
            "{text}"
        );
    }
    let operator = operator(&servers.servers()).await?;
    let read = operator.list_children("/private/locks/k").await;
    ensure!(read == Err(zookeeper_client::Error::NoAuth), "{read:?}");
    soon("released", guard.release()).await
}

async fn chroot() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let inside = format!("{}/tenants/one", servers.servers());
    let one = locks(&inside, LONG).await?;
    let other = locks(&inside, LONG).await?;
    let outside = locks(&servers.servers(), LONG).await?;
    let guard = soon("granted", one.lock("k")).await?;
    ensure!(soon("tried", other.try_lock("k")).await?.is_none());
    let apart = soon("tried", outside.try_lock("k")).await?;
    ensure!(apart.is_some(), "held in another chroot only");
    let operator = operator(&servers.servers()).await?;
    ensure!(operator.list_children("/tenants/one/locks/k").await?.len() == 1);
    soon("released", guard.release()).await
}

async fn nobody_listens() -> anyhow::Result<()> {
    let limit = Duration::from_secs(2);
    let started = Moment::now();
    let options =
        ZooKeeperOptions::new("zk://127.0.0.1:1,127.0.0.1:2")?.with_connect_timeout(limit);
    let Err(error) = ZooKeeper::connect_with(options).await else {
        bail!("connected to nobody");
    };
    ensure!(error.kind() == ErrorKind::Unavailable, "{error}");
    ensure!(
        error.to_string().contains("127.0.0.1:1,127.0.0.1:2"),
        "{error}"
    );
    ensure!(started.elapsed() < limit + SOON);

    // A first attempt that does not get through fails, one that is queued does not.
    let servers = one_server().await?;
    let locks = locks(&servers.servers(), LONG).await?;
    let locks = locks.with_request_limit(Duration::from_secs(1));
    let guard = soon("granted", locks.lock("k")).await?;
    servers.member(0).kill();
    let Err(error) = within(SOON, "answered", locks.lock("other")).await? else {
        bail!("granted by nobody");
    };
    ensure!(error.kind() == ErrorKind::Unavailable, "{error}");
    servers.start_again(0).await?;
    ensure!(guard.is_held());
    until("released", async || {
        Ok(locks.try_lock("other").await.is_ok())
    })
    .await?;
    drop(guard);
    Ok(())
}

async fn close() -> anyhow::Result<()> {
    let servers = one_server().await?;
    let one = locks(&servers.servers(), LONG).await?;
    let other = locks(&servers.servers(), LONG).await?;
    let guard = soon("granted", one.lock("k")).await?;
    soon("closed", one.close()).await?;
    ensure!(!guard.is_held());
    let next = soon("tried", other.try_lock("k")).await?;
    ensure!(next.is_some(), "freed by the close");
    let Err(error) = one.lock("k").await else {
        bail!("locked after the close");
    };
    ensure!(error.kind() == ErrorKind::Closed);
    let connections = metric(&servers, 0, "zk_num_alive_connections").await?;
    ensure!(connections <= 2, "{connections} connections are left");
    Ok(())
}
