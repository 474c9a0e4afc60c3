//! The real NVRTC compiles kernels from the embedded headers; it needs no GPU. Where the library is
//! not found the tests say `SKIP nvrtc:` and why; `KVD_REQUIRE_NVRTC=1` makes that a failure.
//!
//! ```text
//! pip install --no-deps -t target/nvrtc nvidia-cuda-nvrtc==13.0.88
//! LD_LIBRARY_PATH=target/nvrtc/nvidia/cu13/lib cargo nextest run -p kvd-cuda --test nvrtc
//! ```
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use kvd_cuda::{
    CompileError, KernelCompiler, KernelSource, Nvrtc, SideKernel, kernel_headers, kernel_source,
    tensor_source,
};

fn compiler() -> Option<Nvrtc> {
    match Nvrtc::open_library() {
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
    assert!(compiler.compiler_version().starts_with("nvrtc 1"), "{}", compiler.compiler_version());
    let text = kernel_source(SideKernel::Vq, SideKernel::F16, false);
    for target in ["sm_80", "sm_90"] {
        let begun = std::time::Instant::now();
        let source = KernelSource { text: &text, headers: kernel_headers(), target };
        let image = compiler.compile_kernel(source).unwrap();
        eprintln!("{target}: {} bytes in {:.1} s", image.len(), begun.elapsed().as_secs_f64());
        assert_eq!(&image[..4], b"\x7FELF", "an image for one GPU");
        for name in ["kvd_attend_vq_f16_1", "kvd_attend_vq_f16_4", "kvd_attend_vq_f16_8"] {
            let found = image.windows(name.len()).any(|bytes| bytes == name.as_bytes());
            assert!(found, "{target}: no {name}");
        }
    }
}

/// Every side once as keys and once as values, none beside itself; grids have Huffman codes.
fn pairs() -> impl Iterator<Item = (SideKernel, SideKernel, bool)> {
    let sides = || SideKernel::ALL.into_iter().filter(|kernel| *kernel != SideKernel::Grid);
    let values = sides().cycle().skip(3);
    let fixed = sides().zip(values).map(|(keys, values)| (keys, values, false));
    fixed.chain([
        (SideKernel::Grid, SideKernel::Vq, true),
        (SideKernel::Fp8, SideKernel::Grid, true),
    ])
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
        let image =
            compiler.compile_kernel(source).unwrap_or_else(|error| panic!("{text}: {error}"));
        let stage = if huffman { "huffman_" } else { "" };
        let name = format!("kvd_attend_{stage}{}_{}_{rows}", keys.name(), values.name());
        eprintln!("{name}: {} bytes in {:.1} s", image.len(), begun.elapsed().as_secs_f64());
        let found = image.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        assert!(found, "no {name} of {text}");
    }
}

/// Bytes of the largest stack frame of an image's kernels, by its `.nv.info`: records of a format,
/// a kind and a size, then a kernel's number and its least stack, where the kind is that.
fn frame_bytes(image: &[u8]) -> u32 {
    let number = |at: usize, bytes: usize| {
        image[at..at + bytes].iter().rev().fold(0, |all, byte| all << 8 | usize::from(*byte))
    };
    let (sections, size, count) = (number(0x28, 8), number(0x3A, 2), number(0x3C, 2));
    let names = sections + number(0x3E, 2) * size;
    let name = |section: usize| number(names + 24, 8) + number(section, 4);
    let headers = (0..count).map(|index| sections + index * size);
    let info = headers.filter(|section| image[name(*section)..].starts_with(b".nv.info\0"));
    let mut frames = Vec::new();
    for section in info {
        let mut at = number(section + 24, 8);
        let end = at + number(section + 32, 8);
        while at < end {
            let [format, kind] = [image[at], image[at + 1]];
            let bytes = if format == 4 { number(at + 2, 2) } else { 0 };
            if (format, kind) == (4, 0x12) {
                frames.push(number(at + 8, 4) as u32);
            }
            at += 4 + bytes;
        }
    }
    frames.into_iter().max().expect("kernels with a stack")
}

#[test]
fn mixed_pairs_are_compiled_with_products_on_tensor_cores_and_without_spills() {
    let Some(mut compiler) = compiler() else { return };
    // For codes that are not plain, two words stand on the stack, which no full tile reads. One
    // number of query rows each: three take minutes where the processor is shared.
    for (keys, values, target, most) in [
        (SideKernel::Bf16, SideKernel::Hybrid, "sm_80", 0),
        (SideKernel::Polar, SideKernel::Vq, "sm_90", 0),
        (SideKernel::Polar, SideKernel::F16, "sm_90", 0),
        (SideKernel::Vq, SideKernel::Uniform, "sm_90", 8),
    ] {
        let text = tensor_source(keys, values, false).expect("both have such products");
        let text = text.replace("_ROWS(", "(").replace(")\n", ", 4)\n");
        let source = KernelSource { text: &text, headers: kernel_headers(), target };
        let begun = std::time::Instant::now();
        let image =
            compiler.compile_kernel(source).unwrap_or_else(|error| panic!("{text}: {error}"));
        let name = format!("kvd_attend_tensor_{}_{}_4", keys.name(), values.name());
        eprintln!("{name}, {target}: {:.1} s", begun.elapsed().as_secs_f64());
        assert!(image.windows(name.len()).any(|bytes| bytes == name.as_bytes()), "no {name}");
        let frame = frame_bytes(&image);
        assert!(frame <= most, "{text}: {frame} bytes on the stack");
    }
    let none = [(SideKernel::Symmetric, SideKernel::Vq), (SideKernel::Vq, SideKernel::Lloyd)];
    assert!(none.iter().all(|(keys, values)| tensor_source(*keys, *values, false).is_none()));
}

#[test]
fn what_cannot_be_compiled_is_an_error_with_the_compilers_words() {
    let Some(mut compiler) = compiler() else { return };
    let mut compile = |text: &str, target: &str| {
        compiler
            .compile_kernel(KernelSource { text, headers: kernel_headers(), target })
            .unwrap_err()
    };
    let CompileError::Rejected(log) = compile("KVD_ATTEND_ROWS(a, b, c)", "sm_90") else {
        panic!("rejected")
    };
    assert!(log.contains("kvd.cu(1): error"), "{log}");
    let unknown = compile("", "sm_1");
    assert!(matches!(unknown, CompileError::Failed { call: "nvrtcCompileProgram", .. }));
}
