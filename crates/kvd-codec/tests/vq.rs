//! Vector quantization beyond one codebook per head: residual stages, shared and grouped
//! codebooks, tables of 4096 and 65536 entries.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{decode, noise, page, round};
use kvd_codec::{
    BlockRows, Calibration, CalibrationError, CodebookScope, EncodedBlock, ModelCodec, Quantizer,
    VqSpec, resolve_spec,
};
use kvd_core::{Coded, DType, ErrorCode, Geometry, LayerIndex, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};
use proptest::prelude::*;
use std::fmt::Write;

const LAYER: LayerIndex = LayerIndex(0);
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/vq.txt");

fn geometry(layers: u32, kv_heads: u32, dim: u32) -> Geometry {
    Geometry {
        layers,
        kv_heads,
        head_dim_k: dim,
        head_dim_v: dim,
        block_tokens: 64,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    }
}

/// Rows whose channels differ in spread and, in pairs, hang together.
fn rows(count: usize, dim: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| {
        let (row, channel) = (i / dim, i % dim);
        let shared = noise(seed + 7 * row * dim + channel / 2);
        let gain = 0.5 + (channel % 5) as f32;
        round(gain * (shared + 0.4 * noise(seed + 90_001 + i)))
    };
    (0..count * dim).map(value).collect()
}

fn samples(geometry: &Geometry, count: usize) -> Samples {
    let mut samples = Samples::new(geometry);
    for layer in 0..geometry.layers {
        for side in Side::BOTH {
            for head in 0..geometry.kv_heads as usize {
                let seed = 100_000 * (layer as usize * 8 + head * 2 + side.index());
                let rows = rows(count, geometry.head_dim(side), seed);
                samples.push(LayerIndex(layer), side, head, &rows).unwrap();
            }
        }
    }
    samples
}

fn fitted(geometry: &Geometry, text: &str, count: usize) -> (Calibration, ModelCodec) {
    let spec = resolve_spec(text).unwrap();
    let samples = samples(geometry, count);
    let calibration = fit_calibration(geometry, &spec, &samples, 5, &mut |_| {}).unwrap();
    let codec = ModelCodec::new(geometry.clone(), spec, Some(&calibration)).unwrap();
    (calibration, codec)
}

fn encode(codec: &ModelCodec, tokens: usize, k: &[f32], v: &[f32]) -> (Vec<u8>, EncodedBlock) {
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LAYER, &BlockRows { tokens, k, v }, &mut bytes).unwrap();
    (bytes, encoded)
}

/// Mean squared error of key head 0 over its own calibration rows.
fn training_error(geometry: &Geometry, text: &str) -> f64 {
    let (_, codec) = fitted(geometry, text, 256);
    let dim = geometry.head_dim(Side::Key);
    let k = rows(256, dim, 0);
    let mut sum = 0.0;
    for block in k.chunks(64 * dim) {
        let (bytes, encoded) = encode(&codec, 64, block, block);
        let decoded = decode(&codec, Side::Key, 0, page(&bytes, &encoded, 0));
        sum += block.iter().zip(decoded).map(|(a, b)| f64::from((a - b) * (a - b))).sum::<f64>();
    }
    sum / k.len() as f64
}

#[test]
fn every_stage_and_every_codebook_of_its_own_lowers_the_error() {
    let geometry = geometry(1, 1, 16);
    let error = |arguments: &str| {
        training_error(&geometry, &format!("k=vq(d=4,b=5{arguments}); v=vq(d=4,b=5)"))
    };
    let (one, two, three) = (error(""), error(",stages=2"), error(",stages=3"));
    assert!(two < 0.6 * one && three < 0.6 * two, "{one} {two} {three}");
    // Channels differ in spread, so codebooks of each group fit better than one for all.
    let grouped = error(",scope=group");
    assert!(grouped < 0.9 * one, "{grouped} against {one}");
    assert!(error(",stages=2,scope=group") < 0.9 * two);
}

#[test]
fn codebooks_count_once_however_many_heads_share_them() {
    let geometry = geometry(2, 3, 16);
    for (scope, books) in [
        (CodebookScope::Model, 1),
        (CodebookScope::Layer, 2),
        (CodebookScope::Head, 6),
        (CodebookScope::Group, 24),
    ] {
        for stages in [1, 2] {
            let vq = VqSpec { dim: 4, bits: 4, stages, scope };
            let text = format!("k={vq}; v=raw");
            let (calibration, codec) = fitted(&geometry, &text, 32);
            assert_eq!(
                vq.codebook_count(&geometry, Side::Key),
                books * u64::from(stages),
                "{text}"
            );
            let bytes = books * u64::from(stages) * 16 * 4 * 2;
            assert_eq!(codec.calibration_bytes(), bytes, "{text}");
            assert_eq!(calibration.size_bytes(), bytes, "{text}");
            let read = Calibration::from_bytes(&calibration.to_bytes()).unwrap();
            assert_eq!(read, calibration);
            let head = codec.head_codec(LayerIndex(1), Side::Key, 2).vq().unwrap();
            let other = codec.head_codec(LAYER, Side::Key, 0).vq().unwrap();
            assert_eq!((head.dim(), head.positions(), head.stages()), (4, 4, stages.into()));
            assert_eq!(head.is_grouped(), scope == CodebookScope::Group);
            let shared = head.stage_codebook(0, 3) == other.stage_codebook(0, 3);
            assert_eq!(shared, scope == CodebookScope::Model);
        }
    }
}

#[test]
fn entries_stand_in_the_order_of_their_use() {
    let geometry = geometry(1, 2, 16);
    for (arguments, heads) in [("", 1), (",scope=model", 2), (",scope=group", 1)] {
        let (_, codec) = fitted(&geometry, &format!("k=vq(d=2,b=4{arguments}); v=raw"), 512);
        let vq = codec.head_codec(LAYER, Side::Key, 0).vq().unwrap();
        let entries = vq.stage_codebook(0, 0).entries();
        let positions = if vq.is_grouped() { 1 } else { vq.positions() };
        let mut uses = vec![0usize; 16];
        for head in 0..heads {
            for block in rows(512, 16, 200_000 * head).chunks(64 * 16) {
                let both = block.repeat(2);
                let (bytes, encoded) = encode(&codec, 64, &both, &both);
                let decoded = decode(&codec, Side::Key, head, page(&bytes, &encoded, head));
                for row in decoded.chunks(16) {
                    for sub in row.chunks(2).take(positions) {
                        let entry = entries.chunks(2).position(|entry| entry == sub);
                        uses[entry.unwrap()] += 1;
                    }
                }
            }
        }
        // The fit counted before entries were rounded to f16: neighbours may have swapped.
        let fours: Vec<usize> = uses.chunks(4).map(|part| part.iter().sum()).collect();
        assert!(fours.is_sorted_by(|a, b| a > b), "{arguments}: {uses:?}");
    }
}

#[test]
fn too_few_samples_and_odd_heads_say_what_to_do() {
    let odd = geometry(1, 2, 16);
    let spec = resolve_spec("k=raw; v=vq(d=8,b=12)").unwrap();
    let few = samples(&odd, 64);
    let error = fit_calibration(&odd, &spec, &few, 0, &mut |_| {}).unwrap_err();
    let CalibrationError::TooFewSamples {
        layer: 0,
        side: Side::Value,
        head: 0,
        entries,
        found,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((*entries, *found, error.code()), (4096, 128, ErrorCode::InvalidCalibration));
    assert!(error.to_string().contains("sample more tokens"), "{error}");
    // A group has one sub-vector per row; heads that share a codebook add up.
    for (arguments, enough) in [("scope=group", false), ("scope=model", true)] {
        let spec = resolve_spec(&format!("k=raw; v=vq(d=4,b=7,{arguments})")).unwrap();
        assert_eq!(
            fit_calibration(&odd, &spec, &few, 0, &mut |_| {}).is_ok(),
            enough,
            "{arguments}"
        );
    }
    let spec = resolve_spec("k=vq(d=3,b=2); v=raw").unwrap();
    let error = fit_calibration(&odd, &spec, &few, 0, &mut |_| {}).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidCodec);
    assert!(error.to_string().contains("d can be 1, 2, 4, 8, 16"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A decoded row is made of entries; the nearest to an entry is that entry (or its twin), so
    /// the decoded rows stay as they are when they are encoded again.
    #[test]
    fn decoded_rows_are_fixed_points(
        (dim, row) in prop::sample::select(vec![
            (1u8, 32u32), (2, 32), (3, 48), (4, 36), (5, 80), (6, 96), (7, 56), (8, 256), (16, 64),
        ]),
        bits in 1u8..=6,
        stages in 1u8..=3,
        scope in prop::sample::select(vec![
            CodebookScope::Model, CodebookScope::Layer, CodebookScope::Head, CodebookScope::Group,
        ]),
        tokens in 1usize..=64,
    ) {
        let stages = if dim == 1 { 1 } else { stages };
        let vq = VqSpec { dim, bits, stages, scope };
        let geometry = geometry(1, 1, row);
        let (_, codec) = fitted(&geometry, &format!("k={vq}; v=raw"), 64);
        let row = row as usize;
        let k = rows(tokens, row, 77);
        let (bytes, encoded) = encode(&codec, tokens, &k, &k);
        prop_assert_eq!(encoded.fallback_pages, 0);
        // Less than a byte of each of four bit planes is lost, in a last tile that is not full.
        let codes = row / usize::from(dim) * usize::from(stages);
        let bits = tokens * codes * usize::from(bits) + 8 * tokens * row * 32 / 8;
        let lost = 8 * encoded.parts.codes as usize - bits;
        prop_assert!(lost < 4 * 8 && (lost == 0 || !tokens.is_multiple_of(32)), "{} bits", lost);
        let decoded = decode(&codec, Side::Key, 0, page(&bytes, &encoded, 0));
        let (again, layout) = encode(&codec, tokens, &decoded, &decoded);
        let twice = decode(&codec, Side::Key, 0, page(&again, &layout, 0));
        if stages == 1 {
            prop_assert_eq!(twice, decoded);
        } else {
            let error = |a: &[f32], b: &[f32]| -> f32 {
                a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum()
            };
            prop_assert!(error(&twice, &decoded) <= error(&decoded, &k));
        }
    }
}

/// Pages of tables with 4096 and 65536 entries, of three stages and of groups.
#[test]
fn pages_of_large_and_staged_tables_are_golden() {
    let mut text = String::new();
    for (spec, dim, samples) in [
        ("k=vq(d=8,b=12); v=vq(d=4,b=10,stages=2)", 32, 1024),
        ("k=vq(d=2,b=16); v=vq(d=4,b=5,stages=3,scope=group)", 16, 8192),
    ] {
        let (_, codec) = fitted(&geometry(1, 1, dim), spec, samples);
        let dim = dim as usize;
        let (k, v) = (rows(3, dim, 5_000_000), rows(3, dim, 6_000_000));
        let (bytes, _) = encode(&codec, 3, &k, &v);
        write!(text, "{spec}\t{}\t", bytes.len()).unwrap();
        bytes.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        text.push('\n');
        let Quantizer::Vq(vq) = codec.spec().key.quantizer else { panic!("{spec}") };
        let book = codec.head_codec(LAYER, Side::Key, 0).vq().unwrap().stage_codebook(0, 0);
        assert_eq!(book.entries().len(), vq.entry_count() * usize::from(vq.dim));
    }
    if std::env::var_os("KVD_BLESS").is_some() {
        std::fs::write(GOLDEN, &text).unwrap();
    }
    let golden = std::fs::read_to_string(GOLDEN).unwrap();
    assert_eq!(text, golden, "KVD_BLESS=1 rewrites {GOLDEN}");
}
