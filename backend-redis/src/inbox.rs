use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_core::{Moment, Token, Validity};
use tokio::sync::Notify;
use uuid::Uuid;

/// What this client hears from the server without asking: grants that were handed over to its
/// waiters, evictions of what it holds, and word that a waiter is next.
///
/// Every claim is registered before its first request leaves, so that no message comes too early; the
/// messages of a connection arrive here in the order in which the server sent them, before any answer
/// that the server sent later reaches its claim.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    claims: Mutex<Claims>,
}

/// One claim that asks or waits.
#[derive(Debug, Default)]
pub(crate) struct Waiter {
    news: Mutex<News>,
    changed: Notify,
}

/// A grant that came by message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pushed {
    pub(crate) token: Token,
    /// The connection it came on.
    pub(crate) connection: u64,
}

/// So long after that moment.
pub(crate) type Ends = (Moment, Duration);

/// A grant to a claim that nobody here has any more.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Orphan<'a> {
    pub(crate) claim: Uuid,
    pub(crate) lock: &'a str,
}

/// A hold of this client.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) claim: Uuid,
    pub(crate) lock: Arc<str>,
    pub(crate) token: Token,
}

#[derive(Debug, Default)]
struct Claims {
    entries: HashMap<Uuid, Entry>,
    /// The waiters of each lock by ticket.
    queues: HashMap<Arc<str>, BTreeMap<u64, Arc<Waiter>>>,
}

#[derive(Debug)]
enum Entry {
    Asking(Arc<Waiter>),
    Held(Token, Validity, Arc<str>),
}

#[derive(Debug, Default)]
struct News {
    pushed: Option<Pushed>,
    /// Grants up to this token were taken away again.
    evicted: Option<Token>,
    /// When the holder's lock ends, if there was word of it.
    holder_ends: Option<Ends>,
}

impl Inbox {
    /// From now on messages for `claim` are kept.
    pub(crate) fn register(&self, claim: Uuid) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter::default());
        let entry = Entry::Asking(waiter.clone());
        self.claims().entries.insert(claim, entry);
        waiter
    }

    /// `claim` was granted: its eviction ends `validity`. False if it was taken away already; it goes
    /// on asking then.
    pub(crate) fn hold(&self, held: &Held, validity: &Validity) -> bool {
        let mut claims = self.claims();
        if let Some(Entry::Asking(waiter)) = claims.entries.get(&held.claim)
            && waiter.news().is_evicted(held.token)
        {
            return false;
        }
        let entry = Entry::Held(held.token, validity.clone(), held.lock.clone());
        claims.entries.insert(held.claim, entry);
        true
    }

    /// All that is held and not being released.
    pub(crate) fn held(&self) -> Vec<Held> {
        let claims = self.claims();
        let held = claims.entries.iter().filter_map(|(claim, entry)| {
            let Entry::Held(token, _, lock) = entry else {
                return None;
            };
            Some(Held {
                claim: *claim,
                lock: lock.clone(),
                token: *token,
            })
        });
        held.collect()
    }

    /// Whether anything is held.
    pub(crate) fn is_holding(&self) -> bool {
        let claims = self.claims();
        let mut entries = claims.entries.values();
        entries.any(|entry| matches!(entry, Entry::Held(..)))
    }

    /// The server does not have this hold, if it is still one.
    pub(crate) fn end(&self, held: &Held) {
        if let Some(Entry::Held(token, validity, _)) = self.claims().entries.get(&held.claim)
            && *token == held.token
        {
            validity.end();
        }
    }

    /// Nobody is interested in `claim` any more.
    pub(crate) fn forget(&self, claim: Uuid) {
        let entry = self.claims().entries.remove(&claim);
        drop(entry);
    }

    /// The claim of `waiter` stands in the queue of `lock` with this ticket.
    pub(crate) fn join(&self, lock: &Arc<str>, ticket: u64, waiter: &Arc<Waiter>) {
        let mut claims = self.claims();
        let queue = claims.queues.entry(lock.clone()).or_default();
        queue.insert(ticket, waiter.clone());
    }

    /// It no longer does; whoever is the oldest now is told.
    pub(crate) fn leave(&self, lock: &Arc<str>, ticket: u64) {
        let mut claims = self.claims();
        let Some(queue) = claims.queues.get_mut(lock) else {
            return;
        };
        queue.remove(&ticket);
        match queue.values().next() {
            Some(oldest) => oldest.changed.notify_one(),
            None => {
                claims.queues.remove(lock);
            }
        }
    }

    /// Whether no other waiter of this client has an older ticket for `lock`.
    pub(crate) fn is_oldest(&self, lock: &Arc<str>, ticket: u64) -> bool {
        let claims = self.claims();
        let oldest = claims
            .queues
            .get(lock)
            .and_then(|queue| queue.first_key_value());
        oldest.is_none_or(|(oldest, _)| *oldest >= ticket)
    }

    /// Everybody who waits looks again: the connection is another, or gone.
    pub(crate) fn wake_all(&self) {
        let claims = self.claims();
        for entry in claims.entries.values() {
            if let Entry::Asking(waiter) = entry {
                waiter.changed.notify_one();
            }
        }
    }

    /// Takes in a message that came on connection number `connection`. What it does not know it leaves alone, so
    /// that later versions may say more. Returns a grant that nobody here wants.
    pub(crate) fn message<'a>(&self, connection: u64, text: &'a str) -> Option<Orphan<'a>> {
        let mut words = text.splitn(4, ' ');
        let kind = words.next()?;
        let claim = words.next()?.parse().ok()?;
        let number = words.next()?.parse().ok()?;
        let token = Token::new(number);
        let claims = self.claims();
        let entry = claims.entries.get(&claim);
        match (kind, entry) {
            ("grant", Some(Entry::Asking(waiter))) => {
                waiter.news().pushed = Some(Pushed { token, connection });
                waiter.changed.notify_one();
            }
            // It may come twice.
            ("grant", Some(Entry::Held(..))) => {}
            ("grant", None) => {
                let lock = words.next()?;
                return Some(Orphan { claim, lock });
            }
            ("evict", Some(Entry::Held(held, validity, _))) if *held == token => validity.end(),
            ("evict", Some(Entry::Asking(waiter))) => {
                let mut news = waiter.news();
                news.evicted = news.evicted.max(Some(token));
            }
            ("next", Some(Entry::Asking(waiter))) => {
                let ends = (Moment::now(), Duration::from_millis(number));
                waiter.news().holder_ends = Some(ends);
                waiter.changed.notify_one();
            }
            _ => {}
        }
        None
    }

    fn claims(&self) -> MutexGuard<'_, Claims> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiter {
    /// The grant that was pushed, once.
    pub(crate) fn take_pushed(&self) -> Option<Pushed> {
        let mut news = self.news();
        let pushed = news.pushed.take()?;
        (!news.is_evicted(pushed.token)).then_some(pushed)
    }

    pub(crate) fn has_pushed(&self) -> bool {
        self.news().pushed.is_some()
    }

    /// When the holder's lock ends if it is not renewed, if there was word of it since the last call.
    pub(crate) fn take_holder_ends(&self) -> Option<Ends> {
        self.news().holder_ends.take()
    }

    /// Resolves when there may be something to look at.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    fn news(&self) -> MutexGuard<'_, News> {
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl News {
    fn is_evicted(&self, token: Token) -> bool {
        self.evicted >= Some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant(claim: Uuid, token: u64) -> String {
        format!("grant {claim} {token} lock:a b")
    }

    #[test]
    fn a_grant_reaches_its_claim_and_may_come_twice() {
        let inbox = Inbox::default();
        let claim = Uuid::new_v4();
        let waiter = inbox.register(claim);
        assert_eq!(inbox.message(1, &grant(claim, 7)), None);
        assert_eq!(inbox.message(1, &grant(claim, 7)), None);
        assert_eq!(waiter.take_pushed().unwrap().token, Token::new(7));
        assert!(waiter.take_pushed().is_none());
    }

    #[test]
    fn a_grant_that_nobody_wants_is_given_back() {
        let inbox = Inbox::default();
        let claim = Uuid::new_v4();
        let _waiter = inbox.register(claim);
        inbox.forget(claim);
        let lock = "lock:a b";
        assert_eq!(
            inbox.message(1, &grant(claim, 7)),
            Some(Orphan { claim, lock })
        );
    }

    #[test]
    fn an_eviction_counts_for_its_grant_only_and_also_before_the_grant_is_taken() {
        let inbox = Inbox::default();
        let claim = Uuid::new_v4();
        let validity = Validity::new(Moment::now(), Duration::from_secs(60));
        let _waiter = inbox.register(claim);
        inbox.message(1, &format!("evict {claim} 7"));
        let held = |token| Held {
            claim,
            lock: "lock:a".into(),
            token: Token::new(token),
        };
        assert!(!inbox.hold(&held(7), &validity));
        assert!(inbox.hold(&held(8), &validity));
        inbox.message(1, &format!("evict {claim} 7"));
        assert!(!validity.is_ended());
        inbox.message(1, &format!("evict {claim} 8"));
        assert!(validity.is_ended());
    }

    #[test]
    fn messages_that_are_not_understood_do_nothing() {
        let inbox = Inbox::default();
        let claim = Uuid::new_v4();
        let waiter = inbox.register(claim);
        for text in [
            "",
            "grant",
            "grant x 1 k",
            "evict",
            "probe",
            &format!("grant {claim} -1 k"),
        ] {
            assert_eq!(inbox.message(1, text), None);
        }
        assert!(waiter.take_pushed().is_none());
    }
}
