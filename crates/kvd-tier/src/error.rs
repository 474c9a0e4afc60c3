//! Errors of the tier: how opening, writing and reading may end.

use crate::name::DiskLocation;
use std::io;
use std::path::PathBuf;
use thiserror::Error;

/// Why a folder cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// A setting is out of range.
    #[error("cache.disk: {what}")]
    InvalidSettings {
        /// Name of the setting and its range.
        what: String,
    },
    /// Another process has the folder (exit 69).
    #[error(
        "another process uses {}: stop it first, or use another folder",
        folder.display()
    )]
    InUse {
        /// The folder.
        folder: PathBuf,
    },
    /// A newer kvd wrote the folder (exit 78).
    #[error(
        "{} has format {found}, this kvd reads up to {known}: use the newer kvd, or another folder",
        folder.display()
    )]
    NewerFormat {
        /// The folder.
        folder: PathBuf,
        /// Version of the folder.
        found: u32,
        /// Newest version that this program reads.
        known: u32,
    },
    /// `store.json` is missing though there are segments, or does not parse.
    #[error("{}: {what}; move the folder away, or restore its store.json", folder.display())]
    BadStore {
        /// The folder.
        folder: PathBuf,
        /// The thing that is wrong.
        what: String,
    },
    /// Nothing of a store is there: another folder is meant.
    #[error(
        "{} is no folder of a cache: it has no store.json; name the one of cache.disk.path",
        folder.display()
    )]
    NoStore {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder can be neither made nor opened; a disk that comes later may have it.
    #[error(
        "cannot open the folder ({}): {source}; name one that this user may write",
        folder.display()
    )]
    Unopened {
        /// The folder.
        folder: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// An exported file that is none, is cut off, or is of another scope. Nothing is imported.
    #[error("{}: record {record}: {what}; nothing was imported", file.display())]
    BadExport {
        /// The file.
        file: PathBuf,
        /// Records of it that were in order.
        record: u64,
        /// The thing that is wrong.
        what: String,
    },
    /// A file stands where a folder has to be.
    #[error(
        "{} is a file, not a folder: name a folder, which is made where there is none, or move \
         the file away",
        file.display()
    )]
    NotFolder {
        /// The file.
        file: PathBuf,
    },
    /// The system refused.
    #[error("{what} ({}): {source}", folder.display())]
    Io {
        /// The folder.
        folder: PathBuf,
        /// The step that was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
}

impl DiskError {
    /// The setting that the error is of, where its text does not name it.
    #[must_use]
    pub fn setting_name(&self) -> Option<&'static str> {
        (!matches!(self, Self::InvalidSettings { .. })).then_some("cache.disk.path")
    }

    /// The daemon's exit code: 64 for a path that is no folder to use, 69 for a folder in use, 78
    /// for another format or bad settings, 74 for input and output, 1 for a file that cannot be
    /// imported.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NotFolder { .. } | Self::NoStore { .. } => 64,
            Self::InUse { .. } => 69,
            Self::InvalidSettings { .. } | Self::NewerFormat { .. } | Self::BadStore { .. } => 78,
            Self::Io { .. } | Self::Unopened { .. } => 74,
            Self::BadExport { .. } => 1,
        }
    }
}

/// Why a record was not taken for writing. Nothing of it was written.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusedWrite {
    /// The queue is full: write less, or raise `queue_bytes_max`.
    #[error("the write queue holds {queued_bytes} of {limit_bytes} bytes")]
    QueueFull {
        /// Bytes that wait.
        queued_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The record is larger than a segment has room for.
    #[error("a record of {bytes} bytes does not fit: a segment has room for {limit_bytes}")]
    TooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Room in a segment.
        limit_bytes: u64,
    },
    /// Too many descriptions of scopes.
    #[error("the store has {limit} descriptions, its most")]
    TooManyDescriptions {
        /// The limit.
        limit: usize,
    },
    /// The tier gave up writing after failures of the device.
    #[error("the tier is off after failures of its device")]
    Off,
    /// The tier is closing.
    #[error("the tier is closing")]
    Closed,
}

impl RefusedWrite {
    /// Label in metrics.
    #[must_use]
    pub fn reason_label(&self) -> &'static str {
        match self {
            Self::QueueFull { .. } => "queue",
            Self::TooLarge { .. } => "too_large",
            Self::TooManyDescriptions { .. } => "descriptions",
            Self::Off => "off",
            Self::Closed => "closed",
        }
    }
}

/// Why a record that was queued did not become durable.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum WriteError {
    /// No room: the file system is full, and reclaiming a segment did not help.
    #[error("the disk is full")]
    Full,
    /// The device failed twice for this record.
    #[error("the disk failed: {kind}")]
    Io {
        /// Kind of the last failure.
        kind: io::ErrorKind,
    },
    /// A record of an ancestor that was queued before failed or went.
    #[error("a record of an ancestor is not on disk")]
    ParentLost,
    /// The tier gave up after failures in a row.
    #[error("the tier is off after failures of its device")]
    Off,
    /// The tier closed first.
    #[error("the tier closed before the record was written")]
    Closed,
}

impl WriteError {
    /// Label in metrics.
    #[must_use]
    pub fn reason_label(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Io { .. } => "io",
            Self::ParentLost => "parent",
            Self::Off => "off",
            Self::Closed => "closed",
        }
    }
}

/// Why a read gives no data: a miss for whoever asked.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadError {
    /// The record's segment was reclaimed.
    #[error("segment {} was reclaimed", location.segment)]
    Gone {
        /// Where the record was.
        location: DiskLocation,
    },
    /// The record is damaged: remove its entry and call
    /// [`DiskTier::remove_record`](crate::DiskTier::remove_record).
    #[error("record {} is damaged: {flaw}", location.serial)]
    Corrupt {
        /// Where it lies.
        location: DiskLocation,
        /// The first thing that is wrong.
        flaw: crate::record::RecordFlaw,
    },
    /// The device failed.
    #[error("read failed: {kind}")]
    Io {
        /// The system's answer.
        kind: io::ErrorKind,
    },
    /// The record has fewer layers.
    #[error("layers up to {asked} asked of a record with {layers}")]
    NoSuchLayer {
        /// End of the range.
        asked: u32,
        /// Layers of the record.
        layers: u32,
    },
    /// Too many submitted reads wait, or the tier is closing.
    #[error("{limit} reads wait already, or the tier is closing")]
    QueueFull {
        /// The limit, `reads_max`.
        limit: usize,
    },
}

impl ReadError {
    /// Label in metrics.
    #[must_use]
    pub fn reason_label(&self) -> &'static str {
        match self {
            Self::Gone { .. } => "gone",
            Self::Corrupt { .. } => "corrupt",
            Self::Io { .. } => "io",
            Self::NoSuchLayer { .. } => "layers",
            Self::QueueFull { .. } => "queue",
        }
    }
}

/// Why a record of this shape cannot be.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShapeError {
    /// The key is too long.
    #[error("a key of {bytes} bytes, at most {limit}")]
    LongKey {
        /// Bytes of the key.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// Too many layers.
    #[error("{layers} layers, at most {limit}")]
    ManyLayers {
        /// Layers asked for.
        layers: usize,
        /// The limit.
        limit: usize,
    },
    /// Directory, tables or the whole are too large.
    #[error("a record of {bytes} bytes, at most {limit}")]
    TooLarge {
        /// Bytes of the record, or of its head.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
}
