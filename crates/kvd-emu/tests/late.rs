//! Kernels that are compiled when a model is registered, for pairs that have none ahead of time, or
//! none that reads their pages: some of them, from the very text that is compiled then, answer as
//! f64 attention over the decoded pages does. Those on CUDA cores are launched with the tables of
//! the kernel that all such pairs share, those with products on tensor cores with their own.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::compare::{layout, value};
use common::late::TENSOR;
use common::reference::{check, expected};
use common::run::{kernels, run_late, run_tensor};
use common::{Ask, Stored, geometry, noise};
use kvd_core::DType;
use kvd_cuda::{SideKernel, kernel_source, tensor_source};
use kvd_emu::{ThreadOrder, is_available};

/// The late kernels that the emulator has compiled.
const LATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/emu/late");

/// Every file there: keys, values, whether they hold Huffman codes, and codecs of such pages.
const PAIRS: [(SideKernel, SideKernel, bool, &[&str]); 7] = [
    (SideKernel::F16, SideKernel::Uniform, false, &["k=f16; v=uniform(b=4,g=32,axis=token)"]),
    (SideKernel::Uniform, SideKernel::F16, false, &["k=uniform(b=4,g=32,axis=channel); v=f16"]),
    (
        SideKernel::Symmetric,
        SideKernel::Symmetric,
        false,
        &[
            "k=uniform(b=3,axis=token,mode=sym); v=uniform(b=4,g=32,axis=token,mode=sym)",
            "k=uniform(b=2,axis=channel,g=7,mode=sym); v=uniform(rel=0.2,axis=block,mode=sym)",
        ],
    ),
    (
        SideKernel::Vq,
        SideKernel::Uniform,
        false,
        &[
            "k=vq(d=2,b=8); v=uniform(b=2,g=32,axis=token)",
            "k=vq(d=4,b=6,stages=2); v=mean+gain/uniform(b=5,axis=channel)",
        ],
    ),
    (SideKernel::Polar, SideKernel::Lloyd, false, &["k=polar(a=4,r=2,g=64); v=rotate/lloyd(b=4)"]),
    // One that there is ahead of time, which takes no tile and no warp of two scales.
    (
        SideKernel::Uniform,
        SideKernel::Uniform,
        false,
        &[
            "k=uniform(b=4,g=48,axis=channel); v=uniform(b=4,g=32,axis=token)",
            "k=uniform(b=5,axis=token); v=uniform(b=2,g=20,axis=token)",
        ],
    ),
    (SideKernel::Fp8, SideKernel::Fp8, true, &["k=fp8/huffman; v=hadamard/fp8/huffman"]),
];

/// A pair's part of the kernels' names.
fn name(keys: SideKernel, values: SideKernel, (huffman, tensor): (bool, bool)) -> String {
    let stage = if huffman { "huffman_" } else { "" };
    let products = match () {
        () if tensor => "tensor_",
        () if !huffman && keys.pairs_with(values) => "plain_",
        () => "",
    };
    format!("{stage}{products}{}_{}", keys.name(), values.name())
}

/// Every file there, and its text.
fn sources() -> Vec<(String, String)> {
    let on_cuda_cores = PAIRS.map(|(keys, values, huffman, _)| {
        (name(keys, values, (huffman, false)), kernel_source(keys, values, huffman))
    });
    let on_tensor_cores = TENSOR.map(|(keys, values, huffman, ..)| {
        let text = tensor_source(keys, values, huffman).unwrap();
        (name(keys, values, (huffman, true)), text)
    });
    on_cuda_cores.into_iter().chain(on_tensor_cores).collect()
}

#[test]
fn every_late_kernel_is_compiled_in_the_emulator() {
    let mut names: Vec<String> = Vec::new();
    for (name, wanted) in sources() {
        let name = format!("{name}.cu");
        let text = std::fs::read_to_string(format!("{LATE}/{name}")).unwrap();
        assert_eq!(text, wanted, "{name}");
        names.push(name);
    }
    for entry in std::fs::read_dir(LATE).unwrap() {
        let file = entry.unwrap().file_name().into_string().unwrap();
        assert!(names.contains(&file), "{file} is not tested");
    }
}

/// Pages of a codec, of every shape, answer in `late`, the pair's own kernel on CUDA cores or on
/// tensor cores; on these the kernel for all pairs where a head size is none of those that
/// `takes` names.
fn conforms(late: &str, codec: &str, takes: impl Fn(u32) -> bool) {
    let tensor = late.contains("tensor_");
    let mut shape = 0;
    for (dim_k, dim_v) in [(64, 64), (128, 128), (48, 80)] {
        for (pages, window) in [(&[64, 45][..], 3), (&[96, 96, 33], 0), (&[1], 0)] {
            let geometry = geometry(dim_k, dim_v, DType::F16);
            let stored = Stored::new(&geometry, codec, &layout(pages, window), value);
            assert!(stored.headers.values().all(|header| !header.fallback), "{codec}");
            for (turn, rows) in (shape..).zip([1, 4, 8]) {
                let plan = Ask::last(rows, stored.tokens).plan(&stored, |i| noise(77_777 + i));
                // Other layouts and head sizes meet other orders and splits with the same rows.
                let (order, parts) =
                    (ThreadOrder::EACH[turn % 3], [1, 100, 2][(turn + shape / 3) % 3]);
                let answer = match tensor {
                    true => run_tensor(&stored, &plan, parts, order),
                    false => run_late(&stored, &plan, (parts, late), order),
                };
                let answer = answer.unwrap();
                let what = format!("{codec}, {dim_k} channels, {pages:?}, {rows} rows, {order:?}");
                check(&answer, &expected(&stored, &plan), &what);
                // Windows are rows as they came.
                let mut ran = kernels();
                ran.retain(|name| !name.starts_with("kvd_attend_f16_f16"));
                let stage = if late.starts_with("huffman_") { "huffman_" } else { "" };
                let wanted = match takes(geometry.head_dim_k) {
                    true => format!("kvd_attend_{late}_{rows}"),
                    false => format!("kvd_attend_{stage}any_any_8"),
                };
                assert_eq!(ran, [wanted], "{what}");
            }
            shape += 1;
        }
    }
}

#[test]
fn pairs_that_are_compiled_late_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    for (keys, values, huffman, codecs) in PAIRS {
        for codec in codecs {
            conforms(&name(keys, values, (huffman, false)), codec, |_| true);
        }
    }
}

#[test]
fn pairs_that_are_compiled_late_for_tensor_cores_answer_as_the_reference() {
    if !is_available() {
        return;
    }
    for (keys, values, huffman, takes_all, codecs) in TENSOR {
        for codec in codecs {
            let late = name(keys, values, (huffman, true));
            conforms(&late, codec, |dim| takes_all || dim != 48);
        }
    }
}

#[test]
fn pairs_of_other_shapes_stay_on_cuda_cores() {
    if !is_available() {
        return;
    }
    // Two stages; scales of half of a warp's channels; a tile of two scales; sides without such
    // products.
    for codec in [
        "k=vq(d=4,b=6,stages=2); v=uniform(b=2,axis=token)",
        "k=vq(d=4,b=8); v=uniform(b=2,g=8,axis=token)",
        "k=uniform(b=2,g=24,axis=channel); v=vq(d=4,b=8)",
        "k=uniform(b=2,axis=token,mode=sym); v=vq(d=4,b=8)",
        "k=f32; v=uniform(b=2,axis=token)",
        "k=vq(d=4,b=8); v=rotate/lloyd(b=3)",
    ] {
        conforms("tensor_", codec, |_| false);
    }
}
