//! `store.json`: the format of a folder, its name, and the seeds of its hashes.

use crate::error::DiskError;
use crate::files::StoredFolder;
use crate::record::FramePlace;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const NAME: &str = "store.json";
/// Format of a folder: names of files and `store.json`; records and segments have their own.
const FOLDER_FORMAT: u32 = 1;

/// Content of `store.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StoreIdentity {
    pub(crate) uuid: [u8; 16],
    /// Seed of the caller's hashes of keys.
    pub(crate) hash_seed: u64,
    /// Seed of the checksums of headers; nobody outside learns it.
    pub(crate) frame_seed: u64,
}

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: u32,
    uuid: String,
    hash_seed: String,
    frame_seed: String,
}

/// All that a file of any format has.
#[derive(Deserialize)]
struct FormatOnly {
    format: u32,
}

impl StoreIdentity {
    /// The place of a record in this store.
    pub(crate) fn place_at(&self, segment: u64, offset: u64) -> FramePlace {
        FramePlace { store: self.uuid, seed: self.frame_seed, segment, offset }
    }

    /// Reads the identity of a folder, if it has one.
    pub(crate) fn read_from(
        folder: &dyn StoredFolder,
        path: &Path,
    ) -> Result<Option<Self>, DiskError> {
        let bytes = folder.read_small(NAME).map_err(io_error(path, "cannot read store.json"))?;
        let Some(bytes) = bytes else {
            return Ok(None);
        };
        let bad = |what: String| DiskError::BadStore { folder: path.to_owned(), what };
        let format: FormatOnly =
            serde_json::from_slice(&bytes).map_err(|error| bad(format!("store.json: {error}")))?;
        if format.format != FOLDER_FORMAT {
            return Err(DiskError::NewerFormat {
                folder: path.to_owned(),
                found: format.format,
                known: FOLDER_FORMAT,
            });
        }
        let file: StoreFile =
            serde_json::from_slice(&bytes).map_err(|error| bad(format!("store.json: {error}")))?;
        let uuid = u128::from_str_radix(&file.uuid, 16).ok().map(u128::to_be_bytes);
        let hash_seed = u64::from_str_radix(&file.hash_seed, 16).ok();
        let frame_seed = u64::from_str_radix(&file.frame_seed, 16).ok();
        let (Some(uuid), Some(hash_seed), Some(frame_seed)) = (uuid, hash_seed, frame_seed) else {
            return Err(bad("store.json: uuid and seeds must be hexadecimal numbers".to_owned()));
        };
        Ok(Some(Self { uuid, hash_seed, frame_seed }))
    }

    /// Reads the identity of a folder, or gives a new folder one.
    pub(crate) fn read_or_make(
        folder: &dyn StoredFolder,
        path: &Path,
        has_segments: HasSegments,
    ) -> Result<Self, DiskError> {
        if let Some(found) = Self::read_from(folder, path)? {
            return Ok(found);
        }
        if has_segments == HasSegments::Yes {
            let what = "there are segments but no store.json".to_owned();
            return Err(DiskError::BadStore { folder: path.to_owned(), what });
        }
        let mut random = [0; 32];
        getrandom::fill(&mut random)
            .map_err(io::Error::from)
            .map_err(io_error(path, "cannot get random numbers"))?;
        let mut words = random
            .chunks_exact(8)
            .map(|word| word.iter().fold(0_u64, |value, byte| (value << 8) | u64::from(*byte)));
        let mut next_word = || words.next().unwrap_or_default();
        let uuid = (u128::from(next_word()) << 64 | u128::from(next_word())).to_be_bytes();
        let made = Self { uuid, hash_seed: next_word(), frame_seed: next_word() };
        made.write_to(folder).map_err(io_error(path, "cannot write store.json"))?;
        Ok(made)
    }

    /// Writes `store.json`.
    pub(crate) fn write_to(&self, folder: &dyn StoredFolder) -> io::Result<()> {
        let file = StoreFile {
            format: FOLDER_FORMAT,
            uuid: format!("{:032x}", u128::from_be_bytes(self.uuid)),
            hash_seed: format!("{:016x}", self.hash_seed),
            frame_seed: format!("{:016x}", self.frame_seed),
        };
        let mut text = serde_json::to_vec_pretty(&file)?;
        text.push(b'\n');
        folder.replace_small(NAME, &text)
    }
}

/// Whether a folder has segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HasSegments {
    Yes,
    No,
}

/// The error of a folder that the system does not open.
pub(crate) fn open_error(path: &Path) -> impl Fn(io::Error) -> DiskError {
    let path = path.to_owned();
    move |source| {
        let is_file = |part: &&Path| part.metadata().is_ok_and(|found| !found.is_dir());
        let of_the_path = [
            io::ErrorKind::NotFound,
            io::ErrorKind::PermissionDenied,
            io::ErrorKind::ReadOnlyFilesystem,
        ];
        match path.ancestors().find(is_file) {
            Some(file) => DiskError::NotFolder { file: file.to_owned() },
            None if of_the_path.contains(&source.kind()) => {
                DiskError::Unopened { folder: path.clone(), source }
            }
            None => io_error(&path, "cannot open the folder")(source),
        }
    }
}

/// Makes a system's answer an error of the folder.
pub(crate) fn io_error(path: &Path, what: &'static str) -> impl Fn(io::Error) -> DiskError {
    let folder = path.to_owned();
    move |source| DiskError::Io { folder: folder.clone(), what, source }
}
