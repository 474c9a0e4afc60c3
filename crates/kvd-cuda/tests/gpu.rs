//! Conformance on a GPU, with the kernels compiled for it: the suite of every backend. Without a
//! GPU or kernels each test says `SKIP gpu:` and why; `KVD_REQUIRE_GPU=1` makes that a failure.
//!
//! ```text
//! cargo xtask kernels
//! KVD_REQUIRE_GPU=1 cargo test -p kvd-cuda --features embed-kernels --test gpu -- --nocapture
//! ```
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test may fail, and says a skip")]

use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, IncomingRows, PageBackend, PlanPart, RawTarget,
    RegionBackend, RegionHandle, RegionPlaces, Source,
};
use kvd_core::{Extent, ModelId, RopePairing};
use kvd_cuda::{
    CompileEvent, CudaBackend, CudaDriver, CudaOptions, GpuDevice, KERNELS, Nvrtc, probe_devices,
};
use kvd_testkit::conformance::{self, region::InPlace};
use kvd_testkit::gpu_worker::{self, MemoryKind, WorkerProcess};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

const OPTIONS: CudaOptions = CudaOptions {
    arena_bytes: 1 << 20,
    scratch_bytes: 1 << 20,
    table_bytes: 64 << 20,
    staging_bytes: 64 << 10,
    threads: 1,
    graphs: 4,
    kernel_timeout: Duration::from_secs(30),
};

/// The first GPU, or why there is none to test on.
fn find() -> Result<GpuDevice, String> {
    let first = probe_devices().and_then(|mut gpus| gpus.remove(0));
    let gpu = first.map_err(|error| error.to_string())?;
    if KERNELS.is_empty() {
        let name = &gpu.limits.name;
        return Err(format!("{name} is there, but the feature embed-kernels is off"));
    }
    Ok(gpu)
}

/// A backend on it; none where the test is skipped.
fn backend() -> Option<CudaBackend> {
    match find() {
        Ok(gpu) => {
            let driver = Box::new(CudaDriver::open_gpu(gpu).unwrap());
            // Kernels take much longer where a sanitizer watches them.
            let seconds = std::env::var("KVD_GPU_KERNEL_SECONDS").ok();
            let seconds = seconds.map_or(30, |seconds| seconds.parse().unwrap());
            let options = CudaOptions { kernel_timeout: Duration::from_secs(seconds), ..OPTIONS };
            Some(CudaBackend::open_backend(driver, KERNELS, options).unwrap())
        }
        Err(reason) => {
            let required = std::env::var_os("KVD_REQUIRE_GPU").is_some();
            assert!(!required, "KVD_REQUIRE_GPU is set, but: {reason}");
            eprintln!("SKIP gpu: {reason}");
            None
        }
    }
}

/// When no more codecs are begun, counted from the first question, where sanitizers make each take
/// long: a step that is stopped at its limit says nothing.
fn end() -> Option<Instant> {
    static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
    let seconds = std::env::var("KVD_GPU_SECONDS").ok()?;
    Some(*BEGUN + Duration::from_secs(seconds.parse().unwrap()))
}

#[test]
fn attention_over_pages_is_attention_over_what_they_decode_to() {
    let until = end();
    // One for all of them: kernels are loaded once.
    let Some(mut backend) = backend() else { return };
    let begun = Instant::now();
    let (agreed, of) = conformance::count_agreeing(&mut backend, until);
    eprintln!("gpu: {agreed} of {of} questions in {:.0} s", begun.elapsed().as_secs_f64());
}

#[test]
fn a_pair_whose_kernel_is_compiled_late_answers_as_before() {
    let Some(mut backend) = backend() else { return };
    let compiler = match Nvrtc::open_library() {
        Ok(compiler) => compiler,
        Err(reason) => {
            let required = std::env::var_os("KVD_REQUIRE_NVRTC").is_some();
            assert!(!required, "KVD_REQUIRE_NVRTC is set, but: {reason}");
            return eprintln!("SKIP nvrtc: {reason}");
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let (say, heard) = std::sync::mpsc::sync_channel(16);
    let report = Arc::new(move |event| drop(say.send(event)));
    backend.compile_with(Box::new(compiler), folder.path().to_owned(), report).unwrap();
    conformance::check_late_kernel(&mut backend, || match heard.try_recv() {
        Ok(CompileEvent::Failed { reason, .. }) => panic!("{reason}"),
        Ok(CompileEvent::Ready { .. }) => true,
        _ => false,
    });
}

#[test]
fn a_handle_that_means_nothing_is_refused_and_the_gpu_goes_on() {
    let Some(mut backend) = backend() else { return };
    let error = backend.open_region(RegionHandle::CudaIpc([0; 64]), 64).unwrap_err();
    assert!(error.to_string().contains("refuses it"), "{error}");
    assert_eq!(backend.failure(), None);
    let off = conformance::measure_codec_errors(&mut backend, "raw", RopePairing::Half).unwrap().0;
    assert!(off < 1e-5, "{off:.1e}");
}

#[test]
fn memory_of_a_worker_process_is_read_and_written() {
    for kind in MemoryKind::EACH {
        let Some(mut backend) = backend() else { return };
        gpu_worker::exchange_messages(&mut backend, kind);
    }
}

#[test]
fn attention_in_the_memory_of_a_worker_process_is_attention_over_what_pages_decode_to() {
    let each = ["raw", "kivi-4", "vecinfer-2", "kvd-2"];
    for (text, kind) in each.into_iter().flat_map(|text| MemoryKind::EACH.map(|kind| (text, kind)))
    {
        let Some(mut backend) = backend() else { return };
        let (worker, opened) = WorkerProcess::open_memory(&mut backend, kind);
        assert_eq!(opened.copied, None, "{kind:?}");
        let geometry = conformance::make_codec("raw", RopePairing::Half).geometry().clone();
        let mut backend = InPlace::new(backend, opened.region, &geometry);
        // Launched kernel by kernel, made a graph, launched as one.
        backend.repeat = 3;
        let (off, lse) =
            conformance::measure_codec_errors(&mut backend, text, RopePairing::Half).unwrap();
        let most = conformance::largest_error(text);
        let context = format!("{text}, {kind:?}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
        assert!(off < most && lse < most, "{context}");
        worker.end_process();
    }
}

#[test]
fn a_worker_process_that_waits_for_the_regions_event_finds_the_answer() {
    for kind in MemoryKind::EACH {
        let Some(backend) = backend() else { return };
        let (mut backend, plan) = with_rows(backend);
        let right = backend.attend(&plan).unwrap();
        let (mut worker, opened) = WorkerProcess::open_memory(&mut backend, kind);
        let event = opened.event.expect("the driver shares events");
        backend.write_region(opened.region, 0, &plan.q).unwrap();
        let out = plan.q.len() as u64;
        let places = RegionPlaces { region: opened.region, q: 0, out, lse: 2 * out };
        // The worker looks before anyone here has waited for the device.
        let mut seen = Vec::new();
        let mut launched = || {
            worker.send_line(&format!("event {}", gpu_worker::to_hex(&event)));
            seen = worker.read_bytes();
        };
        backend.attend_in_place(&plan, &places, &mut launched).unwrap();
        assert_eq!(seen[out as usize..][..right.out.len()], right.out, "{kind:?}");
        worker.end_process();
    }
}

#[test]
fn a_worker_process_that_is_killed_takes_neither_the_gpu_nor_other_workers_with_it() {
    for kind in MemoryKind::EACH {
        let Some(backend) = backend() else { return };
        let (mut backend, plan) = with_rows(backend);
        let right = backend.attend(&plan).unwrap();
        let (mut dead, gone) = WorkerProcess::open_memory(&mut backend, kind);
        let (living, stays) = WorkerProcess::open_memory(&mut backend, kind);
        dead.process.kill().unwrap();
        dead.process.wait().unwrap();
        let mut bytes = [0; 256];
        let read = backend.read_region(gone.region, 0, &mut bytes);
        match kind {
            // Whatever CUDA makes of a mapping whose owner is gone.
            MemoryKind::Ipc => eprintln!("memory of a dead worker: {read:?}"),
            // A mapping keeps the allocation.
            MemoryKind::Fd => {
                assert!(read.is_ok() && bytes.iter().copied().eq(0..=255), "{read:?}")
            }
        }
        backend.close_region(gone.region);
        assert_eq!(backend.failure(), None, "{kind:?}");
        backend.read_region(stays.region, 0, &mut bytes).unwrap();
        assert!(bytes.iter().copied().eq(0..=255), "{kind:?}");
        assert_eq!(backend.attend(&plan).unwrap().out, right.out, "{kind:?}");
        living.end_process();
    }
}

#[test]
fn launches_that_repeat_are_one_graph_with_the_same_answer() {
    let Some(backend) = backend() else { return };
    let (mut backend, plan) = with_rows(backend);
    let answers: Vec<_> = (0..4).map(|_| backend.attend(&plan).unwrap()).collect();
    for answer in &answers[1..] {
        assert_eq!((&answer.out, &answer.lse), (&answers[0].out, &answers[0].lse));
    }
    let launches = backend.launches();
    assert_eq!((launches.graphs, launches.graphs_built, launches.graphs_off), (3, 1, None));
}

/// A backend with rows of 40 tokens, and queries over them.
fn with_rows(mut backend: CudaBackend) -> (CudaBackend, AttendPlan) {
    let codec = conformance::make_codec("raw", RopePairing::Half);
    let layout = codec.geometry().raw_layout(40);
    backend.register(ModelId(1), codec);
    let extent = Extent { offset: 0, len: layout.size_bytes() };
    let value = |i: u32| (i as f32 * 0.37).sin().to_le_bytes();
    let bytes: Vec<u8> = (0..40 * 2 * 64).flat_map(value).collect();
    let rows = IncomingRows { tokens: 40, k: bytes.clone().into(), v: bytes.into() };
    let to = RawTarget { extent, capacity_rows: 40, first_row: 0 };
    backend.write(ModelId(1), &rows, 0, 40, to).unwrap();
    let source = Source::Raw { extent, capacity_rows: 40, first_row: 0 };
    let plan = conformance::attend_plan(vec![PlanPart { first_token: 0, rows: 40, source }], 1);
    (backend, plan)
}
