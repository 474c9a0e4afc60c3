//! Bits of a codec shared among heads by costs: the budget holds, and no rows break it.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{noise, rows};
use kvd_codec::{BlockRows, Calibration, CodecSpec, ModelCodec, resolve_spec};
use kvd_core::{DType, Geometry, LayerIndex, Side};
use kvd_fit::{GroupCost, HeadGroup, OpenCodec, OpenSide, RatedCodec, Samples, fit_calibration};
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

/// Codecs whose bits can be shared, of each quantizer.
fn shared_specs() -> [CodecSpec; 2] {
    ["kvd-2", "kvd-2-fast"].map(|name| resolve_spec(name).unwrap())
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

/// Bytes of the pages of the samples.
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
    let geometry = geometry(2);
    let samples = samples(&geometry, |_, _, _, _| ());
    for spec in shared_specs() {
        let even = open(&samples, &spec).codec().split_evenly(&spec).unwrap();
        let fitted = fit_calibration(&geometry, &spec, &samples, 7, &mut |_| {}).unwrap();
        assert!(even.to_bytes() == fitted.to_bytes(), "{spec}");
        assert!(tensor(&even, "split").is_empty());
    }
}

/// Bits of a row of each head of keys, then of values.
fn head_bits(calibration: &Calibration) -> Vec<u32> {
    let bytes = calibration.to_bytes();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let widths = |part: usize| tensors.tensor(&format!("{part}.width")).unwrap().data().to_vec();
    let widths = [widths(0), widths(1)].concat();
    widths.chunks(DIM).map(|head| head.iter().map(|width| u32::from(*width)).sum()).collect()
}

#[test]
fn a_head_of_sixty_four_times_the_cost_gets_three_bits_more() {
    let geometry = geometry(1);
    let spec = resolve_spec("kvd-2-fast").unwrap();
    let samples = samples(&geometry, |_, _, _, _| ());
    let open = open(&samples, &spec);
    let open = open.codec();
    let even = open.split_evenly(&spec).unwrap();
    let own = |of: &Calibration| head_bits(of);
    let equal = costs(&geometry, |_, _, _| 1.0);
    let before = open.split_by_costs(&spec, &even, &equal, 1.0).unwrap();
    let uneven = costs(&geometry, |_, side, head| match (side, head) {
        (Side::Key, 0) => 64.0,
        _ => 1.0,
    });
    let after = open.split_by_costs(&spec, &even, &uneven, 1.0).unwrap();
    let [even_bits, before_bits, after_bits] = [&even, &before, &after].map(own);
    let all = |bits: &[u32]| bits.iter().sum::<u32>();
    assert!(
        all(&before_bits) <= all(&even_bits) && all(&after_bits) <= all(&even_bits),
        "{before_bits:?} {after_bits:?}"
    );
    // Each coefficient of a head of one group has the head's width.
    let more = (after_bits[0] - before_bits[0]) / DIM as u32;
    assert!((1..=3).contains(&more), "{even_bits:?} {before_bits:?} {after_bits:?}");
    assert!(after_bits[1..].iter().zip(&before_bits[1..]).all(|(now, then)| now <= then));
    let bound = |of: &Calibration| tensor(of, "bound");
    assert!(bound(&after)[0] < bound(&after)[1], "{:?}", bound(&after));
    let said = tensor(&after, "split");
    let moved = even_bits.iter().zip(&after_bits);
    let moved = moved.map(|(even, now)| ((*even as f32 - *now as f32) / DIM as f32).exp2());
    assert!(said.iter().zip(moved).all(|(said, moved)| (said / moved - 1.0).abs() < 1e-5));
    assert_eq!(Calibration::from_bytes(&after.to_bytes()).unwrap(), after);
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
    shared_specs().iter().for_each(keeps_budget_of_hostile_rows);
}

fn keeps_budget_of_hostile_rows(spec: &CodecSpec) {
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
            let open = open(&samples, spec);
            let open = open.codec();
            let even = open.split_evenly(spec).unwrap();
            let costs = costs(&geometry, |layer, side, head| match (side, head) {
                (_, 1) if index < 2 => 0.0,
                _ => f64::from(layer + 1) * if side == Side::Key { 30.0 } else { 1.0 },
            });
            let split = open.split_by_costs(spec, &even, &costs, 1.0).unwrap();
            // The outlier's own pages hold floats under a finer step, and no other page does.
            let floats = page_use(&samples, spec, &split).fallback_pages;
            let own_pages = if index == 2 { 2 * layers } else { 0 };
            assert!(floats <= own_pages, "{index} {layers}: {floats} pages of floats");
            let coded =
                if index == 2 { self::samples(&geometry, |_, _, _, _| ()) } else { samples };
            let [before, after] = [&even, &split].map(|c| page_bits(&coded, spec, c));
            assert!(after <= before * 1.02 + 0.02, "{index} {layers}: {after} for {before}");
            let scales = [tensor(&split, "step"), tensor(&split, "bound")].concat();
            assert!(!scales.is_empty() && scales.iter().all(|scale| scale.is_normal()));
        }
    }
}

#[test]
fn costs_of_one_rate_become_those_of_another_by_the_squares_of_steps() {
    let geometry = geometry(2);
    let specs = ["kvd-1.5", "kvd-4"].map(|name| resolve_spec(name).unwrap());
    // The second head of values is of zeros: it errs under no rate.
    let samples = samples(&geometry, |_, side, head, rows| {
        if (side, head) == (Side::Value, 1) {
            rows.fill(0.0);
        }
    });
    let open = open(&samples, &specs[0]);
    let open = open.codec();
    let evens = [0, 1].map(|index| open.split_evenly(&specs[index]).unwrap());
    let codec = |index: usize| RatedCodec { spec: &specs[index], calibration: &evens[index] };
    let given =
        costs(&geometry, |layer, side, head| f64::from(1 + layer + head) + side as u32 as f64);
    let carried = open.carry_costs(&given, codec(0), codec(1)).unwrap();
    let steps = evens.each_ref().map(|even| tensor(even, "step"));
    for (before, after) in given.iter().zip(&carried) {
        assert_eq!(before.group, after.group);
        let HeadGroup { side, layers, heads } = &after.group;
        if (*side, heads.start) == (Side::Value, 1) {
            assert_eq!(after.cost, 0.0);
            continue;
        }
        let index = (side.index() as u32 * 2 + layers.start) * 2 + heads.start;
        let squares = f64::from(steps[1][index as usize] / steps[0][index as usize]).powi(2);
        // A step near the rows' own width errs by less than its square says.
        let ratio = after.cost / before.cost / squares;
        assert!((0.95..3.0).contains(&ratio) && squares < 0.2, "{ratio} {squares}");
    }
    let back = open.carry_costs(&carried, codec(1), codec(0)).unwrap();
    for (cost, given) in back.iter().zip(&given).filter(|(cost, _)| cost.cost > 0.0) {
        assert!((cost.cost / given.cost - 1.0).abs() < 1e-9, "{cost:?}");
    }
    let other = resolve_spec("kvd-3").unwrap();
    let wrong = RatedCodec { spec: &other, calibration: &evens[0] };
    let error = open.carry_costs(&given, codec(0), wrong).unwrap_err().to_string();
    assert!(error.contains("is not of k=mean+qpca/grid(rate=3.25)"), "{error}");
    // Grids and bit allocations of the same transforms err on the same coefficients.
    let fast = resolve_spec("kvd-2-fast").unwrap();
    let even = open.split_evenly(&fast).unwrap();
    let widths = RatedCodec { spec: &fast, calibration: &even };
    let carried = open.carry_costs(&given, codec(0), widths).unwrap();
    let back = open.carry_costs(&carried, widths, codec(0)).unwrap();
    for (cost, given) in back.iter().zip(&given).filter(|(cost, _)| cost.cost > 0.0) {
        assert!((cost.cost / given.cost - 1.0).abs() < 1e-9, "{cost:?}");
    }
    // Both take about two bits.
    for (fast, slow) in carried.iter().zip(&given).filter(|(cost, _)| cost.cost > 0.0) {
        assert!((0.1..2.0).contains(&(fast.cost / slow.cost)), "{fast:?} {slow:?}");
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
    assert!(error.contains("is not of k=mean+qpca/grid(rate=3.25)"), "{error}");
    let fast = resolve_spec("kvd-2-fast").unwrap();
    let error = open.split_by_costs(&fast, &even, &[], 1.0).unwrap_err().to_string();
    assert!(error.contains("is not of k=mean+qpca/bitalloc(b=2.3)"), "{error}");
    let mixed = resolve_spec("k=fp8; v=mean+gain+pca/grid(rate=2)/huffman").unwrap();
    let error = open.split_evenly(&mixed).unwrap_err().to_string();
    assert!(error.contains("cannot be shared"), "{error}");
    for (text, can) in [
        ("kvd-1.5", true),
        ("kvd-2-fast", true),
        ("k=mean+qpca/bitalloc(b=2); v=mean+gain+pca/grid(rate=2)/huffman", false),
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
        preset in 0usize..4,
    ) {
        let geometry = geometry(2);
        let spec = resolve_spec(["kvd-4", "kvd-2", "kvd-1.5", "kvd-2-fast"][preset]).unwrap();
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
        let scales = [tensor(&split, "step"), tensor(&split, "bound")].concat();
        prop_assert!(!scales.is_empty() && scales.iter().all(|scale| scale.is_normal()));
    }
}
