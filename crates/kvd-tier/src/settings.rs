//! Settings of the disk tier, each limit with its name. Pure.

use crate::aligned::BLOCK_BYTES;
use crate::error::DiskError;
use crate::record::RECORD_BYTES_MAX;
use std::path::PathBuf;

/// Whether files bypass the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectChoice {
    /// O_DIRECT where a probe in the folder works.
    Auto,
    /// Never.
    Off,
}

/// Settings of a [`DiskTier`](crate::DiskTier). `DiskSettings::new` gives the defaults.
#[derive(Clone, Debug)]
pub struct DiskSettings {
    /// The folder; made if it is not there.
    pub folder: PathBuf,
    /// Most bytes of all segments. At least three segments.
    pub bytes: u64,
    /// Size of a segment. Default 256 MiB; a multiple of 4 KiB.
    pub segment_bytes: u64,
    /// A batch ends at this many bytes. Default 8 MiB.
    pub sync_bytes: u64,
    /// A batch ends this long after its first record, and sooner when for an eighth of it none
    /// came. Default 20 ms.
    pub sync_ms: u64,
    /// Most bytes of records that wait to be written. Default 256 MiB.
    pub queue_bytes_max: u64,
    /// Default [`DirectChoice::Auto`].
    pub direct: DirectChoice,
    /// The writer pauses between batches to keep this rate. 0, the default, is no limit.
    pub write_bytes_per_second: u64,
    /// Most of a reclaimed segment that is copied to the front. Default 25.
    pub reinsert_percent: u8,
    /// The file system keeps this much free. Default 1 GiB.
    pub reserve_free_bytes: u64,
    /// Threads that read segments at the start. Default 8.
    pub recover_threads: usize,
    /// Threads behind `submit_read`. Default 4.
    pub read_threads: usize,
    /// Most submitted reads that wait. Default 4,096.
    pub reads_max: usize,
    /// Most files of segments that are open. Default 256.
    pub open_files_max: usize,
    /// Most scope descriptions and calibrations, together. Default 4,096.
    pub descriptions_max: usize,
}

/// Segments that a tier has at least: one that is written, one that is free, one that is read.
pub(crate) const SEGMENTS_MIN: u64 = 3;

impl DiskSettings {
    /// The defaults, for `bytes` in `folder`.
    #[must_use]
    pub fn new(folder: PathBuf, bytes: u64) -> Self {
        Self {
            folder,
            bytes,
            segment_bytes: 256 << 20,
            sync_bytes: 8 << 20,
            sync_ms: 20,
            queue_bytes_max: 256 << 20,
            direct: DirectChoice::Auto,
            write_bytes_per_second: 0,
            reinsert_percent: 25,
            reserve_free_bytes: 1 << 30,
            recover_threads: 8,
            read_threads: 4,
            reads_max: 4096,
            open_files_max: 256,
            descriptions_max: 4096,
        }
    }

    /// Bytes of the largest record that a segment has room for.
    #[must_use]
    pub fn record_bytes_max(&self) -> u64 {
        // The segment's header, and a footer of one entry.
        let room = self.segment_bytes.saturating_sub(2 * BLOCK_BYTES as u64);
        room.min(RECORD_BYTES_MAX)
    }

    /// # Errors
    ///
    /// [`DiskError::InvalidSettings`] names the setting.
    pub fn check_limits(&self) -> Result<(), DiskError> {
        let invalid = |what: String| Err(DiskError::InvalidSettings { what });
        if !self.segment_bytes.is_multiple_of(BLOCK_BYTES as u64)
            || self.segment_bytes < 8 * BLOCK_BYTES as u64
            || self.segment_bytes > 16 << 30
        {
            return invalid(format!(
                "segment_bytes {} must be a multiple of 4096 between 32 KiB and 16 GiB",
                self.segment_bytes
            ));
        }
        if self.bytes < SEGMENTS_MIN * self.segment_bytes {
            return invalid(format!(
                "bytes {} must be at least {SEGMENTS_MIN} times segment_bytes ({})",
                self.bytes, self.segment_bytes
            ));
        }
        if self.reinsert_percent > 75 {
            return invalid(format!("reinsert_percent {} is over 75", self.reinsert_percent));
        }
        let counts = [
            ("sync_bytes", self.sync_bytes),
            ("queue_bytes_max", self.queue_bytes_max),
            ("recover_threads", self.recover_threads as u64),
            ("read_threads", self.read_threads as u64),
            ("reads_max", self.reads_max as u64),
            ("open_files_max", self.open_files_max as u64),
        ];
        for (name, count) in counts {
            if count == 0 {
                return invalid(format!("{name} must not be 0"));
            }
        }
        Ok(())
    }
}
