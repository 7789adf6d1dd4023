//! What only etcd can show of a list: queues longer than a page, keys of others.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use etcd_client::{Compare, CompareOp, Txn, TxnOp};
use leasehold_core::{Backend, Listed, Token};

use crate::Test;
use crate::support::{claim, etcd, raw, servers, test};

const LONG: Duration = Duration::from_secs(60);

pub(crate) const TESTS: &[Test] = &[
    test!("a list goes through queues of every length", long_queues),
    test!("a list has what others have put there", foreign_keys),
];

async fn list(client: &dyn Backend, prefix: &str) -> anyhow::Result<Vec<Listed>> {
    let (mut locks, mut after) = (Vec::new(), None);
    loop {
        let page = client.list(prefix, after.as_deref()).await?;
        locks.extend(page.locks);
        after = page.next;
        if after.is_none() {
            return Ok(locks);
        }
    }
}

/// Writes these keys, many at a time.
async fn put(client: &etcd_client::Client, keys: &[String]) -> anyhow::Result<()> {
    for keys in keys.chunks(100) {
        let puts: Vec<_> = keys
            .iter()
            .map(|key| TxnOp::put(key.as_str(), "them", None))
            .collect();
        let always = Compare::version("none", CompareOp::Equal, 0);
        let txn = Txn::new().when([always]).and_then(puts);
        let put = client.kv_client().txn(txn).await?;
        ensure!(put.succeeded());
    }
    Ok(())
}

/// A page has 500 places: queues end before, on and behind its edges.
async fn long_queues() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let (client, raw) = (etcd(&servers).await?, raw(&servers.endpoint(0)).await?);
    let queues = [
        ("a", 499),
        ("b", 1),
        ("c", 1),
        ("d", 498),
        ("e", 500),
        ("f", 1234),
        ("g", 3),
    ];
    for (name, places) in queues {
        // The first comes last in the order of names.
        let places = (0..places).map(|place| format!("locks/{name}/{:05}", 99_999 - place));
        put(&raw, &places.collect::<Vec<_>>()).await?;
    }
    let all = list(&client, "").await?;
    let found: Vec<_> = all
        .iter()
        .map(|it| Some((it.key.as_ref()?.as_str(), it.waiting? + 1)))
        .collect::<Option<_>>()
        .context("all of them have names and queues")?;
    ensure!(found == queues, "{found:?}");
    for listed in &all {
        let holder = listed.holder.as_ref().context("held")?;
        let key = listed.key.as_ref().context("named")?;
        let seen = client.holder(key).await?.context("held")?;
        ensure!(holder.token == seen.token, "{holder:?}");
        ensure!(holder.remaining.is_none(), "no lease, and yet: {holder:?}");
    }
    for (prefix, count) in [("f", 1), ("h", 0), ("a/", 0)] {
        let found = list(&client, prefix).await?.len();
        ensure!(found == count, "{found} that begin with {prefix}");
    }
    Ok(())
}

async fn foreign_keys() -> anyhow::Result<()> {
    let servers = servers(1).await?;
    let (client, raw) = (etcd(&servers).await?, raw(&servers.endpoint(0)).await?);
    let ours = claim("a/b", LONG)?;
    let hold = client.acquire(&ours).await?.context("it is free")?;
    let keys = [
        // In the folder of no lock, and of one whose name we would write otherwise.
        "locks/plain",
        "locks0",
        "other/a/1",
        "locks/%2f/1",
        "locks//1",
        // What etcd's own client would write for `locks/x`.
        "locks/x/7587",
    ];
    put(&raw, &keys.map(str::to_owned)).await?;
    let not_text = [&b"locks/"[..], &[0xff], b"/1"].concat();
    raw.kv_client().put(not_text, "them", None).await?;
    let all = list(&client, "").await?;
    let mut named: Vec<_> = all.iter().map(|it| (it.key.as_ref(), &*it.raw)).collect();
    named.sort_by_key(|(_, raw)| *raw);
    let x = leasehold_core::Key::new("x")?;
    let expected = [
        (None, "locks/%2f/"),
        (None, "locks//"),
        (Some(&ours.key), "locks/a%2Fb/"),
        (Some(&x), "locks/x/"),
        (None, "locks/\u{fffd}/"),
    ];
    ensure!(named == expected, "{named:?}");
    let of = |name: &str| all.iter().find(|it| it.raw == name).context("listed");
    let holder = of("locks/a%2Fb/")?.holder.as_ref().context("held")?;
    ensure!(holder.token == Some(hold.token()));
    ensure!(holder.remaining.is_some_and(|left| left <= LONG));
    let theirs = of("locks/x/")?.holder.as_ref().context("held")?;
    ensure!(theirs.owner.as_deref() == Some("them"), "{theirs:?}");
    ensure!(theirs.token > Some(Token::new(0)));
    Ok(())
}
