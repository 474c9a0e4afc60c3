//! Conformance of a backend: attention over pages of every preset, and of sides that no preset has,
//! against plain f64 attention over the rows that those pages decode to.
#![allow(clippy::unwrap_used, dead_code, reason = "a test may fail, and uses its own part")]

pub(crate) mod region;

use bytes::Bytes;
use kvd_codec::{BlockRows, Calibration, CodecSpec, ModelCodec, PageReader, Samples, Space, fit};
use kvd_compute::{
    AttendPlan, Backend, EncodeSource, IncomingRows, PlanPart, PlanQuery, RawTarget, Source,
};
use kvd_core::{DType, Extent, Geometry, LayerIndex, ModelId, RopePairing, Side};

const MODEL: ModelId = ModelId(1);
const LAYER: LayerIndex = LayerIndex(0);
const KV_HEADS: usize = 2;
const Q_HEADS: usize = 4;
const DIM: usize = 64;
/// Tokens of the blocks: a full one and one that ends inside a tile and a stream.
const BLOCKS: [u32; 2] = [64, 21];
const QUERIES: usize = 3;

fn geometry(rope_pairing: RopePairing) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: KV_HEADS as u32,
        head_dim_k: DIM as u32,
        head_dim_v: DIM as u32,
        block_tokens: BLOCKS[0],
        dtype: DType::F32,
        rope_pairing,
    }
}

/// Deterministic values, roughly normal, with one wide channel.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let gain = |i: usize| if i % DIM == 5 { 4.0 } else { 1.0 };
    (0..count).map(|i| (draw() + draw() + draw()) * gain(i)).collect()
}

fn bytes(values: &[f32]) -> Bytes {
    values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into()
}

fn calibrate(geometry: &Geometry, spec: &CodecSpec) -> Option<Calibration> {
    if !spec.needs_calibration() {
        return None;
    }
    // A sub-vector for every entry of the largest codebook among the presets.
    let count = if spec.to_string().contains("vq(") { 512 } else { 200 };
    let mut samples = Samples::new(geometry);
    for head in 0..KV_HEADS {
        samples.push_queries(LAYER, head, &values(7, 200 * DIM)).unwrap();
        for side in Side::BOTH {
            samples.push(LAYER, side, head, &values(11 + head as u64, count * DIM)).unwrap();
        }
    }
    Some(fit(geometry, spec, &samples, 1, &mut |_| {}).unwrap())
}

/// A backend that holds the pages of both blocks, and what reads them for the reference.
struct Stored {
    backend: Box<dyn Backend>,
    codec: ModelCodec,
    parts: Vec<PlanPart>,
    /// Bytes and page ends of each block.
    pages: Vec<(Vec<u8>, Vec<u32>)>,
}

/// A codec, calibrated where it needs it.
pub(crate) fn codec(text: &str, rope_pairing: RopePairing) -> ModelCodec {
    let geometry = geometry(rope_pairing);
    let spec = kvd_codec::resolve(text).unwrap();
    let calibration = calibrate(&geometry, &spec);
    ModelCodec::new(geometry, spec, calibration.as_ref()).unwrap()
}

/// Stores both blocks; `None` when the backend does not serve the codec.
fn store(mut backend: Box<dyn Backend>, text: &str, rope_pairing: RopePairing) -> Option<Stored> {
    let mut codec = codec(text, rope_pairing);
    backend.supports(&codec).ok()?;
    let geometry = codec.geometry().clone();
    backend.register(MODEL, codec.clone());
    let extent = Extent { offset: 0, len: geometry.raw_layout(BLOCKS[0]).size_bytes() };
    let (capacity_rows, first_row) = (BLOCKS[0], 0);
    let (mut parts, mut pages, mut first_token) = (Vec::new(), Vec::new(), 0);
    let mut offset = extent.len;
    for (index, rows) in (0u64..).zip(BLOCKS) {
        let count = rows as usize * KV_HEADS * DIM;
        let (k, v) = (values(100 + index, count), values(200 + index, count));
        let incoming = IncomingRows { tokens: rows, k: bytes(&k), v: bytes(&v) };
        let to = RawTarget { extent, capacity_rows, first_row };
        backend.write(MODEL, &incoming, 0, rows, to).unwrap();
        if codec.needs_tables(LAYER) {
            // The backend makes its tables from the first block; the reference needs the same.
            let (k, v) = (by_head(&k), by_head(&v));
            let block = BlockRows { tokens: rows as usize, k: &k, v: &v };
            codec.train_tables(LAYER, &[block]).unwrap();
        }
        let source = EncodeSource { extent, capacity_rows, first_row, rows };
        let encoded = backend.encode(MODEL, LAYER, &[source]).unwrap().remove(0).unwrap();
        assert_eq!(encoded.fallback_pages, 0, "{text}");
        // The backend's pages are those of the reference encoder, wherever they lie.
        let (k, v) = (by_head(&k), by_head(&v));
        let block = BlockRows { tokens: rows as usize, k: &k, v: &v };
        let mut bytes = Vec::new();
        let wanted = codec.encode_block(LAYER, &block, &mut bytes).unwrap();
        assert_eq!(*encoded.page_ends, *wanted.page_ends, "{text}");
        assert_eq!(encoded.parts, wanted.parts, "{text}");
        assert!(encoded.held.is_some() || encoded.bytes == bytes, "{text}");
        let slot = Extent { offset, len: encoded.size_bytes() };
        offset += slot.len.next_multiple_of(64);
        backend.place(&encoded, slot);
        let ends = encoded.page_ends.clone();
        let source = Source::Pages { extent: slot, ends, first_row: 0 };
        parts.push(PlanPart { first_token, rows, source });
        pages.push((bytes, encoded.page_ends.to_vec()));
        first_token += rows;
    }
    Some(Stored { backend, codec, parts, pages })
}

/// From `[tokens, heads, dim]` to `[heads, tokens, dim]`.
fn by_head(rows: &[f32]) -> Vec<f32> {
    let of = |head| rows.chunks(DIM).skip(head).step_by(KV_HEADS).flatten().copied();
    (0..KV_HEADS).flat_map(of).collect()
}

impl Stored {
    /// Rows of both blocks as their pages decode, `[tokens, DIM]` of one head and side.
    fn decoded(&self, side: Side, head: usize) -> Vec<f64> {
        let mut all = Vec::new();
        for (bytes, ends) in &self.pages {
            let index = side.index() * KV_HEADS + head;
            let start = if index == 0 { 0 } else { ends[index - 1] as usize };
            let page = &bytes[start..ends[index] as usize];
            let reader = PageReader::open(&self.codec, LAYER, side, head, page).unwrap();
            let mut rows = vec![0f32; reader.tokens() * DIM];
            reader.decode_rows(0, reader.tokens(), &mut rows).unwrap();
            for row in rows.chunks_exact_mut(DIM) {
                if reader.space() == Space::Coefficient {
                    let coefficients = row.to_vec();
                    self.codec.head(LAYER, side, head).inverse(&coefficients, row);
                }
                all.extend(row.iter().map(|x| f64::from(*x)));
            }
        }
        all
    }
}

/// Attention of one query row that sees `seen` tokens: the output and the log-sum-exp.
fn reference(q: &[f32], k: &[f64], v: &[f64], seen: usize) -> (Vec<f64>, f64) {
    let score = |row: &[f64]| -> f64 {
        row.iter().zip(q).map(|(k, q)| k * f64::from(*q)).sum::<f64>() / (DIM as f64).sqrt()
    };
    let scores: Vec<f64> = k.chunks_exact(DIM).take(seen).map(score).collect();
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
pub(crate) fn attend_plan(parts: Vec<PlanPart>, queries: usize) -> AttendPlan {
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
        q: bytes(&values(5, queries * QUERIES * Q_HEADS * DIM)),
    }
}

/// The largest that [`errors`] may be of a codec: f32 sums of products whose roundings are below
/// 1e-7 each, and of levels that two bytes hold steps of `2^-16` of the largest, with which 2.2e-5
/// was the most that emulated kernels erred (`polar-4+4`).
pub(crate) fn largest_error(text: &str) -> f64 {
    let two_bytes = ["polar", "turbo", "lloyd", "bitalloc", "kvd-2-fast"];
    if two_bytes.iter().any(|side| text.contains(side)) { 4e-5 } else { 1e-5 }
}

/// Largest error of an output in units of the values' root mean square, and of a log-sum-exp;
/// `None` when the backend does not serve the codec.
pub(crate) fn errors(
    backend: Box<dyn Backend>,
    text: &str,
    rope_pairing: RopePairing,
) -> Option<(f64, f64)> {
    let mut stored = store(backend, text, rope_pairing)?;
    let plan = attend_plan(stored.parts.clone(), 1);
    let q = values(5, QUERIES * Q_HEADS * DIM);
    let position = plan.queries[0].position;
    let attended = stored.backend.attend(&plan).unwrap();
    let mut out = vec![0f32; QUERIES * Q_HEADS * DIM];
    DType::F32.widen(&attended.out, &mut out);
    let (mut off, mut lse_off) = (0f64, 0f64);
    for head in 0..Q_HEADS {
        let kv_head = head / (Q_HEADS / KV_HEADS);
        let [k, v] = Side::BOTH.map(|side| stored.decoded(side, kv_head));
        let rms = (v.iter().map(|x| x * x).sum::<f64>() / v.len() as f64).sqrt();
        for index in 0..QUERIES {
            let row = index * Q_HEADS + head;
            let seen = position as usize + index + 1;
            let (want, lse) = reference(&q[row * DIM..][..DIM], &k, &v, seen);
            for (got, want) in out[row * DIM..][..DIM].iter().zip(&want) {
                off = off.max((f64::from(*got) - want).abs() / rms);
            }
            lse_off = lse_off.max((f64::from(attended.lse[row]) - lse).abs());
        }
    }
    Some((off, lse_off))
}

/// Every preset, and sides that no preset has.
pub(crate) fn codecs() -> impl Iterator<Item = &'static str> {
    let composed = [
        "k=rotate/uniform(b=3,g=20,axis=token,mode=sym)/huffman; \
         v=uniform(b=4,axis=channel,mode=hybrid)/huffman",
        "k=polar(a=3,r=2)/huffman; v=rotate(seed=9)/lloyd(b=6)/huffman",
        "k=polar(a=8,r=8,g=5); v=uniform(rel=0.1,axis=block,mode=hybrid)",
        "k=hadamard/lloyd(b=1); v=norm/uniform(b=8,axis=block,mode=sym)",
    ];
    kvd_codec::presets().iter().map(|preset| preset.name).chain(composed)
}
