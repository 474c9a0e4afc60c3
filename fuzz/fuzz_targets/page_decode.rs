//! Bytes as a page of one of a few codecs, checksum not believed: errors or rows, never a panic.
#![no_main]

#[allow(dead_code, reason = "each target uses its own part")]
#[path = "../../crates/kvd-codec/tests/common/hostile.rs"]
mod hostile;

use libfuzzer_sys::fuzz_target;

static SUBJECTS: std::sync::LazyLock<Vec<hostile::Subject>> =
    std::sync::LazyLock::new(hostile::subjects);

fuzz_target!(|data: &[u8]| {
    hostile::page_decode(&SUBJECTS, data);
});
