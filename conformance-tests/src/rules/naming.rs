//! What is locked, and the numbers that go with it.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use leasehold_core::{Backend, Claim, ErrorKind, Key, Token};

use crate::cx::{
    Cx, after, claim, fails, granted, locks, queued, refused, soon, take_away, waiting, within,
};
use crate::faulty::Faulty;
use crate::rule::{Rule, check};

pub(super) const C6: Rule = Rule {
    id: "C6",
    title: "any key text works, and different names never meet",
    checks: &[
        check!(
            "names that look alike or like something else",
            [],
            names_never_meet
        ),
        check!("many names", [], many_names),
        check!("no name, and one too long", [], impossible_names),
    ],
};

pub(super) const C7: Rule = Rule {
    id: "C7",
    title: "tokens rise with each grant, and are equal on re-entry",
    checks: &[
        check!("however the grant before ended", [], tokens_rise),
        check!("through a queue", [], tokens_rise_through_a_queue),
        check!("equal on re-entry", [], token_of_a_reentry),
    ],
};

pub(super) const C14: Rule = Rule {
    id: "C14",
    title: "a bad ttl is refused before anything is sent",
    checks: &[
        check!("bad ones", [], bad_ttls),
        check!("the shortest and the longest", [], extreme_ttls),
    ],
};

/// Names that some store or some way of writing them down might change, cut, confuse or refuse. Before
/// each of them comes `prefix`.
fn names(prefix: &str) -> Vec<String> {
    let mut names = [
        // Case, blanks, composed and decomposed letters, letters that fold into others.
        "a",
        "A",
        "a ",
        " a",
        "a\t",
        "a\n",
        "a\r\n",
        "\u{e9}",
        "e\u{301}",
        "\u{df}",
        "ss",
        "\u{130}",
        "i",
        "\u{212a}",
        "K",
        "\u{ff41}",
        // Paths and their escapes.
        "a/b",
        "a/",
        "a//b",
        "a/b/",
        "/a",
        "/",
        "//",
        "a%2Fb",
        "a%2fb",
        "%",
        "%25",
        "%%",
        ".",
        "..",
        "../a",
        "./a",
        "a/../b",
        "~",
        "a\\b",
        "\\",
        "con",
        "nul",
        // Patterns, slots, separators, quotes, parameters.
        "*",
        "?",
        "[a]",
        "a*",
        "{x}",
        "{}x",
        "a}b",
        "{a}{b}",
        "{",
        "}",
        ":",
        "a:b",
        "a::b",
        "'",
        "\"",
        "a'b",
        "`",
        "$1",
        "${a}",
        "#",
        ";",
        "a;b",
        "--",
        "a b",
        "a+b",
        "a=b",
        "a&b",
        "a,b",
        "|",
        // Prefixes of the stores themselves.
        "lock:",
        "lock:a",
        "leasehold:",
        "leasehold:a",
        "leasehold:queue:a",
        "locks/a",
        "lock-0000000001",
        // Control characters, the end of text, the last of each length in UTF-8.
        "\0",
        "a\0",
        "a\0b",
        "\u{1}",
        "\u{7f}",
        "\u{80}",
        "\u{85}",
        "\u{7ff}",
        "\u{800}",
        "\u{d7ff}",
        "\u{e000}",
        "\u{f8ff}",
        "\u{feff}a",
        "\u{fff0}",
        "\u{ffff}",
        "\u{10000}",
        "\u{10ffff}",
        "\u{1f512}",
        "\u{1f510}",
        "\u{200b}",
        "a\u{200b}",
        "\u{202e}a",
        // Numbers, also where they would be equal as numbers.
        "0",
        "00",
        "-0",
        "1",
        "01",
        "1.0",
        "1e0",
        "+1",
        "null",
        "true",
        "NaN",
        // Pairs with the same CRC-32, with the same Java hash, with the same 32-bit FNV-1a.
        "plumless",
        "buckeroo",
        "Aa",
        "BB",
        "costarring",
        "liquid",
    ]
    .map(str::to_owned)
    .to_vec();
    // The longest, in one byte and in four each, which differ in the last and in the first letter.
    let longest = Key::MAX_LEN - prefix.len();
    for (letter, length) in [("x", longest), ("\u{1f512}", longest / 4)] {
        let long = letter.repeat(length - 1);
        let other = if letter == "x" { "y" } else { "\u{1f510}" };
        names.extend([
            format!("{long}{letter}"),
            format!("{long}{other}"),
            format!("{other}{long}"),
            long,
        ]);
    }
    // In one order, so that two runs on one store wait for each other but once.
    names.sort();
    names
        .into_iter()
        .map(|name| format!("{prefix}{name}"))
        .collect()
}

async fn names_never_meet(cx: Cx) -> anyhow::Result<()> {
    let (one, other) = (cx.client().await?, cx.client().await?);
    let mut held = Vec::new();
    for name in names(&cx.store().key_prefix) {
        let key = Key::new(&name)?;
        let wanted = waiting(&key, Cx::LONG);
        // If two names were one lock, this would wait for itself.
        let hold = soon("a free name is granted", one.acquire(&wanted)).await;
        let hold = hold.with_context(|| format!("the name {name:?}"))?;
        let hold = hold.with_context(|| format!("the name {name:?}"))?;
        held.push((
            key,
            hold.context("a claim without a limit to its wait gave up")?,
        ));
    }
    for (key, hold) in &mut held {
        refused(&*other, key)
            .await
            .context("the same name is the same lock")?;
        soon("a release is answered", hold.release()).await??;
    }
    Ok(())
}

async fn many_names(cx: Cx) -> anyhow::Result<()> {
    const NAMES: usize = 1000;
    let (client, mut random) = (cx.client().await?, cx.random());
    let prefix = cx.key();
    let mut held = Vec::new();
    for number in 0..NAMES {
        let length = random.usize(0..12);
        let text = std::iter::repeat_with(|| random.char(..)).take(length);
        // The number makes them different.
        let name = format!("{prefix}{}{number}", text.collect::<String>());
        held.push(granted(&*client, &claim(&Key::new(name)?, Cx::LONG)).await?);
    }
    for hold in &mut held {
        hold.release().await?;
    }
    Ok(())
}

async fn impossible_names(cx: Cx) -> anyhow::Result<()> {
    let faulty = Faulty::new(cx.client().await?);
    let locks = locks(faulty.clone());
    for name in [
        String::new(),
        "x".repeat(Key::MAX_LEN + 1),
        "\u{1f512}".repeat(257),
    ] {
        fails(ErrorKind::Invalid, "a lock", locks.lock(&name).await)?;
        fails(ErrorKind::Invalid, "a try", locks.try_lock(&name).await)?;
        let pair = [cx.key().to_string(), name.clone()];
        fails(
            ErrorKind::Invalid,
            "a lock of two",
            locks.lock_all(pair).await,
        )?;
        fails(ErrorKind::Invalid, "a look", locks.holder(&name).await)?;
        fails(
            ErrorKind::Invalid,
            "an evict",
            locks.evict(&name, None).await,
        )?;
    }
    let sent = faulty.calls().acquire.begun();
    ensure!(sent == 0, "{sent} claims were sent");
    Ok(())
}

async fn tokens_rise(cx: Cx) -> anyhow::Result<()> {
    const GRANTS: usize = 1000;
    let clients = [cx.client().await?, cx.client().await?, cx.client().await?];
    let (key, mut random) = (cx.key(), cx.random());
    let mut last = None;
    for grant in 0..GRANTS {
        let client = &clients[random.usize(..clients.len())];
        let abandoned = grant % 400 == 200;
        let ttl = if abandoned { cx.ttl() } else { Cx::LONG };
        let wanted = waiting(&key, ttl);
        let hold = within(after(cx.ttl()), "the next grant", client.acquire(&wanted)).await??;
        let mut hold = hold.context("a claim without a limit to its wait gave up")?;
        rises(&mut last, hold.token())?;
        match grant % 50 {
            _ if abandoned => drop(hold),
            25 => take_away(&*clients[0], &key, &mut *hold)
                .await
                .or_else(skipped)?,
            _ => soon("a release is answered", hold.release()).await??,
        }
    }
    Ok(())
}

/// A store that takes no lock away has other ways for a grant to end.
fn skipped(error: anyhow::Error) -> anyhow::Result<()> {
    if error.is::<crate::cx::Skip>() {
        Ok(())
    } else {
        Err(error)
    }
}

async fn tokens_rise_through_a_queue(cx: Cx) -> anyhow::Result<()> {
    let (one, other, key) = (cx.client().await?, cx.client().await?, cx.key());
    let mut hold = granted(&*one, &claim(&key, Cx::LONG)).await?;
    let mut last = Some(hold.token());
    for round in 0..20 {
        let client: &dyn Backend = if round % 2 == 0 { &*other } else { &*one };
        let wanted = waiting(&key, Cx::LONG);
        let mut waiter = client.acquire(&wanted);
        queued(client, &key, &mut waiter).await?;
        soon("a release is answered", hold.release()).await??;
        let next = soon("the waiter is served", waiter).await??;
        hold = next.context("a claim without a limit to its wait gave up")?;
        rises(&mut last, hold.token())?;
    }
    Ok(())
}

fn rises(last: &mut Option<Token>, next: Token) -> anyhow::Result<()> {
    if let Some(last) = last {
        ensure!(*last < next, "after the token {last} comes {next}");
    }
    *last = Some(next);
    Ok(())
}

async fn token_of_a_reentry(cx: Cx) -> anyhow::Result<()> {
    let (locks, key) = (cx.locks().await?, cx.key());
    let me = locks.owner();
    let one = me.lock(&key).await?;
    let again = me.lock(&key).await?;
    ensure!(
        one.token() == again.token(),
        "{} and {}",
        one.token(),
        again.token()
    );
    let token = one.token();
    one.release().await?;
    ensure!(again.token() == token, "changed by a partial release");
    again.release().await?;
    let next = me.lock(&key).await?;
    ensure!(
        next.token() > token,
        "after the token {token} comes {}",
        next.token()
    );
    Ok(())
}

async fn bad_ttls(cx: Cx) -> anyhow::Result<()> {
    const BAD: [Duration; 7] = [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(999),
        Duration::from_micros(9_999),
        Duration::from_millis(i64::MAX as u64 + 1),
        Duration::from_millis(u64::MAX),
        Duration::MAX,
    ];
    let faulty = Faulty::new(cx.client().await?);
    let (locks, key) = (locks(faulty.clone()), cx.key());
    for ttl in BAD {
        for locks in [locks.with_ttl(ttl), locks.with_fixed_lease(ttl)] {
            fails(ErrorKind::Invalid, "a lock", locks.lock(&key).await)?;
            fails(ErrorKind::Invalid, "a try", locks.try_lock(&key).await)?;
            fails(
                ErrorKind::Invalid,
                "an owner",
                locks.owner().lock(&key).await,
            )?;
            fails(
                ErrorKind::Invalid,
                "a lock of all",
                locks.lock_all([&key]).await,
            )?;
        }
    }
    let sent = faulty.calls().acquire.begun();
    ensure!(sent == 0, "{sent} claims were sent");
    Ok(())
}

/// The longest neither overflows nor ends early; the shortest is taken, if only for a moment.
async fn extreme_ttls(cx: Cx) -> anyhow::Result<()> {
    let (one, other) = (cx.client().await?, cx.client().await?);
    let (shortest, longest) = (*Claim::TTL_RANGE.start(), cx.store().longest_ttl);
    let key = cx.key();
    let mut hold = granted(&*one, &claim(&key, longest)).await?;
    refused(&*other, &key).await?;
    soon("a renewal is answered", hold.renew()).await??;
    refused(&*other, &key).await?;
    soon("a release is answered", hold.release()).await??;
    drop(granted(&*other, &claim(&key, Cx::LONG)).await?);

    let key = cx.key();
    drop(granted(&*one, &claim(&key, shortest)).await?);
    let wanted = waiting(&key, Cx::LONG);
    let free = within(
        after(cx.ttl()),
        "the shortest ttl ends",
        other.acquire(&wanted),
    );
    ensure!(free.await??.is_some(), "a claim without a limit gave up");
    Ok(())
}
