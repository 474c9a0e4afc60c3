//! Rings: records of a fixed size that one side writes and the other takes, without a message.
//!
//! A place in a region holds two of them, submissions to the daemon and their ends. Each has one
//! writer and one reader, who count their records in words of 32 bits that wrap. The worker owns a
//! record from when the daemon has taken it; the daemon copies it once, before it looks at it.
//! Each side counts for itself and reads the other's words as claims that it tests.
//!
//! | offset | word | written by |
//! |---|---|---|
//! | 64 | submissions written | worker |
//! | 68 | ends read | worker |
//! | 72 | 1: the worker sleeps on the ends | worker |
//! | 76 | doorbell, on which the daemon sleeps | worker |
//! | 128 | submissions taken | daemon |
//! | 132 | ends written, on which the worker sleeps | daemon |
//! | 136 | 1: the daemon sleeps on the doorbell | daemon |
//! | 140 | 1: the daemon serves the ring no more | daemon |
//! | 192 | submissions, 256 bytes each | worker |
//! | behind them | ends, 256 bytes each | daemon |
//!
//! Who sets "sleeps" looks once more before it sleeps; who writes looks at "sleeps" after that. All
//! of these are sequentially consistent, so one of the two sees the other.

mod attend;
mod daemon_side;
mod end;
mod fields;
mod spin;
mod worker_side;

pub use attend::{RingAttend, RingQuery, RingRows};
pub use daemon_side::{RingEnds, RingIntake, TakenRecord};
pub use end::RingEnd;
pub use fields::RecordError;
pub use spin::AdaptiveSpin;
pub use worker_side::WorkerRing;

use crate::{RegionError, RegionMemory};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a record of either ring.
pub const RING_RECORD_BYTES: usize = 256;

const HEADER_BYTES: u64 = 192;
const SUBMITTED: u64 = 64;
const READ: u64 = 68;
const WORKER_SLEEPS: u64 = 72;
const DOORBELL: u64 = 76;
const TAKEN: u64 = 128;
const ENDED: u64 = 132;
const DAEMON_SLEEPS: u64 = 136;
const CLOSED: u64 = 140;

/// Memory with words that both sides count in. A test has another one than a region.
pub trait RingMemory {
    /// Reads a word, in one order with all other accesses to words.
    ///
    /// # Errors
    /// Past the memory, or not aligned.
    fn read_word(&self, offset: u64) -> Result<u32, RegionError>;

    /// Writes a word, in that order; wakes nobody.
    ///
    /// # Errors
    /// Past the memory, or not aligned.
    fn write_word(&self, offset: u64, value: u32) -> Result<(), RegionError>;

    /// Wakes who sleeps on a word.
    ///
    /// # Errors
    /// Past the memory, or not aligned.
    fn wake_word(&self, offset: u64) -> Result<(), RegionError>;

    /// Sleeps until somebody wakes who sleeps there, at most `time`, unless the word is not
    /// `value`. May end early.
    ///
    /// # Errors
    /// Past the memory, or not aligned.
    fn sleep_on_word(&self, offset: u64, value: u32, time: Duration) -> Result<(), RegionError>;

    /// Copies a record out.
    ///
    /// # Errors
    /// Past the memory.
    fn read_record(&self, offset: u64) -> Result<[u8; RING_RECORD_BYTES], RegionError>;

    /// Copies a record in.
    ///
    /// # Errors
    /// Past the memory.
    fn write_record(
        &self,
        offset: u64,
        record: &[u8; RING_RECORD_BYTES],
    ) -> Result<(), RegionError>;
}

impl RingMemory for RegionMemory {
    fn read_word(&self, offset: u64) -> Result<u32, RegionError> {
        self.read_ordered(offset)
    }

    fn write_word(&self, offset: u64, value: u32) -> Result<(), RegionError> {
        self.write_ordered(offset, value)
    }

    fn wake_word(&self, offset: u64) -> Result<(), RegionError> {
        self.wake_sleepers(offset)
    }

    fn sleep_on_word(&self, offset: u64, value: u32, time: Duration) -> Result<(), RegionError> {
        self.wait_word(offset, value, time).map(|_| ())
    }

    fn read_record(&self, offset: u64) -> Result<[u8; RING_RECORD_BYTES], RegionError> {
        let mut record = [0; RING_RECORD_BYTES];
        self.read_bytes(offset, &mut record)?;
        Ok(record)
    }

    fn write_record(
        &self,
        offset: u64,
        record: &[u8; RING_RECORD_BYTES],
    ) -> Result<(), RegionError> {
        self.write_bytes(offset, record)
    }
}

impl<M: RingMemory> RingMemory for Arc<M> {
    fn read_word(&self, offset: u64) -> Result<u32, RegionError> {
        (**self).read_word(offset)
    }

    fn write_word(&self, offset: u64, value: u32) -> Result<(), RegionError> {
        (**self).write_word(offset, value)
    }

    fn wake_word(&self, offset: u64) -> Result<(), RegionError> {
        (**self).wake_word(offset)
    }

    fn sleep_on_word(&self, offset: u64, value: u32, time: Duration) -> Result<(), RegionError> {
        (**self).sleep_on_word(offset, value, time)
    }

    fn read_record(&self, offset: u64) -> Result<[u8; RING_RECORD_BYTES], RegionError> {
        (**self).read_record(offset)
    }

    fn write_record(
        &self,
        offset: u64,
        record: &[u8; RING_RECORD_BYTES],
    ) -> Result<(), RegionError> {
        (**self).write_record(offset, record)
    }
}

/// Where a ring is in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlace {
    /// Offset of its first byte; a multiple of 64.
    pub offset: u64,
    /// Records of either ring: a power of two.
    pub entries: u32,
    /// The first record's number; both sides count from there.
    pub first: u32,
}

/// Why a place is none for a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// A number of records that would not wrap as the counters do.
    #[error("a ring of {entries} records; give a power of two from 1 to {max}")]
    Entries {
        /// Records.
        entries: u32,
        /// Most records.
        max: u32,
    },
    /// A place that words are not aligned in.
    #[error("the ring at {offset} is not aligned to 64 bytes")]
    Unaligned {
        /// Where.
        offset: u64,
    },
    /// The peer's counters cannot be.
    #[error(
        "the ring's counters are broken: {written} records written and {read} ends read, of \
         {taken} taken and {entries} at most"
    )]
    Broken {
        /// Submissions that the worker says it has written.
        written: u32,
        /// Ends that it says it has read.
        read: u32,
        /// Submissions that were taken.
        taken: u32,
        /// Records of the ring.
        entries: u32,
    },
    /// The memory has no such place.
    #[error(transparent)]
    Region(#[from] RegionError),
}

impl kvd_core::Coded for RingError {
    fn code(&self) -> kvd_core::ErrorCode {
        match self {
            Self::Region(error) => error.code(),
            _ => kvd_core::ErrorCode::InvalidArgument,
        }
    }
}

impl RingPlace {
    /// Most records of a ring.
    pub const ENTRIES_MAX: u32 = 1 << 12;

    /// Bytes that it takes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        HEADER_BYTES + 2 * u64::from(self.entries) * RING_RECORD_BYTES as u64
    }

    /// One past its last byte.
    #[must_use]
    pub fn end_offset(&self) -> u64 {
        self.offset.saturating_add(self.size_bytes())
    }

    /// Tests that a ring can be there.
    ///
    /// # Errors
    /// [`RingError`], but no [`RingError::Broken`].
    pub fn check_place(&self, memory: &RegionMemory) -> Result<(), RingError> {
        let (offset, entries, max) = (self.offset, self.entries, Self::ENTRIES_MAX);
        if !entries.is_power_of_two() || entries > max {
            return Err(RingError::Entries { entries, max });
        }
        if !offset.is_multiple_of(64) {
            return Err(RingError::Unaligned { offset });
        }
        Ok(memory.check_range(offset, self.size_bytes())?)
    }

    fn word_at(&self, word: u64) -> u64 {
        self.offset + word
    }

    fn submission_at(&self, number: u32) -> u64 {
        self.record_at(number & (self.entries - 1))
    }

    fn end_at(&self, number: u32) -> u64 {
        self.record_at(self.entries + (number & (self.entries - 1)))
    }

    fn record_at(&self, index: u32) -> u64 {
        self.offset + HEADER_BYTES + u64::from(index) * RING_RECORD_BYTES as u64
    }
}
