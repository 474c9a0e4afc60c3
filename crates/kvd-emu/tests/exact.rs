//! Answers are exact where all values are small integers, in the kernels for any shape and in those
//! that have a preset's shapes as constants: head sizes of 64 and 128 channels, one, four and eight
//! query rows per KV head.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

#[path = "exact/calibrated.rs"]
mod calibrated;
mod common;

use common::compare::{kernel, layout};
use common::reference::{check, expected, floats};
use common::run::{kernels, run, run_with};
use common::{Ask, Stored, geometry, noise, orders};
use kvd_codec::{Calibration, PageHeader};
use kvd_compute::AttendPlan;
use kvd_core::{DType, Geometry, Side};
use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, is_available, is_sanitized, launch_kernel};

/// Channels and query rows of every case.
const SHAPES: [(usize, usize); 6] = [(128, 4), (64, 1), (128, 8), (64, 4), (64, 8), (128, 1)];

/// Those that are asked: under ThreadSanitizer, where each takes ten times as long, one of each
/// kernel's rows, and of a preset's shapes.
fn shapes() -> impl Iterator<Item = (usize, usize)> {
    SHAPES.into_iter().take(if is_sanitized("thread") { 3 } else { SHAPES.len() })
}

/// Pages that end inside a tile and in their first one, 128 tokens in all.
const TAILS: [usize; 3] = [45, 64, 19];

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

/// A question, and the kernels that are to answer it.
struct Case<'a> {
    codec: &'a str,
    dtype: DType,
    /// Tokens of each page, 128 in all.
    pages: &'a [usize],
    pair: &'a str,
    fixed: Option<&'a str>,
    /// The change to the calibration.
    change: fn(&Calibration) -> Calibration,
}

impl<'a> Case<'a> {
    /// Rows in f16, full pages, the calibration as it was fitted.
    fn new(codec: &'a str, pair: &'a str, fixed: Option<&'a str>) -> Self {
        let (dtype, pages) = (DType::F16, &[64, 64][..]);
        Self { codec, dtype, pages, pair, fixed, change: Calibration::clone }
    }

    /// Rows as they are, or their codes, hold `digit`: answers to queries of small integers are
    /// exact, and come from the kernel that is meant.
    fn holds(&self, digit: impl Fn(Side, usize, usize, usize) -> f32) {
        self.holds_in(shapes(), digit);
    }

    /// Checks the case for some channels and query rows.
    fn holds_in(
        &self,
        shapes: impl Iterator<Item = (usize, usize)>,
        digit: impl Fn(Side, usize, usize, usize) -> f32,
    ) {
        // Angles and radii, and levels of turned rows, are no integers: keys like others'.
        let whole_keys = !self.codec.contains("polar") && !self.codec.contains("lloyd");
        let row = |side: Side, head: usize, token: usize, channel: usize| match side {
            Side::Key if !whole_keys => fitted(side, head, token, channel),
            _ => digit(side, head, token, channel),
        };
        for (dim, rows) in shapes {
            let block_tokens = 64;
            let geometry =
                Geometry { block_tokens, ..geometry(dim as u32, dim as u32, self.dtype) };
            let layout = layout(self.pages, 0);
            let stored = Stored::calibrated(&geometry, self.codec, &layout, row, self.change);
            // Pages of a grid, whose tables are the calibration's, do not say so.
            let is_huffman = self.pair.starts_with("huffman") && !self.pair.contains("grid");
            let is_meant = |header: &PageHeader| !header.fallback && header.huffman == is_huffman;
            let headers = &stored.headers;
            assert!(headers.values().all(is_meant), "{}: {headers:?}", self.codec);
            for order in orders() {
                let what = format!("{}, {dim} channels, {rows} rows, {order:?}", self.codec);
                answers(&stored, (dim, rows), order, (&digit, whole_keys), &what);
                assert_eq!(kernels(), [kernel(self.pair, self.fixed, (dim, rows))], "{what}");
            }
        }
    }
}

/// Asks for the mean of all values, and for one token's value and score.
fn answers(
    stored: &Stored,
    (dim, rows): (usize, usize),
    order: ThreadOrder,
    (digit, whole_keys): (impl Fn(Side, usize, usize, usize) -> f32, bool),
    what: &str,
) {
    // Queries of zeros: the mean of 128 integers.
    let plan = scaled(stored, &Ask::last(rows, 128), |_| 0.0);
    let answer = run(stored, &plan, 1, order).unwrap();
    for (i, mean) in floats(&answer.out).iter().enumerate() {
        let (head, channel) = (i / dim / rows, i % dim);
        let sum: f32 = (0..128).map(|token| digit(Side::Value, head, token, channel)).sum();
        assert_eq!(*mean, sum / 128.0, "{what}, {i}");
    }
    // One visible token: its value, and its score as the log-sum-exp.
    let ask = Ask { window: Some(1), ..Ask::last(rows, 100) };
    let q = |i: usize| (i % 5) as f32;
    let plan = scaled(stored, &ask, q);
    let answer = run(stored, &plan, 1, order).unwrap();
    for (row, out) in floats(&answer.out).chunks_exact(dim).enumerate() {
        let values = (0..dim).map(|channel| digit(Side::Value, row / rows, 99, channel));
        assert!(values.eq(out.iter().copied()), "{what}, row {row}");
        let key = |channel| digit(Side::Key, row / rows, 99, channel);
        let score: f32 = (0..dim).map(|c| q(row * dim + c) * key(c)).sum();
        assert!(!whole_keys || answer.lse[row] == score * SCALE, "{what}, row {row}");
    }
    check(&answer, &expected(stored, &plan), what);
}

/// Checks full pages that hold levels up to `top` as they are.
fn exact(codec: &str, top: usize, pair: &str, fixed: Option<&str>) {
    Case::new(codec, pair, fixed).holds(digit(top));
}

#[test]
fn rows_and_fp8_codes() {
    if !is_available() {
        return;
    }
    for (codec, dtype, pair) in [
        ("raw", DType::F16, "f16_f16"),
        ("raw", DType::BF16, "bf16_bf16"),
        ("raw", DType::F32, "f32_f32"),
        ("fp8", DType::F16, "fp8_fp8"),
    ] {
        for pages in [&[64, 64][..], &TAILS] {
            Case { dtype, pages, ..Case::new(codec, pair, None) }.holds(digit(15));
        }
    }
}

#[test]
fn uniform_codes() {
    if !is_available() {
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
    // Scales that stand for channels of one token: pages may end anywhere.
    let codec = "k=uniform(b=4,axis=token); v=uniform(b=4,axis=token,g=32)";
    Case { pages: &TAILS, ..Case::new(codec, "uniform_uniform", None) }.holds(digit(15));
}

#[test]
fn groups_that_choose_their_mode() {
    if !is_available() {
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
    Case::new(codec, "hybrid_hybrid", Some("innerq2")).holds(chosen);
}

#[test]
fn values_beside_keys_that_are_no_integers() {
    if !is_available() {
        return;
    }
    let codec = "k=polar(a=4,r=4); v=uniform(b=4,axis=token,g=32)";
    exact(codec, 15, "polar_uniform", Some("polar44"));
    exact("k=lloyd(b=4); v=uniform(b=4,axis=token)", 15, "lloyd_uniform", Some("turbo4"));
}

#[test]
fn pairs_and_shapes_without_a_kernel_of_their_own() {
    if !is_available() {
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
    if !is_available() {
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
    if !is_available() {
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
        for (dim, rows) in shapes() {
            let geometry = geometry(dim as u32, dim as u32, DType::F16);
            let stored = Stored::new(&geometry, &codec, &layout(&[64, 64], 0), fitted);
            assert!(stored.headers.values().all(|header| !header.fallback), "{codec}");
            for (table_bytes, order) in [usize::MAX, 300, 0].into_iter().zip(orders().cycle()) {
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

#[test]
fn sums_of_what_is_only_read() {
    if !is_available() {
        return;
    }
    // As in `measure/read.cuh`: threads, loads under way, words of a load; two turns of each block.
    let (blocks, threads, depth, words) = (3u32, 128, 8, 4);
    let per_block = 2 * threads * depth;
    let read: Vec<u32> = (0..blocks as usize * per_block * words).map(|i| i as u32 * 7).collect();
    let (from, to) = (
        EmulatorMemory::copy_from(bytemuck::cast_slice(&read)),
        EmulatorMemory::new(4 * blocks as usize * threads),
    );
    for order in orders() {
        let parameters = [from.address(), to.address(), per_block as u64];
        let grid = LaunchGrid { kernel: "kvd_read", blocks, shared_bytes: 0, order };
        // SAFETY: as many words as all thread blocks read, and a sum for each of their threads.
        unsafe { launch_kernel(grid, bytemuck::bytes_of(&parameters)).unwrap() };
        let sums: &[u32] = bytemuck::cast_slice(to.bytes());
        for (at, sum) in sums.iter().enumerate() {
            let (block, thread) = (at / threads, at % threads);
            let first = block * per_block + thread;
            let quads = (0..per_block / threads).map(|turn| first + turn * threads);
            let all = quads.flat_map(|quad| &read[quad * words..][..words]);
            assert_eq!(*sum, all.fold(0u32, |sum, word| sum.wrapping_add(*word)), "{order:?}");
        }
    }
}
