//! The conformance suite on the CPU backend.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod suite;

use kvd_compute::{CpuBackend, CpuOptions, Precision};
use kvd_core::RopePairing;

fn backend() -> CpuBackend {
    let options = CpuOptions { arena_bytes: 1 << 20, prefault: false, threads: 1 };
    let mut backend = CpuBackend::new(options).unwrap();
    // What kernels that round are allowed is tested beside them.
    backend.set_precision(Precision::Single);
    backend
}

#[test]
fn attention_over_pages_is_attention_over_what_they_decode_to() {
    for text in suite::codecs() {
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            let errors = suite::errors(&mut backend(), text, pairing);
            let (off, lse) = errors.expect("the processor serves every codec");
            // f32 sums of products whose roundings are below 1e-7 each.
            assert!(off < 1e-5 && lse < 1e-5, "{text}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        }
    }
}

#[test]
fn windows_caps_ranges_and_other_types_are_answered_as_asked() {
    for ask in suite::asks() {
        let errors = suite::errors_of(&mut backend(), &ask);
        let (off, lse) = errors.expect("the processor serves every codec");
        assert!(off < 1e-5 && lse < 1e-5, "{ask:?}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
    }
}

#[test]
fn blocks_that_cross_to_another_backend_answer_as_before() {
    for text in suite::codecs() {
        suite::transfer::check_transfer(&mut backend(), &mut backend(), text);
    }
}
