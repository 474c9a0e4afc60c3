//! Encode and decode speed of every preset on one thread, in decoded values.
//!
//! `cargo run --release -p kvd-codec --example speed`
#![allow(clippy::print_stdout, reason = "prints its table")]

use kvd_codec::{BlockRows, ModelCodec, PageReader, presets, resolve_spec};
use kvd_core::{DType, Geometry, LayerIndex, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};
use std::time::Instant;

const TOKENS: usize = 64;
const DIM: usize = 128;
const HEADS: usize = 8;
const LAYER: LayerIndex = LayerIndex(0);

fn rows(seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut draw = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..HEADS * TOKENS * DIM)
        .map(|_| half::f16::from_f32(draw() + draw() + draw() + draw()).to_f32())
        .collect()
}

/// Best of ten runs, in nanoseconds per value.
fn best(values: usize, mut run: impl FnMut()) -> f64 {
    let once = |_| {
        let start = Instant::now();
        run();
        start.elapsed().as_nanos() as f64 / values as f64
    };
    (0..10).map(once).fold(f64::INFINITY, f64::min)
}

fn main() {
    let geometry = Geometry {
        layers: 1,
        kv_heads: HEADS as u32,
        head_dim_k: DIM as u32,
        head_dim_v: DIM as u32,
        block_tokens: TOKENS as u32,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    let (k, v) = (rows(1), rows(2));
    let block = BlockRows { tokens: TOKENS, k: &k, v: &v };
    println!(
        "{:16} {:>10} {:>12} {:>12} {:>9}",
        "preset", "bits/value", "encode ns/v", "decode ns/v", "fit s"
    );
    for preset in presets() {
        let spec = resolve_spec(preset.name).expect("presets parse");
        let start = Instant::now();
        let calibration = spec.needs_calibration().then(|| {
            let mut samples = Samples::new(&geometry);
            for seed in 0..4 {
                let data = rows(10 + seed);
                for (head, rows) in data.chunks(TOKENS * DIM).enumerate() {
                    samples.push_queries(LAYER, head, rows).expect("queries fit");
                    for side in Side::BOTH {
                        samples.push(LAYER, side, head, rows).expect("rows fit");
                    }
                }
            }
            fit_calibration(&geometry, &spec, &samples, 1, &mut |_| {}).expect("the fit works")
        });
        let fitted = start.elapsed().as_secs_f64();
        let mut codec =
            ModelCodec::new(geometry.clone(), spec, calibration.as_ref()).expect("codec fits");
        codec.train_tables(LAYER, &[block]).expect("tables");
        let values = 2 * HEADS * TOKENS * DIM;
        let mut bytes = Vec::new();
        let mut encoded = codec.encode_block(LAYER, &block, &mut bytes).expect("encodes");
        let encode = best(values, || {
            bytes.clear();
            encoded = codec.encode_block(LAYER, &block, &mut bytes).expect("encodes");
        });
        let mut out = vec![0f32; TOKENS * DIM];
        let decode = best(values, || {
            let mut start = 0;
            for (index, end) in encoded.page_ends.iter().enumerate() {
                let side = Side::BOTH[index / HEADS];
                let page = &bytes[start..*end as usize];
                start = *end as usize;
                let reader = PageReader::open_page(&codec, LAYER, side, index % HEADS, page);
                let reader = reader.expect("a page");
                for tile in (0..TOKENS).step_by(32) {
                    reader.decode_rows(tile, 32, &mut out[..32 * DIM]).expect("rows");
                }
            }
        });
        let bits = bytes.len() as f64 * 8.0 / values as f64;
        println!("{:16} {bits:10.3} {encode:12.3} {decode:12.3} {fitted:9.2}", preset.name);
    }
}
