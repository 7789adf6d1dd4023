use leasehold_core::{Guarantees, Memory, Need, Reason};

/// A store to choose, and what it promises.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Candidate {
    /// What to call it.
    pub name: String,
    /// The URL of such a store.
    pub form: String,
    /// What it promises in any case.
    pub guarantees: Guarantees,
    /// What it promises where it is set up for more, and how that is.
    pub at_best: Option<(&'static str, Guarantees)>,
}

impl Candidate {
    /// A store that was asked.
    #[must_use]
    pub fn new(name: impl Into<String>, guarantees: Guarantees) -> Self {
        let name = name.into();
        Self {
            form: name.clone(),
            name,
            guarantees,
            at_best: None,
        }
    }

    /// The kinds of stores that this build knows, with what they promise before one of them was asked.
    #[must_use]
    pub fn known() -> Vec<Self> {
        #[allow(unused_mut, reason = "without any feature this is all")]
        let mut known = vec![kind("Memory", "memory:", Memory::GUARANTEES)];
        #[cfg(feature = "file")]
        known.push(kind(
            "File",
            "file:/folder",
            leasehold_file::Folder::GUARANTEES,
        ));
        #[cfg(feature = "redis")]
        known.extend([
            kind("Redis", "redis://host", leasehold_redis::Redis::GUARANTEES),
            kind(
                "Redis behind Sentinel",
                "redis+sentinel://host,host,host/master",
                leasehold_redis::Redis::GUARANTEES,
            ),
            kind(
                "Redis Cluster",
                "redis+cluster://host,host,host",
                leasehold_redis::Redis::GUARANTEES,
            ),
            kind(
                "Redlock",
                "redlock://host,host,host",
                leasehold_redis::Redlock::GUARANTEES,
            ),
        ]);
        #[cfg(feature = "etcd")]
        known.push(several(kind(
            "etcd",
            "etcd://host,host,host",
            leasehold_etcd::Etcd::GUARANTEES,
        )));
        #[cfg(feature = "zk")]
        known.push(several(kind(
            "ZooKeeper",
            "zk://host,host,host",
            leasehold_zk::ZooKeeper::GUARANTEES,
        )));
        #[cfg(feature = "postgres")]
        known.push(kind(
            "PostgreSQL",
            "postgres://host/database",
            leasehold_postgres::Postgres::GUARANTEES,
        ));
        known
    }

    /// Whether it does what is needed, and why.
    #[must_use]
    pub fn judge(&self, need: Need) -> Judgement {
        let (answer, reason) = match (need.check(&self.guarantees), &self.at_best) {
            (Ok(reason), _) => (Answer::Yes, reason),
            (Err(reason), None) => (Answer::No, reason),
            (Err(lacking), Some((how, best))) => match need.check(best) {
                Ok(reason) => (Answer::Depends, format!("{how}: {reason}").into()),
                Err(_) => (Answer::No, lacking),
            },
        };
        Judgement { answer, reason }
    }
}

/// Whether a store does what is needed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Judgement {
    /// Whether it does.
    pub answer: Answer,
    /// Why, in words.
    pub reason: Reason,
}

/// Whether a store does what is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It does.
    Yes,
    /// If it is set up as the reason says.
    Depends,
    /// It does not.
    No,
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Yes => "yes",
            Self::Depends => "depends",
            Self::No => "no",
        })
    }
}

fn kind(name: &str, form: &str, guarantees: Guarantees) -> Candidate {
    Candidate {
        name: name.into(),
        form: form.into(),
        guarantees,
        at_best: None,
    }
}

/// With a majority that can do without one.
#[cfg(any(feature = "etcd", feature = "zk"))]
fn several(mut candidate: Candidate) -> Candidate {
    let mut guarantees = candidate.guarantees;
    guarantees.node_losses = 1;
    candidate.at_best = Some(("with three servers", guarantees));
    candidate
}
