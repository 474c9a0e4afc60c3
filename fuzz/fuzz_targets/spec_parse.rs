//! Bytes as a codec text: an error, or a codec whose text reads back as itself.
#![no_main]

use kvd_testkit::hostile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    hostile::spec_parse(data);
});
