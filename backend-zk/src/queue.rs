use std::time::Duration;

use leasehold_core::{Claim, Error, Moment, Result};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::debug;
use uuid::Uuid;
use zookeeper_client::{Error as Client, EventType};

use crate::error;
use crate::names;
use crate::place::{Ahead, PAUSE, Place, list};
use crate::record;
use crate::session::Answer;
use crate::sessions::Sessions;

/// Waits for the lock that `claim` asks for. None: somebody else held it until the wait was over.
///
/// The recipe of the ZooKeeper documentation ("Recipes", Locks), with Curator's names:
///
/// 1. A claim that does not wait looks first, and only reads when somebody is there.
/// 2. An ephemeral sequential node is created below the key's own (see [`Place::enter`]); its number
///    is the place in the queue. First of all contenders: granted.
/// 3. Not the first: watch the one directly ahead, it alone, so that a release wakes one waiter; and
///    the own node, so that its end is heard: a node that is not in the list is lost, never granted.
/// 4. The one ahead is gone, before it could be watched or after. If it was the only one ahead, or if
///    it left word that it held the lock ([`Place::leave`]), and the own node is there: granted. So a
///    hand-off costs the same however many wait. Else list again, and on from 2: it may have been
///    another waiter, or have died.
/// 5. The session ended while it waited: its place is gone, so it queues again, in a new session and
///    with a new id, lest the old node, which may be listed for a while, is taken for its own.
///
/// Whatever is dropped on the way leaves nothing on the servers: a place its node, a watch itself.
pub(crate) async fn acquire(sessions: &Sessions, claim: &Claim) -> Result<Option<Place>> {
    let wait = Wait {
        started: Moment::now(),
        limit: claim.wait,
    };
    let mut id = claim.id;
    let mut queued = false;
    loop {
        let attempt = attempt(sessions, claim, id, &wait, &mut queued).await;
        match attempt {
            Ok(Outcome::Granted(place)) => return Ok(Some(place)),
            Ok(Outcome::Refused) => return Ok(None),
            Ok(Outcome::SessionOver) if queued || wait.started.elapsed() < claim.request_limit => {
                debug!(target: "leasehold", key = %claim.key, "the session is over: on in a new one");
            }
            Ok(Outcome::SessionOver) => {
                let servers = sessions.options().servers();
                return Err(error::map(servers, &Client::SessionExpired));
            }
            Err(error) if queued && error.is_transient() => {
                debug!(target: "leasehold", key = %claim.key, %error, "queueing again");
                sleep(PAUSE.min(wait.left())).await;
            }
            Err(error) => return Err(error),
        }
        if queued && wait.is_over() {
            return Ok(None);
        }
        id = Uuid::new_v4();
    }
}

enum Outcome {
    Granted(Place),
    Refused,
    SessionOver,
}

async fn attempt(
    sessions: &Sessions,
    claim: &Claim,
    id: Uuid,
    wait: &Wait,
    queued: &mut bool,
) -> Result<Outcome> {
    let limit = claim.request_limit;
    let session = sessions.get(claim.ttl, limit).await?;
    let parent = session.options().parent(&claim.key);
    let fail = |error: Client| error::map(session.options().servers(), &error);

    if claim.wait == Some(Duration::ZERO) {
        match list(&session, &parent, limit).await {
            Ok(children) if names::first(&children).is_some() => return Ok(Outcome::Refused),
            Ok(_) => {}
            Err(error) => return session_over(error, fail),
        }
    }
    let mut place = Place::new(session.clone(), parent, id);
    let mut children = match place.enter(&record::write(claim), limit).await {
        Ok(children) => children,
        Err(error) => return session_over(error, fail),
    };
    loop {
        let (name, alone) = match place.ahead(&children) {
            None if session.is_over() => return Ok(Outcome::SessionOver),
            None => return Err(error::lost()),
            Some(Ahead::Nobody) => return Ok(Outcome::Granted(place)),
            Some(Ahead::Other { name, alone }) => (name, alone),
        };
        if wait.is_over() {
            // Dropping the place leaves the queue.
            return Ok(Outcome::Refused);
        }
        *queued = true;
        place.watch();
        let served = async {
            // Whatever became of the watch, the list says what is to be done.
            if gone(&place, name, limit).await? && place.is_next(name, alone, limit).await? {
                return Ok(None);
            }
            place.list(limit).await.map(Some)
        };
        let answer = tokio::select! {
            biased;
            answer = served => answer,
            () = place.ended() => Err(Client::ClientClosed),
            () = wait.over() => return Ok(Outcome::Refused),
        };
        match answer {
            Ok(None) => {
                place.granted_in_turn();
                return Ok(Outcome::Granted(place));
            }
            Ok(Some(listed)) => children = listed,
            // The place is kept while the session lasts, however long they are silent.
            Err(error) if error::is_unanswered(&error) => sleep(PAUSE).await,
            Err(_) if session.is_over() => return Ok(Outcome::SessionOver),
            Err(_) if place.validity().is_ended() => return Err(error::lost()),
            Err(error) => return Err(fail(error)),
        }
    }
}

fn session_over(error: Client, fail: impl FnOnce(Client) -> Error) -> Result<Outcome> {
    if error::is_session_over(&error) {
        Ok(Outcome::SessionOver)
    } else {
        Err(fail(error))
    }
}

/// Waits until the other contender is gone, or something else has happened to it. False: it may be
/// there.
async fn gone(place: &Place, name: &str, limit: Duration) -> Answer<bool> {
    let session = place.session();
    let path = place.beside(name);
    let asked = session.ask(limit, async |client| {
        let (_, _, watcher) = client.get_and_watch_data(&path).await?;
        Ok(watcher)
    });
    let watcher = match asked.await {
        Ok(watcher) => watcher,
        Err(Client::NoNode) => return Ok(true),
        Err(error) => return Err(error),
    };
    // In a task of the session's runtime: the client's watchers panic where that has ended.
    let runtime = session.runtime();
    let mut watching = Watching(runtime.spawn(async move { watcher.changed().await.event_type }));
    let event = (&mut watching.0).await;
    Ok(matches!(event, Ok(EventType::NodeDeleted)))
}

/// Gives the watch back when it is dropped.
struct Watching(JoinHandle<EventType>);

impl Drop for Watching {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Wait {
    started: Moment,
    limit: Option<Duration>,
}

impl Wait {
    fn left(&self) -> Duration {
        self.limit.map_or(Duration::MAX, |limit| {
            limit.saturating_sub(self.started.elapsed())
        })
    }

    fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    async fn over(&self) {
        if self.limit.is_none() {
            std::future::pending::<()>().await;
        }
        while !self.is_over() {
            // A longer sleep would not see that the machine was suspended.
            sleep(self.left().min(Duration::from_secs(1))).await;
        }
    }
}
