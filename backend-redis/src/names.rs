use std::sync::Arc;

use leasehold_core::Key;
use uuid::Uuid;

/// The names of our keys and channels, all of which begin with the prefix.
///
/// A lock is `<prefix><name>`, unchanged, so that it is the same key that other programs lock.
/// Everything else begins with `<prefix>leasehold:`; a lock whose name begins so too becomes
/// `<prefix>leasehold:key:<name>`, which nothing else is called. So two names never meet (C6).
#[derive(Debug, Clone)]
pub(crate) struct Names {
    prefix: Arc<str>,
    token: Arc<str>,
}

/// The keys that one lock needs.
#[derive(Debug, Clone)]
pub(crate) struct LockKeys {
    pub(crate) lock: Arc<str>,
    pub(crate) queue: Arc<str>,
    pub(crate) token: Arc<str>,
}

const OURS: &str = "leasehold:";

impl Names {
    pub(crate) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.into(),
            token: format!("{prefix}{OURS}token").into(),
        }
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn of(&self, key: &Key) -> LockKeys {
        self.of_name(key.as_str())
    }

    /// The keys of the lock that a message calls by its key; `None` if it is none of ours.
    pub(crate) fn of_lock(&self, lock: &str) -> Option<LockKeys> {
        let name = lock.strip_prefix(&*self.prefix)?;
        let name = match name.strip_prefix(OURS) {
            Some(ours) => ours.strip_prefix("key:")?,
            None => name,
        };
        Some(self.of_name(name))
    }

    /// The channel on which a client hears of its grants.
    pub(crate) fn inbox(&self, client: Uuid) -> String {
        format!("{}{OURS}inbox:{client}", self.prefix)
    }

    /// Keys to try out commands on.
    pub(crate) fn probe(&self, client: Uuid) -> LockKeys {
        LockKeys {
            lock: format!("{}{OURS}probe:{client}", self.prefix).into(),
            queue: format!("{}{OURS}probe-queue:{client}", self.prefix).into(),
            token: self.token.clone(),
        }
    }

    fn of_name(&self, name: &str) -> LockKeys {
        let prefix = &self.prefix;
        let lock = if name.starts_with(OURS) {
            format!("{prefix}{OURS}key:{name}")
        } else {
            format!("{prefix}{name}")
        };
        LockKeys {
            lock: lock.into(),
            queue: format!("{prefix}{OURS}queue:{name}").into(),
            token: self.token.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_lock_is_called_as_other_programs_call_it() {
        let names = Names::new("lock:");
        for name in ["order:42", "{order:42}", "a}b", "{}x", " ", "Ω\n\0"] {
            let key = Key::new(name).unwrap();
            assert_eq!(&*names.of(&key).lock, format!("lock:{name}"));
        }
    }

    #[test]
    fn a_million_names_never_meet() {
        let names = Names::new("lock:");
        leasehold_conformance::names_never_meet(|key| names.of(key).lock);
    }

    proptest! {
        /// What can be read back from a key was not lost in it.
        #[test]
        fn a_name_can_be_read_back(name in "(leasehold:|key:|queue:|token|[a-z:{}]|\\PC|(?s:.)){1,12}") {
            let names = Names::new("lock:");
            let keys = names.of(&Key::new(&name).unwrap());
            prop_assert_eq!(keys.queue.strip_prefix("lock:leasehold:queue:"), Some(&*name));
            prop_assert_eq!(names.of_lock(&keys.lock).unwrap().queue, keys.queue);
            // Nothing of ours is called so.
            if let Some(ours) = keys.lock.strip_prefix("lock:leasehold:") {
                prop_assert!(ours.starts_with("key:leasehold:"), "{}", keys.lock);
            }
        }
    }

    #[test]
    fn no_two_names_meet_and_each_is_found_again() {
        let names = Names::new("lock:");
        let mut seen = HashSet::from([names.token.to_string()]);
        for name in [
            "a",
            "token",
            "key:a",
            "leasehold:",
            "leasehold:token",
            "leasehold:key:a",
            "leasehold:queue:a",
            "leasehold:key:leasehold:key:a",
            "leasehold:key:leasehold:a",
            "leasehold:a",
            "leasehold",
            "Leasehold:token",
        ] {
            let keys = names.of(&Key::new(name).unwrap());
            assert!(seen.insert(keys.lock.to_string()), "{name}");
            assert!(seen.insert(keys.queue.to_string()), "{name}");
            let again = names.of_lock(&keys.lock).unwrap();
            assert_eq!((again.lock, again.queue), (keys.lock, keys.queue));
        }
        assert!(names.of_lock("other:a").is_none());
        assert!(names.of_lock("lock:leasehold:token").is_none());
    }
}
