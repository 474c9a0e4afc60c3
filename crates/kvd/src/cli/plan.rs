//! `kvd plan`: how the CUDA kernels would be launched on a GPU, with the reasons. A prediction: not
//! yet measured on a GPU.

use clap::Args;
use kvd_codec::{presets, resolve};
use kvd_core::{DType, Geometry, RopePairing};
use kvd_cuda::{Bound, Limits, Plan, Workload, plan};
use std::fmt::Write;

/// Shapes of one layer of Llama-3.1-8B unless told otherwise.
#[derive(Args)]
pub(super) struct PlanArgs {
    /// Preset or spec text; all presets when absent.
    #[arg(long, value_name = "CODEC")]
    codec: Option<String>,
    /// One of a100, rtx4090, l40s, h100, h200, or a GPU of this machine: cuda:N.
    #[arg(long, default_value = "h100", value_name = "GPU")]
    device: String,
    /// Stored tokens of a sequence.
    #[arg(long, default_value_t = 131_072)]
    tokens: u32,
    /// Sequences.
    #[arg(long, default_value_t = 1)]
    batch: u32,
    /// KV heads.
    #[arg(long, default_value_t = 8)]
    kv_heads: u32,
    /// Query heads that share a KV head.
    #[arg(long, default_value_t = 4)]
    group: u32,
    /// Channels of a head.
    #[arg(long, default_value_t = 128)]
    head_dim: u32,
    /// Tokens of a block.
    #[arg(long, default_value_t = 64)]
    block_tokens: u32,
    /// One line per codec, as a Markdown table.
    #[arg(long)]
    table: bool,
}

/// What `kvd plan` prints.
pub(super) fn text(args: &PlanArgs) -> anyhow::Result<String> {
    let limits = limits(&args.device)?;
    let geometry = Geometry {
        layers: 1,
        kv_heads: args.kv_heads,
        head_dim_k: args.head_dim,
        head_dim_v: args.head_dim,
        block_tokens: args.block_tokens,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    geometry.validate()?;
    anyhow::ensure!(args.group > 0 && args.batch > 0, "--group and --batch are at least 1");
    let workload = Workload { geometry, group: args.group, batch: args.batch, tokens: args.tokens };
    let names = match &args.codec {
        Some(codec) => vec![codec.as_str()],
        None => presets().iter().map(|preset| preset.name).collect(),
    };
    let mut text = String::new();
    if args.table {
        text.push_str(TABLE_HEAD);
    }
    for name in names {
        let plan = plan(&resolve(name)?, &workload, &limits);
        match plan {
            None => writeln!(text, "{name}: no thread block fits {}", limits.name)?,
            Some(plan) if args.table => write_row(&mut text, name, &plan)?,
            Some(plan) => writeln!(text, "== {name}\n{plan}")?,
        }
    }
    Ok(text)
}

/// A GPU by the name of its kind, or one that is there.
fn limits(name: &str) -> anyhow::Result<Limits> {
    if let Some(limits) = Limits::named(name) {
        return Ok(limits);
    }
    let known = Limits::NAMES.join(", ");
    let Some(Ok(gpu)) = name.strip_prefix("cuda:").map(str::parse::<kvd_cuda::GpuName>) else {
        anyhow::bail!("--device {name:?} is none of {known} and not cuda:N");
    };
    Ok(gpu.find(&kvd_cuda::devices()?)?.limits)
}

const TABLE_HEAD: &str = "\
| codec | MB read | roofline, us | x f16 | predicted, us | x f16 | by | instructions per value: \
fit | counted | buffers | thread blocks per SM | units per head | \
codebook entries in shared memory, k / v |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

fn write_row(text: &mut String, name: &str, plan: &Plan) -> std::fmt::Result {
    let entries = plan.codebooks.map(|books| {
        books.map_or("–".to_owned(), |books| match (books.in_registers, books.copies) {
            (true, _) => format!("{} in registers", books.entries),
            (_, 1) if books.registers > 0 => {
                format!("{} in registers, {} of {}", books.registers, books.shared, books.entries)
            }
            (_, 1) => format!("{} of {}", books.shared, books.entries),
            (_, copies) => format!("{} of {}, {copies} times", books.shared, books.entries),
        })
    });
    let none = || "–".to_owned();
    let by = plan.predicted().map_or("–", |(_, bound)| match bound {
        Bound::Bytes => "bytes",
        Bound::Instructions => "instructions",
        Bound::Pipe(pipe) => pipe,
        Bound::Latency => "latency",
    });
    let predicted = plan.predicted().map(|(seconds, _)| seconds);
    let counted = plan.counted.map_or_else(none, |counted| {
        format!("{:.1}{}", counted.per_value, if counted.is_all { "" } else { "+" })
    });
    let times = if plan.limits.has_speeds() {
        format!(
            "{:.1} | {:.2} | {} | {} | {by} | {:.1}",
            plan.roofline_seconds() * 1e6,
            plan.raw_seconds() / plan.roofline_seconds(),
            predicted.map_or_else(none, |seconds| format!("{:.1}", seconds * 1e6)),
            predicted.map_or_else(none, |seconds| format!("{:.2}", plan.raw_seconds() / seconds)),
            plan.instructions_per_value(),
        )
    } else {
        "– | – | – | – | – | –".to_owned()
    };
    writeln!(
        text,
        "| {name} | {:.1} | {times} | {counted} | {} | {} | {} | {} / {} |",
        (plan.page_bytes + plan.other_bytes) / 1e6,
        plan.buffers,
        plan.occupancy.blocks,
        plan.splits,
        entries[0],
        entries[1]
    )
}
