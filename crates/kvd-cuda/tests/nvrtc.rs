//! The real NVRTC compiles kernels from the embedded headers; it needs no GPU. Where the library is
//! not found the tests say `SKIP nvrtc:` and why; `KVD_REQUIRE_NVRTC=1` makes that a failure.
//!
//! ```text
//! pip install --no-deps -t target/nvrtc nvidia-cuda-nvrtc==13.0.88
//! LD_LIBRARY_PATH=target/nvrtc/nvidia/cu13/lib cargo nextest run -p kvd-cuda --test nvrtc
//! ```
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use kvd_cuda::{
    CompileError, Kernel, KernelCompiler, KernelSource, Nvrtc, kernel_headers, kernel_source,
};

fn compiler() -> Option<Nvrtc> {
    match Nvrtc::open() {
        Ok(compiler) => Some(compiler),
        Err(reason) => {
            let required = std::env::var_os("KVD_REQUIRE_NVRTC").is_some();
            assert!(!required, "KVD_REQUIRE_NVRTC is set, but: {reason}");
            eprintln!("SKIP nvrtc: {reason}");
            None
        }
    }
}

#[test]
fn a_pair_without_a_kernel_of_its_own_is_compiled_for_ampere_and_hopper() {
    let Some(mut compiler) = compiler() else { return };
    assert!(compiler.version().starts_with("nvrtc 1"), "{}", compiler.version());
    let text = kernel_source(Kernel::Vq, Kernel::F16, false);
    for target in ["sm_80", "sm_90"] {
        let begun = std::time::Instant::now();
        let source = KernelSource { text: &text, headers: kernel_headers(), target };
        let image = compiler.compile(source).unwrap();
        eprintln!("{target}: {} bytes in {:.1} s", image.len(), begun.elapsed().as_secs_f64());
        assert_eq!(&image[..4], b"\x7FELF", "an image for one GPU");
        for name in ["kvd_attend_vq_f16_1", "kvd_attend_vq_f16_4", "kvd_attend_vq_f16_8"] {
            let found = image.windows(name.len()).any(|bytes| bytes == name.as_bytes());
            assert!(found, "{target}: no {name}");
        }
    }
}

#[test]
fn what_cannot_be_compiled_is_an_error_with_the_compilers_words() {
    let Some(mut compiler) = compiler() else { return };
    let mut compile = |text: &str, target: &str| {
        compiler.compile(KernelSource { text, headers: kernel_headers(), target }).unwrap_err()
    };
    let CompileError::Rejected(log) = compile("KVD_ATTEND_ROWS(a, b, c)", "sm_90") else {
        panic!("rejected")
    };
    assert!(log.contains("kvd.cu(1): error"), "{log}");
    let unknown = compile("", "sm_1");
    assert!(matches!(unknown, CompileError::Failed { call: "nvrtcCompileProgram", .. }));
}
