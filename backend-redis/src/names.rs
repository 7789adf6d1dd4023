use std::sync::Arc;

use leasehold_core::{Error, ErrorKind, Key, Result};
use uuid::Uuid;

use crate::cluster::{slot, tag};

/// The names of our keys and channels, all of which begin with the prefix.
///
/// A lock is `<prefix><name>`, unchanged, so that it is the same key that other programs lock.
/// Everything else begins with `<prefix>leasehold:`; a lock whose name begins so too becomes
/// `<prefix>leasehold:key:<name>`, which nothing else is called. So two names never meet (C6).
///
/// In a cluster the lock is called the same, and its queue and counter carry a tag that puts them into
/// the slot of the lock, so that one script may use all three; the counter is one for each slot.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    prefix: Arc<str>,
    /// `None` in a cluster.
    token: Option<Arc<str>>,
}

/// The keys that one lock needs.
#[derive(Debug, Clone)]
pub(crate) struct LockKeys {
    pub(crate) lock: Arc<str>,
    pub(crate) queue: Arc<str>,
    pub(crate) token: Arc<str>,
    /// The slot of all three, if this is a cluster; else 0.
    pub(crate) slot: u16,
}

const OURS: &str = "leasehold:";

impl Names {
    pub(crate) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.into(),
            token: Some(format!("{prefix}{OURS}token").into()),
        }
    }

    /// The names in a cluster.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the prefix leaves no place for a tag.
    pub(crate) fn in_cluster(prefix: &str) -> Result<Self> {
        if let Some((_, rest)) = prefix.split_once('{')
            && rest.find('}').is_none_or(|close| close == 0)
        {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "in a cluster the prefix {prefix:?} would part a lock from its queue: leave out \
                     the '{{', or let a tag follow it as in {{shop}}lock:"
                ),
            ));
        }
        Ok(Self {
            prefix: prefix.into(),
            token: None,
        })
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn of(&self, key: &Key) -> LockKeys {
        self.of_name(key.as_str())
    }

    /// The keys of the lock that a message calls by its key; `None` if it is none of ours.
    pub(crate) fn of_lock(&self, lock: &str) -> Option<LockKeys> {
        self.locked(lock).map(|name| self.of_name(name))
    }

    /// The name of the lock that has this key; `None` if none has.
    pub(crate) fn locked<'a>(&self, lock: &'a str) -> Option<&'a str> {
        let name = lock.strip_prefix(&*self.prefix)?;
        match name.strip_prefix(OURS) {
            Some(ours) => ours
                .strip_prefix("key:")
                .filter(|name| name.starts_with(OURS)),
            None => Some(name),
        }
    }

    /// The name of the lock whose queue has this key; `None` if none has.
    pub(crate) fn queued<'a>(&self, queue: &'a str) -> Option<&'a str> {
        let ours = queue.strip_prefix(&*self.prefix)?.strip_prefix(OURS)?;
        let name = ours.strip_prefix("queue:")?;
        let name = match self.token {
            Some(_) => name,
            None => name.split_once("}:")?.1,
        };
        (*self.of_name(name).queue == *queue).then_some(name)
    }

    /// The channel on which a client hears of its grants.
    pub(crate) fn inbox(&self, client: Uuid) -> String {
        format!("{}{OURS}inbox:{client}", self.prefix)
    }

    /// Keys to try out commands on.
    pub(crate) fn probe(&self, client: Uuid) -> LockKeys {
        let lock = format!("{}{OURS}probe:{client}", self.prefix);
        self.beside(lock, "probe-queue", &client.to_string())
    }

    /// The same in this slot of a cluster, unless the prefix puts all keys into another.
    pub(crate) fn probe_in(&self, slot: u16, client: Uuid) -> LockKeys {
        let lock = format!("{}{OURS}probe:{{{}}}:{client}", self.prefix, tag(slot));
        self.beside(lock, "probe-queue", &client.to_string())
    }

    pub(crate) fn of_name(&self, name: &str) -> LockKeys {
        let prefix = &*self.prefix;
        let lock = if name.starts_with(OURS) {
            [prefix, OURS, "key:", name].concat()
        } else {
            [prefix, name].concat()
        };
        self.beside(lock, "queue", name)
    }

    fn beside(&self, lock: String, queue: &str, name: &str) -> LockKeys {
        let prefix = &*self.prefix;
        match &self.token {
            Some(token) => LockKeys {
                lock: lock.into(),
                queue: [prefix, OURS, queue, ":", name].concat().into(),
                token: token.clone(),
                slot: 0,
            },
            None => {
                let slot = slot(&lock);
                let tag = tag(slot);
                LockKeys {
                    lock: lock.into(),
                    queue: format!("{prefix}{OURS}{queue}:{{{tag}}}:{name}").into(),
                    token: format!("{prefix}{OURS}token:{{{tag}}}").into(),
                    slot,
                }
            }
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
            for names in [names.clone(), Names::in_cluster("lock:").unwrap()] {
                let keys = names.of(&Key::new(&name).unwrap());
                prop_assert_eq!(names.locked(&keys.lock), Some(&*name));
                prop_assert_eq!(names.queued(&keys.queue), Some(&*name));
                prop_assert_eq!(names.locked(&keys.queue), None);
                prop_assert_eq!(names.queued(&keys.lock), None);
            }
            let keys = names.of(&Key::new(&name).unwrap());
            // Nothing of ours is called so.
            if let Some(ours) = keys.lock.strip_prefix("lock:leasehold:") {
                prop_assert!(ours.starts_with("key:leasehold:"), "{}", keys.lock);
            }
        }
    }

    #[test]
    fn no_two_names_meet_and_each_is_found_again() {
        let names = Names::new("lock:");
        let token = names.token.clone().unwrap();
        let mut seen = HashSet::from([token.to_string()]);
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
        // Nobody locks `a` so, whoever has put it there.
        assert!(names.of_lock("lock:leasehold:key:a").is_none());
    }

    #[test]
    fn in_a_cluster_the_keys_of_a_lock_share_its_slot_and_no_two_names_meet() {
        for prefix in ["lock:", "", "{shop}:", "a}b", "{a}{", "{{}:"] {
            let names = Names::in_cluster(prefix).unwrap();
            let mut seen = HashSet::new();
            for name in [
                "a",
                "{order:42}",
                "a}b",
                "{}x",
                "{",
                "}",
                "{}",
                "}{",
                "{{a}}",
                "leasehold:token:{1}",
                "leasehold:queue:{1}:a",
                "\0{Ω}\n",
            ] {
                let keys = names.of(&Key::new(name).unwrap());
                let slots = [&keys.lock, &keys.queue, &keys.token].map(|key| slot(key));
                assert_eq!(slots, [keys.slot; 3], "{prefix} {name}");
                assert!(seen.insert(keys.lock.to_string()), "{prefix} {name}");
                assert!(seen.insert(keys.queue.to_string()), "{prefix} {name}");
                let again = names.of_lock(&keys.lock).unwrap();
                assert_eq!((again.lock, again.queue), (keys.lock, keys.queue));
            }
        }
        let client = Uuid::new_v4();
        let names = |prefix| Names::in_cluster(prefix).unwrap();
        assert_eq!(names("lock:").probe_in(7, client).slot, 7);
        assert_eq!(names("{a}").probe_in(7, client).slot, slot("a"));
        for prefix in ["{", "{}", "a{b", "{}{a}"] {
            let refused = Names::in_cluster(prefix).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Invalid, "{prefix}");
        }
    }
}
