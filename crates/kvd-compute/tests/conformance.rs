//! The conformance suite on the CPU backend.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod suite;

use kvd_compute::{CpuBackend, CpuOptions, Precision};
use kvd_core::RopePairing;

#[test]
fn attention_over_pages_is_attention_over_what_they_decode_to() {
    for text in suite::codecs() {
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            let options = CpuOptions { arena_bytes: 1 << 20, prefault: false, threads: 1 };
            let mut backend = CpuBackend::new(options).unwrap();
            // What kernels that round are allowed is tested beside them.
            backend.set_precision(Precision::Single);
            let errors = suite::errors(Box::new(backend), text, pairing);
            let (off, lse) = errors.expect("the processor serves every codec");
            // f32 sums of products whose roundings are below 1e-7 each.
            assert!(off < 1e-5 && lse < 1e-5, "{text}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        }
    }
}
