//! Digests of pages of usual sizes: whoever encodes, with whatever instructions, writes the same
//! bytes. `golden.rs` has short pages in full.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{SPECS, codec, geometry, rows};
use kvd_codec::BlockRows;
use kvd_core::{DType, LayerIndex};
use std::fmt::Write;
use xxhash_rust::xxh3::xxh3_64;

const LAYER: LayerIndex = LayerIndex(0);
const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/digests.txt");
/// More than those that every shape must survive.
const MORE: [&str; 6] = [
    "kvd-2",
    "kvd-4",
    "vecinfer-2-reg",
    "turbo-4",
    "k=uniform(b=4,g=32,axis=token,mode=sym); v=uniform(b=2,axis=block)",
    "k=polar(a=4,r=4,g=32); v=rotate/lloyd(b=8)",
];

/// Head size and tokens of blocks: what lies in whole registers, and what does not.
const SHAPES: [(u32, usize); 4] = [(128, 64), (128, 45), (80, 64), (80, 3)];

/// One line per codec and shape: bytes and digest of a block.
fn render() -> String {
    let mut text = String::new();
    for (dim, tokens) in SHAPES {
        let geometry = geometry(dim, DType::F16);
        let [k, mut v] = [21, 22].map(|seed| rows(&geometry, tokens, seed));
        // Quiet tokens, a loud one, and one that is far from all that was seen.
        v[..tokens * dim as usize / 2].iter_mut().for_each(|x| *x /= 16.0);
        v[dim as usize..][..dim as usize].iter_mut().for_each(|x| *x *= 3.0);
        v[7] = 300.0;
        let block = BlockRows { tokens, k: &k, v: &v };
        for spec in SPECS.iter().chain(&MORE) {
            let codec = codec(&geometry, spec, &block);
            let mut bytes = Vec::new();
            codec.encode_block(LAYER, &block, &mut bytes).unwrap();
            let digest = xxh3_64(&bytes);
            writeln!(text, "{spec}\t{dim}x{tokens}\t{}\t{digest:016x}", bytes.len()).unwrap();
        }
    }
    text
}

#[test]
fn pages_of_usual_sizes_are_golden() {
    let rendered = render();
    if std::env::var_os("KVD_BLESS").is_some() {
        std::fs::write(PATH, &rendered).unwrap();
    }
    let golden = std::fs::read_to_string(PATH).unwrap();
    for (now, then) in rendered.lines().zip(golden.lines()) {
        assert_eq!(now, then, "KVD_BLESS=1 rewrites {PATH}");
    }
    assert_eq!(rendered.lines().count(), golden.lines().count());
}
