//! Counts the instructions that a thread of an attention kernel issues for a tile, in the
//! disassembly for sm_90: `nvcc -lineinfo -cubin`, `nvdisasm -c -gi`. Not measured on a GPU.

mod codecs;
mod graph;
mod listing;
mod marks;
mod path;
mod source;
mod tally;
mod turns;

use crate::kernels;
use crate::report::Report;
use anyhow::{Context, Result, bail, ensure};
use codecs::{ROWS, Row};
use listing::Listing;
use source::Source;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const WARP_LANES: usize = 32;
/// Warps of a thread block of attention.
const WARPS: usize = 4;
/// Values for each thread: of a tile, keys and values of 32 tokens and 128 channels, and of a page
/// that is stored, 64 rows of as many.
const VALUES_OF_THREAD: f64 = 64.0;
const TARGET: u32 = 90;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Codecs or kernels; without any, all that are known.
    names: Vec<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    /// Also the innermost functions, loops and branches.
    #[arg(long)]
    all: bool,
}

/// Counts and prints.
pub(crate) fn run(root: &Path, arguments: &Arguments, report: &Report) -> Result<()> {
    let names = &arguments.names;
    let asked = |row: &&Row| names.iter().any(|name| [row.codec, row.kernel].contains(&&**name));
    let rows: Vec<&Row> = ROWS.iter().filter(|row| names.is_empty() || asked(row)).collect();
    let known = || ROWS.iter().map(|row| row.codec).collect::<Vec<_>>().join(", ");
    ensure!(!rows.is_empty(), "none of these is counted; known are {}", known());
    let mut files: BTreeMap<&str, (Listing, Vec<Source>)> = BTreeMap::new();
    let mut counts = Vec::new();
    for row in rows {
        if !files.contains_key(row.file) {
            files.insert(row.file, disassembled(root, row.file, report)?);
        }
        let Some((listing, sources)) = files.get(row.file) else { bail!("no {}", row.file) };
        let kernel = listing.kernels.iter().find(|kernel| kernel.name == row.kernel);
        let kernel = kernel.with_context(|| format!("{} has no {}", row.file, row.kernel))?;
        let count = tally::count(listing, kernel, sources, row)
            .with_context(|| format!("count {}", row.kernel))?;
        if !arguments.json {
            tally::print(row, &count, arguments.all, report);
        }
        counts.push(tally::json(row, &count));
    }
    if arguments.json {
        report.line(&serde_json::to_string_pretty(&counts)?);
    }
    Ok(())
}

/// A kernel file for sm_90, and its sources by the listing's numbers.
fn disassembled(root: &Path, file: &str, report: &Report) -> Result<(Listing, Vec<Source>)> {
    let tools = kernels::tools(root, report)?;
    let out: PathBuf = root.join("target/kernels").join(format!("{file}.sm_{TARGET}.cubin"));
    if !kernels::is_newer(&out, &root.join("kernels"))? {
        compile(&tools.nvcc, root, file, &out)?;
    }
    let mut nvdisasm = Command::new(&tools.nvdisasm);
    let listing = listing::parse(&kernels::output(nvdisasm.args(["-c", "-gi"]).arg(&out))?);
    let ours = root.join("kernels");
    let sources = listing.files.iter().map(|path| {
        let is_ours = Path::new(path).starts_with(&ours);
        let text = if is_ours { fs::read_to_string(path).ok() } else { None };
        Source::new(&text.unwrap_or_default())
    });
    let sources = sources.collect();
    Ok((listing, sources))
}

fn compile(nvcc: &Path, root: &Path, file: &str, out: &Path) -> Result<()> {
    let mut nvcc = Command::new(nvcc);
    nvcc.args(["-std=c++17", "-O3", "-lineinfo", "-cubin"]);
    nvcc.arg(format!("-arch=sm_{TARGET}")).arg("-I").arg(root.join("kernels/include"));
    nvcc.arg(root.join("kernels").join(format!("{file}.cu"))).arg("-o").arg(out);
    kernels::output(&mut nvcc)?;
    Ok(())
}
