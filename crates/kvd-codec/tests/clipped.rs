//! `oscar-2` (arXiv 2605.17757) against plain references: the axes of queries and of scored values,
//! and groups that are cut before they get levels.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{codec, geometry, noise};
use kvd_codec::{BlockRows, CalibrationError, ModelCodec, find_preset, resolve_spec};
use kvd_core::{DType, Geometry, LayerIndex, Side};
use kvd_fit::{Samples, fit_calibration};
use proptest::prelude::*;

const LAYER: LayerIndex = LayerIndex(0);
const DIM: usize = 16;
const TOKENS: usize = 200;

/// Rows of which channels have spreads of their own, and neighbours go together.
fn mixed_rows(seed: usize, spread: impl Fn(usize) -> f32) -> Vec<f32> {
    let mut rows: Vec<f32> =
        (0..TOKENS * DIM).map(|i| noise(seed * 7919 + i) * spread(i % DIM)).collect();
    for row in rows.chunks_exact_mut(DIM) {
        for at in (0..DIM).step_by(2) {
            (row[at], row[at + 1]) = (row[at] + 0.5 * row[at + 1], row[at + 1] - 0.5 * row[at]);
        }
    }
    rows
}

/// Keys, values and queries of every head.
struct HeadRows {
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

impl HeadRows {
    fn new() -> Self {
        Self {
            keys: mixed_rows(1, |channel| 1.0 + channel as f32 / 8.0),
            values: mixed_rows(2, |channel| 2.0 - channel as f32 / 16.0),
            queries: mixed_rows(3, |channel| 0.25 + (channel % 5) as f32 / 2.0),
        }
    }

    /// The score of each key among the queries: the mean of `(q·k)²`.
    fn scores(&self) -> Vec<f64> {
        let square = |key: &[f32], query: &[f32]| {
            let dot: f64 = key.iter().zip(query).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            dot * dot
        };
        let of_key = |key: &[f32]| {
            let all = self.queries.chunks_exact(DIM).map(|query| square(key, query)).sum::<f64>();
            all / TOKENS as f64
        };
        self.keys.chunks_exact(DIM).map(of_key).collect()
    }

    fn samples(&self, geometry: &Geometry) -> Samples {
        let mut samples = Samples::new(geometry);
        for (layer, head) in (0..geometry.layers).flat_map(|layer| [(layer, 0), (layer, 1)]) {
            let layer = LayerIndex(layer);
            samples.push(layer, Side::Key, head, &self.keys).unwrap();
            samples.push(layer, Side::Value, head, &self.values).unwrap();
            samples.push_queries(layer, head, &self.queries).unwrap();
        }
        samples
    }
}

/// `Σ w c cᵀ` of rows.
fn weighted_moment(rows: &[f32], weights: &[f64]) -> Vec<Vec<f64>> {
    let mut moment = vec![vec![0f64; DIM]; DIM];
    for (row, weight) in rows.chunks_exact(DIM).zip(weights) {
        for (i, sums) in moment.iter_mut().enumerate() {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += weight * f64::from(row[i]) * f64::from(*x);
            }
        }
    }
    moment
}

/// Nothing off the diagonal but what rounding of a matrix to f16 leaves, and the largest first.
fn assert_principal(moment: &[Vec<f64>], what: &str) {
    for (i, sums) in moment.iter().enumerate() {
        for (j, sum) in sums.iter().enumerate().filter(|(j, _)| *j != i) {
            assert!(sum.abs() < 4e-3 * moment[0][0], "{what}: {i}, {j}: {sum}");
        }
        assert!(i == 0 || sums[i] < moment[i - 1][i - 1] * 1.01, "{what}: axis {i}");
    }
}

#[test]
fn keys_turn_to_the_axes_of_queries_and_values_to_those_that_scores_weigh() {
    let (geometry, rows) = (geometry(DIM as u32, DType::F32), HeadRows::new());
    let spec = resolve_spec("k=qeig/f32; v=sveig/f32").unwrap();
    let fitted = fit_calibration(&geometry, &spec, &rows.samples(&geometry), 1, &mut |_| {});
    let codec = ModelCodec::new(geometry, spec, Some(&fitted.unwrap())).unwrap();
    for (side, rows, weights) in
        [(Side::Key, &rows.queries, vec![1.0; TOKENS]), (Side::Value, &rows.values, rows.scores())]
    {
        let head = codec.head_codec(LAYER, side, 1);
        let mut turned = rows.clone();
        head.transform_rows(&mut turned);
        let square = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let lengths = rows.chunks_exact(DIM).zip(turned.chunks_exact(DIM));
        let ratios: Vec<f64> = lengths.map(|(row, c)| square(c) / square(row)).collect();
        // A rotation, times the power of two by which a matrix fills f16.
        let power = ratios[0].log2().round().exp2();
        for ratio in ratios {
            assert!((ratio / power - 1.0).abs() < 4e-3, "{side}: {ratio}, {power}");
        }
        assert_principal(&weighted_moment(&turned, &weights), side.name());
    }
}

#[test]
fn axes_of_scores_want_queries_and_a_key_for_every_value() {
    let geometry = geometry(DIM as u32, DType::F32);
    let spec = resolve_spec("k=raw; v=sveig/f32").unwrap();
    let mut samples = Samples::new(&geometry);
    for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        samples.push(LayerIndex(layer), Side::Key, head, &[1.0; DIM]).unwrap();
        samples.push(LayerIndex(layer), Side::Value, head, &[1.0; 2 * DIM]).unwrap();
    }
    let fit = |samples: &Samples| fit_calibration(&geometry, &spec, samples, 1, &mut |_| {});
    assert!(matches!(fit(&samples), Err(CalibrationError::NoQueries { layer: 0, head: 0 })));
    samples.push_queries(LAYER, 0, &[1.0; DIM]).unwrap();
    let error = fit(&samples).unwrap_err().to_string();
    assert!(error.contains("other tokens in its keys"), "{error}");
}

/// Groups of `group` values cut to the magnitude of rank `clip` among them.
fn cut_groups(rows: &[f32], dim: usize, group: usize, clip: f32) -> Vec<f32> {
    let cut = |values: &[f32]| {
        let mut sorted: Vec<f32> = values.iter().map(|x| x.abs()).collect();
        sorted.sort_by(f32::total_cmp);
        let most = sorted[((clip * values.len() as f32) as usize).min(values.len() - 1)];
        values.iter().map(|x| x.abs().min(most).copysign(*x)).collect::<Vec<f32>>()
    };
    rows.chunks_exact(dim).flat_map(|row| row.chunks(group).flat_map(cut)).collect()
}

/// The payloads of all pages of a block, none where f16 has no step fine enough for its rows.
fn payloads(text: &str, geometry: &Geometry, rows: &[f32]) -> Option<Vec<u8>> {
    let tokens = rows.len() / 2 / geometry.head_dim(Side::Key);
    let block = BlockRows { tokens, k: rows, v: rows };
    let codec = codec(geometry, text, &block);
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
    let page = |index: usize| &common::page(&bytes, &encoded, index)[32..];
    (encoded.fallback_pages == 0).then(|| (0..4).flat_map(page).copied().collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_clipped_page_is_the_page_of_rows_that_were_cut(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        dim in prop_oneof![Just(32u32), Just(80), Just(128)],
        group in prop_oneof![Just(128usize), Just(32), Just(20)],
        clip in prop_oneof![Just(0.96f32), Just(0.92), Just(0.5), 0.01f32..0.99],
        huffman in any::<bool>(),
    ) {
        let geometry = geometry(dim, DType::F32);
        let count = 2 * tokens * dim as usize;
        let rows: Vec<f32> = (0..count).map(|i| noise(seed * 7919 + i).powi(3)).collect();
        let cut = cut_groups(&rows, dim as usize, group, clip);
        let stage = if huffman { "/huffman" } else { "" };
        let plain = format!("uniform(b=2,g={group},axis=token)");
        let clipped = format!("uniform(b=2,g={group},axis=token,clip={clip})");
        // Tables are trained on the codes, which are the same.
        let of = |side: &str, rows: &[f32]| {
            payloads(&format!("k={side}{stage}; v={side}{stage}"), &geometry, rows)
        };
        prop_assert_eq!(of(&clipped, &rows), of(&plain, &cut));
    }
}

#[test]
fn clips_below_the_steps_of_f16_store_raw_pages() {
    let geometry = geometry(128, DType::F32);
    let mut rows: Vec<f32> = (0..2 * 128).map(noise).collect();
    let side = "uniform(b=2,g=128,axis=token,clip=0.01)";
    let text = format!("k={side}; v={side}");
    assert!(payloads(&text, &geometry, &rows).is_some());
    // Each row is cut to its second least magnitude.
    rows.chunks_exact_mut(128).for_each(|row| row[..2].fill(1e-8));
    assert_eq!(payloads(&text, &geometry, &rows), None);
}

#[test]
fn what_is_no_number_is_not_cut_to_one() {
    let geometry = geometry(32, DType::F32);
    let text = "k=hadamard/uniform(b=2,g=32,axis=token,clip=0.5); v=raw";
    // The sum of a row is beyond f32.
    let rows = vec![3e38f32; 2 * 4 * 32];
    let block = BlockRows { tokens: 4, k: &rows, v: &rows };
    let encoded = codec(&geometry, text, &block).encode_block(LAYER, &block, &mut Vec::new());
    assert_eq!(encoded.unwrap().fallback_pages, 2);
}

#[test]
fn oscar_takes_the_bits_that_its_paper_counts() {
    let geometry = geometry(128, DType::F16);
    let spec = find_preset("oscar-2").unwrap();
    for side in Side::BOTH {
        let bits = spec.side(side).implied_bits(&geometry, side);
        assert_eq!(bits.to_string(), "2.000 codes + 0.250 scales + 0.031 header = 2.281");
    }
    assert_eq!((spec.sink, spec.recent), (64, 256));
}

#[test]
fn axes_and_clips_out_of_place_are_refused() {
    let uniform = "uniform(b=2,axis=token)";
    for (text, part) in [
        (format!("k=raw; v=qeig/{uniform}"), "qeig is for keys"),
        (format!("k=sveig/{uniform}; v=raw"), "sveig is for values"),
    ] {
        let spec = resolve_spec(&text).unwrap();
        let error = ModelCodec::new(geometry(32, DType::F16), spec, None).unwrap_err();
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
    for (text, part) in [
        ("k=raw; v=mean+sveig/f32", "before mean"),
        ("k=qeig+pca/f32; v=raw", "exclude each other"),
        ("k=uniform(b=2,axis=channel,clip=0.9); v=raw", "axis=token"),
        ("k=uniform(b=2,axis=token,mode=sym,clip=0.9); v=raw", "mode=asym"),
        ("k=uniform(b=2,axis=token,clip=1); v=raw", "below 1"),
        ("k=uniform(b=2,axis=token,clip=0); v=raw", "above 0"),
    ] {
        let error = resolve_spec(text).unwrap_err();
        assert!(error.message.contains(part), "{text}: {error}");
    }
}
