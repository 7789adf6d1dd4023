use std::time::{Duration, SystemTime};

use leasehold_core::{Holder, Token};

use crate::key_form::LockId;

/// What the sessions of clients say to each other, by NOTIFY, when an operator asks: the server knows
/// who has a lock only as far as the session.
///
/// 1. A session listens on a channel of its own, named by its backend, and shows that it does by a
///    shared lock that all of ours have.
/// 2. Who asks sends a question there, with its own backend and a number; the answer comes back to
///    its channel with that number. Nobody answers for a foreign session, or one that hangs.
/// 3. Anybody may NOTIFY in PostgreSQL. So the one who is asked looks first whether the asking backend
///    has the right to end its session, and else says nothing.
///
/// The first word is the version of the format.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Question {
        number: u64,
        reply_to: i32,
        key: LockId,
        what: Question,
    },
    Answer {
        number: u64,
        text: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    /// Who has it?
    Who,
    /// Take it away: from this grant, or from whoever has it.
    Evict(Option<Token>),
}

/// What a session knows about a lock of its own.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) token: Token,
    pub(crate) owner: String,
    pub(crate) label: Option<String>,
    pub(crate) since: SystemTime,
    pub(crate) remaining: Duration,
}

const VERSION: &str = "leasehold1";
/// It does not have the lock, or not this grant.
pub(crate) const NONE: &str = "none";
pub(crate) const DONE: &str = "done";

/// What the channel of a backend begins with.
pub(crate) const CHANNEL: &str = "leasehold_";

/// The channel of a backend.
pub(crate) fn channel(pid: i32) -> String {
    format!("{CHANNEL}{pid}")
}

impl Message {
    pub(crate) fn write(&self) -> String {
        match self {
            Self::Question {
                number,
                reply_to,
                key,
                what,
            } => {
                let what = match what {
                    Question::Who => "who".into(),
                    Question::Evict(None) => "evict any".into(),
                    Question::Evict(Some(token)) => format!("evict {token}"),
                };
                format!("{VERSION} ask {number} {reply_to} {key} {what}")
            }
            Self::Answer { number, text } => format!("{VERSION} answer {number} {text}"),
        }
    }

    /// `None`: nothing of ours, or of a version that we do not know.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let text = text.strip_prefix(VERSION)?.strip_prefix(' ')?;
        if let Some(answer) = text.strip_prefix("answer ") {
            let (number, text) = answer.split_once(' ')?;
            return Some(Self::Answer {
                number: number.parse().ok()?,
                text: text.into(),
            });
        }
        let mut words = text.strip_prefix("ask ")?.split(' ');
        let mut next = || words.next();
        Some(Self::Question {
            number: next()?.parse().ok()?,
            reply_to: next()?.parse().ok()?,
            key: next()?.parse().ok()?,
            what: match (next()?, next()) {
                ("who", None) => Question::Who,
                ("evict", Some("any")) => Question::Evict(None),
                ("evict", Some(token)) => Question::Evict(Some(Token::new(token.parse().ok()?))),
                _ => return None,
            },
        })
    }
}

impl Known {
    /// As an answer; the label, which may contain anything, is the rest of it.
    pub(crate) fn write(&self) -> String {
        // A notification has 8000 bytes at most, and labels are shorter; but whoever calls the backend
        // without core is not checked.
        const LONGEST_LABEL: usize = 1024;
        let since = self.since.duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default().as_micros();
        let remaining = self.remaining.as_millis();
        let Self { token, owner, .. } = self;
        let mut text = format!("held {token} {since} {remaining} {owner}");
        if let Some(label) = &self.label {
            text.push(' ');
            // The server has no text with a zero in it.
            let shown = |c| if c == '\0' { '\u{fffd}' } else { c };
            text.extend(label.chars().take(LONGEST_LABEL).map(shown));
        }
        text
    }

    pub(crate) fn read(text: &str) -> Option<Self> {
        let mut words = text.strip_prefix("held ")?.splitn(5, ' ');
        let mut next = || words.next();
        Some(Self {
            token: Token::new(next()?.parse().ok()?),
            since: SystemTime::UNIX_EPOCH + Duration::from_micros(next()?.parse().ok()?),
            remaining: Duration::from_millis(next()?.parse().ok()?),
            owner: next()?.into(),
            label: next().map(Into::into),
        })
    }

    /// Completes what the server knows.
    pub(crate) fn complete(self, holder: &mut Holder) {
        holder.grant = format!("{}#{}", holder.grant, self.token);
        holder.owner = Some(self.owner);
        holder.label = self.label;
        holder.token = Some(self.token);
        holder.since = Some(self.since);
        holder.remaining = Some(self.remaining);
        // Asked, it gives up this lock alone.
        holder.also_ends = 0;
    }
}

/// Session and token of a grant, as [`Known::complete`] names it.
pub(crate) fn parts(grant: &str) -> (&str, Option<Token>) {
    match grant.split_once('#') {
        Some((session, token)) => (session, token.parse().ok().map(Token::new)),
        None => (grant, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        for what in [
            Question::Who,
            Question::Evict(None),
            Question::Evict(Some(Token::new(7))),
        ] {
            let question = Message::Question {
                number: 1,
                reply_to: 4711,
                key: -5,
                what,
            };
            assert_eq!(Message::read(&question.write()), Some(question));
        }
        let answer = Message::Answer {
            number: u64::MAX,
            text: "held 1 2 3 me a  label\n".into(),
        };
        assert_eq!(Message::read(&answer.write()), Some(answer));
        for foreign in [
            "",
            "leasehold1",
            "leasehold2 answer 1 done",
            "leasehold1 ask 1 2 3 evict",
        ] {
            assert_eq!(Message::read(foreign), None, "{foreign:?}");
        }
    }

    #[test]
    fn what_is_known_is_read_as_it_was_written() {
        for label in [None, Some(""), Some("nightly  job\n2")] {
            let known = Known {
                token: Token::new(9),
                owner: "host:1:id".into(),
                label: label.map(Into::into),
                since: SystemTime::UNIX_EPOCH + Duration::from_micros(1_234_567),
                remaining: Duration::from_millis(800),
            };
            let read = Known::read(&known.write()).expect("readable");
            assert_eq!(format!("{read:?}"), format!("{known:?}"));
        }
        assert_eq!(parts("1@2#3"), ("1@2", Some(Token::new(3))));
        assert_eq!(parts("1@2"), ("1@2", None));
    }
}
