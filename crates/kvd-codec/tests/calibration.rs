//! The artefact: deterministic, read back as written, refused where it does not belong.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{calibrate, geometry};
use kvd_codec::{Calibration, CalibrationError, CodecError, ModelCodec, resolve_spec};
use kvd_core::{Coded, DType, ErrorCode, LayerIndex, Side};
use kvd_fit::{Samples, fit_calibration};
use proptest::prelude::*;
use safetensors::SafeTensors;

#[test]
fn fits_are_deterministic_and_round_trip() {
    let geometry = geometry(32, DType::F16);
    let spec = resolve_spec("vecinfer-2").unwrap();
    let first = calibrate(&geometry, &spec).unwrap();
    let second = calibrate(&geometry, &spec).unwrap();
    assert_eq!(first.to_bytes(), second.to_bytes());
    let read = Calibration::from_bytes(&first.to_bytes()).unwrap();
    assert_eq!(read, first);
    let parts = [(Side::Key, "smooth+hadamard/vq(d=4,b=8)"), (Side::Value, "/vq(d=4,b=8)")];
    assert!(read.seed() == 7 && read.parts().eq(parts));
    assert_eq!(read.geometry(), &geometry);
    // Per layer and head: 32 factors of f32, and two codebooks of 256 x 4 f16.
    assert_eq!(first.size_bytes(), 4 * (32 * 4 + 2 * 256 * 4 * 2));
    let codec = ModelCodec::new(geometry, spec, Some(&read)).unwrap();
    assert_eq!(codec.calibration_bytes(), first.size_bytes());

    let bytes = first.to_bytes();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("0.smooth").unwrap().shape(), [2, 2, 32]);
    assert_eq!(tensors.tensor("1.codebook").unwrap().shape(), [2, 2, 1, 1, 256, 4]);
    assert!(tensors.tensor("1.smooth").is_err());
}

#[test]
fn smoothing_factors_are_the_roots_of_the_maxima() {
    let mut geometry = geometry(32, DType::F32);
    (geometry.layers, geometry.kv_heads) = (1, 1);
    let mut samples = Samples::new(&geometry);
    let mut row = vec![0f32; 32];
    (row[0], row[1]) = (-16.0, 0.25);
    samples.push(LayerIndex(0), Side::Key, 0, &row).unwrap();
    row[0] = 4.0;
    samples.push(LayerIndex(0), Side::Key, 0, &row).unwrap();
    let spec = resolve_spec("k=smooth/f32; v=raw").unwrap();
    let mut seen = Vec::new();
    let fitted =
        fit_calibration(&geometry, &spec, &samples, 0, &mut |p| seen.push((p.done, p.total)));
    assert_eq!(seen, [(1, 1)]);
    let codec = ModelCodec::new(geometry, spec, Some(&fitted.unwrap())).unwrap();
    let mut out = vec![1f32; 32];
    codec.head_codec(LayerIndex(0), Side::Key, 0).transform_rows(&mut out);
    assert_eq!(out[..3], [0.25, 2.0, 1.0]);
}

#[test]
fn radii_are_of_the_models_pairs() {
    let mut geometry = geometry(32, DType::F32);
    (geometry.layers, geometry.kv_heads) = (1, 1);
    let mut samples = Samples::new(&geometry);
    let mut row = vec![0f32; 32];
    // Channels 1 and 17 turn together.
    (row[1], row[17]) = (3.0, -4.0);
    samples.push(LayerIndex(0), Side::Key, 0, &row).unwrap();
    let spec = resolve_spec("k=polar(a=4,r=4); v=raw").unwrap();
    let fitted = fit_calibration(&geometry, &spec, &samples, 0, &mut |_| {}).unwrap();
    assert_eq!(fitted.size_bytes(), 2 * 16);
    let read = Calibration::from_bytes(&fitted.to_bytes()).unwrap();
    assert_eq!(read, fitted);
    let bytes = fitted.to_bytes();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let radii = tensors.tensor("0.radius").unwrap();
    assert_eq!(radii.shape(), [1, 1, 16]);
    // 5 and 0 as f16.
    assert_eq!(radii.data()[..4], [0, 0, 0x00, 0x45]);
    let codec = ModelCodec::new(geometry.clone(), spec.clone(), Some(&read)).unwrap();
    assert_eq!(codec.calibration_bytes(), 2 * 16);
    geometry.rope_pairing = kvd_core::RopePairing::Interleaved;
    let error = ModelCodec::new(geometry, spec, Some(&read)).unwrap_err();
    assert!(error.to_string().contains("rope pairs"), "{error}");
}

#[test]
fn what_does_not_fit_is_refused() {
    let geometry = geometry(32, DType::F16);
    let spec = resolve_spec("vecinfer-2").unwrap();
    let fitted = calibrate(&geometry, &spec).unwrap();
    let new = |geometry: &kvd_core::Geometry, text: &str, calibration| {
        ModelCodec::new(geometry.clone(), resolve_spec(text).unwrap(), calibration).unwrap_err()
    };
    let missing = new(&geometry, "vecinfer-2", None);
    assert!(matches!(missing, CodecError::CalibrationMissing { .. }));
    assert_eq!(missing.code(), ErrorCode::InvalidCalibration);
    for text in [
        "k=hadamard/vq(d=4,b=8); v=raw",
        "k=smooth+hadamard/vq(d=4,b=7); v=raw",
        "k=smooth+hadamard/vq(d=2,b=8); v=raw",
        "k=smooth+hadamard/vq(d=4,b=8,stages=2); v=raw",
        "k=smooth+hadamard/vq(d=4,b=8,scope=layer); v=raw",
        "k=smooth+hadamard/vq(d=4,b=8,scope=group); v=raw",
        "k=raw; v=smooth/raw",
    ] {
        let error = new(&geometry, text, Some(&fitted));
        assert!(matches!(error, CodecError::CalibrationMismatch { .. }), "{text}: {error}");
    }
    let mut other = geometry.clone();
    other.head_dim_v = 64;
    assert!(matches!(
        new(&other, "vecinfer-2", Some(&fitted)),
        CodecError::CalibrationMismatch { .. }
    ));
    let odd = common::geometry(30, DType::F16);
    let fit = |text: &str| {
        fit_calibration(&odd, &resolve_spec(text).unwrap(), &Samples::new(&odd), 0, &mut |_| {})
    };
    assert_eq!(fit("vecinfer-2").unwrap_err().code(), ErrorCode::InvalidCodec);
    let fitted = calibrate(&odd, &resolve_spec("k=raw; v=vq(d=2,b=3)").unwrap());
    let error = new(&odd, "k=raw; v=vq(d=4,b=3)", fitted.as_ref());
    assert_eq!(error.code(), ErrorCode::InvalidCodec);
}

#[test]
fn samples_are_checked() {
    let geometry = geometry(32, DType::F16);
    let spec = resolve_spec("vecinfer-2").unwrap();
    let mut samples = Samples::new(&geometry);
    let mut push = |layer, head, rows: &[f32]| {
        samples.push(LayerIndex(layer), Side::Key, head, rows).unwrap_err().code()
    };
    assert_eq!(push(2, 0, &[0.0; 32]), ErrorCode::InvalidCalibration);
    assert_eq!(push(0, 2, &[0.0; 32]), ErrorCode::InvalidCalibration);
    assert_eq!(push(0, 0, &[0.0; 33]), ErrorCode::InvalidCalibration);
    assert_eq!(push(0, 0, &[f32::NAN; 32]), ErrorCode::NonFinite);
    let error = fit_calibration(&geometry, &spec, &samples, 0, &mut |_| {}).unwrap_err();
    assert_eq!(error, CalibrationError::NoSamples { layer: 0, side: Side::Key, head: 0 });
    let huge: Vec<f32> = (0..32 * 32).map(|i| 1e30 * (1.0 + i as f32 / 2048.0)).collect();
    for side in Side::BOTH {
        for (layer, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            samples.push(LayerIndex(layer), side, head, &huge).unwrap();
        }
    }
    let error = fit_calibration(&geometry, &spec, &samples, 0, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CalibrationError::OutOfRange { .. }), "{error}");
}

proptest! {
    #[test]
    fn foreign_bytes_are_errors(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Calibration::from_bytes(&bytes).is_err());
    }

    #[test]
    fn damaged_artefacts_never_panic(
        at in any::<prop::sample::Index>(),
        change in 1u8..,
    ) {
        let geometry = geometry(32, DType::F16);
        let spec = resolve_spec("k=smooth/vq(d=4,b=2); v=raw").unwrap();
        let mut bytes = calibrate(&geometry, &spec).unwrap().to_bytes();
        let at = at.index(bytes.len());
        bytes[at] ^= change;
        if let Ok(calibration) = Calibration::from_bytes(&bytes) {
            let _ = ModelCodec::new(geometry, spec, Some(&calibration));
        }
    }
}
