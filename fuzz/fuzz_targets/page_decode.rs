//! Bytes as a page of one of a few codecs, checksum not believed: errors or rows, never a panic.
#![no_main]

use kvd_testkit::hostile;
use libfuzzer_sys::fuzz_target;

static SUBJECTS: std::sync::LazyLock<Vec<hostile::HostileSubject>> =
    std::sync::LazyLock::new(hostile::make_subjects);

fuzz_target!(|data: &[u8]| {
    hostile::page_decode(&SUBJECTS, data);
});
