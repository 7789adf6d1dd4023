//! What the rules of the suite cannot see: the files themselves, and what is refused.
#![allow(clippy::unwrap_used)] // the helpers are parts of tests

use std::fs;
use std::future::{Future, poll_fn};
use std::path::Path;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold_core::{Backend, Claim, ErrorKind, Expiry, Hold, Key, Locks, OwnerId, Tokens};
use leasehold_file::Folder;
use tempfile::TempDir;

/// An upper bound for what takes microseconds on an idle machine.
const SOON: Duration = Duration::from_secs(30);

fn temporary() -> (TempDir, Folder) {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::open(dir.path().join("locks")).unwrap();
    (dir, folder)
}

/// Another client of the same folder, as another process would be one.
fn another(folder: &Folder) -> Folder {
    Folder::open(folder.path()).unwrap()
}

fn claim(key: &str) -> Claim {
    Claim::new(Key::new(key).unwrap(), Duration::from_secs(30)).unwrap()
}

async fn take(folder: &Folder, key: &str) -> Option<Box<dyn Hold>> {
    folder.acquire(&claim(key)).await.unwrap()
}

async fn token(folder: &Folder, key: &str) -> u64 {
    let mut hold = take(folder, key).await.unwrap();
    let token = hold.token().get();
    hold.release().await.unwrap();
    token
}

fn files(folder: &Folder) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn info(folder: &Folder, stem: &str) -> String {
    fs::read_to_string(folder.path().join(format!("{stem}.info"))).unwrap()
}

#[tokio::test]
async fn the_files_say_what_is_going_on() {
    let (_dir, folder) = temporary();
    let mut wanted = claim("order:42");
    wanted.label = Some("nightly import".into());
    let mut hold = folder.acquire(&wanted).await.unwrap().unwrap();

    assert_eq!(
        files(&folder),
        ["evict", "order%3a42.info", "order%3a42.lock"]
    );
    let held = info(&folder, "order%3a42");
    for line in [
        "key order:42".to_owned(),
        format!("token {}", hold.token()),
        format!("grant {}", wanted.id),
        format!("owner {}", wanted.owner),
        format!("pid {}", std::process::id()),
        "label nightly import".to_owned(),
    ] {
        assert!(held.lines().any(|found| found == line), "{line} in {held}");
    }

    hold.release().await.unwrap();
    let free = info(&folder, "order%3a42");
    assert!(
        !free.contains("grant") && free.contains("key order:42"),
        "{free}"
    );
    assert_eq!(
        files(&folder),
        ["evict", "order%3a42.info", "order%3a42.lock"]
    );
}

#[tokio::test]
async fn guarantees_are_those_of_a_file() {
    let (_dir, folder) = temporary();
    let guarantees = folder.guarantees();
    assert_eq!(guarantees.expiry, Expiry::Process);
    assert_eq!(guarantees.tokens, Tokens::Durable);
}

#[tokio::test]
async fn two_owners_of_one_client_exclude_each_other_and_so_do_two_clients() {
    let (_dir, folder) = temporary();
    let hold = take(&folder, "a").await.unwrap();
    assert!(take(&folder, "a").await.is_none());
    assert!(take(&folder.clone(), "a").await.is_none());
    assert!(take(&another(&folder), "a").await.is_none());
    assert!(take(&folder, "A").await.is_some(), "another key");
    drop(hold);
    assert!(take(&another(&folder), "a").await.is_some());
}

#[tokio::test]
async fn every_key_has_a_lock_of_its_own() {
    let (_dir, folder) = temporary();
    let long = "x".repeat(Key::MAX_LEN - 1);
    let keys = [
        "a",
        "A",
        "a.",
        "a ",
        ".",
        "..",
        "a/b",
        "a\\b",
        "a\0b",
        "con",
        "CON",
        "nul.lock",
        "ä",
        "a\u{308}",
        "evict",
        "evict/a",
        "a.lock",
        "a.info",
        "\u{1f512}",
    ];
    let long = [
        format!("{long}a"),
        format!("{long}b"),
        format!("{long}A"),
        long,
    ];
    let mut holds = Vec::new();
    for key in keys.into_iter().chain(long.iter().map(String::as_str)) {
        holds.push(
            take(&folder, key)
                .await
                .unwrap_or_else(|| panic!("{key:?} is not free")),
        );
        let holder = folder
            .holder(&Key::new(key).unwrap())
            .await
            .unwrap()
            .unwrap();
        assert_eq!(holder.token, Some(holds.last().unwrap().token()), "{key:?}");
    }
    assert!(take(&folder, &long[0]).await.is_none());
}

#[tokio::test]
async fn tokens_rise_over_clients_and_are_counted_apart_for_each_key() {
    let (_dir, folder) = temporary();
    let other = another(&folder);
    let mut last = 0;
    for round in 0..500 {
        let folder = if round % 3 == 0 { &other } else { &folder };
        let now = token(folder, "a").await;
        assert!(now > last, "{now} after {last}");
        last = now;
    }
    assert!(
        last < 1000,
        "blocks are used up before others are begun: {last}"
    );
    assert_eq!(token(&folder, "b").await, 1);
}

/// What a power failure may leave: the counter that the disk had confirmed, and anything of the
/// record that nobody waited for.
#[tokio::test]
async fn tokens_rise_over_a_power_failure() {
    let (_dir, folder) = temporary();
    let path = folder.path().join("a.info");
    let mut highest = token(&folder, "a").await;
    let oldest = fs::read(&path).unwrap();
    for lost in [
        Some(oldest),
        Some(Vec::new()),
        Some(b"leasehold-fi\0\0".to_vec()),
        None,
    ] {
        for _ in 0..150 {
            highest = highest.max(token(&folder, "a").await);
        }
        match lost {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let after = token(&another(&folder), "a").await;
        assert!(after > highest, "{after} after {highest}");
        highest = after;
    }
}

#[tokio::test]
async fn one_copy_of_the_counter_is_enough() {
    let (_dir, folder) = temporary();
    let path = folder.path().join("a.lock");
    let mut highest = 0;
    for _ in 0..3 {
        highest = token(&another(&folder), "a").await;
    }
    // They are written in turn: the next one was just being written, for a lock that was not given
    // out, when the power failed.
    let garbage = ["leasehold-file 1 torn", "torn", "\0\0\0\0\0\0\0\0"];
    for (round, garbage) in garbage.into_iter().cycle().take(6).enumerate() {
        let at = if round % 2 == 0 { 4096 } else { 0 };
        let mut torn = fs::read(&path).unwrap();
        torn[at..at + 64].fill(0);
        torn[at..at + garbage.len()].copy_from_slice(garbage.as_bytes());
        fs::write(&path, torn).unwrap();
        fs::remove_file(folder.path().join("a.info")).unwrap();
        let after = token(&another(&folder), "a").await;
        assert!(
            after > highest,
            "{after} after {highest}, {garbage:?} at {at}"
        );
        highest = after;
    }

    fs::write(
        &path,
        [
            b"leasehold-file 1 torn".as_slice(),
            &[0; 4096 - 21],
            b"torn",
        ]
        .concat(),
    )
    .unwrap();
    let error = another(&folder).acquire(&claim("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other, "{error}");
    assert!(error.to_string().contains("damaged"), "{error}");
}

#[tokio::test]
async fn files_of_others_are_left_alone() {
    let (_dir, folder) = temporary();
    let path = folder.path().join("a.lock");
    for (content, kind) in [
        ("4711\n", ErrorKind::Invalid),
        ("leasehold-file 2 17\n", ErrorKind::Unsupported),
    ] {
        fs::write(&path, content).unwrap();
        let error = folder.acquire(&claim("a")).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), content);
    }

    assert_eq!(token(&folder, "b").await, 1);
    fs::rename(folder.path().join("b.info"), folder.path().join("c.info")).unwrap();
    let error = folder.acquire(&claim("c")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}

#[tokio::test]
async fn a_deleted_file_is_locked_by_nobody() {
    let (_dir, folder) = temporary();
    let hold = take(&folder, "a").await.unwrap();
    let other = another(&folder);
    let mut waiting = claim("a");
    waiting.wait = None;
    let mut waiter = pin!(other.acquire(&waiting));
    assert!(polled_once(waiter.as_mut()).await.is_pending());
    // Against all advice.
    fs::remove_file(folder.path().join("a.lock")).unwrap();
    drop(hold);
    let hold = tokio::time::timeout(SOON, waiter)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert!(
        take(&folder, "a").await.is_none(),
        "all look at the same file"
    );
    assert!(hold.token().get() > 1);
}

#[tokio::test]
async fn whoever_only_looks_does_not_keep_anybody_out() {
    let (_dir, folder) = temporary();
    drop(take(&folder, "a").await);
    // Locked, but not held: as by somebody who looks, but for longer.
    let looking = fs::File::open(folder.path().join("a.lock")).unwrap();
    looking.try_lock_shared().unwrap();
    let mut acquiring = pin!(take(&folder, "a"));
    assert!(polled_once(acquiring.as_mut()).await.is_pending());
    looking.unlock().unwrap();
    assert!(acquiring.await.is_some(), "a claim that does not wait");
}

#[tokio::test]
async fn the_limit_of_a_wait_is_kept() {
    let (_dir, folder) = temporary();
    let _hold = take(&folder, "a").await.unwrap();
    for wait in [0, 1, 400_000, 999_999, 1_000_000, 30_000_000, 120_000_000] {
        let wait = Duration::from_nanos(wait);
        let mut waiting = claim("a");
        waiting.wait = Some(wait);
        let begun = Instant::now();
        assert!(folder.acquire(&waiting).await.unwrap().is_none());
        let waited = begun.elapsed();
        assert!(
            waited >= wait && waited < wait + SOON,
            "{waited:?} for {wait:?}"
        );
    }
}

async fn polled_once<F: Future>(mut future: Pin<&mut F>) -> Poll<F::Output> {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Polls `acquire` so and so often, then drops it; false: it was done earlier.
async fn is_pending_after(
    acquire: impl Future<Output = leasehold_core::Result<Option<Box<dyn Hold>>>>,
    polls: u32,
) -> bool {
    let mut acquire = pin!(acquire);
    for _ in 0..polls {
        // The wakers are real, so that what it waits for happens between the polls.
        let done = tokio::time::timeout(Duration::from_millis(2), acquire.as_mut()).await;
        if done.is_ok() {
            return false;
        }
    }
    true
}

#[tokio::test]
async fn a_dropped_acquire_leaves_nothing() {
    let (_dir, folder) = temporary();
    // A free lock: dropped when it has just been locked, and waits for the disk.
    for round in 0..20 {
        let key = format!("free {round}");
        {
            let claim = claim(&key);
            let mut acquire = pin!(folder.acquire(&claim));
            drop(polled_once(acquire.as_mut()).await);
        }
        assert!(take(&another(&folder), &key).await.is_some(), "{key}");
    }
    // One that is waited for.
    for polls in 0..20 {
        let hold = take(&folder, "held").await.unwrap();
        let mut waiting = claim("held");
        waiting.wait = None;
        assert!(is_pending_after(folder.acquire(&waiting), polls).await);
        drop(hold);
        assert!(
            take(&another(&folder), "held").await.is_some(),
            "after {polls} polls"
        );
    }
    assert!(
        folder
            .holder(&Key::new("held").unwrap())
            .await
            .unwrap()
            .is_none()
    );
}

#[tokio::test]
async fn waiters_get_it_one_after_the_other() {
    let (_dir, folder) = temporary();
    let locks = Locks::new(folder.clone());
    let mut tasks = Vec::new();
    for client in 0..8 {
        let locks = if client % 2 == 0 {
            locks.clone()
        } else {
            Locks::new(another(&folder))
        };
        tasks.push(tokio::spawn(async move {
            let mut tokens = Vec::new();
            for _ in 0..10 {
                let guard = locks.lock("a").await.unwrap();
                tokens.push(guard.token());
                tokio::task::yield_now().await;
                guard.release().await.unwrap();
            }
            tokens
        }));
    }
    let mut all = Vec::new();
    for task in tasks {
        let tokens = tokio::time::timeout(SOON, task).await.unwrap().unwrap();
        assert!(tokens.is_sorted());
        all.extend(tokens);
    }
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 80);
}

#[tokio::test]
async fn an_eviction_is_obeyed_and_names_one_grant() {
    let (_dir, folder) = temporary();
    let operator = another(&folder);
    let key = Key::new("a").unwrap();
    assert!(
        !operator.evict(&key, None).await.unwrap(),
        "nobody holds it"
    );

    let mut hold = take(&folder, "a").await.unwrap();
    let first = operator.holder(&key).await.unwrap().unwrap();
    assert!(operator.evict(&key, Some(&first)).await.unwrap());
    assert!(hold.validity().is_ended(), "before the eviction says so");
    tokio::time::timeout(SOON, hold.validity().ended())
        .await
        .unwrap();

    let second = take(&operator, "a").await.unwrap();
    assert_eq!(hold.release().await.unwrap_err().kind(), ErrorKind::Lost);
    drop(hold);
    assert!(
        !folder.evict(&key, Some(&first)).await.unwrap(),
        "another holds it now"
    );
    assert!(!second.validity().is_ended());
    assert!(take(&folder, "a").await.is_none(), "still held");

    assert!(operator.evict(&key, None).await.unwrap(), "one's own");
    assert_eq!(
        fs::read_dir(folder.path().join("evict")).unwrap().count(),
        0,
        "marks"
    );
}

#[tokio::test]
async fn a_mark_that_is_out_of_date_is_removed_and_evicts_nobody() {
    let (_dir, folder) = temporary();
    let marks = folder.path().join("evict");
    fs::write(
        marks.join(format!("a.{}", OwnerId::new().uuid().simple())),
        "",
    )
    .unwrap();
    fs::write(marks.join("something else"), "").unwrap();
    let mut hold = take(&folder, "a").await.unwrap();
    hold.renew().await.unwrap();
    assert!(!hold.validity().is_ended());
    assert_eq!(
        fs::read_dir(&marks).unwrap().count(),
        1,
        "what is no mark stays"
    );
}

#[tokio::test]
async fn core_hears_of_an_eviction() {
    let (_dir, folder) = temporary();
    let locks = Locks::new(folder.clone()).with_label("import");
    let operator = Locks::new(another(&folder));
    let guard = locks.lock("a").await.unwrap();
    let holder = operator.holder("a").await.unwrap().unwrap();
    assert_eq!(holder.owner, Some(guard.owner().to_string()));
    assert_eq!(holder.label.as_deref(), Some("import"));
    assert_eq!(holder.token, Some(guard.token()));
    assert!(holder.since.is_some() && holder.remaining.is_none());
    assert!(operator.evict("a", Some(&holder)).await.unwrap());
    tokio::time::timeout(SOON, guard.lost()).await.unwrap();
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(operator.holder("a").await.unwrap().is_none());
}

#[tokio::test]
async fn a_fixed_lease_ends() {
    let (_dir, folder) = temporary();
    let locks = Locks::new(folder.clone()).with_fixed_lease(Duration::from_millis(200));
    let _guard = locks.lock("a").await.unwrap();
    let next = Locks::new(another(&folder)).with_wait(SOON);
    drop(next.lock("a").await.unwrap());
}

#[test]
fn a_hold_outlives_its_runtime_and_is_freed_outside_of_one() {
    let (_dir, folder) = temporary();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let hold = runtime.block_on(take(&folder, "a"));
    drop(runtime);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    assert!(runtime.block_on(take(&folder, "a")).is_none());
    drop(hold);
    assert!(runtime.block_on(take(&folder, "a")).is_some());
}

#[tokio::test]
async fn close_ends_the_watch_and_another_hold_begins_it_again() {
    let (_dir, folder) = temporary();
    drop(take(&folder, "a").await);
    folder.close().await.unwrap();
    let hold = take(&folder, "a").await.unwrap();
    folder.close().await.unwrap();
    let key = Key::new("a").unwrap();
    assert!(
        another(&folder).evict(&key, None).await.unwrap(),
        "held, so watched"
    );
    drop(hold);
}

#[test]
fn what_is_no_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [Path::new(""), &file, &file.join("below")] {
        let error = Folder::open(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let folder = Folder::open(dir.path().join("a/b/c")).unwrap();
    assert!(folder.path().is_absolute());
    assert_eq!(
        format!("{folder:?}"),
        format!("Folder({:?})", folder.path())
    );
}

#[cfg(unix)]
mod rights {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o7777
    }

    #[tokio::test]
    async fn a_new_folder_is_for_its_user_alone() {
        let (_dir, folder) = temporary();
        drop(take(&folder, "a").await);
        assert_eq!(mode(folder.path()), 0o700);
        assert_eq!(mode(&folder.path().join("evict")), 0o700);
        for file in ["a.lock", "a.info"] {
            assert_eq!(mode(&folder.path().join(file)), 0o600, "{file}");
        }
    }

    #[tokio::test]
    async fn the_files_of_a_shared_folder_are_shared_whatever_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shared");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o2770)).unwrap();
        let folder = Folder::open(&path).unwrap();
        drop(take(&folder, "a").await);
        assert_eq!(mode(folder.path()), 0o2770);
        assert_eq!(mode(&folder.path().join("evict")), 0o2770);
        for file in ["a.lock", "a.info"] {
            assert_eq!(mode(&folder.path().join(file)), 0o660, "{file}");
        }
    }
}
