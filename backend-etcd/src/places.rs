use std::collections::{BTreeSet, HashMap};

use leasehold_core::Validity;

use crate::names;

/// The keys of the claims in a session, and how they are named.
///
/// Until its history is compacted, etcd remembers the name of each key that ever was, and goes through
/// all of those in a folder to see whether it is empty. A lock that comes and goes under ever new names
/// would be slower each time, so a name is used again:
///
/// 1. The claims that are in one folder at one time are numbered, from the lowest free number on.
/// 2. A name is free again when its key is gone and every request that put or deleted it was answered: no
///    such request can be carried out later, and hit the key of another claim.
/// 3. When that is not known, the name never comes back: the round, which is in all names, counts up. So a
///    key of an earlier round that no claim has is one that was put late.
#[derive(Debug)]
pub(crate) struct Places {
    lease: i64,
    round: u64,
    /// With the validity of the hold, where it has the lock.
    keys: HashMap<String, Option<Validity>>,
    /// Those in use, by folder.
    numbers: HashMap<String, BTreeSet<u32>>,
}

impl Places {
    pub(crate) fn new(lease: i64) -> Self {
        Self {
            lease,
            round: 0,
            keys: HashMap::new(),
            numbers: HashMap::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The key of a new claim in this folder.
    pub(crate) fn take(&mut self, folder: &str) -> String {
        let used = self.numbers.entry(folder.to_owned()).or_default();
        let free = (0..).zip(used.iter()).find(|(free, used)| free != *used);
        let number = free.map_or_else(|| used.last().map_or(0, |last| last + 1), |(free, _)| free);
        let _new = used.insert(number);
        let key = names::place(folder, self.lease, self.round, number);
        self.keys.insert(key.clone(), None);
        key
    }

    /// It has the lock.
    pub(crate) fn hold(&mut self, key: &str, validity: Validity) {
        if let Some(held) = self.keys.get_mut(key) {
            *held = Some(validity);
        }
    }

    /// The key is gone; `certain`: for good, all requests with it were answered.
    pub(crate) fn give_back(&mut self, key: &str, certain: bool) -> Option<Validity> {
        let held = self.keys.remove(key)?;
        if !certain {
            self.round += 1;
        }
        if let Some((folder, _, number)) = names::parts(key)
            && let Some(used) = self.numbers.get_mut(folder)
        {
            let _was = used.remove(&number);
            if used.is_empty() {
                self.numbers.remove(folder);
            }
        }
        held
    }

    pub(crate) fn contains(&self, key: &str) -> bool {
        self.keys.contains_key(key)
    }

    /// Those that have the lock.
    pub(crate) fn held(&self) -> Vec<(String, Validity)> {
        let held = self.keys.iter();
        let held = held.filter_map(|(key, held)| Some((key, held.as_ref()?)));
        held.map(|(key, held)| (key.clone(), held.clone()))
            .collect()
    }

    /// Whether a key that was seen under the lease belongs to nobody, and never will. One of this round may
    /// have been given back since, or be taken next.
    pub(crate) fn is_orphan(&self, key: &str) -> bool {
        let round = names::parts(key).map(|(_, round, _)| round);
        !self.contains(key) && round.is_none_or(|round| round < self.round)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_used_again_once_all_is_answered() {
        let mut places = Places::new(0xab);
        let first = places.take("locks/a/");
        assert_eq!(first, "locks/a/ab-0-0");
        let second = places.take("locks/a/");
        assert_eq!(second, "locks/a/ab-0-1");
        let third = places.take("locks/a/");
        assert_eq!(places.take("locks/b/"), "locks/b/ab-0-0");
        places.give_back(&first, true);
        assert_eq!(places.take("locks/a/"), first);
        places.give_back(&second, true);
        places.give_back(&third, true);
        assert_eq!(places.take("locks/a/"), second);
        assert_eq!(places.take("locks/a/"), third);
        assert_eq!(places.len(), 4);
    }

    #[test]
    fn no_name_comes_back_whose_fate_is_not_known() {
        let mut places = Places::new(1);
        let (one, other) = (places.take("a/"), places.take("a/"));
        places.give_back(&one, false);
        let next = places.take("a/");
        assert_eq!(next, "a/1-1-0");
        // That of the other is over too, though all is known of it.
        places.give_back(&other, true);
        assert_eq!(places.take("a/"), "a/1-1-1");
        // It is said once.
        places.give_back(&one, false);
        places.give_back(&next, true);
        assert_eq!(places.take("a/"), next);
        assert!(places.is_orphan(&one));
    }

    #[test]
    fn a_key_is_an_orphan_only_if_nobody_can_take_it_any_more() {
        let mut places = Places::new(1);
        let key = places.take("a/");
        assert!(!places.is_orphan(&key));
        places.give_back(&key, true);
        assert!(!places.is_orphan(&key), "it may be taken again");
        assert!(!places.is_orphan("a/1-0-9"), "it may be taken next");
        assert!(places.is_orphan("a/1"), "another program's");
        assert!(places.is_orphan("a/1-00000000000000000000000000000000"));
        let lasting = places.take("a/");
        let unknown = places.take("a/");
        places.give_back(&unknown, false);
        assert!(places.is_orphan(&unknown));
        assert!(!places.is_orphan(&lasting), "its claim lives");
    }
}
