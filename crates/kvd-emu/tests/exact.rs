//! Answers are exact where all values are small integers, in the kernels for any shape and in those
//! that have a preset's shapes as constants: head sizes of 64 and 128 channels, one, four and eight
//! query rows per KV head.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::agree::{kernel, layout};
use common::reference::{check, expected, floats};
use common::run::{kernels, run, run_with};
use common::{Ask, Stored, geometry, noise};
use kvd_compute::AttendPlan;
use kvd_core::{DType, Side};
use kvd_emu::{Order, available};

/// Channels and query rows of every case.
const SHAPES: [(usize, usize); 6] = [(64, 1), (64, 4), (64, 8), (128, 1), (128, 4), (128, 8)];

/// The scale of all scores: a power of two, whatever the head size.
const SCALE: f32 = 0.125;

/// Levels 0 to `top`, both of which every group of 32 tokens or channels has, so that its minimum
/// and step are 0 and 1.
fn digit(top: usize) -> impl Fn(Side, usize, usize, usize) -> f32 {
    move |side, head, token, channel| match (token + 32 - channel % 32) % 32 {
        0 => 0.0,
        1 => top as f32,
        _ => ((token * 7 + channel * 3 + head * 5 + side.index()) % (top + 1)) as f32,
    }
}

/// Rows as those that codebooks and ranges are fitted to.
fn fitted(side: Side, head: usize, token: usize, channel: usize) -> f32 {
    noise(((side.index() * 2 + head) * 4096 + token) * 512 + channel)
}

/// The question with the scale of all tests.
fn scaled(stored: &Stored, ask: &Ask, value: impl Fn(usize) -> f32) -> AttendPlan {
    AttendPlan { scale: Some(SCALE), ..ask.plan(stored, value) }
}

/// Answers to queries of small integers are exact, where pages hold levels up to `top` as they are,
/// and come from the kernel that is meant.
fn exact(codec: &str, top: usize, pair: &str, fixed: Option<&str>) {
    exact_of(codec, digit(top), pair, fixed);
}

/// The same of pages that hold `digit` as it is.
fn exact_of(
    codec: &str,
    digit: impl Fn(Side, usize, usize, usize) -> f32,
    pair: &str,
    fixed: Option<&str>,
) {
    // Angles and radii, and levels of turned rows, are no integers: their keys are like others'.
    let whole_keys = !codec.contains("polar") && !codec.contains("lloyd");
    let row = |side: Side, head: usize, token: usize, channel: usize| match side {
        Side::Key if !whole_keys => fitted(side, head, token, channel),
        _ => digit(side, head, token, channel),
    };
    for (dim, rows) in SHAPES {
        let geometry = geometry(dim as u32, dim as u32, DType::F16);
        let stored = Stored::new(&geometry, codec, &layout(&[64, 64], 0), row);
        assert!(stored.headers.values().all(|header| !header.fallback), "{codec}");
        let is_huffman = pair.starts_with("huffman");
        assert!(stored.headers.values().all(|header| header.huffman == is_huffman), "{codec}");
        for order in Order::EACH {
            let what = format!("{codec}, {dim} channels, {rows} rows, {order:?}");
            // Queries of zeros: the mean of 128 integers.
            let plan = scaled(&stored, &Ask::last(rows, 128), |_| 0.0);
            let answer = run(&stored, &plan, 1, order).unwrap();
            for (i, mean) in floats(&answer.out).iter().enumerate() {
                let (head, channel) = (i / dim / rows, i % dim);
                let sum: f32 = (0..128).map(|token| digit(Side::Value, head, token, channel)).sum();
                assert_eq!(*mean, sum / 128.0, "{what}, {i}");
            }
            // One visible token: its value, and its score as the log-sum-exp.
            let ask = Ask { window: Some(1), ..Ask::last(rows, 100) };
            let q = |i: usize| (i % 5) as f32;
            let plan = scaled(&stored, &ask, q);
            let answer = run(&stored, &plan, 1, order).unwrap();
            for (row, out) in floats(&answer.out).chunks_exact(dim).enumerate() {
                let values = (0..dim).map(|channel| digit(Side::Value, row / rows, 99, channel));
                assert!(values.eq(out.iter().copied()), "{what}, row {row}");
                let key = |channel| digit(Side::Key, row / rows, 99, channel);
                let score: f32 = (0..dim).map(|c| q(row * dim + c) * key(c)).sum();
                assert!(!whole_keys || answer.lse[row] == score * SCALE, "{what}, row {row}");
            }
            check(&answer, &expected(&stored, &plan), &what);
            assert_eq!(kernels(), [kernel(pair, fixed, (dim, rows))], "{what}");
        }
    }
}

#[test]
fn rows_and_fp8_codes() {
    if !available() {
        return;
    }
    for (codec, pair) in [("raw", "f16_f16"), ("fp8", "fp8_fp8")] {
        exact(codec, 15, pair, None);
    }
}

#[test]
fn uniform_codes() {
    if !available() {
        return;
    }
    for (bits, fixed) in [(4, "kivi4"), (2, "kivi2")] {
        let codec = format!("k=uniform(b={bits},axis=channel,g=32); v=uniform(b={bits},");
        let top = (1 << bits) - 1;
        exact(&format!("{codec}axis=token,g=32)"), top, "uniform_uniform", Some(fixed));
        exact(&format!("{codec}axis=token)"), top, "uniform_uniform", None);
    }
    let codec = "k=uniform(b=4,axis=block); v=uniform(b=4,axis=token,g=32)";
    exact(codec, 15, "uniform_uniform", None);
}

#[test]
fn groups_that_choose_their_mode() {
    if !available() {
        return;
    }
    for (bits, fixed) in [(2, Some("innerq2")), (4, None)] {
        let codec = format!(
            "k=uniform(b={bits},axis=token,g=32,mode=hybrid); \
             v=uniform(b={bits},axis=channel,g=32,mode=hybrid)"
        );
        exact(&codec, (1 << bits) - 1, "hybrid_hybrid", fixed);
    }
    // Groups around zero, of both signs, and others, of which only the other levels hold all.
    let chosen = |side: Side, head: usize, token: usize, channel: usize| {
        let (group, at) = match side {
            Side::Key => (token + channel / 32, channel % 32),
            Side::Value => (channel + token / 32, token % 32),
        };
        let mixed = (at * 5 + group * 3) as f32;
        if (group + head).is_multiple_of(3) { mixed % 7.0 - 3.0 } else { mixed % 4.0 + 5.0 }
    };
    let codec = "k=uniform(b=2,axis=token,g=32,mode=hybrid); \
                 v=uniform(b=2,axis=channel,g=32,mode=hybrid)";
    exact_of(codec, chosen, "hybrid_hybrid", Some("innerq2"));
}

#[test]
fn values_beside_keys_that_are_no_integers() {
    if !available() {
        return;
    }
    let codec = "k=polar(a=4,r=4); v=uniform(b=4,axis=token,g=32)";
    exact(codec, 15, "polar_uniform", Some("polar44"));
    exact("k=lloyd(b=4); v=uniform(b=4,axis=token)", 15, "lloyd_uniform", Some("turbo4"));
}

#[test]
fn pairs_and_shapes_without_a_kernel_of_their_own() {
    if !available() {
        return;
    }
    for codec in [
        "k=uniform(b=4,axis=channel,g=32); v=uniform(b=4,axis=channel)",
        "k=uniform(b=4,axis=channel,g=32,mode=sym); v=uniform(b=4,axis=channel,mode=sym)",
        "k=uniform(b=4,axis=channel,g=32,mode=hybrid); v=uniform(b=4,axis=channel,mode=hybrid)",
        "k=uniform(b=4,axis=block,mode=sym); v=fp8",
    ] {
        exact(codec, 15, "any_any", None);
    }
}

#[test]
fn huffman_codes() {
    if !available() {
        return;
    }
    // Values whose scales are a channel's are in no kernel but that for all.
    for (axis, pair) in [("token", "uniform_uniform"), ("channel", "any_any")] {
        let codec =
            format!("k=uniform(b=4,axis=channel,g=32)/huffman; v=uniform(b=4,axis={axis})/huffman");
        exact(&codec, 15, &format!("huffman_{pair}"), None);
    }
}

#[test]
fn entries_on_whole_levels() {
    if !available() {
        return;
    }
    // Entries are whole numbers of a unit of four bits: sums of them that f32 holds.
    for (d, b, fixed) in [
        (2, 4, Some("vecinfer2reg")),
        (2, 8, Some("vecinfer4")),
        (4, 8, Some("vecinfer2")),
        (8, 5, None),
        (16, 4, None),
    ] {
        let codec = format!("k=vq(d={d},b={b}); v=vq(d={d},b={b})");
        for (dim, rows) in SHAPES {
            let geometry = geometry(dim as u32, dim as u32, DType::F16);
            let stored = Stored::new(&geometry, &codec, &layout(&[64, 64], 0), fitted);
            assert!(stored.headers.values().all(|header| !header.fallback), "{codec}");
            for (table_bytes, order) in [usize::MAX, 300, 0].into_iter().zip(Order::EACH) {
                let what = format!("{codec}, {dim} channels, {rows} rows, {order:?}");
                let ask = |ask: Ask, q: fn(usize) -> f32| {
                    let plan = scaled(&stored, &ask, q);
                    let wanted = expected(&stored, &plan);
                    (run_with(&stored, &plan, 1, table_bytes, order).unwrap(), wanted)
                };
                // Queries of zeros: the mean of 128 values.
                let (answer, wanted) = ask(Ask::last(rows, 128), |_| 0.0);
                let means = wanted.iter().flat_map(|row| row.out.iter().map(|mean| *mean as f32));
                assert!(means.eq(floats(&answer.out)), "{what}");
                // One visible token, and its score as the log-sum-exp.
                let last = Ask { window: Some(1), ..Ask::last(rows, 100) };
                let (answer, wanted) = ask(last, |i| (i % 5) as f32);
                let scores = wanted.iter().map(|row| row.lse as f32);
                assert!(scores.eq(answer.lse.iter().copied()), "{what}");
                // Sixteen entries of two bytes are in registers, others where there is room.
                let is_whole = table_bytes == usize::MAX || (d, b) == (2, 4);
                let fixed = fixed.filter(|_| is_whole);
                assert_eq!(kernels(), [kernel("vq_vq", fixed, (dim, rows))], "{what}");
            }
        }
    }
}
