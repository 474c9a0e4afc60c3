//! How a call through a region ends: a word to sleep on, and what to read once it has changed.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | state: 0 under way, 1 answered, 2 refused, 3 given to a device |
//! | 4..8 | bytes of the message |
//! | 8..24 | three u32 of the answer or of the refusal, and one unused |
//! | 24..256 | `CODE: message` of a refusal, cut where it is too long |

use crate::{RegionError, RegionMemory};
use std::time::{Duration, Instant};

const PENDING: u32 = 0;
const DONE: u32 = 1;
const REFUSED: u32 = 2;
const LAUNCHED: u32 = 3;
const VALUES_AT: u64 = 8;
const TEXT_AT: u64 = 24;

/// A completion record of a region.
#[derive(Clone, Copy, Debug)]
pub struct CompletionRecord<'a> {
    memory: &'a RegionMemory,
    offset: u64,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The answer is in the region.
    Done([u32; 3]),
    /// It was refused.
    Refused(CallRefusal),
}

/// Why a call was refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallRefusal {
    /// `CODE: message`, cut where it is too long.
    pub text: String,
    /// When the same call may be sent again, in milliseconds; 0: that does not help.
    pub retry_after_ms: u32,
    /// The first eight digits of the boot id of an id of another boot, as a number; 0: none.
    pub id_boot: u32,
    /// Bytes of the whole error where the answer would be; 0 where a call has no such place.
    pub error_bytes: u32,
}

impl<'a> CompletionRecord<'a> {
    /// Bytes of a record.
    pub const BYTES: u64 = 256;

    /// The record at an offset.
    ///
    /// # Errors
    /// When it is not inside the region, or not aligned.
    pub fn from_offset(memory: &'a RegionMemory, offset: u64) -> Result<Self, RegionError> {
        memory.check_range(offset, Self::BYTES)?;
        memory.load_word(offset)?;
        Ok(Self { memory, offset })
    }

    /// Makes the record ready for a call.
    ///
    /// # Errors
    /// None after [`CompletionRecord::at`].
    pub fn clear(&self) -> Result<(), RegionError> {
        self.memory.store_word(self.offset, PENDING)
    }

    /// Says that a device has all of the call, whose end is still to come.
    ///
    /// # Errors
    /// None after [`CompletionRecord::at`].
    pub fn mark_launched(&self) -> Result<(), RegionError> {
        self.memory.store_word(self.offset, LAUNCHED)
    }

    /// Waits at most `time` until a device has all of the call (true), or its end (false).
    ///
    /// # Errors
    /// None after [`CompletionRecord::at`].
    pub fn wait_launched(&self, time: Duration) -> Result<Option<bool>, RegionError> {
        let state = self.memory.wait_word(self.offset, PENDING, time)?;
        Ok((state != PENDING).then_some(state == LAUNCHED))
    }

    /// Ends the call.
    ///
    /// # Errors
    /// None after [`CompletionRecord::at`].
    pub fn end_call(&self, outcome: &CallOutcome) -> Result<(), RegionError> {
        let state = match outcome {
            CallOutcome::Done(values) => {
                self.write_values(*values)?;
                DONE
            }
            CallOutcome::Refused(refusal) => {
                let CallRefusal { text, retry_after_ms, id_boot, error_bytes } = refusal;
                self.write_values([*retry_after_ms, *id_boot, *error_bytes])?;
                let room = (Self::BYTES - TEXT_AT) as usize;
                let text = &text[..text.floor_char_boundary(room)];
                self.memory.write_bytes(self.offset + 4, &(text.len() as u32).to_le_bytes())?;
                self.memory.write_bytes(self.offset + TEXT_AT, text.as_bytes())?;
                REFUSED
            }
        };
        self.memory.store_word(self.offset, state)
    }

    /// Waits at most `time` for the end.
    ///
    /// # Errors
    /// None after [`CompletionRecord::at`].
    pub fn wait_end(&self, time: Duration) -> Result<Option<CallOutcome>, RegionError> {
        let began = Instant::now();
        let mut state = self.memory.wait_word(self.offset, PENDING, time)?;
        if state == LAUNCHED {
            let rest = time.saturating_sub(began.elapsed());
            state = self.memory.wait_word(self.offset, LAUNCHED, rest)?;
        }
        match state {
            PENDING | LAUNCHED => Ok(None),
            DONE => Ok(Some(CallOutcome::Done(self.read_values()?))),
            _ => {
                let room = Self::BYTES - TEXT_AT;
                let bytes = u64::from(self.read_word(4)?).min(room);
                let mut text = vec![0; bytes as usize];
                self.memory.read_bytes(self.offset + TEXT_AT, &mut text)?;
                let text = String::from_utf8_lossy(&text).into_owned();
                let [retry_after_ms, id_boot, error_bytes] = self.read_values()?;
                let refusal = CallRefusal { text, retry_after_ms, id_boot, error_bytes };
                Ok(Some(CallOutcome::Refused(refusal)))
            }
        }
    }

    fn write_values(&self, values: [u32; 3]) -> Result<(), RegionError> {
        for (at, value) in (0..).zip(values) {
            let offset = self.offset + VALUES_AT + 4 * at;
            self.memory.write_bytes(offset, &value.to_le_bytes())?;
        }
        Ok(())
    }

    fn read_values(&self) -> Result<[u32; 3], RegionError> {
        let value = |at: u64| self.read_word(VALUES_AT + 4 * at);
        Ok([value(0)?, value(1)?, value(2)?])
    }

    fn read_word(&self, at: u64) -> Result<u32, RegionError> {
        let mut bytes = [0; 4];
        self.memory.read_bytes(self.offset + at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}
