//! The protocol of rings: every record is seen once and whole, numbers wrap, and nothing that the
//! other side writes is believed.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use kvd_core::DType;
use kvd_shm::ring::{
    AdaptiveSpin, RingAttend, RingEnd, RingEnds, RingError, RingIntake, RingMemory, RingPlace,
    RingQuery, RingRows, WorkerRing,
};
use kvd_shm::{CallOutcome, CallRefusal, RegionMemory};
use std::sync::Arc;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);

/// Records that come through; an interpreter takes minutes for hundreds.
const RECORDS: u64 = if cfg!(miri) { 24 } else { 2000 };

/// From one bit that is changed to the next.
const BIT_STEP: usize = if cfg!(miri) { 61 } else { 1 };

fn ring_place(entries: u32, first: u32) -> RingPlace {
    RingPlace { offset: 64, entries, first }
}

fn memory_of(place: RingPlace) -> Arc<RegionMemory> {
    Arc::new(RegionMemory::create_memory(place.end_offset()).unwrap())
}

fn end_of(tag: u64, submission: u32) -> RingEnd {
    RingEnd { tag, submission, outcome: CallOutcome::Done([tag as u32, 0, 0]) }
}

fn attend() -> RingAttend {
    let rows = |offset| RingRows { offset, token_stride: 1 << 33, head_stride: 7 };
    RingAttend {
        tag: u64::MAX - 1,
        timeout_us: 5,
        model: 1 << 40,
        layer: 3,
        q_heads: 32,
        dtype: DType::F16,
        scale: Some(0.5),
        soft_cap: None,
        per_query_errors: true,
        queries: 2,
        queries_at: 9,
        q: rows(10),
        out: rows(11),
        lse_at: 12,
        query_errors_at: 13,
    }
}

#[test]
fn records_come_through_once_and_in_order_while_numbers_wrap() {
    let place = ring_place(4, u32::MAX - RECORDS as u32 / 20);
    let memory = memory_of(place);
    let mut worker = WorkerRing::begin_ring(memory.clone(), place).unwrap();
    let (intake, ends) =
        (RingIntake::over_memory(memory.clone(), place), RingEnds::over_memory(memory, place));
    let daemon = std::thread::spawn(move || {
        let (mut intake, mut ends) = (intake, ends);
        for tag in 0..RECORDS {
            let taken = loop {
                match intake.take_next().unwrap() {
                    Some(taken) => break taken,
                    None => intake.sleep_until_rung(LONG, || false).unwrap(),
                }
            };
            assert_eq!(taken.number, place.first.wrapping_add(tag as u32));
            let read = RingAttend::read_record(&taken.bytes, taken.number).unwrap();
            assert_eq!(read, RingAttend { tag, ..attend() });
            ends.write_end(&end_of(tag, taken.number)).unwrap();
        }
    });
    let (mut sent, mut read) = (0, 0);
    while read < RECORDS {
        while let Some(number) = worker.next_number().filter(|_| sent < RECORDS) {
            let record = RingAttend { tag: sent, ..attend() }.write_record(number);
            worker.write_submission(&record).unwrap();
            sent += 1;
        }
        while let Some(end) = worker.read_end().unwrap() {
            assert_eq!(end.unwrap(), end_of(read, place.first.wrapping_add(read as u32)));
            read += 1;
        }
        if read < sent {
            worker.wait_end(&mut AdaptiveSpin::up_to(Duration::ZERO), LONG).unwrap();
        }
    }
    daemon.join().unwrap();
    assert_eq!(worker.count_open(), 0);
}

#[test]
fn nothing_is_taken_without_room_for_its_end_and_no_counter_is_believed() {
    let place = ring_place(2, 7);
    let memory = memory_of(place);
    let mut worker = WorkerRing::begin_ring(memory.clone(), place).unwrap();
    let mut intake = RingIntake::over_memory(memory.clone(), place);
    let mut ends = RingEnds::over_memory(memory.clone(), place);
    for number in 7..9 {
        worker.write_submission(&attend().write_record(number)).unwrap();
        let taken = intake.take_next().unwrap().unwrap();
        ends.write_end(&end_of(1, taken.number)).unwrap();
    }
    assert_eq!(worker.next_number(), None, "two ends are to be read");
    // A worker that writes all the same is served when it reads.
    worker.write_submission(&attend().write_record(9)).unwrap();
    assert!(intake.take_next().unwrap().is_none());
    worker.read_end().unwrap().unwrap().unwrap();
    assert_eq!(intake.take_next().unwrap().unwrap().number, 9);
    for (word, value) in [(64, 13), (64, 9), (68, 11), (68, 7)] {
        let before = memory.load_word(64 + word).unwrap();
        memory.store_word(64 + word, value).unwrap();
        let broken = intake.take_next();
        assert!(matches!(broken, Err(RingError::Broken { .. })), "{word} {value}: {broken:?}");
        memory.store_word(64 + word, before).unwrap();
    }
    assert!(intake.take_next().unwrap().is_none());
}

#[test]
fn places_that_no_ring_fits_are_refused() {
    let memory = memory_of(ring_place(4, 0));
    let refused = [
        RingPlace { entries: 0, ..ring_place(4, 0) },
        RingPlace { entries: 3, ..ring_place(4, 0) },
        RingPlace { entries: 1 << 13, ..ring_place(4, 0) },
        RingPlace { offset: 65, ..ring_place(4, 0) },
        RingPlace { offset: 128, ..ring_place(4, 0) },
        RingPlace { offset: !63, ..ring_place(4, 0) },
    ];
    for place in refused {
        assert!(place.check_place(&memory).is_err(), "{place:?}");
    }
    ring_place(4, 0).check_place(&memory).unwrap();
}

#[test]
fn a_record_says_what_was_written_and_every_bit_beside_that_is_refused() {
    let record = attend().write_record(5);
    assert_eq!(RingAttend::read_record(&record, 5), Ok(attend()));
    assert_eq!(RingAttend::tag_of(&record), attend().tag);
    assert!(RingAttend::read_record(&record, 6).unwrap_err().to_string().contains("number 5"));
    // Whichever bit changes, the record is refused or says something else.
    for bit in (0..8 * record.len()).step_by(BIT_STEP) {
        let mut other = record;
        other[bit / 8] ^= 1 << (bit % 8);
        let read = RingAttend::read_record(&other, 5);
        // A soft cap that is not given has no meaning.
        let is_unread = (8 * 60..8 * 64).contains(&bit);
        assert_eq!(read == Ok(attend()), is_unread, "bit {bit}: {read:?}");
        assert!((8 * 136..).contains(&bit) <= read.is_err(), "bit {bit} is reserved");
    }
    let query = RingQuery { sequence: 1 << 50, n_q: 3, start: Some(0), ..RingQuery::default() };
    assert_eq!(RingQuery::read_entry(&query.write_entry()), Ok(query));
    for bit in 8 * 36..8 * 48 {
        let mut other = query.write_entry();
        other[bit / 8] ^= 1 << (bit % 8);
        assert!(RingQuery::read_entry(&other).is_err(), "bit {bit}");
    }
}

#[test]
fn an_end_carries_a_refusal_cut_to_its_room() {
    for length in [0, 216, 217, 500] {
        let (retry_after_ms, id_boot) = (7, 9);
        let refusal = |text| CallRefusal { text, retry_after_ms, id_boot, error_bytes: 0 };
        let outcome = CallOutcome::Refused(refusal("é".repeat(length / 2)));
        let end = RingEnd { tag: 3, submission: 4, outcome };
        let read = RingEnd::read_record(&end.write_record(1), 1).unwrap();
        let outcome = CallOutcome::Refused(refusal("é".repeat(length.min(216) / 2)));
        assert_eq!(read, RingEnd { outcome, ..end });
    }
    let memory = memory_of(ring_place(1, 0));
    memory.write_record(256, &[0xFF; 256]).unwrap();
    let garbage = memory.read_record(256).unwrap();
    assert!(RingEnd::read_record(&garbage, u32::MAX).is_err());
}
