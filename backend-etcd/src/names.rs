use leasehold_core::Key;
use uuid::Uuid;

/// The folder of a lock: what the keys of all who hold it or wait for it begin with, as in
/// `locks/order:42/`.
///
/// It is the layout of etcd's own Go client, which names a place in the queue
/// `{prefix}/{lease in hex}`: so `etcdctl lock locks/order:42` stands in the same queue. A `/` in the
/// name of a lock would put `a/b` into the folder of `a`, so it is written `%2F`, and `%` as `%25`:
/// no two names share a folder, and none lies in another's.
pub(crate) fn folder(prefix: &str, key: &Key) -> String {
    let name = key.as_str();
    let mut folder = String::with_capacity(prefix.len() + name.len() + 1);
    folder.push_str(prefix);
    for part in name.split_inclusive(['/', '%']) {
        match part.as_bytes().last() {
            Some(b'/') => folder.extend([&part[..part.len() - 1], "%2F"]),
            Some(b'%') => folder.extend([part, "25"]),
            _ => folder.push_str(part),
        }
    }
    folder.push('/');
    folder
}

/// A claim's own key in the folder. Many claims share a lease, so the lease alone does not name one.
pub(crate) fn place(folder: &str, lease: i64, claim: Uuid) -> String {
    format!("{folder}{lease:x}-{}", claim.simple())
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
            let mut read = String::new();
            let mut parts = written.split('%');
            read.push_str(parts.next().unwrap_or_default());
            for part in parts {
                let (code, rest) = part.split_at(2);
                read.push(match code { "2F" => '/', "25" => '%', _ => panic!("{code}") });
                read.push_str(rest);
            }
            prop_assert_eq!(read, name);
        }
    }

    #[test]
    fn a_place_begins_as_the_official_client_would_name_it() {
        let place = place("locks/a/", 0x7587, Uuid::nil());
        assert_eq!(place, "locks/a/7587-00000000000000000000000000000000");
    }
}
