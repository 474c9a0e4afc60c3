//! The CPU backend on its cold paths: copies, loads and blocks that cannot be encoded.

use super::*;
use bytes::Bytes;
use kvd_core::{Coded, DType, ErrorCode, Geometry, RopePairing, Side};
use std::sync::Arc;

const MODEL: ModelId = ModelId(1);
const LAYER: LayerIndex = LayerIndex(0);
const TOKENS: u32 = 8;

fn geometry() -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 1,
        head_dim_k: 8,
        head_dim_v: 8,
        block_tokens: TOKENS,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

fn backend(codec: &str) -> CpuBackend {
    let options = CpuOptions { arena_bytes: 1 << 16, prefault: false, threads: 1 };
    let mut backend = CpuBackend::new(options).unwrap();
    let spec = kvd_codec::resolve_spec(codec).unwrap();
    backend.register(MODEL, ModelCodec::new(geometry(), spec, None).unwrap());
    backend
}

#[test]
fn more_threads_than_the_maximum_are_refused_before_any_is_started() {
    let threads = CpuOptions::THREADS_MAX + 1;
    let options = CpuOptions { arena_bytes: 1 << 16, prefault: false, threads };
    let on_start = |thread| panic!("thread {thread} was started");
    let error = CpuBackend::starting(options, on_start).err().unwrap();
    assert!(matches!(error, OpenError::TooManyThreads { max: 1024, .. }), "{error}");
    assert!(error.to_string().contains("device.threads"), "{error}");
}

/// The raw slot of that number.
fn slot(number: u64) -> RawTarget {
    let len = geometry().raw_layout(TOKENS).size_bytes();
    RawTarget { extent: Extent { offset: number * len, len }, capacity_rows: TOKENS, first_row: 0 }
}

/// Fills a slot with values from `value(i)`, K and V alike.
fn fill(backend: &mut CpuBackend, number: u64, value: impl Fn(usize) -> f32) -> EncodeSource {
    let values: Vec<f32> = (0..TOKENS as usize * 8).map(value).collect();
    let mut bytes = vec![0; values.len() * 2];
    DType::F16.narrow_values(&values, &mut bytes);
    let bytes = Bytes::from(bytes);
    let rows = IncomingRows { tokens: TOKENS, k: bytes.clone(), v: bytes };
    backend.write(MODEL, &rows, 0, TOKENS, slot(number)).unwrap();
    let RawTarget { extent, capacity_rows, first_row } = slot(number);
    EncodeSource { extent, capacity_rows, first_row, rows: TOKENS }
}

/// Puts pages at the end of the arena.
fn place(backend: &mut CpuBackend, pages: &EncodedPages) -> Source {
    let extent = Extent { offset: 1 << 15, len: pages.bytes.len() as u64 };
    backend.move_pages(pages, extent);
    Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 }
}

fn load(backend: &mut CpuBackend, source: Source) -> Result<LoadedRows, BackendError> {
    let parts = vec![crate::PlanPart { first_token: 0, rows: TOKENS, source }];
    backend.load(&LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F16, parts })
}

#[test]
fn one_bad_block_does_not_keep_others_from_being_encoded() {
    for codec in ["fp8", "kvcomp"] {
        let mut backend = backend(codec);
        let good = fill(&mut backend, 0, |i| i as f32);
        let bad = fill(&mut backend, 1, |i| if i == 9 { f32::INFINITY } else { 1.0 });
        let encoded = backend.encode(MODEL, LAYER, &[bad, good, bad]).unwrap();
        let outcome: Vec<_> = encoded.iter().map(Result::is_ok).collect();
        assert_eq!(outcome, [false, true, false], "{codec}");
        assert_eq!(encoded[0].as_ref().unwrap_err().code(), ErrorCode::NonFinite);
        // Nor from their tables, later.
        assert!(backend.encode(MODEL, LAYER, &[good]).unwrap()[0].is_ok());
    }
    let mut backend = backend("fp8");
    assert!(backend.encode(ModelId(9), LAYER, &[]).is_err());
}

#[test]
fn load_and_copy_find_a_flipped_bit_that_decoding_would_not() {
    let mut backend = backend("fp8");
    let block = fill(&mut backend, 0, |i| i as f32);
    let pages = backend.encode(MODEL, LAYER, &[block]).unwrap().remove(0).unwrap();
    let source = place(&mut backend, &pages);
    load(&mut backend, source.clone()).unwrap();
    // A code in the middle of the last page.
    let at = Extent { offset: (1 << 15) + pages.bytes.len() as u64 - 20, len: 1 };
    backend.arena.extent_bytes_mut(at)[0] ^= 1;
    let error = load(&mut backend, source.clone()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptPage, "{error}");
    let error = backend.copy(MODEL, LAYER, &source, TOKENS, slot(1)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptPage, "{error}");
}

#[test]
fn what_decodes_past_the_stored_precision_becomes_its_largest_value() {
    // Two levels whose step is rounded up decode to a top level over f16's range.
    let mut backend = backend("k=uniform(b=1,g=8,axis=channel); v=uniform(b=1,g=8,axis=channel)");
    let block = fill(&mut backend, 0, |i| if i < 8 { 31.0 } else { 65504.0 });
    let pages = backend.encode(MODEL, LAYER, &[block]).unwrap().remove(0).unwrap();
    assert_eq!(pages.fallback_pages, 0);
    let source = place(&mut backend, &pages);
    let largest = DType::F16.largest_finite();
    let rows = load(&mut backend, source.clone()).unwrap();
    let mut values = vec![0f32; TOKENS as usize * 8];
    DType::F16.widen_values(&rows.k, &mut values);
    assert!(values.iter().all(|value| value.is_finite()), "{values:?}");
    assert_eq!(values[63], largest);
    backend.copy(MODEL, LAYER, &source, TOKENS, slot(1)).unwrap();
    let RawTarget { extent, capacity_rows, first_row } = slot(1);
    let copied = EncodeSource { extent, capacity_rows, first_row, rows: TOKENS };
    let mut values = Vec::new();
    raw_slots::read_block(&backend.arena, &geometry(), copied, Side::Value, &mut values);
    assert_eq!(values[63], largest);
}

#[test]
fn queries_of_the_same_range_share_its_parts() {
    let mut backend = backend("raw");
    fill(&mut backend, 0, |i| (i % 8) as f32);
    let RawTarget { extent, capacity_rows, first_row } = slot(0);
    let source = Source::Raw { extent, capacity_rows, first_row };
    let parts: Arc<[_]> = vec![crate::PlanPart { first_token: 0, rows: TOKENS, source }].into();
    let query = |parts: &Arc<[_]>| crate::PlanQuery {
        n_q: 1,
        position: TOKENS - 1,
        sliding_window: None,
        parts: parts.clone(),
    };
    let plan = AttendPlan {
        model: MODEL,
        layer: LAYER,
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![query(&parts), query(&parts)],
        q: Bytes::from(vec![0; 2 * 8 * 4]),
    };
    let answer = backend.attend(&plan).unwrap();
    assert_eq!(answer.out[..8 * 4], answer.out[8 * 4..]);
    assert_eq!(answer.lse, [8f32.ln(); 2]);
}

#[test]
fn a_limit_holds_what_encodes_too_until_another_one() {
    let mut backend = backend("kivi-4");
    let held = |backend: &CpuBackend| {
        let of_thread = |_: rayon::BroadcastContext<'_>| {
            let width = kvd_codec::limit_width(None);
            kvd_codec::limit_width(width);
            width
        };
        backend.threads.broadcast(of_thread)
    };
    assert_eq!(held(&backend), [None]);
    for simd in Simd::available_levels() {
        backend.limit(simd.level()).unwrap();
        assert_eq!(backend.instruction_set(), simd.level());
        assert_eq!(held(&backend), [Some(simd.width())]);
    }
    let absent = InstructionSet::ALL.into_iter().find(|set| Simd::of_set(*set).is_none()).unwrap();
    let (level, width) = (backend.instruction_set(), held(&backend));
    let error = backend.limit(absent).unwrap_err();
    assert!(matches!(error, OpenError::InstructionSet(name) if name == absent.name()), "{error}");
    assert_eq!((backend.instruction_set(), held(&backend)), (level, width));
}
