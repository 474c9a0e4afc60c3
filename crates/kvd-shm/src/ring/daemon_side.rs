//! The daemon's side: one thread takes submissions, any thread writes ends.

use super::{
    CLOSED, DAEMON_SLEEPS, DOORBELL, ENDED, READ, RING_RECORD_BYTES, RingEnd, RingError,
    RingMemory, RingPlace, SUBMITTED, TAKEN, WORKER_SLEEPS,
};
use crate::RegionError;
use std::time::Duration;

/// Takes submissions, each once it is sure to have room for its end.
#[derive(Debug)]
pub struct RingIntake<M> {
    memory: M,
    place: RingPlace,
    taken: u32,
}

/// A submission as it was when it was taken.
#[derive(Clone, Copy, Debug)]
pub struct TakenRecord {
    /// Number that it has by its place.
    pub number: u32,
    /// Its bytes.
    pub bytes: [u8; RING_RECORD_BYTES],
}

impl<M: RingMemory> RingIntake<M> {
    /// The side of a ring whose place was tested.
    pub fn over_memory(memory: M, place: RingPlace) -> Self {
        Self { memory, place, taken: place.first }
    }

    /// Takes the next submission; none where none is written, or so many ends are not read that
    /// there would be no room for its own.
    ///
    /// # Errors
    /// [`RingError::Broken`] where the worker's counters cannot be.
    pub fn take_next(&mut self) -> Result<Option<TakenRecord>, RingError> {
        let Self { memory, place, taken } = self;
        let (number, entries) = (*taken, place.entries);
        let written = memory.read_word(place.word_at(SUBMITTED))?;
        let read = memory.read_word(place.word_at(READ))?;
        let [ahead, unread] = [written.wrapping_sub(number), number.wrapping_sub(read)];
        if ahead > entries || unread > entries {
            return Err(RingError::Broken { written, read, taken: number, entries });
        }
        if ahead == 0 || unread == entries {
            return Ok(None);
        }
        let bytes = memory.read_record(place.submission_at(number))?;
        *taken = number.wrapping_add(1);
        memory.write_word(place.word_at(TAKEN), *taken)?;
        Ok(Some(TakenRecord { number, bytes }))
    }

    /// Sleeps at most `time`, until the worker has written or read something that
    /// [`RingIntake::take_next`] did not see, or somebody rings by [`RingIntake::ring_doorbell`].
    /// `is_due` is asked once the worker can see that the daemon sleeps.
    ///
    /// # Errors
    /// [`RingError::Broken`].
    pub fn sleep_until_rung(
        &mut self,
        time: Duration,
        is_due: impl FnOnce() -> bool,
    ) -> Result<(), RingError> {
        let doorbell = self.place.word_at(DOORBELL);
        let rung = self.memory.read_word(doorbell)?;
        self.memory.write_word(self.place.word_at(DAEMON_SLEEPS), 1)?;
        if !self.can_take()? && !is_due() {
            self.memory.sleep_on_word(doorbell, rung, time)?;
        }
        Ok(self.memory.write_word(self.place.word_at(DAEMON_SLEEPS), 0)?)
    }

    /// Whether [`RingIntake::take_next`] would take one.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn can_take(&self) -> Result<bool, RegionError> {
        let written = self.memory.read_word(self.place.word_at(SUBMITTED))?;
        let read = self.memory.read_word(self.place.word_at(READ))?;
        Ok(written != self.taken && self.taken.wrapping_sub(read) != self.place.entries)
    }
}

/// Rings the daemon's own doorbell.
///
/// # Errors
/// Past the memory.
pub(super) fn ring_doorbell(memory: &impl RingMemory, place: RingPlace) -> Result<(), RegionError> {
    let doorbell = place.word_at(DOORBELL);
    let rung = memory.read_word(doorbell)?;
    memory.write_word(doorbell, rung.wrapping_add(1))?;
    memory.wake_word(doorbell)
}

/// Writes ends. It is behind a lock where several threads do.
#[derive(Debug)]
pub struct RingEnds<M> {
    memory: M,
    place: RingPlace,
    written: u32,
}

impl<M: RingMemory> RingEnds<M> {
    /// The side of a ring whose place was tested.
    pub fn over_memory(memory: M, place: RingPlace) -> Self {
        Self { memory, place, written: place.first }
    }

    /// Writes the end of a submission that was taken, and wakes the worker if it sleeps. There is
    /// room: a submission is not taken before.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn write_end(&mut self, end: &RingEnd) -> Result<(), RegionError> {
        let Self { memory, place, written } = self;
        memory.write_record(place.end_at(*written), &end.write_record(*written))?;
        *written = written.wrapping_add(1);
        memory.write_word(place.word_at(ENDED), *written)?;
        if memory.read_word(place.word_at(WORKER_SLEEPS))? != 0 {
            memory.wake_word(place.word_at(ENDED))?;
        }
        Ok(())
    }

    /// Wakes the thread that takes submissions.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn wake_intake(&self) -> Result<(), RegionError> {
        ring_doorbell(&self.memory, self.place)
    }

    /// Says that the ring is served no more.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn close_ring(&mut self) -> Result<(), RegionError> {
        self.memory.write_word(self.place.word_at(CLOSED), 1)?;
        self.memory.wake_word(self.place.word_at(ENDED))
    }
}
