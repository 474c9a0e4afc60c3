//! Geometries, rows and codecs for the integration tests.
#![allow(dead_code, reason = "each test file uses its own part")]

use kvd_codec::{
    BlockRows, Calibration, CodecSpec, EncodedBlock, ModelCodec, PageReader, Quantizer,
    resolve_spec,
};
use kvd_core::{DType, Geometry, LayerIndex, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};
use std::cell::RefCell;
use std::collections::HashMap;

/// The codecs that every shape must survive.
pub(crate) const SPECS: [&str; 28] = [
    "raw",
    "fp8",
    "kivi-4",
    "kivi-2",
    "kvcomp",
    "kvcomp-channel",
    "vecinfer-2",
    "k=smooth+hadamard/fp8/huffman; v=hadamard/f16",
    "k=hadamard/bf16; v=smooth/f32",
    "k=hadamard/uniform(b=3,axis=block); v=uniform(rel=0.005,g=5,axis=token)/huffman",
    "k=vq(d=2,b=3)/huffman; v=hadamard+smooth/vq(d=8,b=9)",
    "k=uniform(b=8,g=7,axis=channel)/huffman; v=uniform(b=2,axis=token)",
    "k=vq(d=1,b=2); v=vq(d=16,b=2)/huffman",
    "k=mean+qpca/grid(rate=3)/huffman; v=mean+gain+pca/grid(rate=2)/huffman",
    "k=pca+mean/f16; v=smooth+hadamard/grid(rate=4)/huffman",
    "innerq-2",
    "polar-4+4",
    "polar-4+2",
    "turbo-3",
    "k=rotate/uniform(b=3,g=20,axis=token,mode=sym)/huffman; \
     v=uniform(b=4,axis=channel,mode=hybrid)/huffman",
    "k=polar(a=3,r=2)/huffman; v=rotate(seed=9)/lloyd(b=6)/huffman",
    "k=polar(a=8,r=8,g=5); v=uniform(rel=0.1,axis=block,mode=hybrid)",
    "k=hadamard/lloyd(b=1); v=norm/uniform(b=8,axis=block,mode=sym)",
    "k=smooth+hadamard/vq(d=4,b=4,stages=2); v=vq(d=2,b=3,stages=3,scope=layer)/huffman",
    "k=vq(d=4,b=4,scope=group); v=hadamard/vq(d=8,b=5,stages=2,scope=model)",
    "kvd-2-fast",
    "k=hadamard/bitalloc(b=3.3); v=mean/bitalloc(b=1)",
    "oscar-2",
];

/// One layer, two KV heads, blocks of 64.
pub(crate) fn geometry(dim: u32, dtype: DType) -> Geometry {
    Geometry {
        layers: 2,
        kv_heads: 2,
        head_dim_k: dim,
        head_dim_v: dim,
        block_tokens: 64,
        dtype,
        rope_pairing: RopePairing::Half,
    }
}

/// A deterministic, roughly normal value, rounded to f16.
pub(crate) fn noise(index: usize) -> f32 {
    let mut z = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut sum = 0.0;
    for _ in 0..4 {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        sum += (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    }
    round(sum * 1.7)
}

/// To f16 and back.
pub(crate) fn round(x: f32) -> f32 {
    half::f16::from_f32(x).to_f32()
}

/// `[kv_heads, tokens, dim]` with two outlier channels.
pub(crate) fn rows(geometry: &Geometry, tokens: usize, seed: usize) -> Vec<f32> {
    let dim = geometry.head_dim_k as usize;
    let count = geometry.kv_heads as usize * tokens * dim;
    let value = |i: usize| {
        let gain = if i % dim == 3 {
            6.0
        } else if i % dim == dim - 1 {
            0.01
        } else {
            1.0
        };
        round(noise(seed * 1_000_003 + i) * gain)
    };
    (0..count).map(value).collect()
}

thread_local! {
    /// Calibrations made so far: a fit takes longer than everything else that a test does.
    static FITTED: RefCell<HashMap<(u32, String), Calibration>> = RefCell::default();
}

/// As [`calibrate`], from memory where the same was asked for before.
pub(crate) fn calibrate_once(geometry: &Geometry, spec: &CodecSpec) -> Option<Calibration> {
    if !spec.needs_calibration() {
        return None;
    }
    FITTED.with_borrow_mut(|fitted| {
        let entry = fitted.entry((geometry.head_dim_k, spec.to_string()));
        Some(entry.or_insert_with(|| calibrate(geometry, spec).unwrap()).clone())
    })
}

/// A calibration from a few rows, where the codec needs one.
pub(crate) fn calibrate(geometry: &Geometry, spec: &CodecSpec) -> Option<Calibration> {
    if !spec.needs_calibration() {
        return None;
    }
    let mut samples = Samples::new(geometry);
    // More than channels, and of like size in each: nothing is invisible to queries.
    let queries: Vec<f32> = (0..320 * geometry.head_dim(Side::Key)).map(noise).collect();
    for layer in 0..geometry.layers {
        for head in 0..geometry.kv_heads as usize {
            samples.push_queries(LayerIndex(layer), head, &queries).unwrap();
        }
        for side in Side::BOTH {
            let count = sample_rows(geometry, spec, side);
            for head in 0..geometry.kv_heads as usize {
                let seed = 1000 + layer as usize * 4 + side.index() * 2 + head;
                let all = rows(geometry, count, seed);
                let rows = &all[..count * geometry.head_dim(side)];
                samples.push(LayerIndex(layer), side, head, rows).unwrap();
            }
        }
    }
    Some(fit_calibration(geometry, spec, &samples, 7, &mut |_| {}).unwrap())
}

/// Rows per head: a few, but a sub-vector for every entry of a head's codebook.
fn sample_rows(geometry: &Geometry, spec: &CodecSpec, side: Side) -> usize {
    match spec.side(side).quantizer {
        Quantizer::Vq(vq) => {
            let per_row = geometry.head_dim(side) / usize::from(vq.dim);
            vq.entry_count().div_ceil(per_row).max(40)
        }
        _ => 40,
    }
}

/// The codec, with Huffman tables of layer 0 trained on `block`.
pub(crate) fn codec(geometry: &Geometry, text: &str, block: &BlockRows<'_>) -> ModelCodec {
    let spec = resolve_spec(text).unwrap();
    let calibration = calibrate_once(geometry, &spec);
    let mut codec = ModelCodec::new(geometry.clone(), spec, calibration.as_ref()).unwrap();
    if codec.needs_tables(LayerIndex(0)) {
        codec.train_tables(LayerIndex(0), &[*block]).unwrap();
    }
    codec
}

/// The bytes of page `index`.
pub(crate) fn page<'a>(bytes: &'a [u8], encoded: &EncodedBlock, index: usize) -> &'a [u8] {
    let start = if index == 0 { 0 } else { encoded.page_ends[index - 1] };
    &bytes[start as usize..encoded.page_ends[index] as usize]
}

/// All rows of a page of layer 0 as they arrived, transforms undone.
pub(crate) fn decode(codec: &ModelCodec, side: Side, head: usize, bytes: &[u8]) -> Vec<f32> {
    decode_at(codec, LayerIndex(0), side, head, bytes)
}

/// All rows of a page as they arrived, transforms undone.
pub(crate) fn decode_at(
    codec: &ModelCodec,
    layer: LayerIndex,
    side: Side,
    head: usize,
    bytes: &[u8],
) -> Vec<f32> {
    let reader = PageReader::open_page(codec, layer, side, head, bytes).unwrap();
    reader.verify_checksum().unwrap();
    let head_side = codec.head_codec(layer, side, head);
    let dim = head_side.dim();
    let mut out = vec![0f32; reader.tokens() * dim];
    reader.decode_rows(0, reader.tokens(), &mut out).unwrap();
    if reader.space() == kvd_codec::RowSpace::Coefficient {
        for row in out.chunks_exact_mut(dim) {
            let coefficients = row.to_vec();
            head_side.invert_row(&coefficients, row);
        }
    }
    out
}
