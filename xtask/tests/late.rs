//! The texts of kernels that a daemon compiles when a model is registered and whose products are
//! on tensor cores, as `cargo xtask kernels --late` compiles them: `KVD_LATE_KERNELS` names the
//! folder that they are written to. A test of xtask and no dependency, so that chores build
//! nothing of kvd.

use kvd_cuda::{SideKernel, tensor_source};
use std::path::PathBuf;

/// Name and text of each pair, with and without Huffman codes. Grids are of Huffman codes alone.
fn texts() -> Vec<(String, String)> {
    let mut texts = Vec::new();
    for keys in SideKernel::ALL {
        for values in SideKernel::ALL {
            let is_grid = [keys, values].contains(&SideKernel::Grid);
            for huffman in if is_grid { &[true][..] } else { &[false, true] } {
                let Some(text) = tensor_source(keys, values, *huffman) else { continue };
                let stage = if *huffman { "huffman_" } else { "" };
                texts.push((format!("{stage}tensor_{}_{}", keys.name(), values.name()), text));
            }
        }
    }
    texts
}

#[test]
fn every_pair_that_tensor_cores_multiply_has_a_text() {
    let texts = texts();
    let coded = texts.iter().filter(|(name, _)| name.starts_with("huffman")).count();
    // `kernels/README.md` tells how many were compiled.
    assert_eq!((texts.len() - coded, coded), (54, 1));
    for (name, text) in &texts {
        let short = name.trim_start_matches("huffman_");
        assert!(text.contains(&format!("_ROWS({short}, ")), "{name}: {text}");
    }
    if let Some(folder) = std::env::var_os("KVD_LATE_KERNELS").map(PathBuf::from) {
        for (name, text) in texts {
            std::fs::write(folder.join(name).with_extension("cu"), text).unwrap();
        }
    }
}
