use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use leasehold_core::{
    Backend, Claim, Error, ErrorKind, Examination, Expiry, Guarantees, Hold, Holder, Key, Moment,
    Page, Result, Tokens,
};

use crate::error::io_error;
use crate::examine::examine;
use crate::hold::{FileHold, Held};
use crate::list::list;
use crate::lock_file::{self, Raised, Reserved};
use crate::look::{LOOKS, Look, look};
use crate::name::Names;
use crate::record::{Grant, Record};
use crate::watch::{INTERVAL, Watch};

/// Locks in a folder of this machine: the backend that needs no server.
///
/// Everybody who opens the same folder shares its locks. Clones share one client; there is nothing
/// to be gained from opening a folder twice, and nothing to be lost.
///
/// How it works, what it promises and when it can fail: see the [crate's page](crate).
#[derive(Clone)]
pub struct Folder {
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    watch: Arc<Watch>,
    /// The last token that was granted here, by the stem of the key's files: step 4 of
    /// `lock_file.rs`.
    granted: Mutex<HashMap<String, u64>>,
}

/// So many keys are remembered. Forgetting one only costs its next grant a write to the disk.
const REMEMBERED: usize = 10_000;

/// How long an eviction waits for the holder to obey.
const EVICTION: Duration = Duration::from_secs(2);

impl Folder {
    /// What it promises.
    pub const GUARANTEES: Guarantees = {
        let mut guarantees = Guarantees::new(Expiry::Process, *Claim::TTL_RANGE.start());
        guarantees.tokens = Tokens::Durable;
        guarantees
    };

    /// Opens the folder at `path`; if it does not exist it is created, for this user alone.
    ///
    /// To share it between users create it yourself, with rights for their group: the files in it
    /// get the rights that the folder has. Put nothing else into it, keep it on a disk of this
    /// machine, and where nothing tidies up behind you (not in `/tmp`).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if `path` is empty or no folder; [`ErrorKind::Other`] if it cannot be
    /// created or read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.as_os_str().is_empty() {
            return Err(Error::new(
                ErrorKind::Invalid,
                "the path of the folder is empty: name the folder that the locks go into",
            ));
        }
        if path.exists() && !path.is_dir() {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{} is not a folder: name one", path.display()),
            ));
        }
        create_folder(path).map_err(|error| io_error("create the folder", path, error))?;
        // A later change of the working folder must not lead elsewhere.
        let path = fs::canonicalize(path).map_err(|error| io_error("open", path, error))?;
        let marks = path.join("evict");
        create_marks(&path, &marks)
            .map_err(|error| io_error("create the folder", &marks, error))?;
        Ok(Self {
            inner: Arc::new(Inner {
                watch: Watch::new(marks),
                path,
                granted: Mutex::default(),
            }),
        })
    }

    /// The folder, as an absolute path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.inner.path
    }
}

impl fmt::Debug for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Folder").field(&self.inner.path).finish()
    }
}

/// The calls that read and write files are made in place rather than handed to a thread: they touch
/// a few hundred bytes that the system keeps in memory, which costs less than the handing over, and
/// without an await there is nothing to be cancelled half-way. Only waiting for the disk blocks for
/// long: that goes to a thread, while the lock itself stays with the future, which frees it when it
/// is dropped.
#[async_trait]
impl Backend for Folder {
    fn guarantees(&self) -> Guarantees {
        Self::GUARANTEES
    }

    async fn acquire(&self, claim: &Claim) -> Result<Option<Box<dyn Hold>>> {
        let names = Names::new(&self.inner.path, &claim.key);
        let asked = Moment::now();
        let mut pause = Pause::new();
        let mut first = true;
        loop {
            match lock_file::try_lock(&names.lock).await {
                Ok(Some(file)) => return self.grant(claim, names, file).await.map(Some),
                Ok(None) => {}
                // Once it waits, a claim outlives what may pass.
                Err(error) if !first && error.is_transient() => {
                    tracing::debug!(target: "leasehold", key = %claim.key, %error, "waiting on");
                }
                Err(error) => return Err(error),
            }
            first = false;
            let mut next = pause.next();
            if let Some(wait) = claim.wait {
                let left = wait.saturating_sub(asked.elapsed());
                if left.is_zero() {
                    return Ok(None);
                }
                next = next.min(left);
            }
            tokio::time::sleep(next).await;
        }
    }

    async fn holder(&self, key: &Key) -> Result<Option<Holder>> {
        let names = Names::new(&self.inner.path, key);
        let held = self.held_by(&names).await?;
        Ok(held.map(|(grant, token)| grant.to_holder(token)))
    }

    async fn examine(&self, _ttl: Duration) -> Result<Examination> {
        Ok(examine(&self.inner.path))
    }

    /// Asks the holder to let go, and waits until it has: it looks every 50 ms.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] if it still holds the lock after 2 s, which is so if its process is
    /// stopped or hangs. The request stays: it lets go as soon as it runs on.
    async fn evict(&self, key: &Key, grant: Option<&Holder>) -> Result<bool> {
        let names = Names::new(&self.inner.path, key);
        let watch = &self.inner.watch;
        let mark_error = |error| io_error("mark an eviction in", watch.marks(), error);

        let Some((found, _)) = self.held_by(&names).await? else {
            return Ok(false);
        };
        if grant.is_some_and(|grant| grant.grant != found.id.to_string()) {
            return Ok(false);
        }
        watch.mark(&names.stem, found.id).map_err(mark_error)?;
        let asked = Moment::now();
        let mut pause = Pause::new();
        while asked.elapsed() < EVICTION {
            tokio::time::sleep(pause.next()).await;
            let now = self.held_by(&names).await?;
            if now.is_none_or(|(now, _)| now.id != found.id) {
                // A mark that is still there was not obeyed: the lock was released, or its process
                // has ended.
                let unused = watch.unmark(&names.stem, found.id).map_err(mark_error)?;
                return Ok(!unused);
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "{:?} is still held by {}: its process was asked to let go, which it looks for every \
                 {INTERVAL:?}, and has not done so in {EVICTION:?}; if it is stopped or hangs, end it \
                 (process {})",
                key.as_str(),
                found.owner,
                found.pid
            ),
        ))
    }

    async fn list(&self, prefix: &str, after: Option<&[u8]>) -> Result<Page> {
        let (folder, prefix) = (self.inner.path.clone(), prefix.to_owned());
        let after = after.map(|last| String::from_utf8_lossy(last).into_owned());
        let listing = move || list(&folder, &prefix, after.as_deref());
        let listed = tokio::task::spawn_blocking(listing).await;
        listed.map_err(|error| {
            Error::with_source(ErrorKind::Unavailable, "the runtime is ending", error)
        })?
    }

    /// Removes the folder too, unless there is something in it that is none of ours.
    async fn erase(&self) -> Result<()> {
        let path = &self.inner.path;
        remove_ours(path, self.inner.watch.marks()).map_err(|error| io_error("remove", path, error))
    }

    async fn close(&self) -> Result<()> {
        self.inner.watch.close();
        Ok(())
    }
}

impl Folder {
    /// Makes a hold of the locked file: takes the next token and writes down who holds it.
    async fn grant(&self, claim: &Claim, names: Names, file: File) -> Result<Box<dyn Hold>> {
        let stem = names.stem.clone();
        let path = names.lock.clone();
        let (next, raised) = self.next_token(claim, &names, &file)?;
        let token = next.token;
        let record = Record {
            grant: Some(Grant {
                id: claim.id,
                owner: claim.owner.to_string(),
                pid: std::process::id(),
                since: wall_clock(),
                label: claim.label.as_deref().map(str::to_owned),
            }),
            ..next
        };
        let held = Arc::new(Held::new(claim, names, record, file));
        held.write_record()?;
        self.inner
            .watch
            .add(Arc::clone(&held))
            .map_err(|error| io_error("start the thread that watches", &self.inner.path, error))?;
        let hold = FileHold::new(held, Arc::clone(&self.inner.watch));

        if let Some(raised) = raised {
            let synced = tokio::task::spawn_blocking(move || raised.sync(&path)).await;
            let reserved = synced.map_err(|error| {
                Error::with_source(ErrorKind::Unavailable, "the runtime is ending", error)
            })??;
            hold.held().set_reserved(reserved)?;
        }
        self.remember(stem, token);
        Ok(Box::new(hold))
    }

    /// The record of the next token, and the number that the disk must have first, if any: steps 2
    /// to 4 of `lock_file.rs`.
    fn next_token(
        &self,
        claim: &Claim,
        names: &Names,
        file: &File,
    ) -> Result<(Record, Option<Raised>)> {
        let before = lock_file::open_or_create(&names.info)
            .and_then(|info| Record::read(&info))
            .map_err(|error| io_error("read", &names.info, error))?;
        if let Some(other) = before.as_ref().filter(|it| it.key != claim.key.as_str()) {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} belongs to the key {:?}: files of the folder were renamed or copied",
                    names.info.display(),
                    other.key
                ),
            ));
        }
        let mut next = before.unwrap_or_else(|| Record {
            key: claim.key.as_str().to_owned(),
            token: 0,
            reserved: 0,
            grant: None,
        });
        match self.granted().get(&names.stem) {
            Some(last) => next.token = next.token.max(*last),
            None => next.reserved = 0,
        }
        next.token = next.token.saturating_add(1);
        if next.token <= next.reserved {
            return Ok((next, None));
        }
        let reserved = Reserved::read(file, &names.lock)?;
        if next.reserved == 0 {
            next.token = next.token.max(reserved.number.saturating_add(1));
        }
        let raised = reserved.raise(file, &names.lock, next.token)?;
        Ok((next, Some(raised)))
    }

    fn remember(&self, stem: String, token: u64) {
        let mut granted = self.granted();
        if granted.len() >= REMEMBERED && !granted.contains_key(&stem) {
            granted.clear();
        }
        granted.insert(stem, token);
    }

    fn granted(&self) -> MutexGuard<'_, HashMap<String, u64>> {
        self.inner
            .granted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The grant that holds the lock, and its token.
    async fn held_by(&self, names: &Names) -> Result<Option<(Grant, u64)>> {
        for _ in 0..LOOKS {
            match look(names)? {
                Look::Free => return Ok(None),
                Look::Held(found) => return Ok(Some((found.grant, found.token))),
                Look::Unclear => tokio::task::yield_now().await,
            }
        }
        Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "{} changes faster than it can be read",
                names.info.display()
            ),
        ))
    }
}

/// The pauses of one waiter: longer and longer, up to a limit, and out of step with its neighbours.
struct Pause {
    longest: Duration,
}

impl Pause {
    const FIRST: Duration = Duration::from_millis(1);
    const LIMIT: Duration = Duration::from_millis(50);

    fn new() -> Self {
        Self {
            longest: Self::FIRST,
        }
    }

    fn next(&mut self) -> Duration {
        let pause = self.longest.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.longest = (self.longest * 2).min(Self::LIMIT);
        pause
    }
}

fn create_folder(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    {
        use std::os::unix::fs::DirBuilderExt as _;
        builder.mode(0o700);
    }
    builder.recursive(true).create(path)?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => lock_file::sync_folder(parent),
        _ => Ok(()),
    }
}

/// The folder of the marks gets the rights of the one that it is in.
fn create_marks(folder: &Path, marks: &Path) -> io::Result<()> {
    match fs::create_dir(marks) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) if cfg!(unix) => fs::set_permissions(marks, folder.metadata()?.permissions()),
        Ok(()) => Ok(()),
    }
}

fn remove_ours(folder: &Path, marks: &Path) -> io::Result<()> {
    match fs::remove_dir_all(marks) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let extension = path.extension().and_then(|it| it.to_str());
        if matches!(extension, Some("lock" | "info")) {
            fs::remove_file(path)?;
        }
    }
    fs::remove_dir(folder)
}

/// For people to read; nothing is decided by it.
#[allow(clippy::disallowed_methods)]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
