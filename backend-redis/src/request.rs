use std::collections::HashSet;
use std::fmt::{self, Write as _};
use std::time::Duration;

use leasehold_core::{Claim, Token};
use redis::{Cmd, RedisResult, Script, Value, make_extension_error};
use uuid::Uuid;

use crate::names::LockKeys;
use crate::script::{self, Minting, RENEW, TOGETHER};
use crate::value;

/// What may be asked about a claim: all that goes through [`Servers::request`](crate::servers::Servers::request).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Request<'a> {
    /// Grant it, or queue it unless `place` is a try.
    Acquire {
        claim: &'a Claim,
        place: Place,
        keys: &'a LockKeys,
    },
    /// It neither holds the lock nor waits for it any more.
    Release {
        claim: Uuid,
        place: Place,
        keys: &'a LockKeys,
    },
    /// Its grant lasts another ttl.
    Renew {
        claim: Uuid,
        token: Token,
        ttl: Duration,
        keys: &'a LockKeys,
    },
}

/// Where a claim stands in the queue of its lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere, and it takes no place.
    Try,
    /// Nowhere yet, or no longer.
    None,
    /// It may have a place, but the answer that said so was lost.
    Unknown,
    /// Behind all older tickets.
    Ticket(u64),
}

/// A request as it is written: it may wait, and travel with others.
#[derive(Debug)]
pub(crate) struct Call {
    keys: LockKeys,
    kind: Kind,
    arguments: Arguments,
    /// The claim has no place in a queue, and no call with which this travels is about the same lock.
    simple: bool,
}

/// Which script it is for.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Acquire,
    Release,
    Renew,
}

/// Calls that travel as one.
#[derive(Debug)]
pub(crate) struct Calls {
    calls: Vec<Call>,
    /// Their places in `calls`, in the order in which the script takes them.
    order: Vec<usize>,
}

/// What a script takes behind its floor, one behind the other, and where each ends: they cost one
/// allocation. What is absent is empty.
#[derive(Debug)]
struct Arguments {
    text: String,
    ends: [usize; 4],
    count: usize,
}

/// What the server said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The claim holds the lock, for a whole ttl from the sending of the request.
    Granted(Token),
    /// It waits under this ticket; the lock ends after so long if it is not renewed.
    Waiting { ticket: u64, left: Option<Duration> },
    /// Somebody else holds it, and the claim has no place in the queue.
    Refused,
    /// A release or renewal: the claim held the lock.
    Done,
    /// A release or renewal: it did not.
    NotHeld,
}

/// What requests tell about this client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sender {
    /// The scripts of its kind of server.
    pub(crate) minting: &'static Minting,
    pub(crate) inbox: Uuid,
    /// No token at or below it may be granted any more.
    pub(crate) floor: u64,
    /// The server's clock, in ms since 1970; only shown to people.
    pub(crate) server_now: u64,
}

impl<'a> Request<'a> {
    /// What is sent.
    pub(crate) fn call(&self, sender: Sender) -> Call {
        let (kind, place) = match self {
            Self::Acquire { place, .. } => (Kind::Acquire, *place),
            Self::Release { place, .. } => (Kind::Release, *place),
            Self::Renew { .. } => (Kind::Renew, Place::None),
        };
        Call {
            keys: self.keys().clone(),
            kind,
            arguments: self.arguments(sender),
            simple: matches!(place, Place::Try | Place::None),
        }
    }

    /// The script and its call.
    pub(crate) fn command(&self, sender: Sender) -> (&'static Script, Cmd) {
        self.call(sender).command(sender.minting, sender.floor)
    }

    /// The keys of its lock.
    pub(crate) fn keys(&self) -> &'a LockKeys {
        match self {
            Self::Acquire { keys, .. } | Self::Release { keys, .. } | Self::Renew { keys, .. } => {
                keys
            }
        }
    }

    fn arguments(&self, sender: Sender) -> Arguments {
        let mut arguments = Arguments {
            text: String::with_capacity(256),
            ends: [0; 4],
            count: 0,
        };
        match self {
            Self::Acquire { claim, place, .. } => {
                arguments.add(|text| value::write_mine(text, claim.id));
                arguments.add(|text| write!(text, "{}", millis(claim.ttl)));
                arguments
                    .add(|text| value::write_rest(text, claim, sender.server_now, sender.inbox));
                arguments.add(|text| write!(text, "{place}"));
            }
            Self::Release { claim, place, .. } => {
                arguments.add(|text| value::write_mine(text, *claim));
                arguments.add(|text| write!(text, "{place}"));
            }
            Self::Renew {
                claim, token, ttl, ..
            } => {
                arguments.add(|text| value::write_grant(text, *claim, *token));
                arguments.add(|text| write!(text, "{}", millis(*ttl)));
            }
        }
        arguments
    }
}

impl Arguments {
    fn add(&mut self, write: impl FnOnce(&mut String) -> fmt::Result) {
        // A string takes all that is written.
        write(&mut self.text).ok();
        self.ends[self.count..].fill(self.text.len());
        self.count += 1;
    }

    fn iter(&self) -> impl Iterator<Item = &str> {
        let mut from = 0;
        self.ends.iter().map(move |end| {
            let argument = &self.text[from..*end];
            from = *end;
            argument
        })
    }
}

impl Call {
    /// The script and its call; `floor` as in [`Sender`].
    pub(crate) fn command(&self, minting: &'static Minting, floor: u64) -> (&'static Script, Cmd) {
        let keys = &self.keys;
        let with_floor = |script| {
            let mut cmd = script::call(script, &[&keys.lock, &keys.queue, &keys.token]);
            cmd.arg(floor);
            (script, cmd)
        };
        let (script, mut cmd) = match self.kind {
            Kind::Acquire => with_floor(&minting.acquire),
            Kind::Release => with_floor(&minting.release),
            Kind::Renew => (&*RENEW, script::call(&RENEW, &[&keys.lock])),
        };
        for argument in self.arguments.iter() {
            if !argument.is_empty() {
                cmd.arg(argument);
            }
        }
        (script, cmd)
    }

    /// In which part of `together.lua` it stands.
    fn part(&self) -> usize {
        if self.simple { self.kind as usize } else { 3 }
    }
}

impl Calls {
    pub(crate) fn new(mut calls: Vec<Call>) -> Self {
        let mut locks = HashSet::with_capacity(calls.len());
        let mut again = HashSet::new();
        for call in &calls {
            if !locks.insert(&*call.keys.lock) {
                again.insert(call.keys.lock.clone());
            }
        }
        if !again.is_empty() {
            for call in &mut calls {
                call.simple &= !again.contains(&call.keys.lock);
            }
        }
        let mut order: Vec<usize> = (0..calls.len()).collect();
        // Those that are not simple keep their order.
        order.sort_by_key(|place| calls[*place].part());
        Self { calls, order }
    }

    /// One command for all of them; `floor` as in [`Sender`].
    pub(crate) fn command(&self, floor: u64) -> Cmd {
        let count = self.calls.len();
        let sorted = || self.order.iter().map(|place| &self.calls[*place]);
        let mut counts = [0; 4];
        for call in &self.calls {
            counts[call.part()] += 1;
        }
        let [acquires, releases, renewals, others] = counts;
        let queued = acquires + releases;
        let mut cmd = Cmd::with_capacity(8 + 7 * count, 128 + 288 * count);
        cmd.arg("EVALSHA")
            .arg(TOGETHER.get_hash())
            .arg(1 + 2 * (queued + others) + renewals);
        if let Some(first) = self.calls.first() {
            cmd.arg(&*first.keys.token);
        }
        for call in sorted().take(queued) {
            cmd.arg(&*call.keys.queue);
        }
        for call in sorted().take(queued + renewals) {
            cmd.arg(&*call.keys.lock);
        }
        for call in sorted().skip(queued + renewals) {
            cmd.arg(&*call.keys.lock).arg(&*call.keys.queue);
        }
        cmd.arg(floor).arg(acquires).arg(releases).arg(renewals);
        for call in sorted() {
            let (name, count) = match call.kind {
                Kind::Acquire => ("acquire", 4),
                Kind::Release => ("release", 1),
                Kind::Renew => ("renew", 2),
            };
            if call.simple {
                for argument in call.arguments.iter().take(count) {
                    cmd.arg(argument);
                }
            } else {
                cmd.arg(name);
                for argument in call.arguments.iter() {
                    cmd.arg(argument);
                }
            }
        }
        cmd
    }

    /// The answers to that, in the order of the calls; `None` if it is nothing that the script returns.
    pub(crate) fn answers(&self, value: Value) -> Option<Vec<RedisResult<Value>>> {
        let Value::Array(answers) = value else {
            return None;
        };
        let mut in_order: Vec<_> = self.calls.iter().map(|_| Ok(Value::Nil)).collect();
        for (place, answer) in self.order.iter().zip(answers) {
            in_order[*place] = match answer {
                Value::BulkString(text) => {
                    let text = String::from_utf8_lossy(&text).into_owned();
                    Err(make_extension_error(text, None))
                }
                answer => Ok(answer),
            };
        }
        Some(in_order)
    }

    /// Each of them for itself, in their order.
    pub(crate) fn each(&self) -> impl Iterator<Item = &Call> {
        self.calls.iter()
    }
}

impl Answer {
    /// Reads what a script returned; `None` if it is nothing that they return.
    pub(crate) fn read(value: &Value) -> Option<Self> {
        match value {
            Value::Int(0) => Some(Self::NotHeld),
            Value::Int(1) => Some(Self::Done),
            // Tokens count microseconds since 1970: none is that low.
            Value::Int(token) => Some(Self::Granted(Token::new((*token).try_into().ok()?))),
            Value::Array(fields) => match fields[..] {
                [Value::Int(0), Value::Int(_)] => Some(Self::Refused),
                [Value::Int(ticket), Value::Int(left)] => Some(Self::Waiting {
                    ticket: ticket.try_into().ok()?,
                    left: left.try_into().ok().map(Duration::from_millis),
                }),
                _ => None,
            },
            _ => None,
        }
    }
}

/// As the scripts read it.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Try => f.write_str("try"),
            Self::None => Ok(()),
            Self::Unknown => f.write_str("?"),
            Self::Ticket(ticket) => ticket.fmt(f),
        }
    }
}

pub(crate) fn millis(ttl: Duration) -> u64 {
    // At most a year, see Claim::TTL_RANGE.
    ttl.as_millis().try_into().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        let ints = |ints: &[i64]| Value::Array(ints.iter().copied().map(Value::Int).collect());
        assert_eq!(Answer::read(&Value::Int(0)), Some(Answer::NotHeld));
        assert_eq!(Answer::read(&Value::Int(1)), Some(Answer::Done));
        let granted = Answer::Granted(Token::new(7));
        assert_eq!(Answer::read(&Value::Int(7)), Some(granted));
        assert_eq!(Answer::read(&ints(&[0, 5])), Some(Answer::Refused));
        let waiting = |left: Option<u64>| Answer::Waiting {
            ticket: 9,
            left: left.map(Duration::from_millis),
        };
        assert_eq!(Answer::read(&ints(&[9, 5])), Some(waiting(Some(5))));
        assert_eq!(Answer::read(&ints(&[9, -1])), Some(waiting(None)));
        assert_eq!(Answer::read(&Value::Int(-7)), None);
        assert_eq!(Answer::read(&ints(&[1, 2, 3])), None);
        assert_eq!(Answer::read(&ints(&[])), None);
        assert_eq!(Answer::read(&Value::Okay), None);
    }
}
