//! The files of a store behind a small trait: a real folder here, a simulated one in tests.
//!
//! Offsets, lengths and addresses are multiples of 4 KiB for segments, so that O_DIRECT works.

use crate::aligned::{AlignedBytes, BLOCK_BYTES};
use crate::settings::DirectChoice;
use rustix::fs::{FallocateFlags, OFlags, fallocate, statvfs};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One file of a store.
pub(crate) trait StoredFile: Send + Sync {
    /// Fills `bytes` from `offset`.
    ///
    /// # Errors
    ///
    /// The system's; the end of the file is one.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// The system's. A part may be written.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes what was written durable, and the file's length.
    ///
    /// # Errors
    ///
    /// The system's. What of the unsynced bytes is on disk is unknown for ever.
    fn sync_data(&self) -> io::Result<()>;

    /// # Errors
    ///
    /// The system's.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Bytes of the file.
    ///
    /// # Errors
    ///
    /// The system's.
    fn read_len(&self) -> io::Result<u64>;
}

/// Purpose that a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenPurpose {
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
}

/// The folder of a store.
pub(crate) trait StoredFolder: Send + Sync {
    /// Names of all files.
    ///
    /// # Errors
    ///
    /// The system's.
    fn list_names(&self) -> io::Result<Vec<String>>;

    /// Opens a segment.
    ///
    /// # Errors
    ///
    /// The system's.
    fn open_file(&self, name: &str, purpose: OpenPurpose) -> io::Result<Arc<dyn StoredFile>>;

    /// Makes a segment of `len` zeros whose blocks are allocated. Its name is durable after
    /// [`Self::sync_names`].
    ///
    /// # Errors
    ///
    /// The system's; the file is not there then.
    fn create_file(&self, name: &str, len: u64) -> io::Result<Arc<dyn StoredFile>>;

    /// # Errors
    ///
    /// The system's.
    fn remove_file(&self, name: &str) -> io::Result<()>;

    /// Makes names that were made and removed durable.
    ///
    /// # Errors
    ///
    /// The system's.
    fn sync_names(&self) -> io::Result<()>;

    /// Bytes that may still be written.
    ///
    /// # Errors
    ///
    /// The system's.
    fn free_bytes(&self) -> io::Result<u64>;

    /// A whole small file, if it is there.
    ///
    /// # Errors
    ///
    /// The system's.
    fn read_small(&self, name: &str) -> io::Result<Option<Vec<u8>>>;

    /// Makes or replaces a small file in one durable step.
    ///
    /// # Errors
    ///
    /// The system's.
    fn replace_small(&self, name: &str, bytes: &[u8]) -> io::Result<()>;
}

/// Most bytes that a small file is believed to have.
const SMALL_BYTES_MAX: u64 = 1 << 20;

/// A folder of the file system.
#[derive(Debug)]
pub(crate) struct RealFolder {
    path: PathBuf,
    // 0, or O_DIRECT.
    flags: i32,
}

impl RealFolder {
    /// Opens the folder, for reading alone.
    pub(crate) fn open_existing(path: &Path) -> io::Result<Self> {
        fs::read_dir(path)?;
        Ok(Self { path: path.to_owned(), flags: 0 })
    }

    /// Opens or makes the folder.
    pub(crate) fn open_or_make(path: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Self::open_existing(path)
    }

    /// Takes up O_DIRECT if it is wanted and works here.
    pub(crate) fn choose_direct(mut self, choice: DirectChoice) -> Self {
        if choice == DirectChoice::Auto {
            self.flags = OFlags::DIRECT.bits() as i32;
            if self.probe_direct().is_err() {
                self.flags = 0;
            }
        }
        self
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.flags != 0
    }

    fn probe_direct(&self) -> io::Result<()> {
        let name = "probe.tmp";
        let result = self.create_file(name, BLOCK_BYTES as u64).and_then(|file| {
            let mut block = AlignedBytes::with_zeros(BLOCK_BYTES);
            file.write_at(&block, 0)?;
            file.read_at(&mut block, 0)
        });
        match fs::remove_file(self.path.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => result,
        }
    }
}

impl StoredFolder for RealFolder {
    fn list_names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            // Names of ours are text; others are nobody's business.
            names.extend(entry?.file_name().into_string().ok());
        }
        Ok(names)
    }

    fn open_file(&self, name: &str, purpose: OpenPurpose) -> io::Result<Arc<dyn StoredFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(purpose == OpenPurpose::Write)
            .custom_flags(self.flags | OFlags::NOFOLLOW.bits() as i32)
            .open(self.path.join(name))?;
        Ok(Arc::new(RealFile { file }))
    }

    fn create_file(&self, name: &str, len: u64) -> io::Result<Arc<dyn StoredFile>> {
        let path = self.path.join(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(self.flags)
            .open(&path)?;
        let allocated = match fallocate(&file, FallocateFlags::empty(), 0, len) {
            // A file system without it: the blocks are allocated as they are written.
            Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(len),
            result => result.map_err(io::Error::from),
        };
        if let Err(error) = allocated {
            // The first error is the one that matters; what stays is removed at the next start.
            drop(fs::remove_file(&path));
            return Err(error);
        }
        Ok(Arc::new(RealFile { file }))
    }

    fn remove_file(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let stat = statvfs(&self.path)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn read_small(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let path = self.path.join(name);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
            Ok(meta) if meta.len() > SMALL_BYTES_MAX => {
                return Err(io::Error::from(io::ErrorKind::FileTooLarge));
            }
            Ok(_) => {}
        }
        fs::read(path).map(Some)
    }

    fn replace_small(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.path.join(format!("{name}.tmp"));
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(temporary, self.path.join(name))?;
        self.sync_names()
    }
}

#[derive(Debug)]
struct RealFile {
    file: File,
}

impl StoredFile for RealFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        // A length that changed is needed to read the file, so this makes it durable too.
        self.file.sync_data()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn read_len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }
}
