use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, SystemTime};

/// What a store says of itself, and what of it endangers its locks. Plain data, for operators.
///
/// What could not be found out is left out, or is a finding of its own; it never contains
/// credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Examination {
    /// The servers that were asked.
    pub servers: Vec<Examined>,
    /// What to know or to mend, in no order.
    pub findings: Vec<Finding>,
}

impl Examination {
    /// Nothing asked, nothing found.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a finding.
    pub fn find(
        &mut self,
        severity: Severity,
        id: &'static str,
        what: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.findings.push(Finding {
            severity,
            id,
            what: what.into(),
            advice: advice.into(),
        });
    }

    /// The most severe finding, if there is any.
    #[must_use]
    pub fn severity(&self) -> Option<Severity> {
        self.findings.iter().map(|it| it.severity).max()
    }

    /// What is judged the same way on every store.
    pub(crate) fn judge(&mut self, ttl: Duration, shortest: Duration) {
        if ttl < shortest {
            self.find(
                Severity::Warning,
                "short-ttl",
                format!("a ttl of {ttl:?} is shorter than the store's shortest, {shortest:?}: the lock of a client that dies lasts that long"),
                format!("use a ttl of {shortest:?} or more, or count on it"),
            );
        }
        let off: Vec<String> = self
            .servers
            .iter()
            .filter(|server| {
                server
                    .clock_ahead_ms
                    .is_some_and(|ahead| ahead.unsigned_abs() > 60_000)
            })
            .map(|server| server.address.clone())
            .collect();
        if !off.is_empty() {
            self.find(
                Severity::Warning,
                "clock-difference",
                format!("the clock of {} is more than a minute away from this machine's", off.join(", ")),
                "have both set by NTP: what a store knows of the order of tokens after a loss of data, and what operators are shown, rests on it",
            );
        }
    }
}

/// One server that was asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Examined {
    /// Host and port, or what else names it.
    pub address: String,
    /// Its version, in its own words.
    pub version: Option<String>,
    /// How long a request that does nothing takes, at best.
    pub round_trip: Option<Duration>,
    /// How far its clock is ahead of this machine's, in ms; below zero: behind. Right to half of the
    /// round trip.
    pub clock_ahead_ms: Option<i64>,
    /// What else is worth showing: name and value.
    pub facts: Vec<(Cow<'static, str>, String)>,
}

impl Examined {
    /// A server of which nothing is known yet.
    #[must_use]
    pub fn new(address: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            ..Self::default()
        }
    }

    /// Notes a fact.
    pub fn fact(&mut self, name: impl Into<Cow<'static, str>>, value: impl fmt::Display) {
        self.facts.push((name.into(), value.to_string()));
    }

    /// Notes that the server's clock said `clock` in an answer that just came, `round_trip` after the
    /// question was sent.
    pub fn clock(&mut self, clock: SystemTime, round_trip: Duration) {
        #[allow(
            clippy::disallowed_methods,
            reason = "shown to people, decides nothing"
        )]
        let now = SystemTime::now() - round_trip / 2;
        let millis = |span: Duration| i64::try_from(span.as_millis()).unwrap_or(i64::MAX);
        self.clock_ahead_ms = Some(match clock.duration_since(now) {
            Ok(ahead) => millis(ahead),
            Err(behind) => -millis(behind.duration()),
        });
    }
}

/// Something about a store that whoever relies on its locks should know.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Names this kind of finding, for programs: `eviction`, `no-persistence`.
    pub id: &'static str,
    /// What was found, and what comes of it.
    pub what: String,
    /// What to do about it.
    pub advice: String,
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Severity {
    /// Good to know; the promises hold.
    Note,
    /// The promises hold, but a failure that others survive ends or forgets locks here.
    Warning,
    /// A promise may be broken in daily use: one lock may be given to two.
    Danger,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Danger => "danger",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ttl_below_the_shortest_is_warned_of() {
        let judged = |ttl| {
            let mut examination = Examination::new();
            examination.judge(Duration::from_secs(ttl), Duration::from_secs(2));
            examination.severity()
        };
        assert_eq!(judged(2), None);
        assert_eq!(judged(1), Some(Severity::Warning));
    }

    #[test]
    fn a_clock_that_is_off_is_warned_of() {
        let judged = |ahead| {
            let mut server = Examined::new("here:1");
            server.clock_ahead_ms = Some(ahead);
            let mut examination = Examination::new();
            examination.servers.push(server);
            examination.judge(Duration::from_secs(2), Duration::from_secs(2));
            examination.findings
        };
        assert!(judged(60_000).is_empty());
        for off in [61_000, -61_000] {
            let findings = judged(off);
            assert_eq!(findings[0].id, "clock-difference");
            assert!(findings[0].what.contains("here:1"));
        }
    }

    #[test]
    fn a_clock_is_compared_with_ours() {
        let mut server = Examined::new("here:1");
        server.clock(SystemTime::UNIX_EPOCH, Duration::ZERO);
        assert!(server.clock_ahead_ms.unwrap() < -1_000_000_000_000);
    }
}
