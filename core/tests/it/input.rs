//! What cannot be used is refused before the store hears of it.

use std::time::Duration;

use leasehold_core::{Claim, ErrorKind, Locks};

use crate::support::Faulty;

#[tokio::test(start_paused = true)]
async fn options_that_cannot_be_used_are_refused() {
    let store = Faulty::default();
    let locks = Locks::new(store.clone());
    let longest = "é".repeat(Claim::MAX_LABEL_LEN / 2);
    for (bad, says) in [
        (locks.with_label(format!("{longest}!")), "1025 bytes"),
        (locks.with_max_hold(Duration::ZERO), "maximum hold"),
        (locks.with_request_limit(Duration::ZERO), "request limit"),
    ] {
        for error in [
            bad.lock("a").await.unwrap_err(),
            bad.try_lock("a").await.unwrap_err(),
            bad.owner().lock("a").await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(says), "{error}");
        }
    }
    assert_eq!(store.script.count("acquire"), 0);

    let _guard = locks.with_label(&*longest).lock("a").await.unwrap();
    let holder = locks.holder("a").await.unwrap().unwrap();
    assert_eq!(holder.label, Some(longest));
}
