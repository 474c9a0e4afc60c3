//! The text of a kernel for one pair of sides, and the headers that it includes: those that are
//! compiled ahead of time, and the few names of CUDA's own headers that they use.

use super::PairSource;
use crate::abi::SideKernel;
use crate::kernel_choice::KERNELS;
use kvd_core::Side;
use std::sync::OnceLock;
use xxhash_rust::xxh3::Xxh3;

/// `kernels/include/kvd/*.cuh`, by name.
const KVD: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/headers.rs"));

/// Headers that NVRTC does not bring along.
const CUDA: &[(&str, &str)] = &[
    ("cuda_bf16.h", include_str!("include/cuda_bf16.h")),
    ("cuda_fp16.h", include_str!("include/cuda_fp16.h")),
    ("stdint.h", include_str!("include/stdint.h")),
];

/// Kernels that there can be: of pairs with products on tensor cores and on CUDA cores.
pub(super) const SIDES_MAX: usize = 4 * KERNELS * KERNELS;

/// All headers, by the name in quotes that includes them.
pub(super) fn kernel_headers() -> &'static [(&'static str, &'static str)] {
    static HEADERS: OnceLock<Vec<(&str, &str)>> = OnceLock::new();
    HEADERS.get_or_init(|| [KVD, CUDA].concat())
}

/// A hash of all headers.
pub(super) fn headers_hash() -> u128 {
    let mut hash = Xxh3::new();
    for (name, text) in kernel_headers() {
        hash.update(name.as_bytes());
        hash.update(&(text.len() as u64).to_le_bytes());
        hash.update(text.as_bytes());
    }
    hash.digest128()
}

/// The struct of a side whose products are on tensor cores, and its header: as `attend_*.cu` have
/// them.
fn tensor_side(kernel: SideKernel, which: Side) -> (&'static str, String) {
    let (header, name) = (kernel.header_file(), kernel.device_struct());
    match kernel {
        SideKernel::Fp8 if which == Side::Value => ("mma_f16.cuh", "kvd::Fp8Values".to_owned()),
        SideKernel::F16 | SideKernel::Bf16 | SideKernel::Fp8 => {
            ("mma_f16.cuh", format!("kvd::Halves<{name}>"))
        }
        _ => (header, format!("kvd::Tensor<{name}>")),
    }
}

/// The file to compile.
pub(super) fn source_text(sides: PairSource) -> String {
    let kernels = [(sides.keys, Side::Key), (sides.values, Side::Value)];
    let [(key_header, key), (value_header, value)] = match sides.tensor {
        true => kernels.map(|(kernel, which)| tensor_side(kernel, which)),
        false => {
            kernels.map(|(kernel, _)| (kernel.header_file(), kernel.device_struct().to_owned()))
        }
    };
    let declare = match (sides.huffman, sides.tensor) {
        (true, _) => "KVD_HUFFMAN_ROWS",
        (false, true) => "KVD_MIXED_ROWS",
        (false, false) => "KVD_ATTEND_ROWS",
    };
    let name = sides.pair_name();
    format!(
        "#include \"declare.cuh\"\n#include \"{key_header}\"\n#include \"{value_header}\"\n\
         {declare}({name}, {key}, {value})\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_include_is_among_the_headers_and_every_struct_is_in_its_header() {
        let find = |name: &str| kernel_headers().iter().find(|header| header.0 == name);
        for (name, text) in kernel_headers() {
            for line in text.lines().filter_map(|line| line.strip_prefix("#include ")) {
                let included = line.trim_matches(['"', '<', '>']);
                // The CPU lane's own.
                assert!(find(included).is_some() || included == "emu.h", "{name}: {line}");
            }
        }
        let any = find("any.cuh").unwrap().1;
        for kernel in SideKernel::ALL {
            let short = |text: &str| text.replace("kvd::", "");
            let call = format!("return use({}()", short(kernel.device_struct()));
            assert!(short(any).contains(&call), "{call}");
            find(kernel.header_file()).unwrap();
        }
    }

    #[test]
    fn conversions_of_halves_that_headers_use_are_among_those_that_nvrtc_is_given() {
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let mut used = Vec::new();
        for (_, text) in KVD {
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            let words = code.flat_map(|line| line.split(|c: char| !is_name(c)));
            used.extend(words.filter(|word| {
                word.starts_with("__") && (word.contains("half") || word.contains("bfloat16"))
            }));
        }
        assert!(used.contains(&"__float2half_rn"), "{used:?}");
        for name in used {
            let is_given = CUDA.iter().any(|(_, text)| text.contains(&format!(" {name}(")));
            assert!(is_given, "{name} is in none of the headers");
        }
    }
}
