//! Evictions. Nobody can take a file lock away from outside, so the holder is asked:
//!
//! 1. Who evicts creates the mark `evict/<stem>.<grant>`, an empty file whose name says all, so that
//!    it is there as a whole or not at all, and means one grant for ever.
//! 2. While it holds anything, each process looks into `evict/` every [`INTERVAL`]: for all its locks
//!    one look at a folder that is empty as a rule.
//! 3. On a mark for a grant of its own it removes the mark, ends the validity, and frees the lock.
//!    In this order: a mark that is gone tells the one who evicts that it was obeyed.
//! 4. A mark for another grant of a key that this process holds is out of date, and is removed.
//!
//! A thread does it, not a task: it goes on when the runtime of a guard has ended or is kept busy, and
//! the file calls block none. It sleeps while nothing is held, and ends after a while of that.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use uuid::Uuid;

use crate::hold::Held;

/// How often a holder looks for evictions.
pub(crate) const INTERVAL: Duration = Duration::from_millis(50);

/// How long the thread stays when nothing is held.
const LINGER: Duration = Duration::from_secs(5);

/// The marks, and what this process holds in one folder.
#[derive(Debug)]
pub(crate) struct Watch {
    marks: PathBuf,
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    /// By the stem of their files.
    held: HashMap<String, Arc<Held>>,
    running: bool,
    closing: bool,
    look_now: bool,
}

impl Watch {
    pub(crate) fn new(marks: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            marks,
            table: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// From now on, evictions of `held` are obeyed.
    pub(crate) fn add(self: &Arc<Self>, held: Arc<Held>) -> io::Result<()> {
        let mut table = self.table();
        if !table.running {
            let watch = Arc::clone(self);
            thread::Builder::new()
                .name("leasehold-file".into())
                .spawn(move || watch.run())?;
            table.running = true;
        }
        let before = table.held.insert(held.stem.clone(), held);
        let was_empty = before.is_none() && table.held.len() == 1;
        // The last reference to an evicted hold frees its file: not under this lock.
        drop(table);
        drop(before);
        if was_empty {
            self.changed.notify_one();
        }
        Ok(())
    }

    pub(crate) fn remove(&self, held: &Held) {
        let mut table = self.table();
        let found = table.held.get(&held.stem);
        let removed = if found.is_some_and(|found| found.grant == held.grant) {
            table.held.remove(&held.stem)
        } else {
            None
        };
        drop(table);
        drop(removed);
    }

    /// Asks the holder of `grant` to let go.
    pub(crate) fn mark(&self, stem: &str, grant: Uuid) -> io::Result<()> {
        fs::File::create(self.mark_path(stem, grant))?;
        // The holder may be ourselves.
        self.table().look_now = true;
        self.changed.notify_one();
        Ok(())
    }

    /// Takes the mark back; says whether it was still there.
    pub(crate) fn unmark(&self, stem: &str, grant: Uuid) -> io::Result<bool> {
        match fs::remove_file(self.mark_path(stem, grant)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The folder of the marks.
    pub(crate) fn marks(&self) -> &Path {
        &self.marks
    }

    /// Obeys the marks that are there.
    pub(crate) fn obey(&self) {
        let entries = match fs::read_dir(&self.marks) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::debug!(target: "leasehold", folder = %self.marks.display(), %error, "cannot look for evictions");
                return;
            }
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some((stem, grant)) = name.to_str().and_then(parse_mark) else {
                continue;
            };
            let Some(held) = self.table().held.get(stem).map(Arc::clone) else {
                continue;
            };
            if let Err(error) = self.unmark(stem, grant) {
                tracing::debug!(target: "leasehold", mark = %entry.path().display(), %error, "cannot remove a mark");
            }
            if held.grant == grant {
                self.remove(&held);
                held.validity.end();
                held.free();
            }
        }
    }

    /// Lets the thread end as soon as nothing is held.
    pub(crate) fn close(&self) {
        let mut table = self.table();
        table.closing = table.running;
        drop(table);
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut table = self.table();
        loop {
            if table.held.is_empty() {
                let waited = self.changed.wait_timeout_while(table, LINGER, |table| {
                    table.held.is_empty() && !table.closing
                });
                table = waited.unwrap_or_else(PoisonError::into_inner).0;
                if table.held.is_empty() {
                    table.running = false;
                    table.closing = false;
                    return;
                }
                continue;
            }
            let waited = self
                .changed
                .wait_timeout_while(table, INTERVAL, |table| !table.look_now);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
            table.look_now = false;
            drop(table);
            self.obey();
            table = self.table();
        }
    }

    fn mark_path(&self, stem: &str, grant: Uuid) -> PathBuf {
        self.marks.join(format!("{stem}.{}", grant.simple()))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse_mark(name: &str) -> Option<(&str, Uuid)> {
    let (stem, grant) = name.rsplit_once('.')?;
    Some((stem, Uuid::try_parse(grant).ok()?))
}
