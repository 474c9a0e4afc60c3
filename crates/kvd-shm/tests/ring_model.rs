//! Interleavings of a worker and a daemon on a small ring, under the C11 memory model: a record is
//! seen whole once its number is, no wake-up is lost, and no end is written over one that is not
//! read. A sleep here has no time limit, so that a lost wake-up is a deadlock.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use kvd_shm::RegionError;
use kvd_shm::ring::{
    AdaptiveSpin, RING_RECORD_BYTES, RingEnd, RingEnds, RingIntake, RingMemory, RingPlace,
    WorkerRing,
};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Words of the header, and one word for each record of 256 bytes behind them.
const HEADER_BYTES: u64 = 192;

/// A futex: who sleeps looks at the word under the lock, and who wakes takes it.
struct Futex {
    lock: Mutex<()>,
    woken: Condvar,
}

/// Memory of a ring whose records are one word each: number and content.
struct ModelMemory {
    words: Vec<AtomicU32>,
    records: Vec<AtomicU32>,
    futexes: [Futex; 2],
}

impl ModelMemory {
    fn new(place: RingPlace) -> Self {
        let futex = || Futex { lock: Mutex::new(()), woken: Condvar::new() };
        Self {
            words: (0..HEADER_BYTES / 4).map(|_| AtomicU32::new(0)).collect(),
            records: (0..2 * place.entries).map(|_| AtomicU32::new(u32::MAX)).collect(),
            futexes: [futex(), futex()],
        }
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        &self.words[offset as usize / 4]
    }

    /// The futex of the doorbell, or of the ends.
    fn futex(&self, offset: u64) -> &Futex {
        &self.futexes[usize::from(offset == 132)]
    }

    fn record(&self, offset: u64) -> &AtomicU32 {
        &self.records[(offset - HEADER_BYTES) as usize / RING_RECORD_BYTES]
    }
}

/// The model knows sequentially consistent fences, but no such accesses.
impl RingMemory for ModelMemory {
    fn read_word(&self, offset: u64) -> Result<u32, RegionError> {
        fence(Ordering::SeqCst);
        Ok(self.word(offset).load(Ordering::Acquire))
    }

    fn write_word(&self, offset: u64, value: u32) -> Result<(), RegionError> {
        self.word(offset).store(value, Ordering::Release);
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn wake_word(&self, offset: u64) -> Result<(), RegionError> {
        let Futex { lock, woken } = self.futex(offset);
        let _held = lock.lock().unwrap();
        woken.notify_all();
        Ok(())
    }

    fn sleep_on_word(&self, offset: u64, value: u32, _: Duration) -> Result<(), RegionError> {
        let Futex { lock, woken } = self.futex(offset);
        let held = lock.lock().unwrap();
        if self.word(offset).load(Ordering::SeqCst) == value {
            drop(woken.wait(held).unwrap());
        }
        Ok(())
    }

    fn read_record(&self, offset: u64) -> Result<[u8; RING_RECORD_BYTES], RegionError> {
        let number = self.record(offset).load(Ordering::Relaxed);
        let end = RingEnd {
            tag: number.into(),
            submission: number,
            outcome: kvd_shm::CallOutcome::Done([0; 3]),
        };
        Ok(end.write_record(number))
    }

    fn write_record(
        &self,
        offset: u64,
        record: &[u8; RING_RECORD_BYTES],
    ) -> Result<(), RegionError> {
        let number = u32::from_le_bytes([record[4], record[5], record[6], record[7]]);
        self.record(offset).store(number, Ordering::Relaxed);
        Ok(())
    }
}

/// A record of that number.
fn numbered(number: u32) -> [u8; RING_RECORD_BYTES] {
    let mut record = [0; RING_RECORD_BYTES];
    record[4..8].copy_from_slice(&number.to_le_bytes());
    record
}

/// So many records through a ring of so many, in every order of both sides' steps with at most so
/// many preemptions.
fn check_ring(entries: u32, records: u32, preemptions: usize) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        // Numbers wrap on the way.
        let place = RingPlace { offset: 0, entries, first: u32::MAX };
        let memory = Arc::new(ModelMemory::new(place));
        let shared = |memory: &Arc<ModelMemory>| SharedMemory(Arc::clone(memory));
        let mut worker = WorkerRing::begin_ring(shared(&memory), place).unwrap();
        let mut intake = RingIntake::over_memory(shared(&memory), place);
        let mut ends = RingEnds::over_memory(shared(&memory), place);
        let daemon = loom::thread::spawn(move || {
            for at in 0..records {
                let taken = loop {
                    match intake.take_next().unwrap() {
                        Some(taken) => break taken,
                        None => intake.sleep_until_rung(Duration::MAX, || false).unwrap(),
                    }
                };
                let number = place.first.wrapping_add(at);
                assert_eq!(taken.bytes[4..8], number.to_le_bytes(), "a record that is whole");
                let outcome = kvd_shm::CallOutcome::Done([0; 3]);
                let end = RingEnd { tag: 0, submission: number, outcome };
                ends.write_end(&end).unwrap();
            }
        });
        let (mut sent, mut read) = (0, 0);
        while read < records {
            if sent < records
                && let Some(number) = worker.next_number()
            {
                worker.write_submission(&numbered(number)).unwrap();
                sent += 1;
                continue;
            }
            match worker.read_end().unwrap() {
                Some(end) => {
                    let number = place.first.wrapping_add(read);
                    assert_eq!(end.unwrap().submission, number, "an end that is whole");
                    read += 1;
                }
                None => {
                    let spin = &mut AdaptiveSpin::up_to(Duration::ZERO);
                    worker.wait_end(spin, Duration::MAX).unwrap();
                }
            }
        }
        daemon.join().unwrap();
    });
}

/// Memory that both sides hold: loom has an `Arc` of its own.
struct SharedMemory(Arc<ModelMemory>);

impl RingMemory for SharedMemory {
    fn read_word(&self, offset: u64) -> Result<u32, RegionError> {
        self.0.read_word(offset)
    }

    fn write_word(&self, offset: u64, value: u32) -> Result<(), RegionError> {
        self.0.write_word(offset, value)
    }

    fn wake_word(&self, offset: u64) -> Result<(), RegionError> {
        self.0.wake_word(offset)
    }

    fn sleep_on_word(&self, offset: u64, value: u32, time: Duration) -> Result<(), RegionError> {
        self.0.sleep_on_word(offset, value, time)
    }

    fn read_record(&self, offset: u64) -> Result<[u8; RING_RECORD_BYTES], RegionError> {
        self.0.read_record(offset)
    }

    fn write_record(
        &self,
        offset: u64,
        record: &[u8; RING_RECORD_BYTES],
    ) -> Result<(), RegionError> {
        self.0.write_record(offset, record)
    }
}

#[test]
fn a_ring_of_one_record_loses_nothing() {
    check_ring(1, 2, 2);
}

#[test]
fn a_ring_of_two_records_loses_nothing() {
    check_ring(2, 2, 2);
}
