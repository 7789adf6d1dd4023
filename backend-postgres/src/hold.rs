use std::sync::Arc;

use async_trait::async_trait;
use leasehold_core::{Error, ErrorKind, Hold, Result, Token, Validity};
use tokio::sync::oneshot;

use crate::key_form::LockId;
use crate::session::{Job, Session};

/// A lock that a session of ours has.
///
/// The token names the grant: whatever is asked of the session for another grant of the key is
/// refused there. Dropped, the session frees the lock by itself.
#[derive(Debug)]
pub(crate) struct PostgresHold {
    session: Arc<Session>,
    key: LockId,
    token: Token,
    validity: Validity,
    release: Release,
}

#[derive(Debug)]
enum Release {
    NotBegun,
    /// The session was told; its answer, unless somebody has it already.
    Begun(Option<oneshot::Receiver<Result<()>>>),
}

impl PostgresHold {
    pub(crate) fn new(session: Arc<Session>, key: LockId, token: Token) -> Self {
        let validity = session.validity().child();
        Self {
            session,
            key,
            token,
            validity,
            release: Release::NotBegun,
        }
    }

    fn unlock(&self, answer: Option<oneshot::Sender<Result<()>>>) -> Result<()> {
        self.session.leaving(self.key);
        self.job(|key, token| Job::Unlock { key, token, answer })
    }

    fn job(&self, make: impl FnOnce(LockId, Token) -> Job) -> Result<()> {
        // Not accepted: the session has ended, and the lock with it.
        self.session
            .send(make(self.key, self.token))
            .map_err(|_job| gone())
    }
}

#[async_trait]
impl Hold for PostgresHold {
    fn token(&self) -> Token {
        self.token
    }

    fn validity(&self) -> &Validity {
        &self.validity
    }

    async fn renew(&mut self) -> Result<()> {
        let (sender, answer) = oneshot::channel();
        self.job(|key, token| Job::Check {
            key,
            token,
            answer: sender,
        })?;
        answer.await.unwrap_or_else(|_ended| Err(gone()))
    }

    async fn release(&mut self) -> Result<()> {
        // A second call goes on waiting for the answer to the first.
        let answer = match &mut self.release {
            Release::Begun(Some(answer)) => answer,
            Release::Begun(None) => return Err(gone()),
            Release::NotBegun => {
                let (sender, answer) = oneshot::channel();
                self.unlock(Some(sender))?;
                self.release = Release::Begun(Some(answer));
                let Release::Begun(Some(answer)) = &mut self.release else {
                    return Err(gone());
                };
                answer
            }
        };
        let answer = answer.await.unwrap_or_else(|_ended| Err(gone()));
        self.release = Release::Begun(None);
        answer
    }
}

impl Drop for PostgresHold {
    fn drop(&mut self) {
        if matches!(self.release, Release::NotBegun) {
            // Not accepted: the session has ended, and the lock with it.
            let _ended = self.unlock(None);
        }
    }
}

pub(crate) fn gone() -> Error {
    Error::new(
        ErrorKind::Lost,
        "the session that held the lock has ended, or does not have this grant",
    )
}
