//! The `.lock` file: whoever has locked it holds the key. It is never deleted, since somebody may
//! just be opening it and would then lock a file that nobody else can find.
//!
//! Its content is the durable half of the token counter: a number that no token of this key has gone
//! beyond. Tokens are taken from it in blocks, so that only one grant in a hundred waits for the
//! disk:
//!
//! 1. The `.info` file has the token of the last grant, written without waiting for the disk, and the
//!    number up to which tokens are reserved on it. As long as the machine runs, everybody reads
//!    there what was last written.
//! 2. A grant takes the next token. If that is reserved, it is given out at once.
//! 3. Else the number here is raised by [`BLOCK`]; only when the disk has it is it written to the
//!    `.info` file as reserved, and the lock given out. If that is cut short anywhere, what was
//!    reserved before still holds.
//! 4. After a power failure the `.info` file may have fallen back. So a process that has not granted
//!    this key before, and cannot know whether it comes after one, goes by the number here alone,
//!    and reserves anew. One that has granted it before has been alive since: what it reads is what
//!    was written last.
//!
//! The number stands in two places, a disk block apart, that are written in turn, each with a
//! checksum: if the power fails while one is written the other still counts.

use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

use leasehold_core::{Error, ErrorKind, Result};

use crate::error::io_error;
use crate::record::checksum;

/// So many tokens are set aside by one write that waits for the disk.
pub(crate) const BLOCK: u64 = 100;

const PROGRAM: &str = "leasehold-file ";
const VERSION: &str = "leasehold-file 1 ";

/// Where the two copies of the number stand, and how long one is.
const SLOTS: [u64; 2] = [0, 4096];
const SLOT_LEN: usize = 64;

/// Opens and locks the file at `path`. `None`: somebody holds it.
///
/// Those who only look whether it is held lock it for a moment too, shared; they do not count. To
/// tell them from a holder, whoever is refused tries to share: that works only if nobody holds it.
pub(crate) async fn try_lock(path: &Path) -> Result<Option<File>> {
    for attempt in 0..40 {
        match lock_once(path).map_err(|error| io_error("lock", path, error))? {
            Once::Locked(file) => return Ok(Some(file)),
            Once::Held => return Ok(None),
            // It takes them a microsecond, unless the scheduler has stopped them there.
            Once::Again if attempt < 20 => tokio::task::yield_now().await,
            Once::Again => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
    Ok(None)
}

enum Once {
    Locked(File),
    Held,
    /// Somebody only looked, or the file was replaced.
    Again,
}

fn lock_once(path: &Path) -> io::Result<Once> {
    let file = open_or_create(path)?;
    match file.try_lock() {
        // Somebody may have deleted or replaced the file since it was opened.
        Ok(()) if is_at(&file, path)? => Ok(Once::Locked(file)),
        Ok(()) => Ok(Once::Again),
        Err(TryLockError::Error(error)) => Err(error),
        Err(TryLockError::WouldBlock) => match file.try_lock_shared() {
            Ok(()) => {
                file.unlock()?;
                Ok(Once::Again)
            }
            Err(TryLockError::WouldBlock) => Ok(Once::Held),
            Err(TryLockError::Error(error)) => Err(error),
        },
    }
}

/// Whether somebody holds the file at `path`.
pub(crate) fn is_locked(path: &Path) -> io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        Ok(()) => {
            file.unlock()?;
            Ok(false)
        }
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Opens a file of the folder for reading and writing; a new one gets the rights of the folder.
pub(crate) fn open_or_create(path: &Path) -> io::Result<File> {
    loop {
        // Without O_CREAT first: Linux refuses that for somebody else's file in a folder like /tmp.
        match OpenOptions::new().read(true).write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => return opened,
        }
        match create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => return created,
        }
    }
}

#[cfg(unix)]
fn create(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
    let folder = path.parent().unwrap_or(path).metadata()?;
    let mode = folder.permissions().mode() & 0o666;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)?;
    let mut permissions = file.metadata()?.permissions();
    if permissions.mode() & 0o777 != mode {
        // The umask took away what a shared folder gives.
        permissions.set_mode(mode);
        file.set_permissions(permissions)?;
    }
    Ok(file)
}

#[cfg(not(unix))]
fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
}

/// Whether `path` still leads to `file`.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let id = |metadata: Metadata| (metadata.dev(), metadata.ino());
    match path.metadata() {
        Ok(found) => Ok(id(found) == id(file.metadata()?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> io::Result<bool> {
    path.try_exists()
}

/// The number that no token has gone beyond, as the holder of the lock reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) number: u64,
    /// Where the next one goes.
    next: usize,
    /// Nothing was ever written here.
    is_new: bool,
}

impl Reserved {
    pub(crate) fn read(file: &File, path: &Path) -> Result<Self> {
        let slots = [read_slot(file, SLOTS[0]), read_slot(file, SLOTS[1])];
        let [first, second] = slots.map(|slot| slot.map(|bytes| Slot::decode(&bytes)));
        let first = first.map_err(|error| io_error("read", path, error))?;
        let second = second.map_err(|error| io_error("read", path, error))?;
        let (number, next) = match (first, second) {
            (Slot::OtherVersion, _) | (_, Slot::OtherVersion) => return Err(other_version(path)),
            (Slot::Number(first), Slot::Number(second)) if first < second => (second, 0),
            (Slot::Number(first), _) => (first, 1),
            (_, Slot::Number(second)) => (second, 0),
            // The very first write was cut short: no lock was given out upon it.
            (Slot::Empty | Slot::Damaged, Slot::Empty) => (0, 0),
            (Slot::Foreign, _) => return Err(foreign(path)),
            (_, Slot::Damaged | Slot::Foreign) => return Err(damaged(path)),
        };
        Ok(Self {
            number,
            next,
            is_new: number == 0,
        })
    }

    /// Raises the number so that at least `token` is below it.
    pub(crate) fn raise(self, file: &File, path: &Path, token: u64) -> Result<Raised> {
        let number = self.number.max(token).saturating_add(BLOCK);
        write_slot(file, SLOTS[self.next], number)
            .and_then(|()| file.try_clone())
            .map(|file| Raised {
                number,
                file,
                is_new: self.is_new,
            })
            .map_err(|error| io_error("write", path, error))
    }
}

/// A new number that the disk does not have yet.
#[derive(Debug)]
pub(crate) struct Raised {
    number: u64,
    file: File,
    is_new: bool,
}

impl Raised {
    /// Waits for the disk, a blocking call, often of milliseconds. Returns the number.
    pub(crate) fn sync(self, path: &Path) -> Result<u64> {
        self.file
            .sync_data()
            .and_then(|()| match path.parent() {
                Some(folder) if self.is_new => sync_folder(folder),
                _ => Ok(()),
            })
            .map(|()| self.number)
            .map_err(|error| io_error("store to disk", path, error))
    }
}

/// Stores the names of new files: without it, a file may be gone after a power failure.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(folder)?.sync_all()
    } else {
        // Windows does not open folders for this; its file system writes a journal of names.
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Slot {
    Empty,
    Number(u64),
    Damaged,
    OtherVersion,
    Foreign,
}

impl Slot {
    fn decode(bytes: &[u8]) -> Self {
        if bytes.iter().all(|byte| *byte == 0) {
            return Self::Empty;
        }
        let text = String::from_utf8_lossy(bytes);
        if !text.starts_with(PROGRAM) {
            return Self::Foreign;
        }
        let Some(rest) = text.strip_prefix(VERSION) else {
            return Self::OtherVersion;
        };
        match rest.trim_end().split_once(' ') {
            Some((number, sum)) if checksum(number.as_bytes()) == sum => {
                number.parse().map_or(Self::Damaged, Self::Number)
            }
            _ => Self::Damaged,
        }
    }
}

fn read_slot(mut file: &File, at: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(at))?;
    let mut bytes = Vec::with_capacity(SLOT_LEN);
    file.take(SLOT_LEN as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn write_slot(mut file: &File, at: u64, number: u64) -> io::Result<()> {
    let number = format!("{number:020}");
    let text = format!("{VERSION}{number} {}", checksum(number.as_bytes()));
    let line = format!("{text:<width$}\n", width = SLOT_LEN - 1);
    file.seek(SeekFrom::Start(at))?;
    file.write_all(line.as_bytes())
}

fn foreign(path: &Path) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!(
            "{} belongs to another program: give the locks a folder of their own",
            path.display()
        ),
    )
}

fn other_version(path: &Path) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!(
            "{} was written by another version of this program: use the same one everywhere",
            path.display()
        ),
    )
}

fn damaged(path: &Path) -> Error {
    Error::new(
        ErrorKind::Other,
        format!(
            "the token counter in {} is damaged: if nothing still compares tokens of this key, stop \
             all its users and delete the file",
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_file_that_was_replaced_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.lock");
        let file = open_or_create(&path).unwrap();
        assert!(is_at(&file, &path).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(!is_at(&file, &path).unwrap());
        let other = open_or_create(&path).unwrap();
        assert!(!is_at(&file, &path).unwrap());
        assert!(is_at(&other, &path).unwrap());
    }

    #[test]
    fn the_number_goes_to_the_older_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.lock");
        let file = open_or_create(&path).unwrap();
        let raise = |token| {
            let before = Reserved::read(&file, &path).unwrap();
            let number = before
                .raise(&file, &path, token)
                .unwrap()
                .sync(&path)
                .unwrap();
            let after = Reserved::read(&file, &path).unwrap();
            assert_eq!(after.number, number);
            assert_ne!(before.next, after.next);
            number
        };
        assert_eq!(Reserved::read(&file, &path).unwrap().number, 0);
        assert_eq!(raise(1), 101);
        assert_eq!(raise(102), 202);
        assert_eq!(raise(7), 302, "never lower");
        assert_eq!(file.metadata().unwrap().len(), SLOTS[1] + SLOT_LEN as u64);
        let first = std::fs::read_to_string(&path).unwrap();
        assert!(
            first.starts_with("leasehold-file 1 00000000000000000302 "),
            "{first}"
        );
        assert_eq!(first.as_bytes()[SLOT_LEN - 1], b'\n');
    }
}
