//! Choices for GPUs of three generations.

use super::*;
use kvd_core::{DType, RopePairing};

fn workload(batch: u32, tokens: u32) -> StepWorkload {
    let geometry = Geometry {
        layers: 32,
        kv_heads: 8,
        head_dim_k: 128,
        head_dim_v: 128,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    StepWorkload { geometry, group: 4, batch, tokens }
}

fn of(codec: &str, limits: &GpuLimits) -> KernelPlan {
    plan_kernel(&kvd_codec::resolve_spec(codec).unwrap(), &workload(1, 131_072), limits).unwrap()
}

#[test]
fn raw_pages_take_the_bytes_of_their_rows() {
    let plan = of("raw", &GpuLimits::h200());
    let rows = 131_072.0 * 8.0 * 2.0 * 128.0 * 2.0;
    assert!((plan.page_bytes / rows - 1.0).abs() < 0.01, "{}", plan.page_bytes);
}

#[test]
fn small_codebooks_are_cached_whole_and_large_ones_as_far_as_the_slack_reaches() {
    for limits in [GpuLimits::a100(), GpuLimits::rtx4090(), GpuLimits::h100()] {
        let [k, v] = of("vecinfer-2", &limits).codebooks.map(Option::unwrap);
        assert_eq!((k.bytes, k.shared, v.shared), (1024, 256, 256), "{}", limits.name);
        assert!(k.copies > 1 && k.copies == v.copies && k.as_bytes, "{}", limits.name);
    }
    // 32 KiB per side: both need more than any slack at four blocks.
    let shared = |limits: &GpuLimits| {
        let plan = of("vecinfer-1.5", limits);
        let [k, v] = plan.codebooks.map(Option::unwrap);
        assert_eq!((k.bytes, k.entries, k.copies), (32_768, 4096, 1));
        let used = (k.shared * k.entry_bytes) + v.shared * v.entry_bytes;
        assert!(used <= plan.occupancy.shared_slack, "{}", limits.name);
        k.shared
    };
    let [ada, ampere, hopper] =
        [GpuLimits::rtx4090(), GpuLimits::a100(), GpuLimits::h100()].map(|l| shared(&l));
    assert!(0 < ada && ada < ampere && ampere < hopper && hopper < 4096, "{ada} {ampere} {hopper}");
}

#[test]
fn entropy_coded_pages_take_what_was_measured() {
    // Bits per value of docs/quality.md.
    for (preset, stored) in [("kvcomp", 3.19), ("kvcomp-channel", 2.75)] {
        let plan = of(preset, &GpuLimits::h200());
        let bits = 8.0 * plan.page_bytes / (131_072.0 * 8.0 * 256.0);
        assert!((bits - stored).abs() < 0.02, "{preset}: {bits}");
    }
}

#[test]
fn long_sequences_fill_the_gpu_and_large_batches_do_it_without_a_split() {
    let limits = GpuLimits::h100();
    let raw = kvd_codec::resolve_spec("raw").unwrap();
    let one = plan_kernel(&raw, &workload(1, 131_072), &limits).unwrap();
    assert_eq!(one.splits, one.workload.tokens.div_ceil(64).div_ceil(one.parts_per_unit));
    let units = one.splits * 8;
    let resident = limits.multiprocessors * one.occupancy.blocks;
    assert!(units <= resident && 10 * units >= 9 * resident, "{units} of {resident}");
    let many = plan_kernel(&raw, &workload(256, 4096), &limits).unwrap();
    assert_eq!((many.splits, many.parts_per_unit), (1, 64));
    let short = plan_kernel(&raw, &workload(1, 10), &limits).unwrap();
    assert_eq!((short.splits, short.parts_per_unit), (1, 1));
}

#[test]
fn warps_that_own_tokens_have_enough_under_way() {
    for (codec, side) in [("kivi-4", 1024 + 4096), ("kivi-2", 1024 + 2048)] {
        let plan = of(codec, &GpuLimits::h200());
        assert_eq!((plan.owns_tokens, plan.occupancy.blocks), (true, 3), "{codec}");
        let [have, needed] = plan.bytes_under_way();
        assert_eq!(have, f64::from(3 * 4 * side), "{codec}");
        assert!(have > needed, "{codec}: {have} of {needed}");
        assert!(plan.to_string().contains("by each of four warps its own"), "{plan}");
        // Eight rows take more registers.
        let eight = StepWorkload { group: 8, ..workload(1, 131_072) };
        let resolved = kvd_codec::resolve_spec(codec).unwrap();
        let plan = plan_kernel(&resolved, &eight, &GpuLimits::h200()).unwrap();
        assert_eq!((plan.owns_tokens, plan.occupancy.blocks), (true, 2), "{codec}");
    }
}

#[test]
fn plans_say_what_the_merge_reads() {
    let plan = of("kivi-4", &GpuLimits::h100());
    // Sums of 128 channels, a score and weights of 32 query heads for every unit of a head.
    assert_eq!((plan.merged, plan.merge_bytes), (plan.splits, f64::from(plan.splits * 32 * 520)));
    let text = plan.to_string();
    let wanted = format!("merge: {} partial results of each query row", plan.splits);
    assert!(text.contains(&wanted), "{text}");
}

#[test]
fn first_entries_are_in_registers_and_small_codebooks_whole() {
    for limits in [GpuLimits::a100(), GpuLimits::rtx4090(), GpuLimits::h100()] {
        let plan = of("vq-residual-4", &limits);
        let [keys, values] = plan.codebooks.map(Option::unwrap);
        assert_eq!((keys.registers, values.registers), (32, 32), "{}", limits.name);
        assert_eq!(
            (keys.exchange, values.exchange),
            (EntryExchange::None, EntryExchange::Shuffles(1))
        );
        assert_eq!(keys.shared, 224, "{}", limits.name);
        let text = plan.to_string();
        assert!(text.contains("the first 32 in the lanes' registers; behind them all"), "{text}");
        assert!(text.contains("through registers, by one shuffle"), "{text}");
    }
    // Kernels for eight query rows have one register to spare.
    let eight = StepWorkload { group: 8, ..workload(1, 131_072) };
    let residual = kvd_codec::resolve_spec("vq-residual-4").unwrap();
    let keys = plan_kernel(&residual, &eight, &GpuLimits::h100()).unwrap().codebooks[0].unwrap();
    assert_eq!((keys.registers, keys.shared), (0, 256));
    let small = of("k=vq(d=4,b=4,stages=2); v=vq(d=16,b=4,stages=2)", &GpuLimits::h100());
    let [keys, values] = small.codebooks.map(Option::unwrap);
    assert_eq!((keys.registers, keys.shared, values.registers, values.shared), (16, 0, 0, 16));
    let text = small.to_string();
    assert!(text.contains("16 entries each: all in the lanes' registers"), "{text}");
    assert!(text.contains("each lane reads its channel"), "{text}");
    // Tables of bytes are in registers whole, and no other kernel holds entries.
    let bytes = of("vecinfer-2-reg", &GpuLimits::h100()).codebooks[0].unwrap();
    assert_eq!((bytes.in_registers, bytes.registers), (true, 0));
    let any = of("k=vq(d=4,b=8,stages=2); v=raw", &GpuLimits::h100()).codebooks[0].unwrap();
    assert_eq!((any.registers, any.shared), (0, 256));
}

#[test]
fn channels_are_split_where_thread_blocks_would_be_idle() {
    let codec = "k=vq(d=4,b=8,stages=2,scope=group); v=vq(d=4,b=8,stages=2,scope=group)";
    let resolved = kvd_codec::resolve_spec(codec).unwrap();
    for (limits, parts) in [
        (GpuLimits::a100(), 2),
        (GpuLimits::rtx4090(), 4),
        (GpuLimits::h100(), 4),
        (GpuLimits::h200(), 4),
    ] {
        let of = |tokens| plan_kernel(&resolved, &workload(1, tokens), &limits).unwrap();
        let split = |plan: &KernelPlan| plan.codebooks[1].unwrap().channel_split;
        let (long, short) = (of(131_072), of(1024));
        assert_eq!((split(&long), split(&short)), (1, parts), "{}", limits.name);
        assert_eq!(short.codebooks[0].unwrap().channel_split, 1, "keys would be added up");
        // Runs stay as they are, and fill the GPU better.
        assert_eq!(short.splits, 16);
        assert!(8 * short.splits * parts <= limits.multiprocessors * short.occupancy.blocks);
        // Each unit has less of the codebooks, so more of their entries.
        let entries = |plan: &KernelPlan| plan.codebooks[1].unwrap().shared;
        assert!(entries(&short) >= parts * entries(&long), "{}", limits.name);
        assert!(short.to_string().contains("units share the channels"), "{short}");
    }
    // Products on tensor cores sum all channels.
    let short = plan_kernel(
        &kvd_codec::resolve_spec("cq-2").unwrap(),
        &workload(1, 64),
        &GpuLimits::h100(),
    );
    assert_eq!(short.unwrap().codebooks[1].unwrap().channel_split, 1);
}

#[test]
fn decoded_chunks_count_among_the_shared_memory_and_are_fewer_where_it_is_small() {
    let [kvcomp, innerq] = ["kvcomp", "innerq-2"].map(|codec| of(codec, &GpuLimits::h100()));
    assert_eq!((kvcomp.chunks, innerq.chunks), (4, 0));
    // Four chunks of 64 times 128 bytes, of keys and of values.
    let more = kvcomp.block.shared_bytes - innerq.block.shared_bytes;
    assert!((48 << 10..96 << 10).contains(&more), "{more}");
    assert!(kvcomp.occupancy.blocks < innerq.occupancy.blocks);
    assert!(kvcomp.to_string().contains("4 chunks of 64 tokens"));
    let large = of("kvd-2", &GpuLimits::h100());
    assert_eq!((large.chunks, large.occupancy.blocks), (2, 3));
    let small = of("kvd-2", &GpuLimits::rtx4090());
    assert!(small.chunks < 4 && small.block.shared_bytes <= 99 << 10, "{:?}", small.block);
}

#[test]
fn tiles_are_as_many_as_hide_the_latency_where_they_fit() {
    let buffers = |codec: &str, limits: GpuLimits| of(codec, &limits).buffers;
    // An H200 needs 25 KB on their way to each multiprocessor, four thread blocks of one tile more
    // than they work on: 16 KiB of f16, of two tiles together 4 KiB.
    let h200 = |codec| buffers(codec, GpuLimits::h200());
    assert_eq!(["raw", "vecinfer-2"].map(h200), [2, 3]);
    let h100 = |codec| buffers(codec, GpuLimits::h100());
    assert_eq!(["raw", "vecinfer-2"].map(h100), [2, 3]);
    // Its memory is slower: 5.5 KB.
    assert_eq!(["raw", "vecinfer-2"].map(|c| buffers(c, GpuLimits::rtx4090())), [2, 2]);
    assert_eq!(h200("kvd-2"), 2, "Huffman codes come through rings");
    // Buffers come before copies of codebooks, and leave as many thread blocks.
    for codec in ["vecinfer-2", "vecinfer-4"] {
        let plan = of(codec, &GpuLimits::h200());
        let [have, needed] = plan.bytes_under_way();
        assert!(plan.occupancy.blocks == 4 && have > 0.95 * needed, "{codec}: {have} of {needed}");
    }
}

#[test]
fn every_preset_has_a_plan_on_every_known_gpu() {
    for preset in kvd_codec::presets() {
        for name in GpuLimits::NAMES {
            let plan = of(preset.name, &GpuLimits::find_limits(name).unwrap());
            assert!(plan.occupancy.blocks >= 1 && plan.splits >= 1, "{} {name}", preset.name);
            assert!(plan.page_bytes > 0.0 && !plan.to_string().contains("NaN"));
        }
    }
}

#[test]
fn a_plan_says_where_products_are() {
    let of = |codec| of(codec, &GpuLimits::h100());
    for codec in [
        "raw",
        "fp8",
        "kivi-4",
        "kvcomp",
        "kvcomp-channel",
        "kvd-1.5",
        "vecinfer-2",
        "vecinfer-2-reg",
        "vecinfer-1.25",
        "cq-2",
        "turbo-3",
        "polar-4+2",
        "kvd-2-fast",
        "innerq-2",
    ] {
        assert_eq!(of(codec).products, [None, None], "{codec}");
    }
    let floats =
        ["vq-residual-4", "k=vq(d=12,b=8); v=vq(d=4,b=8)", "k=vq(d=4,b=13); v=vq(d=4,b=8)"];
    for codec in floats {
        let text = of(codec).to_string();
        assert!(text.contains("CUDA cores: a side has several stages"), "{text}");
    }
    let text = of("k=f32; v=f32").to_string();
    assert!(text.contains("of keys on CUDA cores: its values are neither codes"), "{text}");
    let [key, value] = of("k=uniform(b=4,g=48,axis=channel); v=uniform(b=4,axis=token)").products;
    assert!(key.is_some() && value == key, "a tile has two scales of a channel");
}

#[test]
fn a_plan_says_who_encodes() {
    let text = |codec: &str| of(codec, &GpuLimits::h100()).to_string();
    for preset in kvd_codec::presets() {
        let text = text(preset.name);
        assert!(text.contains("store: kernels write the pages"), "{}: {text}", preset.name);
    }
    assert!(text("kvcomp").contains("first blocks as well, for its Huffman tables"));
    assert!(!text("kvd-2").contains("first blocks"), "its tables are the calibration's");
    assert!(text("k=vq(d=2,b=4,stages=3); v=raw").contains("keys are vq of more stages"));
    // An override is enough: a layer that has it is the host's.
    let policy = "k=raw; v=raw; v[layer=0]=vq(d=2,b=4,stages=3)";
    assert!(text(policy).contains("values are vq of more stages"), "{}", text(policy));
}
