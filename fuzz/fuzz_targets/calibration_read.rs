//! Bytes as a calibration artefact: an error, or one that is written back the same.
#![no_main]

use kvd_testkit::hostile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    hostile::calibration_read(data);
});
