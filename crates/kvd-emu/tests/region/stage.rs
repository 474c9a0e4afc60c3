//! Stores from a worker's memory by the backend: the same rows and pages as by the host, what comes
//! to the host of them, what is refused, and faults.

use super::*;
use kvd_compute::{
    BackendError, EncodeSource, EncodedPages, LoadPlan, PlannedWrite, RegionRows, StagedRows,
    content_hash,
};
use kvd_cuda::{RowsUnit, StageCheck};

pub(super) const MODEL: ModelId = ModelId(1);
pub(super) const LAYER: LayerIndex = LayerIndex(0);
pub(super) const BLOCK: u32 = 16;

/// KV heads, channels of keys and of values.
pub(super) type Shape = (u32, u32, u32);

pub(super) fn shaped((kv_heads, head_dim_k, head_dim_v): Shape, dtype: DType) -> Geometry {
    Geometry {
        layers: 1,
        kv_heads,
        head_dim_k,
        head_dim_v,
        block_tokens: BLOCK,
        dtype,
        rope_pairing: RopePairing::Half,
    }
}

/// A model of such rows; a backend and its region.
pub(super) fn registered(
    text: &str,
    geometry: &Geometry,
    (order, pace): (ThreadOrder, Pace),
) -> Fixture {
    let mut fixture = open(order, pace, OPTIONS);
    let spec = kvd_codec::resolve_spec(text).unwrap();
    let codec = kvd_codec::ModelCodec::new(geometry.clone(), spec, None).unwrap();
    fixture.backend.backend.register(MODEL, codec);
    fixture
}

/// Rows of so many tokens.
pub(super) fn incoming(geometry: &Geometry, tokens: u32, seed: f32) -> IncomingRows {
    let bytes = |dim: u32, step: f32| -> bytes::Bytes {
        let values = (0..tokens * geometry.kv_heads * dim).map(|i| (i as f32 * step + seed).sin());
        let values: Vec<f32> = values.collect();
        let mut bytes = vec![0; values.len() * geometry.dtype.size_bytes()];
        geometry.dtype.narrow_values(&values, &mut bytes);
        bytes.into()
    };
    let (k, v) = (bytes(geometry.head_dim_k, 0.37), bytes(geometry.head_dim_v, 0.73));
    IncomingRows { tokens, k, v }
}

/// Where an append of `tokens` goes whose first block has `begun` rows already: one slot per block.
pub(super) fn writes(geometry: &Geometry, begun: u32, tokens: u32) -> Vec<PlannedWrite> {
    let len = geometry.raw_layout(BLOCK).size_bytes();
    let mut writes = Vec::new();
    let (mut source_row, mut first_row) = (0, begun);
    while source_row < tokens {
        let rows = (BLOCK - first_row).min(tokens - source_row);
        let extent = Extent { offset: 4096 + writes.len() as u64 * len.next_multiple_of(64), len };
        let to = RawTarget { extent, capacity_rows: BLOCK, first_row };
        writes.push(PlannedWrite { source_row, rows, to });
        (source_row, first_row) = (source_row + rows, 0);
    }
    writes
}

/// The bytes in the slots of `writes`, as they are stored.
pub(super) fn stored(
    backend: &mut CudaBackend,
    writes: &[PlannedWrite],
    dtype: DType,
) -> [Vec<u8>; 2] {
    let part = |write: &PlannedWrite| {
        let RawTarget { extent, capacity_rows, first_row } = write.to;
        let source = Source::Raw { extent, capacity_rows, first_row };
        PlanPart { first_token: write.source_row, rows: write.rows, source }
    };
    let parts = writes.iter().map(part).collect();
    let rows = backend.load(&LoadPlan { model: MODEL, layer: LAYER, dtype, parts }).unwrap();
    [rows.k, rows.v]
}

/// Encodes the blocks that are full, and what their pages decode to.
fn pages(backend: &mut CudaBackend, writes: &[PlannedWrite]) -> (Vec<Vec<u32>>, Vec<u8>) {
    let whole = writes.iter().filter(|write| write.to.first_row + write.rows == BLOCK);
    let sources: Vec<_> = whole
        .map(|PlannedWrite { to: RawTarget { extent, capacity_rows, .. }, .. }| EncodeSource {
            extent: *extent,
            capacity_rows: *capacity_rows,
            first_row: 0,
            rows: BLOCK,
        })
        .collect();
    let encoded = backend.encode(MODEL, LAYER, &sources).unwrap();
    let encoded: Vec<EncodedPages> = encoded.into_iter().map(Result::unwrap).collect();
    let (mut at, mut parts) = (1 << 19, Vec::new());
    for pages in &encoded {
        let extent = Extent { offset: at, len: pages.size_bytes() };
        at += extent.len.next_multiple_of(64);
        backend.move_pages(pages, extent);
        let source = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
        parts.push(PlanPart { first_token: 0, rows: BLOCK, source });
    }
    let plan = LoadPlan { model: MODEL, layer: LAYER, dtype: DType::F32, parts };
    let rows = backend.load(&plan).unwrap();
    (encoded.iter().map(|pages| pages.page_ends.to_vec()).collect(), [rows.k, rows.v].concat())
}

pub(super) fn stage(fixture: &mut Fixture, rows: &IncomingRows) -> (RegionRows, StagedRows) {
    let (places, _) = fixture.backend.leave_rows(rows, 0..rows.tokens).unwrap();
    let staged = fixture.backend.backend.stage_rows(MODEL, &places).unwrap();
    (places, staged.expect("room for them"))
}

#[test]
fn a_store_from_a_region_leaves_the_rows_and_pages_of_one_from_the_host() {
    if !is_available() {
        return;
    }
    let shapes = [(2, 64, 64), (1, 128, 128), (3, 96, 64), (2, 2, 6), (4, 80, 80)];
    let mut paces = Pace::EACH.into_iter().cycle();
    let mut orders = ThreadOrder::EACH.into_iter().chain([ThreadOrder::Random(7)]).cycle();
    for (shape, text) in shapes.into_iter().zip([
        "kivi-4",
        "raw",
        "kvcomp",
        "raw",
        "k=uniform(b=4,axis=token); v=fp8",
    ]) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Within a block, over its end, over several, all of them and one.
            for (begun, tokens) in [(0, 1), (5, 11), (13, 4), (7, 38), (0, 32), (15, 1)] {
                let geometry = shaped(shape, dtype);
                let how = (orders.next().unwrap(), paces.next().unwrap());
                let mut fixture = registered(text, &geometry, how);
                let (rows, writes) =
                    (incoming(&geometry, tokens, 0.2), writes(&geometry, begun, tokens));
                if rows.k.len() + rows.v.len() > REGION_BYTES - 4096 {
                    continue;
                }
                let (_, staged) = stage(&mut fixture, &rows);
                assert_eq!(staged.content_hash, content_hash(&rows.k, &rows.v));
                let backend = &mut fixture.backend.backend;
                // A block that was begun has rows already.
                let before = incoming(&geometry, BLOCK, 9.0);
                if begun > 0 {
                    let to = RawTarget { first_row: 0, ..writes[0].to };
                    backend.write(MODEL, &before, 0, begun, to).unwrap();
                }
                backend.write_staged(&staged, &writes).unwrap();
                let context = format!("{text}, {shape:?}, {dtype}, {begun}+{tokens}, {how:?}");
                assert_eq!(
                    stored(backend, &writes, dtype),
                    [rows.k.to_vec(), rows.v.to_vec()],
                    "{context}"
                );
                let in_place = pages(backend, &writes);
                let mut by_host = registered(text, &geometry, how);
                let host = &mut by_host.backend.backend;
                if begun > 0 {
                    let to = RawTarget { first_row: 0, ..writes[0].to };
                    host.write(MODEL, &before, 0, begun, to).unwrap();
                }
                for PlannedWrite { source_row, rows: count, to } in writes.iter().copied() {
                    host.write(MODEL, &rows, source_row, count, to).unwrap();
                }
                assert_eq!(pages(host, &writes), in_place, "{context}");
            }
        }
    }
}

#[test]
fn a_check_of_each_thread_block_is_all_that_a_store_brings_to_the_host() {
    if !is_available() {
        return;
    }
    let geometry = shaped((2, 64, 64), DType::F16);
    let mut fixture = registered("raw", &geometry, (ThreadOrder::Ascending, Pace::Late));
    let (rows, writes) = (incoming(&geometry, 70, 0.5), writes(&geometry, 3, 70));
    let (places, _) = fixture.backend.leave_rows(&rows, 0..70).unwrap();
    let backend = &mut fixture.backend.backend;
    // Earlier copies are still under way.
    backend.read_region(places.region, 0, &mut [0]).unwrap();
    let seen = || {
        let watch = fixture.watch.lock();
        [watch.read_bytes, watch.written_bytes, watch.launches, watch.writes, watch.waits]
    };
    let before = seen();
    let staged = backend.stage_rows(MODEL, &places).unwrap().unwrap();
    backend.write_staged(&staged, &writes).unwrap();
    let passed: Vec<usize> = seen().iter().zip(before).map(|(now, before)| now - before).collect();
    // 2240 words of each side, 1024 of a thread block; two heads of both sides for each write.
    let (checks, units) = (6 * size_of::<StageCheck>(), 4 * writes.len() * size_of::<RowsUnit>());
    assert_eq!(passed, [checks, units, 2, 1, 1]);
    assert_eq!((checks, units), (96, 640));
}

#[test]
fn rows_that_are_no_numbers_are_named_as_the_host_names_them() {
    if !is_available() {
        return;
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let geometry = shaped((3, 96, 64), dtype);
        let each = dtype.size_bytes();
        let mut fixture = registered("raw", &geometry, (ThreadOrder::Random(2), Pace::Late));
        let good = incoming(&geometry, 20, 0.1);
        let worse = |bytes: &bytes::Bytes, index: usize, value: f32| {
            let mut bytes = bytes.to_vec();
            for at in [index, bytes.len() / each - 1] {
                dtype.narrow_values(&[value], &mut bytes[at * each..][..each]);
            }
            bytes.into()
        };
        for rows in [
            IncomingRows { k: worse(&good.k, 1234, f32::NEG_INFINITY), ..good.clone() },
            IncomingRows { v: worse(&good.v, 2345, f32::INFINITY), ..good.clone() },
            IncomingRows {
                k: worse(&good.k, 5000, f32::NAN),
                v: worse(&good.v, 3, f32::NAN),
                ..good.clone()
            },
        ] {
            let (_, staged) = stage(&mut fixture, &rows);
            let by_host = fixture.backend.backend.check(MODEL, &rows).unwrap_err();
            let error = staged.finite.unwrap_err();
            assert_eq!(error.to_string(), by_host.to_string());
            assert_eq!(error.code(), ErrorCode::NonFinite);
        }
        assert!(stage(&mut fixture, &good).1.finite.is_ok());
    }
}

#[test]
fn what_a_worker_writes_after_its_rows_were_staged_changes_nothing() {
    if !is_available() {
        return;
    }
    for pace in Pace::EACH {
        let geometry = shaped((2, 64, 64), DType::F16);
        let mut fixture = registered("raw", &geometry, (ThreadOrder::Descending, pace));
        let (rows, writes) = (incoming(&geometry, 40, 0.3), writes(&geometry, 9, 40));
        let (places, staged) = stage(&mut fixture, &rows);
        let backend = &mut fixture.backend.backend;
        backend.write_region(places.region, places.k, &vec![0xFF; rows.k.len()]).unwrap();
        backend.write_region(places.region, places.v, &vec![0xFF; rows.v.len()]).unwrap();
        // Nor does it matter that the region is gone.
        backend.close_region(places.region);
        backend.write_staged(&staged, &writes).unwrap();
        let wanted = [rows.k.to_vec(), rows.v.to_vec()];
        assert_eq!(stored(backend, &writes, DType::F16), wanted, "{pace:?}");
    }
}

/// Rows of a part, as they are stored.
fn loaded(backend: &mut CudaBackend, source: &Source, rows: u32, dtype: DType) -> [Vec<u8>; 2] {
    let parts = vec![PlanPart { first_token: 0, rows, source: source.clone() }];
    let rows = backend.load(&LoadPlan { model: MODEL, layer: LAYER, dtype, parts }).unwrap();
    [rows.k, rows.v]
}

#[test]
fn a_tail_that_is_copied_after_rows_were_staged_leaves_them_as_they_are() {
    if !is_available() {
        return;
    }
    let (begun, tokens) = (9, 20);
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    for text in ["kivi-4", "kvcomp", "k=uniform(b=4,axis=token); v=fp8"] {
        for (dtype, pace) in [DType::F32, DType::F16, DType::BF16].into_iter().zip(Pace::EACH) {
            for packed in [false, true] {
                let geometry = shaped((2, 64, 64), dtype);
                let how = (orders.next().unwrap(), pace);
                let mut fixture = registered(text, &geometry, how);
                let backend = &mut fixture.backend.backend;
                // The block that was begun, where it cannot be appended to.
                let (old, capacity_rows) = (256 << 10, BLOCK);
                let extent = Extent { offset: old, len: geometry.raw_layout(BLOCK).size_bytes() };
                let before = incoming(&geometry, BLOCK, 9.0);
                let to = RawTarget { extent, capacity_rows, first_row: 0 };
                backend.write(MODEL, &before, 0, BLOCK, to).unwrap();
                let mut source = Source::Raw { extent, capacity_rows, first_row: 0 };
                if packed {
                    let block = EncodeSource { extent, capacity_rows, first_row: 0, rows: BLOCK };
                    let pages = backend.encode(MODEL, LAYER, &[block]).unwrap().remove(0).unwrap();
                    let extent = Extent { offset: 1 << 19, len: pages.size_bytes() };
                    backend.move_pages(&pages, extent);
                    source = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
                }
                let tail = loaded(backend, &source, begun, dtype);
                let (rows, writes) =
                    (incoming(&geometry, tokens, 0.2), writes(&geometry, begun, tokens));
                let (_, staged) = stage(&mut fixture, &rows);
                let backend = &mut fixture.backend.backend;
                let to = RawTarget { first_row: 0, ..writes[0].to };
                backend.copy(MODEL, LAYER, &source, begun, to).unwrap();
                backend.write_staged(&staged, &writes).unwrap();
                let context = format!("{text}, {dtype}, packed {packed}, {how:?}");
                let wanted = [rows.k.to_vec(), rows.v.to_vec()];
                assert_eq!(stored(backend, &writes, dtype), wanted, "{context}");
                let RawTarget { extent, .. } = to;
                let copied = Source::Raw { extent, capacity_rows, first_row: 0 };
                assert_eq!(loaded(backend, &copied, begun, dtype), tail, "{context}");
                assert_eq!(backend.failure(), None, "{context}");
            }
        }
    }
}

pub(super) fn refused<T>(result: Result<T, BackendError>, wanted: ErrorCode) -> String {
    let error = result.err().expect("an error");
    assert_eq!(error.code(), wanted, "{error}");
    error.to_string()
}

#[test]
fn rows_outside_a_region_unaligned_or_of_no_model_are_refused_before_any_launch() {
    if !is_available() {
        return;
    }
    let geometry = shaped((2, 64, 64), DType::F16);
    let mut fixture = registered("raw", &geometry, (ThreadOrder::Ascending, Pace::Late));
    let rows = incoming(&geometry, 8, 0.3);
    let (good, _) = fixture.backend.leave_rows(&rows, 0..8).unwrap();
    let backend = &mut fixture.backend.backend;
    let (size, bytes) = (REGION_BYTES as u64, rows.k.len() as u64);
    for places in [
        RegionRows { k: size - bytes + 2, ..good },
        RegionRows { v: u64::MAX - 1, ..good },
        RegionRows { tokens: u32::MAX, ..good },
    ] {
        let text = refused(backend.stage_rows(MODEL, &places), ErrorCode::InvalidArgument);
        assert!(text.contains("not inside the 65536"), "{text}");
    }
    let odd = RegionRows { v: good.v + 1, ..good };
    let text = refused(backend.stage_rows(MODEL, &odd), ErrorCode::InvalidArgument);
    assert!(text.contains("aligned to 2"), "{text}");
    refused(backend.stage_rows(ModelId(9), &good), ErrorCode::UnknownModel);
    assert_eq!(fixture.watch.lock().launches, 0);
    backend.close_region(good.region);
    let text = refused(backend.stage_rows(MODEL, &good), ErrorCode::InvalidArgument);
    assert!(text.contains("no device memory 0 is open"), "{text}");
    assert_eq!(backend.failure(), None);
}

#[test]
fn staged_rows_are_those_of_the_last_call_until_scratch_memory_serves_another() {
    if !is_available() {
        return;
    }
    let geometry = shaped((2, 64, 64), DType::F32);
    let mut fixture = registered("kivi-4", &geometry, (ThreadOrder::Random(4), Pace::EagerKernels));
    let (rows, writes) = (incoming(&geometry, 16, 0.3), writes(&geometry, 0, 16));
    let (_, first) = stage(&mut fixture, &rows);
    let (_, second) = stage(&mut fixture, &rows);
    let launches = fixture.watch.lock().launches;
    let backend = &mut fixture.backend.backend;
    let text = refused(backend.write_staged(&first, &writes), ErrorCode::Internal);
    assert!(text.contains("no longer staged"), "{text}");
    let short = |extent: Extent| Extent { len: extent.len - 1, ..extent };
    // More tokens than there are, rows that the slot has not, rows that reach past the slot's end,
    // more writes than an append makes.
    let PlannedWrite { to, .. } = writes[0];
    for wrong in [
        PlannedWrite { rows: 17, ..writes[0] },
        PlannedWrite { source_row: u32::MAX, ..writes[0] },
        PlannedWrite { to: RawTarget { first_row: 1, ..to }, ..writes[0] },
        PlannedWrite { to: RawTarget { capacity_rows: BLOCK + 1, ..to }, ..writes[0] },
        PlannedWrite { to: RawTarget { extent: short(to.extent), ..to }, ..writes[0] },
    ] {
        refused(backend.write_staged(&second, &[wrong]), ErrorCode::Internal);
    }
    refused(backend.write_staged(&second, &[writes[0]; 9]), ErrorCode::Internal);
    assert_eq!(fixture.watch.lock().launches, launches, "a refused write was launched");
    let backend = &mut fixture.backend.backend;
    backend.write_staged(&second, &writes).unwrap();
    // Written twice is the same rows.
    backend.write_staged(&second, &writes).unwrap();
    let wanted = [rows.k.to_vec(), rows.v.to_vec()];
    assert_eq!(stored(backend, &writes, DType::F32), wanted);
    pages(backend, &writes);
    refused(backend.write_staged(&second, &writes), ErrorCode::Internal);
    assert_eq!(backend.failure(), None);
}

#[test]
fn more_rows_than_scratch_memory_holds_are_not_staged_and_the_device_goes_on() {
    if !is_available() {
        return;
    }
    let geometry = shaped((2, 64, 64), DType::F16);
    let (driver, watch) = EmuDriver::new(ThreadOrder::Ascending, Pace::Late);
    let options = CudaOptions { scratch_bytes: 16 << 10, ..OPTIONS };
    let mut backend = CudaBackend::open_backend(Box::new(driver), &[b"kernels"], options).unwrap();
    let memory = shared(Kind::Ipc);
    let region = backend.open_region(memory.handle(), REGION_BYTES as u64).unwrap().region;
    let spec = kvd_codec::resolve_spec("raw").unwrap();
    backend.register(MODEL, kvd_codec::ModelCodec::new(geometry.clone(), spec, None).unwrap());
    let mut backend = InPlace::new(backend, region, &geometry);
    for (tokens, fits) in [(32, false), (28, true), (64, false), (1, true)] {
        let rows = incoming(&geometry, tokens, 0.3);
        let (places, _) = backend.leave_rows(&rows, 0..tokens).unwrap();
        let staged = backend.backend.stage_rows(MODEL, &places).unwrap();
        assert_eq!(staged.is_some(), fits, "{tokens} tokens of 512 bytes");
    }
    assert_eq!(watch.lock().launches, 2);
    assert_eq!(backend.backend.failure(), None);
    drop(backend);
    drop(memory);
}

#[test]
fn a_store_that_meets_a_fault_ends_every_call_and_nothing_leaks() {
    if !is_available() {
        return;
    }
    for (fail, while_staging) in
        [(Fail::Launch, true), (Fail::Later, true), (Fail::Launch, false), (Fail::Write, false)]
    {
        let geometry = shaped((2, 64, 64), DType::F16);
        let mut fixture = registered("raw", &geometry, (ThreadOrder::Ascending, Pace::Late));
        let (rows, writes) = (incoming(&geometry, 8, 0.3), writes(&geometry, 0, 8));
        let (places, staged) = stage(&mut fixture, &rows);
        fixture.watch.lock().fail = fail;
        let backend = &mut fixture.backend.backend;
        let failed = if while_staging {
            refused(backend.stage_rows(MODEL, &places), ErrorCode::DeviceFailed)
        } else {
            refused(backend.write_staged(&staged, &writes), ErrorCode::DeviceFailed)
        };
        assert!(backend.failure().is_some(), "{fail:?}: {failed}");
        refused(backend.stage_rows(MODEL, &places), ErrorCode::DeviceFailed);
        backend.close_region(places.region);
        let Fixture { backend, watch, memory, .. } = fixture;
        drop(backend);
        let watch = watch.lock();
        assert_eq!((watch.calls_after_failure, watch.live), (0, 0), "{fail:?}");
        drop(memory);
    }
}
