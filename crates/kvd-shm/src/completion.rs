//! How a call through a region ends: a word to sleep on, and what to read once it has changed.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | state: 0 under way, 1 answered, 2 refused, 3 given to a device |
//! | 4..8 | bytes of the message |
//! | 8..24 | three u32 of the answer and one unused: what `StoreAck` says |
//! | 24..256 | `CODE: message` of a refusal, cut where it is too long |

use crate::{Memory, RegionError};
use std::time::{Duration, Instant};

const PENDING: u32 = 0;
const DONE: u32 = 1;
const REFUSED: u32 = 2;
const LAUNCHED: u32 = 3;
const VALUES_AT: u64 = 8;
const TEXT_AT: u64 = 24;

/// A completion record of a region.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    memory: &'a Memory,
    offset: u64,
}

/// How a call ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// What was asked for is in the region.
    Done([u32; 3]),
    /// It was refused: `CODE: message`.
    Refused(String),
}

impl<'a> Completion<'a> {
    /// Bytes of a record.
    pub const BYTES: u64 = 256;

    /// The record at an offset.
    ///
    /// # Errors
    /// When it is not inside the region, or not aligned.
    pub fn at(memory: &'a Memory, offset: u64) -> Result<Self, RegionError> {
        memory.check(offset, Self::BYTES)?;
        memory.load(offset)?;
        Ok(Self { memory, offset })
    }

    /// Makes the record ready for a call.
    ///
    /// # Errors
    /// None after [`Completion::at`].
    pub fn clear(&self) -> Result<(), RegionError> {
        self.memory.store(self.offset, PENDING)
    }

    /// Says that a device has all of the call, whose end is still to come.
    ///
    /// # Errors
    /// None after [`Completion::at`].
    pub fn launched(&self) -> Result<(), RegionError> {
        self.memory.store(self.offset, LAUNCHED)
    }

    /// Waits at most `time` until a device has all of the call (true), or its end (false).
    ///
    /// # Errors
    /// None after [`Completion::at`].
    pub fn wait_launched(&self, time: Duration) -> Result<Option<bool>, RegionError> {
        let state = self.memory.wait(self.offset, PENDING, time)?;
        Ok((state != PENDING).then_some(state == LAUNCHED))
    }

    /// Ends the call.
    ///
    /// # Errors
    /// None after [`Completion::at`].
    pub fn end(&self, outcome: &Outcome) -> Result<(), RegionError> {
        let state = match outcome {
            Outcome::Done(values) => {
                for (at, value) in (0..).zip(values) {
                    let offset = self.offset + VALUES_AT + 4 * at;
                    self.memory.write(offset, &value.to_le_bytes())?;
                }
                DONE
            }
            Outcome::Refused(text) => {
                let room = (Self::BYTES - TEXT_AT) as usize;
                let text = &text[..text.floor_char_boundary(room)];
                self.memory.write(self.offset + 4, &(text.len() as u32).to_le_bytes())?;
                self.memory.write(self.offset + TEXT_AT, text.as_bytes())?;
                REFUSED
            }
        };
        self.memory.store(self.offset, state)
    }

    /// Waits at most `time` for the end.
    ///
    /// # Errors
    /// None after [`Completion::at`].
    pub fn wait(&self, time: Duration) -> Result<Option<Outcome>, RegionError> {
        let began = Instant::now();
        let mut state = self.memory.wait(self.offset, PENDING, time)?;
        if state == LAUNCHED {
            let rest = time.saturating_sub(began.elapsed());
            state = self.memory.wait(self.offset, LAUNCHED, rest)?;
        }
        match state {
            PENDING | LAUNCHED => Ok(None),
            DONE => {
                let value = |at: u64| self.u32(VALUES_AT + 4 * at);
                Ok(Some(Outcome::Done([value(0)?, value(1)?, value(2)?])))
            }
            _ => {
                let room = Self::BYTES - TEXT_AT;
                let bytes = u64::from(self.u32(4)?).min(room);
                let mut text = vec![0; bytes as usize];
                self.memory.read(self.offset + TEXT_AT, &mut text)?;
                Ok(Some(Outcome::Refused(String::from_utf8_lossy(&text).into_owned())))
            }
        }
    }

    fn u32(&self, at: u64) -> Result<u32, RegionError> {
        let mut bytes = [0; 4];
        self.memory.read(self.offset + at, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}
