//! The worker's side: one thread writes submissions and reads ends.

use super::daemon_side::ring_doorbell;
use super::{
    AdaptiveSpin, CLOSED, DAEMON_SLEEPS, ENDED, READ, RING_RECORD_BYTES, RecordError, RingEnd,
    RingMemory, RingPlace, SUBMITTED, TAKEN, WORKER_SLEEPS,
};
use crate::RegionError;
use std::time::{Duration, Instant};

/// A worker's ring.
#[derive(Debug)]
pub struct WorkerRing<M> {
    memory: M,
    place: RingPlace,
    written: u32,
    read: u32,
}

impl<M: RingMemory> WorkerRing<M> {
    /// The side of a ring whose place was tested; makes its words ready for the daemon.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn begin_ring(memory: M, place: RingPlace) -> Result<Self, RegionError> {
        let first = place.first;
        for word in [SUBMITTED, READ, TAKEN, ENDED] {
            memory.write_word(place.word_at(word), first)?;
        }
        for word in [WORKER_SLEEPS, DAEMON_SLEEPS, CLOSED] {
            memory.write_word(place.word_at(word), 0)?;
        }
        Ok(Self { memory, place, written: first, read: first })
    }

    /// The next submission's number; none while the ring is full. One has room once the end of the
    /// one so many before it was read, so that no end is ever without room.
    pub fn next_number(&self) -> Option<u32> {
        (self.written.wrapping_sub(self.read) < self.place.entries).then_some(self.written)
    }

    /// Submissions whose ends are not read.
    pub fn count_open(&self) -> u32 {
        self.written.wrapping_sub(self.read)
    }

    /// Writes the record of [`WorkerRing::next_number`], and wakes the daemon if it sleeps.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn write_submission(
        &mut self,
        record: &[u8; RING_RECORD_BYTES],
    ) -> Result<(), RegionError> {
        let Self { memory, place, written, .. } = self;
        memory.write_record(place.submission_at(*written), record)?;
        *written = written.wrapping_add(1);
        memory.write_word(place.word_at(SUBMITTED), *written)?;
        self.wake_daemon()
    }

    fn wake_daemon(&self) -> Result<(), RegionError> {
        if self.memory.read_word(self.place.word_at(DAEMON_SLEEPS))? != 0 {
            ring_doorbell(&self.memory, self.place)?;
        }
        Ok(())
    }

    /// Reads the next end, if it is there.
    ///
    /// # Errors
    /// None of a place that was tested; what is read may be no end.
    pub fn read_end(&mut self) -> Result<Option<Result<RingEnd, RecordError>>, RegionError> {
        if self.memory.read_word(self.place.word_at(ENDED))? == self.read {
            return Ok(None);
        }
        let record = self.memory.read_record(self.place.end_at(self.read))?;
        let end = RingEnd::read_record(&record, self.read);
        self.read = self.read.wrapping_add(1);
        self.memory.write_word(self.place.word_at(READ), self.read)?;
        self.wake_daemon()?;
        Ok(Some(end))
    }

    /// Looks for the next end, then sleeps until it may be there, at most `time` in all.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn wait_end(&mut self, spin: &mut AdaptiveSpin, time: Duration) -> Result<(), RegionError> {
        let ended = self.place.word_at(ENDED);
        let began = Instant::now();
        let is_over = || Ok(self.memory.read_word(ended)? != self.read || self.is_closed()?);
        if spin.look_for(is_over)? { Ok(()) } else { self.sleep_until_ended(began, time) }
    }

    /// Sleeps until an end may be there, at most until `time` after `began`.
    fn sleep_until_ended(&self, began: Instant, time: Duration) -> Result<(), RegionError> {
        let ended = self.place.word_at(ENDED);
        let sleeps = self.place.word_at(WORKER_SLEEPS);
        self.memory.write_word(sleeps, 1)?;
        if !self.is_closed()? {
            let time = time.saturating_sub(began.elapsed());
            self.memory.sleep_on_word(ended, self.read, time)?;
        }
        self.memory.write_word(sleeps, 0)
    }

    /// Whether the daemon serves the ring no more.
    ///
    /// # Errors
    /// None of a place that was tested.
    pub fn is_closed(&self) -> Result<bool, RegionError> {
        Ok(self.memory.read_word(self.place.word_at(CLOSED))? != 0)
    }
}
