//! Bytes as a codec text: an error, or a codec whose text reads back as itself.
#![no_main]

#[allow(dead_code, reason = "each target uses its own part")]
#[path = "../../crates/kvd-codec/tests/common/hostile.rs"]
mod hostile;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    hostile::spec_parse(data);
});
