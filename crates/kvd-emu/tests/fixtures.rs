//! What a machine with a GPU is given to measure: pages of each codec with tables, units and
//! queries, and what the kernels answered here. `KVD_GPU_FIXTURES` names the folder they go to
//! (`cargo xtask gpu pack`); without it they are made and launched by `kernels/gpu/bench.py` over
//! the CPU lane.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::run::{SHARED, run};
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Side};
use kvd_cuda::{Options, Shapes, Tables};
use kvd_emu::{Order, available};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Codecs that are measured.
const CODECS: [&str; 8] =
    ["raw", "fp8", "kivi-4", "kivi-2", "vecinfer-2", "kvcomp", "kvd-2", "kvd-2-fast"];
const BLOCK_TOKENS: usize = 64;
const BLOCKS: usize = 4;
/// Query heads of each of the two KV heads; the benchmark repeats heads and blocks.
const GROUP: usize = 4;

/// Appends a section to the file's bytes, aligned, and its name, offset and length to the text.
fn section(name: &str, bytes: &[u8], all: &mut Vec<u8>, text: &mut String) {
    all.resize(all.len().next_multiple_of(256), 0);
    writeln!(text, "  \"{name}\": [{}, {}],", all.len(), bytes.len()).unwrap();
    all.extend(bytes);
}

/// Writes `<codec>.json` and `<codec>.bin`.
fn write(folder: &Path, codec: &str) {
    let value = |side: Side, head: usize, token: usize, channel: usize| {
        noise(((side.index() * 2 + head) * 4096 + token) * 512 + channel)
    };
    let layout = Layout { pages: vec![BLOCK_TOKENS; BLOCKS], window: 0 };
    let stored = Stored::new(&geometry(128, 128, DType::F16), codec, &layout, value);
    let plan = Ask::last(GROUP, stored.tokens).plan(&stored, |i| noise(99 + i));
    let answer = run(&stored, &plan, BLOCKS, Order::Ascending).unwrap();
    let shapes = Shapes::new(&stored.codec, plan.layer, [usize::MAX; 2]);
    let header = |offset: u64| stored.headers.get(&offset).copied();
    let options = Options { parts_per_unit: BLOCKS, shared: SHARED, channel_split: 1 };
    let tables = Tables::new(&plan, &stored.codec, &shapes, &header, options).unwrap();
    let [launch] = &tables.launches[..] else { panic!("{codec}: one kind of page") };
    let payload: u64 = stored.headers.values().map(|header| u64::from(header.payload_len)).sum();
    let (mut bytes, mut text) = (Vec::new(), String::from("{\n"));
    section("arena", &stored.arena, &mut bytes, &mut text);
    section("tables", &shapes.tables, &mut bytes, &mut text);
    section("pages", bytemuck::cast_slice(&tables.pages), &mut bytes, &mut text);
    section("units", bytemuck::cast_slice(&launch.units), &mut bytes, &mut text);
    section("queries", bytemuck::cast_slice(&tables.queries), &mut bytes, &mut text);
    section("offsets", bytemuck::cast_slice(&tables.offsets), &mut bytes, &mut text);
    section("lse", bytemuck::cast_slice(&answer.lse), &mut bytes, &mut text);
    for (name, number) in [
        ("key_stage", launch.key_stage),
        ("value_stage", launch.value_stage),
        ("key_table", launch.key_table),
        ("value_table", launch.value_table),
        ("chunks", launch.chunks),
        ("key_chunk", launch.key_chunk),
        ("value_chunk", launch.value_chunk),
        ("buffers", launch.buffers),
        ("shared_bytes", launch.shared_bytes as u32),
        ("payload_bytes", payload as u32),
        ("tokens", stored.tokens),
        ("heads", 2),
        ("group", GROUP as u32),
        ("dim", 128),
    ] {
        writeln!(text, "  \"{name}\": {number},").unwrap();
    }
    writeln!(text, "  \"codec\": \"{codec}\",\n  \"kernel\": \"{}\"\n}}", launch.kernel).unwrap();
    std::fs::write(folder.join(format!("{codec}.json")), text).unwrap();
    std::fs::write(folder.join(format!("{codec}.bin")), bytes).unwrap();
}

/// The CPU lane as a library for the benchmark.
fn library(folder: &Path) -> PathBuf {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels");
    let library = folder.join("libkvd_emu.so");
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-x", "c++"]);
    command.arg("-I").arg(kernels.join("include")).arg("-I").arg(kernels.join("emu"));
    for source in ["emu/emu.cc", "attend_float.cu", "attend_uniform.cu"] {
        command.arg(kernels.join(source));
    }
    assert!(command.arg("-o").arg(&library).status().unwrap().success());
    library
}

#[test]
fn fixtures_are_launched_by_the_benchmark_and_give_what_they_gave_here() {
    if !available() {
        return;
    }
    if let Some(folder) = std::env::var_os("KVD_GPU_FIXTURES") {
        CODECS.iter().for_each(|codec| write(Path::new(&folder), codec));
        return;
    }
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("SKIP fixtures: no python3 to launch them with");
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-fixtures");
    std::fs::create_dir_all(&folder).unwrap();
    ["raw", "kivi-2"].iter().for_each(|codec| write(&folder, codec));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/gpu/bench.py");
    let library = library(&folder);
    let mut command = Command::new("python3");
    command.arg(script).arg("--emu").arg(library).args(["--tokens", "1024", "--heads", "4"]);
    let output = command.arg(&folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    // Both codecs, over sixteen blocks of four heads.
    for codec in ["raw", "kivi-2"] {
        assert!(text.contains(&format!("\"codec\": \"{codec}\"")), "{text}");
    }
    assert!(text.contains("\"tokens\": 1024") && text.contains("\"torch\": \"skipped"), "{text}");
}
