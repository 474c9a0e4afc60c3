//! A page takes exactly the bits that its spec says.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{SPECS, codec, geometry, rows};
use kvd_codec::{BlockRows, Quantizer, Transform, resolve_spec};
use kvd_core::{DType, LayerIndex, Side};

#[test]
fn implied_bits_are_those_of_stored_pages() {
    for text in SPECS {
        for dim in [32, 80, 128] {
            let geometry = geometry(dim, DType::F16);
            let k = rows(&geometry, 64, 1);
            let block = BlockRows { tokens: 64, k: &k, v: &k };
            let codec = codec(&geometry, text, &block);
            let encoded = codec.encode_block(LayerIndex(0), &block, &mut Vec::new()).unwrap();
            assert_eq!(encoded.fallback_pages, 0, "{text}");
            let spec = resolve_spec(text).unwrap();
            let allocated = |side| matches!(spec.side(side).quantizer, Quantizer::BitAlloc { .. });
            if Side::BOTH.into_iter().any(allocated) {
                // Only the sum over all layers is what was asked for, and outliers come on top.
                continue;
            }
            let implied = Side::BOTH.map(|side| spec.side(side).implied_bits(&geometry, side));
            // Two heads of each side.
            let bytes = |bits: f64| (bits * f64::from(64 * dim) * 2.0 / 8.0).round() as u64;
            let [k, v] = implied;
            let scales = bytes(k.scales + v.scales);
            if spec.value.transforms.contains(&Transform::Gain) {
                // Pages without short rows store no gains.
                assert!(
                    [0, scales / 2, scales].contains(&encoded.parts.scales),
                    "{text} dim {dim}"
                );
            } else {
                assert_eq!(encoded.parts.scales, scales, "{text} dim {dim}");
            }
            assert_eq!(encoded.parts.offsets, bytes(k.offsets + v.offsets), "{text} dim {dim}");
            match (k.codes, v.codes) {
                (Some(k_codes), Some(v_codes)) => {
                    assert_eq!(encoded.parts.codes, bytes(k_codes + v_codes), "{text} dim {dim}");
                    assert_eq!(encoded.parts.header, bytes(k.header + v.header), "{text}");
                    let total = bytes(k.total_bits().unwrap() + v.total_bits().unwrap());
                    assert_eq!(encoded.parts.total_bytes(), total, "{text} dim {dim}");
                }
                // Padding is not known before the codes are.
                _ => assert!(encoded.parts.header >= bytes(k.header + v.header), "{text}"),
            }
        }
    }
}

#[test]
fn they_read_as_a_sum() {
    let geometry = geometry(128, DType::F16);
    let text = |spec: &str| {
        resolve_spec(spec).unwrap().side(Side::Key).implied_bits(&geometry, Side::Key).to_string()
    };
    assert_eq!(text("innerq-2"), "2.000 codes + 1.531 scales + 0.031 header = 3.562");
    assert_eq!(text("raw"), "16.000 codes + 0.031 header = 16.031");
    let kvcomp = "codes depend on the data + 0.004 scales + 0.002 offsets + 0.031 header";
    assert_eq!(text("kvcomp"), kvcomp);
}
