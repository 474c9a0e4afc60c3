//! Every instruction set and every side answers attention as f64 does over the same decoded rows,
//! within the error budget of its arithmetic.

use super::*;
use crate::{PlanPart, PlanQuery};
use bytes::Bytes;
use kvd_codec::{Calibration, CodecSpec};
use kvd_core::{DType, Geometry, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};
use parking_lot::Mutex;
use std::sync::LazyLock;

mod bits;
mod code_looks;
mod drawn_rows;
mod drifted_rows;
mod hostile;
mod hostile_inputs;
mod ragged;
mod rotated_values;
mod scores;
mod shapes;
mod shared;
mod slices;

const MODEL: ModelId = ModelId(1);
const LAYER: LayerIndex = LayerIndex(0);
const HEADS: usize = 2;
/// Codecs whose kernels round queries and weights.
const ROUNDED: &[&str] = &[
    "kivi-4",
    "kivi-2",
    "k=hadamard/uniform(b=3,axis=block); v=hadamard/uniform(b=5,g=32,axis=channel)",
    "k=uniform(b=8,axis=channel); v=uniform(b=1,axis=token)",
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "vecinfer-2",
    "k=vq(d=2,b=6); v=vq(d=4,b=7)",
    "kvcomp",
    "kvcomp-channel",
    "kvd-2",
    "kvd-4",
    "k=mean+qpca/grid(rate=4)/huffman; v=hadamard/grid(rate=1)/huffman",
    "k=vq(d=2,b=4); v=gain/vq(d=2,b=4)",
    "kvd-2-fast",
    "k=mean+qpca/bitalloc(b=4.6); v=hadamard/bitalloc(b=5)",
    "k=bitalloc(b=0.7); v=gain/bitalloc(b=7.4)",
    "innerq-2",
    "k=norm/uniform(b=3,g=16,axis=token); v=uniform(b=2,axis=channel,mode=sym)",
    "k=uniform(b=3,axis=channel,mode=sym); v=uniform(b=4,g=32,axis=token,mode=sym)",
    "k=uniform(b=2,axis=token,mode=sym); v=uniform(b=3,axis=block,mode=sym)",
    "k=uniform(b=5,g=64,axis=channel); v=uniform(b=3,g=64,axis=token)",
    "k=uniform(b=4,g=8,axis=token,mode=hybrid); v=uniform(b=5,g=32,axis=channel,mode=hybrid)",
    "turbo-4",
    "k=vq(d=2,b=4)/huffman; v=vq(d=2,b=4)/huffman",
    "k=hadamard/lloyd(b=4)/huffman; v=vq(d=2,b=4)",
    "k=hadamard/lloyd(b=6); v=hadamard+gain/lloyd(b=3)",
    "polar-4+4",
    "polar-4+2",
    "k=uniform(b=7,axis=channel)/huffman; v=uniform(b=8,axis=token)/huffman",
];
/// Rounded codecs whose keys have score tables.
const TABLES: &[&str] = &[
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "k=vq(d=2,b=4); v=gain/vq(d=2,b=4)",
    "turbo-4",
];
/// Codecs that plain AVX2 multiplies as bytes, on one side at least.
const BYTES: &[&str] = &[
    "kvcomp",
    "kvcomp-channel",
    "polar-4+4",
    "polar-4+2",
    "kivi-4",
    "kivi-2",
    "k=uniform(b=8,axis=channel); v=uniform(b=1,axis=token)",
    "k=uniform(b=3,axis=channel,mode=sym); v=uniform(b=4,g=32,axis=token,mode=sym)",
    "k=uniform(b=5,g=64,axis=channel); v=uniform(b=3,g=64,axis=token)",
];
/// Codecs whose kernels multiply f32.
const EXACT: &[&str] = &["raw", "k=bf16; v=hadamard/f32", "fp8", "k=hadamard/fp8; v=f16"];

/// The kind of keys and queries.
#[derive(Clone, Copy, Debug, PartialEq)]
enum InputKind {
    /// Roughly normal.
    Normal,
    /// Long queries: a few tokens have all the weight.
    Peaked,
    /// One channel of the keys is thirty times the others.
    Outlier,
    /// One key in 97 is far along the query's direction, all others hardly count.
    Huge,
    /// Short queries and 8192 tokens: all weigh alike.
    Flat,
    /// Two of three values are short: they have gains where the side has.
    Quiet,
}

impl InputKind {
    /// Tokens of blocks that hold at most `full`; but where there are many, the last one is short.
    fn blocks(self, full: u32) -> Vec<u32> {
        if self == Self::Flat { vec![full; 8192 / full as usize] } else { vec![full, full, 41] }
    }

    fn query_gain(self) -> f32 {
        match self {
            Self::Normal | Self::Outlier | Self::Quiet => 1.0,
            Self::Peaked => 8.0,
            Self::Huge => 1.5,
            Self::Flat => 0.02,
        }
    }

    /// Changes values of `[tokens, HEADS, dim]`.
    fn shape_values(self, dim: usize, values: &mut [f32]) {
        if self == Self::Quiet {
            for (index, row) in values.chunks_exact_mut(dim).enumerate() {
                let length = [1.0, 0.3, 0.02][index / HEADS % 3];
                row.iter_mut().for_each(|x| *x *= length);
            }
        }
    }

    /// Changes keys of `[tokens, HEADS, dim]`.
    fn shape_keys(self, dim: usize, keys: &mut [f32]) {
        for (index, row) in keys.chunks_exact_mut(dim).enumerate() {
            match self {
                Self::Outlier => row[5] = row[5] * 30.0 + 20.0,
                Self::Huge if index / HEADS % 97 == 13 => {
                    // Along the first query row: see `plan`.
                    row.copy_from_slice(&values(dim, 5));
                }
                _ => {}
            }
        }
    }
}

/// Whether an emulator runs the tests: `cargo xtask cross` says so.
fn emulated() -> bool {
    std::env::var_os("KVD_EMULATED").is_some()
}

pub(super) fn geometry(dim: u32) -> Geometry {
    geometry_of(dim, dim)
}

fn geometry_of(head_dim_k: u32, head_dim_v: u32) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: HEADS as u32,
        head_dim_k,
        head_dim_v,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

/// Roughly normal values.
pub(super) fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut draw = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| (draw() + draw() + draw() + draw()) * 1.7).collect()
}

fn payload(dtype: DType, values: &[f32]) -> Bytes {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    dtype.narrow_values(values, &mut bytes);
    bytes.into()
}

/// A codec, fitted once for all tests of a run: under an emulator fits take most of the time.
pub(super) fn codec(geometry: &Geometry, name: &str) -> ModelCodec {
    static FITTED: LazyLock<Mutex<HashMap<String, ModelCodec>>> = LazyLock::new(Mutex::default);
    let key = format!("{geometry:?} {name}");
    let known = FITTED.lock().get(&key).cloned();
    known.unwrap_or_else(|| {
        let spec = kvd_codec::resolve_spec(name).unwrap();
        let calibration = spec.needs_calibration().then(|| fitted(geometry, &spec));
        let codec = ModelCodec::new(geometry.clone(), spec, calibration.as_ref()).unwrap();
        FITTED.lock().insert(key, codec.clone());
        codec
    })
}

fn fitted(geometry: &Geometry, spec: &CodecSpec) -> Calibration {
    let sampled = |side| values(512 * geometry.head_dim(side), 77);
    fitted_on(geometry, spec, Side::BOTH.map(sampled))
}

/// A calibration on these rows of both sides, `[512, dim]`, the same for all heads.
fn fitted_on(geometry: &Geometry, spec: &CodecSpec, sampled: [Vec<f32>; 2]) -> Calibration {
    let mut samples = Samples::new(geometry);
    for head in 0..HEADS {
        let queries = values(512 * geometry.head_dim(Side::Key), 78);
        samples.push_queries(LAYER, head, &queries).unwrap();
        for (side, rows) in Side::BOTH.into_iter().zip(&sampled) {
            samples.push(LAYER, side, head, rows).unwrap();
        }
    }
    fit_calibration(geometry, spec, &samples, 1, &mut |_| {}).unwrap()
}

/// A backend with pages of [`InputKind::blocks`], and the parts of a sequence: the pages and a raw
/// tail.
fn filled(codec: ModelCodec, data: InputKind) -> (CpuBackend, Vec<PlanPart>) {
    let [dim_k, dim_v] = Side::BOTH.map(|side| codec.geometry().head_dim(side));
    let blocks = data.blocks(codec.geometry().block_tokens);
    filled_with(codec, &blocks, |block, tokens| {
        let mut keys = values(tokens as usize * HEADS * dim_k, 2 * block);
        data.shape_keys(dim_k, &mut keys);
        let mut values = values(tokens as usize * HEADS * dim_v, 2 * block + 1);
        data.shape_values(dim_v, &mut values);
        [keys, values]
    })
}

/// A backend with pages of so many tokens, and a raw tail: rows of K and V by block.
fn filled_with(
    codec: ModelCodec,
    blocks: &[u32],
    rows_of: impl Fn(u64, u32) -> [Vec<f32>; 2],
) -> (CpuBackend, Vec<PlanPart>) {
    let geometry = &codec.geometry().clone();
    let options = CpuOptions { arena_bytes: 1 << 24, prefault: false, threads: 2 };
    let mut backend = CpuBackend::new(options).unwrap();
    backend.register(MODEL, codec);
    let full = geometry.block_tokens;
    let len = geometry.raw_layout(full).size_bytes();
    let raw = |block: u64| RawTarget {
        extent: Extent { offset: block * len, len },
        capacity_rows: full,
        first_row: 0,
    };
    let mut sources = Vec::new();
    for (block, tokens) in (0..).zip(blocks.iter().copied().chain([7])) {
        let [k, v] = rows_of(block, tokens).map(|rows| payload(geometry.dtype, &rows));
        let rows = IncomingRows { tokens, k, v };
        backend.write(MODEL, &rows, 0, tokens, raw(block)).unwrap();
        let RawTarget { extent, capacity_rows, first_row } = raw(block);
        sources.push(EncodeSource { extent, capacity_rows, first_row, rows: tokens });
    }
    let tail = sources.pop().unwrap();
    let mut parts = Vec::new();
    let (mut first_token, mut offset) = (0, 1 << 23);
    for (pages, source) in backend.encode(MODEL, LAYER, &sources).unwrap().iter().zip(&sources) {
        let pages = pages.as_ref().unwrap();
        let extent = Extent { offset, len: pages.bytes.len() as u64 };
        backend.move_pages(pages, extent);
        offset += extent.len.next_multiple_of(64);
        let source_ = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
        parts.push(PlanPart { first_token, rows: source.rows, source: source_ });
        first_token += source.rows;
    }
    let EncodeSource { extent, capacity_rows, first_row, rows } = tail;
    let source = Source::Raw { extent, capacity_rows, first_row };
    parts.push(PlanPart { first_token, rows, source });
    (backend, parts)
}

/// A question to a backend.
#[derive(Clone, Copy, Debug)]
struct Question {
    /// Query heads of a KV head.
    group: usize,
    n_q: u32,
    position: u32,
    window: Option<u32>,
    cap: Option<f32>,
}

fn plan(geometry: &Geometry, parts: &[PlanPart], data: InputKind, ask: Question) -> AttendPlan {
    let rows = ask.n_q as usize * HEADS * ask.group;
    let mut q = values(rows * geometry.head_dim(Side::Key), 5);
    q.iter_mut().for_each(|q| *q *= data.query_gain());
    AttendPlan {
        model: MODEL,
        layer: LAYER,
        q_heads: (HEADS * ask.group) as u32,
        dtype: DType::F32,
        scale: None,
        soft_cap: ask.cap,
        queries: vec![PlanQuery {
            n_q: ask.n_q,
            position: ask.position,
            sliding_window: ask.window,
            parts: parts.into(),
        }],
        q: payload(DType::F32, &q),
    }
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.as_chunks::<4>().0.iter();
    chunks.map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
}

/// The right answer of one query row.
struct RowTruth {
    out: Vec<f64>,
    lse: f64,
    /// The largest product of a weight, as part of their sum, and a value.
    largest_value: f64,
    /// The largest product of a query's and a key's channel in a score.
    largest_term: f64,
    /// The largest weight, as part of their sum.
    largest_weight: f64,
    /// The largest magnitude of a value that the row sees.
    largest_seen: f64,
}

/// Answers by query row over decoded rows, in f64; `round` rounds a row of queries or weights.
fn reference(
    geometry: &Geometry,
    plan: &AttendPlan,
    rows: &LoadedRows,
    round: fn(&mut [f64]),
) -> Vec<RowTruth> {
    let [dim, dim_v] = Side::BOTH.map(|side| geometry.head_dim(side));
    let (q, k, v) = (floats(&plan.q), floats(&rows.k), floats(&rows.v));
    let (tokens, heads) = (k.len() / (HEADS * dim), plan.q_heads as usize);
    let one = |(row, q): (usize, &[f64])| {
        let mut q = q.to_vec();
        round(&mut q);
        let head = row % heads / (heads / HEADS);
        let visible = plan.queries[0].visible((row / heads) as u32);
        let visible = visible.start as usize..tokens.min(visible.end as usize);
        fn of(t: usize, head: usize, rows: &[f64], dim: usize) -> &[f64] {
            &rows[(t * HEADS + head) * dim..][..dim]
        }
        let mut largest_term = 0f64;
        let mut score = |t: usize| {
            let terms = of(t, head, &k, dim).iter().zip(&q).map(|(a, b)| a * b);
            let dot: f64 = terms.inspect(|x| largest_term = largest_term.max(x.abs())).sum();
            let score = dot / (dim as f64).sqrt();
            plan.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let scores: Vec<f64> = visible.clone().map(&mut score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let sum: f64 = weights.iter().sum();
        round(&mut weights);
        let (mut out, mut largest_value, mut largest_seen) = (vec![0f64; dim_v], 0f64, 0f64);
        for (t, weight) in visible.zip(&weights) {
            let weight = weight / sum;
            for (out, v) in out.iter_mut().zip(of(t, head, &v, dim_v)) {
                *out += weight * v;
                largest_value = largest_value.max((weight * v).abs());
                largest_seen = largest_seen.max(v.abs());
            }
        }
        let largest_term = largest_term / (dim as f64).sqrt();
        let lse = most + sum.ln();
        let largest_weight = 1.0 / sum;
        RowTruth { out, lse, largest_value, largest_term, largest_weight, largest_seen }
    };
    q.chunks_exact(dim).enumerate().map(one).collect()
}

/// Rounded to the eleven bits of an f16 (that has as many exponents as it likes).
fn to_half(row: &mut [f64]) {
    for x in row {
        let mut bytes = [0; 2];
        let exponent = if *x == 0.0 { 0 } else { x.abs().log2().floor() as i32 };
        DType::F16.narrow_values(&[(*x * 2f64.powi(-exponent)) as f32], &mut bytes);
        let mut value = [0f32];
        DType::F16.widen_values(&bytes, &mut value);
        *x = f64::from(value[0]) * 2f64.powi(exponent);
    }
}

/// Rounded to seven bits and a sign of the largest.
fn to_byte(row: &mut [f64]) {
    let step = row.iter().fold(0f64, |max, x| max.max(x.abs())) / 127.0;
    row.iter_mut().filter(|_| step > 0.0).for_each(|x| *x = (*x / step).round() * step);
}

/// Largest errors of outputs and of log-sum-exps.
fn worst<'a>(truth: &[RowTruth], rows: impl Iterator<Item = (&'a [f64], f64)>) -> (f64, f64) {
    let (mut out, mut lse) = (0f64, 0f64);
    for (truth, (values, sum)) in truth.iter().zip(rows) {
        let errors = truth.out.iter().zip(values).map(|(a, b)| (a - b).abs());
        out = errors.fold(out, f64::max);
        lse = lse.max((truth.lse - sum).abs());
    }
    (out, lse)
}

/// How far outputs and log-sum-exps may be off: four times what rounded queries and weights cost,
/// and at least one rounding, to so many bits, of the largest product
/// (`docs/adr/0008-kernel-error-budget.md`).
fn budget(
    geometry: &Geometry,
    plan: &AttendPlan,
    rows: &LoadedRows,
    truth: &[RowTruth],
    round: fn(&mut [f64]),
    bits: i32,
) -> (f64, f64) {
    const SLACK: f64 = 4.0;
    let rounded = reference(geometry, plan, rows, round);
    let (out, lse) = worst(truth, rounded.iter().map(|row| (&row.out[..], row.lse)));
    let largest = |of: fn(&RowTruth) -> f64| truth.iter().map(of).fold(0.0, f64::max);
    let rounding = 2f64.powi(-bits);
    let out = out.max(rounding * largest(|row| row.largest_value));
    let lse = lse.max(rounding * largest(|row| row.largest_term));
    (SLACK * out, SLACK * lse)
}

/// Relative error of answers in single precision: sums of products rounded to 24 bits.
const SINGLE_ERROR_MAX: f64 = 1e-5;

fn check(geometry: &Geometry, name: &str, data: InputKind, asks: &[Question]) {
    check_codec(codec(geometry, name), name, data, asks);
}

fn check_codec(codec: ModelCodec, name: &str, data: InputKind, asks: &[Question]) {
    let geometry = &codec.geometry().clone();
    let (mut backend, parts) = filled(codec, data);
    let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
    let rows = backend.load(&load).unwrap();
    for ask in asks {
        let plan = plan(geometry, &parts, data, *ask);
        let truth = reference(geometry, &plan, &rows, |_| {});
        let norm = truth.iter().flat_map(|row| &row.out).fold(0f64, |max, x| max.max(x.abs()));
        let single = (SINGLE_ERROR_MAX * norm, SINGLE_ERROR_MAX);
        let half = budget(geometry, &plan, &rows, &truth, to_half, 11);
        let byte = budget(geometry, &plan, &rows, &truth, to_byte, 8);
        let levels = Simd::available_levels();
        for (simd, precision) in levels.iter().flat_map(|s| Precision::ALL.map(|p| (*s, p))) {
            backend.simd = simd;
            backend.set_precision(precision);
            let allowed = match precision {
                Precision::Single => single,
                _ if !ROUNDED.contains(&name) => single,
                // The sets that multiply single bytes, and the other that does so at times.
                Precision::Int8 if simd.vector_set() == InstructionSet::Avx512 => byte,
                Precision::Int8 if simd.has_avx_vnni() => byte,
                Precision::Int8
                    if simd.vector_set() == InstructionSet::Avx2
                        && (TABLES.contains(&name) || BYTES.contains(&name)) =>
                {
                    byte
                }
                Precision::Int8 | Precision::Fast => half,
            };
            let answer = backend.attend(&plan).unwrap();
            let got = floats(&answer.out);
            let got = got.chunks_exact(geometry.head_dim(Side::Value));
            let got = got.zip(answer.lse.iter().map(|x| f64::from(*x)));
            let (out, lse) = worst(&truth, got);
            let context =
                format!("{name}, {geometry:?}, {data:?}, {simd:?}, {precision:?}, {ask:?}");
            assert!(out <= allowed.0, "{context}: {out:e} of {:e}", allowed.0);
            assert!(lse <= allowed.1, "{context}: lse {lse:e} of {:e}", allowed.1);
        }
    }
}

#[test]
fn every_level_answers_as_f64_does() {
    let plain = Question { group: 4, n_q: 1, position: 175, window: None, cap: None };
    let asks = [
        plain,
        Question { group: 8, ..plain },
        Question { group: 3, n_q: 5, position: 100, ..plain },
        Question { group: 1, n_q: 2, position: 170, window: Some(45), ..plain },
        Question { n_q: 1, position: 100, window: Some(1), ..plain },
        Question { group: 1, cap: Some(3.0), ..plain },
    ];
    for name in ROUNDED.iter().chain(EXACT) {
        check(&geometry(64), name, InputKind::Normal, &asks);
    }
}

#[test]
fn rounding_stays_in_the_budget_on_data_that_is_bad_for_it() {
    let ask = Question { group: 3, n_q: 2, position: 174, window: None, cap: None };
    for data in [InputKind::Peaked, InputKind::Outlier, InputKind::Huge, InputKind::Quiet] {
        for name in ROUNDED {
            check(&geometry(64), name, data, &[ask]);
        }
    }
    let ask = Question { group: 3, n_q: 1, position: 8192, window: None, cap: None };
    // The last two have keys of score tables under int8.
    let tables = "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)";
    for name in ["kivi-4", "vecinfer-2", "kvcomp", "kvd-4", "turbo-4", tables] {
        check(&geometry(64), name, InputKind::Flat, &[ask]);
    }
}
