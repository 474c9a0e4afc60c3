//! Bits of a codec shared among heads by costs: the budget holds, and no rows break it.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{noise, rows};
use kvd_codec::{
    BlockRows, Calibration, CodecSpec, GroupCost, HeadGroup, ModelCodec, OpenCodec, OpenSide,
    Samples, fit_calibration, resolve_spec,
};
use kvd_core::{DType, Geometry, LayerIndex, Side};
use proptest::prelude::*;
use safetensors::SafeTensors;

/// Rows of each head.
const ROWS: usize = 512;
const DIM: usize = 16;

fn geometry(layers: u32) -> Geometry {
    Geometry { layers, ..common::geometry(DIM as u32, DType::F32) }
}

fn spec() -> CodecSpec {
    resolve_spec("kvd-2").unwrap()
}

/// Changes the rows of a layer, side and head.
type ChangeRows<'a> = &'a dyn Fn(u32, Side, usize, &mut Vec<f32>);

/// Ordinary rows, changed by `change` (layer, side, head, rows).
fn samples(geometry: &Geometry, change: impl Fn(u32, Side, usize, &mut Vec<f32>)) -> Samples {
    let mut samples = Samples::new(geometry);
    let queries: Vec<f32> = (0..ROWS * DIM).map(noise).collect();
    for layer in 0..geometry.layers {
        for side in Side::BOTH {
            let seed = layer as usize * 2 + side.index();
            let all = rows(geometry, ROWS, seed);
            for (head, rows) in all.chunks(ROWS * DIM).enumerate() {
                let mut rows = rows.to_vec();
                change(layer, side, head, &mut rows);
                samples.push(LayerIndex(layer), side, head, &rows).unwrap();
            }
        }
        for head in 0..geometry.kv_heads as usize {
            samples.push_queries(LayerIndex(layer), head, &queries).unwrap();
        }
    }
    samples
}

/// Both sides with their transforms fitted.
struct OpenSides([OpenSide; 2]);

fn open(samples: &Samples, spec: &CodecSpec) -> OpenSides {
    let side = |side| OpenSide::fit_transforms(side, spec.side(side), samples, &mut || {}).unwrap();
    OpenSides(Side::BOTH.map(side))
}

impl OpenSides {
    fn codec(&self) -> OpenCodec<'_> {
        OpenCodec { key: &self.0[0], value: &self.0[1], seed: 7 }
    }
}

/// A cost for every head by itself.
fn costs(geometry: &Geometry, cost: impl Fn(u32, Side, u32) -> f64) -> Vec<GroupCost> {
    let mut costs = Vec::new();
    for layer in 0..geometry.layers {
        for side in Side::BOTH {
            for head in 0..geometry.kv_heads {
                let (layers, heads) = (layer..layer + 1, head..head + 1);
                let group = HeadGroup { side, layers, heads };
                costs.push(GroupCost { group, cost: cost(layer, side, head) });
            }
        }
    }
    costs
}

/// Sizes of the samples' own pages.
struct PageUse {
    /// Bits per value.
    bits: f64,
    /// Pages of the fallback codec.
    fallback_pages: u32,
}

/// Bits per value of the samples' own pages.
fn page_bits(samples: &Samples, spec: &CodecSpec, calibration: &Calibration) -> f64 {
    page_use(samples, spec, calibration).bits
}

fn page_use(samples: &Samples, spec: &CodecSpec, calibration: &Calibration) -> PageUse {
    let geometry = samples.geometry();
    let codec = ModelCodec::new(geometry.clone(), spec.clone(), Some(calibration)).unwrap();
    let (mut bytes, mut fallback_pages) = (Vec::new(), 0);
    for layer in (0..geometry.layers).map(LayerIndex) {
        for start in (0..ROWS).step_by(64) {
            let side = |side| -> Vec<f32> {
                let head = |head| &samples.rows(layer, side, head)[start * DIM..][..64 * DIM];
                (0..geometry.kv_heads as usize).flat_map(head).copied().collect()
            };
            let (k, v) = (side(Side::Key), side(Side::Value));
            let block = BlockRows { tokens: 64, k: &k, v: &v };
            fallback_pages += codec.encode_block(layer, &block, &mut bytes).unwrap().fallback_pages;
        }
    }
    let values = 2 * geometry.layers * geometry.kv_heads;
    let bits = 8.0 * bytes.len() as f64 / (values as usize * ROWS * DIM) as f64;
    PageUse { bits, fallback_pages }
}

/// The tensor of both parts, keys first.
fn tensor(calibration: &Calibration, kind: &str) -> Vec<f32> {
    let bytes = calibration.to_bytes();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let part = |part: usize| match tensors.tensor(&format!("{part}.{kind}")) {
        Ok(tensor) => {
            tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        }
        Err(_) => Vec::new(),
    };
    [part(0), part(1)].concat()
}

#[test]
fn the_even_split_is_that_of_a_fit() {
    let (geometry, spec) = (geometry(2), spec());
    let samples = samples(&geometry, |_, _, _, _| ());
    let even = open(&samples, &spec).codec().split_evenly(&spec).unwrap();
    let fitted = fit_calibration(&geometry, &spec, &samples, 7, &mut |_| {}).unwrap();
    assert!(even.to_bytes() == fitted.to_bytes());
    assert!(tensor(&even, "split").is_empty());
}

#[test]
fn a_side_of_sixteen_times_the_cost_gets_a_quarter_of_the_step() {
    let (geometry, spec) = (geometry(1), spec());
    let samples = samples(&geometry, |_, _, _, _| ());
    let open = open(&samples, &spec);
    let open = open.codec();
    let even = open.split_evenly(&spec).unwrap();
    let equal = costs(&geometry, |_, _, _| 1.0);
    let before = open.split_by_costs(&spec, &even, &equal, 1.0).unwrap();
    let uneven = costs(&geometry, |_, side, head| match (side, head) {
        (Side::Key, 0) => 16.0,
        _ => 1.0,
    });
    let after = open.split_by_costs(&spec, &even, &uneven, 1.0).unwrap();
    let moved: Vec<f32> =
        tensor(&after, "step").iter().zip(tensor(&before, "step")).map(|(a, b)| a / b).collect();
    assert!((moved[0] / moved[1] - 0.25).abs() < 1e-3, "{moved:?}");
    assert!((moved[2] / moved[1] - 1.0).abs() < 1e-3 && moved[1] > 1.0, "{moved:?}");
    // The file says how steps moved from an even split, and is read as it was written.
    let split: Vec<f32> =
        tensor(&after, "step").iter().zip(tensor(&even, "step")).map(|(a, b)| a / b).collect();
    let said = tensor(&after, "split");
    assert!(said.iter().zip(&split).all(|(a, b)| (a / b - 1.0).abs() < 1e-5), "{said:?} {split:?}");
    assert_eq!(Calibration::from_bytes(&after.to_bytes()).unwrap(), after);
    // A second split goes on from the first.
    let again = open.split_by_costs(&spec, &after, &[], 1.0).unwrap();
    let same = tensor(&again, "split");
    assert!(same.iter().zip(&said).all(|(a, b)| (a / b - 1.0).abs() < 0.01), "{same:?} {said:?}");
}

#[test]
fn heads_of_a_group_move_together_and_others_stay_in_relation() {
    let (geometry, spec) = (geometry(2), spec());
    let samples = samples(&geometry, |_, _, _, _| ());
    let open = open(&samples, &spec);
    let open = open.codec();
    let even = open.split_evenly(&spec).unwrap();
    let group = |side, layers| HeadGroup { side, layers, heads: 0..2 };
    let costs = [
        GroupCost { group: group(Side::Key, 0..1), cost: 9.0 },
        GroupCost { group: group(Side::Value, 0..2), cost: f64::NAN },
    ];
    let split = tensor(&open.split_by_costs(&spec, &even, &costs, 1.0).unwrap(), "split");
    let ratio = |a: usize, b: usize| f64::from(split[a] / split[b]);
    assert!((ratio(0, 1) - 1.0).abs() < 1e-3 && (ratio(2, 3) - 1.0).abs() < 1e-3, "{split:?}");
    assert!((4..7).all(|head| (ratio(head, head + 1) - 1.0).abs() < 1e-3), "{split:?}");
    // No cost is known of the values: they get the coarsest steps.
    assert!((ratio(4, 2) - 16.0).abs() < 0.1, "{split:?}");
}

#[test]
fn rows_that_say_nothing_and_rows_that_say_too_much_keep_the_budget() {
    let spec = spec();
    let zeros = |_: u32, _: Side, head: usize, rows: &mut Vec<f32>| {
        if head == 1 {
            rows.fill(0.0);
        }
    };
    let equal = |_: u32, _: Side, head: usize, rows: &mut Vec<f32>| {
        if head == 1 {
            let first = rows[..DIM].to_vec();
            rows.chunks_mut(DIM).for_each(|row| row.copy_from_slice(&first));
        }
    };
    let outlier = |_: u32, _: Side, head: usize, rows: &mut Vec<f32>| {
        if head == 1 {
            rows[40 * DIM..41 * DIM].iter_mut().for_each(|x| *x *= 1e4);
        }
    };
    let changes: [ChangeRows<'_>; 3] = [&zeros, &equal, &outlier];
    for (index, change) in changes.into_iter().enumerate() {
        for layers in [1, 2] {
            let geometry = geometry(layers);
            let samples = samples(&geometry, change);
            let open = open(&samples, &spec);
            let open = open.codec();
            let even = open.split_evenly(&spec).unwrap();
            let costs = costs(&geometry, |layer, side, head| match (side, head) {
                (_, 1) if index < 2 => 0.0,
                _ => f64::from(layer + 1) * if side == Side::Key { 30.0 } else { 1.0 },
            });
            let split = open.split_by_costs(&spec, &even, &costs, 1.0).unwrap();
            // The outlier's own pages hold floats under a finer step, and no other page does.
            let floats = page_use(&samples, &spec, &split).fallback_pages;
            let own_pages = if index == 2 { 2 * layers } else { 0 };
            assert!(floats <= own_pages, "{index} {layers}: {floats} pages of floats");
            let coded =
                if index == 2 { self::samples(&geometry, |_, _, _, _| ()) } else { samples };
            let [before, after] = [&even, &split].map(|c| page_bits(&coded, &spec, c));
            assert!(after <= before * 1.02 + 0.02, "{index} {layers}: {after} for {before}");
            assert!(tensor(&split, "step").iter().all(|step| step.is_normal()));
        }
    }
}

#[test]
fn calibrations_of_other_codecs_are_refused() {
    let (geometry, spec) = (geometry(1), spec());
    let samples = samples(&geometry, |_, _, _, _| ());
    let open = open(&samples, &spec);
    let open = open.codec();
    let even = open.split_evenly(&spec).unwrap();
    let other = resolve_spec("kvd-3").unwrap();
    let error = open.split_by_costs(&other, &even, &[], 1.0).unwrap_err().to_string();
    assert!(error.contains("no grid for k=mean+qpca/grid(rate=3.25)"), "{error}");
    let error = open.split_evenly(&resolve_spec("kvd-2-fast").unwrap()).unwrap_err().to_string();
    assert!(error.contains("is no grid"), "{error}");
    for (text, can) in [
        ("kvd-1.5", true),
        ("kvd-2-fast", false),
        ("kvd-2; k[layer=0]=fp8", false),
        ("k=fp8; v=mean+gain+pca/grid(rate=2)/huffman", false),
    ] {
        assert_eq!(OpenCodec::can_share(&resolve_spec(text).unwrap()), can, "{text}");
    }
}

#[test]
fn parts_that_are_held_out_are_whole_and_the_rest_keeps_its_order() {
    let geometry = geometry(1);
    let mut samples = samples(&geometry, |_, _, _, _| ());
    let all = samples.clone();
    let held = samples.hold_out(5, &[1, 4]);
    let part = ROWS / 5 * DIM;
    for side in Side::BOTH {
        let [all, kept, held] = [&all, &samples, &held].map(|s| s.rows(LayerIndex(0), side, 1));
        assert_eq!(held, [&all[part..2 * part], &all[4 * part..5 * part]].concat());
        assert_eq!(kept, [&all[..part], &all[2 * part..4 * part], &all[5 * part..]].concat());
    }
    let queries = |samples: &Samples| samples.queries(LayerIndex(0), 0).len();
    assert_eq!([queries(&held), queries(&samples)], [2 * part, ROWS * DIM - 2 * part]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Whatever the costs, both sides together take what the spec asks for, and no step leaves the
    /// range in which it is kept.
    #[test]
    fn any_costs_stay_within_the_budget(
        exponents in proptest::collection::vec(-40.0..40.0f64, 8),
        preset in 0usize..3,
    ) {
        let geometry = geometry(2);
        let spec = resolve_spec(["kvd-4", "kvd-2", "kvd-1.5"][preset]).unwrap();
        let samples = samples(&geometry, |_, _, _, _| ());
        let open = open(&samples, &spec);
        let open = open.codec();
        let even = open.split_evenly(&spec).unwrap();
        let costs = costs(&geometry, |layer, side, head| {
            exponents[layer as usize * 4 + side.index() * 2 + head as usize].exp2()
        });
        let split = open.split_by_costs(&spec, &even, &costs, 1.0).unwrap();
        let [before, after] = [&even, &split].map(|c| page_bits(&samples, &spec, c));
        // Pages round up to granules, and streams leave words over.
        prop_assert!(after <= before * 1.04, "{after} for {before}");
        prop_assert!(tensor(&split, "step").iter().all(|step| step.is_normal()));
    }
}
