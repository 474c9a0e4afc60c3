//! The disk tier of the cache: records of cached blocks in append-only segments of one folder.
//!
//! A record is self-describing: names, the form of each layer, the tables its pages need, and
//! checksums of all of it ([`RecordDraft`] builds one, [`RecordPart`] is what a read gives).
//! [`DiskTier`] owns a folder: one thread writes in batches and acknowledges a record after
//! `fdatasync` of its batch; reads verify checksums and may run on any thread, while the oldest
//! segment is reclaimed too. [`offline`] does what people do with a folder no daemon has.
//!
//! "Durable" means: the record is on disk after `fdatasync`, and no ancestor of it that was queued
//! before it has failed. It says nothing about how long the record stays.
//!
//! The crate never sees the index of the cache: a [`ReclaimListener`] says which records to keep
//! and is told which are gone. It never sees gRPC, an async runtime or a device. The layout is
//! `docs/cache-format.md`.
//!
//! Locks: the queue's, the table of segments', the cache of open files'. None is held during I/O
//! or while a callback runs.
#![forbid(unsafe_code)]

mod aligned;
pub mod bench;
mod draft;
mod error;
mod files;
mod identity;
mod levels;
mod listener;
mod lock;
mod lost;
mod name;
mod object;
pub mod offline;
mod part;
mod queue;
mod read_pool;
mod reader;
mod reclaim;
pub mod record;
mod recover;
mod roll;
mod scan;
mod segment;
mod settings;
mod shared;
mod table;
mod tier;
mod writer;

#[cfg(test)]
mod tests;

pub use aligned::AlignedBytes;
pub use draft::{LayerShape, RecordDraft, RecordShape};
pub use error::{DiskError, ReadError, RefusedWrite, ShapeError, WriteError};
pub use levels::{TierLevels, TierState};
pub use listener::{KeepNothing, OnDurable, ReclaimListener};
pub use name::{BlockName, DiskLocation, KeepChoice, LiveRecord, RecordKind, RecordMeta, ScopeId};
pub use object::ObjectName;
pub use part::{RecordHead, RecordPart};
pub use read_pool::{OnRead, ReadRequest};
pub use recover::{RecoveredRecords, RecoveryCounts};
pub use settings::{DirectChoice, DiskSettings};
pub use tier::DiskTier;
