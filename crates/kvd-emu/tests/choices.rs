//! Launches follow the plan: units, codebooks in shared memory, thread blocks that a multiprocessor
//! holds. These tests build tables only: nothing is run.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::late::TENSOR;
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_codec::resolve_spec;
use kvd_compute::{AttendPlan, PlanPart};
use kvd_core::{Coded, DType, ErrorCode, Geometry, Side};
use kvd_cuda::{
    AttendLaunch, AttendTables, BlockResources, EntryExchange, GpuLimits, KernelPlan, LatePairs,
    LaunchChoices, LayerShapes, PlanError, StepWorkload, TableOptions, plan_kernel,
};
use std::sync::Arc;

const BLOCK_TOKENS: u32 = 64;

fn shapes_of_a_model() -> Geometry {
    Geometry { block_tokens: BLOCK_TOKENS, ..geometry(128, 128, DType::F16) }
}

fn stored(codec: &str) -> Stored {
    let value = |side: Side, head: usize, token: usize, channel: usize| {
        noise(((side.index() * 2 + head) * 4096 + token) * 512 + channel)
    };
    let layout = Layout { pages: vec![BLOCK_TOKENS as usize], window: 0 };
    Stored::new(&shapes_of_a_model(), codec, &layout, value)
}

/// A decode step over so many sequences, whose blocks are all the stored one.
fn step(stored: &Stored, group: u32, batch: u32, tokens: u32) -> AttendPlan {
    let mut plan = Ask::last(group as usize, tokens).plan(stored, |i| noise(99 + i));
    let part = |block| PlanPart { first_token: block * BLOCK_TOKENS, ..stored.parts[0].clone() };
    let parts: Arc<[PlanPart]> = (0..tokens / BLOCK_TOKENS).map(part).collect();
    plan.queries[0].parts = parts;
    plan.queries = vec![plan.queries[0].clone(); batch as usize];
    plan.q = vec![0; plan.q.len() * batch as usize].into();
    plan
}

/// The launch that the backend would make where no kernel was compiled late, and the plan for it.
fn launched(
    stored: &Stored,
    ask: &AttendPlan,
    limits: &GpuLimits,
) -> (Vec<AttendLaunch>, LaunchChoices) {
    launched_with(stored, ask, (limits, LatePairs::NONE))
}

/// The launch where these late kernels were compiled.
fn launched_with(
    stored: &Stored,
    ask: &AttendPlan,
    of: (&GpuLimits, LatePairs),
) -> (Vec<AttendLaunch>, LaunchChoices) {
    let kv_heads = stored.codec.geometry().kv_heads;
    let rows = LaunchChoices::largest_unit_rows(ask, kv_heads);
    let choices = LaunchChoices::for_layer(&stored.codec, ask.layer, rows, of).unwrap();
    let shapes = LayerShapes::new(&stored.codec, ask.layer, choices.codebook_rooms());
    let header = |offset: u64| stored.headers.get(&offset).copied();
    let options = choices.table_options(ask, kv_heads);
    let tables = AttendTables::new(ask, &stored.codec, &shapes, &header, options).unwrap();
    (tables.launches, choices)
}

fn planned(codec: &str, (group, batch, tokens): (u32, u32, u32), limits: &GpuLimits) -> KernelPlan {
    let workload = StepWorkload { geometry: shapes_of_a_model(), group, batch, tokens };
    plan_kernel(&resolve_spec(codec).unwrap(), &workload, limits).unwrap()
}

/// Steps of a codec on every GPU are launched as they were planned, once all kernels that can be
/// compiled late are there; gives plans and launches.
fn follows(codec: &str) -> Vec<(KernelPlan, AttendLaunch)> {
    let stored = stored(codec);
    let mut all = Vec::new();
    for limits in GpuLimits::NAMES.map(|name| GpuLimits::find_limits(name).unwrap()) {
        for (group, batch, tokens) in [(4, 1, 32_768), (1, 2, 4096), (8, 3, 8192), (16, 1, 64)] {
            let what = format!("{codec}, {}, {group} x {batch}", limits.name);
            let planned = planned(codec, (group, batch, tokens), &limits);
            let ask = step(&stored, group, batch, tokens);
            let (launches, choices) = launched_with(&stored, &ask, (&limits, LatePairs::ALL));
            let [launch] = &launches[..] else { panic!("{what}: one kind of page") };
            let heads = 2 * batch * group.div_ceil(8);
            let parts = planned.codebooks[1].map_or(1, |books| books.channel_split);
            assert_eq!(launch.units.len() as u32, heads * planned.splits * parts, "{what}");
            assert!(launch.units.iter().all(|unit| unit.value.parts == parts), "{what}");
            let pages = launch.units.iter().map(|unit| unit.pages).max();
            assert_eq!(pages, Some(planned.parts_per_unit), "{what}");
            assert_eq!(choices.codebook_rooms(), planned.codebook_rooms(), "{what}");
            assert_eq!(launch.chunks, planned.chunks, "{what}");
            // Tables that take less than expected leave as many thread blocks, or more.
            let block =
                BlockResources { shared_bytes: launch.shared_bytes as u32, ..planned.block };
            let blocks = block.fit_multiprocessor(&limits).unwrap().blocks;
            assert!(blocks >= planned.occupancy.blocks, "{what}: {blocks} thread blocks");
            assert_eq!(launch.buffers, planned.buffers, "{what}, {}", launch.kernel);
            all.push((planned, launch.clone()));
        }
    }
    all
}

#[test]
fn a_step_is_launched_as_it_was_planned() {
    for preset in kvd_codec::presets() {
        follows(preset.name);
    }
}

#[test]
fn a_pair_that_is_compiled_late_is_launched_as_it_was_planned() {
    for (keys, values, _, _, codecs) in TENSOR {
        let name = format!("tensor_{}_{}_", keys.name(), values.name());
        for (planned, launch) in codecs.iter().flat_map(|codec| follows(codec)) {
            assert!(planned.is_late && launch.kernel.contains(&name), "{}", launch.kernel);
        }
    }
}

#[test]
fn while_a_pair_has_no_kernel_of_its_own_choices_are_for_the_shared_one() {
    let stored = stored("k=vq(d=2,b=4); v=uniform(b=2,axis=token)");
    for limits in ["h100", "rtx4090"] {
        let limits = GpuLimits::find_limits(limits).unwrap();
        let ask = step(&stored, 4, 1, 32_768);
        let [shared, late] = [LatePairs::NONE, LatePairs::ALL]
            .map(|late| launched_with(&stored, &ask, (&limits, late)));
        assert_eq!(shared.0[0].kernel, "kvd_attend_any_any_8");
        assert_eq!(late.0[0].kernel, "kvd_attend_tensor_vq_uniform_4");
        // It looks entries up as halves, all sixteen of two channels each.
        let key = shared.0[0].units[0].key;
        assert_eq!((key.cached, key.table_bytes), (16, 64));
        // Its thread blocks take fewer registers, so that more fit.
        let blocks = |of: &LaunchChoices| of.resident / limits.multiprocessors;
        assert_eq!((blocks(&shared.1), blocks(&late.1)), (4, 3), "{}", limits.name);
        assert!(shared.0[0].units.len() > late.0[0].units.len());
    }
}

#[test]
fn as_many_thread_blocks_of_the_shared_kernel_fit_as_units_are_cut_for() {
    for (_, _, huffman, _, codecs) in TENSOR {
        let registers = if huffman { 168 } else { 128 };
        for codec in codecs {
            let stored = stored(codec);
            for limits in GpuLimits::NAMES.map(|name| GpuLimits::find_limits(name).unwrap()) {
                for (group, tokens) in [(1, 64), (4, 32_768), (8, 8192)] {
                    let ask = step(&stored, group, 1, tokens);
                    let (launches, choices) = launched(&stored, &ask, &limits);
                    let [launch] = &launches[..] else { panic!("{codec}: one kind of page") };
                    assert!(launch.kernel.contains("any_any"), "{}", launch.kernel);
                    let block =
                        BlockResources { registers, shared_bytes: launch.shared_bytes as u32 };
                    let blocks =
                        limits.multiprocessors * block.fit_multiprocessor(&limits).unwrap().blocks;
                    let what = format!("{codec}, {}, {group} rows", limits.name);
                    assert!(blocks >= choices.resident, "{what}: {blocks}, {}", choices.resident);
                }
            }
        }
    }
}

#[test]
fn presets_have_kernels_with_their_shapes_as_constants() {
    let kernels = [
        ("kivi-4", "kivi4"),
        ("kivi-2", "kivi2"),
        ("innerq-2", "innerq2"),
        ("vecinfer-4", "vecinfer4"),
        ("vecinfer-2", "vecinfer2"),
        ("vecinfer-2-reg", "vecinfer2reg"),
        ("polar-4+4", "polar44"),
        ("turbo-4", "turbo4"),
        ("kvd-2-fast", "kvd2fast"),
    ];
    for (preset, kernel) in kernels {
        let limits = GpuLimits::find_limits("h200").unwrap();
        let (launches, _) = launched(&stored(preset), &step(&stored(preset), 4, 1, 4096), &limits);
        assert_eq!(launches[0].kernel, format!("kvd_attend_{kernel}_4"), "{preset}");
        let registers = |group| planned(preset, (group, 1, 4096), &limits).block.registers;
        // Where a warp owns tokens it has more of them.
        let wanted = if preset.starts_with("kivi") { [168, 255] } else { [128, 168] };
        assert_eq!([4, 8].map(registers), wanted, "{preset}");
    }
}

#[test]
fn codebooks_of_floats_are_kept_where_it_was_planned() {
    let grouped = "k=vq(d=4,b=6,stages=2,scope=group); v=vq(d=4,b=8,stages=2,scope=group)";
    let (mut splits, mut registers) = (Vec::new(), Vec::new());
    for (planned, launch) in ["vq-residual-4", grouped].into_iter().flat_map(follows) {
        assert!(launch.kernel.contains("vqfloat"), "{}", launch.kernel);
        for unit in &launch.units {
            let books = planned.codebooks.iter().flatten();
            for (books, shape) in books.zip([unit.key, unit.value]) {
                assert_eq!(shape.held, books.registers, "{planned}");
                assert_eq!(shape.cached, books.registers + books.shared, "{planned}");
                assert_eq!(shape.table_bytes, books.shared_bytes(), "{planned}");
                let whole = books.exchange != EntryExchange::SharedMemory;
                assert_eq!(shape.entry_pairs > 0, whole, "{planned}");
                registers.push(shape.held);
            }
            splits.push(unit.value.parts);
        }
    }
    // Each is chosen by some plan and not by another.
    assert!(splits.contains(&1) && splits.iter().any(|parts| *parts > 1), "{splits:?}");
    assert!(registers.contains(&0) && registers.contains(&32), "{registers:?}");
}

#[test]
fn codebooks_of_bytes_stand_in_shared_memory_as_often_as_it_was_planned() {
    for (planned, launch) in ["vecinfer-2", "cq-2"].into_iter().flat_map(follows) {
        let of_bytes = ["kvd_attend_vq_vq_", "kvd_attend_vecinfer2_"];
        assert!(of_bytes.iter().any(|name| launch.kernel.starts_with(name)), "{}", launch.kernel);
        for unit in &launch.units {
            let books = planned.codebooks.iter().flatten();
            for (books, shape) in books.zip([unit.key, unit.value]) {
                assert_eq!(shape.entry_count, books.shared, "{planned}");
                assert_eq!(1 << shape.entry_copies, books.copies, "{planned}");
            }
        }
    }
}

#[test]
fn heads_that_are_stored_differently_take_what_fits_all() {
    let limits = GpuLimits::h100();
    let one = |codec: &str| {
        let stored = stored(codec);
        launched(&stored, &step(&stored, 4, 1, 8192), &limits).1
    };
    let [innerq, kvd] = ["innerq-2", "kvd-2"].map(one);
    assert!(kvd.resident < innerq.resident);
    let [key, value] = Side::BOTH.map(|side| resolve_spec("kvd-2").unwrap().side(side).to_string());
    let mixed =
        format!("{}; k[head=1]={key}; v[head=1]={value}", resolve_spec("innerq-2").unwrap());
    let spec = resolve_spec(&mixed).unwrap();
    let geometry = shapes_of_a_model();
    let calibration = common::store::calibration(&geometry, &spec);
    let codec = kvd_codec::ModelCodec::new(geometry, spec, calibration.as_ref()).unwrap();
    let layer = kvd_core::LayerIndex(0);
    let both = LaunchChoices::for_layer(&codec, layer, 4, (&limits, LatePairs::NONE)).unwrap();
    assert_eq!(both.resident, kvd.resident);
}

#[test]
fn headers_that_say_other_lengths_than_pages_have_are_refused() {
    let mut stored = stored("kivi-4");
    let offsets: Vec<u64> = stored.headers.keys().copied().collect();
    let (first, longer) = (*offsets.iter().min().unwrap(), BLOCK_TOKENS as u16 + 1);
    let refusal = |stored: &Stored| {
        let ask = step(stored, 4, 1, BLOCK_TOKENS);
        let shapes = LayerShapes::new(&stored.codec, ask.layer, [0usize; 2]);
        let header = |offset: u64| stored.headers.get(&offset).copied();
        let (shared, channel_split) = (common::run::SHARED, 1);
        let options = TableOptions {
            parts_per_unit: 1,
            shared,
            chunks: None,
            channel_split,
            late: LatePairs::NONE,
        };
        AttendTables::new(&ask, &stored.codec, &shapes, &header, options).unwrap_err()
    };
    stored.headers.get_mut(&first).unwrap().tokens = longer;
    let error = refusal(&stored);
    assert!(matches!(error, PlanError::Lengths { keys, .. } if keys == longer), "{error}");
    stored.headers.values_mut().for_each(|header| header.tokens = longer);
    let error = refusal(&stored);
    let wanted = PlanError::TooLong { offset: first, tokens: longer, max: BLOCK_TOKENS };
    assert_eq!((error.code(), error), (ErrorCode::CorruptPage, wanted));
}
