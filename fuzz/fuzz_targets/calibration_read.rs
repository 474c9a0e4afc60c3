//! Bytes as a calibration artefact: an error, or one that is written back the same.
#![no_main]

#[allow(dead_code, reason = "each target uses its own part")]
#[path = "../../crates/kvd-codec/tests/common/hostile.rs"]
mod hostile;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    hostile::calibration_read(data);
});
