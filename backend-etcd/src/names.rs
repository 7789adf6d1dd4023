use leasehold_core::Key;

/// The folder of a lock: what the keys of all who hold it or wait for it begin with, as in
/// `locks/order:42/`.
///
/// It is the layout of etcd's own Go client, which names a place in the queue
/// `{prefix}/{lease in hex}`: so `etcdctl lock locks/order:42` stands in the same queue. A `/` in the
/// name of a lock would put `a/b` into the folder of `a`, so it is written `%2F`, and `%` as `%25`:
/// no two names share a folder, and none lies in another's.
pub(crate) fn folder(prefix: &str, key: &Key) -> String {
    let mut folder = begin(prefix, key.as_str());
    folder.push('/');
    folder
}

/// What the folders of all locks begin with whose names begin with `name`.
pub(crate) fn begin(prefix: &str, name: &str) -> String {
    let mut begin = String::with_capacity(prefix.len() + name.len() + 1);
    begin.push_str(prefix);
    for part in name.split_inclusive(['/', '%']) {
        match part.as_bytes().last() {
            Some(b'/') => begin.extend([&part[..part.len() - 1], "%2F"]),
            Some(b'%') => begin.extend([part, "25"]),
            _ => begin.push_str(part),
        }
    }
    begin
}

/// The folder that a key of etcd lies in, if it lies in one.
pub(crate) fn folder_of<'a>(prefix: &str, place: &'a [u8]) -> Option<&'a [u8]> {
    let rest = place.strip_prefix(prefix.as_bytes())?;
    let name = rest.iter().position(|byte| *byte == b'/')?;
    Some(&place[..=prefix.len() + name])
}

/// The lock whose folder this is; `None` if it is not written as we do.
pub(crate) fn key(prefix: &str, folder: &[u8]) -> Option<Key> {
    let written = std::str::from_utf8(folder).ok()?;
    let name = written.strip_prefix(prefix)?.strip_suffix('/')?;
    let name = name.replace("%2F", "/").replace("%25", "%");
    let key = Key::new(name).ok()?;
    (self::folder(prefix, &key) == written).then_some(key)
}

/// A claim's own key in the folder. Many claims share a lease, so the lease alone does not name one; what
/// `round` and `number` are is told at [`Places`](crate::places::Places).
pub(crate) fn place(folder: &str, lease: i64, round: u64, number: u32) -> String {
    format!("{folder}{lease:x}-{round}-{number}")
}

/// Folder, round and number of such a key.
pub(crate) fn parts(place: &str) -> Option<(&str, u64, u32)> {
    let (folder, name) = place.split_at(place.rfind('/')? + 1);
    let mut parts = name.split('-').skip(1);
    let (round, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some((folder, round, number))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(name: &str) -> String {
        folder("locks/", &Key::new(name).unwrap())
    }

    #[test]
    fn no_name_meets_another_or_lies_in_its_folder() {
        assert_eq!(of("order:42"), "locks/order:42/");
        assert_eq!(of("a/b"), "locks/a%2Fb/");
        assert_eq!(of("a%2Fb"), "locks/a%252Fb/");
        let names = [
            "a", "a/", "a/b", "/a", "//", "%", "%2F", "a%2Fb", "a%252Fb", "å/é", "%%/",
        ];
        for one in names {
            for other in names {
                let (one_folder, other_folder) = (of(one), of(other));
                assert_eq!(
                    one_folder.starts_with(&other_folder),
                    one == other,
                    "{one_folder} {other_folder}"
                );
            }
        }
    }

    #[test]
    fn a_million_names_never_meet() {
        leasehold_conformance::names_never_meet(|key| folder("locks/", key));
    }

    proptest! {
        /// What can be read back from a folder was not lost in it.
        #[test]
        fn a_name_can_be_read_back(name in "([/%]|%2F|%25|[a-z]|\\PC|(?s:.)){1,12}") {
            let folder = of(&name);
            let written = folder.strip_prefix("locks/").and_then(|it| it.strip_suffix('/')).unwrap();
            // So none lies in another's.
            prop_assert!(!written.contains('/'), "{written}");
            let read = key("locks/", folder.as_bytes()).unwrap();
            prop_assert_eq!(read.as_str(), name);
            let place = place(&folder, -1, 2, 3);
            prop_assert_eq!(parts(&place), Some((&*folder, 2, 3)));
            prop_assert_eq!(folder_of("locks/", place.as_bytes()), Some(folder.as_bytes()));
        }
    }

    #[test]
    fn a_foreign_folder_is_no_key() {
        for folder in [
            &b"locks/"[..],
            b"locks//",
            b"locks/a%2f/",
            b"locks/%/",
            b"locks/\xff/",
            b"locks/a",
            b"other/a/",
        ] {
            assert_eq!(key("locks/", folder), None, "{folder:?}");
        }
        assert_eq!(folder_of("locks/", b"locks/a/b/c"), Some(&b"locks/a/"[..]));
        for outside in [&b"locks/a"[..], b"locks/", b"other/a/b"] {
            assert_eq!(folder_of("locks/", outside), None, "{outside:?}");
        }
    }

    #[test]
    fn a_place_begins_as_the_official_client_would_name_it() {
        let place = place("locks/a/", 0x7587, 0, 2);
        assert_eq!(place, "locks/a/7587-0-2");
        assert_eq!(parts("locks/a/7587"), None);
    }
}
