//! `kvd plan`: how the CUDA kernels would be launched on a GPU, with the reasons. A prediction: not
//! yet measured on a GPU.

use super::bench::flags::count;
use super::table::{Column, Labels, table};
use super::{CliError, text_args};
use crate::bench::limits;
use clap::Args;
use kvd_codec::{presets, resolve_spec};
use kvd_core::{DType, Geometry, RopePairing};
use kvd_cuda::{GpuLimits, KernelPlan, StepBound, StepWorkload, plan_kernel};
use std::fmt::Write;

/// Shapes of one layer of Llama-3.1-8B unless told otherwise.
#[derive(Args)]
pub(super) struct PlanArgs {
    /// Preset or spec text; all presets when absent.
    #[arg(long, value_name = "CODEC", value_parser = text_args::codec_text)]
    codec: Option<String>,
    /// One of a100, rtx4090, l40s, h100, h200, or a GPU of this machine: cuda:N.
    #[arg(long, default_value = "h100", value_name = "GPU")]
    device: String,
    /// Stored tokens of a sequence.
    #[arg(long, default_value_t = 131_072, value_parser = count(limits::CONTEXT_MAX))]
    tokens: u32,
    /// Sequences.
    #[arg(long, default_value_t = 1, value_parser = count(4096_u32))]
    batch: u32,
    /// KV heads.
    #[arg(long, default_value_t = 8)]
    kv_heads: u32,
    /// Query heads that share a KV head.
    #[arg(long, default_value_t = 4, value_parser = count(1024_u32))]
    group: u32,
    /// Channels of a head.
    #[arg(long, default_value_t = 128)]
    head_dim: u32,
    /// Tokens of a block.
    #[arg(long, default_value_t = 64)]
    block_tokens: u32,
    /// One line per codec.
    #[arg(long)]
    table: bool,
    /// Every figure, as a Markdown table.
    #[arg(long, requires = "table")]
    wide: bool,
}

/// What `kvd plan` prints.
pub(super) fn text(args: &PlanArgs) -> Result<String, CliError> {
    let limits = limits_of(&args.device)?;
    let geometry = Geometry {
        layers: 1,
        kv_heads: args.kv_heads,
        head_dim_k: args.head_dim,
        head_dim_v: args.head_dim,
        block_tokens: args.block_tokens,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    geometry.validate_fields().map_err(|error| CliError::Usage(error.to_string()))?;
    let workload =
        StepWorkload { geometry, group: args.group, batch: args.batch, tokens: args.tokens };
    let names = match &args.codec {
        Some(codec) => vec![codec.as_str()],
        None => presets().iter().map(|preset| preset.name).collect(),
    };
    let mut plans = Vec::new();
    for name in names {
        let codec = resolve_spec(name).map_err(|error| CliError::Usage(error.to_string()))?;
        plans.push((name, plan_kernel(&codec, &workload, &limits)));
    }
    Ok(written(args, &limits, &plans).map_err(anyhow::Error::from)?)
}

/// The plans in the form that was asked for.
fn written(
    args: &PlanArgs,
    limits: &GpuLimits,
    plans: &[(&str, Option<KernelPlan>)],
) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    if args.table && !args.wide {
        return Ok(narrow_table(plans));
    }
    if args.table {
        text.push_str(TABLE_HEAD);
    }
    for (name, plan) in plans {
        match plan {
            None => writeln!(text, "{name}: no thread block fits {}", limits.name)?,
            Some(plan) if args.table => write_row(&mut text, name, plan)?,
            Some(plan) => writeln!(text, "== {name}\n{plan}")?,
        }
    }
    Ok(text)
}

/// What matters of each plan, for a terminal.
fn narrow_table(plans: &[(&str, Option<KernelPlan>)]) -> String {
    let none = || "-".to_owned();
    let rows = plans.iter().map(|(name, plan)| (*name, plan.as_ref()));
    let cells = |cell: &dyn Fn(&KernelPlan) -> Option<String>| -> Vec<String> {
        rows.clone().map(|(_, plan)| plan.and_then(cell).unwrap_or_else(none)).collect()
    };
    let speeds = |plan: &KernelPlan| plan.limits.has_speeds();
    let us = |seconds: f64| format!("{:.1}", seconds * 1e6);
    let numbers = Column::numbers;
    let names = rows.clone().map(|(name, _)| name.to_owned());
    let Labels { cells: labels, legend } = Labels::new(names, CODEC_COLUMNS);
    let columns = [
        Column::text("codec", labels),
        numbers("MB read", cells(&|p| Some(format!("{:.1}", read_bytes(p) / 1e6)))),
        numbers("roofline us", cells(&|p| speeds(p).then(|| us(p.roofline_seconds())))),
        numbers("predicted us", cells(&|p| Some(us(p.predict_seconds()?.0)))),
        numbers(
            "x f16",
            cells(&|p| Some(format!("{:.2}", p.raw_seconds() / p.predict_seconds()?.0))),
        ),
        Column::text("bound by", cells(&|p| Some(bound_text(p).to_owned()))),
        numbers("blocks/SM", cells(&|p| Some(p.occupancy.blocks.to_string()))),
        numbers("units/head", cells(&|p| Some(p.splits.to_string()))),
    ];
    table(&columns)
        + &legend
        + "\nPredictions of one layer. x f16: how much sooner than with f16 rows. --wide has more, \
           as Markdown.\n"
}

/// Longest codec in a table.
const CODEC_COLUMNS: usize = 24;

fn read_bytes(plan: &KernelPlan) -> f64 {
    plan.page_bytes + plan.other_bytes
}

fn bound_text(plan: &KernelPlan) -> &str {
    plan.predict_seconds().map_or("-", |(_, bound)| match bound {
        StepBound::Bytes => "bytes",
        StepBound::Instructions => "instructions",
        StepBound::Pipe(pipe) => pipe,
        StepBound::Latency => "latency",
    })
}

/// A GPU by the name of its kind, or one that is there.
fn limits_of(name: &str) -> Result<GpuLimits, CliError> {
    if let Some(limits) = GpuLimits::find_limits(name) {
        return Ok(limits);
    }
    let known = GpuLimits::NAMES.join(", ");
    let Some(Ok(gpu)) = name.strip_prefix("cuda:").map(str::parse::<kvd_cuda::GpuName>) else {
        let reason = format!("--device {name:?} is none of {known} and not cuda:N");
        return Err(CliError::Usage(reason));
    };
    let devices = kvd_cuda::probe_devices().map_err(anyhow::Error::from)?;
    Ok(gpu.find_gpu(&devices).map_err(anyhow::Error::from)?.limits)
}

const TABLE_HEAD: &str = "\
| codec | MB read | roofline, us | x f16 | predicted, us | x f16 | by | instructions per value: \
fit | counted | buffers | thread blocks per SM | units per head | \
codebook entries in shared memory, k / v |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
";

fn write_row(text: &mut String, name: &str, plan: &KernelPlan) -> std::fmt::Result {
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
    let by = bound_text(plan);
    let predicted = plan.predict_seconds().map(|(seconds, _)| seconds);
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
        read_bytes(plan) / 1e6,
        plan.buffers,
        plan.occupancy.blocks,
        plan.splits,
        entries[0],
        entries[1]
    )
}
