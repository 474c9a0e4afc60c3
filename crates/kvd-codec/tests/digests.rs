//! Digests of pages of usual sizes: whoever encodes, with whatever instructions, writes the same
//! bytes. `golden.rs` has short pages in full.
//!
//! Calibrations with eigenvectors (`pca`, `qpca`) differ between aarch64 and x86. So each line has
//! the digest of its calibration too. If page and calibration both differ off x86, the test says so
//! and compares the other lines.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{SPECS, calibrate_once, codec, geometry, rows};
use kvd_codec::{BlockRows, resolve_spec};
use kvd_core::{DType, LayerIndex};
use std::fmt::Write as _;
use std::io::Write as _;
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

/// One line per codec and shape: bytes and digest of a block, and the digest of what was fitted.
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
            let (len, digest) = (bytes.len(), xxh3_64(&bytes));
            let fitted = calibrate_once(&geometry, &resolve_spec(spec).unwrap());
            let fitted = fitted.map_or(0, |fitted| xxh3_64(&fitted.to_bytes()));
            writeln!(text, "{spec}\t{dim}x{tokens}\t{len}\t{digest:016x}\t{fitted:016x}").unwrap();
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
    let mut compared = 0;
    for (now, then) in rendered.lines().zip(golden.lines()) {
        let [(page, fitted), (wanted, golden_fit)] =
            [now, then].map(|line| line.rsplit_once('\t').unwrap());
        if page != wanted && fitted != golden_fit && cfg!(not(target_arch = "x86_64")) {
            let line = format!("SKIP digest: this machine fits another calibration: {now}\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            continue;
        }
        assert_eq!(page, wanted, "KVD_BLESS=1 rewrites {PATH}");
        compared += 1;
    }
    // Most need no eigenvectors.
    assert!(2 * compared > rendered.lines().count(), "{compared}");
    assert_eq!(rendered.lines().count(), golden.lines().count());
}
