//! `LOCK`: one process per folder.

use crate::error::DiskError;
use crate::identity::io_error;
use std::fs::{File, OpenOptions, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Holds a folder until it is dropped, or the process ends by whatever way.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: File,
}

impl FolderLock {
    pub(crate) fn take_lock(folder: &Path) -> Result<Self, DiskError> {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(folder.join("LOCK"))
            .map_err(io_error(folder, "cannot open LOCK"))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => Err(DiskError::InUse { folder: folder.to_owned() }),
            Err(TryLockError::Error(source)) => Err(io_error(folder, "cannot lock LOCK")(source)),
        }
    }
}
