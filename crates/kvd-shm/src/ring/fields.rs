//! Fields of a record: little-endian, each read once from a copy.

use super::RING_RECORD_BYTES;
use kvd_core::{Coded, ErrorCode};

/// Version of the records.
pub(super) const RECORD_VERSION: u32 = 1;

/// Why a record means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A form that this side does not know.
    #[error("the record has version {version}; this daemon reads version 1")]
    Version {
        /// Version of the record.
        version: u32,
    },
    /// Not the record that comes next.
    #[error("the record has number {number} where {expected} comes next")]
    Number {
        /// Number of the record.
        number: u32,
        /// That comes next.
        expected: u32,
    },
    /// A value that the field does not have.
    #[error("{field} of the record is {value:#x}: {reason}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Values that it may have.
        reason: &'static str,
    },
}

impl Coded for RecordError {
    fn code(&self) -> ErrorCode {
        ErrorCode::InvalidArgument
    }
}

/// Bytes of a record, or of an entry of a list that a record names.
pub(super) struct FieldReader<'a>(pub(super) &'a [u8]);

impl FieldReader<'_> {
    pub(super) fn read_u32(&self, at: usize) -> u32 {
        let bytes = self.0.get(at..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    pub(super) fn read_u64(&self, at: usize) -> u64 {
        u64::from(self.read_u32(at)) | u64::from(self.read_u32(at + 4)) << 32
    }

    /// Tests that nothing stands where later versions may have fields.
    pub(super) fn check_rest(&self, from: usize) -> Result<(), RecordError> {
        match self.0[from.min(self.0.len())..].iter().position(|byte| *byte != 0) {
            None => Ok(()),
            Some(at) => Err(RecordError::Field {
                field: "the reserved part",
                value: (from + at) as u64,
                reason: "the byte there is not 0",
            }),
        }
    }
}

/// A record in the making.
pub(super) struct FieldWriter<const BYTES: usize>(pub(super) [u8; BYTES]);

impl<const BYTES: usize> FieldWriter<BYTES> {
    pub(super) fn new_zeros() -> Self {
        Self([0; BYTES])
    }

    pub(super) fn put_u32(&mut self, at: usize, value: u32) {
        self.put_bytes(at, &value.to_le_bytes());
    }

    pub(super) fn put_u64(&mut self, at: usize, value: u64) {
        self.put_bytes(at, &value.to_le_bytes());
    }

    pub(super) fn put_bytes(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A record with its version and number.
pub(super) fn begin_record(number: u32) -> FieldWriter<RING_RECORD_BYTES> {
    let mut record = FieldWriter::new_zeros();
    record.put_u32(0, RECORD_VERSION);
    record.put_u32(4, number);
    record
}

/// Tests a record's version and number.
pub(super) fn check_head(fields: &FieldReader<'_>, expected: u32) -> Result<(), RecordError> {
    let (version, number) = (fields.read_u32(0), fields.read_u32(4));
    if version != RECORD_VERSION {
        return Err(RecordError::Version { version });
    }
    if number != expected {
        return Err(RecordError::Number { number, expected });
    }
    Ok(())
}
