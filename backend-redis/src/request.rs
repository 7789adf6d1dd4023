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

/// A request in the form in which it travels with others.
#[derive(Debug)]
pub(crate) struct Together {
    keys: LockKeys,
    name: &'static str,
    arguments: Arguments,
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
    /// The call as it travels with others.
    pub(crate) fn together(&self, sender: Sender) -> Together {
        Together {
            keys: self.keys().clone(),
            name: match self {
                Self::Acquire { .. } => "acquire",
                Self::Release { .. } => "release",
                Self::Renew { .. } => "renew",
            },
            arguments: self.arguments(sender),
        }
    }

    /// The keys of its lock.
    pub(crate) fn keys(&self) -> &'a LockKeys {
        match self {
            Self::Acquire { keys, .. } | Self::Release { keys, .. } | Self::Renew { keys, .. } => {
                keys
            }
        }
    }

    /// The script and its call.
    pub(crate) fn command(&self, sender: Sender) -> (&'static Script, Cmd) {
        let keys = self.keys();
        let minting = |script| {
            let mut cmd = script::call(script, &[&keys.lock, &keys.queue, &keys.token]);
            cmd.arg(sender.floor);
            (script, cmd)
        };
        let (script, mut cmd) = match self {
            Self::Acquire { .. } => minting(&sender.minting.acquire),
            Self::Release { .. } => minting(&sender.minting.release),
            Self::Renew { .. } => (&*RENEW, script::call(&RENEW, &[&keys.lock])),
        };
        for argument in self.arguments(sender).iter() {
            if !argument.is_empty() {
                cmd.arg(argument);
            }
        }
        (script, cmd)
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

impl Together {
    /// One call for all of `calls`; `floor` as in [`Sender`].
    pub(crate) fn command(calls: &[Self], floor: u64) -> Cmd {
        let mut cmd = Cmd::with_capacity(5 + 7 * calls.len(), 64 + 320 * calls.len());
        cmd.arg("EVALSHA")
            .arg(TOGETHER.get_hash())
            .arg(1 + 2 * calls.len());
        if let Some(first) = calls.first() {
            cmd.arg(&*first.keys.token);
        }
        for call in calls {
            cmd.arg(&*call.keys.lock).arg(&*call.keys.queue);
        }
        cmd.arg(floor);
        for call in calls {
            cmd.arg(call.name);
            for argument in call.arguments.iter() {
                cmd.arg(argument);
            }
        }
        cmd
    }

    /// The answers to such a call; `None` if it is nothing that the script returns.
    pub(crate) fn answers(value: Value) -> Option<Vec<RedisResult<Value>>> {
        let Value::Array(answers) = value else {
            return None;
        };
        let one = |answer| match answer {
            Value::BulkString(text) => {
                let text = String::from_utf8_lossy(&text).into_owned();
                Err(make_extension_error(text, None))
            }
            answer => Ok(answer),
        };
        Some(answers.into_iter().map(one).collect())
    }

    /// The answer to a call that went out for one alone.
    pub(crate) fn only_answer(value: Value) -> RedisResult<Value> {
        Self::answers(value)
            .and_then(|mut answers| answers.pop())
            .unwrap_or(Ok(Value::Nil))
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
