//! The grid quantizer: its error bound, its rate, and its part of the calibration artefact.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{calibrate, decode, geometry, noise, page, rows};
use kvd_codec::{
    BlockRows, Calibration, CalibrationError, CodecError, ModelCodec, PageReader, RowSpace,
    resolve_spec,
};
use kvd_core::{Coded, DType, ErrorCode, Geometry, LayerIndex, Side};
use kvd_fit::{Samples, fit_calibration};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::collections::HashMap;

const LAYER: LayerIndex = LayerIndex(0);
const SPEC: &str = "kvd-2";

fn calibration() -> Calibration {
    calibrate(&geometry(32, DType::F32), &resolve_spec(SPEC).unwrap()).unwrap()
}

/// The step of head 0 of layer 0.
fn step(calibration: &Calibration, side: Side) -> f32 {
    let bytes = calibration.to_bytes();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(&format!("{}.step", side.index())).unwrap();
    f32::from_le_bytes(*tensor.data().first_chunk().unwrap())
}

/// Rows of several heads: wide along a few directions of the head's own, `rows` of each.
fn turned_rows(dim: usize, heads: usize, rows: usize) -> Vec<Vec<f32>> {
    let mut drawn = 0;
    let mut draw = || {
        drawn += 1;
        noise(drawn)
    };
    let head = |_| {
        let mirrors: Vec<Vec<f32>> = (0..dim).map(|_| (0..dim).map(|_| draw()).collect()).collect();
        let mut values: Vec<f32> =
            (0..rows * dim).map(|i| draw() * 0.7f32.powi((i % dim) as i32)).collect();
        for row in values.chunks_mut(dim) {
            for mirror in &mirrors {
                let dot =
                    |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
                let factor = 2.0 * dot(row, mirror) / dot(mirror, mirror);
                row.iter_mut().zip(mirror).for_each(|(x, m)| *x -= factor * m);
            }
        }
        values
    };
    (0..heads).map(head).collect()
}

/// By head: the power of two at which its axes are stored, and the step of its values themselves.
fn scales_and_steps(geometry: &Geometry, heads: &[Vec<f32>], without: usize) -> Vec<[f32; 2]> {
    let dim = geometry.head_dim_v as usize;
    let mut samples = Samples::new(geometry);
    for (head, rows) in heads.iter().enumerate() {
        for (index, row) in rows.chunks(dim).enumerate().filter(|(index, _)| *index != without) {
            samples.push(LAYER, Side::Value, head, row).unwrap_or_else(|e| panic!("{index}: {e}"));
        }
    }
    let spec = resolve_spec("k=raw; v=pca/grid(rate=2)/huffman").unwrap();
    let fitted = fit_calibration(geometry, &spec, &samples, 0, &mut |_| {}).unwrap().to_bytes();
    let tensors = SafeTensors::deserialize(&fitted).unwrap();
    let [steps, axes] = ["0.step", "0.matrix"].map(|name| tensors.tensor(name).unwrap().data());
    let axes: Vec<f32> = axes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|bytes| half::f16::from_le_bytes(*bytes).to_f32())
        .collect();
    let steps = steps.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let axes = axes.chunks(dim * dim);
    let scale = |axes: &[f32]| axes[..dim].iter().map(|x| x * x).sum::<f32>().sqrt().round();
    axes.zip(steps).map(|(axes, step)| [scale(axes), step / scale(axes)]).collect()
}

/// Axes are stored at a power of two that their largest entry chooses, on either side of a half by
/// chance: neither heads nor fits that differ in it may get other steps.
#[test]
fn steps_do_not_depend_on_the_power_of_two_of_stored_axes() {
    let mut geometry = geometry(64, DType::F32);
    (geometry.layers, geometry.kv_heads) = (1, 8);
    let heads = turned_rows(64, 8, 400);
    let whole = scales_and_steps(&geometry, &heads, usize::MAX);
    let largest = whole.iter().map(|[scale, _]| *scale).fold(0f32, f32::max);
    assert!(whole.iter().any(|[scale, _]| *scale < largest), "all alike: {whole:?}");
    let first = whole[0][1];
    for without in [usize::MAX, 0, 57, 101, 222, 399] {
        for [scale, step] in scales_and_steps(&geometry, &heads, without) {
            assert!((step / first - 1.0).abs() < 0.03, "{step} for {first} at {scale}, {without}");
        }
    }
}

/// A short row errs by a step of its own, and only pages with one store gains.
#[test]
fn errors_of_short_values_shrink_with_them() {
    let geometry = geometry(32, DType::F32);
    let calibration = calibration();
    let codec = ModelCodec::new(geometry, resolve_spec(SPEC).unwrap(), Some(&calibration)).unwrap();
    let bytes = calibration.to_bytes();
    let gain = SafeTensors::deserialize(&bytes).unwrap();
    let median = f32::from_le_bytes(*gain.tensor("1.gain").unwrap().data().first_chunk().unwrap());
    let mut k: Vec<f32> = (0..2 * 9 * 32).map(noise).collect();
    for row in k.chunks_mut(32) {
        let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        row.iter_mut().for_each(|x| *x *= median / length);
    }
    let mut sizes = Vec::new();
    for length in [1.0, 2f32.powi(-4)] {
        let lengths = |row: usize| if row % 9 == 4 { length } else { 1.0 };
        let v: Vec<f32> = k.iter().enumerate().map(|(i, x)| x * lengths(i / 32)).collect();
        let mut bytes = Vec::new();
        let block = BlockRows { tokens: 9, k: &k, v: &v };
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        let page = page(&bytes, &encoded, 2);
        let reader = PageReader::open_page(&codec, LAYER, Side::Value, 0, page).unwrap();
        assert_eq!(reader.gains().is_some(), length < 1.0);
        let mut stored = vec![0f32; 32];
        reader.decode_rows(4, 1, &mut stored).unwrap();
        let mut coefficients = v[4 * 32..5 * 32].to_vec();
        codec.head_codec(LAYER, Side::Value, 0).transform_rows(&mut coefficients);
        let errors = stored.iter().zip(&coefficients).map(|(a, b)| (a - b).abs());
        let worst = errors.fold(0f32, f32::max);
        assert!(worst <= 0.5001 * step(&calibration, Side::Value) * (2.0 * length).min(1.0));
        sizes.push(encoded.parts.scales);
    }
    // Two heads, half a byte for each of nine rows.
    assert_eq!(sizes, [0, 10]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_finite_row_errs_by_half_a_step_or_falls_back(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        scale in prop_oneof![Just(0f32), Just(1e-3), Just(1.0), Just(30.0), Just(1e5), Just(1e38)],
    ) {
        let geometry = geometry(32, DType::F32);
        let calibration = calibration();
        let spec = resolve_spec(SPEC).unwrap();
        let codec = ModelCodec::new(geometry, spec, Some(&calibration)).unwrap();
        let k: Vec<f32> = (0..2 * tokens * 32).map(|i| noise(seed * 131 + i) * scale).collect();
        let mut bytes = Vec::new();
        let block = BlockRows { tokens, k: &k, v: &k };
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        for side in Side::BOTH {
            let page = page(&bytes, &encoded, 2 * side.index());
            let reader = PageReader::open_page(&codec, LAYER, side, 0, page).unwrap();
            let mut stored = vec![0f32; tokens * 32];
            reader.decode_rows(0, tokens, &mut stored).unwrap();
            if reader.space() == RowSpace::Raw {
                prop_assert!(scale > 100.0, "{side} fell back at {scale}");
                prop_assert_eq!(&stored[..], &k[..tokens * 32]);
                continue;
            }
            let bound = step(&calibration, side) * 0.5001;
            for (row, stored) in k.chunks(32).zip(stored.chunks(32)) {
                let mut forward = row.to_vec();
                codec.head_codec(LAYER, side, 0).transform_rows(&mut forward);
                for (c, s) in forward.iter().zip(stored) {
                    prop_assert!((c - s).abs() <= bound + c.abs() * 1e-6, "{c} became {s}");
                }
            }
        }
    }
}

#[test]
fn pages_of_like_rows_take_the_rate() {
    take_the_rate(1500, 0.15);
}

#[test]
fn pages_take_the_rate_when_samples_are_few() {
    // Axes of so few rows fit those better than any others; a rate measured on them is too low.
    take_the_rate(160, 0.4);
}

/// Fits grids to `count` rows per head; pages of other rows take the rate or up to `less` less.
fn take_the_rate(count: usize, less: f32) {
    let geometry = geometry(64, DType::F16);
    let row = |seed: usize| {
        (0..64).map(move |i| noise(seed * 64 + i) * 0.9f32.powi(i as i32)).collect::<Vec<f32>>()
    };
    let mut samples = Samples::new(&geometry);
    for place in 0..4 {
        let (layer, head) = (LayerIndex(place as u32 / 2), place % 2);
        let rows: Vec<f32> = (0..count).flat_map(|i| row(place * 7000 + i)).collect();
        samples.push_queries(layer, head, &rows).unwrap();
        for side in Side::BOTH {
            samples.push(layer, side, head, &rows).unwrap();
        }
    }
    let k: Vec<f32> = (0..128).flat_map(|i| row(99_000 + i)).collect();
    let mut finer = f32::INFINITY;
    for rate in [1.5f32, 2.0, 3.0, 4.0] {
        let text =
            format!("k=mean+qpca/grid(rate={rate})/huffman; v=mean+pca/grid(rate={rate})/huffman");
        let spec = resolve_spec(&text).unwrap();
        let fitted = fit_calibration(&geometry, &spec, &samples, 1, &mut |_| {}).unwrap();
        let codec = ModelCodec::new(geometry.clone(), spec, Some(&fitted)).unwrap();
        let mut bytes = Vec::new();
        let block = BlockRows { tokens: 64, k: &k, v: &k };
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        let bits = bytes.len() as f32 * 8.0 / (4 * 64 * 64) as f32;
        assert!((rate - less..rate + 0.05).contains(&bits), "rate {rate} took {bits}");
        let decoded = decode(&codec, Side::Value, 1, page(&bytes, &encoded, 3));
        let original = &k[64 * 64..];
        let error: f32 = original.iter().zip(&decoded).map(|(a, b)| (a - b) * (a - b)).sum();
        assert!(error < 0.6 * finer, "rate {rate}: {error} after {finer}");
        finer = error;
    }
}

#[test]
fn fits_are_deterministic_and_round_trip() {
    let geometry = geometry(32, DType::F32);
    let (first, second) = (calibration(), calibration());
    assert_eq!(first.to_bytes(), second.to_bytes());
    let read = Calibration::from_bytes(&first.to_bytes()).unwrap();
    assert_eq!(read, first);
    let codec = ModelCodec::new(geometry, resolve_spec(SPEC).unwrap(), Some(&read)).unwrap();
    // Per side: 4 heads with means, a matrix, a step and classes; tables of 2 layers; gains of
    // value heads.
    let heads = 4 * (32 * 4 + 32 * 32 * 2 + 4 + 32);
    assert_eq!(first.size_bytes(), 2 * (heads + 2 * (3 * 81 + 5 * 225 + 6 * 31)) + 4 * 4);
    assert_eq!(codec.calibration_bytes(), first.size_bytes());
    assert!(!codec.needs_tables(LAYER));
}

/// The artefact with the bytes of one tensor changed.
fn altered(name: &str, change: impl Fn(&mut Vec<u8>)) -> Result<Calibration, CalibrationError> {
    let bytes = calibration().to_bytes();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let parts: Vec<_> = tensors
        .tensors()
        .into_iter()
        .map(|(found, view)| {
            let mut data = view.data().to_vec();
            if found == name {
                change(&mut data);
            }
            (found, view.dtype(), view.shape().to_vec(), data)
        })
        .filter(|(.., data)| !data.is_empty())
        .collect();
    let views = parts.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let metadata: HashMap<String, String> = header.metadata().clone().unwrap();
    Calibration::from_bytes(&safetensors::serialize(views, Some(metadata)).unwrap())
}

#[test]
fn damaged_grids_are_refused() {
    assert_eq!(altered("0.step", |_| {}).unwrap(), calibration());
    let floats =
        |value: f32| move |data: &mut Vec<u8>| data[..4].copy_from_slice(&value.to_le_bytes());
    for (name, value) in
        [("0.step", 0.0), ("1.step", -1.0), ("0.step", f32::NAN), ("1.mean", f32::INFINITY)]
    {
        assert!(altered(name, floats(value)).is_err(), "{name} {value}");
    }
    // An f16 infinity.
    assert!(altered("0.matrix", |data| data[..2].copy_from_slice(&[0, 0x7C])).is_err());
    assert!(altered("0.class", |data| data[5] = 15).is_err());
    // Codes are complete and of at most 8 bits.
    for (at, value) in [(0, 255), (0, 9), (81, 9), (81, 255)] {
        assert!(altered("1.table", |data| data[at] = value).is_err(), "table {at} {value}");
    }
}

#[test]
fn a_matrix_without_an_inverse_is_refused() {
    let damaged = altered("0.matrix", |data| data.fill(0)).unwrap();
    let codec =
        ModelCodec::new(geometry(32, DType::F32), resolve_spec(SPEC).unwrap(), Some(&damaged));
    assert!(matches!(codec.unwrap_err(), CodecError::CalibrationMismatch { .. }));
}

#[test]
fn what_does_not_fit_is_refused() {
    let geometry = geometry(32, DType::F32);
    let calibration = calibration();
    for text in ["kvd-3", "k=mean+pca/grid(rate=2)/huffman; v=raw", "k=mean/raw; v=raw"] {
        let codec =
            ModelCodec::new(geometry.clone(), resolve_spec(text).unwrap(), Some(&calibration));
        let error = codec.unwrap_err();
        assert!(matches!(error, CodecError::CalibrationMismatch { .. }), "{text}: {error}");
    }
    let mut samples = Samples::new(&geometry);
    let rows = rows(&geometry, 40, 3);
    for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for side in Side::BOTH {
            samples.push(LayerIndex(layer), side, head, &rows).unwrap();
        }
    }
    let fit = |text: &str| {
        fit_calibration(&geometry, &resolve_spec(text).unwrap(), &samples, 0, &mut |_| {})
    };
    let error = fit(SPEC).unwrap_err();
    assert_eq!(error, CalibrationError::NoQueries { layer: 0, head: 0 });
    assert_eq!(error.code(), ErrorCode::InvalidCalibration);
    assert!(resolve_spec("k=raw; v=gain+mean/f16").is_err());
    for spec in ["k=raw; v=qpca/f16", "k=gain/f16; v=raw"] {
        assert_eq!(fit(spec).unwrap_err().code(), ErrorCode::InvalidCodec, "{spec}");
    }
    assert!(fit("k=mean+pca/grid(rate=2)/huffman; v=raw").is_ok());
}

#[test]
fn heads_without_spread_can_be_fitted() {
    let geometry = geometry(32, DType::F32);
    let mut samples = Samples::new(&geometry);
    for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        samples.push_queries(LayerIndex(layer), head, &[0.0; 32]).unwrap();
        for side in Side::BOTH {
            samples.push(LayerIndex(layer), side, head, &[3.0; 64]).unwrap();
        }
    }
    let spec = resolve_spec(SPEC).unwrap();
    let fitted = fit_calibration(&geometry, &spec, &samples, 0, &mut |_| {}).unwrap();
    let codec = ModelCodec::new(geometry, spec, Some(&fitted)).unwrap();
    let k = [3.0f32; 64];
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LAYER, &BlockRows { tokens: 1, k: &k, v: &k }, &mut bytes);
    let decoded = decode(&codec, Side::Key, 0, page(&bytes, &encoded.unwrap(), 0));
    assert!(decoded.iter().all(|x| (x - 3.0).abs() < 1e-3), "{decoded:?}");
}
