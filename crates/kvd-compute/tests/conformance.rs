//! The conformance suite on the CPU backend.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use kvd_compute::{Backend, CpuBackend, CpuOptions, Precision};
use kvd_testkit::conformance::BackendUnderTest;

struct Cpu(CpuBackend);

impl BackendUnderTest for Cpu {
    fn open_backend(_: usize) -> Option<Self> {
        let options = CpuOptions { arena_bytes: 1 << 20, prefault: false, threads: 1 };
        let mut backend = CpuBackend::new(options).unwrap();
        // The allowance of kernels that round is tested beside them.
        backend.set_precision(Precision::Single);
        Some(Self(backend))
    }

    fn backend_mut(&mut self) -> &mut dyn Backend {
        &mut self.0
    }

    fn largest_error(_: &str) -> f64 {
        // f32 sums of products whose roundings are below 1e-7 each.
        1e-5
    }
}

kvd_testkit::mount_conformance!(Cpu);
