//! Bytes as records of a ring: refused, or values whose record reads back as the same.
#![no_main]

use kvd_shm::ring::{RingAttend, RingEnd, RingQuery};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((number, bytes)) = data.split_first_chunk::<4>() else { return };
    let number = u32::from_le_bytes(*number);
    if let Some(record) = bytes.first_chunk() {
        let _ = RingAttend::tag_of(record);
        if let Ok(attend) = RingAttend::read_record(record, number) {
            let again = attend.write_record(number);
            // A NaN of a scale is no equal of itself: records are compared.
            let read = RingAttend::read_record(&again, number).expect("its own record");
            assert_eq!(read.write_record(number), again);
        }
        if let Ok(end) = RingEnd::read_record(record, number) {
            let again = end.write_record(number);
            let read = RingEnd::read_record(&again, number).expect("its own record");
            assert_eq!(read.write_record(number), again);
        }
    }
    if let Some(entry) = bytes.first_chunk()
        && let Ok(query) = RingQuery::read_entry(entry)
    {
        assert_eq!(RingQuery::read_entry(&query.write_entry()).as_ref(), Ok(&query));
    }
});
