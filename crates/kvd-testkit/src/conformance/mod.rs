//! Conformance of a backend: attention over pages of every preset, and of sides that no preset has,
//! against plain f64 attention over the rows that those pages decode to.

mod cases;
mod mount;
pub mod region;
pub mod transfer;

pub use cases::{AttendCase, LATE_CODEC, check_late_kernel, list_cases};
pub use mount::{BackendUnderTest, check_case, check_cases, check_codec, check_codec_transfer};

use bytes::Bytes;
use kvd_codec::{BlockRows, Calibration, CodecSpec, ModelCodec, PageReader, RowSpace};
use kvd_compute::{
    AttendPlan, Backend, EncodeSource, IncomingRows, PlanPart, PlanQuery, RawTarget, Source,
};
use kvd_core::{DType, Extent, Geometry, LayerIndex, ModelId, RopePairing, Side};
use kvd_fit::{Samples, fit_calibration};
use std::time::Instant;

const MODEL: ModelId = ModelId(1);
const LAYER: LayerIndex = LayerIndex(0);
const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 64;
/// Tokens of the blocks: a full one and one that ends inside a tile and a stream.
const BLOCKS: [u32; 2] = [64, 21];
const QUERIES: usize = 3;

fn geometry(rope_pairing: RopePairing, dtype: DType) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: KV_HEADS as u32,
        head_dim_k: DIM as u32,
        head_dim_v: DIM as u32,
        block_tokens: BLOCKS[0],
        dtype,
        rope_pairing,
    }
}

/// Deterministic values, roughly normal, with one wide channel.
fn make_values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let gain = |i: usize| if i % DIM == 5 { 4.0 } else { 1.0 };
    (0..count).map(|i| (draw() + draw() + draw()) * gain(i)).collect()
}

fn to_bytes(values: &[f32]) -> Bytes {
    values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn fit_small_calibration(geometry: &Geometry, spec: &CodecSpec) -> Option<Calibration> {
    if !spec.needs_calibration() {
        return None;
    }
    // A sub-vector for every entry of the largest codebook among the presets.
    let count = if spec.to_string().contains("vq(") { 512 } else { 200 };
    let mut samples = Samples::new(geometry);
    for head in 0..KV_HEADS {
        samples.push_queries(LAYER, head, &make_values(7, 200 * DIM)).unwrap();
        for side in Side::BOTH {
            samples.push(LAYER, side, head, &make_values(11 + head as u64, count * DIM)).unwrap();
        }
    }
    Some(fit_calibration(geometry, spec, &samples, 1, &mut |_| {}).unwrap())
}

/// A stored sequence, as backend and reference have it.
struct StoredBlocks {
    parts: Vec<StoredPart>,
}

/// A part of a plan, and its rows as f64, `[side][head]` of `[tokens, DIM]`.
struct StoredPart {
    plan: PlanPart,
    rows: [[Vec<f64>; KV_HEADS]; 2],
}

/// A codec, calibrated where it needs it.
pub fn make_codec(text: &str, rope_pairing: RopePairing) -> ModelCodec {
    make_codec_of(text, geometry(rope_pairing, DType::F32))
}

fn make_codec_of(text: &str, geometry: Geometry) -> ModelCodec {
    let spec = kvd_codec::resolve_spec(text).unwrap();
    let calibration = fit_small_calibration(&geometry, &spec);
    ModelCodec::new(geometry, spec, calibration.as_ref()).unwrap()
}

/// Rows as they are stored in a type, and those bytes.
fn narrow_rows(dtype: DType, values: &[f32]) -> (Vec<f32>, Bytes) {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    dtype.narrow_values(values, &mut bytes);
    let mut rows = vec![0.0; values.len()];
    dtype.widen_values(&bytes, &mut rows);
    (rows, bytes.into())
}

/// Keys and values of a block.
fn rows_of(index: u64, tokens: u32, dtype: DType) -> [(Vec<f32>, Bytes); 2] {
    let count = tokens as usize * KV_HEADS * DIM;
    [100, 200].map(|seed| narrow_rows(dtype, &make_values(seed + index, count)))
}

/// Stores both blocks; `None` when the backend does not serve the codec.
fn store_blocks(backend: &mut dyn Backend, case: &AttendCase) -> Option<StoredBlocks> {
    let AttendCase { text, dtype, .. } = *case;
    let mut codec = make_codec_of(text, geometry(case.pairing, dtype));
    backend.supports(&codec).ok()?;
    let geometry = codec.geometry().clone();
    backend.register(MODEL, codec.clone());
    let extent = Extent { offset: 0, len: geometry.raw_layout(BLOCKS[0]).size_bytes() };
    let (capacity_rows, first_row) = (BLOCKS[0], 0);
    let (mut parts, mut first_token) = (Vec::new(), 0);
    let mut offset = extent.len;
    for (index, rows) in (0u64..).zip(BLOCKS) {
        let [(k, k_bytes), (v, v_bytes)] = rows_of(index, rows, dtype);
        let incoming = IncomingRows { tokens: rows, k: k_bytes, v: v_bytes };
        let to = RawTarget { extent, capacity_rows, first_row };
        backend.write(MODEL, &incoming, 0, rows, to).unwrap();
        let (k, v) = (by_head(&k), by_head(&v));
        let block = BlockRows { tokens: rows as usize, k: &k, v: &v };
        // The backend takes its tables, or the prior, by the codes of every block; the reference
        // needs the same.
        codec.watch_tables(LAYER, &[block]).unwrap();
        let source = EncodeSource { extent, capacity_rows, first_row, rows };
        let encoded = backend.encode(MODEL, LAYER, &[source]).unwrap().remove(0).unwrap();
        assert_eq!(encoded.fallback_pages, 0, "{text}");
        // The backend's pages are those of the reference encoder, wherever they lie.
        let mut bytes = Vec::new();
        let wanted = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        assert_eq!(*encoded.page_ends, *wanted.page_ends, "{text}");
        assert_eq!(encoded.packed.parts, wanted.parts, "{text}");
        assert!(encoded.held.is_some() || encoded.bytes == bytes, "{text}");
        let slot = Extent { offset, len: encoded.size_bytes() };
        offset += slot.len.next_multiple_of(64);
        backend.move_pages(&encoded, slot);
        let ends = encoded.page_ends.clone();
        let rows_of_pages = decode_pages(&codec, &bytes, &ends);
        let source = Source::Pages { extent: slot, ends, first_row: 0 };
        parts
            .push(StoredPart { plan: PlanPart { first_token, rows, source }, rows: rows_of_pages });
        first_token += rows;
    }
    if case.ragged {
        parts[0].begin_inside();
        parts.push(write_window(backend, first_token, offset, &geometry));
    }
    Some(StoredBlocks { parts })
}

/// Raw rows behind the pages, fewer than their slot has room for.
fn write_window(
    backend: &mut dyn Backend,
    first_token: u32,
    offset: u64,
    geometry: &Geometry,
) -> StoredPart {
    let (rows, capacity_rows, first_row) = (9, 13, 2);
    let extent = Extent { offset, len: geometry.raw_layout(capacity_rows).size_bytes() };
    let [(k, k_bytes), (v, v_bytes)] = rows_of(BLOCKS.len() as u64, rows, geometry.dtype);
    let incoming = IncomingRows { tokens: rows, k: k_bytes, v: v_bytes };
    let to = RawTarget { extent, capacity_rows, first_row };
    backend.write(MODEL, &incoming, 0, rows, to).unwrap();
    let source = Source::Raw { extent, capacity_rows, first_row };
    let head = |rows: &[f32], head: usize| {
        let each = rows.len() / KV_HEADS;
        by_head(rows)[head * each..][..each].iter().map(|x| f64::from(*x)).collect()
    };
    let rows_of_window = [k, v].map(|rows| [0, 1].map(|index| head(&rows, index)));
    StoredPart { plan: PlanPart { first_token, rows, source }, rows: rows_of_window }
}

impl StoredPart {
    /// Leaves out what is in front of a token inside the page's first tile, and what is behind one
    /// of its second.
    fn begin_inside(&mut self) {
        let (skipped, rows) = (5, 41);
        let Source::Pages { first_row, .. } = &mut self.plan.source else { return };
        *first_row += skipped;
        self.plan.first_token += skipped;
        self.plan.rows = rows;
        for rows_of_head in self.rows.iter_mut().flatten() {
            *rows_of_head = rows_of_head[skipped as usize * DIM..][..rows as usize * DIM].to_vec();
        }
    }
}

/// From `[tokens, heads, dim]` to `[heads, tokens, dim]`.
fn by_head(rows: &[f32]) -> Vec<f32> {
    let of = |head| rows.chunks(DIM).skip(head).step_by(KV_HEADS).flatten().copied();
    (0..KV_HEADS).flat_map(of).collect()
}

/// Rows as pages decode, `[side][head]` of `[tokens, DIM]`.
fn decode_pages(codec: &ModelCodec, bytes: &[u8], ends: &[u32]) -> [[Vec<f64>; KV_HEADS]; 2] {
    let of_page = |side: Side, head: usize| {
        let index = side.index() * KV_HEADS + head;
        let start = if index == 0 { 0 } else { ends[index - 1] as usize };
        let page = &bytes[start..ends[index] as usize];
        let reader = PageReader::open_page(codec, LAYER, side, head, page).unwrap();
        let mut rows = vec![0f32; reader.tokens() * DIM];
        reader.decode_rows(0, reader.tokens(), &mut rows).unwrap();
        for row in rows.chunks_exact_mut(DIM) {
            if reader.space() == RowSpace::Coefficient {
                let coefficients = row.to_vec();
                codec.head_codec(LAYER, side, head).invert_row(&coefficients, row);
            }
        }
        rows.into_iter().map(f64::from).collect()
    };
    Side::BOTH.map(|side| [0, 1].map(|head| of_page(side, head)))
}

impl StoredBlocks {
    /// Positions, and rows of a head, of all tokens in `visible`.
    fn seen_rows(&self, head: usize, visible: &std::ops::Range<u32>) -> [Vec<f64>; 2] {
        let mut seen = [Vec::new(), Vec::new()];
        for part in &self.parts {
            for (index, position) in
                (part.plan.first_token..).take(part.plan.rows as usize).enumerate()
            {
                if visible.contains(&position) {
                    for (seen, rows) in seen.iter_mut().zip(&part.rows) {
                        seen.extend(&rows[head][index * DIM..][..DIM]);
                    }
                }
            }
        }
        seen
    }
}

/// Attention of one query row over the rows that it sees: the output and the log-sum-exp.
fn attend_row(q: &[f32], seen: &[Vec<f64>; 2], soft_cap: Option<f32>) -> (Vec<f64>, f64) {
    let [k, v] = seen;
    let score = |row: &[f64]| -> f64 {
        let score = row.iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>();
        let score = score / (DIM as f64).sqrt();
        soft_cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
    };
    let scores: Vec<f64> = k.chunks_exact(DIM).map(score).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0f64; DIM];
    for (weight, row) in weights.iter().zip(v.chunks_exact(DIM)) {
        for (out, v) in out.iter_mut().zip(row) {
            *out += weight / sum * v;
        }
    }
    (out, most + sum.ln())
}

/// A plan of so many queries of three tokens each, that see all of `parts`.
pub fn attend_plan(parts: Vec<PlanPart>, queries: usize) -> AttendPlan {
    let tokens: u32 = parts.iter().map(|part| part.rows).sum();
    let query = PlanQuery {
        n_q: QUERIES as u32,
        position: tokens - QUERIES as u32,
        sliding_window: None,
        parts: parts.into(),
    };
    AttendPlan {
        model: MODEL,
        layer: LAYER,
        q_heads: Q_HEADS as u32,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![query; queries],
        q: to_bytes(&make_values(5, queries * QUERIES * Q_HEADS * DIM)),
    }
}

/// The largest error of a codec by [`measure_codec_errors`]: f32 sums of products whose roundings
/// are below 1e-7 each, and of levels that two bytes hold steps of `2^-16` of the largest, with
/// which 2.2e-5 was the most that emulated kernels erred (`polar-4+4`).
pub fn largest_error(text: &str) -> f64 {
    let two_bytes = ["polar", "turbo", "lloyd", "bitalloc", "kvd-2-fast"];
    if two_bytes.iter().any(|side| text.contains(side)) { 4e-5 } else { 1e-5 }
}

/// Largest error of an output in units of the values' root mean square, and of a log-sum-exp;
/// `None` when the backend does not serve the codec.
pub fn measure_codec_errors(
    backend: &mut dyn Backend,
    text: &'static str,
    pairing: RopePairing,
) -> Option<(f64, f64)> {
    measure_errors(backend, &AttendCase::new(text, pairing))
}

/// As [`measure_codec_errors`], for any question; an answer in few bits may be off by half of
/// their last one besides.
pub fn measure_errors(backend: &mut dyn Backend, case: &AttendCase) -> Option<(f64, f64)> {
    let stored = store_blocks(backend, case)?;
    let (plan, q) = case.attend_plan(&stored);
    let attended = backend.attend(&plan).unwrap();
    backend.unregister(MODEL);
    let mut out = vec![0f32; q.len()];
    case.dtype.widen_values(&attended.out, &mut out);
    let rounding = match case.dtype {
        DType::F32 => 0.0,
        DType::F16 => 1.0 / 2048.0,
        DType::BF16 => 1.0 / 256.0,
    };
    let (mut off, mut lse_off) = (0f64, 0f64);
    for head in 0..Q_HEADS {
        let kv_head = head / (Q_HEADS / KV_HEADS);
        let v = &stored.seen_rows(kv_head, &(0..u32::MAX))[1];
        let rms = (v.iter().map(|x| x * x).sum::<f64>() / v.len() as f64).sqrt();
        for index in 0..case.n_q as usize {
            let row = index * Q_HEADS + head;
            let seen = stored.seen_rows(kv_head, &plan.queries[0].visible(index as u32));
            let (want, lse) = attend_row(&q[row * DIM..][..DIM], &seen, case.soft_cap);
            for (got, want) in out[row * DIM..][..DIM].iter().zip(&want) {
                let error = (f64::from(*got) - want).abs() - rounding * want.abs();
                off = off.max(error / rms);
            }
            lse_off = lse_off.max((f64::from(attended.lse[row]) - lse).abs());
        }
    }
    Some((off, lse_off))
}

/// Asks one backend of every codec, as both pairings have it, and for what a plain question leaves
/// out, until `end`; how many answers were within their bounds, and how many there are in all.
pub fn count_agreeing(backend: &mut dyn Backend, end: Option<Instant>) -> (usize, usize) {
    // What has kernels of different kinds comes first.
    let first = ["kvd-2", "kivi-4", "vecinfer-2", "kvd-2-fast", "raw", "kvcomp", "vq-residual-4"];
    let others = list_codecs().filter(|text| !first.contains(text));
    let codecs: Vec<_> = first.into_iter().chain(others).collect();
    let plain = |pairing| codecs.iter().map(move |text| AttendCase::new(text, pairing));
    let asks = plain(RopePairing::Half).chain(list_cases());
    let asks: Vec<AttendCase> = asks.chain(plain(RopePairing::Interleaved)).collect();
    let mut agreed = 0;
    for case in &asks {
        let answer = measure_errors(backend, case);
        let (off, lse) = answer.unwrap_or_else(|| panic!("{case:?} is not served"));
        let most = largest_error(case.text);
        assert!(off < most && lse < most, "{case:?}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        agreed += 1;
        if end.is_some_and(|end| Instant::now() >= end) {
            break;
        }
    }
    (agreed, asks.len())
}

/// Sides that no preset has.
pub const COMPOSED_CODECS: [&str; 4] = [
    "k=rotate/uniform(b=3,g=20,axis=token,mode=sym)/huffman; \
     v=uniform(b=4,axis=channel,mode=hybrid)/huffman",
    "k=polar(a=3,r=2)/huffman; v=rotate(seed=9)/lloyd(b=6)/huffman",
    "k=polar(a=8,r=8,g=5); v=uniform(rel=0.1,axis=block,mode=hybrid)",
    "k=hadamard/lloyd(b=1); v=norm/uniform(b=8,axis=block,mode=sym)",
];

/// Every preset, and [`COMPOSED_CODECS`].
pub fn list_codecs() -> impl Iterator<Item = &'static str> {
    kvd_codec::presets().iter().map(|preset| preset.name).chain(COMPOSED_CODECS)
}
