use std::sync::Arc;
use std::time::Duration;

use leasehold_core::{Moment, Token, Validity};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};
use tracing::warn;
use uuid::Uuid;
use zookeeper_client::Error as Client;

use crate::error;
use crate::names;
use crate::record;
use crate::session::{Answer, Session};

/// A node of ours in the queue of a key, from before it is created until it is gone.
///
/// Dropping it deletes the node, whatever became of its creation: at once if the servers answer, else
/// as soon as they do, and at the latest they delete it with its session.
#[derive(Debug)]
pub(crate) struct Place {
    session: Arc<Session>,
    parent: String,
    /// What the name begins with: by this we know it, never by where it stands.
    own: String,
    entered: Option<Entered>,
    validity: Validity,
    told: Arc<Notify>,
    /// Granted by one that held the lock before.
    in_turn: bool,
    /// Nothing is left of it.
    gone: bool,
}

#[derive(Debug)]
struct Entered {
    name: String,
    token: Token,
}

impl Place {
    /// A place for the claim, or the attempt at it, with this id: nothing is sent yet.
    pub(crate) fn new(session: Arc<Session>, parent: String, id: Uuid) -> Self {
        Self {
            validity: session.validity().child(),
            own: names::own(id),
            entered: None,
            told: Arc::default(),
            in_turn: false,
            gone: true,
            session,
            parent,
        }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Ends with the session, or when somebody else deletes the node.
    pub(crate) fn validity(&self) -> &Validity {
        &self.validity
    }

    /// Resolves when the validity has ended; for places that wait, after they were entered.
    pub(crate) async fn ended(&self) {
        while !self.validity.is_ended() {
            self.told.notified().await;
        }
    }

    /// The fencing token: the number of the transaction that created the node. Nodes are created in
    /// the order of the queue, so it rises with each grant.
    pub(crate) fn token(&self) -> Token {
        self.entered
            .as_ref()
            .map_or(Token::new(0), |entered| entered.token)
    }

    /// Creates the node and lists the contenders.
    ///
    /// 1. Create and list go out together, with one more create in front for a parent that was not
    ///    seen lately: one round trip.
    /// 2. The parent and the folders above it are missing: they are made, and 1 again.
    /// 3. No answer to the create: it may have been carried out, or may still be on its way through
    ///    another server. When the session stands on a connection again its leader refuses what
    ///    comes by way of the former one, and `sync` waits for all that the leader had accepted
    ///    before. So after `sync` the list shows the node, or it will never be; then 1 again.
    pub(crate) async fn enter(&mut self, data: &str, limit: Duration) -> Answer<Vec<String>> {
        let started = Moment::now();
        loop {
            let left = limit.saturating_sub(started.elapsed());
            self.gone = false;
            let known = self.session.knows_folder(&self.parent);
            let entering = self.session.enter(&self.parent, &self.own, data, known);
            let Ok(answer) = timeout(left, entering).await else {
                return Err(Client::Timeout);
            };
            match answer {
                Ok((created, listed)) => {
                    self.session.note_folder(&self.parent, true);
                    self.entered(created.name, created.czxid);
                    return match listed {
                        Err(error) if error::is_unanswered(&error) => {
                            let left = limit.saturating_sub(started.elapsed());
                            list(&self.session, &self.parent, left).await
                        }
                        answer => answer,
                    };
                }
                Err(Client::NoNode) => {
                    self.session.note_folder(&self.parent, false);
                    if !known {
                        self.session.make_folder(&self.parent, left).await?;
                    }
                }
                Err(error) if error::is_unanswered(&error) => {
                    sleep(PAUSE.min(left)).await;
                    let left = limit.saturating_sub(started.elapsed());
                    let children = list(&self.session, &self.parent, left).await?;
                    if self.find(&children, left).await? {
                        return Ok(children);
                    }
                }
                Err(error) => {
                    self.gone = true;
                    return Err(error);
                }
            }
        }
    }

    /// The contenders as this client's server knows them. It may be behind with those that are gone,
    /// never with those that were there before us.
    pub(crate) async fn list(&self, limit: Duration) -> Answer<Vec<String>> {
        let parent = self.parent.as_str();
        let listed = self
            .session
            .ask(limit, async |client| client.list_children(parent).await);
        match listed.await {
            Err(Client::NoNode) => Ok(Vec::new()),
            Err(error) if error::is_unanswered(&error) && error != Client::Timeout => {
                // Not at once again.
                sleep(PAUSE.min(limit)).await;
                Err(error)
            }
            answer => answer,
        }
    }

    /// Who stands directly ahead. None: the node is not there any more.
    pub(crate) fn ahead<'a>(&self, children: &'a [String]) -> Option<Ahead<'a>> {
        let name = &self.entered.as_ref()?.name;
        if !children.contains(name) {
            return None;
        }
        Some(match names::ahead(children, name) {
            Some((name, alone)) => Ahead::Other { name, alone },
            None => Ahead::Nobody,
        })
    }

    /// The contender that stood directly ahead is gone: whether it is now our turn. False: it may be,
    /// the list says it.
    pub(crate) async fn is_next(&self, ahead: &str, alone: bool, limit: Duration) -> Answer<bool> {
        let Some(path) = self.path() else {
            return Ok(false);
        };
        let parent = self.parent.as_str();
        let looked = self.session.ask(limit, async |client| {
            let own = client.check_stat(&path);
            if alone {
                return Ok(own.await?.is_some());
            }
            let word = client.get_data(parent);
            let own = own.await?;
            match word.await {
                Ok((word, _)) => Ok(own.is_some() && word == record::released(ahead).as_bytes()),
                Err(Client::NoNode) => Ok(false),
                Err(error) => Err(error),
            }
        });
        looked.await
    }

    /// It was waited for, so that others may wait too.
    pub(crate) fn granted_in_turn(&mut self) {
        self.in_turn = true;
    }

    /// Hears at once when somebody deletes the node.
    pub(crate) fn watch(&self) {
        if let Some(path) = self.path() {
            self.session.watch(&path);
        }
    }

    /// The path of another contender.
    pub(crate) fn beside(&self, name: &str) -> String {
        format!("{}/{name}", self.parent)
    }

    /// Deletes the node. False: it was gone already.
    ///
    /// One that was granted in turn leaves word of it, in the same transaction and as the data of the
    /// key's own node: whoever waits behind it then knows that it held the lock, and that nobody else
    /// is ahead. The first in turn finds its predecessor alone and needs no word.
    pub(crate) async fn leave(&mut self) -> Answer<bool> {
        let (Some(path), Some(entered)) = (self.path(), &self.entered) else {
            return Ok(false);
        };
        // From here on its end is no news.
        self.session.remove(&path);
        let word = self.in_turn.then(|| record::released(&entered.name));
        let answer = self.session.leave(&self.parent, &path, word).await;
        self.gone = match &answer {
            Ok(()) | Err(Client::NoNode) => true,
            Err(error) => error::is_session_over(error),
        };
        match answer {
            Ok(()) => Ok(true),
            Err(Client::NoNode) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the servers have the node.
    pub(crate) async fn is_there(&self) -> Answer<bool> {
        let Some(path) = self.path() else {
            return Ok(false);
        };
        let client = self.session.client()?;
        Ok(client.check_stat(&path).await?.is_some())
    }

    fn path(&self) -> Option<String> {
        Some(self.beside(&self.entered.as_ref()?.name))
    }

    fn entered(&mut self, name: String, czxid: i64) {
        let token = Token::new(u64::try_from(czxid).unwrap_or_default());
        self.entered = Some(Entered { name, token });
        if let Some(path) = self.path() {
            self.session.add(&path, &self.validity, &self.told);
        }
    }

    /// Looks for the node among the contenders.
    async fn find(&mut self, children: &[String], limit: Duration) -> Answer<bool> {
        let Some(name) = children.iter().find(|child| child.starts_with(&self.own)) else {
            return Ok(false);
        };
        let path = self.beside(name);
        let stat = self
            .session
            .ask(limit, async |client| client.check_stat(&path).await)
            .await?;
        // One of another session with our id would not be ours: it goes without our doing.
        let stat = stat.filter(|stat| stat.ephemeral_owner == self.session.id());
        if let Some(stat) = &stat {
            self.entered(name.clone(), stat.czxid);
        }
        Ok(stat.is_some())
    }
}

/// Who stands directly ahead in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead<'a> {
    Nobody,
    /// And whether there is no other ahead of that.
    Other {
        name: &'a str,
        alone: bool,
    },
}

/// The children of `parent`, all that was decided before now included; none, if it is missing. Asked
/// again after a lost connection until `limit` is over.
pub(crate) async fn list(session: &Session, parent: &str, limit: Duration) -> Answer<Vec<String>> {
    let started = Moment::now();
    loop {
        let left = limit.saturating_sub(started.elapsed());
        let listed = timeout(left, session.list(parent)).await;
        match listed.unwrap_or(Err(Client::Timeout)) {
            Err(Client::NoNode) => return Ok(Vec::new()),
            Err(error) if error::is_unanswered(&error) && error != Client::Timeout => {
                sleep(PAUSE.min(left)).await;
            }
            answer => return answer,
        }
    }
}

/// Between requests to servers that answer with errors.
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

impl Drop for Place {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let path = self.path();
        if let Some(path) = &path {
            self.session.remove(path);
        }
        let Ok(client) = self.session.client() else {
            return;
        };
        let left = Left {
            session: self.session.clone(),
            parent: std::mem::take(&mut self.parent),
            own: std::mem::take(&mut self.own),
        };
        // Sent here and not in the task: whatever this client asks for next comes after it.
        match path {
            Some(path) => {
                let deleted = client.delete(&path, None);
                drop(client);
                left.session.runtime().clone().spawn(async move {
                    if !matches!(deleted.await, Ok(()) | Err(Client::NoNode)) {
                        left.clean_up().await;
                    }
                });
            }
            None => {
                drop(client);
                left.session.runtime().clone().spawn(left.clean_up());
            }
        }
    }
}

/// What is left of a place that was dropped.
struct Left {
    session: Arc<Session>,
    parent: String,
    own: String,
}

impl Left {
    /// Until it is seen to be gone, or the session is over and it went with it.
    async fn clean_up(self) {
        let mut pause = PAUSE;
        while !self.session.is_over() {
            match self.try_clean_up().await {
                Ok(()) => return,
                Err(error) if error::is_session_over(&error) => return,
                Err(error) if error::is_unanswered(&error) => {}
                Err(error) => {
                    let node = format!("{}/{}", self.parent, self.own);
                    warn!(target: "leasehold", node, %error, "a node of ours cannot be deleted");
                }
            }
            tokio::select! {
                () = self.session.validity().ended() => return,
                () = sleep(pause) => pause = (pause * 2).min(Duration::from_secs(1)),
            }
        }
    }

    async fn try_clean_up(&self) -> Answer<()> {
        let limit = self.session.timeout();
        for child in list(&self.session, &self.parent, limit).await? {
            if child.starts_with(&self.own) {
                let path = format!("{}/{child}", self.parent);
                let deleted = self
                    .session
                    .ask(limit, async |client| client.delete(&path, None).await)
                    .await;
                if !matches!(deleted, Ok(()) | Err(Client::NoNode)) {
                    return deleted;
                }
            }
        }
        Ok(())
    }
}
