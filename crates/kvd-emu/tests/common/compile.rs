//! Kernels that are compiled while the backend runs: by a made-up compiler, whose images name the
//! kernels in them, which the CPU lane has from the same text (`late.rs`).

use super::{OPTIONS, blocks};
use crate::driver::{EmuDriver, Fail, Watch};
use crate::streams::Pace;
use kvd_codec::ModelCodec;
use kvd_compute::{
    AppendSteps, AttendBackend, IncomingRows, PageBackend, PlanPart, RawTarget, Source,
};
use kvd_core::{Extent, LayerIndex, ModelId, RopePairing};
use kvd_cuda::{
    CompileError, CompileEvent, CompileReport, CudaBackend, KernelCompiler, KernelSource,
};
use kvd_emu::{ThreadOrder, is_available};
use kvd_testkit::conformance;
use parking_lot::Mutex;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// A pair that has no kernel of its own ahead of time, and none on tensor cores.
const CODEC: &str = "k=uniform(b=3,axis=token,mode=sym); v=uniform(b=4,g=32,axis=token,mode=sym)";
const OWN: &str = "kvd_attend_symmetric_symmetric_8";
/// Keys of one kind, values of another: one with products on tensor cores.
const MIXED: &str = "k=uniform(b=2,g=32,axis=channel); v=fp8";
const TENSOR: &str = "kvd_attend_tensor_uniform_fp8_8";

struct MadeUp {
    version: &'static str,
    /// One message per file that may be compiled.
    gate: Receiver<Result<(), CompileError>>,
    compiled: Arc<Mutex<Vec<String>>>,
}

impl KernelCompiler for MadeUp {
    fn compiler_version(&self) -> String {
        self.version.to_owned()
    }

    fn compile_kernel(&mut self, source: KernelSource<'_>) -> Result<Vec<u8>, CompileError> {
        let closed = || Err(CompileError::Rejected("nothing more is compiled".to_owned()));
        self.gate.recv().unwrap_or_else(|_| closed())?;
        assert!(source.headers.iter().any(|header| header.0 == "attend.cuh"));
        self.compiled.lock().push(format!("{}: {}", source.target, source.text));
        let name = source.text.split_once("ROWS(").unwrap().1.split_once(',').unwrap().0;
        Ok(format!("compiled kvd_attend_{name}_").into_bytes())
    }
}

/// A backend with a compiler, and records of both.
struct Seen {
    backend: CudaBackend,
    watch: Arc<Mutex<Watch>>,
    go: SyncSender<Result<(), CompileError>>,
    compiled: Arc<Mutex<Vec<String>>>,
    events: Arc<Mutex<Vec<CompileEvent>>>,
    codec: &'static str,
}

impl Seen {
    fn new(folder: &Path, version: &'static str) -> Self {
        let (driver, watch) = EmuDriver::new(ThreadOrder::Ascending, Pace::Late);
        let mut backend =
            CudaBackend::open_backend(Box::new(driver), &[b"kernels"], OPTIONS).unwrap();
        let (go, gate) = sync_channel(8);
        let compiled = Arc::new(Mutex::new(Vec::new()));
        let events = Arc::new(Mutex::new(Vec::new()));
        let compiler = MadeUp { version, gate, compiled: compiled.clone() };
        let keep = events.clone();
        let report: CompileReport = Arc::new(move |event| keep.lock().push(event));
        backend.compile_with(Box::new(compiler), folder.to_owned(), report).unwrap();
        Self { backend, watch, go, compiled, events, codec: CODEC }
    }

    /// A backend whose compiler may compile one file.
    fn going(folder: &Path, version: &'static str) -> Self {
        let seen = Self::new(folder, version);
        seen.go.send(Ok(())).unwrap();
        seen
    }

    /// Stores a block and attends to it; gives the answer and the launched kernels.
    fn attend(&mut self) -> (Vec<u8>, Vec<String>) {
        self.watch.lock().kernels.clear();
        let part = store(&mut self.backend, conformance::make_codec(self.codec, RopePairing::Half));
        let answer = self.backend.attend(&conformance::attend_plan(vec![part], 1)).unwrap();
        let kernels = self.watch.lock().kernels.clone();
        (answer.out, kernels.into_iter().filter(|name| name.contains("attend")).collect())
    }

    /// Attends until something was heard of a kernel.
    fn attend_until(&mut self, is_meant: impl Fn(&CompileEvent) -> bool) -> Vec<u8> {
        loop {
            let answer = self.attend().0;
            if self.events.lock().iter().any(&is_meant) {
                return answer;
            }
            std::thread::yield_now();
        }
    }

    fn is_ready(event: &CompileEvent) -> bool {
        matches!(event, CompileEvent::Ready { .. })
    }
}

/// A page of both sides.
fn store(backend: &mut CudaBackend, codec: ModelCodec) -> PlanPart {
    let layout = codec.geometry().raw_layout(8);
    backend.register(ModelId(1), codec);
    let extent = Extent { offset: 4096, len: layout.size_bytes() };
    let bytes: Vec<u8> =
        (0..8 * 2 * 64).flat_map(|i: u32| ((i % 97) as f32 / 7.0).to_le_bytes()).collect();
    let rows = IncomingRows { tokens: 8, k: bytes.clone().into(), v: bytes.into() };
    let to = RawTarget { extent, capacity_rows: 8, first_row: 0 };
    backend.write(ModelId(1), &rows, 0, 8, to).unwrap();
    let source = Source::Raw { extent, capacity_rows: 8, first_row: 0 };
    let part = PlanPart { first_token: 0, rows: 8, source };
    let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks(&part, 1)).unwrap();
    let pages = encoded[0].as_ref().unwrap();
    let extent = Extent { offset: 65_536, len: pages.size_bytes() };
    backend.move_pages(pages, extent);
    let source = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
    PlanPart { source, ..part }
}

#[test]
fn the_shared_kernel_serves_until_the_pairs_own_is_there() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut seen = Seen::new(folder.path(), "one");
    let (shared, kernels) = seen.attend();
    assert_eq!(kernels, ["kvd_attend_any_any_8"]);
    assert!(seen.compiled.lock().is_empty(), "nothing waits for the compiler");
    seen.go.send(Ok(())).unwrap();
    assert_eq!(seen.attend_until(Seen::is_ready), shared);
    let (own, kernels) = seen.attend();
    assert_eq!((own, &kernels[..]), (shared, &[OWN.to_owned()][..]));
    let compiled = seen.compiled.lock().clone();
    assert_eq!(compiled.len(), 1, "once, however often it is registered: {compiled:?}");
    assert!(compiled[0].starts_with("sm_90: "), "{compiled:?}");
    assert!(compiled[0].contains("(symmetric_symmetric, kvd::Uniform<kvd::Symmetric>"));
}

#[test]
fn a_pair_that_tensor_cores_can_multiply_is_launched_with_tables_of_its_own() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut seen = Seen { codec: MIXED, ..Seen::new(folder.path(), "one") };
    let (shared, kernels) = seen.attend();
    assert_eq!(kernels, ["kvd_attend_any_any_8"]);
    seen.go.send(Ok(())).unwrap();
    seen.attend_until(Seen::is_ready);
    let (own, kernels) = seen.attend();
    assert_eq!(kernels, [TENSOR]);
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
    };
    let (own, shared) = (floats(&own), floats(&shared));
    assert_eq!(own.len(), shared.len());
    let largest = shared.iter().fold(0f32, |most, x| most.max(x.abs()));
    let off = own.iter().zip(&shared).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    // Both are within the error of f32 arithmetic.
    assert!(largest > 0.0 && off <= 1e-5 * largest, "{off} of {largest}");
    assert_eq!(seen.compiled.lock().len(), 1);
}

#[test]
fn units_are_cut_for_the_kernel_that_serves() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Seen { mut backend, watch, go, events, .. } = Seen::new(folder.path(), "one");
    // Registered once; pages enough for the thread blocks of both heads that the GPU holds.
    let part = store(&mut backend, conformance::make_codec(MIXED, RopePairing::Half));
    let parts = (0..200).map(|page| PlanPart { first_token: 8 * page, ..part.clone() });
    let plan = conformance::attend_plan(parts.collect(), 1);
    let mut launched = || {
        let mut seen = watch.lock();
        seen.kernels.clear();
        seen.blocks.clear();
        drop(seen);
        backend.attend(&plan).unwrap();
        let seen = watch.lock();
        let launches = seen.kernels.iter().cloned().zip(seen.blocks.iter().copied());
        launches.filter(|(name, _)| name.contains("attend")).collect::<Vec<_>>()
    };
    // Four of its thread blocks fit a multiprocessor: a page each.
    assert_eq!(launched(), [("kvd_attend_any_any_8".to_owned(), 400)]);
    go.send(Ok(())).unwrap();
    while !events.lock().iter().any(Seen::is_ready) {
        launched();
    }
    // Three of this one's, which are 198 for each head: two pages each.
    assert_eq!(launched(), [(TENSOR.to_owned(), 200)]);
}

#[test]
fn windows_and_ranges_of_such_a_pair_are_answered_before_and_after() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Seen { mut backend, watch, go, events, .. } = Seen::new(folder.path(), "one");
    go.send(Ok(())).unwrap();
    conformance::check_late_kernel(&mut backend, || events.lock().iter().any(Seen::is_ready));
    let kernels = watch.lock().kernels.clone();
    let last = kernels.iter().rfind(|name| name.contains("uniform"));
    assert_eq!(last.map(String::as_str), Some(TENSOR), "{kernels:?}");
}

#[test]
fn a_pair_with_a_kernel_of_its_own_is_not_compiled() {
    let folder = tempfile::tempdir().unwrap();
    let mut seen = Seen::going(folder.path(), "one");
    seen.backend.register(ModelId(1), conformance::make_codec("kivi-4", RopePairing::Half));
    drop(seen.backend);
    assert_eq!((seen.compiled.lock().len(), seen.events.lock().len()), (0, 0));
}

#[test]
fn one_whose_own_kernel_refuses_its_shape_has_another_compiled() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let codec = "k=uniform(b=4,g=48,axis=channel); v=uniform(b=4,g=32,axis=token)";
    let mut seen = Seen { codec, ..Seen::new(folder.path(), "one") };
    let (shared, kernels) = seen.attend();
    assert_eq!(kernels, ["kvd_attend_any_any_8"]);
    seen.go.send(Ok(())).unwrap();
    assert_eq!(seen.attend_until(Seen::is_ready), shared);
    let (own, kernels) = seen.attend();
    assert_eq!(
        (own, &kernels[..]),
        (shared, &["kvd_attend_plain_uniform_uniform_8".to_owned()][..])
    );
}

#[test]
fn kernels_are_found_on_disk_unless_they_are_of_another_compiler() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (version, compiles) in [("one", 1), ("one", 0), ("two", 1), ("one", 0)] {
        let mut seen = Seen::going(folder.path(), version);
        seen.attend_until(Seen::is_ready);
        assert_eq!(seen.compiled.lock().len(), compiles, "{version}");
        let events = seen.events.lock().clone();
        let found = compiles == 0;
        let [CompileEvent::Ready { from_cache, .. }] = &events[..] else { panic!("{events:?}") };
        assert_eq!(*from_cache, found);
    }
}

#[test]
fn a_damaged_file_is_compiled_again_and_replaced() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    Seen::going(folder.path(), "one").attend_until(Seen::is_ready);
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let good = std::fs::read(&file).unwrap();
    for bad in [&good[..good.len() - 1], &good[..3], b"", b"something else"] {
        std::fs::write(&file, bad).unwrap();
        let mut seen = Seen::going(folder.path(), "one");
        seen.attend_until(Seen::is_ready);
        let events = seen.events.lock().clone();
        let CompileEvent::Damaged { path, .. } = &events[0] else { panic!("{events:?}") };
        assert_eq!((path, seen.compiled.lock().len()), (&file, 1));
        assert_eq!(std::fs::read(&file).unwrap(), good);
    }
}

#[test]
fn what_cannot_be_kept_compiled_or_loaded_stops_nothing() {
    if !is_available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, b"not a folder").unwrap();
    let mut seen = Seen::going(&file, "one");
    let shared = seen.attend_until(Seen::is_ready);
    let events = seen.events.lock().clone();
    assert!(events.iter().any(|event| matches!(event, CompileEvent::NotKept { .. })), "{events:?}");
    for (fail, answer, wanted) in [
        (Fail::Never, Err(CompileError::Rejected("syntax".to_owned())), "says: syntax"),
        (Fail::Image, Ok(()), "CUDA_ERROR_INVALID_IMAGE"),
        (Fail::Kernels, Ok(()), "no kernel kvd_attend_symmetric_symmetric_1 "),
    ] {
        let mut seen = Seen::new(folder.path(), "one");
        seen.watch.lock().fail = fail;
        seen.go.send(answer).unwrap();
        let is_failed = |event: &CompileEvent| match event {
            CompileEvent::Failed { reason, .. } => reason.contains(wanted),
            _ => false,
        };
        assert_eq!(seen.attend_until(is_failed), shared);
        assert_eq!(seen.attend().1, ["kvd_attend_any_any_8"]);
        assert_eq!(seen.backend.failure(), None);
    }
}
