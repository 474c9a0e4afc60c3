//! Every instruction set and every side answers attention as f64 does over the same decoded rows.

use super::*;
use crate::{PlanPart, PlanQuery};
use bytes::Bytes;
use kvd_codec::{Samples, fit};
use kvd_core::{DType, Geometry, RopePairing, Side};

const MODEL: ModelId = ModelId(1);
const LAYER: LayerIndex = LayerIndex(0);
const GROUP: usize = 3;
const HEADS: usize = 2;
/// Blocks, the last one short.
const BLOCKS: [u32; 3] = [64, 64, 41];

/// Sides with kernels of their own, and some without.
const CODECS: &[&str] = &[
    "raw",
    "fp8",
    "kivi-4",
    "kivi-2",
    "k=hadamard/uniform(b=3,axis=block); v=hadamard/uniform(b=5,g=32,axis=channel)",
    "k=uniform(b=8,axis=channel); v=uniform(b=1,axis=token)",
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "vecinfer-2",
    "k=vq(d=2,b=6); v=vq(d=4,b=7)",
    "kvcomp",
];

fn geometry(dim: u32) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: HEADS as u32,
        head_dim_k: dim,
        head_dim_v: dim,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

/// Roughly normal values.
fn values(count: usize, seed: u64) -> Vec<f32> {
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
    dtype.narrow(values, &mut bytes);
    bytes.into()
}

fn codec(geometry: &Geometry, name: &str) -> ModelCodec {
    let spec = kvd_codec::resolve(name).unwrap();
    let calibration = spec.needs_calibration().then(|| {
        let mut samples = Samples::new(geometry);
        for head in 0..HEADS {
            for side in Side::BOTH {
                let rows = values(512 * geometry.head_dim(side), 77);
                samples.push(LAYER, side, head, &rows).unwrap();
            }
        }
        fit(geometry, &spec, &samples, 1, &mut |_| {}).unwrap()
    });
    ModelCodec::new(geometry.clone(), spec, calibration.as_ref()).unwrap()
}

/// A backend with pages of [`BLOCKS`], and the parts of a sequence: the pages and a raw tail.
fn filled(geometry: &Geometry, name: &str) -> (CpuBackend, Vec<PlanPart>) {
    let options = CpuOptions { arena_bytes: 1 << 22, prefault: false, threads: 2 };
    let mut backend = CpuBackend::new(options).unwrap();
    backend.register(MODEL, codec(geometry, name));
    let len = geometry.raw_layout(64).size_bytes();
    let raw = |block: u64| RawTarget {
        extent: Extent { offset: block * len, len },
        capacity_rows: 64,
        first_row: 0,
    };
    let mut sources = Vec::new();
    for (block, tokens) in (0..).zip(BLOCKS.into_iter().chain([7])) {
        let count = tokens as usize * HEADS * geometry.head_dim(Side::Key);
        let side = |seed| payload(DType::F16, &values(count, seed));
        let rows = IncomingRows { tokens, k: side(2 * block), v: side(2 * block + 1) };
        backend.write(MODEL, &rows, 0, tokens, raw(block)).unwrap();
        let RawTarget { extent, capacity_rows, first_row } = raw(block);
        sources.push(EncodeSource { extent, capacity_rows, first_row, rows: tokens });
    }
    let tail = sources.pop().unwrap();
    let mut parts = Vec::new();
    let (mut first_token, mut offset) = (0, 1 << 21);
    for (pages, source) in backend.encode(MODEL, LAYER, &sources).unwrap().iter().zip(&sources) {
        let pages = pages.as_ref().unwrap();
        let extent = Extent { offset, len: pages.bytes.len() as u64 };
        backend.place(pages, extent);
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

/// What a query asks for.
#[derive(Clone, Copy, Debug)]
struct Ask {
    n_q: u32,
    position: u32,
    window: Option<u32>,
    cap: Option<f32>,
}

fn plan(geometry: &Geometry, parts: &[PlanPart], ask: Ask) -> AttendPlan {
    let rows = ask.n_q as usize * HEADS * GROUP;
    AttendPlan {
        model: MODEL,
        layer: LAYER,
        q_heads: (HEADS * GROUP) as u32,
        dtype: DType::F32,
        scale: None,
        soft_cap: ask.cap,
        queries: vec![PlanQuery {
            n_q: ask.n_q,
            position: ask.position,
            sliding_window: ask.window,
            parts: parts.into(),
        }],
        q: payload(DType::F32, &values(rows * geometry.head_dim(Side::Key), 5)),
    }
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    let chunks = bytes.as_chunks::<4>().0.iter();
    chunks.map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect()
}

/// Output and log-sum-exp in f64 over decoded rows.
fn reference(geometry: &Geometry, plan: &AttendPlan, rows: &LoadedRows) -> (Vec<f64>, Vec<f64>) {
    let dim = geometry.head_dim(Side::Key);
    let (q, k, v) = (floats(&plan.q), floats(&rows.k), floats(&rows.v));
    let tokens = k.len() / (HEADS * dim);
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for (row, q) in q.chunks_exact(dim).enumerate() {
        let head = row % (HEADS * GROUP) / GROUP;
        let visible = plan.queries[0].visible((row / (HEADS * GROUP)) as u32);
        let visible = visible.start as usize..tokens.min(visible.end as usize);
        let of = |t: usize, rows: &[f64]| rows[(t * HEADS + head) * dim..][..dim].to_vec();
        let score = |t: usize| {
            let dot: f64 = of(t, &k).iter().zip(q).map(|(a, b)| a * b).sum();
            let score = dot / (dim as f64).sqrt();
            plan.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
        };
        let scores: Vec<f64> = visible.clone().map(score).collect();
        let sum: f64 = scores.iter().map(|score| score.exp()).sum();
        let mut values = vec![0f64; dim];
        for (t, score) in visible.zip(&scores) {
            let weight = score.exp() / sum;
            values.iter_mut().zip(of(t, &v)).for_each(|(out, v)| *out += weight * v);
        }
        out.extend(values);
        lse.push(sum.ln());
    }
    (out, lse)
}

/// Queries and weights have 15 bits: a weight is off by at most `2^-15` of the largest of its
/// span, a score by `2^-15` of the largest product for each of 128 channels. f16 rounding of a
/// codebook's levels adds `2^-11`. All together stay below this part of the output's norm.
const FAST_ERROR_MAX: f64 = 1e-3;

fn check(dim: u32, name: &str, asks: &[Ask]) {
    let geometry = geometry(dim);
    let (mut backend, parts) = filled(&geometry, name);
    let load = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts: parts.clone() };
    let rows = backend.load(&load).unwrap();
    for ask in asks {
        let plan = plan(&geometry, &parts, *ask);
        let (out, lse) = reference(&geometry, &plan, &rows);
        let levels = Simd::available();
        for (simd, precision) in levels.iter().flat_map(|s| Precision::ALL.map(|p| (*s, p))) {
            backend.limit(simd.set()).unwrap();
            backend.set_precision(precision);
            let error_max = match precision {
                Precision::Single => 1e-5,
                Precision::Fast => FAST_ERROR_MAX,
            };
            let answer = backend.attend(&plan).unwrap();
            let got = floats(&answer.out);
            let error: f64 = got.iter().zip(&out).map(|(a, b)| (a - b).powi(2)).sum();
            let norm: f64 = out.iter().map(|b| b.powi(2)).sum();
            let error = (error / norm).sqrt();
            let context = format!("{name}, {dim}, {simd:?}, {precision:?}, {ask:?}");
            assert!(error < error_max, "{context}: {error:e}");
            for (got, want) in answer.lse.iter().zip(&lse) {
                let error = (f64::from(*got) - want).abs();
                assert!(error < error_max, "{context}: lse {got} instead of {want}");
            }
        }
    }
}

#[test]
fn every_level_answers_as_f64_does() {
    let plain = Ask { n_q: 1, position: 175, window: None, cap: None };
    let asks = [
        plain,
        Ask { n_q: 5, position: 100, ..plain },
        Ask { n_q: 2, position: 170, window: Some(45), ..plain },
        Ask { cap: Some(3.0), ..plain },
    ];
    for name in CODECS {
        check(64, name, &asks);
    }
}

#[test]
fn head_sizes_that_fill_no_register_are_right_too() {
    let ask = Ask { n_q: 1, position: 175, window: None, cap: None };
    for dim in [80, 136, 256] {
        for name in ["kivi-4", "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)", "vecinfer-2"] {
            // Groups of 32 channels do not divide 80 and 136: the values are decoded then.
            check(dim, name, &[ask]);
        }
    }
}
