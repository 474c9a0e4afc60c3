//! The CUDA backend over the CPU lane: the conformance suite of every backend, and faults of the
//! device.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

#[path = "backend/cases.rs"]
mod cases;
#[path = "common/compile.rs"]
mod compile;
#[path = "common/driver.rs"]
mod driver;
#[path = "common/streams.rs"]
mod streams;
#[path = "backend/tables.rs"]
mod tables;

use driver::shared::{Kind, Shared};
use driver::{EmuDriver, Fail, Planted, Watch};
use kvd_codec::ModelCodec;
use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, Backend, CpuBackend, CpuOptions, EncodeSource,
    IncomingRows, LoadPlan, PageBackend, PlanPart, RawTarget, RegionBackend, RegionHandle, Source,
};
use kvd_core::{Coded, DType, ErrorCode, Extent, LayerIndex, ModelId, RopePairing, Side};
use kvd_cuda::{
    CudaBackend, CudaOpenError, CudaOptions, DriverError, GpuLimits, StepWorkload, plan_kernel,
};
use kvd_emu::{ThreadOrder, is_available};
use kvd_testkit::conformance::{self, BackendUnderTest};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
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

/// A backend over the CPU lane, and what its driver sees.
fn open(order: ThreadOrder, pace: Pace, options: CudaOptions) -> (CudaBackend, Arc<Mutex<Watch>>) {
    let (driver, watch) = EmuDriver::new(order, pace);
    (CudaBackend::open_backend(Box::new(driver), &[b"kernels"], options).unwrap(), watch)
}

/// A backend over the emulator: the index names its thread order and then its pace.
struct Emulated {
    backend: CudaBackend,
    watch: Arc<Mutex<Watch>>,
}

impl BackendUnderTest for Emulated {
    const ROUNDS: usize = Pace::EACH.len();

    fn open_backend(index: usize) -> Option<Self> {
        let order = ThreadOrder::EACH[index % ThreadOrder::EACH.len()];
        let pace = Pace::EACH[index / ThreadOrder::EACH.len() % Pace::EACH.len()];
        is_available()
            .then(|| open(order, pace, OPTIONS))
            .map(|(backend, watch)| Self { backend, watch })
    }

    fn backend_mut(&mut self) -> &mut dyn Backend {
        &mut self.backend
    }

    fn close_backend(self, codec: &str) {
        drop(self.backend);
        let watch = self.watch.lock();
        assert!(watch.launches > 0 && watch.live == 0, "{codec}: {watch:?}");
    }
}

kvd_testkit::mount_conformance!(Emulated);

/// A backend with a model and some rows in a raw slot, and a part that names them.
fn with_rows(options: CudaOptions) -> (CudaBackend, Arc<Mutex<Watch>>, PlanPart) {
    with_rows_at(Pace::Late, options)
}

fn with_rows_at(pace: Pace, options: CudaOptions) -> (CudaBackend, Arc<Mutex<Watch>>, PlanPart) {
    with_codec("kivi-4", |i| i as f32 / 7.0, pace, options)
}

fn with_codec(
    text: &str,
    value: impl Fn(u32) -> f32,
    pace: Pace,
    options: CudaOptions,
) -> (CudaBackend, Arc<Mutex<Watch>>, PlanPart) {
    let (mut backend, watch) = open(ThreadOrder::Ascending, pace, options);
    let part = write_rows(&mut backend, conformance::make_codec(text, RopePairing::Half), value);
    (backend, watch, part)
}

/// A model with eight rows in a raw slot, and a part that names them.
fn write_rows(
    backend: &mut CudaBackend,
    codec: ModelCodec,
    value: impl Fn(u32) -> f32,
) -> PlanPart {
    let layout = codec.geometry().raw_layout(8);
    backend.register(ModelId(1), codec);
    let extent = Extent { offset: 4096, len: layout.size_bytes() };
    let bytes: Vec<u8> = (0..8 * 2 * 64).flat_map(|i| value(i).to_le_bytes()).collect();
    let rows = IncomingRows { tokens: 8, k: bytes.clone().into(), v: bytes.into() };
    let to = RawTarget { extent, capacity_rows: 8, first_row: 0 };
    backend.write(ModelId(1), &rows, 0, 8, to).unwrap();
    let source = Source::Raw { extent, capacity_rows: 8, first_row: 0 };
    PlanPart { first_token: 0, rows: 8, source }
}

fn load(backend: &mut CudaBackend, part: &PlanPart) -> Result<Vec<u8>, ErrorCode> {
    let parts = vec![part.clone()];
    let plan = LoadPlan { model: ModelId(1), layer: LayerIndex(0), dtype: DType::F32, parts };
    backend.load(&plan).map(|rows| rows.k).map_err(|error| error.code())
}

#[test]
fn rows_come_back_as_they_were_and_can_be_copied() {
    if !is_available() {
        return;
    }
    let (mut backend, _, part) = with_rows(OPTIONS);
    let loaded = load(&mut backend, &part).unwrap();
    assert_eq!(f32::from_le_bytes(*loaded[4 * 1023..].first_chunk().unwrap()), 1023.0 / 7.0);
    let layout = conformance::make_codec("kivi-4", RopePairing::Half).geometry().raw_layout(20);
    let extent = Extent { offset: 65_536, len: layout.size_bytes() };
    let to = RawTarget { extent, capacity_rows: 20, first_row: 3 };
    backend.copy(ModelId(1), LayerIndex(0), &part.source, 8, to).unwrap();
    let source = Source::Raw { extent, capacity_rows: 20, first_row: 3 };
    assert_eq!(load(&mut backend, &PlanPart { source, ..part }).unwrap(), loaded);
}

#[test]
fn a_gpu_without_the_memory_is_not_opened_and_nothing_leaks() {
    for (fail, wanted) in [
        (Fail::Memory, DriverError::OutOfMemory(1_048_576)),
        (Fail::Pinned, DriverError::OutOfPinned(65_536)),
    ] {
        let (driver, watch) = EmuDriver::new(ThreadOrder::Ascending, Pace::Late);
        watch.lock().fail = fail;
        let error = CudaBackend::open_backend(Box::new(driver), &[], OPTIONS).err().unwrap();
        assert!(error.to_string().contains(&wanted.to_string()), "{error}");
        assert!(matches!(error, CudaOpenError::Driver(error) if error == wanted));
        assert_eq!(watch.lock().live, 0);
    }
}

#[test]
fn once_open_a_backend_takes_no_more_memory() {
    if !is_available() {
        return;
    }
    let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
    for text in ["kivi-4", "kvcomp", "kvd-2"] {
        let options = CudaOptions { graphs: 0, ..OPTIONS };
        let (mut backend, watch, part) = with_codec(text, value, Pace::Late, options);
        let live = watch.lock().live;
        watch.lock().fail = Fail::Memory;
        // Tables of the layer, first Huffman tables, and those of another model in their place.
        for _ in 0..3 {
            let plan = conformance::attend_plan(vec![part.clone()], 1);
            backend.attend(&plan).unwrap();
            backend.encode(ModelId(1), LayerIndex(0), &blocks(&part, 3)).unwrap();
            backend.register(ModelId(1), conformance::make_codec(text, RopePairing::Half));
        }
        assert_eq!((watch.lock().live, backend.failure()), (live, None), "{text}");
        drop(backend);
        assert_eq!(watch.lock().live, 0);
    }
}

/// Thread blocks of the attention kernel over twelve parts of two heads, on two multiprocessors,
/// and what is planned of them.
fn units_on_two_multiprocessors(text: &str) -> (u32, u32) {
    let limits = GpuLimits { multiprocessors: 2, ..GpuLimits::h100() };
    let (driver, watch) = EmuDriver::new(ThreadOrder::Ascending, Pace::Late);
    let driver = Box::new(driver.with_limits(limits.clone()));
    let mut backend = CudaBackend::open_backend(driver, &[b"kernels"], OPTIONS).unwrap();
    let codec = conformance::make_codec(text, RopePairing::Half);
    let (spec, geometry) = (codec.spec().clone(), codec.geometry().clone());
    let part = write_rows(&mut backend, codec, |i| i as f32 / 7.0);
    let ask = conformance::attend_plan(vec![part; 12], 1);
    backend.attend(&ask).unwrap();
    let watch = watch.lock();
    let at = watch.kernels.iter().position(|kernel| kernel.starts_with("kvd_attend_")).unwrap();
    // Query rows as the heads of one token: as many for the kernels.
    let (group, tokens) = (2 * ask.queries[0].n_q, 12 * geometry.block_tokens);
    let workload = StepWorkload { geometry, group, batch: 1, tokens };
    (watch.blocks[at], 2 * plan_kernel(&spec, &workload, &limits).unwrap().splits)
}

#[test]
fn thread_blocks_are_as_many_as_the_codec_s_kernels_leave_room_for() {
    if !is_available() {
        return;
    }
    let [turbo, kivi, kvd] = ["turbo-4", "kivi-4", "kvd-2"].map(units_on_two_multiprocessors);
    assert_eq!((turbo.0, kivi.0, kvd.0), (turbo.1, kivi.1, kvd.1));
    // Three of a kernel for any shape to a multiprocessor, two whose warps own tokens for eight
    // rows, or two that decode four chunks of each side.
    assert_eq!((turbo.0, kivi.0, kvd.0), (6, 4, 4));
}

#[test]
fn memory_of_a_worker_is_read_and_written_inside_its_bounds_alone() {
    let (mut backend, watch) = open(ThreadOrder::Ascending, Pace::Late, OPTIONS);
    let before = watch.lock().live;
    let worker = [[7; 256], [9; 256]].map(|bytes| Shared::of(Kind::Ipc, &bytes));
    let regions = worker.each_ref().map(|of| backend.open_region(of.handle(), 256).unwrap().region);
    backend.write_region(regions[0], 250, b"answer").unwrap();
    let mut bytes = [0; 8];
    backend.read_region(regions[0], 248, &mut bytes).unwrap();
    assert_eq!(&bytes, b"\x07\x07answer");
    backend.read_region(regions[1], 248, &mut bytes).unwrap();
    assert_eq!(bytes, [9; 8]);
    for (offset, len) in [(249, 8), (256, 1), (u64::MAX, 1), (u64::MAX - 3, 8)] {
        let mut bytes = vec![0; len];
        let error = backend.read_region(regions[0], offset, &mut bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("not inside the 256"), "{error}");
        backend.write_region(regions[0], offset, &bytes).unwrap_err();
    }
    backend.close_region(regions[0]);
    backend.close_region(regions[0]);
    let closed = backend.read_region(regions[0], 0, &mut bytes).unwrap_err();
    assert!(closed.to_string().contains("no device memory 0 is open"), "{closed}");
    // The other one, and its event.
    assert_eq!(watch.lock().live, before + 2);
    // A worker whose handle means nothing is refused, and the device goes on.
    let error = backend.open_region(RegionHandle::CudaIpc([0; 64]), 256).unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidArgument);
    assert!(error.to_string().contains("CUDA_ERROR_INVALID_VALUE"), "{error}");
    assert_eq!(backend.failure(), None);
    backend.read_region(regions[1], 0, &mut bytes).unwrap();
    drop(backend);
    assert_eq!(watch.lock().live, 0, "what is open is closed with the device");
}

#[test]
fn a_batch_over_the_scratch_memory_is_answered_in_halves() {
    if !is_available() {
        return;
    }
    let (mut large, _, part) = with_rows(OPTIONS);
    let plan = conformance::attend_plan(vec![part.clone()], 6);
    let whole = large.attend(&plan).unwrap();
    let (mut small, watch, part) = with_rows(CudaOptions { scratch_bytes: 24 << 10, ..OPTIONS });
    let halves = small.attend(&conformance::attend_plan(vec![part], 6)).unwrap();
    assert_eq!((halves.out, halves.lse), (whole.out, whole.lse));
    assert!(watch.lock().launches > 2);
    let (mut tiny, _, part) = with_rows(CudaOptions { scratch_bytes: 256, ..OPTIONS });
    let error = tiny.attend(&conformance::attend_plan(vec![part], 6)).unwrap_err();
    assert_eq!(error.code(), ErrorCode::LimitExceeded);
}

/// The rows of [`with_rows`] as blocks to encode.
fn blocks(part: &PlanPart, count: usize) -> Vec<EncodeSource> {
    let Source::Raw { extent, capacity_rows, first_row } = part.source else { unreachable!() };
    vec![EncodeSource { extent, capacity_rows, first_row, rows: 8 }; count]
}

/// Whether a layer's block is measured, of the first 256.
fn is_measured(index: usize) -> bool {
    index == 0 || index.is_power_of_two()
}

#[test]
fn rows_that_kernels_encode_stay_on_the_device() {
    if !is_available() {
        return;
    }
    let (mut backend, watch, part) = with_rows(OPTIONS);
    let blocks = blocks(&part, 20);
    let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks).unwrap();
    // Six are measured, on the host; of the others it reads four headers.
    let rows = 8 * 2 * (64 + 64) * 4;
    assert_eq!(watch.lock().read_bytes, 6 * rows + 14 * 4 * 32);
    let mut sizes = Vec::new();
    for (index, pages) in encoded.into_iter().enumerate() {
        let pages = pages.unwrap();
        let measured = is_measured(index);
        assert_eq!((pages.held.is_none(), pages.sampled.is_some()), (measured, measured));
        assert_eq!(pages.packed.parts.total_bytes(), pages.size_bytes());
        assert_eq!(pages.packed.sides.iter().sum::<u64>(), pages.size_bytes());
        let extent = Extent { offset: 65_536 + 8192 * index as u64, len: pages.size_bytes() };
        backend.move_pages(&pages, extent);
        let source = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
        let loaded = load(&mut backend, &PlanPart { source, ..part.clone() });
        sizes.push((pages.packed.parts, loaded.unwrap()));
        if index == 18 {
            break;
        }
    }
    assert!(sizes.windows(2).all(|pair| pair[0] == pair[1]), "whoever encodes, pages are the same");
    assert_eq!(backend.failure(), None);
}

/// Bytes of the counts that the first tables of a layer are built from.
fn counters(text: &str) -> usize {
    let codec = conformance::make_codec(text, RopePairing::Half);
    let of_side = |side| codec.counted_codes(LayerIndex(0), side, 0).map(|(_, codes)| codes);
    let codes: usize = Side::BOTH.into_iter().filter_map(of_side).sum();
    if codes > 0 { 8 * (1 + codes) } else { 0 }
}

#[test]
fn pages_whose_size_the_kernel_finds_stay_on_the_device() {
    if !is_available() {
        return;
    }
    for text in
        ["kvcomp", "kvd-2", "kvd-2-fast", "k=polar(a=4,r=4,g=8)/huffman; v=grid(rate=3)/huffman"]
    {
        let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
        let (mut backend, watch, part) = with_codec(text, value, Pace::Late, OPTIONS);
        let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks(&part, 6)).unwrap();
        // Four blocks that are measured, and four headers of each of the others; of a layer's first
        // Huffman tables the counts of their codes.
        let wanted = 4 * 8 * 2 * (64 + 64) * 4 + 2 * 4 * 32 + counters(text);
        assert_eq!(watch.lock().read_bytes, wanted, "{text}");
        let mut sizes = Vec::new();
        for (index, pages) in encoded.into_iter().enumerate() {
            let pages = pages.unwrap();
            assert_eq!(pages.held.is_none(), is_measured(index), "{text}");
            assert_eq!(
                (pages.fallback_pages, pages.packed.parts.total_bytes()),
                (0, pages.size_bytes())
            );
            let extent = Extent { offset: 65_536 + 8192 * index as u64, len: pages.size_bytes() };
            let copies = watch.lock().copies;
            backend.move_pages(&pages, extent);
            // Four pages with room between them go at once.
            assert_eq!(watch.lock().copies - copies, usize::from(index == 3), "{text}");
            let source = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
            let loaded = load(&mut backend, &PlanPart { source, ..part.clone() });
            sizes.push((pages.packed.parts, pages.page_ends, loaded.unwrap()));
            if index == 3 {
                break;
            }
        }
        assert_eq!(sizes[0], sizes[3], "{text}: whoever encodes, pages are the same");
        assert_eq!(backend.failure(), None);
    }
}

#[test]
fn pages_that_are_no_longer_held_cannot_be_placed() {
    if !is_available() {
        return;
    }
    let (mut backend, _, part) = with_rows(OPTIONS);
    let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks(&part, 4)).unwrap();
    let pages = encoded[3].as_ref().unwrap();
    backend.attend(&conformance::attend_plan(vec![part.clone()], 1)).unwrap();
    assert_eq!(backend.failure(), None);
    backend.move_pages(pages, Extent { offset: 65_536, len: pages.size_bytes() });
    assert!(backend.failure().unwrap().contains("no longer held"));
    assert_eq!(load(&mut backend, &part), Err(ErrorCode::DeviceFailed));
}

#[test]
fn blocks_that_scratch_memory_has_no_room_for_are_encoded_on_the_host() {
    if !is_available() {
        return;
    }
    let (mut backend, _, part) = with_rows(CudaOptions { scratch_bytes: 16 << 10, ..OPTIONS });
    let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks(&part, 8)).unwrap();
    let held: Vec<bool> =
        encoded.iter().map(|pages| pages.as_ref().unwrap().held.is_some()).collect();
    assert!(held.iter().any(|held| *held) && held.iter().skip(1).any(|held| !held), "{held:?}");
}

#[test]
fn an_error_that_sticks_ends_every_call_and_nothing_leaks() {
    if !is_available() {
        return;
    }
    for fail in [Fail::Launch, Fail::Write, Fail::Later] {
        let (mut backend, watch, part) = with_rows(OPTIONS);
        watch.lock().fail = fail;
        let error = backend.attend(&conformance::attend_plan(vec![part.clone()], 1)).unwrap_err();
        assert_eq!(error.code(), ErrorCode::DeviceFailed, "{error}");
        let why = backend.failure().unwrap();
        assert!(why.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{why}");
        assert_eq!(load(&mut backend, &part), Err(ErrorCode::DeviceFailed));
        drop(backend);
        let watch = watch.lock();
        assert_eq!((watch.calls_after_failure, watch.live), (0, 0), "{fail:?}");
    }
}

#[test]
fn work_that_takes_a_while_is_waited_for_and_a_device_that_hangs_has_failed() {
    let timeout = Duration::from_millis(40);
    let (mut backend, watch, part) = with_rows(CudaOptions { kernel_timeout: timeout, ..OPTIONS });
    let rows = load(&mut backend, &part).unwrap();
    let until = Instant::now() + timeout / 4;
    watch.lock().until = Some(until);
    assert_eq!(load(&mut backend, &part), Ok(rows));
    assert!(Instant::now() >= until);
    watch.lock().fail = Fail::Hang;
    let start = Instant::now();
    assert_eq!(load(&mut backend, &part), Err(ErrorCode::DeviceFailed));
    assert!(start.elapsed() >= timeout, "{:?}", start.elapsed());
    let why = backend.failure().unwrap();
    assert!(why.contains("within 40 ms (device.kernel_timeout_ms)"), "{why}");
    assert_eq!(load(&mut backend, &part), Err(ErrorCode::DeviceFailed));
    drop(backend);
    assert_eq!(watch.lock().calls_after_failure, 0);
}

#[test]
fn one_attend_is_one_copy_to_the_device_and_one_wait() {
    if !is_available() {
        return;
    }
    let (mut backend, watch, part) = with_rows(OPTIONS);
    let plan = conformance::attend_plan(vec![part], 3);
    let first = backend.attend(&plan).unwrap();
    let count = |watch: &Watch| (watch.writes, watch.launches, watch.waits, watch.read_bytes);
    let before = count(&watch.lock());
    let again = backend.attend(&plan).unwrap();
    assert_eq!((again.out, again.lse), (first.out, first.lse));
    let after = count(&watch.lock());
    // Block table, queries and units at once; attention and the merge; sums and results at once.
    assert_eq!((after.0 - before.0, after.1 - before.1, after.2 - before.2), (1, 2, 1));
}

/// Rows written, encoded, placed and read, with copies to the device where others read before.
fn work(backend: &mut CudaBackend, part: &PlanPart) -> Result<Vec<u8>, ErrorCode> {
    // So many that the tables of the attend go to where pages may not have been copied from yet.
    let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks(part, 21));
    let encoded = encoded.map_err(|error| error.code())?;
    let others = encoded.iter().enumerate().filter(|(index, _)| !is_measured(*index));
    for (slot, (_, pages)) in (0..).zip(others) {
        let pages = pages.as_ref().map_err(|error| error.code())?;
        assert!(pages.held.is_some(), "the device encodes all that are not measured");
        let extent = Extent { offset: 65_536 + (slot << 14), len: pages.size_bytes() };
        backend.move_pages(pages, extent);
    }
    let pages = encoded[3].as_ref().map_err(|error| error.code())?;
    let extent = Extent { offset: 65_536, len: pages.size_bytes() };
    let plan = conformance::attend_plan(vec![part.clone()], 2);
    backend.attend(&plan).map_err(|error| error.code())?;
    let source = Source::Pages { extent, ends: pages.page_ends.clone(), first_row: 0 };
    load(backend, &PlanPart { source, ..part.clone() })
}

#[test]
fn whatever_the_device_does_first_and_however_small_its_slots_answers_are_the_same() {
    if !is_available() {
        return;
    }
    let mut answers = Vec::new();
    for pace in Pace::EACH {
        for staging_bytes in [64, 1 << 10, 1 << 20] {
            let options = CudaOptions { staging_bytes, ..OPTIONS };
            let (mut backend, watch, part) = with_rows_at(pace, options);
            let rows = load(&mut backend, &part).unwrap();
            answers.push((rows, work(&mut backend, &part).unwrap()));
            drop(backend);
            assert_eq!(watch.lock().live, 0);
        }
    }
    assert!(answers.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn a_wait_that_is_missing_is_noticed() {
    if !is_available() {
        return;
    }
    let small = CudaOptions { staging_bytes: 64, ..OPTIONS };
    for (planted, pace, options, wanted) in [
        (Planted::KernelsDoNotWait, Pace::EagerKernels, OPTIONS, "before a copy that was asked"),
        (Planted::KernelsDoNotWait, Pace::Late, OPTIONS, "before a copy that was asked"),
        (Planted::CopiesDoNotWait, Pace::EagerCopies, OPTIONS, "overwrites what work before"),
        (Planted::HostDoesNotWait, Pace::Late, OPTIONS, "read before their event"),
        (Planted::HostDoesNotWait, Pace::Late, small, "filled before its last copy"),
    ] {
        let (mut backend, watch, part) = with_rows_at(pace, options);
        watch.lock().planted = planted;
        if planted == Planted::HostDoesNotWait && options.staging_bytes == 64 {
            let rows = IncomingRows { tokens: 8, k: vec![0; 4096].into(), v: vec![0; 4096].into() };
            let Source::Raw { extent, capacity_rows, first_row } = part.source else { return };
            let to = RawTarget { extent, capacity_rows, first_row };
            let _ = backend.write(ModelId(1), &rows, 0, 8, to);
        } else {
            assert_eq!(work(&mut backend, &part), Err(ErrorCode::DeviceFailed), "{planted:?}");
        }
        let complaints = watch.lock().complaints.clone();
        assert!(complaints.iter().any(|text| text.contains(wanted)), "{planted:?}: {complaints:?}");
    }
}
