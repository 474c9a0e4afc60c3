//! Counts the instructions that a thread of an attention kernel issues for a tile, in the
//! disassembly, for sm_90 unless told otherwise: `nvcc -lineinfo -cubin`, `nvdisasm -c -gi`. Not
//! measured on a GPU.

mod any;
mod codecs;
mod fused;
mod graph;
mod listing;
mod marks;
mod path;
mod pipes;
mod source;
mod tally;
mod turns;

use crate::kernels::{self, Tools};
use crate::report::Report;
use anyhow::{Context, Result, bail, ensure};
use codecs::Row;
use listing::Listing;
use source::Source;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The kernels that write pages.
const STORE: &str = "store";
const WARP_LANES: usize = 32;
/// Warps of a thread block of attention.
const WARPS: usize = 4;
/// Values for each thread: of a tile, keys and values of 32 tokens and 128 channels, and of a page
/// that is stored, 64 rows of as many.
const VALUES_OF_THREAD: f64 = 64.0;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Codecs or kernels; without any, all that are known.
    names: Vec<String>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
    /// The compute capability: 90 for 9.0. Rules were written for that one.
    #[arg(long, default_value_t = 90)]
    sm: u32,
    /// Checks instead that store kernels fuse no product with a sum, but in divisions and roots.
    #[arg(long, conflicts_with_all = ["names", "json", "all"])]
    fused: bool,
    /// Says so and succeeds where compiler or disassembler are not there and cannot be installed.
    #[arg(long, requires = "fused")]
    skip_offline: bool,
    /// Also the innermost functions, loops and branches.
    #[arg(long)]
    all: bool,
}

/// Counts and prints.
pub(crate) fn run(root: &Path, arguments: &Arguments, report: &Report) -> Result<()> {
    if arguments.fused {
        return match kernels::tools(root, report) {
            Err(reason) if arguments.skip_offline => {
                kernels::skip("count: store kernels not looked through", &reason, report)
            }
            tools => check_fused(root, &tools?, arguments.sm, report),
        };
    }
    let rows = asked(&arguments.names)?;
    let tools = kernels::tools(root, report)?;
    let mut files: BTreeMap<&str, (Listing, Vec<Source>)> = BTreeMap::new();
    let mut counts = Vec::new();
    for row in rows {
        if !files.contains_key(row.file) {
            files.insert(row.file, disassembled(root, &tools, row.file, arguments.sm)?);
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

/// Fails where a kernel that writes pages fuses a product with a sum.
fn check_fused(root: &Path, tools: &Tools, sm: u32, report: &Report) -> Result<()> {
    let (listing, texts) = listed(root, tools, STORE, sm)?;
    let line = |frame: listing::Frame| {
        let at = frame.line.saturating_sub(1);
        let text = texts.get(frame.file).and_then(|text| text.lines().nth(at));
        text.unwrap_or_default().to_owned()
    };
    let count = fused::check(&listing, line)?;
    let kernels = listing.kernels.len();
    report.line(&format!(
        "fused products of sm_{sm}: {count} in {kernels} store kernels, all of divisions and roots"
    ));
    Ok(())
}

/// All that is counted.
fn rows() -> impl Iterator<Item = &'static Row> {
    codecs::ROWS.iter().chain(any::ROWS)
}

/// The rows that names are of, all without any.
fn asked(names: &[String]) -> Result<Vec<&'static Row>> {
    let is_of = |row: &Row, name: &String| [row.codec, row.kernel].contains(&&**name);
    for name in names {
        let known = || rows().map(|row| row.codec).collect::<Vec<_>>().join(", ");
        let is_known = rows().any(|row| is_of(row, name));
        ensure!(is_known, "{name:?} is not counted; known are {}", known());
    }
    let is_asked = |row: &&Row| names.is_empty() || names.iter().any(|name| is_of(row, name));
    Ok(rows().filter(is_asked).collect())
}

/// A kernel file for a compute capability, and its sources by the listing's numbers.
fn disassembled(root: &Path, tools: &Tools, file: &str, sm: u32) -> Result<(Listing, Vec<Source>)> {
    let (listing, texts) = listed(root, tools, file, sm)?;
    let sources = texts.iter().map(|text| Source::new(text)).collect();
    Ok((listing, sources))
}

/// The same, and the sources' texts.
fn listed(root: &Path, tools: &Tools, file: &str, sm: u32) -> Result<(Listing, Vec<String>)> {
    let out: PathBuf = root.join("target/kernels").join(format!("{file}.sm_{sm}.cubin"));
    if !kernels::is_newer(&out, &root.join("kernels"))? {
        compile(&tools.nvcc, root, file, sm, &out)?;
    }
    let mut nvdisasm = Command::new(&tools.nvdisasm);
    let listing = listing::parse(&kernels::output(nvdisasm.args(["-c", "-gi"]).arg(&out))?);
    let texts = ours(&listing, &root.join("kernels"))
        .with_context(|| format!("{} was compiled elsewhere: remove it", out.display()))?;
    Ok((listing, texts))
}

/// The texts of a listing's files, of those that are not in the kernels' folder nothing.
fn ours(listing: &Listing, kernels: &Path) -> Result<Vec<String>> {
    let text = |path: &String| {
        let is_ours = Path::new(path).starts_with(kernels);
        if is_ours { fs::read_to_string(path).unwrap_or_default() } else { String::new() }
    };
    let texts: Vec<String> = listing.files.iter().map(text).collect();
    // Without a line of the source everything would count as the rest, and nothing as rare.
    let is_any = texts.iter().any(|text| !text.is_empty());
    ensure!(is_any, "no file that it is from is in {}", kernels.display());
    Ok(texts)
}

fn compile(nvcc: &Path, root: &Path, file: &str, sm: u32, out: &Path) -> Result<()> {
    let mut nvcc = Command::new(nvcc);
    nvcc.args(["-std=c++17", "-O3", "-lineinfo", "-cubin"]);
    nvcc.arg(format!("-arch=sm_{sm}")).arg("-I").arg(root.join("kernels/include"));
    nvcc.arg(root.join("kernels").join(format!("{file}.cu"))).arg("-o").arg(out);
    kernels::output(&mut nvcc)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn every_name_is_a_codec_or_a_kernel() {
        assert_eq!(asked(&[]).unwrap().len(), rows().count());
        let of = |wanted: &[&str]| {
            let rows = asked(&names(wanted))?;
            Ok::<_, anyhow::Error>(rows.iter().map(|row| row.codec).collect::<Vec<_>>())
        };
        assert_eq!(of(&["kvd-2", "kvd_attend_kivi4_4"]).unwrap(), ["kivi-4", "kvd-2"]);
        let error = of(&["kivi-4", "kivi-5"]).unwrap_err().to_string();
        assert!(error.starts_with("\"kivi-5\" is not counted"), "{error}");
    }

    #[test]
    fn where_the_disassembler_cannot_be_installed_looking_is_skipped_only_if_that_is_asked_for() {
        let root = tempfile::tempdir().unwrap();
        // It is no folder that a compiler could be in.
        fs::write(root.path().join("target"), "a file").unwrap();
        let of = |skip_offline| {
            let names = Vec::new();
            let asked =
                Arguments { names, json: false, sm: 90, fused: true, skip_offline, all: false };
            run(root.path(), &asked, &Report)
        };
        assert!(of(false).is_err());
        assert_eq!(of(true).is_ok(), std::env::var_os("KVD_REQUIRE_KERNELS").is_none());
    }

    #[test]
    fn a_listing_of_other_sources_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let kernels = folder.path().join("kernels");
        fs::create_dir(&kernels).unwrap();
        fs::write(kernels.join("a.cuh"), "a").unwrap();
        let path = |folder: &Path| folder.join("a.cuh").display().to_string();
        let (here, there) = (path(&kernels), path(Path::new("/elsewhere/kernels")));
        let listing = |files: &[&String]| Listing {
            files: files.iter().map(|file| (*file).clone()).collect(),
            ..Listing::default()
        };
        assert_eq!(ours(&listing(&[&there, &here]), &kernels).unwrap(), ["", "a"]);
        assert!(ours(&listing(&[&there]), &kernels).is_err());
    }
}
