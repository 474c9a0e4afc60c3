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
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const OPTIONS: CudaOptions = CudaOptions {
    arena_bytes: 1 << 20,
    scratch_bytes: 1 << 20,
    staging_bytes: 64 << 10,
    threads: 1,
};

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
            let most = suite::largest_error(text);
            assert!(off < most && lse < most, "{text}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        }
    }
}

#[test]
fn a_handle_that_means_nothing_is_refused_and_the_gpu_goes_on() {
    let Some(mut backend) = backend() else { return };
    let error = backend.open_region(RegionHandle::CudaIpc([0; 64]), 64).unwrap_err();
    assert!(error.to_string().contains("refuses it"), "{error}");
    assert_eq!(backend.failure(), None);
    let off = suite::errors(Box::new(backend), "raw", RopePairing::Half).unwrap().0;
    assert!(off < 1e-5, "{off:.1e}");
}

/// Memory of a real other process: `kernels/gpu/worker.py`, or what `KVD_GPU_WORKER` names.
#[test]
fn memory_of_a_worker_process_is_read_and_written() {
    let Some(mut backend) = backend() else { return };
    let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/gpu/worker.py");
    let script = std::env::var("KVD_GPU_WORKER").unwrap_or(beside.to_owned());
    let mut command = Command::new("python3");
    command.arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut worker = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(worker.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let byte = |at: usize| u8::from_str_radix(&line[2 * at..2 * at + 2], 16).unwrap();
    let handle: [u8; 64] = std::array::from_fn(byte);
    let region = backend.open_region(RegionHandle::CudaIpc(handle), 256).unwrap();
    let mut bytes = [0; 256];
    backend.read_region(region, 0, &mut bytes).unwrap();
    assert!(bytes.iter().copied().eq(0..=255));
    bytes.reverse();
    backend.write_region(region, 0, &bytes).unwrap();
    backend.close_region(region);
    writeln!(worker.stdin.take().unwrap(), "written").unwrap();
    assert!(worker.wait().unwrap().success(), "the worker does not see what was written");
}
