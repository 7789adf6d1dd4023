use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use leasehold_core::{Error, ErrorKind, Hold, Result, Token, Validity};
use uuid::Uuid;

use crate::record::Record;
use crate::watch::Watch;

/// A granted lock: the open and locked file.
#[derive(Debug)]
pub(crate) struct FileHold {
    held: Arc<Held>,
    watch: Arc<Watch>,
}

impl FileHold {
    pub(crate) fn new(held: Arc<Held>, watch: Arc<Watch>) -> Self {
        Self { held, watch }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.held.validity.is_ended()
    }

    fn let_go(&self) -> bool {
        self.watch.remove(&self.held);
        self.held.free()
    }
}

impl Drop for FileHold {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[async_trait]
impl Hold for FileHold {
    fn token(&self) -> Token {
        Token::new(self.held.record.token)
    }

    fn validity(&self) -> &Validity {
        &self.held.validity
    }

    /// Looks for an eviction now rather than at the next check.
    async fn renew(&mut self) -> Result<()> {
        self.watch.obey();
        if self.held.is_free() {
            Err(lost(&self.held))
        } else {
            Ok(())
        }
    }

    /// There is no await in here: it is done when it is first polled.
    async fn release(&mut self) -> Result<()> {
        if self.let_go() {
            Ok(())
        } else {
            Err(lost(&self.held))
        }
    }
}

fn lost(held: &Held) -> Error {
    Error::new(
        ErrorKind::Lost,
        format!("the lock on {:?} was taken away", held.record.key),
    )
}

/// What the hold and the watch share.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) grant: Uuid,
    pub(crate) stem: String,
    pub(crate) validity: Validity,
    record: Record,
    info: PathBuf,
    /// `None` once the lock is free.
    file: Mutex<Option<File>>,
}

impl Held {
    pub(crate) fn new(
        grant: Uuid,
        stem: String,
        record: Record,
        info: PathBuf,
        file: File,
    ) -> Self {
        Self {
            grant,
            stem,
            validity: Validity::until_ended(),
            record,
            info,
            file: Mutex::new(Some(file)),
        }
    }

    /// Frees the lock; says whether it was still held.
    pub(crate) fn free(&self) -> bool {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(file) = file else { return false };
        let free = Record {
            grant: None,
            ..self.record.clone()
        };
        // If the record stays, the lock says that it is out of date.
        if let Err(error) = File::options()
            .read(true)
            .write(true)
            .open(&self.info)
            .and_then(|info| free.write(&info))
        {
            tracing::debug!(key = self.record.key, %error, "cannot clear the record of a lock");
        }
        // Closing is not enough: a program that is just being started by another thread has the file
        // too, until its own code begins to run, and would keep the lock so long.
        if let Err(error) = file.unlock() {
            tracing::debug!(key = self.record.key, %error, "cannot unlock, closing the file");
        }
        true
    }

    pub(crate) fn is_free(&self) -> bool {
        let file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.is_none()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.free();
    }
}
