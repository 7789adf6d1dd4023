use std::collections::VecDeque;
use std::time::Duration;

use leasehold_core::Moment;

/// How long a session may be believed, from what its writes and connections prove.
///
/// 1. Pings, reads and the client's own state prove nothing: a follower that is cut off from its
///    leader goes on answering them while the leader, whom it no longer tells of the session,
///    counts the time-out down. A write is answered only with a quorum behind it.
/// 2. But an answered write is no sign of life for the leader by itself: the follower notes it, and
///    tells the leader with its next answer to the leader's ping, every half tick. So a write counts
///    once another one, sent a quarter of the time-out later or more, was answered too: time-outs
///    are two ticks or longer, so that a ping was answered in between. The leader has then heard of
///    the session not earlier than the first write was sent, and keeps it for a time-out from there.
/// 3. To open a session is a write, and to reopen it on another connection is a question to the
///    leader, who notes it: so it counts as soon as a write was answered that was sent after it (which
///    shows that this leader still leads). It was sent later than the last look at the former
///    connection.
/// 4. A leader that is new begins with a whole time-out for every session.
/// 5. Where the ttl is shorter than the time-out, a ttl from the newest answered write is the end:
///    that is the user's own limit and needs no proof, since the servers let go later.
#[derive(Debug)]
pub(crate) struct Pulse {
    ttl: Duration,
    timeout: Duration,
    /// The leader has heard of the session not earlier than this.
    heard: Moment,
    /// Answered since, and not followed by another yet.
    answered: VecDeque<Moment>,
    /// Reopened not earlier than this, and no write answered yet.
    reopened: Option<Moment>,
}

impl Pulse {
    /// A session that was asked for at `sent` and opened.
    pub(crate) fn new(sent: Moment, ttl: Duration, timeout: Duration) -> Self {
        Self {
            ttl,
            timeout,
            heard: sent,
            answered: VecDeque::new(),
            reopened: None,
        }
    }

    /// How often to write: an eighth of what there is, so that of two beats a quarter apart the older
    /// is never older than three eighths, and an interruption of half of it is borne.
    pub(crate) fn beat(&self) -> Duration {
        (self.ttl.min(self.timeout) / 8).max(Duration::from_millis(2))
    }

    /// The session was reopened on another connection; `before`: an earlier look, at which the former
    /// connection still stood.
    pub(crate) fn reopened(&mut self, before: Moment) {
        self.reopened = Some(before);
    }

    /// A write that was sent at `sent` was answered. Since when, and for how long, the session may be
    /// believed.
    pub(crate) fn answered(&mut self, sent: Moment) -> (Moment, Duration) {
        if let Some(before) = self.reopened.take() {
            self.hear(before);
        }
        let quarter = self.timeout / 4;
        while let Some(oldest) = self.answered.front() {
            // The older is read first: what passes between the readings never makes it older.
            let age = oldest.elapsed();
            if age.saturating_sub(sent.elapsed()) < quarter {
                break;
            }
            let oldest = *oldest;
            self.answered.pop_front();
            self.hear(oldest);
        }
        self.answered.push_back(sent);
        let own = (sent, self.ttl);
        let servers = (self.heard, self.timeout);
        if left(own) < left(servers) {
            own
        } else {
            servers
        }
    }

    fn hear(&mut self, sent: Moment) {
        if sent.elapsed() < self.heard.elapsed() {
            self.heard = sent;
        }
    }
}

fn left((from, length): (Moment, Duration)) -> Duration {
    length.saturating_sub(from.elapsed())
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// With a paused clock: what is left after a step, in whole milliseconds.
    fn ms((from, length): (Moment, Duration)) -> u128 {
        (left((from, length)).as_millis() + 5) / 10 * 10
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_counts_once_another_follows_a_quarter_later() {
        let mut pulse = Pulse::new(Moment::now(), SECOND * 60, SECOND * 40);
        advance(SECOND * 5).await;
        assert_eq!(
            ms(pulse.answered(Moment::now())),
            35_000,
            "only the opening counts"
        );
        advance(SECOND * 9).await;
        assert_eq!(
            ms(pulse.answered(Moment::now())),
            26_000,
            "too close to count"
        );
        advance(SECOND + Duration::from_millis(20)).await;
        assert_eq!(
            ms(pulse.answered(Moment::now())),
            29_980,
            "the first counts"
        );
        advance(SECOND * 30).await;
        assert_eq!(
            ms(pulse.answered(Moment::now())),
            10_000,
            "all but the last count"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_counts_from_its_sending() {
        let mut pulse = Pulse::new(Moment::now(), SECOND * 60, SECOND * 40);
        let sent = Moment::now();
        advance(SECOND * 12).await;
        pulse.answered(sent);
        let sent = Moment::now();
        advance(SECOND * 12).await;
        assert_eq!(ms(pulse.answered(sent)), 16_000, "the first, sent 24 s ago");
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_connection_counts_with_the_first_write_over_it() {
        let mut pulse = Pulse::new(Moment::now(), SECOND * 60, SECOND * 40);
        advance(SECOND * 20).await;
        let before = Moment::now();
        advance(SECOND * 10).await;
        pulse.reopened(before);
        assert_eq!(ms(pulse.answered(Moment::now())), 30_000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_ttl_ends_it_earlier() {
        let mut pulse = Pulse::new(Moment::now(), SECOND, SECOND * 4);
        advance(SECOND / 2).await;
        assert_eq!(ms(pulse.answered(Moment::now())), 1000);
        advance(SECOND * 39 / 10).await;
        assert_eq!(
            ms(pulse.answered(Moment::now())),
            100,
            "the servers' limit is nearer"
        );
    }
}
