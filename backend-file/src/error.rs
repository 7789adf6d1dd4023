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
