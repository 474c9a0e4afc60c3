//! A plan in words, for `kvd plan`.

use super::{CodebookPlan, EntryExchange, KernelPlan};
use crate::abi::MERGE_THREADS;
use kvd_core::Side;
use std::fmt;

impl fmt::Display for KernelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (limits, work) = (&self.limits, &self.workload);
        write_block(f, self)?;
        for (side, books) in Side::BOTH.into_iter().zip(&self.codebooks) {
            if let Some(books) = books {
                write_codebooks(f, side, books)?;
            }
        }
        if self.chunks > 0 {
            writeln!(
                f,
                "Huffman codes: {} chunks of 64 tokens of each side are decoded together, each by \
                 sixteen lanes",
                self.chunks
            )?;
        }
        write_products(f, self.products, self.is_late)?;
        write_loads(f, self)?;
        writeln!(
            f,
            "split: {} units of {} blocks for each of {} heads, so that {} thread blocks are \
             resident at once",
            self.splits,
            self.parts_per_unit,
            work.batch * work.geometry.kv_heads,
            limits.multiprocessors * self.occupancy.blocks
        )?;
        writeln!(
            f,
            "merge: {} partial results of each query row, {:.3e} bytes of all rows, read side by \
             side by {MERGE_THREADS} threads a row",
            self.merged, self.merge_bytes
        )?;
        write_encoding(f, self.host_encoding, self.host_tables)?;
        writeln!(f, "bytes: {:.3e} of pages", self.page_bytes)
    }
}

/// How pages come to a multiprocessor.
fn write_loads(f: &mut fmt::Formatter<'_>, plan: &KernelPlan) -> fmt::Result {
    let [have, needed] = plan.bytes_under_way();
    let enough = if have >= needed { "enough" } else { "too few, the latency shows" };
    let enough = match plan.limits.memory_gbps {
        0 => "how many hide the latency is not known".to_owned(),
        _ => format!("{needed:.0} hide the latency: {enough}"),
    };
    let how = match plan.owns_tokens {
        true => "by each of four warps its own, 64 tokens of keys and of values in turn".to_owned(),
        false => format!("tiles of 32 tokens in {} buffers", plan.buffers),
    };
    writeln!(
        f,
        "page loads: {how}, in pieces of 16 bytes; {have:.0} bytes under way on a multiprocessor, \
         {enough}"
    )
}

/// The GPU, and how thread blocks fit it.
fn write_block(f: &mut fmt::Formatter<'_>, plan: &KernelPlan) -> fmt::Result {
    let limits = &plan.limits;
    writeln!(
        f,
        "{} ({}.{}): {} multiprocessors, {} KiB shared memory each, {} GB/s",
        limits.name,
        limits.compute[0],
        limits.compute[1],
        limits.multiprocessors,
        limits.shared_bytes >> 10,
        limits.memory_gbps
    )?;
    let KernelPlan { block, occupancy, .. } = plan;
    writeln!(
        f,
        "thread block: 128 threads, at most {} registers, {} bytes of shared memory without \
         codebooks; a multiprocessor holds {} ({} limit), which leaves each {} bytes",
        block.registers,
        block.shared_bytes,
        occupancy.blocks,
        occupancy.limit,
        occupancy.shared_slack
    )
}

fn write_products(
    f: &mut fmt::Formatter<'_>,
    not: [Option<&str>; 2],
    is_late: bool,
) -> fmt::Result {
    let of_side = |(side, not): (&str, Option<&str>)| match not {
        None => format!("of {side} on tensor cores"),
        Some(why) => format!("of {side} on CUDA cores: {why}"),
    };
    let [keys, values] = [("keys", not[0]), ("values", not[1])].map(of_side);
    let late = match is_late {
        true => {
            "; by a kernel that NVRTC compiles when a model is registered, until when, and \
                 without NVRTC, one for all pairs serves, on CUDA cores"
        }
        false => "",
    };
    writeln!(f, "products: {keys}; {values}{late}")
}

fn write_encoding(
    f: &mut fmt::Formatter<'_>,
    host: [Option<&str>; 2],
    host_tables: bool,
) -> fmt::Result {
    let of_side = |(side, why): (&str, Option<&str>)| why.map(|why| format!("{side} are {why}"));
    let reasons: Vec<String> =
        ["keys", "values"].into_iter().zip(host).filter_map(of_side).collect();
    if reasons.is_empty() {
        let tables = match host_tables {
            true => "; a layer's first blocks as well, for its Huffman tables",
            false => "",
        };
        return writeln!(
            f,
            "store: kernels write the pages; one block in 256 is copied to the host and \
             measured{tables}"
        );
    }
    writeln!(
        f,
        "store: rows are copied to the host, which writes the pages: {}, for which there is no \
         store kernel",
        reasons.join(", ")
    )
}

fn write_codebooks(f: &mut fmt::Formatter<'_>, side: Side, books: &CodebookPlan) -> fmt::Result {
    let CodebookPlan { bytes, entries, shared, registers, exchange, channel_split, .. } = books;
    if books.in_registers {
        return writeln!(
            f,
            "codebooks of {side}: {entries} entries of {bytes} bytes in all: registers hold all"
        );
    }
    let held = match shared {
        0 => "none fits the slack: all from global memory".to_owned(),
        all if all == entries && books.copies > 1 => {
            format!("all fit the slack, {} times for the lanes of a warp", books.copies)
        }
        all if all + registers == *entries => "all fit the slack".to_owned(),
        some => {
            format!("{some}, most used first, fit the slack; the others stay in global memory")
        }
    };
    if books.as_bytes {
        return writeln!(
            f,
            "codebooks of {side}: {bytes} bytes with a sign, {entries} entries: {held}; a look-up \
             gives a lane the tensor cores' layout"
        );
    }
    let first = match registers {
        0 => String::new(),
        all if all == entries => "all in the lanes' registers".to_owned(),
        some => format!("the first {some} in the lanes' registers; behind them "),
    };
    let held = if registers == entries { "" } else { &held };
    let exchange = match exchange {
        EntryExchange::None => "a lane multiplies the whole entries of its token".to_owned(),
        EntryExchange::Shuffles(0) => "a lane has the two channels that it sums".to_owned(),
        EntryExchange::Shuffles(1) => {
            "lanes exchange entries through registers, by one shuffle".to_owned()
        }
        EntryExchange::Shuffles(count) => {
            format!("lanes exchange entries through registers, by {count} shuffles")
        }
        EntryExchange::SharedMemory => "each lane reads its channel where entries are".to_owned(),
    };
    write!(
        f,
        "codebooks of {side}: {bytes} bytes, {entries} entries each: {first}{held}; {exchange}"
    )?;
    match channel_split {
        1 => writeln!(f),
        parts => writeln!(f, "; {parts} units share the channels, each with its codebooks"),
    }
}

#[cfg(test)]
mod tests {
    use crate::{GpuLimits, StepWorkload, plan_kernel};
    use kvd_core::{DType, Geometry, RopePairing};

    #[test]
    fn a_gpu_whose_bandwidth_is_not_known_has_a_plan() {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 8,
            head_dim_k: 128,
            head_dim_v: 128,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let workload = StepWorkload { geometry, group: 4, batch: 1, tokens: 131_072 };
        let spec = kvd_codec::resolve_spec("kivi-2").unwrap();
        let known = GpuLimits::h100();
        let text = |limits: GpuLimits| plan_kernel(&spec, &workload, &limits).unwrap().to_string();
        assert!(text(known.clone()).contains("hide the latency: enough"));
        let text = text(GpuLimits { memory_gbps: 0, ..known });
        assert!(text.contains("how many hide the latency is not known"), "{text}");
        assert!(!text.contains(" inf ") && !text.contains("NaN"), "{text}");
    }
}
