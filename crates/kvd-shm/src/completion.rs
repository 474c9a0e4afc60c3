//! How a call through a region ends: a word to sleep on, and what to read once it has changed.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | state: 0 under way, 1 answered, 2 refused, 3 given to a device |
//! | 4..8 | bytes of the message |
//! | 8..24 | three u32 of the answer and one unused: what `StoreAck` says |
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
    /// It was refused: `CODE: message`.
    Refused(String),
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
                for (at, value) in (0..).zip(values) {
                    let offset = self.offset + VALUES_AT + 4 * at;
                    self.memory.write_bytes(offset, &value.to_le_bytes())?;
                }
                DONE
            }
            CallOutcome::Refused(text) => {
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
            DONE => {
                let value = |at: u64| self.read_word(VALUES_AT + 4 * at);
                Ok(Some(CallOutcome::Done([value(0)?, value(1)?, value(2)?])))
            }
            _ => {
                let room = Self::BYTES - TEXT_AT;
                let bytes = u64::from(self.read_word(4)?).min(room);
                let mut text = vec![0; bytes as usize];
                self.memory.read_bytes(self.offset + TEXT_AT, &mut text)?;
                Ok(Some(CallOutcome::Refused(String::from_utf8_lossy(&text).into_owned())))
            }
        }
    }

    fn read_word(&self, at: u64) -> Result<u32, RegionError> {
        let mut bytes = [0; 4];
        self.memory.read_bytes(self.offset + at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}
