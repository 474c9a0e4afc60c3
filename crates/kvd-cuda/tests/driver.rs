//! The driver's memory calls over a made-up `libcuda.so` whose memory is this process's: that they
//! come with the right arguments and in the right order, not what a GPU makes of them. A process
//! has one driver, so the work is done in a process of its own.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "a test may fail, and says a skip")]
#![cfg(target_os = "linux")]

#[path = "driver/room.rs"]
mod room;

use kvd_codec::ModelCodec;
use kvd_compute::{
    AppendSteps, IncomingRows, LoadPlan, PageBackend, PlanPart, RawTarget, RegionBackend,
    RegionHandle, RegionRows, Source,
};
use kvd_core::{Coded, DType, ErrorCode, Extent, Geometry, LayerIndex, ModelId, RopePairing};
use kvd_cuda::{
    CudaBackend, CudaDriver, CudaOpenError, CudaOptions, DeviceCopy, DeviceStream, Driver,
    DriverError, EventId, GraphId, GraphNode, KernelLaunch, PinnedRange, probe_devices,
};
use kvd_testkit::gpu_worker;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Runs an ignored test in a process with the made-up driver; one of its calls may fail.
fn with_driver(test: &str, fail: Option<&str>) {
    let dir = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_libcuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(dir.path().join("libcuda.so")).arg(source);
    cc.args((fail == Some("no graphs")).then_some("-DWITHOUT_GRAPHS"));
    match cc.output() {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(_) => return eprintln!("SKIP driver: no C compiler to make a driver with"),
    }
    // By the name that a worker's process looks for.
    let library = dir.path().join("libcuda.so");
    std::os::unix::fs::symlink(&library, dir.path().join("libcuda.so.1")).unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", "--ignored", test, "--nocapture"]);
    process.envs(fail.map(|call| ("FAKE_FAIL", call)));
    let output = process.env("LD_LIBRARY_PATH", dir.path()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
}

#[test]
fn memory_of_this_and_of_other_processes_is_opened_copied_and_given_back() {
    with_driver("memory", None);
}

#[test]
fn memory_of_a_worker_process_comes_as_a_descriptor_and_both_write_there() {
    if Command::new("python3").arg("--version").output().is_err() {
        return eprintln!("SKIP driver: no python3 to be a worker");
    }
    with_driver("worker_process", None);
}

#[test]
#[ignore = "what another test starts as a process"]
fn worker_process() {
    let mut backend = backend().unwrap();
    gpu_worker::exchange_messages(&mut backend, gpu_worker::MemoryKind::Fd);
    assert_eq!(backend.failure(), None);
}

#[test]
fn rows_go_through_pinned_memory_and_come_back_in_order() {
    with_driver("rows", None);
}

#[test]
fn a_failed_event_sticks_and_no_pinned_memory_is_said_at_the_start() {
    for call in ["cuMemHostAlloc", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"] {
        with_driver("failures", Some(call));
    }
}

#[test]
fn a_device_whose_work_does_not_end_is_given_up_and_nothing_waits_for_it() {
    with_driver("hang", Some("hang"));
}

#[test]
fn graphs_run_their_kernels_stage_by_stage_with_what_they_were_changed_to() {
    with_driver("graphs", None);
}

#[test]
fn graphs_that_are_refused_are_no_failure_and_leave_nothing() {
    let refused = ["cuGraphAddKernelNode", "cuGraphInstantiate", "cuGraphExecKernelNodeSetParams"];
    // The upload finds no memory.
    for call in refused.into_iter().chain(["cuGraphUpload", "no graphs"]) {
        with_driver("refusals", Some(call));
    }
    for call in ["cuGraphCreate", "cuGraphLaunch"] {
        with_driver("failed_graph", Some(call));
    }
}

#[test]
fn no_memory_for_kernels_is_said_when_they_are_loaded_and_is_no_failure() {
    with_driver("room::no_room", Some("cuFuncLoad"));
}

#[test]
fn no_memory_for_a_launch_is_no_failure() {
    for test in ["room::no_launch", "room::no_stage"] {
        with_driver(test, Some("no room to launch"));
    }
}

/// A backend without kernels, with pieces of 4 KiB.
fn backend() -> Result<CudaBackend, CudaOpenError> {
    backend_of(&[])
}

fn backend_of(kernels: &[&[u8]]) -> Result<CudaBackend, CudaOpenError> {
    let options = CudaOptions {
        arena_bytes: 4 << 20,
        scratch_bytes: 1 << 20,
        table_bytes: 1 << 20,
        staging_bytes: 4 << 10,
        threads: 1,
        graphs: 4,
        kernel_timeout: Duration::from_millis(20),
    };
    let driver = CudaDriver::open_gpu(probe_devices().unwrap().remove(0).unwrap())?;
    CudaBackend::open_backend(Box::new(driver), kernels, options)
}

fn geometry() -> Geometry {
    Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 64,
        head_dim_v: 64,
        block_tokens: 64,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    }
}

/// Writes 64 tokens to a slot, which differ by slot, and says where they are.
fn write(backend: &mut CudaBackend, slot: u64) -> Result<PlanPart, ErrorCode> {
    let len = geometry().raw_layout(64).size_bytes();
    let extent = Extent { offset: slot * len, len };
    let value = |i: u64| ((i + 1) * (slot + 3)) as f32;
    let bytes: Vec<u8> = (0..64 * 2 * 64).flat_map(|i| value(i).to_le_bytes()).collect();
    let rows = IncomingRows { tokens: 64, k: bytes.clone().into(), v: bytes.into() };
    let to = RawTarget { extent, capacity_rows: 64, first_row: 0 };
    backend.write(ModelId(1), &rows, 0, 64, to).map_err(|error| error.code())?;
    let source = Source::Raw { extent, capacity_rows: 64, first_row: 0 };
    Ok(PlanPart { first_token: 0, rows: 64, source })
}

fn load(backend: &mut CudaBackend, part: PlanPart) -> Result<Vec<u8>, ErrorCode> {
    let (dtype, parts) = (DType::F32, vec![part]);
    let plan = LoadPlan { model: ModelId(1), layer: LayerIndex(0), dtype, parts };
    backend.load(&plan).map(|rows| rows.v).map_err(|error| error.code())
}

fn register(backend: &mut CudaBackend) {
    let codec = ModelCodec::new(geometry(), kvd_codec::resolve_spec("raw").unwrap(), None).unwrap();
    backend.register(ModelId(1), codec);
}

#[test]
#[ignore = "what another test starts as a process"]
fn rows() {
    let mut backend = backend().unwrap();
    register(&mut backend);
    // 16 slots of 128 KiB: every slot of pinned memory is used many times.
    let parts: Vec<PlanPart> = (0..16).map(|slot| write(&mut backend, slot).unwrap()).collect();
    for (slot, part) in parts.into_iter().enumerate().rev() {
        let loaded = load(&mut backend, part).unwrap();
        let values = loaded.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        assert!(values.eq((0..64 * 2 * 64).map(|i| ((i + 1) * (slot + 3)) as f32)), "{slot}");
    }
    assert_eq!(backend.failure(), None);
}

#[test]
#[ignore = "what another test starts as a process"]
fn failures() {
    let call = std::env::var("FAKE_FAIL").unwrap();
    let mut backend = match backend() {
        Ok(backend) => backend,
        Err(error) => {
            assert!(error.to_string().contains("no 4096 bytes of pinned memory"), "{error}");
            return assert_eq!(call, "cuMemHostAlloc");
        }
    };
    register(&mut backend);
    let written = write(&mut backend, 0).and_then(|part| load(&mut backend, part));
    assert_eq!(written, Err(ErrorCode::DeviceFailed), "{call}");
    assert!(backend.failure().unwrap().contains(&call), "{:?}", backend.failure());
    assert_eq!(write(&mut backend, 1).err(), Some(ErrorCode::DeviceFailed));
}

#[test]
#[ignore = "what another test starts as a process"]
fn hang() {
    let mut backend = backend().unwrap();
    register(&mut backend);
    let start = Instant::now();
    let written = write(&mut backend, 0).and_then(|part| load(&mut backend, part));
    assert_eq!(written, Err(ErrorCode::DeviceFailed));
    assert!(start.elapsed() >= Duration::from_millis(20), "{:?}", start.elapsed());
    let failure = backend.failure().unwrap();
    assert!(failure.contains("within 20 ms (device.kernel_timeout_ms)"), "{failure}");
    assert_eq!(write(&mut backend, 1).err(), Some(ErrorCode::DeviceFailed));
    // The made-up driver aborts where what is given back would wait.
    drop(backend);
}

#[test]
#[ignore = "what another test starts as a process"]
fn memory() {
    let gpu = probe_devices().unwrap().remove(0).unwrap();
    let mut driver = CudaDriver::open_gpu(gpu).unwrap();
    let own = driver.allocate_device(512).unwrap();
    put(&mut driver, own, b"queries");
    let copy = |from, to, bytes| DeviceCopy { from: own + from, to: own + to, bytes };
    driver.copy_on_device(&[copy(0, 256, 7)]).unwrap();
    assert_eq!(read(&mut driver, own + 256, 7), b"queries");
    driver.copy_on_device(&[copy(0, 300, 4), copy(9, 9, 0), copy(257, 280, 3)]).unwrap();
    assert_eq!(
        [read(&mut driver, own + 300, 4), read(&mut driver, own + 280, 3)].concat(),
        b"queruer"
    );
    driver.copy_on_device(&[copy(0, 1, 0), copy(3, 3, 0)]).unwrap();
    ipc(&mut driver);
    event(&mut driver);
    descriptor(&mut driver);
    driver.free_device(own);
    // Open mappings are closed with the driver.
    let mut memory = vec![0u8; 64];
    driver.open_shared(handle(&mut memory, 64), 64).unwrap();
    drop(driver);
    assert_eq!(memory[0], b'C');
}

/// Waits for an event, which has not happened when it is asked for first.
fn finish(driver: &mut CudaDriver, event: EventId) {
    assert!(!driver.is_done(event).unwrap(), "the made-up driver takes a while");
    assert!(driver.is_done(event).unwrap());
}

/// Copies to the device, and has what comes after wait for it.
fn put(driver: &mut CudaDriver, to: u64, bytes: &[u8]) {
    let len = bytes.len() as u64;
    let (memory, event) = (driver.allocate_pinned(len).unwrap(), driver.create_event().unwrap());
    driver.write_pinned(memory, 0, bytes);
    driver.copy_to_device(to, PinnedRange { memory, start: 0, bytes: len }).unwrap();
    driver.record_event(event, DeviceStream::Copy).unwrap();
    driver.wait_event(DeviceStream::Compute, event).unwrap();
    finish(driver, event);
    driver.destroy_event(event);
    driver.free_pinned(memory);
}

fn read(driver: &mut CudaDriver, from: u64, bytes: usize) -> Vec<u8> {
    let len = bytes as u64;
    let (memory, event) = (driver.allocate_pinned(len).unwrap(), driver.create_event().unwrap());
    driver.copy_to_host(from, PinnedRange { memory, start: 0, bytes: len }).unwrap();
    driver.record_event(event, DeviceStream::Compute).unwrap();
    let mut to = vec![0; bytes];
    driver.read_pinned(memory, 0, &mut to);
    assert!(to.iter().all(|byte| *byte == 0), "the made-up driver copies late");
    finish(driver, event);
    driver.read_pinned(memory, 0, &mut to);
    driver.destroy_event(event);
    driver.free_pinned(memory);
    to
}

/// A handle as the made-up driver gives them.
fn handle(memory: &mut [u8], bytes: u64) -> RegionHandle {
    let mut handle = [0; 64];
    handle[..8].copy_from_slice(&(memory.as_mut_ptr() as u64).to_ne_bytes());
    handle[8..16].copy_from_slice(&bytes.to_ne_bytes());
    RegionHandle::CudaIpc(handle)
}

fn refused(result: Result<u64, DriverError>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, DriverError::Refused { .. }), "{error}");
    error.to_string()
}

fn ipc(driver: &mut CudaDriver) {
    let mut peer = vec![0u8; 4096];
    let at = driver.open_shared(handle(&mut peer, 4096), 4096).unwrap();
    put(driver, at + 100, b"out");
    assert_eq!(read(driver, at + 100, 3), b"out");
    driver.close_shared(at);
    assert_eq!((peer[0], &peer[100..103]), (b'C', &b"out"[..]));
    peer[..2].fill(0);
    for _ in 0..2 {
        assert_eq!(driver.open_shared(handle(&mut peer, 4096), 4096), Ok(at));
    }
    // Each holder gives its own back at once, and the last one the memory.
    driver.close_shared(at);
    assert_eq!(peer[..2], [0, 1]);
    put(driver, at + 100, b"yet");
    assert_eq!((peer[0], read(driver, at + 100, 3)), (0, b"yet".to_vec()));
    driver.close_shared(at);
    assert_eq!(peer[..2], [b'C', 2]);
    driver.close_shared(at);
    assert_eq!(peer[1], 2, "nobody holds it any more");
    let short = refused(driver.open_shared(handle(&mut peer, 4095), 4096));
    assert!(short.contains("it has 4095 bytes, not 4096"), "{short}");
    let unknown = refused(driver.open_shared(RegionHandle::CudaIpc([0; 64]), 64));
    assert!(unknown.contains("CUDA_ERROR_INVALID_VALUE (1)"), "{unknown}");
}

fn event(driver: &mut CudaDriver) {
    let (event, handle) = driver.share_event().unwrap();
    assert_eq!(handle[8..], [0xE7; 56]);
    driver.record_event(event, DeviceStream::Compute).unwrap();
    finish(driver, event);
    driver.destroy_event(event);
    // Regions come and go: their events take the place of those before.
    for _ in 0..1000 {
        let (again, _) = driver.share_event().unwrap();
        assert_eq!(again, event);
        driver.destroy_event(again);
    }
    let missing = driver.find_kernel("kvd_queries").unwrap_err();
    assert!(matches!(missing, DriverError::NoKernel(_)), "{missing}");
}

/// Mappings of the file, and descriptors of this process.
fn held(path: &Path) -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = maps.lines().filter(|line| line.ends_with(path.to_str().unwrap())).count();
    (mapped, std::fs::read_dir("/proc/self/fd").unwrap().count())
}

fn descriptor(driver: &mut CudaDriver) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap().join("allocation");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    file.set_len(8192).unwrap();
    let before = held(&path);
    let open = || RegionHandle::CudaFd(OwnedFd::from(file.try_clone().unwrap()));
    let at = driver.open_shared(open(), 8192).unwrap();
    put(driver, at + 8000, b"out");
    assert_eq!(read(driver, at + 8000, 3), b"out");
    // The mapping keeps the allocation; neither descriptor nor handle stays.
    assert_eq!(held(&path), (1, before.1));
    driver.close_shared(at);
    assert_eq!(held(&path), before);
    assert_eq!(&std::fs::read(&path).unwrap()[8000..8003], b"out");
    for bytes in [8192 + 4096, 100] {
        let over = refused(driver.open_shared(open(), bytes));
        assert!(over.contains("cuMemMap refuses"), "{over}");
        assert_eq!(held(&path), before, "nothing stays of what was refused");
    }
}

/// Kernels that append a digit to the number at `to`, with so much shared memory.
fn digits(to: u64, digits: [u64; 4], shared_bytes: u32) -> [(u32, &'static str, [u64; 2], u32); 4] {
    let kernels = [(2, "first"), (5, "second"), (5, "third"), (6, "first")];
    let mut digits = digits.into_iter();
    kernels.map(|(stage, kernel)| (stage, kernel, [to, digits.next().unwrap()], shared_bytes))
}

fn launch<'a>(node: &'a (u32, &'static str, [u64; 2], u32)) -> KernelLaunch<'a> {
    let (_, kernel, words, shared_bytes) = node;
    let parameters = bytemuck::bytes_of(words);
    KernelLaunch { kernel, blocks: 3, threads: 128, shared_bytes: *shared_bytes, parameters }
}

fn build(
    driver: &mut CudaDriver,
    nodes: &[(u32, &'static str, [u64; 2], u32)],
) -> Result<GraphId, DriverError> {
    let nodes = nodes.iter().map(|node| GraphNode { stage: node.0, launch: launch(node) });
    driver.build_graph(&nodes.collect::<Vec<_>>())
}

/// A driver with kernels, and a number of zero on it.
fn with_number() -> (CudaDriver, u64) {
    let mut driver = CudaDriver::open_gpu(probe_devices().unwrap().remove(0).unwrap()).unwrap();
    driver.load_image(b"kernels").unwrap();
    let number = driver.allocate_device(8).unwrap();
    put(&mut driver, number, &[0; 8]);
    (driver, number)
}

fn number(driver: &mut CudaDriver, at: u64) -> u64 {
    u64::from_ne_bytes(read(driver, at, 8).try_into().unwrap())
}

#[test]
#[ignore = "what another test starts as a process"]
fn graphs() {
    let (mut driver, at) = with_number();
    let nodes = digits(at, [1, 2, 3, 4], 64 << 10);
    let graph = build(&mut driver, &nodes).unwrap();
    assert_eq!(number(&mut driver, at), 0);
    // The made-up driver turns a stage's kernels round.
    driver.launch_graph(graph).unwrap();
    assert_eq!(number(&mut driver, at), 1324);
    // A launch of less shared memory does not take away what the graph needs.
    let less = digits(at, [5, 6, 7, 8], 50 << 10);
    driver.launch_kernel(launch(&less[0])).unwrap();
    driver.update_graph(graph, 2, launch(&less[2])).unwrap();
    driver.launch_graph(graph).unwrap();
    assert_eq!(number(&mut driver, at), 132_451_724);
    driver.update_graph(graph, 3, launch(&less[3])).unwrap();
    let wrong = driver.update_graph(graph, 4, launch(&nodes[3])).unwrap_err();
    assert!(matches!(wrong, DriverError::Refused { .. }), "{wrong}");
    for _ in 0..100 {
        let other = build(&mut driver, &nodes[1..]).unwrap();
        assert_ne!(other, graph);
        assert!(other.0 < 2, "{other:?}");
        driver.destroy_graph(other);
    }
    put(&mut driver, at, &[0; 8]);
    driver.launch_graph(graph).unwrap();
    assert_eq!(number(&mut driver, at), 1728);
    driver.free_device(at);
}

#[test]
#[ignore = "what another test starts as a process"]
fn refusals() {
    let call = std::env::var("FAKE_FAIL").unwrap();
    let (mut driver, at) = with_number();
    let nodes = digits(at, [1, 2, 3, 4], 0);
    let error = match build(&mut driver, &nodes) {
        Ok(graph) => driver.update_graph(graph, 0, launch(&nodes[0])).unwrap_err(),
        Err(error) => error,
    };
    assert!(matches!(error, DriverError::Refused { .. }), "{error}");
    let wanted = if call == "no graphs" { "the driver lacks cuGraphLaunch" } else { &call };
    assert!(error.to_string().contains(wanted), "{error}");
    for node in &nodes {
        driver.launch_kernel(launch(node)).unwrap();
    }
    assert_eq!(number(&mut driver, at), 1234);
    driver.free_device(at);
}

#[test]
#[ignore = "what another test starts as a process"]
fn failed_graph() {
    let failed = std::env::var("FAKE_FAIL").unwrap();
    let (mut driver, at) = with_number();
    let built = build(&mut driver, &digits(at, [1, 2, 3, 4], 0));
    let error = built.and_then(|graph| driver.launch_graph(graph)).unwrap_err();
    assert!(matches!(error, DriverError::Failed { call, .. } if call == failed), "{error}");
}
