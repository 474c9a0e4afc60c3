//! How far a decoded value may be from the original, per quantizer; exactness of the folds.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{codec, decode, geometry, noise, page, rows};
use half::f16;
use kvd_codec::{BlockRows, ModelCodec, PageReader, RowSpace, resolve_spec};
use kvd_core::{DType, LayerIndex, Side};
use proptest::prelude::*;

const LAYER: LayerIndex = LayerIndex(0);

/// Key pages of both heads, decoded.
fn keys(text: &str, dim: u32, dtype: DType, tokens: usize, k: &[f32]) -> Vec<f32> {
    let geometry = geometry(dim, dtype);
    let block = BlockRows { tokens, k, v: k };
    let codec = codec(&geometry, text, &block);
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
    assert_eq!(encoded.fallback_pages, 0);
    (0..2).flat_map(|head| decode(&codec, Side::Key, head, page(&bytes, &encoded, head))).collect()
}

/// Indices of each group of `[2, tokens, dim]`.
fn groups(axis: &str, size: usize, tokens: usize, dim: usize) -> Vec<Vec<usize>> {
    let mut groups = Vec::new();
    for head in 0..2 {
        let at = |token: usize, channel: usize| (head * tokens + token) * dim + channel;
        let all_tokens: Vec<usize> = (0..tokens).collect();
        let all_channels: Vec<usize> = (0..dim).collect();
        match axis {
            "channel" => {
                for channel in 0..dim {
                    for part in all_tokens.chunks(size) {
                        groups.push(part.iter().map(|t| at(*t, channel)).collect());
                    }
                }
            }
            "token" => {
                for token in 0..tokens {
                    for part in all_channels.chunks(size) {
                        groups.push(part.iter().map(|c| at(token, *c)).collect());
                    }
                }
            }
            _ => groups.push((0..tokens * dim).map(|i| head * tokens * dim + i).collect()),
        }
    }
    groups
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn uniform_errs_by_half_a_step(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        scale in prop_oneof![Just(0.001f32), Just(1.0), Just(500.0)],
        offset in prop_oneof![Just(0f32), Just(-7.5), Just(300.0)],
        (axis, size) in prop_oneof![
            Just(("channel", 32usize)), Just(("channel", usize::MAX)), Just(("token", 32)),
            Just(("token", 5)), Just(("token", usize::MAX)), Just(("block", usize::MAX))],
        (arguments, steps) in prop_oneof![
            Just(("b=4", 15f32)), Just(("b=2", 3.0)), Just(("b=8", 255.0)),
            Just(("rel=0.05", 20.0)), Just(("rel=0.15", 1.0 / 0.15)), Just(("rel=0.3", 1.0 / 0.3))],
        huffman in any::<bool>(),
        f32_rows in any::<bool>(),
    ) {
        let dim = 32usize;
        let dtype = if f32_rows { DType::F32 } else { DType::F16 };
        let value = |i: usize| noise(seed * 7919 + i) * scale + offset;
        let k: Vec<f32> = (0..2 * tokens * dim)
            .map(|i| if f32_rows { value(i) * 1.000_123 } else { common::round(value(i)) })
            .collect();
        let group = if size == usize::MAX { String::new() } else { format!(",g={size}") };
        let stage = if huffman { "/huffman" } else { "" };
        let text = format!("k=uniform({arguments}{group},axis={axis}){stage}; v=raw");
        let decoded = keys(&text, dim as u32, dtype, tokens, &k);
        for group in groups(axis, size.min(1024), tokens, dim) {
            let low = group.iter().map(|i| k[*i]).fold(f32::INFINITY, f32::min);
            let high = group.iter().map(|i| k[*i]).fold(f32::NEG_INFINITY, f32::max);
            // The minimum moves down and the step up by at most an f16 rounding each.
            let minimum = low - (low.abs() / 1024.0).max(6.0e-8);
            let step = (high - minimum) / steps * (1.0 + 1.0 / 1024.0) + 6.0e-8;
            for index in group {
                let error = (decoded[index] - k[index]).abs();
                prop_assert!(error <= step / 2.0 + 1e-6 * high.abs().max(low.abs()),
                    "{text}: {} became {}, step {step}", k[index], decoded[index]);
            }
        }
    }

    #[test]
    fn fp8_errs_by_a_sixteenth(seed in 0usize..1000, scale in -30i32..15) {
        let scale = 2f32.powi(scale);
        let k: Vec<f32> = (0..2 * 4 * 32).map(|i| noise(seed * 91 + i) * scale).collect();
        let decoded = keys("fp8", 32, DType::F32, 4, &k);
        let absmax = k.iter().fold(0f32, |m, x| m.max(x.abs()));
        for (x, y) in k.iter().zip(&decoded) {
            // Half of 2^-3 relative, or half the smallest subnormal under the page's scale.
            let bound = (x.abs() / 16.0).max(absmax / 224.0 / 1024.0);
            prop_assert!((x - y).abs() <= bound, "{x} became {y}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn symmetric_levels_err_by_half_a_step_and_hybrid_ones_no_more_than_either(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        scale in prop_oneof![Just(0.001f32), Just(1.0), Just(500.0)],
        offset in prop_oneof![Just(0f32), Just(-1.5), Just(3.0)],
        (axis, size) in prop_oneof![
            Just(("channel", 32usize)), Just(("channel", usize::MAX)), Just(("token", 32)),
            Just(("token", 5)), Just(("token", usize::MAX)), Just(("block", usize::MAX))],
        (arguments, top) in prop_oneof![
            Just(("b=4", 15f32)), Just(("b=2", 3.0)), Just(("b=1", 1.0)),
            Just(("rel=0.15", 1.0 / 0.15))],
        huffman in any::<bool>(),
    ) {
        let k: Vec<f32> = (0..2 * tokens * 32)
            .map(|i| common::round((noise(seed * 7919 + i) + offset * noise(i % 32)) * scale))
            .collect();
        let group = if size == usize::MAX { String::new() } else { format!(",g={size}") };
        let stage = if huffman { "/huffman" } else { "" };
        let decoded = |mode: &str| {
            let arguments = format!("{arguments}{group},axis={axis},mode={mode}");
            keys(&format!("k=uniform({arguments}){stage}; v=raw"), 32, DType::F16, tokens, &k)
        };
        let [asym, sym, hybrid] = ["asym", "sym", "hybrid"].map(decoded);
        for group in groups(axis, size.min(1024), tokens, 32) {
            let most = group.iter().map(|i| k[*i].abs()).fold(0f32, f32::max);
            let step = most / top * (1.0 + 1.0 / 1024.0) + 6.0e-8;
            for index in &group {
                let error = (sym[*index] - k[*index]).abs();
                prop_assert!(error <= step / 2.0 + 1e-6 * most, "{error}, step {step}");
            }
            let squares = |rows: &[f32]| -> f32 {
                group.iter().map(|i| (rows[*i] - k[*i]) * (rows[*i] - k[*i])).sum()
            };
            // Asymmetric pages round their minima to f16, hybrid ones do not.
            let low = group.iter().map(|i| k[*i].abs()).fold(0f32, f32::max) / 1024.0;
            let slack = group.len() as f32 * (low * low + 2.0 * low * step);
            prop_assert!(squares(&hybrid) <= squares(&sym) * 1.0001 + 1e-12);
            prop_assert!(squares(&hybrid) <= squares(&asym) + slack + 1e-12);
        }
    }

    #[test]
    fn polar_errs_by_half_a_step_of_angle_and_of_radius(
        seed in 0usize..1000,
        tokens in 1usize..=64,
        (angle, radius) in (1u32..=8, 1u32..=8),
        group in prop_oneof![Just(7usize), Just(64)],
        scale in prop_oneof![Just(0.001f32), Just(1.0), Just(500.0)],
        interleaved in any::<bool>(),
    ) {
        let dim = 32usize;
        let k: Vec<f32> = (0..2 * tokens * dim)
            .map(|i| common::round(noise(seed * 104_729 + i) * scale))
            .collect();
        let mut geometry = geometry(32, DType::F16);
        if interleaved {
            geometry.rope_pairing = kvd_core::RopePairing::Interleaved;
        }
        let spec = format!("k=polar(a={angle},r={radius},g={group}); v=raw");
        let spec = resolve_spec(&spec).unwrap();
        let codec = ModelCodec::new(geometry, spec, None).unwrap();
        let mut bytes = Vec::new();
        let block = BlockRows { tokens, k: &k, v: &k };
        let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        prop_assert_eq!(encoded.fallback_pages, 0);
        for head in 0..2 {
            let decoded = decode(&codec, Side::Key, head, page(&bytes, &encoded, head));
            let rows = &k[head * tokens * dim..][..tokens * dim];
            for pair in 0..dim / 2 {
                let [x, y] = if interleaved { [2 * pair, 2 * pair + 1] } else { [pair, pair + 16] };
                let length = |row: &[f32]| row[x].hypot(row[y]);
                for part in 0..tokens.div_ceil(group) {
                    let part = part * group..tokens.min((part + 1) * group);
                    let row = |rows: &'_ [f32], token: usize| -> Vec<f32> {
                        rows[token * dim..][..dim].to_vec()
                    };
                    let most = part.clone().map(|t| length(&row(rows, t))).fold(0f32, f32::max);
                    let top = (2f32.powi(radius as i32) - 1.0).max(1.0);
                    let step = most / top * (1.0 + 1.0 / 1024.0) + 6.0e-8;
                    for token in part {
                        let (a, b) = (row(rows, token), row(&decoded, token));
                        let off = (a[x] - b[x]).hypot(a[y] - b[y]);
                        // Along the arc at the decoded radius, then along the radius.
                        let arc = length(&b) * std::f32::consts::PI / 2f32.powi(angle as i32);
                        let bound = arc + step / 2.0;
                        prop_assert!(off <= bound * 1.001, "{off} over {bound}: {a:?} {b:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn raw_is_exact_in_each_dtype() {
    for (dtype, text) in [(DType::F16, "raw"), (DType::F32, "raw"), (DType::F16, "k=f32; v=f16")] {
        let k = rows(&geometry(64, DType::F16), 33, 5);
        assert_eq!(keys(text, 64, dtype, 33, &k), k);
    }
}

/// Coefficients of row 0 as stored, and as `forward` gives them.
fn coefficients(codec: &ModelCodec, bytes: &[u8], side: Side, row: &[f32]) -> [Vec<f32>; 2] {
    let reader = PageReader::open_page(codec, LAYER, side, 0, bytes).unwrap();
    assert_eq!(reader.space(), RowSpace::Coefficient);
    let mut stored = vec![0f32; row.len()];
    reader.decode_rows(0, 1, &mut stored).unwrap();
    let mut forward = row.to_vec();
    codec.head_codec(LAYER, side, 0).transform_rows(&mut forward);
    [stored, forward]
}

/// Five queries folded, and five sums unfolded, together: the bits of one after the other.
fn rows_at_once_are_rows_one_by_one(codec: &ModelCodec, dim: usize) {
    let rows: Vec<f32> = (0..5 * dim).map(|i| noise(i + 7)).collect();
    let (key, weights) = (codec.head_codec(LAYER, Side::Key, 0), [1.0, 0.25, 3.0, 7.5, 0.0]);
    let mut folded = rows.clone();
    let offsets = key.fold_queries(&mut folded);
    let value = codec.head_codec(LAYER, Side::Value, 0);
    let mut unfolded = rows.clone();
    value.unfold_values(&mut unfolded, &weights);
    for (index, row) in rows.chunks(dim).enumerate() {
        let mut one = vec![0f32; dim];
        assert_eq!(key.fold_query(row, &mut one), offsets[index], "dim {dim}");
        assert_eq!(one, folded[index * dim..][..dim], "dim {dim}");
        one.fill(0.0);
        value.unfold_value(row, weights[index], &mut one);
        assert_eq!(one, unfolded[index * dim..][..dim], "dim {dim}");
    }
}

#[test]
fn folded_queries_and_unfolded_values_are_exact() {
    for dim in [32usize, 80, 96, 128, 256] {
        for (key, value) in [
            ("smooth", "smooth"),
            ("hadamard", "hadamard"),
            ("smooth+hadamard", "hadamard+smooth"),
            ("mean+qpca", "mean+pca"),
            ("smooth+mean+qpca", "pca+mean+hadamard"),
            ("norm", "rotate"),
            ("rotate(seed=5)+norm", "norm+mean+rotate"),
        ] {
            let geometry = geometry(dim as u32, DType::F32);
            let k = rows(&geometry, 3, 6);
            let block = BlockRows { tokens: 3, k: &k, v: &k };
            let text = format!("k={key}/f32; v={value}/f32");
            let codec = codec(&geometry, &text, &block);
            let mut bytes = Vec::new();
            let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();

            let [stored, c] = coefficients(&codec, page(&bytes, &encoded, 0), Side::Key, &k[..dim]);
            assert_eq!(stored, c);
            let q: Vec<f32> = (0..dim).map(|i| noise(i + 99)).collect();
            let mut folded = vec![0f32; dim];
            let offset = codec.head_codec(LAYER, Side::Key, 0).fold_query(&q, &mut folded);
            assert!(key.contains("mean") || offset == 0.0);
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let norm = dot(&q, &q).sqrt() * dot(&k[..dim], &k[..dim]).sqrt();
            let error = (dot(&folded, &c) + f64::from(offset) - dot(&q, &k[..dim])).abs();
            assert!(error <= 1e-4 * norm, "{text} dim {dim}: {error} of {norm}");

            let [_, c] = coefficients(&codec, page(&bytes, &encoded, 2), Side::Value, &k[..dim]);
            let mut out = vec![2.0f32; dim];
            codec.head_codec(LAYER, Side::Value, 0).unfold_value(&c, 1.0, &mut out);
            for (o, x) in out.iter().zip(&k) {
                assert!((o - 2.0 - x).abs() <= 1e-4 * (1.0 + x.abs()), "{text} dim {dim}");
            }

            // Two and a half times the row: offsets come back as often as the weights say.
            let c: Vec<f32> = c.iter().map(|c| 2.5 * c).collect();
            out.fill(0.0);
            codec.head_codec(LAYER, Side::Value, 0).unfold_value(&c, 2.5, &mut out);
            for (o, x) in out.iter().zip(&k) {
                assert!((o - 2.5 * x).abs() <= 3e-4 * (1.0 + x.abs()), "{text} dim {dim}");
            }
            rows_at_once_are_rows_one_by_one(&codec, dim);
        }
    }
}

#[test]
fn vq_stores_the_nearest_entry() {
    let geometry = geometry(32, DType::F16);
    let k = rows(&geometry, 5, 7);
    let block = BlockRows { tokens: 5, k: &k, v: &k };
    let codec = codec(&geometry, "k=vq(d=4,b=4); v=raw", &block);
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
    assert_eq!(encoded.parts.codes, 2 * 5 * 4 + 2 * 5 * 32 * 2);
    let decoded = decode(&codec, Side::Key, 0, page(&bytes, &encoded, 0));
    let book = codec.head_codec(LAYER, Side::Key, 0).vq().unwrap().stage_codebook(0, 0);
    assert_eq!((book.dim(), book.entries().len()), (4, 64));
    assert!(book.entries().iter().all(|v| f16::from_f32(*v).to_f32() == *v));
    for (x, y) in k.chunks(4).zip(decoded.chunks(4)) {
        let distance = |e: &[f32]| -> f32 { e.iter().zip(x).map(|(a, b)| (a - b) * (a - b)).sum() };
        let least = book.entries().chunks(4).map(distance).fold(f32::INFINITY, f32::min);
        assert!(distance(y) <= least + 1e-3, "{x:?} became {y:?}");
    }
}

#[test]
fn huffman_tables_are_versioned_and_old_pages_still_decode() {
    let geometry = geometry(32, DType::F16);
    let k = rows(&geometry, 64, 8);
    let block = BlockRows { tokens: 64, k: &k, v: &k };
    let spec = resolve_spec("kvcomp").unwrap();
    let mut codec = ModelCodec::new(geometry, spec, None).unwrap();
    assert!(codec.needs_tables(LAYER));
    codec.train_tables(LAYER, &[block]).unwrap();
    assert!(!codec.needs_tables(LAYER) && codec.needs_tables(LayerIndex(1)));
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
    let before = decode(&codec, Side::Key, 0, page(&bytes, &encoded, 0));
    let flat: Vec<f32> = (0..k.len()).map(|i| (i % 21) as f32).collect();
    codec.train_tables(LAYER, &[BlockRows { tokens: 64, k: &flat, v: &flat }]).unwrap();
    assert_eq!(codec.table_bytes(), 2 * (21 + 8));
    assert_eq!(decode(&codec, Side::Key, 0, page(&bytes, &encoded, 0)), before);
    let mut newer = Vec::new();
    let encoded = codec.encode_block(LAYER, &block, &mut newer).unwrap();
    let reader =
        PageReader::open_page(&codec, LAYER, Side::Key, 0, page(&newer, &encoded, 0)).unwrap();
    assert_eq!(reader.header().table_version, 2);
    assert_eq!(decode(&codec, Side::Key, 0, page(&newer, &encoded, 0)), before);
}

#[test]
fn rows_whose_rotation_overflows_fall_back_to_raw() {
    // Sums of these are infinite, differences of the sums NaN; each value alone is in range.
    let specs = [
        "uniform(b=4,g=32,axis=channel)",
        "uniform(b=4,g=32,axis=token)",
        "uniform(b=4,g=32,axis=token,mode=sym)",
        "uniform(b=4,g=32,axis=channel,mode=hybrid)",
        "polar(a=4,r=4,g=8)",
        "lloyd(b=4)",
        "fp8",
    ];
    for dtype in [DType::F32, DType::BF16] {
        for quantizer in specs {
            let text = format!("k=hadamard/{quantizer}; v=raw");
            let k: Vec<f32> = (0..2 * 16 * 32)
                .map(|i| if i % 3 == 0 { -dtype.largest_finite() } else { dtype.largest_finite() })
                .collect();
            let geometry = geometry(32, dtype);
            let block = BlockRows { tokens: 16, k: &k, v: &k };
            let codec = codec(&geometry, &text, &block);
            let mut bytes = Vec::new();
            let encoded = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
            assert_eq!(encoded.fallback_pages, 2, "{text} in {dtype}");
            for head in 0..2 {
                let page = page(&bytes, &encoded, head);
                let page = PageReader::open_page(&codec, LAYER, Side::Key, head, page).unwrap();
                let mut back = vec![0f32; 16 * 32];
                page.decode_rows(0, 16, &mut back).unwrap();
                assert_eq!(page.space(), RowSpace::Raw);
                assert_eq!(back, k[head * 16 * 32..][..16 * 32]);
            }
        }
    }
}
