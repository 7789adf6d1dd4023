use std::io;
use std::path::Path;

use leasehold_core::{Error, ErrorKind};

/// Says what failed on which path, and what to do about it.
pub(crate) fn io_error(doing: &str, path: &Path, error: io::Error) -> Error {
    let (kind, advice) = match error.kind() {
        io::ErrorKind::PermissionDenied => (
            ErrorKind::Other,
            ": whoever locks needs the right to read and write the folder and its files",
        ),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (ErrorKind::Other, ": make room there")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::Other, ": choose a folder that can be written")
        }
        io::ErrorKind::NotADirectory => (ErrorKind::Invalid, ": name a folder"),
        io::ErrorKind::Unsupported => (
            ErrorKind::Unsupported,
            ": choose a folder on a file system that knows file locks",
        ),
        _ if too_many_open(&error) => (
            ErrorKind::Unavailable,
            ": each lock that is held keeps one file open; raise the limit (ulimit -n)",
        ),
        _ => (ErrorKind::Other, ""),
    };
    let message = format!("cannot {doing} {}: {error}{advice}", path.display());
    Error::with_source(kind, message, error)
}

/// EMFILE and ENFILE have no kind of their own; their numbers are the same on every Unix.
fn too_many_open(error: &io::Error) -> bool {
    cfg!(unix) && matches!(error.raw_os_error(), Some(23 | 24))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_say_what_they_mean_to_the_caller() {
        use io::ErrorKind as Io;
        let path = Path::new("/locks/a.lock");
        for (error, kind, says) in [
            (
                Io::PermissionDenied.into(),
                ErrorKind::Other,
                "the right to read and write",
            ),
            (Io::StorageFull.into(), ErrorKind::Other, "make room"),
            (
                Io::ReadOnlyFilesystem.into(),
                ErrorKind::Other,
                "can be written",
            ),
            (
                Io::Unsupported.into(),
                ErrorKind::Unsupported,
                "knows file locks",
            ),
            #[cfg(unix)]
            (
                io::Error::from_raw_os_error(24),
                ErrorKind::Unavailable,
                "ulimit -n",
            ),
            (
                io::Error::other("odd"),
                ErrorKind::Other,
                "cannot lock /locks/a.lock: odd",
            ),
        ] {
            let error = io_error("lock", path, error);
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
