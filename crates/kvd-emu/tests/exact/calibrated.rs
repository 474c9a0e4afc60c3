//! Exact answers of codecs whose steps, levels and entries a calibration has: those that a fit
//! leaves are no integers, so the test sets them.

use super::{Case, TAILS, digit};
use crate::common::levels::changed;
use crate::common::reference::{expected, floats};
use crate::common::run::{kernels, run};
use crate::common::{Ask, Stored, compare, geometry, orders};
use crate::{fitted, scaled, shapes};
use kvd_codec::Calibration;
use kvd_core::{DType, Side};
use kvd_emu::is_available;

/// Levels of codes of up to seven bits: whole numbers that bytes of a power of two hold. One of 31
/// or more is among them, so that their unit is found.
fn level(width: usize, code: usize) -> usize {
    let last = (1 << width) - 1;
    if code == last { last.max(31) } else { code }
}

/// Bits of each coefficient, by its group of sixteen; or of runs that end inside such groups.
fn width(grouped: bool, dim: usize, channel: usize) -> usize {
    let at = if grouped { channel / 16 * 16 } else { channel };
    [7, 5, 3, 2, 1][(at + if grouped { 0 } else { 9 }) * 5 / (dim + 9)]
}

/// Scales of one, whole levels and the widths above, whatever was fitted.
fn whole_levels(calibration: &Calibration, grouped: bool) -> Calibration {
    changed(calibration, |kind, shape, bytes| match kind {
        "scale" | "bound" => set(bytes, |_| 1.0f32.to_le_bytes()),
        "width" => {
            let dim = shape[2];
            set(bytes, |at| [width(grouped, dim, at % dim) as u8]);
        }
        "levels" => {
            let levels = (1..=8).flat_map(|w| (0..1 << w).map(move |code| level(w, code)));
            let levels: Vec<usize> = levels.collect();
            set(bytes, |at| half(levels[at % levels.len()] as f32));
        }
        _ => {}
    })
}

/// Sets all numbers of a tensor, by their places.
fn set<const N: usize>(bytes: &mut [u8], value: impl Fn(usize) -> [u8; N]) {
    for (at, number) in bytes.as_chunks_mut::<N>().0.iter_mut().enumerate() {
        *number = value(at);
    }
}

/// A number as f16.
fn half(value: f32) -> [u8; 2] {
    let mut bytes = [0; 2];
    DType::F16.narrow_values(&[value], &mut bytes);
    bytes
}

#[test]
fn grids_of_step_one() {
    if !is_available() {
        return;
    }
    let one = |calibration: &Calibration| {
        changed(calibration, |kind, _, bytes| {
            if kind == "step" {
                set(bytes, |_| 1.0f32.to_le_bytes());
            }
        })
    };
    // Classes of pairs of codes, of one code, and of those whose last bits follow; of what the
    // classes are made for, or pages would be longer than rows.
    for (rate, largest) in [(2, 1), (4, 4), (6, 15)] {
        let row = |side: Side, head: usize, token: usize, channel: usize| {
            digit(2 * largest)(side, head, token, channel) - largest as f32
        };
        let codec = format!("k=grid(rate={rate})/huffman; v=grid(rate={rate})/huffman");
        for pages in [&[64, 64][..], &TAILS] {
            let case = Case::new(&codec, "huffman_grid_grid", None);
            Case { pages, change: one, ..case }.holds(row);
        }
    }
}

#[test]
fn bit_allocations_on_whole_levels() {
    if !is_available() {
        return;
    }
    let codec = "k=bitalloc(b=3); v=bitalloc(b=3)";
    let grouped = |calibration: &Calibration| whole_levels(calibration, true);
    let spread = |calibration: &Calibration| whole_levels(calibration, false);
    for pages in [&[64, 64][..], &TAILS] {
        for (dim, is_grouped) in [(64, true), (128, true), (64, false), (128, false)] {
            let row = |side: Side, head: usize, token: usize, channel: usize| {
                let width = width(is_grouped, dim, channel);
                let code = token * 7 + channel * 3 + head * 5 + side.index();
                // A value far from every level is an outlier.
                let far = if (token, channel) == (77, 5) { 100.0 } else { 0.0 };
                level(width, code % (1 << width)) as f32 + far
            };
            let (pair, fixed, change): (_, _, fn(&Calibration) -> Calibration) = if is_grouped {
                ("groups_groups", Some("kvd2fast"), grouped)
            } else {
                ("bitalloc_bitalloc", None, spread)
            };
            let shapes = shapes().filter(|shape| shape.0 == dim);
            Case { pages, change, ..Case::new(codec, pair, fixed) }.holds_in(shapes, row);
        }
    }
}

#[test]
fn stages_of_whole_entries() {
    if !is_available() {
        return;
    }
    // A decoded row is a sum of whole entries, whichever are nearest.
    let whole = |calibration: &Calibration| {
        changed(calibration, |kind, _, bytes| {
            if kind == "codebook" {
                set(bytes, |at| half((at * 37 % 41) as f32 - 20.0));
            }
        })
    };
    for (side, pages) in
        [("vq(d=4,b=6,stages=2)", &[64, 64][..]), ("vq(d=2,b=4,stages=3,scope=group)", &TAILS)]
    {
        let codec = format!("k={side}; v={side}");
        for (dim, rows) in shapes() {
            let geometry = geometry(dim as u32, dim as u32, DType::F16);
            let row = |side, head, token, channel| 20.0 * fitted(side, head, token, channel);
            let layout = compare::layout(pages, 0);
            let stored = Stored::calibrated(&geometry, &codec, &layout, row, whole);
            assert!(stored.headers.values().all(|header| !header.fallback), "{codec}");
            for order in orders() {
                let what = format!("{codec}, {dim} channels, {rows} rows, {order:?}");
                // Queries of zeros: the mean of 128 whole values.
                let plan = scaled(&stored, &Ask::last(rows, 128), |_| 0.0);
                let out = run(&stored, &plan, 1, order).unwrap().out;
                let wanted = expected(&stored, &plan);
                let means = wanted.iter().flat_map(|row| row.out.iter().map(|mean| *mean as f32));
                assert!(means.eq(floats(&out)), "{what}");
                // One visible token, and its score as the log-sum-exp.
                let ask = Ask { window: Some(1), ..Ask::last(rows, 100) };
                let plan = scaled(&stored, &ask, |i| (i % 5) as f32);
                let answer = run(&stored, &plan, 1, order).unwrap();
                let scores = expected(&stored, &plan).into_iter().map(|row| row.lse as f32);
                assert!(scores.eq(answer.lse.iter().copied()), "{what}");
                let kernel = compare::kernel("vqfloat_vqfloat", None, (dim, rows));
                assert_eq!(kernels(), [kernel], "{what}");
            }
        }
    }
}
