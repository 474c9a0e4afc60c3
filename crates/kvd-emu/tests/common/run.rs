//! A plan through tables, launches and merge, as a device would.

use super::Stored;
use bytemuck::Zeroable;
use kvd_compute::{AttendPlan, Attended};
use kvd_cuda::{
    AttendLaunch, AttendParameters, AttendTables, CodebookRoom, LatePairs, LayerShapes,
    MergeParameters, MergedResults, SharedMemory, TableOptions, merge_shared_bytes,
};
use kvd_emu::{EmulatorMemory, LaunchGrid, ThreadOrder, launch_kernel};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

/// Shared memory of an H100.
pub(crate) const SHARED: SharedMemory =
    SharedMemory { block: 227 << 10, multiprocessor: 228 << 10, under_way: 18 << 10 };

/// `GAIN_STAGE` of `tile_scheduler.cuh`.
const GAIN_STAGE: usize = 48;

thread_local! {
    /// Buffers of the next launches: 2, 3 and 4 take turns, so that every test meets each.
    static BUFFERS: Cell<u32> = const { Cell::new(2) };
    /// Kernels of attention that ran since somebody asked.
    static KERNELS: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// The kernels that have answered this thread since it last asked, but for those that merge.
pub(crate) fn kernels() -> Vec<String> {
    KERNELS.take().into_iter().collect()
}

/// Answers `plan` with the kernels, codebooks in shared memory.
pub(crate) fn run(
    stored: &Stored,
    plan: &AttendPlan,
    parts_per_unit: usize,
    order: ThreadOrder,
) -> Result<Attended, String> {
    run_with(stored, plan, parts_per_unit, usize::MAX, order)
}

/// Runs a plan with so much shared memory for the codebooks of a side.
pub(crate) fn run_with(
    stored: &Stored,
    plan: &AttendPlan,
    parts_per_unit: usize,
    table_bytes: usize,
    order: ThreadOrder,
) -> Result<Attended, String> {
    let rooms = [CodebookRoom::from(table_bytes); 2];
    run_split(stored, plan, (parts_per_unit, 1), rooms, order)
}

/// Runs a plan with codebooks kept in `rooms` and the channels of values split.
pub(crate) fn run_split(
    stored: &Stored,
    plan: &AttendPlan,
    (parts_per_unit, channel_split): (usize, u32),
    rooms: [CodebookRoom; 2],
    order: ThreadOrder,
) -> Result<Attended, String> {
    let options = options(parts_per_unit, channel_split);
    run_as(stored, plan, (options, rooms), take_turns, order).map(|(answer, _)| answer)
}

/// Nothing compiled late.
fn options(parts_per_unit: usize, channel_split: u32) -> TableOptions {
    let late = LatePairs::NONE;
    TableOptions { parts_per_unit, shared: SHARED, chunks: None, channel_split, late }
}

/// Runs a plan where the kernels of all pairs with products on tensor cores have been compiled
/// since.
pub(crate) fn run_tensor(
    stored: &Stored,
    plan: &AttendPlan,
    parts_per_unit: usize,
    order: ThreadOrder,
) -> Result<Attended, String> {
    let options = TableOptions { late: LatePairs::ALL, ..options(parts_per_unit, 1) };
    run_as(stored, plan, (options, [CodebookRoom::from(3000); 2]), take_turns, order)
        .map(|(answer, _)| answer)
}

/// Runs a plan where the kernel of a pair on CUDA cores, `late`, has been compiled since: it is
/// launched in the place of the one that all pairs share, with that one's tables.
pub(crate) fn run_late(
    stored: &Stored,
    plan: &AttendPlan,
    (parts_per_unit, late): (usize, &str),
    order: ThreadOrder,
) -> Result<Attended, String> {
    let options = options(parts_per_unit, 1);
    let change = |launched: &mut AttendLaunch| {
        take_turns(launched);
        if launched.kernel.ends_with("any_any_8") {
            let most = launched.units.iter().map(|unit| unit.rows).max().unwrap_or(1);
            let rows = [1, 4, 8].into_iter().find(|rows| most <= *rows).unwrap_or(8);
            launched.kernel = format!("kvd_attend_{late}_{rows}");
        }
    };
    run_as(stored, plan, (options, [CodebookRoom::from(3000); 2]), change, order)
        .map(|(answer, _)| answer)
}

/// Runs a plan in another kernel than the one meant for it.
pub(crate) fn run_in(
    stored: &Stored,
    plan: &AttendPlan,
    kernel: &str,
    order: ThreadOrder,
) -> Result<Attended, String> {
    let change = |launched: &mut AttendLaunch| launched.kernel = kernel.to_owned();
    run_as(stored, plan, (options(2, 1), [CodebookRoom::from(0); 2]), change, order)
        .map(|(answer, _)| answer)
}

/// Runs a plan with so much shared memory for a thread block, and so many chunks decoded together
/// where they fit; returns how much of it was taken.
pub(crate) fn run_within(
    stored: &Stored,
    plan: &AttendPlan,
    (shared, chunks): (SharedMemory, Option<u32>),
    order: ThreadOrder,
) -> Result<(Attended, usize), String> {
    let options = TableOptions { shared, chunks, ..options(4, 1) };
    run_as(stored, plan, (options, [0.into(); 2]), |_| {}, order)
}

fn run_as(
    stored: &Stored,
    plan: &AttendPlan,
    (options, rooms): (TableOptions, [CodebookRoom; 2]),
    change: impl Fn(&mut AttendLaunch),
    order: ThreadOrder,
) -> Result<(Attended, usize), String> {
    let header = |offset: u64| stored.headers.get(&offset).copied();
    let shapes = LayerShapes::new(&stored.codec, plan.layer, rooms);
    let mut tables = AttendTables::new(plan, &stored.codec, &shapes, &header, options)
        .map_err(|error| error.to_string())?;
    tables.launches.iter_mut().for_each(change);
    let merged = run_tables(stored, &shapes, &tables, order)?;
    let taken = tables.launches.iter().map(|launched| launched.shared_bytes).max();
    Ok((merged.to_attended(plan, &stored.codec), taken.unwrap_or(0)))
}

/// The parameters of a launch, but for the addresses.
pub(crate) fn parameters(tables: &AttendTables, launched: &AttendLaunch) -> AttendParameters {
    AttendParameters {
        key_stage: launched.key_stage,
        value_stage: launched.value_stage,
        key_table: launched.key_table,
        value_table: launched.value_table,
        soft_cap: tables.soft_cap,
        chunks: launched.chunks,
        key_chunk: launched.key_chunk,
        value_chunk: launched.value_chunk,
        buffers: launched.buffers,
        ..AttendParameters::zeroed()
    }
}

/// Launches tables and merges what comes of them.
pub(crate) fn run_tables(
    stored: &Stored,
    shapes: &LayerShapes,
    tables: &AttendTables,
    order: ThreadOrder,
) -> Result<MergedResults, String> {
    let dim = stored.codec.geometry().head_dim_v as usize;
    let arena = EmulatorMemory::copy_from(&stored.arena);
    let of_shapes = EmulatorMemory::copy_from(&shapes.tables);
    let pages = EmulatorMemory::copy_from(bytemuck::cast_slice(&tables.pages));
    let queries = EmulatorMemory::copy_from(bytemuck::cast_slice(&tables.queries));
    let offsets = EmulatorMemory::copy_from(bytemuck::cast_slice(&tables.offsets));
    let out = EmulatorMemory::new(tables.partials * dim * 4);
    let stats = EmulatorMemory::new(tables.partials * 8);
    for launched in &tables.launches {
        let units = EmulatorMemory::copy_from(bytemuck::cast_slice(&launched.units));
        let parameters = AttendParameters {
            arena: arena.address(),
            tables: of_shapes.address(),
            pages: pages.address(),
            units: units.address(),
            queries: queries.address(),
            offsets: offsets.address(),
            out: out.address(),
            stats: stats.address(),
            ..parameters(tables, launched)
        };
        let grid = LaunchGrid {
            kernel: &launched.kernel,
            blocks: launched.units.len() as u32,
            shared_bytes: launched.shared_bytes,
            order,
        };
        // SAFETY: every address is of memory that lives on, of the size the tables were made for.
        unsafe { launch_kernel(grid, bytemuck::bytes_of(&parameters))? };
        KERNELS.with_borrow_mut(|ran| ran.insert(launched.kernel.clone()));
    }
    merge(tables, [&out, &stats], dim, order)
}

/// Gives a launch another number of buffers, where there is room for them.
fn take_turns(launched: &mut AttendLaunch) {
    let buffers = BUFFERS.with(|turn| turn.replace(2 + (turn.get() - 1) % 3));
    let buffer = (launched.key_stage + launched.value_stage) as usize + GAIN_STAGE;
    let without = launched.shared_bytes - launched.buffers as usize * buffer;
    let shared_bytes = without + buffers as usize * buffer;
    // Those with chunks read Huffman codes: always two.
    if launched.chunks == 0 && shared_bytes <= SHARED.block {
        (launched.buffers, launched.shared_bytes) = (buffers, shared_bytes);
    }
}

/// Adds up the partial results of a plan's rows.
fn merge(
    tables: &AttendTables,
    [out, stats]: [&EmulatorMemory; 2],
    dim: usize,
    order: ThreadOrder,
) -> Result<MergedResults, String> {
    let rows = tables.ends.len();
    let ends = EmulatorMemory::copy_from(bytemuck::cast_slice(&tables.ends));
    let partials = EmulatorMemory::copy_from(bytemuck::cast_slice(&tables.order));
    let sums = EmulatorMemory::new(rows * 2 * dim * 4);
    let results = EmulatorMemory::new(rows * 3 * 4);
    let parameters = MergeParameters {
        out: out.address(),
        stats: stats.address(),
        ends: ends.address(),
        partials: partials.address(),
        sums: sums.address(),
        results: results.address(),
        dim: dim as u32,
        unused: 0,
    };
    let shared_bytes = merge_shared_bytes(dim);
    let grid = LaunchGrid { kernel: "kvd_merge", blocks: rows as u32, shared_bytes, order };
    // SAFETY: as above.
    unsafe { launch_kernel(grid, bytemuck::bytes_of(&parameters))? };
    Ok(MergedResults {
        sums: bytemuck::cast_slice(sums.bytes()).to_vec(),
        results: bytemuck::cast_slice(results.bytes()).to_vec(),
    })
}
