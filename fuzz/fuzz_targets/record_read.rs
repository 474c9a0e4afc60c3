//! Bytes as a record of the disk tier: refused, or whole; never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    kvd_tier::record::probe_bytes(data);
    kvd_tier::record::probe_unchecked(data);
});
