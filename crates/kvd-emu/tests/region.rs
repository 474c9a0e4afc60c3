//! Stores and attention in memory that a worker shares with the device, over the CPU lane: the
//! conformance suite of every backend, the same answers as by the host, what is refused, faults.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

#[path = "region/descriptor.rs"]
mod descriptor;
#[path = "common/driver.rs"]
mod driver;
#[path = "region/graphs.rs"]
mod graphs;
#[path = "region/rows.rs"]
mod rows;
#[path = "region/stage.rs"]
mod stage;
#[path = "common/streams.rs"]
mod streams;
#[path = "region/waits.rs"]
mod waits;

use driver::shared::{Kind, Shared};
use driver::{EmuDriver, Fail, Planted, Watch};
use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, IncomingRows, OpenedRegion, PageBackend, PlanPart,
    PlanQuery, RawTarget, RegionBackend, RegionPlaces, Source,
};
use kvd_core::{Coded, DType, ErrorCode, Extent, Geometry, LayerIndex, ModelId, RopePairing};
use kvd_cuda::{CudaBackend, CudaOptions};
use kvd_emu::{ThreadOrder, is_available, is_sanitized};
use kvd_testkit::conformance::{self, region::InPlace};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use streams::Pace;

const OPTIONS: CudaOptions = CudaOptions {
    arena_bytes: 1 << 20,
    scratch_bytes: 1 << 20,
    table_bytes: 8 << 20,
    staging_bytes: 64 << 10,
    threads: 1,
    graphs: 4,
    kernel_timeout: Duration::from_secs(30),
};

/// Bytes of the worker's memory.
const REGION_BYTES: usize = 64 << 10;

/// A backend over the CPU lane, a region of it, and what its driver sees.
struct Fixture {
    backend: InPlace<CudaBackend>,
    opened: OpenedRegion,
    watch: Arc<Mutex<Watch>>,
    /// Given back after the backend.
    memory: Shared,
}

/// Memory of a worker that is as long as a region.
fn shared(kind: Kind) -> Shared {
    Shared::of(kind, &[0xFF; REGION_BYTES])
}

fn open(order: ThreadOrder, pace: Pace, options: CudaOptions) -> Fixture {
    open_as(Kind::Ipc, order, pace, options)
}

/// A backend with memory that is handed over in that way.
fn open_as(kind: Kind, order: ThreadOrder, pace: Pace, options: CudaOptions) -> Fixture {
    let (driver, watch) = EmuDriver::new(order, pace);
    let mut backend = CudaBackend::open_backend(Box::new(driver), &[b"kernels"], options).unwrap();
    let memory = shared(kind);
    let opened = backend.open_region(memory.handle(), REGION_BYTES as u64).unwrap();
    let geometry = conformance::make_codec("raw", RopePairing::Half).geometry().clone();
    let backend = InPlace::new(backend, opened.region, &geometry);
    Fixture { backend, opened, watch, memory }
}

#[test]
fn attention_in_a_region_is_attention_over_what_pages_decode_to() {
    if !is_available() {
        return;
    }
    let mut orders = ThreadOrder::EACH.into_iter().cycle();
    let mut paces = Pace::EACH.into_iter().cycle();
    let mut kinds = Kind::EACH.into_iter().cycle();
    // ThreadSanitizer takes ten times as long, and what attends is the same without a region.
    let step = if is_sanitized("thread") { 6 } else { 1 };
    for text in conformance::list_codecs().step_by(step) {
        let (order, pace) = (orders.next().unwrap(), paces.next().unwrap());
        let fixture = open_as(kinds.next().unwrap(), order, pace, OPTIONS);
        let Fixture { mut backend, watch, memory, .. } = fixture;
        // Launched kernel by kernel, made a graph, launched as one.
        backend.repeat = 3;
        let answer = conformance::measure_codec_errors(&mut backend, text, RopePairing::Half);
        let (off, lse) = answer.unwrap_or_else(|| panic!("{text} is not served"));
        let most = conformance::largest_error(text);
        assert!(off < most && lse < most, "{text}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        drop(backend);
        let watch = watch.lock();
        assert_eq!(watch.live, 0, "{text}");
        assert!(watch.graphs >= 2, "{text}: {} graphs", watch.graphs);
        let kernels: Vec<&str> = watch.kernels.iter().map(String::as_str).collect();
        for kernel in ["kvd_stage", "kvd_rows", "kvd_queries", "kvd_answer"] {
            assert!(kernels.contains(&kernel), "{text}: {kernel}");
        }
        drop(memory);
    }
}

/// Registers `text` and writes 40 rows; a part that names them.
fn write_rows(backend: &mut CudaBackend, text: &str, geometry: &Geometry) -> PlanPart {
    write_rows_of(backend, text, geometry, 1.0)
}

/// As [`write_rows`], values up to `size`.
fn write_rows_of(
    backend: &mut CudaBackend,
    text: &str,
    geometry: &Geometry,
    size: f32,
) -> PlanPart {
    let spec = kvd_codec::resolve_spec(text).unwrap();
    let codec = kvd_codec::ModelCodec::new(geometry.clone(), spec, None).unwrap();
    let extent = Extent { offset: 4096, len: geometry.raw_layout(40).size_bytes() };
    backend.register(ModelId(1), codec);
    let bytes = |side_dim: u32, step: f32, size: f32| -> bytes::Bytes {
        let values = (0..40 * geometry.kv_heads * side_dim).map(|i| size * (i as f32 * step).sin());
        let values: Vec<f32> = values.collect();
        let mut bytes = vec![0; values.len() * geometry.dtype.size_bytes()];
        geometry.dtype.narrow_values(&values, &mut bytes);
        bytes.into()
    };
    let (k, v) = (bytes(geometry.head_dim_k, 0.37, 1.0), bytes(geometry.head_dim_v, 0.73, size));
    let incoming = IncomingRows { tokens: 40, k, v };
    let to = RawTarget { extent, capacity_rows: 40, first_row: 0 };
    backend.write(ModelId(1), &incoming, 0, 40, to).unwrap();
    let source = Source::Raw { extent, capacity_rows: 40, first_row: 0 };
    PlanPart { first_token: 0, rows: 40, source }
}

fn geometry() -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 96,
        head_dim_v: 64,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    }
}

/// Queries of `n_q` tokens each, over `group` query heads per KV head.
fn plan(part: &PlanPart, dtype: DType, group: u32, n_q: &[u32]) -> AttendPlan {
    let parts: Arc<[PlanPart]> = vec![part.clone()].into();
    let query = |n_q: &u32| PlanQuery {
        n_q: *n_q,
        position: 40 - n_q,
        sliding_window: (*n_q > 2).then_some(20),
        parts: parts.clone(),
    };
    let queries: Vec<PlanQuery> = n_q.iter().map(query).collect();
    let values = n_q.iter().sum::<u32>() * 2 * group * 96;
    let values: Vec<f32> = (0..values).map(|i| (i as f32 * 0.11).cos() * 2.0).collect();
    let mut q = vec![0; values.len() * dtype.size_bytes()];
    dtype.narrow_values(&values, &mut q);
    let (model, layer, q) = (ModelId(1), LayerIndex(0), q.into());
    let (scale, soft_cap) = (Some(0.2), Some(30.0));
    AttendPlan { model, layer, q_heads: 2 * group, dtype, scale, soft_cap, queries, q }
}

/// A backend with rows stored, its region, and a part.
fn with_rows(text: &str, options: CudaOptions) -> (Fixture, PlanPart) {
    with_rows_as(Kind::Ipc, text, options)
}

fn with_rows_as(kind: Kind, text: &str, options: CudaOptions) -> (Fixture, PlanPart) {
    let mut fixture = open_as(kind, ThreadOrder::Random(3), Pace::Late, options);
    let part = write_rows(&mut fixture.backend.backend, text, &geometry());
    fixture.backend.head_dims = [96, 64];
    (fixture, part)
}

/// A backend with values that stand beyond the largest f16 in f32, its region, and a part.
fn with_large_rows(text: &str) -> (Fixture, PlanPart) {
    let mut fixture = open_as(Kind::Ipc, ThreadOrder::Random(3), Pace::Late, OPTIONS);
    let geometry = Geometry { dtype: DType::F32, ..geometry() };
    let part = write_rows_of(&mut fixture.backend.backend, text, &geometry, 1e6);
    fixture.backend.head_dims = [96, 64];
    (fixture, part)
}

#[test]
fn a_region_is_answered_what_the_host_is_in_every_dtype_and_shape() {
    if !is_available() {
        return;
    }
    for text in ["k=rotate/uniform(b=4,axis=token); v=rotate/lloyd(b=4)", "raw"] {
        let (mut fixture, part) = with_rows(text, OPTIONS);
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Eight rows of a unit, more, fewer; heads that share none.
            for (group, n_q) in [(1, vec![1]), (4, vec![2, 5]), (3, vec![4, 1, 1])] {
                let plan = plan(&part, dtype, group, &n_q);
                let by_host = fixture.backend.backend.attend(&plan).unwrap();
                let in_place = fixture.backend.attend(&plan).unwrap();
                assert_eq!(in_place.stored_bytes_read, by_host.stored_bytes_read);
                // Raw rows take queries as they came: the same products in the same order.
                assert_eq!(in_place.out, by_host.out, "{text}, {dtype}, {group}, {n_q:?}");
                assert_eq!(in_place.lse, by_host.lse);
            }
        }
        let what = fixture.watch.lock().read_bytes;
        fixture.backend.attend(&plan(&part, DType::F16, 4, &[4])).unwrap();
        let read = fixture.watch.lock().read_bytes - what;
        let answer = 4 * 8 * (64 * 2 + 4) + 64;
        // The test's own copy of the answer with what is behind it, and one word per unit.
        assert!(read < answer + 256 && read > answer, "{read} bytes came to the host");
    }
}

#[test]
fn answers_in_a_region_saturate_as_the_hosts_do() {
    if !is_available() {
        return;
    }
    // Values up to a million, of which f16 has those up to 65504.
    for text in ["k=rotate/uniform(b=4,axis=token); v=uniform(b=4,axis=token)", "raw"] {
        let (mut fixture, part) = with_large_rows(text);
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let plan = plan(&part, dtype, 2, &[1, 2]);
            let by_host = fixture.backend.backend.attend(&plan).unwrap();
            let in_place = fixture.backend.attend(&plan).unwrap();
            assert_eq!(in_place.out, by_host.out, "{text}, {dtype}");
            let mut out = vec![0f32; in_place.out.len() / dtype.size_bytes()];
            dtype.widen_values(&in_place.out, &mut out);
            assert!(out.iter().all(|value| value.is_finite()), "{text}, {dtype}");
        }
    }
}

#[test]
fn queries_times_a_scale_beyond_f32_are_refused_as_by_the_host() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = AttendPlan { scale: Some(3e38), ..plan(&part, DType::F32, 2, &[1, 1]) };
    let by_host = fixture.backend.backend.attend(&plan).unwrap_err();
    let error = fixture.backend.attend(&plan).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NonFinite);
    assert_eq!(error.to_string(), by_host.to_string());
    assert!(error.to_string().contains("scale"), "{error}");
}

#[test]
fn a_batch_over_the_scratch_memory_is_answered_in_halves() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let large = plan(&part, DType::F32, 2, &[1; 12]);
    let whole = fixture.backend.attend(&large).unwrap();
    let (mut small, part) = with_rows("raw", CudaOptions { scratch_bytes: 40 << 10, ..OPTIONS });
    let halves = small.backend.attend(&plan(&part, DType::F32, 2, &[1; 12])).unwrap();
    assert_eq!((halves.out, halves.lse), (whole.out, whole.lse));
    let launches = |fixture: &Fixture| {
        let watch = fixture.watch.lock();
        watch.kernels.iter().filter(|name| *name == "kvd_answer").count()
    };
    assert!(launches(&small) > launches(&fixture));
    // A number that is none is named by its place in the whole batch.
    let mut bad = plan(&part, DType::F32, 2, &[1; 12]);
    let mut bytes = bad.q.to_vec();
    let index = 12 * 4 * 96 - 5;
    bytes[4 * index..4 * index + 4].copy_from_slice(&f32::NEG_INFINITY.to_le_bytes());
    bad.q = bytes.into();
    let error = small.backend.attend(&bad).unwrap_err();
    assert_eq!(error.code(), small.backend.backend.attend(&bad).unwrap_err().code());
    assert_eq!(error.to_string(), small.backend.backend.attend(&bad).unwrap_err().to_string());
    assert_eq!(small.backend.failure(), None);
    let (mut tiny, part) = with_rows("raw", CudaOptions { scratch_bytes: 1024, ..OPTIONS });
    let error = tiny.backend.attend(&plan(&part, DType::F32, 2, &[1, 1])).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LimitExceeded);
}

#[test]
fn queries_that_are_no_numbers_are_refused_by_the_first_of_them() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("k=rotate/uniform(b=4,axis=token); v=lloyd(b=4)", OPTIONS);
    for (dtype, value) in
        [(DType::F32, f32::NAN), (DType::F16, f32::INFINITY), (DType::BF16, f32::NEG_INFINITY)]
    {
        let mut plan = plan(&part, dtype, 4, &[3]);
        let right = fixture.backend.attend(&plan).unwrap();
        let good = plan.q.clone();
        let mut bytes = good.to_vec();
        for index in [700, 1900] {
            let each = dtype.size_bytes();
            dtype.narrow_values(&[value], &mut bytes[index * each..][..each]);
        }
        plan.q = bytes.into();
        let by_host = fixture.backend.backend.attend(&plan).unwrap_err();
        let error = fixture.backend.attend(&plan).unwrap_err();
        assert_eq!(error.to_string(), by_host.to_string());
        assert!(error.to_string().contains("700"), "{error}");
        plan.q = good;
        assert_eq!(fixture.backend.attend(&plan).unwrap().out, right.out);
    }
}

/// Attends with places of the test's choice.
fn attend_at(fixture: &mut Fixture, plan: &AttendPlan, places: RegionPlaces) -> String {
    let error = fixture.backend.backend.attend_in_place(plan, &places, &mut || {
        panic!("nothing is launched");
    });
    let error = error.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{error}");
    error.to_string()
}

#[test]
fn places_outside_a_region_unaligned_or_of_one_that_is_closed_are_refused_before_any_launch() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = plan(&part, DType::F16, 2, &[1]);
    let (good, lengths) = fixture.backend.plan_places(&plan);
    let size = REGION_BYTES as u64;
    let launches = fixture.watch.lock().launches;
    for places in [
        RegionPlaces { q: size - 4 * 96 * 2 + 2, ..good },
        RegionPlaces { q: u64::MAX - 1, ..good },
        RegionPlaces { out: size - lengths[0] + 2, ..good },
        RegionPlaces { lse: size - lengths[1] + 4, ..good },
        RegionPlaces { lse: size, ..good },
    ] {
        let refused = attend_at(&mut fixture, &plan, places);
        assert!(refused.contains("not inside the 65536"), "{refused}");
    }
    for (places, wanted) in [
        (RegionPlaces { q: good.q + 1, ..good }, "aligned to 2"),
        (RegionPlaces { out: good.out + 1, ..good }, "aligned to 2"),
        (RegionPlaces { lse: good.lse + 2, ..good }, "aligned to 4"),
    ] {
        let refused = attend_at(&mut fixture, &plan, places);
        assert!(refused.contains(wanted), "{refused}");
    }
    assert_eq!(fixture.watch.lock().launches, launches);
    fixture.backend.attend(&plan).unwrap();
    // Memory of a worker's connection goes with it.
    fixture.backend.backend.close_region(good.region);
    let refused = attend_at(&mut fixture, &plan, good);
    assert!(refused.contains("no device memory 0 is open"), "{refused}");
    assert_eq!(fixture.backend.failure(), None);
}

#[test]
fn the_regions_event_is_recorded_behind_the_answer_and_before_the_host_waits() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let event = fixture.opened.event.expect("the driver shares events");
    let plan = plan(&part, DType::F32, 2, &[1]);
    let right = fixture.backend.attend(&plan).unwrap();
    let (places, lengths) = fixture.backend.plan_places(&plan);
    let at = (places.out) as usize;
    let blank = vec![0; lengths[0] as usize];
    fixture.backend.backend.write_region(places.region, places.out, &blank).unwrap();
    let (watch, memory) = (fixture.watch.clone(), &fixture.memory);
    let waits = watch.lock().waits;
    let mut seen = Vec::new();
    let mut launched = || {
        // Nothing is done yet on a device that is late, and nobody has waited for it.
        assert_eq!(watch.lock().waits, waits);
        assert_eq!(&memory.bytes()[at..][..8], [0; 8]);
        // A worker that waits for the event finds the answer.
        seen.extend(watch.lock().recorded.clone());
    };
    fixture.backend.backend.attend_in_place(&plan, &places, &mut launched).unwrap();
    assert_eq!(seen.last(), Some(&(event, "kvd_answer".to_owned())));
    assert_eq!(fixture.memory.bytes()[at..][..right.out.len()], right.out);
}

#[test]
fn without_an_event_the_answer_comes_and_nothing_is_said_before_it() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = plan(&part, DType::F32, 2, &[1]);
    let right = fixture.backend.attend(&plan).unwrap();
    let (places, lengths) = fixture.backend.plan_places(&plan);
    let backend = &mut fixture.backend.backend;
    fixture.watch.lock().fail = Fail::Events;
    let memory = shared(Kind::Ipc);
    let opened = backend.open_region(memory.handle(), REGION_BYTES as u64).unwrap();
    assert_eq!((opened.event, opened.copied), (None, None));
    backend.write_region(opened.region, places.q, &plan.q).unwrap();
    let recorded = fixture.watch.lock().recorded.len();
    let places = RegionPlaces { region: opened.region, ..places };
    let mut launched = || panic!("there is no event to wait for");
    backend.attend_in_place(&plan, &places, &mut launched).unwrap();
    let mut out = vec![0; lengths[0] as usize];
    backend.read_region(opened.region, places.out, &mut out).unwrap();
    assert_eq!(out, right.out);
    assert_eq!(fixture.watch.lock().recorded.len(), recorded);
    drop(fixture);
    drop(memory);
}

#[test]
fn memory_that_is_open_twice_stays_when_one_of_its_regions_is_closed() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = plan(&part, DType::F32, 2, &[1]);
    fixture.backend.repeat = 2;
    let right = fixture.backend.attend(&plan).unwrap();
    let Fixture { backend: first, watch, memory, .. } = &mut fixture;
    let (places, live) = (first.plan_places(&plan).0, watch.lock().live);
    let times = if is_sanitized("thread") { 5 } else { 50 };
    for _ in 0..times {
        let again = first.backend.open_region(memory.handle(), REGION_BYTES as u64).unwrap();
        first.backend.close_region(again.region);
        let answer = first.attend(&plan).unwrap();
        assert_eq!((answer.out, answer.lse), (right.out.clone(), right.lse.clone()));
    }
    assert_eq!(watch.lock().live, live);
    let again = first.backend.open_region(memory.handle(), REGION_BYTES as u64).unwrap();
    first.backend.close_region(places.region);
    let places = RegionPlaces { region: again.region, ..places };
    first.backend.attend_in_place(&plan, &places, &mut || {}).unwrap();
    first.backend.close_region(again.region);
    let Fixture { backend, watch, memory, .. } = fixture;
    drop(backend);
    assert_eq!(watch.lock().live, 0);
    drop(memory);
}

#[test]
fn an_error_that_sticks_ends_every_call_and_nothing_leaks() {
    if !is_available() {
        return;
    }
    for fail in [Fail::Launch, Fail::Write, Fail::Later] {
        let (mut fixture, part) = with_rows("raw", OPTIONS);
        let plan = plan(&part, DType::F16, 2, &[1]);
        let (places, _) = fixture.backend.plan_places(&plan);
        fixture.watch.lock().fail = fail;
        let backend = &mut fixture.backend.backend;
        let error = backend.attend_in_place(&plan, &places, &mut || {}).unwrap_err();
        assert_eq!(error.code(), ErrorCode::DeviceFailed, "{fail:?}: {error}");
        assert!(backend.failure().is_some());
        let again = backend.attend_in_place(&plan, &places, &mut || {}).unwrap_err();
        assert_eq!(again.code(), ErrorCode::DeviceFailed);
        backend.close_region(places.region);
        let Fixture { backend, watch, memory, .. } = fixture;
        drop(backend);
        let watch = watch.lock();
        assert_eq!((watch.calls_after_failure, watch.live), (0, 0), "{fail:?}");
        drop(memory);
    }
}

#[test]
fn a_wait_that_is_missing_is_noticed() {
    if !is_available() {
        return;
    }
    let (mut fixture, part) = with_rows("raw", OPTIONS);
    let plan = plan(&part, DType::F16, 2, &[1]);
    let (places, _) = fixture.backend.plan_places(&plan);
    fixture.watch.lock().planted = Planted::KernelsDoNotWait;
    let error = fixture.backend.backend.attend_in_place(&plan, &places, &mut || {}).unwrap_err();
    assert_eq!(error.code(), ErrorCode::DeviceFailed);
    let complaints = fixture.watch.lock().complaints.clone();
    assert!(complaints[0].contains("before a copy that was asked"), "{complaints:?}");
}
