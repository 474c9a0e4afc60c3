//! The accuracy contract: no checked page is over its bound, whatever the data.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{calibrate, geometry, noise, rows};
use kvd_codec::{BlockRows, EncodedBlock, ModelCodec, PageReader, RowSpace, resolve_spec};
use kvd_core::{DType, LayerIndex, Side};
use kvd_fit::{Samples, fit_calibration};
use proptest::prelude::*;

const LAYER: LayerIndex = LayerIndex(1);

fn codec(text: &str) -> ModelCodec {
    let geometry = geometry(32, DType::F16);
    let spec = resolve_spec(text).unwrap();
    let calibration = calibrate(&geometry, &spec);
    ModelCodec::new(geometry, spec, calibration.as_ref()).unwrap()
}

fn pages<'a>(bytes: &'a [u8], encoded: &'a EncodedBlock) -> impl Iterator<Item = &'a [u8]> {
    let starts = std::iter::once(&0).chain(&encoded.page_ends);
    starts.zip(&encoded.page_ends).map(|(start, end)| &bytes[*start as usize..*end as usize])
}

/// Relative error of a page against its rows.
fn error(codec: &ModelCodec, reader: &PageReader<'_>, originals: &[f32], side: Side) -> f32 {
    let mut coefficients = vec![0f32; originals.len()];
    reader.decode_rows(0, originals.len() / 32, &mut coefficients).unwrap();
    let head = codec.head_codec(LAYER, side, usize::from(reader.header().head));
    let (mut error, mut norm, mut value) = (0f32, 0f32, vec![0f32; 32]);
    for (row, original) in coefficients.chunks_exact(32).zip(originals.chunks_exact(32)) {
        match reader.space() {
            RowSpace::Raw => value.copy_from_slice(row),
            RowSpace::Coefficient => head.invert_row(row, &mut value),
        }
        error += value.iter().zip(original).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        norm += original.iter().map(|x| x * x).sum::<f32>();
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

#[test]
fn data_unlike_the_calibration_falls_back_and_is_counted() {
    let codec = codec("k=vq(d=4,b=8); v=vq(d=4,b=8); k.bound=0.4");
    let mut k = rows(&codec.geometry().clone(), 64, 0);
    // Head 1 is five times what the codebook was fitted on.
    k[64 * 32..].iter_mut().for_each(|x| *x *= 5.0);
    let block = BlockRows { tokens: 64, k: &k, v: &k };
    let mut bytes = Vec::new();
    let (encoded, checked) = codec.encode_block_checked(LAYER, &block, &mut bytes).unwrap();
    assert_eq!(checked.over_bound, [1, 0]);
    assert_eq!(encoded.fallback_pages, 0);
    let kinds: Vec<(u8, bool)> = pages(&bytes, &encoded)
        .enumerate()
        .map(|(index, page)| {
            let (side, head) = (Side::BOTH[index / 2], index % 2);
            let reader = PageReader::open_page(&codec, LAYER, side, head, page).unwrap();
            reader.verify_checksum().unwrap();
            (reader.header().quantizer, reader.header().fallback)
        })
        .collect();
    // The first rung, 4-bit codes, keeps the bound; values declare none.
    assert_eq!(kinds, [(32, false), (16, true), (32, false), (32, false)]);
    let stored = checked.attention[0].relative_error();
    assert!(stored < 0.4, "{stored}");

    let mut unchecked = Vec::new();
    let plain = codec.encode_block(LAYER, &block, &mut unchecked).unwrap();
    assert!(plain.key_bytes < encoded.key_bytes && plain.value_bytes == encoded.value_bytes);
}

/// Queries see the first half of the channels; a codec in their metric may lose the other half.
#[test]
fn keys_in_the_metric_of_queries_are_measured_by_their_scores() {
    let geometry = geometry(32, DType::F16);
    let spec = resolve_spec("k=mean+qpca/grid(rate=2)/huffman; v=raw; k.bound=0.35").unwrap();
    let mut samples = Samples::new(&geometry);
    let seen = |i: usize| noise(i) * if i % 32 < 16 { 1.0 } else { 0.01 };
    let queries: Vec<f32> = (0..400 * 32).map(seen).collect();
    for layer in (0..geometry.layers).map(LayerIndex) {
        for head in 0..2 {
            samples.push_queries(layer, head, &queries).unwrap();
            let seed = 1 + 2 * layer.0 as usize + head;
            let keys = &rows(&geometry, 800, seed)[..800 * 32];
            samples.push(layer, Side::Key, head, keys).unwrap();
        }
    }
    let calibration = fit_calibration(&geometry, &spec, &samples, 1, &mut |_| {}).unwrap();
    let codec = ModelCodec::new(geometry, spec, Some(&calibration)).unwrap();
    let k = rows(&codec.geometry().clone(), 64, 0);
    let block = BlockRows { tokens: 64, k: &k, v: &k };
    let mut bytes = Vec::new();
    let (encoded, checked) = codec.encode_block_checked(LAYER, &block, &mut bytes).unwrap();
    assert_eq!(checked.over_bound, [0, 0]);
    let page = pages(&bytes, &encoded).next().unwrap();
    let reader = PageReader::open_page(&codec, LAYER, Side::Key, 0, page).unwrap();
    let of_rows = error(&codec, &reader, &k[..64 * 32], Side::Key);
    let of_scores = checked.attention[0].relative_error();
    assert!(of_scores < 0.35 && of_rows > 0.4, "{of_scores} of scores, {of_rows} of rows");

    // Errors of scores, on queries that were not in the calibration.
    let mut coefficients = vec![0f32; 64 * 32];
    reader.decode_rows(0, 64, &mut coefficients).unwrap();
    let (head, mut folded) = (codec.head_codec(LAYER, Side::Key, 0), [0f32; 32]);
    let (mut lost, mut spread) = (0.0, 0.0);
    for query in 1000..1100 {
        let q: Vec<f32> = (0..32).map(|i| seen(query * 32 + i)).collect();
        let offset = head.fold_query(&q, &mut folded);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        for (row, key) in coefficients.chunks(32).zip(k.chunks(32)) {
            let exact = dot(&q, key) - offset;
            lost += f64::from(dot(&folded, row) - exact).powi(2);
            spread += f64::from(exact).powi(2);
        }
    }
    let ratio = (lost / spread).sqrt() / of_scores;
    assert!((0.8..1.25).contains(&ratio), "{ratio}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_checked_page_is_over_its_bound(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        scale in prop_oneof![Just(0f32), Just(1e-6), Just(0.01), Just(1.0), Just(9.0), Just(3e4)],
        outlier in prop_oneof![Just(1f32), Just(300.0)],
        bound in prop_oneof![Just(0.5f32), Just(0.1), Just(0.03), Just(0.0005)],
        text in prop::sample::select(vec![
            "k=vq(d=4,b=4); v=vq(d=4,b=4)",
            "k=mean+pca/grid(rate=2)/huffman; v=mean+pca/grid(rate=2)/huffman",
            "k=uniform(b=2,axis=channel)/huffman; v=uniform(b=2,axis=token)",
            "k=fp8; v=raw",
        ]),
    ) {
        let mut codec = codec(&format!("{text}; k.bound={bound}; v.bound={bound}"));
        let spread = |i: usize| if i % 32 == 3 { scale * outlier } else { scale };
        let value = |i: usize| noise(seed * 977 + i) * spread(i);
        let k: Vec<f32> =
            (0..2 * tokens * 32).map(|i| common::round(value(i).clamp(-6e4, 6e4))).collect();
        let block = BlockRows { tokens, k: &k, v: &k };
        codec.train_tables(LAYER, &[block]).unwrap();
        let mut bytes = Vec::new();
        let (encoded, _) = codec.encode_block_checked(LAYER, &block, &mut bytes).unwrap();
        for (index, page) in pages(&bytes, &encoded).enumerate() {
            let (side, head) = (Side::BOTH[index / 2], index % 2);
            let reader = PageReader::open_page(&codec, LAYER, side, head, page).unwrap();
            let originals = &k[head * tokens * 32..][..tokens * 32];
            let error = error(&codec, &reader, originals, side);
            prop_assert!(error <= bound * 1.001, "{side} head {head}: {error}");
        }
    }
}

#[test]
fn bounds_are_part_of_the_text() {
    let spec = resolve_spec("k=raw; v=raw; v.bound=0.25; k.bound=1").unwrap();
    assert_eq!(spec.bounds, [Some(1.0), Some(0.25)]);
    assert_eq!(spec.to_string(), "k=raw; v=raw; k.bound=1; v.bound=0.25");
    for (text, position, part) in [
        ("k=raw; v=raw; k.bound=0", 22, "above 0"),
        ("k=raw; v=raw; k.bound=1.5", 22, "at most 1"),
        ("k=raw; v=raw; k.bound=NaN", 22, "at most 1"),
        ("k=raw; v=raw; k.bound=x", 22, "is not a number"),
        ("k=raw; v=raw; bound=1", 14, "is not k, v"),
        ("k=raw; v=raw; k.bound=1; k.bound=1", 25, "twice"),
    ] {
        let error = resolve_spec(text).unwrap_err();
        assert!(error.message.contains(part) && error.position == position, "{text}: {error}");
    }
}
