//! The first store that does what is needed, or what each of them lacks.
#![cfg(feature = "file")]
#![allow(clippy::unwrap_used, reason = "a test that meets an error has failed")]

use std::time::Duration;

use leasehold::{Answer, Candidate, ErrorKind, Memory, Need, choose};

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn url(&self) -> String {
        format!("file:{}/locks", self.0.path().display())
    }
}

#[tokio::test]
async fn the_first_that_does_all_is_opened() {
    let folder = Folder::new();
    let file = folder.url();
    let locks = choose([Need::DurableTokens], [&*file, "memory:"])
        .await
        .unwrap();
    assert_ne!(locks.guarantees(), Memory::GUARANTEES);
    let locks = choose([], [&*file, "memory:"]).await.unwrap();
    assert_ne!(locks.guarantees(), Memory::GUARANTEES, "the first");
    for need in [Need::Order, Need::Push, Need::Expiry] {
        let locks = choose([need], [&*file, "memory:?ttl=7s"]).await.unwrap();
        assert_eq!(locks.guarantees(), Memory::GUARANTEES, "{need}");
        assert_eq!(locks.ttl(), Duration::from_secs(7), "its options hold");
    }
}

#[tokio::test]
async fn what_each_lacks_is_said() {
    let folder = Folder::new();
    let needs = [Need::Order, Need::DurableTokens];
    let error = choose(needs, [&*folder.url(), "memory:"])
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let said = error.to_string();
    let expected = format!(
        "no store does what is needed: {} lacks order (waiters are served in no order); \
         memory: lacks tokens outlive a crash (tokens may fall when the store loses its data)",
        folder.url()
    );
    assert_eq!(said, expected);
}

#[tokio::test]
async fn bad_input_is_refused_before_anything_is_opened() {
    let folder = Folder::new();
    let error = choose([], [&*folder.url(), "memory:?tll=1s"])
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let said = error.to_string();
    assert!(
        said.contains("store 2 of 2") && said.contains("did you mean ttl?"),
        "{said}"
    );
    assert!(
        !folder.0.path().join("locks").exists(),
        "nothing was opened"
    );
    let error = choose([], Vec::<String>::new()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn one_that_is_not_reached_is_left_for_the_next_and_shows_no_password() {
    // Nobody listens there.
    let away = "redis://me:hunter2@127.0.0.1:1/0?connect_timeout=20s";
    let locks = choose([Need::Order], [away, "memory:"]).await.unwrap();
    assert_eq!(locks.guarantees(), Memory::GUARANTEES);

    let error = choose([Need::Consensus], [away, "memory:"])
        .await
        .unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::Unavailable,
        "it may do later: {error}"
    );
    let said = format!("{error} {error:?}");
    assert!(
        said.contains("redis://127.0.0.1:1/0 ") && said.contains("memory: lacks"),
        "{said}"
    );
    assert!(!said.contains("hunter2"), "{said}");
}

#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_judged_by_what_it_is() {
    let server = match leasehold_conformance::fixtures::redis::Redis::find().await {
        Ok(server) => server,
        Err(missing) => return missing.skip(),
    };
    let folder = Folder::new();
    let needs = [
        Need::Order,
        Need::Push,
        Need::Ttl(Duration::from_millis(10)),
    ];
    let locks = choose(needs, [&*folder.url(), server.url()]).await.unwrap();
    let guard = locks.lock("chosen").await.unwrap();
    guard.release().await.unwrap();
    locks.require([Need::Expiry]).unwrap();
    locks.require([Need::NodeLoss]).unwrap_err();
}

/// Every cell of the table.
#[test]
fn every_kind_is_judged_on_every_need() {
    let (yes, depends, no) = (Answer::Yes, Answer::Depends, Answer::No);
    // In the order of `Need::ALL`: node loss, consensus, durable tokens, order, expiry, push.
    let expected = [
        ("Memory", [no, no, no, yes, yes, yes]),
        ("File", [no, no, yes, no, no, no]),
        ("Redis", [no, no, no, yes, yes, yes]),
        ("Redis behind Sentinel", [no, no, no, yes, yes, yes]),
        ("Redis Cluster", [no, no, no, yes, yes, yes]),
        ("Redlock", [yes, no, no, no, yes, yes]),
        ("etcd", [depends, yes, yes, yes, yes, yes]),
        ("ZooKeeper", [depends, yes, yes, yes, yes, yes]),
        ("PostgreSQL", [no, no, yes, no, yes, yes]),
    ];
    for candidate in Candidate::known() {
        let (_, answers) = expected
            .iter()
            .find(|(name, _)| *name == candidate.name)
            .unwrap();
        for (need, answer) in Need::ALL.into_iter().zip(answers) {
            let judged = candidate.judge(need);
            assert_eq!(judged.answer, *answer, "{}: {need}", candidate.name);
            assert!(!judged.reason.is_empty());
        }
    }
}
