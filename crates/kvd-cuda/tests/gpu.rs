//! Conformance on a GPU, with the kernels compiled for it: the suite of every backend. Without a
//! GPU or kernels each test says `SKIP gpu:` and why; `KVD_REQUIRE_GPU=1` makes that a failure.
//!
//! ```text
//! cargo xtask kernels
//! KVD_REQUIRE_GPU=1 cargo test -p kvd-cuda --features embed-kernels --test gpu -- --nocapture
//! ```
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test may fail, and says a skip")]

#[path = "../../kvd-compute/tests/suite/mod.rs"]
mod suite;

use kvd_compute::{Backend, RegionHandle};
use kvd_core::RopePairing;
use kvd_cuda::{CudaBackend, CudaDriver, CudaOptions, Gpu, KERNELS, devices};

const OPTIONS: CudaOptions =
    CudaOptions { arena_bytes: 1 << 20, scratch_bytes: 1 << 20, threads: 1 };

/// The first GPU, or why there is none to test on.
fn find() -> Result<Gpu, String> {
    let gpu = devices().map_err(|error| error.to_string())?.remove(0);
    if KERNELS.is_empty() {
        let name = &gpu.limits.name;
        return Err(format!("{name} is there, but the feature embed-kernels is off"));
    }
    Ok(gpu)
}

/// A backend on it; none where the test is skipped.
fn backend() -> Option<CudaBackend> {
    match find() {
        Ok(gpu) => {
            let driver = Box::new(CudaDriver::open(gpu).unwrap());
            Some(CudaBackend::open(driver, KERNELS, OPTIONS).unwrap())
        }
        Err(reason) => {
            let required = std::env::var_os("KVD_REQUIRE_GPU").is_some();
            assert!(!required, "KVD_REQUIRE_GPU is set, but: {reason}");
            eprintln!("SKIP gpu: {reason}");
            None
        }
    }
}

#[test]
fn attention_over_pages_is_attention_over_what_they_decode_to() {
    for text in suite::codecs() {
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            let Some(backend) = backend() else { return };
            let answer = suite::errors(Box::new(backend), text, pairing);
            let (off, lse) = answer.unwrap_or_else(|| panic!("{text} is not served"));
            // As on the CPU: f32 sums of products whose roundings are below 1e-7 each.
            assert!(off < 1e-5 && lse < 1e-5, "{text}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        }
    }
}

#[test]
fn a_handle_that_means_nothing_is_refused_and_the_gpu_goes_on() {
    let Some(mut backend) = backend() else { return };
    let error = backend.open_region(RegionHandle::CudaIpc([0; 64]), 64).unwrap_err();
    assert!(error.to_string().contains("refuses the memory"), "{error}");
    assert_eq!(backend.failure(), None);
    let off = suite::errors(Box::new(backend), "raw", RopePairing::Half).unwrap().0;
    assert!(off < 1e-5, "{off:.1e}");
}
