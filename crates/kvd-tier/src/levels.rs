//! Counters and levels of a tier, for metrics. Atomics, read at a scrape.

use std::sync::atomic::{AtomicU64, Ordering};

/// Whether the tier writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum TierState {
    /// It writes.
    #[default]
    Ok = 0,
    /// The last batch failed; it goes on.
    Degraded = 1,
    /// It gave up writing until a restart; it still reads.
    Off = 2,
}

impl TierState {
    /// Label in metrics.
    #[must_use]
    pub fn state_label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Off => "off",
        }
    }
}

macro_rules! levels {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Levels (of now) and totals (since the tier was opened).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        pub struct TierLevels {
            /// Whether the tier writes.
            pub state: TierState,
            $($(#[$doc])* pub $name: u64,)+
        }

        /// Fields of [`TierLevels`] as atomics.
        #[derive(Debug, Default)]
        pub(crate) struct LevelCells {
            $(pub(crate) $name: AtomicU64,)+
        }

        impl LevelCells {
            pub(crate) fn read_levels(&self, state: TierState) -> TierLevels {
                TierLevels { state, $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

levels! {
    /// Most bytes of all segments.
    capacity_bytes,
    /// Bytes of all segments, allocated ones included.
    used_bytes,
    /// Segments.
    segments,
    /// Bytes of records that wait to be written.
    queued_bytes,
    /// Age of the oldest record that is not yet durable, in microseconds.
    durable_lag_us,
    /// Bytes of records that became durable.
    written_bytes,
    /// Records that became durable.
    written_records,
    /// Bytes read.
    read_bytes,
    /// Reads that gave data.
    reads,
    /// Syncs that succeeded.
    syncs,
    /// Time in writes and syncs, in microseconds.
    write_us,
    /// Time in reads and their verification, in microseconds.
    read_us,
    /// Refused: the queue was full.
    drops_queue,
    /// Not durable: the disk was full.
    drops_full,
    /// Not durable: the device failed.
    drops_io,
    /// Not durable: an ancestor is not on disk.
    drops_parent,
    /// Refused or not durable: the tier is off or closing, or the record is too large.
    drops_other,
    /// Failures of writes.
    errors_write,
    /// Failures of syncs.
    errors_sync,
    /// Failures of reads.
    errors_read,
    /// Failures to make, seal, list or remove a file.
    errors_file,
    /// Reads whose segment was gone.
    misses_gone,
    /// Records found damaged.
    corrupt_records,
    /// Segments reclaimed.
    reclaimed_segments,
    /// Bytes copied to the front before a segment went.
    reinserted_bytes,
    /// Block records that went with their segments.
    reclaimed_records,
    /// Tombstones written.
    tombstones,
    /// Block records found live at the start.
    recovered_live,
    /// Dropped at the start: an ancestor is missing.
    recovered_orphan,
    /// Dropped at the start: a newer record of the same block is there.
    recovered_replaced,
    /// Dropped at the start: a tombstone names them.
    recovered_removed,
    /// Dropped at the start: torn, or not proven to be durable.
    recovered_torn,
    /// Time of the recovery, in microseconds.
    recover_us,
}

impl LevelCells {
    pub(crate) fn add_to(cell: &AtomicU64, count: u64) {
        cell.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn set_to(cell: &AtomicU64, value: u64) {
        cell.store(value, Ordering::Relaxed);
    }
}
