//! What `open` takes, and what it says to what it does not take.

use std::time::Duration;

use leasehold::{ErrorKind, Locks, open};

async fn refusal(url: &str) -> String {
    let error = open(url).await.expect_err(url);
    assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
    error.to_string()
}

async fn opened(url: &str) -> Locks {
    open(url)
        .await
        .unwrap_or_else(|error| panic!("{url}: {error}"))
}

/// What is said to a URL that fails, and shows no password.
async fn failure(url: &str) -> (ErrorKind, String) {
    let error = open(url).await.expect_err(url);
    let said = format!("{error} {error:?}");
    assert!(!said.contains("hunter2"), "{url}: {said}");
    (error.kind(), said)
}

/// Two URLs of one place, with options that have an effect, and one of another place.
#[cfg(any(feature = "redis", feature = "etcd"))]
async fn options_have_their_effect(here: &str, same: &str, elsewhere: &str) {
    let here = opened(&format!("{here}&label=import&connect_timeout=20s")).await;
    let same = opened(&format!("{same}&wait=0s")).await;
    let elsewhere = opened(elsewhere).await;
    let key = format!("open-{}", std::process::id());
    let guard = here.lock(&key).await.expect("free");
    let holder = same.holder(&key).await.expect("answered").expect("held");
    assert_eq!(holder.label.as_deref(), Some("import"));
    let error = same.lock(&key).await.expect_err("held");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(elsewhere.try_lock(&key).await.expect("answered").is_some());
    guard.release().await.expect("released");
}

#[tokio::test]
async fn memory_is_a_store_of_its_own() {
    let locks = opened("memory:").await;
    let other = opened("Memory:").await;
    let guard = locks.lock("a").await.expect("free");
    assert!(locks.try_lock("a").await.expect("answered").is_none());
    assert!(other.try_lock("a").await.expect("answered").is_some());
    drop(guard);
}

#[cfg(feature = "file")]
#[tokio::test]
async fn a_folder_is_shared() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("my locks");
    let path = path.to_str().expect("UTF-8");
    let guard = opened(&format!("file:{path}")).await.lock("a").await;
    let guard = guard.expect("free");
    let other = opened(&format!("file://{}?ttl=10s", path.replace(' ', "%20"))).await;
    assert!(other.try_lock("a").await.expect("answered").is_none());
    drop(guard);
    assert!(other.try_lock("a").await.expect("answered").is_some());
}

#[tokio::test(start_paused = true)]
async fn each_option_has_its_effect() {
    let locks = opened("memory:?ttl=1m%2030s&label=nightly+import%26more").await;
    let guard = locks.lock("a").await.expect("free");
    let left = guard.remaining();
    assert!(
        left > Duration::from_secs(85) && left <= Duration::from_secs(90),
        "{left:?}"
    );
    let holder = locks.holder("a").await.expect("answered").expect("held");
    assert_eq!(holder.label.as_deref(), Some("nightly import&more"));

    let locks = opened("memory:?wait=250ms&fixed_lease=10s").await;
    let guard = locks.lock("a").await.expect("free");
    let begun = tokio::time::Instant::now();
    let error = locks.lock("a").await.expect_err("held");
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(begun.elapsed() >= Duration::from_millis(250));
    guard.lost().await;
    assert!(begun.elapsed() < Duration::from_secs(10));

    let locks = opened("memory:?max_hold=1m&ttl=5s&request_limit=1s").await;
    let begun = tokio::time::Instant::now();
    locks.lock("a").await.expect("free").lost().await;
    let held = begun.elapsed();
    assert!(
        held >= Duration::from_secs(59) && held <= Duration::from_secs(60),
        "{held:?}"
    );

    let error = opened("memory:?wait=0s").await;
    let guard = error.lock("a").await.expect("free");
    assert_eq!(
        error.lock("a").await.expect_err("held").kind(),
        ErrorKind::Timeout
    );
    drop(guard);
}

#[tokio::test]
async fn an_unknown_option_is_refused_with_the_nearest_name() {
    for (option, meant) in [
        ("tll", "ttl"),
        ("TTL", "ttl"),
        ("waits", "wait"),
        ("fixed-lease", "fixed_lease"),
        ("lease", "fixed_lease"),
        ("maxhold", "max_hold"),
        ("lable", "label"),
        ("request_timeout", "request_limit"),
    ] {
        let said = refusal(&format!("memory:?{option}=1s")).await;
        assert_eq!(
            said,
            format!("a memory: URL has no option {option}: did you mean {meant}?")
        );
    }
    let said = refusal("memory:?colour=red").await;
    assert!(
        said.ends_with("there are ttl, wait, fixed_lease, max_hold, label, request_limit"),
        "{said}"
    );
    // Another store's option.
    assert!(
        refusal("memory:?prefix=a")
            .await
            .contains("no option prefix")
    );
}

#[tokio::test]
async fn a_bad_value_is_told_what_is_right() {
    for (option, says) in [
        (
            "ttl=30",
            "ttl=30 is no length of time: write it as 30s, 500ms or 1m30s",
        ),
        ("ttl=", "ttl= is no length of time"),
        ("wait=soon", "wait=soon is no length of time"),
        ("wait=-1s", "wait=-1s is no length of time"),
        (
            "ttl=0s",
            "ttl=0s cannot be: a ttl of 0ns is not possible: give one from 10ms to a year",
        ),
        ("ttl=1ms", "ttl=1ms cannot be"),
        ("ttl=1000y", "ttl=1000y cannot be"),
        ("fixed_lease=9ms", "fixed_lease=9ms cannot be"),
        (
            "max_hold=0s",
            "max_hold=0s is no limit: give more than zero, or leave it out for none",
        ),
        ("request_limit=0ms", "request_limit=0ms is no limit"),
        ("ttl=1s&wait=1s&ttl=2s", "the option ttl is given twice"),
    ] {
        let said = refusal(&format!("memory:?{option}")).await;
        assert!(said.starts_with(says), "{option}: {said}");
    }
}

#[tokio::test]
async fn an_unknown_store_is_refused_with_the_nearest_name() {
    assert_eq!(
        refusal("memry:").await,
        "memry: stores are not known: did you mean memory:?"
    );
    assert!(refusal("files:/a").await.ends_with("did you mean file:?"));
    let said = refusal("gopher://host").await;
    assert!(
        said.starts_with("gopher: stores are not known: there are memory:, file:/folder"),
        "{said}"
    );
    for url in ["", "/var/lib/locks", "localhost"] {
        let said = refusal(url).await;
        assert!(said.starts_with("this is no URL of a store"), "{said}");
        assert!(said.contains("file:/folder"), "{said}");
    }
    assert!(
        refusal("memory:orders")
            .await
            .contains("nothing comes after memory:")
    );
    assert!(
        refusal("memory://")
            .await
            .contains("nothing comes after memory:")
    );
    assert!(refusal("memory:#a").await.contains("%23"));
}

#[cfg(feature = "file")]
#[tokio::test]
async fn a_folder_is_named_from_the_root_on() {
    for url in [
        "file:",
        "file:locks",
        "file:./locks",
        "file:~/locks",
        "file://",
        "file:?ttl=1s",
    ] {
        assert!(refusal(url).await.contains("from the root on"), "{url}");
    }
    assert!(
        refusal("file://host/locks")
            .await
            .contains("without a host")
    );
    assert!(refusal("file:/a%ffb").await.contains("no UTF-8"));
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "").expect("written");
    let said = refusal(&format!("file:{}", file.display())).await;
    assert!(said.contains("is not a folder"), "{said}");
}

#[tokio::test]
async fn a_store_that_was_not_built_in_says_how() {
    let mut left_out: Vec<(&str, &str, &str)> = Vec::new();
    if cfg!(not(feature = "file")) {
        left_out.push(("file:/a", "file", "file"));
    }
    if cfg!(not(feature = "redis")) {
        left_out.push(("redis://me:hunter2@host", "redis", "redis"));
        left_out.push(("rediss://host?prefix=a", "rediss", "redis"));
        left_out.push(("redis+cluster://a,b?prefix=a", "redis+cluster", "redis"));
        left_out.push(("redlock://a,b,c?max_ttl=5s", "redlock", "redis"));
        left_out.push(("redis+sentinel://a,b/m", "redis+sentinel", "redis"));
    }
    if cfg!(not(feature = "etcd")) {
        left_out.push(("etcd://me:hunter2@host,other", "etcd", "etcd"));
        left_out.push(("etcds://host?prefix=a", "etcds", "etcd"));
    }
    if cfg!(not(feature = "zk")) {
        left_out.push(("zk://me:hunter2@host,other/chroot", "zk", "zk"));
        left_out.push(("zks://me:hunter2@host,other/chroot", "zks", "zk-tls"));
    }
    for (url, scheme, feature) in left_out {
        let error = open(url).await.expect_err("not built in");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(
            error.to_string(),
            format!(
                "this program was built without {scheme}: stores: turn on the feature `{feature}` of \
                 the crate leasehold"
            )
        );
    }
}

#[cfg(feature = "redis")]
mod redis {
    use super::*;

    #[tokio::test]
    async fn options_are_checked_before_anything_is_sent() {
        // Nobody listens there.
        let server = "redis://127.0.0.1:1/0";
        let tls = "rediss://127.0.0.1:1";
        for (url, says) in [
            (format!("{server}?ttl=30"), "ttl=30 is no length of time"),
            (
                format!("{server}?prefx=a"),
                "a redis: URL has no option prefx: did you mean prefix?",
            ),
            (
                format!("{server}?connect_timeout=0s"),
                "connect_timeout=0s is no limit",
            ),
            (
                format!("{server}?client_key=/a"),
                "a redis: URL has no option client_key",
            ),
            (
                format!("{tls}?client_key=/a"),
                "give both client_certificate and client_key",
            ),
            (
                format!("{tls}?certificate_authority=/no/such/file"),
                "certificate_authority=/no/such/file names a file that cannot be read",
            ),
            (
                // Before any file is read.
                format!("{tls}?certificate_authority=/no/such/file&client_key=/a"),
                "give both client_certificate and client_key",
            ),
            (
                "redlock://a,b,c?node_timeout=0s".into(),
                "node_timeout=0s is no limit",
            ),
            (
                "redis+sentinel://a,b?replicas=1".into(),
                "behind the sentinels stands the name",
            ),
            (
                "redis+sentinel://a/m?replicas=some".into(),
                "replicas=some is no number of replicas",
            ),
            (
                "redis+sentinel://a/m?client_key=/a".into(),
                "a redis+sentinel: URL has no option client_key",
            ),
            ("redlock://a,b".into(), "3, 5 or 7 independent servers"),
            ("redlock://a,b,a".into(), "given twice"),
            ("redis:".into(), "redis://localhost"),
            ("redis://host/orders".into(), "number of the database"),
            ("redis+cluster://a,b/1".into(), "no other database than 0"),
            ("redis+cluster://a,,b".into(), "names no host"),
        ] {
            let said = refusal(&url).await;
            assert!(said.contains(says), "{url}: {said}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_behind_sentinels_is_opened_with_its_options() {
        use leasehold_conformance::fixtures::sentinel::SentinelGroup;
        let group = match SentinelGroup::find().await {
            Ok(group) => group,
            Err(missing) => return missing.skip(),
        };
        let url = group.url();
        let locks = opened(&format!("{url}?replicas=2&prefix=here:")).await;
        drop(locks.lock("a").await.expect("free"));
        // There are two, and never a third.
        let locks = opened(&format!("{url}?replicas=3&request_limit=200ms")).await;
        let error = locks.lock("a").await.expect_err("not confirmed");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("2 of the 3"), "{error}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_is_opened_with_its_options() {
        let server = match leasehold_conformance::fixtures::redis::Redis::find().await {
            Ok(server) => server,
            Err(missing) => return missing.skip(),
        };
        let url = server.url();
        let at = |prefix: &str| format!("{url}?prefix={prefix}");
        options_have_their_effect(&at("here:"), &at("here%3A"), &at("elsewhere:")).await;
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_unavailable() {
        let url = "redis://me:hunter2@127.0.0.1:1/0?prefix=a&connect_timeout=20s";
        let (kind, said) = failure(url).await;
        assert_eq!(kind, ErrorKind::Unavailable, "{said}");
        assert!(said.contains("127.0.0.1:1"), "{said}");
    }

    #[tokio::test]
    async fn passwords_are_not_shown() {
        for url in [
            "redis://me:pass?hunter2@host",
            "redis://me:pass?ttl=hunter2@host",
            "redis://me:pass?prefix=hunter2@host&ttl=1",
            "redis://me:pass/hunter2@host",
            "redis://me:pass#hunter2@host",
            "redis://me:hunter2@ho st",
            "redis://me:hunter2@host:port",
            "redis://me:hunter2%@host/a",
            "rediss://hunter2:hunter2@host/a?ttl=1s",
            "redis+cluster://me:hunter2@one,two/3",
            "rediss+cluster://me:hunter2@one,two:port?ttl=1s",
            "redis+sentinel://me:pass/hunter2@a/m",
            "redis+sentinel://me:hunter2@a/m?sentinel_password=hunter2&replicas=x",
            "redis+sentinel://me:hunter2@a",
        ] {
            failure(url).await;
        }
    }
}

#[cfg(feature = "etcd")]
mod etcd {
    use super::*;

    #[tokio::test]
    async fn options_are_checked_before_anything_is_sent() {
        // Nobody listens there.
        let server = "etcd://127.0.0.1:1";
        let tls = "etcds://127.0.0.1:1";
        for (url, says) in [
            (
                format!("{server}?prefx=a"),
                "etcd: URL has no option prefx: did you mean prefix?",
            ),
            (
                format!("{server}?connect_timeout=0s"),
                "connect_timeout=0s is no limit",
            ),
            (
                format!("{server}?client_key=/a"),
                "URL has no option client_key",
            ),
            (
                format!("{tls}?client_key=/a"),
                "give both client_certificate and client_key",
            ),
            (
                format!("{tls}?certificate_authority=/no/such/file"),
                "certificate_authority=/no/such/file names a file that cannot be read",
            ),
            (format!("{server},"), "number 2 is not host:port"),
            (format!("{server}/a"), "the option prefix"),
            ("etcd:".into(), "two slashes"),
        ] {
            let said = refusal(&url).await;
            assert!(said.contains(says), "{url}: {said}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_cluster_is_opened_with_its_options() {
        let cluster = match leasehold_conformance::fixtures::etcd::Etcd::find(1).await {
            Ok(cluster) => cluster,
            Err(missing) => return missing.skip(),
        };
        let url = format!("etcd://{}", cluster.endpoints());
        let at = |prefix: &str| format!("{url}?prefix={prefix}");
        options_have_their_effect(&at("here/"), &at("here%2F"), &at("elsewhere/")).await;
    }

    #[tokio::test]
    async fn a_cluster_that_is_not_there_is_unavailable() {
        let url = "etcd://me:hunter2@127.0.0.1:1,127.0.0.1:2?prefix=a&connect_timeout=20s";
        let (kind, said) = failure(url).await;
        assert_eq!(kind, ErrorKind::Unavailable, "{said}");
        assert!(said.contains("127.0.0.1:"), "{said}");
    }

    #[tokio::test]
    async fn passwords_are_not_shown() {
        for url in [
            "etcd://me:hunter2?prefix=@host",
            "etcd://me:pass?hunter2@host",
            "etcd://me:pass?ttl=hunter2@host",
            "etcd://me:pass/hunter2@host/a",
            "etcd://me:pass#hunter2@host",
            "etcd://me:hunter2@ho st",
            "etcd://me:hunter2@host:port",
            "etcd://hunter2@host",
            "etcds://hunter2:hunter2%@host/a?ttl=1s",
        ] {
            failure(url).await;
        }
    }
}

/// Whatever is wrong with a URL, what may be a part of a password is not repeated.
#[tokio::test]
async fn passwords_are_not_shown() {
    for url in [
        "hunter2@host",
        "hunter2:hunter2@host",
        "me:hunter2@host:6379",
        "rdis://me:hunter2@host",
        "memory://me:hunter2@host",
        "memory://me:hunter2@host?tll=1s",
        "memory://me:pass?hunter2@host",
        "memory://me:pass?hunter2=hunter2@host",
        "memory://me:pass?hunter2&hunter2@host",
        "memory://me:pass?hunter2=1&hunter2=2@host",
        "memory://me:pass?ttl=hunter2@host",
        "memory://me:pass#hunter2@host",
        "file://me:hunter2@host/a",
    ] {
        failure(url).await;
    }
}

#[cfg(feature = "zk")]
mod zk {
    use super::*;

    #[tokio::test]
    async fn options_are_checked_before_anything_is_sent() {
        // Nobody listens there.
        let server = "zk://127.0.0.1:1";
        for (url, says) in [
            (
                format!("{server}?prefx=a"),
                "a zk: URL has no option prefx: did you mean prefix?",
            ),
            (format!("{server}?prefix=a"), "the prefix \"a\" is no path"),
            (
                format!("{server}?creator_only=yes"),
                "creator_only=yes is neither true nor false",
            ),
            (
                format!("{server}?creator_only=true"),
                "give credentials too",
            ),
            (
                format!("{server}?connect_timeout=0s"),
                "connect_timeout=0s is no limit",
            ),
            ("zk://host:port".into(), "zk://host1:2181,host2:2181"),
            ("zk://hunter2@host".into(), "user:password"),
            (
                format!("{server}?client_key=/a"),
                "a zk: URL has no option client_key",
            ),
            (
                "zks://127.0.0.1:1?client_key=/a".into(),
                "give both client_certificate and client_key",
            ),
            (
                "zks://127.0.0.1:1?certificate_authority=/no/such/file".into(),
                "certificate_authority=/no/such/file names a file that cannot be read",
            ),
        ] {
            let said = refusal(&url).await;
            assert!(said.contains(says), "{url}: {said}");
            assert!(!said.contains("hunter2"), "{url}: {said}");
        }
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_unavailable() {
        let url = "zk://me:hunter2@127.0.0.1:1,127.0.0.1:2/a?connect_timeout=1s";
        let (kind, said) = failure(url).await;
        assert_eq!(kind, ErrorKind::Unavailable, "{said}");
        assert!(said.contains("127.0.0.1:1,127.0.0.1:2"), "{said}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_is_opened_with_its_options() {
        let servers = match leasehold_conformance::fixtures::zookeeper::ZooKeeper::find(1).await {
            Ok(servers) => servers,
            Err(missing) => return missing.skip(),
        };
        let url = servers.url();
        let here = opened(&format!("{url}/a?prefix=/here&connect_timeout=20s")).await;
        let same = opened(&format!("{url}/a?prefix=%2Fhere&wait=0s")).await;
        let elsewhere = opened(&format!("{url}/b?prefix=/here")).await;
        let guard = here.lock("open").await.expect("free");
        let error = same.lock("open").await.expect_err("held");
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let apart = elsewhere.try_lock("open").await.expect("answered");
        assert!(apart.is_some());
        guard.release().await.expect("released");
    }

    #[cfg(not(feature = "zk-tls"))]
    #[tokio::test]
    async fn without_the_feature_there_is_no_tls() {
        let error = open("zks://127.0.0.1:1").await.expect_err("not built in");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("`zk-tls`"), "{error}");
    }

    #[cfg(feature = "zk-tls")]
    #[tokio::test(flavor = "multi_thread")]
    async fn a_server_is_opened_over_tls() {
        use leasehold_conformance::fixtures::certificates::Authority;
        use leasehold_conformance::fixtures::zookeeper::ZooKeeperEnsemble;

        leasehold_conformance::skip_without!(
            ZooKeeperEnsemble::missing().or_else(|| Authority::missing("zookeeper"))
        );
        let authority = Authority::new().expect("made");
        let own = authority.sign("server").expect("signed");
        let tls = ZooKeeperEnsemble::with_tls(&authority, &own);
        let servers = ZooKeeperEnsemble::start(1, &tls).await.expect("started");
        let client = authority.sign("client").expect("signed");
        let url = format!(
            "zks://{}?certificate_authority={}&client_certificate={}&client_key={}",
            servers.secure_server(0),
            authority.certificate().display(),
            client.certificate.display(),
            client.key.display()
        );
        let guard = opened(&url).await.lock("open").await.expect("free");
        guard.release().await.expect("released");
    }
}
