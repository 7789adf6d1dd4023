use std::sync::{Arc, Weak};

use leasehold_core::{Batch, Gather, Way, poll_once};
use zookeeper_client::{Client, Error, MultiWriteResult};

use crate::error;
use crate::names;
use crate::options::ZooKeeperOptions;
use crate::session::{Answer, Session, own_node};

/// A call on the queue of one key. Those of a session that meet travel together:
///
/// 1. *Alone.* Create and list go out together, with one more create in front where the key's own node
///    may be missing; or a delete; or `sync` and list.
/// 2. *Together.* One transaction has all that the calls write, and the lists follow it at once, each
///    a request of its own: a session's requests keep their order, so they show what it did. (Servers
///    older than 3.6 cannot list many in one, and newer ones limit it.) Missing nodes of keys are
///    created in front of it, each by itself, since one that is there would fail it.
/// 3. *The token.* Servers do not say by which transaction a node was created among others. But they
///    do for a node that was written to, so the session's own is: it has the same number. Two claims
///    on one key would get one token; no two calls on one key share a transaction.
/// 4. *One fails, so do all*, and nothing is done. Then each is sent again alone, by whoever waits for
///    it, and a bad one has its error to itself. What nobody waits for any more is not sent.
/// 5. *No answer:* what became of its call each finds out for itself, as if it had been alone.
/// 6. *Dropped on the way:* it may leave all the same, and then there is a node. Whoever dropped it
///    lists by a call on the same key, which cannot overtake it, and deletes what is there.
#[derive(Debug)]
pub(crate) struct Call {
    /// The key's own node.
    parent: String,
    what: What,
}

#[derive(Debug)]
enum What {
    Enter {
        own: String,
        data: String,
        folder_is_known: bool,
    },
    Leave {
        path: String,
        word: Option<String>,
    },
    List,
}

/// What came of a call: what it wanted, else nothing.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    entered: Option<Created>,
    children: Option<Answer<Vec<String>>>,
}

/// A node that was created, and the number of the transaction that did it.
#[derive(Debug, Clone)]
pub(crate) struct Created {
    pub(crate) name: String,
    pub(crate) czxid: i64,
}

/// The calls of a session. No reply: nothing was done, since another one failed.
pub(crate) type Calls = Gather<Arc<Call>, Answer<Option<Reply>>>;

/// How many requests are under way before calls collect: while the servers work on one, the next is on
/// its way.
const REQUESTS: usize = 2;
/// How many calls travel as one, and how long each may be, so that they fit into what a server takes
/// (`jute.maxbuffer`, 1 MiB by default).
const TOGETHER_AT_MOST: usize = 128;
const LONGEST_TOGETHER: usize = 4096;

/// The ways to call. Each is on its way after the first poll.
impl Session {
    /// Creates a node below `parent` whose name begins with `own`, and lists them.
    pub(crate) async fn enter(
        &self,
        parent: &str,
        own: &str,
        data: &str,
        folder_is_known: bool,
    ) -> Answer<(Created, Answer<Vec<String>>)> {
        let what = What::Enter {
            own: own.to_owned(),
            data: data.to_owned(),
            folder_is_known,
        };
        let reply = self.call(parent, what).await?;
        let (Some(entered), Some(children)) = (reply.entered, reply.children) else {
            return Err(incomplete());
        };
        Ok((entered, children))
    }

    /// Deletes the node `path` below `parent` and leaves word of it, if we may, as the data of
    /// `parent`.
    pub(crate) async fn leave(&self, parent: &str, path: &str, word: Option<String>) -> Answer<()> {
        let path = path.to_owned();
        let left = self.call(parent, What::Leave { path, word }).await;
        left.map(drop)
    }

    /// Lists the nodes below `parent`, all that was decided before now included.
    pub(crate) async fn list(&self, parent: &str) -> Answer<Vec<String>> {
        let reply = self.call(parent, What::List).await?;
        reply.children.unwrap_or_else(|| Err(incomplete()))
    }

    async fn call(&self, parent: &str, what: What) -> Answer<Reply> {
        let client = self.client()?;
        let call = Arc::new(Call {
            parent: parent.to_owned(),
            what,
        });
        if call.length() <= LONGEST_TOGETHER {
            match self.calls().enter(|| call.clone()) {
                Way::Alone(_pass) => return call.alone(&client, self.options()).await,
                Way::Together(answer) => match answer.await {
                    Some(Ok(Some(reply))) => return Ok(reply),
                    Some(Ok(None)) => {}
                    Some(Err(error)) => return Err(error),
                    None => return Err(Error::ConnectionLoss),
                },
            }
        }
        call.alone(&client, self.options()).await
    }
}

impl Call {
    pub(crate) fn gather(session: Weak<Session>) -> Calls {
        Gather::by_key(
            REQUESTS,
            TOGETHER_AT_MOST,
            |call: &Arc<Self>| call.parent.as_str(),
            move |batch| {
                if let Some(session) = session.upgrade() {
                    hand_on(&session, batch);
                }
            },
        )
    }

    /// What it adds to a request, about.
    fn length(&self) -> usize {
        let own = match &self.what {
            What::Enter { own, data, .. } => own.len() + data.len(),
            What::Leave { path, word } => path.len() + word.as_ref().map_or(0, String::len),
            What::List => 0,
        };
        self.parent.len() + own
    }

    fn writes(&self) -> bool {
        !matches!(self.what, What::List)
    }

    fn lists(&self) -> bool {
        !matches!(self.what, What::Leave { .. })
    }

    /// Creates the key's own node, if it may be missing. The answer does not matter: either there is
    /// one then, or there is none.
    fn make_folder(&self, client: &Client, options: &ZooKeeperOptions) {
        if let What::Enter {
            folder_is_known: false,
            ..
        } = self.what
        {
            drop(client.create(&self.parent, b"", &options.folder()));
        }
    }

    /// Sends it at the first poll.
    async fn alone(&self, client: &Client, options: &ZooKeeperOptions) -> Answer<Reply> {
        match &self.what {
            What::Enter { own, data, .. } => {
                self.make_folder(client, options);
                let path = format!("{}/{own}", self.parent);
                let created = client.create(&path, data.as_bytes(), &options.place());
                let listed = client.list_children(&self.parent);
                let (stat, sequence) = created.await?;
                Ok(Reply {
                    entered: Some(Created {
                        name: names::numbered(own, sequence.into_i64()),
                        czxid: stat.czxid,
                    }),
                    children: Some(listed.await),
                })
            }
            What::Leave { path, word } => {
                let mut answer = Err(Error::NoAuth);
                if let Some(word) = word {
                    let mut both = client.new_multi_writer();
                    both.add_delete(path, None)?;
                    both.add_set_data(&self.parent, word.as_bytes(), None)?;
                    answer = both.commit().await.map(drop).map_err(Error::from);
                }
                // Somebody else made the key's node and lets us write no word there.
                if matches!(answer, Err(Error::NoAuth)) {
                    answer = client.delete(path, None).await;
                }
                answer.map(|()| Reply::default())
            }
            What::List => {
                let synced = client.sync(&self.parent);
                let listed = client.list_children(&self.parent);
                synced.await?;
                Ok(Reply {
                    entered: None,
                    children: Some(listed.await),
                })
            }
        }
    }
}

/// Sends what has collected: it is on its way when this returns, a task sees to the answers.
fn hand_on(session: &Session, batch: Batch<Arc<Call>, Answer<Option<Reply>>>) {
    let client = match session.client() {
        Ok(client) => client,
        Err(error) => return batch.replies.answer_all(Err(error)),
    };
    let runtime = session.runtime();
    let mut carried = Box::pin(carry(client, session.shared_options(), batch));
    if poll_once(runtime, carried.as_mut()).is_pending() {
        drop(runtime.spawn(carried));
    }
}

async fn carry(
    client: Arc<Client>,
    options: Arc<ZooKeeperOptions>,
    batch: Batch<Arc<Call>, Answer<Option<Reply>>>,
) {
    let Batch { calls, replies } = batch;
    if let [call] = &calls[..] {
        let answer = call.alone(&client, &options).await;
        return replies.answer([answer.map(Some)]);
    }
    match together(&client, &options, &calls).await {
        Ok(done) => replies.answer(done.into_iter().map(|reply| Ok(Some(reply)))),
        Err(error) if error::is_unanswered(&error) || error::is_session_over(&error) => {
            replies.answer_all(Err(error));
        }
        Err(_) => replies.answer_all(Ok(None)),
    }
}

/// Sends them at the first poll.
async fn together(
    client: &Client,
    options: &ZooKeeperOptions,
    calls: &[Arc<Call>],
) -> Answer<Vec<Reply>> {
    let mut writer = client.new_multi_writer();
    if calls.iter().any(|call| call.writes()) {
        writer.add_set_data(&own_node(client, options), b"", None)?;
    }
    for call in calls {
        call.make_folder(client, options);
        match &call.what {
            What::Enter { own, data, .. } => {
                let path = format!("{}/{own}", call.parent);
                writer.add_create(&path, data.as_bytes(), &options.place())?;
            }
            What::Leave { path, word } => {
                writer.add_delete(path, None)?;
                if let Some(word) = word {
                    writer.add_set_data(&call.parent, word.as_bytes(), None)?;
                }
            }
            What::List => {}
        }
    }
    let written = writer.commit();
    // Which node is named does not matter to it.
    let only_lists = calls.iter().find(|call| !call.writes());
    let synced = only_lists.map(|call| client.sync(&call.parent));
    let lists: Vec<_> = calls
        .iter()
        .map(|call| call.lists().then(|| client.list_children(&call.parent)))
        .collect();

    // From here on it is done, and an error of one is an error of that one.
    let mut results = written.await?.into_iter();
    let synced = match synced {
        Some(synced) => synced.await.map(drop),
        None => Ok(()),
    };
    let number = match results.next() {
        Some(MultiWriteResult::SetData { stat }) => stat.mzxid,
        _ if calls.iter().any(|call| call.writes()) => return Err(incomplete()),
        _ => 0,
    };
    let mut replies = Vec::with_capacity(calls.len());
    for (call, list) in calls.iter().zip(lists) {
        let entered = match &call.what {
            What::Enter { .. } => match results.next() {
                Some(MultiWriteResult::Create { path, .. }) => Some(Created {
                    name: path[path.rfind('/').map_or(0, |slash| slash + 1)..].to_owned(),
                    czxid: number,
                }),
                _ => return Err(incomplete()),
            },
            What::Leave { word, .. } => {
                results.nth(usize::from(word.is_some()));
                None
            }
            What::List => None,
        };
        let children = match (list, &synced) {
            (Some(_), Err(error)) if !call.writes() => Some(Err(error.clone())),
            (Some(list), _) => Some(list.await),
            (None, _) => None,
        };
        replies.push(Reply { entered, children });
    }
    Ok(replies)
}

/// Counts as no answer.
fn incomplete() -> Error {
    Error::UnexpectedError("the servers have not answered for each operation".into())
}
