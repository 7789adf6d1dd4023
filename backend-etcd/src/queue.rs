use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, GetResponse, Txn};
use leasehold_core::{Claim, ErrorKind, Moment, Result, Token};
use tokio::time::sleep;

use crate::call::{self, Call, Said};
use crate::cleaner::Cleaning;
use crate::endpoints::Channel;
use crate::error::{self, Cause, Failure};
use crate::hold::EtcdHold;
use crate::link::Link;
use crate::names;
use crate::session::{Session, after};
use crate::together::Reply;

/// The queue for a lock, as in etcd's own Go client (`concurrency.Mutex`): everyone who holds the lock
/// or waits for it has a key in its folder, and whose key was created first has the lock. The revision
/// that created the key is the token: etcd counts all changes with it, and never back.
///
/// 1. *Enter*, one transaction. If the folder is empty: put our key; we have the lock. Else: put our
///    key, and ask for the newest two in the folder, which are ours and the one before it. A claim
///    that does not wait puts nothing then. If the answer is lost, the transaction is repeated with
///    the same key, asks for our key instead, and goes on with step 3: a key keeps the revision that
///    created it.
/// 2. *Wait* until the key before ours or our own is deleted, by a [watch](crate::watch) from the
///    revision of the answer on.
/// 3. *Look*, one transaction: if our key still has the revision that created it, get the newest key
///    that is older. None: we have the lock. One: wait for that one (ours was not the next after the
///    one that left). Our own key gone: lost, its lease was revoked or somebody deleted it.
/// 4. *Leave*: delete our key. Each claim has a key of its own, whose name is used again only when no
///    request with it is on the way any more, so that a deletion that arrives late can hit no other grant
///    ([`Places`](crate::places::Places)).
///
/// What is dropped on the way leaves too, in the background: a transaction under way is heard to its
/// end first, for a deletion that overtook it would leave the key behind.
///
/// A waiter whose lease runs out because nothing gets through enters again under another one, as soon
/// as that is possible. One whose lease was revoked fails.
///
/// Entering and leaving travel [together](crate::together) with those of other locks.
pub(crate) async fn acquire(
    link: &Arc<Link>,
    prefix: &str,
    claim: &Claim,
) -> Result<Option<EtcdHold>> {
    let started = Moment::now();
    let left = || match claim.wait {
        Some(wait) => wait.saturating_sub(started.elapsed()),
        None => Duration::MAX,
    };
    let folder = names::folder(prefix, &claim.key);
    let (mut place, mut standing) = enter(link, &folder, claim).await?;
    let mut queued = false;
    loop {
        match standing {
            Standing::Granted(token) => {
                if claim.fixed {
                    // Whoever did not wait has a lease that was granted just now.
                    place.session.keep_alive_last(queued).await;
                }
                return Ok(Some(EtcdHold::new(place, token)));
            }
            Standing::Busy => {
                place.done();
                return Ok(None);
            }
            Standing::Behind(ahead) => {
                queued = true;
                let turn = tokio::select! {
                    biased;
                    turn = place.turn(ahead) => turn,
                    () = place.session.validity.ended() => Err(error::lost(&place.key)),
                    () = after(left()) => return Ok(None),
                };
                let silently = place.session.ended_silently();
                standing = match turn {
                    Err(error) if error.kind() == ErrorKind::Lost && silently => {
                        let again = tokio::select! {
                            biased;
                            again = enter_again(link, &folder, claim) => again,
                            () = after(left()) => return Ok(None),
                        };
                        let standing;
                        (place, standing) = again?;
                        standing
                    }
                    turn => turn?,
                };
            }
        }
    }
}

/// Step 1, in a session that is alive.
async fn enter(link: &Arc<Link>, folder: &str, claim: &Claim) -> Result<(Place, Standing)> {
    let mut tries = 0;
    loop {
        tries += 1;
        let session = link.session(claim).await?;
        let mut place = Place::new(session.clone(), folder, claim);
        match place.enter(claim).await {
            Ok(standing) => return Ok((place, standing)),
            Err(failure) if failure.error.kind() == ErrorKind::Lost && tries < MOST_TRIES => {
                if failure.cause == Cause::Refused {
                    // The server says that there is no such lease: the holds under it are lost.
                    session.taken_away();
                }
                session.retire();
            }
            Err(failure) => return Err(failure.error),
        }
    }
}

/// The same for one who was queued before: until it is answered.
async fn enter_again(link: &Arc<Link>, folder: &str, claim: &Claim) -> Result<(Place, Standing)> {
    loop {
        match enter(link, folder, claim).await {
            Err(error) if error.is_transient() => pause(claim.ttl).await,
            outcome => return outcome,
        }
    }
}

/// Between two attempts at a store that is out of reach.
async fn pause(ttl: Duration) {
    const LONGEST: Duration = Duration::from_secs(1);
    sleep((ttl / 20).min(LONGEST)).await;
}

/// A lease may end just before a claim comes, but not again and again.
const MOST_TRIES: usize = 3;

/// Where a claim stands in the queue.
#[derive(Debug)]
enum Standing {
    /// It has the lock.
    Granted(Token),
    Behind(Ahead),
    /// Somebody else holds the lock, and the claim does not wait.
    Busy,
}

/// The key just before ours.
#[derive(Debug)]
struct Ahead {
    key: Vec<u8>,
    /// When it was seen there.
    revision: i64,
    /// When ours was created.
    ours: i64,
}

/// A claim's key in the folder of its lock, from before it is put until it is known to be gone.
/// Dropping it leaves the queue.
pub(crate) struct Place {
    pub(crate) session: Arc<Session>,
    pub(crate) key: String,
    folder: String,
    waits: bool,
    request_limit: Duration,
    /// The request that puts the key. Nobody locks it; the mutex only makes it `Sync`.
    entering: Mutex<Option<Entering>>,
    /// Every request that put or deleted the key was answered.
    certain: bool,
    done: bool,
}

type Entering = Pin<Box<dyn Future<Output = Reply> + Send>>;

/// What came of entering.
#[derive(Debug)]
enum Entered {
    /// First, or behind somebody.
    At(Standing),
    /// Repeated: created by this revision, but who is before it is not known.
    Somewhere(i64),
}

impl Place {
    fn new(session: Arc<Session>, folder: &str, claim: &Claim) -> Self {
        Self {
            key: session.take(folder),
            folder: folder.to_owned(),
            session,
            waits: claim.wait != Some(Duration::ZERO),
            request_limit: claim.request_limit,
            entering: Mutex::new(None),
            certain: true,
            done: false,
        }
    }

    /// The key is known to be gone.
    pub(crate) fn done(&mut self) {
        self.done = true;
        self.session.give_back(&self.key, self.certain);
    }

    /// Whether our key is still the one of the grant with this token.
    pub(crate) async fn is_there(&self, token: Token) -> Result<bool> {
        let request = |channel: Arc<Channel>, _| {
            let options = GetOptions::new().with_keys_only();
            let key = self.key.clone();
            async move { channel.kv.clone().get(key, Some(options)).await }
        };
        let endpoints = &self.session.link.endpoints;
        let answer = endpoints.request(self.request_limit, request).await?;
        Ok(answer
            .kvs()
            .first()
            .is_some_and(|kv| token_of(kv.create_revision()) == token))
    }

    /// Step 4. False: the key was not there.
    pub(crate) async fn leave(&mut self) -> Result<bool> {
        if self.done {
            // The name may be another claim's by now.
            return Ok(false);
        }
        let call = Call::leave(&self.folder, &self.key, self.request_limit);
        let certain = std::mem::replace(&mut self.certain, false);
        let reply = self.session.link.together.send(call).await;
        self.certain = certain && reply.certain;
        let there = match reply.said? {
            // An attempt whose answer was lost may have done it.
            Said::Left(deleted) => deleted > 0 || reply.unanswered,
            Said::Entered { .. } => {
                return Err(error::unexpected("a claim in place of a deletion"));
            }
        };
        self.done();
        Ok(there && !self.session.validity.is_ended())
    }

    fn entering(&mut self) -> &mut Option<Entering> {
        self.entering
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Step 1.
    async fn enter(&mut self, claim: &Claim) -> Result<Standing, Failure> {
        let together = self.session.link.together.clone();
        let call = Call::enter(&self.folder, &self.key, self.session.lease, claim);
        *self.entering() = Some(Box::pin(async move { together.send(call).await }));
        let reply = poll_fn(|cx| match self.entering() {
            Some(entering) => entering.as_mut().poll(cx),
            None => Poll::Pending,
        })
        .await;
        *self.entering() = None;
        self.certain = reply.certain;
        if reply.unanswered {
            self.session.retire();
        }
        match entered(&self.key, reply, self.waits)? {
            Entered::At(standing) => Ok(standing),
            Entered::Somewhere(ours) => self.look(ours).await,
        }
    }

    /// Steps 2 and 3, until a look is answered; a store that does not answer is asked again.
    async fn turn(&self, ahead: Ahead) -> Result<Standing> {
        let beat = self.session.ttl / 3;
        let keys = [ahead.key, self.key.clone().into_bytes()];
        let mut watching = self
            .session
            .link
            .watches
            .watch(keys, ahead.revision + 1, beat);
        watching.woken().await?;
        drop(watching);
        loop {
            match self.look(ahead.ours).await {
                Ok(standing) => return Ok(standing),
                Err(failure) if failure.error.is_transient() => {
                    pause(self.session.ttl).await;
                }
                Err(failure) => return Err(failure.error),
            }
        }
    }

    /// Step 3.
    async fn look(&self, ours: i64) -> Result<Standing, Failure> {
        let request = |channel: Arc<Channel>, _| {
            let still_ours = Compare::create_revision(&*self.key, CompareOp::Equal, ours);
            let older = call::newest(&self.folder, 1, Some(ours - 1));
            let txn = Txn::new().when([still_ours]).and_then([older]);
            async move { channel.kv.clone().txn(txn).await }
        };
        let endpoints = &self.session.link.endpoints;
        let answer = endpoints.request(self.request_limit, request).await?;
        if !answer.succeeded() {
            return Err(Failure::unanswered(error::lost(&self.key)));
        }
        let revision = call::revision(&answer);
        match call::got(&answer).and_then(|older| ahead(&older, revision, ours)) {
            Some(ahead) => Ok(Standing::Behind(ahead)),
            None => Ok(Standing::Granted(token_of(ours))),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut cleaning = Cleaning {
            session: self.session.clone(),
            key: self.key.clone(),
            certain: self.certain,
        };
        let Some(entering) = self.entering().take() else {
            self.session.link.clean(cleaning);
            return;
        };
        let (link, waits) = (self.session.link.clone(), self.waits);
        self.session.link.spawn(Box::pin(async move {
            let reply = entering.await;
            cleaning.certain = reply.certain;
            if reply.unanswered {
                cleaning.session.retire();
            }
            match entered(&cleaning.key, reply, waits) {
                Ok(Entered::At(Standing::Busy)) => {
                    cleaning.session.give_back(&cleaning.key, cleaning.certain);
                }
                _ => link.clean(cleaning),
            }
        }));
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

/// Reads the answer of step 1.
fn entered(key: &str, reply: Reply, waits: bool) -> Result<Entered, Failure> {
    let again = reply.unanswered;
    let Said::Entered {
        revision,
        put,
        newest,
    } = reply.said?
    else {
        return Err(unexpected("a deletion in place of a claim"));
    };
    if put {
        return Ok(Entered::At(Standing::Granted(token_of(revision))));
    }
    if !waits && !again {
        return Ok(Entered::At(Standing::Busy));
    }
    let newest = newest.ok_or_else(|| unexpected("a transaction without its keys"))?;
    let ours = newest.kvs().iter().find(|kv| kv.key() == key.as_bytes());
    match ours.map(etcd_client::KeyValue::create_revision) {
        Some(ours) if again => Ok(Entered::Somewhere(ours)),
        Some(ours) => match ahead(&newest, revision, ours) {
            Some(ahead) => Ok(Entered::At(Standing::Behind(ahead))),
            None => Ok(Entered::At(Standing::Granted(token_of(ours)))),
        },
        None if waits => Err(unexpected("a transaction that did not put its key")),
        None => Ok(Entered::At(Standing::Busy)),
    }
}

fn unexpected(what: &str) -> Failure {
    Failure::unanswered(error::unexpected(what))
}

fn ahead(newest: &GetResponse, revision: i64, ours: i64) -> Option<Ahead> {
    let mut keys = newest.kvs().iter();
    let before = keys.find(|kv| kv.create_revision() < ours)?;
    Some(Ahead {
        key: before.key().to_vec(),
        revision,
        ours,
    })
}

fn token_of(revision: i64) -> Token {
    Token::new(revision.unsigned_abs())
}
