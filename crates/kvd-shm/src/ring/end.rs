//! The record of a submission's end.
//!
//! | bytes | field |
//! |---|---|
//! | 0, 4 | version; number of the end |
//! | 8 | tag of the submission, u64 |
//! | 16, 20 | state: 1 answered, 2 refused; number of the submission |
//! | 24, 28, 32 | answered: queries that failed alone, 0, 0; else `retry_after_ms`, `id_boot`, 0 |
//! | 36 | bytes of the text |
//! | 40 | `CODE: message` of a refusal, cut where it is too long |

use super::RING_RECORD_BYTES;
use super::fields::{FieldReader, RecordError, begin_record, check_head};
use crate::{CallOutcome, CallRefusal};

const ANSWERED: u32 = 1;
const REFUSED: u32 = 2;
const TEXT: usize = 40;

/// How a submission ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingEnd {
    /// Tag of the submission.
    pub tag: u64,
    /// Its number.
    pub submission: u32,
    /// Its outcome.
    pub outcome: CallOutcome,
}

impl RingEnd {
    /// Its record.
    #[must_use]
    pub fn write_record(&self, number: u32) -> [u8; RING_RECORD_BYTES] {
        let mut record = begin_record(number);
        record.put_u64(8, self.tag);
        record.put_u32(20, self.submission);
        let (state, values) = match &self.outcome {
            CallOutcome::Done(values) => (ANSWERED, *values),
            CallOutcome::Refused(refusal) => {
                let text = &refusal.text;
                let text = &text[..text.floor_char_boundary(RING_RECORD_BYTES - TEXT)];
                record.put_u32(36, text.len() as u32);
                record.put_bytes(TEXT, text.as_bytes());
                (REFUSED, [refusal.retry_after_ms, refusal.id_boot, 0])
            }
        };
        record.put_u32(16, state);
        for (at, value) in [24, 28, 32].into_iter().zip(values) {
            record.put_u32(at, value);
        }
        record.0
    }

    /// Reads a record.
    ///
    /// # Errors
    /// When it has another version or number, or a state that an end never has.
    pub fn read_record(record: &[u8; RING_RECORD_BYTES], number: u32) -> Result<Self, RecordError> {
        let fields = FieldReader(record);
        check_head(&fields, number)?;
        let values = [24, 28, 32].map(|at| fields.read_u32(at));
        let outcome = match fields.read_u32(16) {
            ANSWERED => CallOutcome::Done(values),
            REFUSED => {
                let bytes = (fields.read_u32(36) as usize).min(RING_RECORD_BYTES - TEXT);
                let text = String::from_utf8_lossy(&record[TEXT..TEXT + bytes]).into_owned();
                let [retry_after_ms, id_boot, _] = values;
                CallOutcome::Refused(CallRefusal { text, retry_after_ms, id_boot, error_bytes: 0 })
            }
            state => {
                let (field, value, reason) = ("state", state.into(), "1 answered, 2 refused");
                return Err(RecordError::Field { field, value, reason });
            }
        };
        Ok(Self { tag: fields.read_u64(8), submission: fields.read_u32(20), outcome })
    }
}
