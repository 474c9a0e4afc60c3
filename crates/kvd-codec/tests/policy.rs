//! One codec with other sides for some layers and heads: encoded, read back, refused.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{calibrate, geometry, rows};
use kvd_codec::{BlockRows, ModelCodec, PageReader, resolve_spec};
use kvd_core::{DType, LayerIndex, Side};

const POLICY: &str = "k=uniform(b=4,axis=channel)/huffman; v=vq(d=4,b=4);
    k[layer=0,head=1]=uniform(b=2,axis=token)/huffman;
    v[layer=1]=mean+pca/grid(rate=3)/huffman; v[layer=1,head=0]=raw";

#[test]
fn every_head_is_kept_as_its_policy_says() {
    let geometry = geometry(32, DType::F16);
    let spec = resolve_spec(POLICY).unwrap();
    let calibration = calibrate(&geometry, &spec).unwrap();
    let fitted: Vec<_> = calibration.parts().map(|(side, text)| format!("{side}={text}")).collect();
    assert_eq!(fitted, ["v=/vq(d=4,b=4)", "v=mean+pca/grid(rate=3)"]);
    let mut codec = ModelCodec::new(geometry.clone(), spec, Some(&calibration)).unwrap();
    let values = rows(&geometry, 24, 3);
    let block = BlockRows { tokens: 24, k: &values, v: &values };
    let mut ids = Vec::new();
    for layer in [LayerIndex(0), LayerIndex(1)] {
        assert!(codec.needs_tables(layer));
        codec.train_tables(layer, &[block]).unwrap();
        let mut out = Vec::new();
        let encoded = codec.encode_block(layer, &block, &mut out).unwrap();
        let mut start = 0;
        for (index, end) in encoded.page_ends.iter().enumerate() {
            let (side, head) = (Side::BOTH[index / 2], index % 2);
            let page = &out[start..*end as usize];
            let reader = PageReader::open_page(&codec, layer, side, head, page).unwrap();
            let mut coefficients = vec![0f32; 24 * 32];
            reader.decode_rows(0, 24, &mut coefficients).unwrap();
            let head_side = codec.head_codec(layer, side, head);
            let (mut error, mut energy) = (0.0, 0.0);
            let originals = values[head * 24 * 32..].chunks_exact(32);
            for (c, row) in coefficients.chunks_exact(32).zip(originals) {
                let mut back = vec![0f32; 32];
                head_side.invert_row(c, &mut back);
                error += back.iter().zip(row).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
                energy += row.iter().map(|x| x * x).sum::<f32>();
            }
            assert!(error < 0.5 * energy, "layer {layer} {side} head {head}: {error} of {energy}");
            ids.push(reader.header().quantizer);
            start = *end as usize;
        }
    }
    assert_eq!(ids, [16, 16, 32, 32, 16, 16, 1, 48]);
    // Layer 0 has a table for each kind of key, layer 1 one; grid tables count as calibration.
    assert_eq!(codec.table_bytes(), (16 + 4) + 16);
    assert!(codec.calibration_bytes() < calibration.size_bytes());
}

#[test]
fn a_page_of_another_head_is_refused() {
    let geometry = geometry(32, DType::F16);
    let mut codec = ModelCodec::new(
        geometry.clone(),
        resolve_spec("k=raw; v=raw; k[head=1]=fp8").unwrap(),
        None,
    )
    .unwrap();
    let values = rows(&geometry, 8, 1);
    let block = BlockRows { tokens: 8, k: &values, v: &values };
    let mut out = Vec::new();
    let encoded = codec.encode_block(LayerIndex(0), &block, &mut out).unwrap();
    let first = &out[..encoded.page_ends[0] as usize];
    assert!(PageReader::open_page(&codec, LayerIndex(0), Side::Key, 0, first).is_ok());
    assert!(PageReader::open_page(&codec, LayerIndex(0), Side::Key, 1, first).is_err());
    codec.train_tables(LayerIndex(0), &[block]).unwrap();
    assert_eq!(codec.table_bytes(), 0);
}

#[test]
fn merged_calibrations_serve_a_mixed_policy() {
    let geometry = geometry(32, DType::F16);
    let vq = resolve_spec("k=smooth/vq(d=4,b=4); v=raw").unwrap();
    let grid = resolve_spec("k=raw; v=mean+pca/grid(rate=2)/huffman").unwrap();
    let mixed = resolve_spec("k=smooth/vq(d=4,b=4); v=mean+pca/grid(rate=2)/huffman").unwrap();
    let mut calibration = calibrate(&geometry, &vq).unwrap();
    let error = ModelCodec::new(geometry.clone(), mixed.clone(), Some(&calibration)).unwrap_err();
    assert!(error.to_string().contains("not for v=mean+pca/grid(rate=2)"), "{error}");
    calibration.merge_parts(calibrate(&geometry, &grid).unwrap()).unwrap();
    calibration.merge_parts(calibrate(&geometry, &vq).unwrap()).unwrap();
    assert_eq!(calibration.parts().count(), 2);
    assert!(ModelCodec::new(geometry, mixed, Some(&calibration)).is_ok());
    let other = calibrate(&common::geometry(64, DType::F16), &grid).unwrap();
    assert!(calibration.merge_parts(other).is_err());
}

#[test]
fn an_override_outside_the_model_is_refused() {
    for (text, part) in [
        ("k=raw; v=raw; k[layer=2]=fp8", "the model has 2 layers"),
        ("k=raw; v=raw; v[head=0-2]=fp8", "the model has 2 KV heads"),
    ] {
        let error = ModelCodec::new(geometry(32, DType::F16), resolve_spec(text).unwrap(), None);
        assert!(error.unwrap_err().to_string().contains(part), "{text}");
    }
}
