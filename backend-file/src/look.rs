use std::fs::File;
use std::io;

use leasehold_core::Result;

use crate::error::io_error;
use crate::lock_file;
use crate::name::Names;
use crate::record::{Grant, Record};

/// So often a lock is looked at that is never the same in two looks.
pub(crate) const LOOKS: usize = 100;

/// What a look at a lock shows.
pub(crate) enum Look {
    Free,
    Held(Found),
    /// It changed hands meanwhile, or its record is half written, or of another version.
    Unclear,
}

/// A grant, as it is recorded.
pub(crate) struct Found {
    pub(crate) key: String,
    pub(crate) grant: Grant,
    pub(crate) token: u64,
}

/// Looks whether a lock is held, and by whom.
pub(crate) fn look(names: &Names) -> Result<Look> {
    let before = read_info(names)?;
    if matches!(before, Info::Nobody) || !is_locked(names)? {
        return Ok(Look::Free);
    }
    // It may have changed hands between the two looks, or the record was half written.
    if let Info::Grant(found) = before
        && matches!(read_info(names)?, Info::Grant(now) if now.grant.id == found.grant.id)
    {
        return Ok(Look::Held(found));
    }
    Ok(Look::Unclear)
}

enum Info {
    Nobody,
    Grant(Found),
    /// Half written, or by another version.
    Unreadable,
}

fn read_info(names: &Names) -> Result<Info> {
    let record = match File::open(&names.info) {
        Ok(info) => Record::read(&info),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Info::Nobody),
        Err(error) => Err(error),
    };
    let record = record.map_err(|error| io_error("read", &names.info, error))?;
    Ok(match record {
        None => Info::Unreadable,
        Some(Record { grant: None, .. }) => Info::Nobody,
        Some(Record {
            key,
            grant: Some(grant),
            token,
            ..
        }) => Info::Grant(Found { key, grant, token }),
    })
}

fn is_locked(names: &Names) -> Result<bool> {
    lock_file::is_locked(&names.lock).map_err(|error| io_error("look at", &names.lock, error))
}
