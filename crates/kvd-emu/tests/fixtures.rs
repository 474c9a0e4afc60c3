//! Fixtures that a machine with a GPU measures: pages of each codec with tables, units and queries
//! as the plan of that GPU has them, rows to store, and the kernels' answers here.
//! `KVD_GPU_FIXTURES` names the folder they go to, `KVD_GPU_DEVICE` the GPU (`cargo xtask gpu
//! pack`); without it they are made and launched by `kernels/gpu/bench.py`, over a driver whose
//! kernels run on the CPU emulator.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;
#[path = "fixtures/store.rs"]
mod store;

use common::run::{parameters, run_tables};
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Geometry, Side};
use kvd_cuda::{
    AttendTables, AttendUnit, GpuLimits, KernelPlan, LatePairs, LayerShapes, StepWorkload,
    TableOptions, plan_kernel,
};
use kvd_emu::{ThreadOrder, is_available};
use serde_json::{Map, Value, json};
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Codecs that are measured.
const CODECS: [&str; 9] =
    ["raw", "fp8", "kivi-4", "kivi-2", "vecinfer-2", "polar-4+4", "kvcomp", "kvd-2", "kvd-2-fast"];
/// Tokens, sequences and KV heads of a decode step; the benchmark repeats the fixture's two heads.
const WORKLOADS: [[u32; 3]; 2] = [[131_072, 1, 8], [32_768, 8, 8]];
const BLOCK_TOKENS: usize = 64;
/// The form of the measured workloads.
const MEASURED: Form = Form { dim: 128, group: 4, dtype: DType::F16, blocks: 4, stores: true };
/// Codecs of which rows of other types are launched too: those that keep them, and those that store
/// kernels quantize, with a matrix and without.
const OF_EACH_DTYPE: [&str; 3] = ["raw", "kivi-4", "kvd-2"];
const CHECKED_WORKLOAD: [u32; 3] = [512, 1, 4];
/// Marks a partial result that is in coefficients.
const COEFFICIENTS: u32 = 1 << 31;

/// The rows of a fixture, and how many.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    /// Channels.
    dim: u32,
    /// Query heads of each KV head.
    group: usize,
    /// Dtype of the rows.
    dtype: DType,
    blocks: usize,
    /// Whether rows to store are part of it.
    stores: bool,
}

/// The launches of a codec that are run once, for outputs and pages alone: kernels of each number
/// of query rows, those with constant shapes where nothing of the codec is measured, and rows of
/// each type.
fn checked(codec: &str) -> Vec<Form> {
    let of = |dim, group, dtype, stores| Form { dim, group, dtype, blocks: 2, stores };
    // Rows of a store know nothing of queries.
    let one_and_eight = |dim| [(dim, 1, true), (dim, 8, false)];
    let mut forms: Vec<_> = [64, 128]
        .into_iter()
        .flat_map(one_and_eight)
        .map(|(dim, group, stores)| of(dim, group, DType::F16, stores))
        .collect();
    if !CODECS.contains(&codec) {
        forms.push(of(128, 4, DType::F16, false));
    }
    if OF_EACH_DTYPE.contains(&codec) {
        forms.extend([DType::BF16, DType::F32].map(|dtype| of(128, 4, dtype, true)));
    }
    forms
}

/// A fixture's bytes, with their description.
#[derive(Default)]
struct Fixture {
    bytes: Vec<u8>,
    sections: Map<String, Value>,
}

impl Fixture {
    /// Appends a section, aligned.
    fn section(&mut self, name: &str, bytes: &[u8]) {
        self.bytes.resize(self.bytes.len().next_multiple_of(256), 0);
        self.sections.insert(name.to_owned(), json!([self.bytes.len(), bytes.len()]));
        self.bytes.extend(bytes);
    }
}

/// The plan of a workload.
fn planned(
    stored: &Stored,
    (device, group): (&GpuLimits, usize),
    [tokens, batch, kv_heads]: [u32; 3],
) -> (Value, KernelPlan) {
    let geometry = Geometry { kv_heads, ..stored.codec.geometry().clone() };
    let workload = StepWorkload { geometry, group: group as u32, batch, tokens };
    let plan = plan_kernel(stored.codec.spec(), &workload, device).unwrap();
    let of_workload = json!({
        "tokens": tokens,
        "batch": batch,
        "heads": kv_heads,
        "units": plan.splits * batch * kv_heads,
        "parts_per_unit": plan.parts_per_unit,
        "plan": { "blocks_per_sm": plan.occupancy.blocks },
    });
    (of_workload, plan)
}

/// Writes `<codec>.json` and `<codec>.bin`, with the shape in their names where it is another.
fn write(folder: &Path, codec: &str, form: Form, device: &GpuLimits, workloads: &[[u32; 3]]) {
    let Form { dim, group, dtype, blocks, stores } = form;
    let value = |side: Side, head: usize, token: usize, channel: usize| {
        noise(((side.index() * 2 + head) * 4096 + token) * 512 + channel)
    };
    let layout = Layout { pages: vec![BLOCK_TOKENS; blocks], window: 0 };
    // As in a daemon: some kernels are for pages of two tiles.
    let geometry = Geometry { block_tokens: BLOCK_TOKENS as u32, ..geometry(dim, dim, dtype) };
    let stored = Stored::new(&geometry, codec, &layout, value);
    let plans: Vec<_> =
        workloads.iter().map(|workload| planned(&stored, (device, group), *workload)).collect();
    let (rooms, chunks) = (plans[0].1.codebook_rooms(), plans[0].1.chunks);
    let same = |plan: &KernelPlan| (plan.codebook_rooms(), plan.chunks) == (rooms, chunks);
    assert!(plans.iter().all(|(_, plan)| same(plan)), "{codec}: one room for tables");
    let ask = Ask::last(group, stored.tokens).plan(&stored, |i| noise(99 + i));
    let shapes = LayerShapes::new(&stored.codec, ask.layer, rooms);
    let header = |offset: u64| stored.headers.get(&offset).copied();
    // One unit a head, which the benchmark cuts as the plan has it.
    let (shared, chunks) = (device.shared_memory(), (chunks > 0).then_some(chunks));
    let late = LatePairs::NONE;
    let options = TableOptions { parts_per_unit: blocks, shared, chunks, channel_split: 1, late };
    let tables = AttendTables::new(&ask, &stored.codec, &shapes, &header, options).unwrap();
    let [launch] = &tables.launches[..] else { panic!("{codec}: one kind of page") };
    let merged = run_tables(&stored, &shapes, &tables, ThreadOrder::Ascending).unwrap();
    let payload: u64 = stored.headers.values().map(|header| u64::from(header.payload_len)).sum();
    let marks: Vec<u32> = tables.order.iter().map(|partial| partial & COEFFICIENTS).collect();
    assert!(marks.iter().all(|mark| *mark == marks[0]), "{codec}: one kind of partial result");
    let mut fixture = Fixture::default();
    fixture.section("arena", &stored.arena);
    fixture.section("tables", &shapes.tables);
    fixture.section("pages", bytemuck::cast_slice(&tables.pages));
    fixture.section("units", bytemuck::cast_slice(&launch.units));
    fixture.section("queries", bytemuck::cast_slice(&tables.queries));
    fixture.section("offsets", bytemuck::cast_slice(&tables.offsets));
    fixture.section("parameters", bytemuck::bytes_of(&parameters(&tables, launch)));
    fixture.section("sums", bytemuck::cast_slice(&merged.sums));
    fixture.section("results", bytemuck::cast_slice(&merged.results));
    let add = |fixture: &mut _| store::add(fixture, &stored, &shapes, device, blocks);
    let store = if stores { add(&mut fixture) } else { Value::Null };
    let facts = json!({
        "codec": codec,
        "device": device.name,
        "multiprocessors": device.multiprocessors,
        "kernel": launch.kernel,
        "shared_bytes": launch.shared_bytes,
        "sides_bytes": offset_of!(AttendUnit, first_page),
        "payload_bytes": payload,
        "mark": marks[0],
        "tokens": BLOCK_TOKENS * blocks,
        "heads": stored.codec.geometry().kv_heads,
        "group": group,
        "dtype": dtype.name(),
        "dim": stored.codec.geometry().head_dim_v,
        "workloads": plans.iter().map(|plan| &plan.0).collect::<Vec<_>>(),
        "store": store,
        "sections": fixture.sections,
    });
    let name = match form {
        MEASURED => codec.to_owned(),
        Form { dim, group, dtype, .. } => format!("{codec}-{dim}-{group}-{}", dtype.name()),
    };
    std::fs::write(folder.join(format!("{name}.json")), format!("{facts:#}\n")).unwrap();
    std::fs::write(folder.join(format!("{name}.bin")), fixture.bytes).unwrap();
}

/// Writes launches that are made only for their outputs.
fn write_checks(folder: &Path, codec: &str, device: &GpuLimits, forms: &[Form]) {
    let folder = folder.join("checks");
    std::fs::create_dir_all(&folder).unwrap();
    forms.iter().for_each(|form| write(&folder, codec, *form, device, &[CHECKED_WORKLOAD]));
}

/// A driver over the CPU lane, as a library.
fn driver(folder: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = folder.join("libcuda.so.1");
    let mut command = Command::new("g++");
    command.args(["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]);
    for include in ["../../kernels/include", "../../kernels/emu"] {
        command.arg("-I").arg(root.join(include));
    }
    command.arg(root.join("tests/fixtures/libcuda.cc")).arg("-Wl,--whole-archive");
    let Some(kernels) = option_env!("KVD_EMU_KERNELS") else { panic!("the CPU lane is not built") };
    command.arg(kernels).arg("-Wl,--no-whole-archive");
    let output = command.arg("-o").arg(&library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

/// Runs the benchmark over the fixtures of a folder, once each, or its checks.
fn bench(folder: &Path, library: &Path, mode: &[&str]) -> (Output, Value) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernels/gpu/bench.py");
    let out = folder.join("figures");
    let mut command = Command::new("python3");
    command.arg(script).arg(folder).arg("--library").arg(library).arg("--out").arg(&out);
    command.args(["--launches", "2", "--rounds", "1", "--store-tokens", "512", "--read-mib", "1"]);
    command.args(mode);
    let output = command.output().unwrap();
    let text = std::fs::read_to_string(out).unwrap_or_default();
    (output, serde_json::from_str(&text).unwrap_or_default())
}

/// Whether the benchmark can be run here; says why not.
#[expect(clippy::print_stderr, reason = "a skipped test says so")]
fn is_runnable() -> bool {
    if !is_available() {
        return false;
    }
    if option_env!("KVD_EMU_SANITIZERS").is_some_and(|by| !by.is_empty()) {
        eprintln!("SKIP fixtures: python3 loads no library that was built with a sanitizer");
        return false;
    }
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("SKIP fixtures: no python3 to launch them with");
        return false;
    }
    true
}

/// A folder of fixtures of the test's own.
fn folder(name: &str, codecs: &[&str], workloads: &[[u32; 3]]) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    codecs.iter().for_each(|codec| write(&folder, codec, MEASURED, &GpuLimits::h200(), workloads));
    // With a zero in it, behind which a driver must find the rest.
    std::fs::write(folder.join("a.fatbin"), b"fat\0bin").unwrap();
    folder
}

#[test]
fn fixtures_are_launched_by_the_benchmark_and_give_what_they_gave_here() {
    if let Some(folder) = std::env::var_os("KVD_GPU_FIXTURES") {
        assert!(is_available(), "fixtures are made by the CPU lane");
        let device = std::env::var("KVD_GPU_DEVICE").unwrap_or("h200".to_owned());
        let device = GpuLimits::find_limits(&device).unwrap();
        for codec in CODECS {
            write(Path::new(&folder), codec, MEASURED, &device, &WORKLOADS);
        }
        for preset in kvd_codec::presets() {
            write_checks(Path::new(&folder), preset.name, &device, &checked(preset.name));
        }
        return;
    }
    if !is_runnable() {
        return;
    }
    let codecs = ["kivi-2", "kvd-2", "raw"];
    let folder = folder("gpu-fixtures", &codecs, &[[512, 1, 4], [256, 2, 2]]);
    let library = driver(&folder);
    let (output, figures) = bench(&folder, &library, &[]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!((&figures["complete"], &figures["checks"]), (&json!(true), &json!([])));
    assert_eq!(figures["planned_for"], "H200 SXM");
    for workload in figures["workloads"].as_array().unwrap() {
        for (row, codec) in workload["codecs"].as_array().unwrap().iter().zip(codecs) {
            assert_eq!(row["codec"], codec);
            assert!(row["output_error"].as_f64().unwrap() < 1e-5, "{row}");
            assert!(row["seconds"]["median"].as_f64().unwrap() > 0.0, "{row}");
            assert!(row["cold_copies"].as_u64().unwrap() > 1 || codec == "raw", "{row}");
        }
    }
    let stores = figures["stores"].as_array().unwrap();
    assert_eq!(stores.len(), codecs.len(), "{figures:#}");
    // As many rows as the store was asked for: two heads, two sides, 128 channels of f16.
    assert!(stores.iter().all(|row| row["f16_bytes"] == 512 * 2 * 2 * 128 * 2), "{stores:?}");
    assert!(figures["bandwidth"].as_array().unwrap().iter().all(|row| row["error"].is_null()));
}

#[test]
fn checks_are_launched_once_with_the_kernels_that_they_are_for() {
    if !is_runnable() {
        return;
    }
    let of_kivi = checked("kivi-4");
    // A kernel with constant shapes of a codec that is not measured, and rows of another type.
    let constant = checked("turbo-4").into_iter().find(|form| form.group == 4).unwrap();
    let other = of_kivi.iter().find(|form| form.dtype == DType::BF16).unwrap();
    let folder = folder("gpu-fixtures-checks", &["kvd-2-fast"], &[[256, 1, 2]]);
    let facts = std::fs::read_to_string(folder.join("kvd-2-fast.json")).unwrap();
    let facts: Value = serde_json::from_str(&facts).unwrap();
    assert_eq!(facts["kernel"], "kvd_attend_kvd2fast_4", "pages are as long as a daemon's");
    write_checks(&folder, "turbo-4", &GpuLimits::h200(), &[constant]);
    write_checks(&folder, "kivi-4", &GpuLimits::h200(), &[*other, of_kivi[1]]);
    let (output, figures) = bench(&folder, &driver(&folder), &["--checks"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!((&figures["complete"], &figures["workloads"]), (&json!(true), &json!([])));
    let checks = figures["checks"].as_array().unwrap();
    let of =
        |row: &Value| ["codec", "dtype", "dim", "group", "kernel"].map(|name| row[name].clone());
    let rows: Vec<_> = checks.iter().map(of).collect();
    let wanted = [
        json!(["kivi-4", "bf16", 128, 4, "kvd_attend_kivi4_4"]),
        json!(["kivi-4", "f16", 64, 8, "kvd_attend_kivi4_64_8"]),
        json!(["turbo-4", "f16", 128, 4, "kvd_attend_turbo4_4"]),
    ];
    assert_eq!(json!(rows), json!(wanted));
    assert!(checks.iter().all(|row| row["output_error"].as_f64().unwrap() < 1e-5), "{checks:?}");
}

#[test]
fn outputs_pages_and_splits_that_are_others_are_errors() {
    if !is_runnable() {
        return;
    }
    let folder = folder("gpu-fixtures-wrong", &["kivi-4"], &[[256, 1, 2]]);
    let library = driver(&folder);
    let json = folder.join("kivi-4.json");
    let right: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let bytes = std::fs::read(folder.join("kivi-4.bin")).unwrap();
    let at = |section: &str| right["sections"][section][0].as_u64().unwrap() as usize;
    for (section, byte, wanted) in [
        ("sums", 3, "outputs by"),
        ("results", 3, "log-sum-exps are off"),
        ("store_headers", 24, "headers differ"),
        ("store_pages", 40, "the page at 0 of copy 0 differs"),
    ] {
        let mut wrong = bytes.clone();
        wrong[at(section) + byte] ^= 0x41;
        std::fs::write(folder.join("kivi-4.bin"), wrong).unwrap();
        let (output, figures) = bench(&folder, &library, &[]);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(wanted), "{section}: {errors}");
        assert!(figures.to_string().contains(wanted), "{figures}");
    }
    std::fs::write(folder.join("kivi-4.bin"), bytes).unwrap();
    let mut other = right.clone();
    other["workloads"][0]["parts_per_unit"] = json!(3);
    std::fs::write(&json, other.to_string()).unwrap();
    let errors = String::from_utf8_lossy(&bench(&folder, &library, &[]).0.stderr).into_owned();
    assert!(errors.contains("but the plan has"), "{errors}");
}

#[test]
fn a_gpu_that_plans_are_not_of_launches_nothing() {
    if !is_runnable() {
        return;
    }
    let folder = folder("gpu-fixtures-other", &["kivi-4"], &[[256, 1, 2]]);
    let library = driver(&folder);
    let json = folder.join("kivi-4.json");
    let right: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    // The driver's own is an H200 with 132.
    for (field, value) in [("device", json!("H100 SXM")), ("multiprocessors", json!(16))] {
        let mut other = right.clone();
        other[field] = value;
        std::fs::write(&json, other.to_string()).unwrap();
        for mode in [vec![], vec!["--checks"]] {
            let (output, figures) = bench(&folder, &library, &mode);
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(errors.contains("this GPU is NVIDIA H200 with 132: nothing"), "{errors}");
            assert_eq!((output.status.code(), figures), (Some(1), Value::Null));
        }
    }
}
