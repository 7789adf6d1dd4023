//! Owners, their releases, and operators who look and take away.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use leasehold_core::{Backend, ErrorKind, Holder, Key, Listed};

use crate::cx::{
    Cx, Skip, after, claim, fails, granted, locks, queued, refused, soon, waiting, within,
};
use crate::faulty::{Fault, Faulty};
use crate::rule::{Rule, check};
use crate::steps::{Step, steps};

pub(super) const C13: Rule = Rule {
    id: "C13",
    title: "a release that failed or was cancelled goes through by itself",
    checks: &[
        check!("its first attempt fails", [], failed_release_goes_through),
        check!(
            "its first attempt fails after a drop",
            [],
            failed_drop_goes_through
        ),
        check!(
            "cancelled at every await",
            [],
            cancelled_release_goes_through
        ),
        check!("its answer is lost", [], unanswered_release_is_harmless),
        check!("nothing renews", [Lease], nothing_renews_after_release),
    ],
};

pub(super) const C16: Rule = Rule {
    id: "C16",
    title: "re-entry goes by owner",
    checks: &[
        check!("counted, and without a round trip", [], reentry_is_counted),
        check!(
            "while the first acquire is under way",
            [],
            reentry_under_way
        ),
        check!("others are kept out", [], other_owners_are_kept_out),
        check!("not after a loss", [], no_reentry_after_a_loss),
    ],
};

pub(super) const C21: Rule = Rule {
    id: "C21",
    title: "holder says who holds, evict takes that grant away",
    checks: &[
        check!("who holds", [], holder_tells),
        check!("whoever holds it is evicted", [], evict_whoever),
        check!("only the grant that is named", [], evict_the_named_grant),
        check!("a list has what is held", [], list_has_what_is_held),
        check!("a list has the names", [], list_has_the_names),
    ],
};

async fn failed_release_goes_through(cx: Cx) -> anyhow::Result<()> {
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let guard = locks(faulty.clone()).lock(&key).await?;
    faulty.calls().release.set(Fault::FailsOnce);
    let released = soon("a release is answered", guard.release()).await?;
    fails(
        ErrorKind::Unavailable,
        "a release that does not get through",
        released,
    )?;
    is_free_soon(&cx, &*other, &key).await
}

async fn failed_drop_goes_through(cx: Cx) -> anyhow::Result<()> {
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let guard = locks(faulty.clone()).lock(&key).await?;
    faulty.calls().release.set(Fault::FailsOnce);
    drop(guard);
    is_free_soon(&cx, &*other, &key).await
}

async fn cancelled_release_goes_through(cx: Cx) -> anyhow::Result<()> {
    const AWAITS: usize = 300;
    let (locks, other) = (cx.locks().await?, cx.client().await?);
    for polls in 0..AWAITS {
        let key = cx.key();
        let guard = locks.lock(&key).await?;
        let step = soon("a release goes on", steps(polls, guard.release())).await?;
        let free = is_free_soon(&cx, &*other, &key).await;
        free.with_context(|| format!("after a drop at poll {polls}"))?;
        if let Step::Completed(released) = step {
            return Ok(released?);
        }
    }
    bail!("a release did not complete in {AWAITS} polls")
}

/// The release is done, and its repetition finds nothing: that must not harm the owner's next grant.
async fn unanswered_release_is_harmless(cx: Cx) -> anyhow::Result<()> {
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let me = locks(faulty.clone()).owner();
    let guard = me.lock(&key).await?;
    let token = guard.token();
    faulty.calls().release.set(Fault::LosesAnswerOnce);
    drop(guard);
    let next = soon("granted again", me.lock(&key)).await??;
    ensure!(next.token() > token, "the old grant again");
    // Whatever is repeated is repeated by then.
    let repeated = async {
        while faulty.calls().release.begun() < 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    soon("the release is repeated", repeated).await?;
    refused(&*other, &key).await?;
    ensure!(next.is_held(), "a repeated release took the next grant");
    next.release().await?;
    Ok(())
}

/// With releases that are never answered only the end of the lease frees it: it does so only if
/// nothing renews.
async fn nothing_renews_after_release(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.ttl();
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let guard = locks(faulty.clone()).with_ttl(ttl).lock(&key).await?;
    faulty.calls().release.set(Fault::Silent);
    let _dropped = steps(1, guard.release()).await;
    let renewals = faulty.calls().renew.begun();
    let wanted = waiting(&key, Cx::LONG);
    let next = within(after(ttl), "the lease runs out", other.acquire(&wanted)).await??;
    ensure!(
        next.is_some(),
        "a claim without a limit to its wait gave up"
    );
    let since = faulty.calls().renew.begun() - renewals;
    ensure!(since == 0, "{since} renewals were sent after the release");
    Ok(())
}

async fn is_free_soon(
    _cx: &Cx,
    client: &dyn leasehold_core::Backend,
    key: &leasehold_core::Key,
) -> anyhow::Result<()> {
    let wanted = waiting(key, Cx::LONG);
    let next = soon("the release goes through", client.acquire(&wanted)).await??;
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    next.release().await?;
    Ok(())
}

async fn reentry_is_counted(cx: Cx) -> anyhow::Result<()> {
    let (faulty, other, key) = (
        Faulty::new(cx.client().await?),
        cx.client().await?,
        cx.key(),
    );
    let me = locks(faulty.clone()).owner();
    let same = me.clone();
    let one = me.lock(&key).await?;
    let two = same.try_lock(&key).await?.context("not re-entered")?;
    let three = tokio::spawn({
        let (me, key) = (me.clone(), key.clone());
        async move { me.lock(&key).await }
    });
    let three = soon("re-entered from another task", three).await???;
    let sent = faulty.calls().acquire.begun();
    ensure!(sent == 1, "{sent} claims for one grant");
    for guard in [one, three] {
        guard.release().await?;
        refused(&*other, &key).await?;
        ensure!(two.is_held(), "lost by a partial release");
    }
    let sent = faulty.calls().release.begun();
    ensure!(sent == 0, "released before the last guard was gone");
    two.release().await?;
    granted(&*other, &claim(&key, Cx::LONG)).await?;
    Ok(())
}

async fn reentry_under_way(cx: Cx) -> anyhow::Result<()> {
    let (client, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*other, &claim(&key, Cx::LONG)).await?;
    let me = locks(Arc::clone(&client)).owner();
    let (mut one, mut two) = (Box::pin(me.lock(&key)), Box::pin(me.lock(&key)));
    queued(&*client, &key, &mut one).await?;
    queued(&*client, &key, &mut two).await?;
    ensure!(
        me.try_lock(&key).await?.is_none(),
        "a try waited for the first"
    );
    hold.release().await?;
    let (one, two) = soon("both are in", async { tokio::join!(one, two) }).await?;
    let (one, two) = (one?, two?);
    ensure!(one.token() == two.token(), "two grants for one owner");
    refused(&*other, &key).await?;
    drop(one);
    refused(&*other, &key).await?;
    two.release().await?;
    Ok(())
}

async fn other_owners_are_kept_out(cx: Cx) -> anyhow::Result<()> {
    let (locks, others, key) = (cx.locks().await?, cx.locks().await?, cx.key());
    let me = locks.owner();
    let guard = me.lock(&key).await?;
    let again = me.lock(&key).await?;
    // On the same task, on the same client and on another.
    for stranger in [locks.owner(), others.owner()] {
        ensure!(
            stranger.try_lock(&key).await?.is_none(),
            "two owners hold {key}"
        );
    }
    ensure!(
        locks.try_lock(&key).await?.is_none(),
        "two owners hold {key}"
    );
    guard.release().await?;
    ensure!(locks.try_lock(&key).await?.is_none(), "one guard was left");
    again.release().await?;
    Ok(())
}

/// The owner's lock is taken away and granted to the same owner again: the old guard has no part in
/// the new grant.
async fn no_reentry_after_a_loss(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (one, other, key) = (cx.locks().await?, cx.client().await?, cx.key());
    let me = one.with_ttl(ttl).owner();
    let old = me.lock(&key).await?;
    evicted(other.evict(&key, None).await)?;
    within(after(ttl), "lost fires", old.lost()).await?;
    let new = within(after(ttl), "granted again", me.lock(&key)).await??;
    ensure!(new.token() > old.token(), "the lost grant again");
    ensure!(!old.is_held(), "revived");
    let released = soon("a release is answered", old.release()).await?;
    fails(ErrorKind::Lost, "the release of a lost lock", released)?;
    refused(&*other, &key).await?;
    ensure!(new.is_held(), "lost with the old guard");
    new.release().await?;
    Ok(())
}

async fn holder_tells(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.locks().await?, cx.locks().await?, cx.key());
    let nobody = other.holder(&key).await?;
    ensure!(nobody.is_none(), "nobody holds it, and yet: {nobody:?}");
    let guard = one.with_label("the suite").lock(&key).await?;
    for locks in [&one, &other] {
        let holder = locks.holder(&key).await?.context("somebody holds it")?;
        let owner = guard.owner().to_string();
        ensure!(
            holder.owner.as_ref().is_none_or(|o| *o == owner),
            "{holder:?}"
        );
        let label = holder.label.as_deref();
        ensure!(label.is_none_or(|label| label == "the suite"), "{holder:?}");
        ensure!(
            holder.token.is_none_or(|token| token == guard.token()),
            "{holder:?}"
        );
        let left = holder.remaining;
        ensure!(left.is_none_or(|left| left <= Cx::LONG), "{holder:?}");
        ensure!(!holder.grant.is_empty(), "a grant without a name");
    }
    guard.release().await?;
    let nobody = other.holder(&key).await?;
    ensure!(
        nobody.is_none(),
        "nobody holds it any more, and yet: {nobody:?}"
    );
    Ok(())
}

async fn evict_whoever(cx: Cx) -> anyhow::Result<()> {
    let ttl = cx.steady_ttl();
    let (one, operator, other, key) = (
        cx.locks().await?,
        cx.client().await?,
        cx.client().await?,
        cx.key(),
    );
    let free = evicted(operator.evict(&key, None).await)?;
    ensure!(!free, "taken away from nobody");
    let guard = one.with_ttl(ttl).lock(&key).await?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    let taken = soon("an evict is answered", operator.evict(&key, None)).await?;
    ensure!(evicted(taken)?, "nothing was taken away");
    within(after(ttl), "lost fires", guard.lost()).await?;
    let next = within(after(ttl), "the next waiter gets it", waiter).await??;
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    ensure!(next.token() > guard.token(), "a token that does not rise");
    drop(guard);
    next.renew().await.context("the successor's renewal")?;
    next.release().await.context("the successor's release")?;
    Ok(())
}

async fn evict_the_named_grant(cx: Cx) -> anyhow::Result<()> {
    let (one, operator, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut first = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let named = operator.holder(&key).await?.context("somebody holds it")?;
    first.release().await?;
    ensure!(
        !evicted(operator.evict(&key, Some(&named)).await)?,
        "taken away from nobody"
    );
    let mut second = granted(&*one, &claim(&key, Cx::LONG)).await?;
    ensure!(
        !evicted(operator.evict(&key, Some(&named)).await)?,
        "another grant than the named one was taken away"
    );
    refused(&*operator, &key).await?;
    second.renew().await.context("the successor's renewal")?;
    let named = operator.holder(&key).await?.context("somebody holds it")?;
    ensure!(
        evicted(operator.evict(&key, Some(&named)).await)?,
        "the named grant was not taken away"
    );
    let renewed = soon("a renewal is answered", second.renew()).await?;
    fails(ErrorKind::Lost, "the renewal of an evicted lock", renewed)?;
    granted(&*operator, &claim(&key, Cx::LONG)).await?;
    Ok(())
}

async fn list_has_what_is_held(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let prefix = key.as_str();
    let holder = || async {
        let holder = other.holder(&key).await?.context("somebody holds it")?;
        anyhow::Ok(holder)
    };

    let mut first = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let before = holder().await?;
    is_listed(&listed(&*other, prefix).await?, &key, &before, 0)?;
    let wanted = waiting(&key, Cx::LONG);
    let mut waiter = other.acquire(&wanted);
    queued(&*other, &key, &mut waiter).await?;
    let meanwhile = tokio::select! {
        biased;
        _ = &mut waiter => bail!("granted, though another holds it"),
        listed = soon("a list is answered", listed(&*one, prefix)) => listed??,
    };
    is_listed(&meanwhile, &key, &before, 1)?;

    soon("a release is answered", first.release()).await??;
    let next = soon("the waiter is served", waiter).await??;
    let mut next = next.context("a claim without a limit to its wait gave up")?;
    let after = holder().await?;
    is_listed(&listed(&*one, prefix).await?, &key, &after, 0)?;
    soon("a release is answered", next.release()).await??;
    let listed = listed(&*one, prefix).await?;
    let over = listed.iter().find(|listed| {
        let grants = [&before.grant, &after.grant];
        let holder = listed.holder.as_ref();
        let is_over = holder.is_some_and(|holder| grants.contains(&&holder.grant));
        listed.key.as_ref() == Some(&key) || is_over
    });
    ensure!(
        over.is_none(),
        "nobody holds it any more, and yet: {over:?}"
    );
    Ok(())
}

/// Whether the lock is there, with this holder and so many who wait, as far as the store knows that.
fn is_listed(listed: &[Listed], key: &Key, by: &Holder, waiters: u64) -> anyhow::Result<()> {
    let listed = listed
        .iter()
        .find(|listed| match (&listed.key, &listed.holder) {
            (Some(listed), _) => listed == key,
            // Names are not known here, and of a holder that is busy perhaps not its grant either.
            (None, Some(holder)) => {
                holder.grant == by.grant || holder.token.is_none_or(|it| Some(it) == by.token)
            }
            (None, None) => false,
        })
        .context("it is held, and not listed")?;
    let holder = listed
        .holder
        .as_ref()
        .context("a held lock without holder")?;
    ensure!(
        listed.key.is_none() || holder.grant == by.grant,
        "another grant than {by:?}: {listed:?}"
    );
    ensure!(
        listed.waiting.is_none_or(|waiting| waiting == waiters),
        "not {waiters} waiting: {listed:?}"
    );
    ensure!(!listed.raw.is_empty(), "the store has no name for it");
    Ok(())
}

async fn list_has_the_names(cx: Cx) -> anyhow::Result<()> {
    let (one, other) = (cx.client().await?, cx.client().await?);
    let unique = cx.key();
    // What stores escape, in front of what no other check has, and behind it.
    let odd = [
        "/",
        "%",
        "%2F",
        ".",
        "..",
        " ",
        "*",
        "[a]",
        "{}",
        "{a}",
        "\\",
        "\0",
        "\n",
        "\u{85}",
        "\u{e9}",
        "e\u{301}",
        "\u{f8ff}",
        "\u{ffff}",
        "\u{1f512}",
        "leasehold:",
        "leasehold:key:",
        "leasehold:queue:",
        "lock:",
        "locks/",
        "A",
        "a",
    ];
    let long = "x".repeat(Key::MAX_LEN - unique.as_str().len());
    let mut names = vec![format!("{unique}{long}"), format!("{long}{unique}")];
    for odd in odd {
        names.extend([format!("{odd}{unique}"), format!("{unique}{odd}")]);
    }
    let mut held = Vec::new();
    for name in &names {
        held.push(granted(&*one, &claim(&Key::new(name)?, Cx::LONG)).await?);
    }
    for prefix in odd.into_iter().chain(["", unique.as_str(), &long]) {
        let listed = listed(&*other, prefix).await?;
        let nameless = listed.iter().any(|listed| listed.key.is_none());
        let listed: BTreeSet<Key> = listed.into_iter().filter_map(|it| it.key).collect();
        if listed.is_empty() && nameless {
            bail!(Skip("the store does not know the names of locks"));
        }
        if let Some(other) = listed.iter().find(|key| !key.as_str().starts_with(prefix)) {
            bail!("listed, though it does not begin with {prefix:?}: {other:?}");
        }
        for name in names.iter().filter(|name| name.starts_with(prefix)) {
            ensure!(
                listed.contains(name.as_str()),
                "held, and not listed with what begins with {prefix:?}: {name:?}"
            );
        }
    }
    for hold in &mut held {
        soon("a release is answered", hold.release()).await??;
    }
    Ok(())
}

/// The locks that begin with `prefix`, also where the store can only list all; leaves the check where it
/// lists none.
async fn listed(client: &dyn Backend, prefix: &str) -> anyhow::Result<Vec<Listed>> {
    let unsupported = |listed: &leasehold_core::Result<_>| matches!(listed, Err(error) if error.kind() == ErrorKind::Unsupported);
    let listed = list(client, prefix).await;
    if !unsupported(&listed) {
        return Ok(listed?);
    }
    let all = list(client, "").await;
    if unsupported(&all) {
        bail!(Skip("the store does not list its locks"));
    }
    let mut all = all?;
    let begins = |key: &Key| key.as_str().starts_with(prefix);
    all.retain(|listed| listed.key.as_ref().is_none_or(begins));
    Ok(all)
}

async fn list(client: &dyn Backend, prefix: &str) -> leasehold_core::Result<Vec<Listed>> {
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

/// Leaves the check where the store takes no lock away.
fn evicted(taken: leasehold_core::Result<bool>) -> anyhow::Result<bool> {
    match taken {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            bail!(Skip("the store cannot take a lock away"))
        }
        taken => Ok(taken?),
    }
}
