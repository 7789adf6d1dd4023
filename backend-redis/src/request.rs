use std::time::Duration;

use leasehold_core::{Claim, Token};
use redis::{Cmd, Script, Value};
use uuid::Uuid;

use crate::names::LockKeys;
use crate::script::{self, FREE, LEAVE, Minting, RENEW};
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
    /// As a release, but names the lock alone: whoever waits finds it free later.
    Free { claim: Uuid, keys: &'a LockKeys },
    /// It does not wait any more; names the queue alone.
    Leave {
        claim: Uuid,
        place: Place,
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
    /// The keys of its lock.
    pub(crate) fn keys(&self) -> &'a LockKeys {
        match self {
            Self::Acquire { keys, .. }
            | Self::Release { keys, .. }
            | Self::Renew { keys, .. }
            | Self::Free { keys, .. }
            | Self::Leave { keys, .. } => keys,
        }
    }

    /// The script and its call.
    pub(crate) fn command(&self, sender: Sender) -> (&'static Script, Cmd) {
        match self {
            Self::Acquire { claim, place, keys } => {
                let script = &sender.minting.acquire;
                let mut cmd = script::call(script, &[&keys.lock, &keys.queue, &keys.token]);
                cmd.arg(sender.floor)
                    .arg(value::mine(claim.id))
                    .arg(millis(claim.ttl))
                    .arg(value::rest(claim, sender.server_now, sender.inbox));
                (script, place.write(cmd))
            }
            Self::Release { claim, place, keys } => {
                let script = &sender.minting.release;
                let mut cmd = script::call(script, &[&keys.lock, &keys.queue, &keys.token]);
                cmd.arg(sender.floor).arg(value::mine(*claim));
                (script, place.write(cmd))
            }
            Self::Renew {
                claim,
                token,
                ttl,
                keys,
            } => {
                let mut cmd = script::call(&RENEW, &[&keys.lock]);
                cmd.arg(value::grant(*claim, *token)).arg(millis(*ttl));
                (&RENEW, cmd)
            }
            Self::Free { claim, keys } => {
                let mut cmd = script::call(&FREE, &[&keys.lock]);
                cmd.arg(value::mine(*claim));
                (&FREE, cmd)
            }
            Self::Leave { claim, place, keys } => {
                let mut cmd = script::call(&LEAVE, &[&keys.queue]);
                cmd.arg(claim.to_string());
                (&LEAVE, place.write(cmd))
            }
        }
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

impl Place {
    /// As the scripts read it.
    fn write(self, mut cmd: Cmd) -> Cmd {
        match self {
            Self::Try => cmd.arg("try"),
            Self::None => &mut cmd,
            Self::Unknown => cmd.arg("?"),
            Self::Ticket(ticket) => cmd.arg(ticket),
        };
        cmd
    }
}

fn millis(ttl: Duration) -> u64 {
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
