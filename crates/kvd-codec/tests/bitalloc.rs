//! The bit allocation: its widths, its error bound, and its part of the calibration artefact.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{calibrate, geometry, noise, page, rows};
use kvd_codec::{
    BlockRows, Calibration, CalibrationError, EncodedBlock, ModelCodec, PageReader, RowSpace,
    resolve_spec,
};
use kvd_core::{DType, LayerIndex, Side};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::collections::HashMap;

const SPEC: &str = "k=mean+qpca/bitalloc(b=2.5); v=mean+pca/bitalloc(b=1.5)";
const DIM: usize = 32;

fn calibration() -> Calibration {
    calibrate(&geometry(DIM as u32, DType::F32), &resolve_spec(SPEC).unwrap()).unwrap()
}

fn codec(calibration: &Calibration) -> ModelCodec {
    let geometry = geometry(DIM as u32, DType::F32);
    ModelCodec::new(geometry, resolve_spec(SPEC).unwrap(), Some(calibration)).unwrap()
}

fn encode(codec: &ModelCodec, layer: u32, rows: &[f32]) -> (EncodedBlock, Vec<u8>) {
    let (mut bytes, tokens) = (Vec::new(), rows.len() / 2 / DIM);
    let block = BlockRows { tokens, k: rows, v: rows };
    (codec.encode_block(LayerIndex(layer), &block, &mut bytes).unwrap(), bytes)
}

/// A tensor of part `side` of the artefact.
fn tensor(calibration: &Calibration, side: Side, name: &str) -> Vec<u8> {
    let bytes = calibration.to_bytes();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensor(&format!("{}.{name}", side.index())).unwrap().data().to_vec()
}

#[test]
fn widths_of_a_side_add_up_to_what_was_asked_for() {
    let calibration = calibration();
    for (side, bits) in [(Side::Key, 2.5), (Side::Value, 1.5)] {
        let widths = tensor(&calibration, side, "width");
        let sum: u32 = widths.iter().map(|width| u32::from(*width)).sum();
        assert_eq!(f64::from(sum), bits * widths.len() as f64);
        for head in widths.chunks(DIM) {
            assert!(head.is_sorted_by(|a, b| a >= b), "{side}: {head:?}");
        }
    }
    // So do the pages of all layers, where no value is an outlier: zeros are none.
    let codec = codec(&calibration);
    let codes: u64 =
        (0..2).map(|layer| encode(&codec, layer, &[0.0; 2 * 64 * DIM]).0.parts.codes).sum();
    assert_eq!(codes * 8, (2.5f64 + 1.5) as u64 * (2 * 2 * 64 * DIM) as u64);
}

#[test]
fn an_outlier_costs_six_bytes_and_comes_back() {
    let codec = codec(&calibration());
    let mut values = rows(codec.geometry(), 64, 5);
    let before = encode(&codec, 0, &values).0;
    values[3 * DIM + 7] = 500.0;
    let (after, bytes) = encode(&codec, 0, &values);
    assert!(after.parts.scales > before.parts.scales);
    assert_eq!((after.parts.scales - before.parts.scales) % 6, 0);
    assert_eq!((after.parts.codes, after.fallback_pages), (before.parts.codes, 0));
    let decoded = common::decode(&codec, Side::Key, 0, page(&bytes, &after, 0));
    assert!((decoded[3 * DIM + 7] - 500.0).abs() < 2.0, "{}", decoded[3 * DIM + 7]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_finite_row_errs_by_the_bound_or_falls_back(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        scale in prop_oneof![Just(0f32), Just(1e-40), Just(1.0), Just(10.0), Just(1e5), Just(1e38)],
    ) {
        let calibration = calibration();
        let codec = codec(&calibration);
        let k: Vec<f32> = (0..2 * tokens * DIM).map(|i| noise(seed * 131 + i) * scale).collect();
        let (encoded, bytes) = encode(&codec, 0, &k);
        for side in Side::BOTH {
            let bound = tensor(&calibration, side, "bound");
            let bound = f32::from_le_bytes(*bound.first_chunk().unwrap());
            let page = page(&bytes, &encoded, 2 * side.index());
            let reader = PageReader::open_page(&codec, LayerIndex(0), side, 0, page).unwrap();
            let mut stored = vec![0f32; tokens * DIM];
            reader.decode_rows(0, tokens, &mut stored).unwrap();
            if reader.space() == RowSpace::Raw {
                prop_assert!(scale >= 10.0, "{side} fell back at {scale}");
                prop_assert_eq!(&stored[..], &k[..tokens * DIM]);
                continue;
            }
            for (row, stored) in k.chunks(DIM).zip(stored.chunks(DIM)) {
                let mut forward = row.to_vec();
                codec.head_codec(LayerIndex(0), side, 0).transform_rows(&mut forward);
                for (c, s) in forward.iter().zip(stored) {
                    // An outlier's remainder is kept in f16.
                    let bound = bound.max(c.abs() / 1024.0) * 1.001;
                    prop_assert!((c - s).abs() <= bound, "{c} became {s}");
                }
            }
        }
    }
}

#[test]
fn fits_are_deterministic_and_round_trip() {
    let first = calibration();
    assert_eq!(first.to_bytes(), calibration().to_bytes());
    let read = Calibration::from_bytes(&first.to_bytes()).unwrap();
    assert_eq!(read, first);
    // Per side: 4 heads with means, a matrix, scales, widths and a bound; levels of 2 layers.
    let heads = 4 * (DIM * 4 + DIM * DIM * 2 + DIM * 5 + 4);
    assert_eq!(first.size_bytes(), 2 * (heads + 2 * 510 * 2) as u64);
    assert_eq!(codec(&read).calibration_bytes(), first.size_bytes());
}

/// The artefact with the bytes of one tensor changed.
fn altered(name: &str, change: impl Fn(&mut Vec<u8>)) -> Result<Calibration, CalibrationError> {
    let bytes = calibration().to_bytes();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let parts = tensors.tensors().into_iter().map(|(found, view)| {
        let mut data = view.data().to_vec();
        if found == name {
            change(&mut data);
        }
        (found, view.dtype(), view.shape().to_vec(), data)
    });
    let parts: Vec<_> = parts.collect();
    let views = parts.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let metadata: HashMap<String, String> = header.metadata().clone().unwrap();
    Calibration::from_bytes(&safetensors::serialize(views, Some(metadata)).unwrap())
}

#[test]
fn damaged_allocations_are_refused() {
    assert_eq!(altered("0.width", |_| {}).unwrap(), calibration());
    assert!(altered("0.width", |data| data[3] = 9).is_err());
    let floats =
        |value: f32| move |data: &mut Vec<u8>| data[..4].copy_from_slice(&value.to_le_bytes());
    for (name, value) in [("0.scale", 0.0), ("1.bound", -1.0), ("1.scale", f32::NAN)] {
        assert!(altered(name, floats(value)).is_err(), "{name} {value}");
    }
    // An f16 infinity, and levels that descend.
    assert!(altered("1.levels", |data| data[2..4].copy_from_slice(&[0, 0x7C])).is_err());
    assert!(altered("1.levels", |data| data.swap(1, 3)).is_err());
}
