//! `kvd plan`: how the CUDA kernels would be launched on a GPU, with the reasons.

use super::bench::flags::count_up_to;
use super::table::{CodecLabels, TableColumn, render_table, wrap_text};
use super::{CliError, text_args};
use clap::Args;
use kvd_bench::limits;
use kvd_codec::{presets, resolve_spec};
use kvd_core::{DType, Geometry, RopePairing};
use kvd_cuda::{GpuLimits, KernelPlan, StepWorkload, plan_kernel};
use std::fmt::Write;

/// Shapes of one layer of Llama-3.1-8B unless told otherwise.
#[derive(Args)]
pub(super) struct PlanArgs {
    /// Preset or spec text; all presets when absent.
    #[arg(long, value_name = "CODEC", value_parser = text_args::codec_text)]
    codec: Option<String>,
    /// One of a100, rtx4090, l40s, h100, h200, or a GPU of this machine: cuda:N; h100 when absent,
    /// whatever this machine has.
    #[arg(long, value_name = "GPU")]
    device: Option<String>,
    /// Stored tokens of a sequence.
    #[arg(long, default_value_t = 131_072, value_parser = count_up_to(limits::CONTEXT_MAX))]
    tokens: u32,
    /// Sequences.
    #[arg(long, default_value_t = 1, value_parser = count_up_to(4096_u32))]
    batch: u32,
    /// KV heads.
    #[arg(long, default_value_t = 8)]
    kv_heads: u32,
    /// Query heads that share a KV head.
    #[arg(long, default_value_t = 4, value_parser = count_up_to(1024_u32))]
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
}

/// A codec and its plan; none where no thread block fits the GPU.
struct NamedPlan<'a> {
    name: &'a str,
    plan: Option<KernelPlan>,
}

/// The text that `kvd plan` prints.
pub(super) fn plan_text(args: &PlanArgs) -> Result<String, CliError> {
    let limits = limits_of(args.device.as_deref().unwrap_or(ASSUMED_GPU))?;
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
        plans.push(NamedPlan { name, plan: plan_kernel(&codec, &workload, &limits) });
    }
    Ok(write_plans(args, &limits, &plans).map_err(anyhow::Error::from)?)
}

/// The plans in the form that was asked for.
fn write_plans(
    args: &PlanArgs,
    limits: &GpuLimits,
    plans: &[NamedPlan<'_>],
) -> Result<String, std::fmt::Error> {
    let mut text = String::new();
    if args.device.is_none() {
        let assumed = &limits.name;
        writeln!(text, "Of {assumed}, as --device names no GPU; this machine was not asked.\n")?;
    }
    if args.table {
        return Ok(text + &narrow_table(plans));
    }
    for NamedPlan { name, plan } in plans {
        match plan {
            None => writeln!(text, "{name}: no thread block fits {}", limits.name)?,
            Some(plan) => {
                writeln!(text, "== {name}")?;
                plan.to_string().lines().for_each(|line| text.push_str(&wrap_text(line, "  ")));
                writeln!(text)?;
            }
        }
    }
    Ok(text)
}

/// The figures of each plan that matter most, for a terminal.
fn narrow_table(plans: &[NamedPlan<'_>]) -> String {
    let none = || "-".to_owned();
    let cells = |cell: &dyn Fn(&KernelPlan) -> Option<String>| -> Vec<String> {
        let rows = plans.iter().map(|named| named.plan.as_ref());
        rows.map(|plan| plan.and_then(cell).unwrap_or_else(none)).collect()
    };
    let numbers = TableColumn::of_numbers;
    let names = plans.iter().map(|named| named.name.to_owned());
    let CodecLabels { cells: labels, legend } = CodecLabels::new(names, CODEC_COLUMNS);
    let columns = [
        TableColumn::of_text("codec", labels),
        numbers("MB read", cells(&|p| Some(format!("{:.1}", p.page_bytes / 1e6)))),
        TableColumn::of_text("tensor cores", cells(&|p| Some(tensor_cores(p).to_owned()))),
        numbers("buffers", cells(&|p| Some(p.buffers.to_string()))),
        numbers("blocks/SM", cells(&|p| Some(p.occupancy.blocks.to_string()))),
        numbers("units/head", cells(&|p| Some(p.splits.to_string()))),
    ];
    render_table(&columns)
        + &legend
        + "\nOne layer, one decode step. MB read: of pages. tensor cores: products of which side.\n"
}

/// The GPU that is planned for where none is named.
const ASSUMED_GPU: &str = "h100";

/// Longest codec in a table.
const CODEC_COLUMNS: usize = 24;

/// The sides whose products are on tensor cores.
fn tensor_cores(plan: &KernelPlan) -> &'static str {
    match plan.products.map(|not| not.is_none()) {
        [true, true] => "k, v",
        [true, false] => "k",
        [false, true] => "v",
        [false, false] => "-",
    }
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
