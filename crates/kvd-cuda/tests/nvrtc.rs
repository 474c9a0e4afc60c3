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

/// Sides with codes of fixed width.
const SIDES: [Kernel; 11] = [
    Kernel::F32,
    Kernel::F16,
    Kernel::Bf16,
    Kernel::Fp8,
    Kernel::Uniform,
    Kernel::Symmetric,
    Kernel::Hybrid,
    Kernel::Vq,
    Kernel::Polar,
    Kernel::Lloyd,
    Kernel::BitAlloc,
];

/// Every side once as keys and once as values, none beside itself; grids have Huffman codes.
fn pairs() -> impl Iterator<Item = (Kernel, Kernel, bool)> {
    let values = SIDES.into_iter().cycle().skip(3);
    let fixed = SIDES.into_iter().zip(values).map(|(keys, values)| (keys, values, false));
    fixed.chain([(Kernel::Grid, Kernel::Vq, true), (Kernel::Fp8, Kernel::Grid, true)])
}

#[test]
fn every_side_is_compiled_as_keys_and_as_values() {
    let Some(mut compiler) = compiler() else { return };
    // A pair is three kernels, which take minutes for all pairs: they take turns, and of those with
    // Huffman codes, which take ten times as long, it is the shortest.
    for ((keys, values, huffman), turn) in pairs().zip([4, 8, 1].into_iter().cycle()) {
        let rows = if huffman { 1 } else { turn };
        let text = kernel_source(keys, values, huffman);
        let (head, call) = text.split_once("_ROWS(").expect("a kernel for each number of rows");
        let call = call.trim_end().trim_end_matches(')');
        let text = format!("{head}({call}, {rows})\n");
        let source = KernelSource { text: &text, headers: kernel_headers(), target: "sm_90" };
        let begun = std::time::Instant::now();
        let image = compiler.compile(source).unwrap_or_else(|error| panic!("{text}: {error}"));
        let stage = if huffman { "huffman_" } else { "" };
        let name = format!("kvd_attend_{stage}{}_{}_{rows}", keys.name(), values.name());
        eprintln!("{name}: {} bytes in {:.1} s", image.len(), begun.elapsed().as_secs_f64());
        let found = image.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        assert!(found, "no {name} of {text}");
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
