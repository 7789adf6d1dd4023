use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use leasehold_core::{Claim, Error, ErrorKind, Hold, Key, Result, Token, Validity};
use uuid::Uuid;

use crate::error::io_error;
use crate::lock_file;
use crate::name::Names;
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

    pub(crate) fn held(&self) -> &Held {
        &self.held
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
        self.held.token
    }

    fn validity(&self) -> &Validity {
        &self.held.validity
    }

    /// Looks for an eviction now rather than at the next check.
    async fn renew(&mut self) -> Result<()> {
        self.watch.obey();
        if self.held.open().is_some() {
            Ok(())
        } else {
            Err(self.held.lost())
        }
    }

    /// There is no await in here: it is done when it is first polled.
    async fn release(&mut self) -> Result<()> {
        if self.let_go() {
            Ok(())
        } else {
            Err(self.held.lost())
        }
    }
}

/// What the hold and the watch share.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) grant: Uuid,
    pub(crate) stem: String,
    pub(crate) validity: Validity,
    key: Key,
    token: Token,
    info: PathBuf,
    /// `None` once the lock is free.
    open: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    file: File,
    record: Record,
}

impl Held {
    /// The lock on `file` is held; `record` is what is to be said of it.
    pub(crate) fn new(claim: &Claim, names: Names, record: Record, file: File) -> Self {
        Self {
            grant: claim.id,
            stem: names.stem,
            validity: Validity::until_ended(),
            key: claim.key.clone(),
            token: Token::new(record.token),
            info: names.info,
            open: Mutex::new(Some(Open { file, record })),
        }
    }

    /// Says who holds the lock.
    pub(crate) fn write_record(&self) -> Result<()> {
        match &*self.open() {
            Some(open) => self.write(&open.record),
            None => Err(self.lost()),
        }
    }

    /// The disk has the number up to which tokens are reserved.
    pub(crate) fn set_reserved(&self, reserved: u64) -> Result<()> {
        match &mut *self.open() {
            Some(open) => {
                open.record.reserved = reserved;
                self.write(&open.record)
            }
            None => Err(self.lost()),
        }
    }

    /// Frees the lock; says whether it was still held.
    pub(crate) fn free(&self) -> bool {
        let Some(Open { file, mut record }) = self.open().take() else {
            return false;
        };
        record.grant = None;
        if let Err(error) = self.write(&record) {
            // It stays, and whoever reads it sees by the lock that it is out of date.
            tracing::debug!(target: "leasehold", key = %self.key, %error, "cannot clear the record");
        }
        // Closing is not enough: a program that another thread is just starting has the file too,
        // until its own code begins to run, and would keep the lock so long.
        if let Err(error) = file.unlock() {
            tracing::debug!(target: "leasehold", key = %self.key, %error, "cannot unlock, closing");
        }
        true
    }

    fn lost(&self) -> Error {
        Error::new(
            ErrorKind::Lost,
            format!("the lock on {:?} was taken away", self.key),
        )
    }

    fn write(&self, record: &Record) -> Result<()> {
        lock_file::open_or_create(&self.info)
            .and_then(|info| record.write(&info))
            .map_err(|error| io_error("write", &self.info, error))
    }

    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.free();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A process between fork and exec has the same opening of the file, as a clone has.
    #[tokio::test]
    async fn a_copy_of_the_open_file_does_not_keep_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let claim = Claim::new(Key::new("a").unwrap(), Duration::from_secs(1)).unwrap();
        let names = Names::new(dir.path(), &claim.key);
        let path = names.lock.clone();
        let file = lock_file::try_lock(&path).await.unwrap().unwrap();
        let copy = file.try_clone().unwrap();
        let record = Record {
            key: "a".into(),
            token: 1,
            reserved: 1,
            grant: None,
        };
        let held = Held::new(&claim, names, record, file);
        assert!(lock_file::try_lock(&path).await.unwrap().is_none());
        assert!(held.free());
        assert!(lock_file::try_lock(&path).await.unwrap().is_some());
        assert!(!held.free(), "once only");
        drop(copy);
    }
}
