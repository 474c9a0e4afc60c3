//! The C interface with a whole daemon: a C program and a Python script store and attend, and print
//! what the Rust client is answered; another C program does what it must not.
#![cfg(target_os = "linux")]
#![expect(clippy::print_stdout, reason = "a test that cannot run says why")]

use kvd_client::{
    AttendBatch, AttendQuery, DType, Geometry, LayerIndex, ModelSpec, RopePairing, SequenceFilter,
    StoreChunk,
};
use kvd_tests::codec::fit_calibration;
use kvd_tests::wait::eventually;
use kvd_tests::{LayerRows, ModelShape, TestDaemon, TestRng, daemon};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const TOKENS: u32 = 100;
const KV_HEADS: u32 = 2;
const Q_HEADS: u32 = 4;
const DIM: u32 = 64;

async fn start() -> (TestDaemon, tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("kvd.region");
    let plan = daemon().with_setting("server.listen_region", &path.display().to_string());
    (plan.start().await, dir, path)
}

/// The numbers of the examples.
fn numbers(count: u32, seed: u32) -> Vec<u8> {
    let value = |i: u32| (((i * 7 + seed) % 61) as f32 - 30.0) / 16.0;
    (0..count).flat_map(|i| value(i).to_le_bytes()).collect()
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/kvd-c/examples").join(name)
}

/// The folder of the library, which is built with this test.
fn library_folder() -> PathBuf {
    let folder = std::env::current_exe().expect("a path").parent().expect("a folder").to_owned();
    assert!(folder.join("libkvd_c.so").exists(), "{} has no libkvd_c.so", folder.display());
    folder
}

/// Numbers that the Rust client is answered to the examples' question, as they print it.
async fn right_answer(daemon: &TestDaemon) -> Vec<f32> {
    let client = daemon.client().await;
    let geometry = Geometry {
        layers: 1,
        kv_heads: KV_HEADS,
        head_dim_k: DIM,
        head_dim_v: DIM,
        block_tokens: 0,
        dtype: DType::F32,
        rope_pairing: RopePairing::Half,
    };
    let (name, codec) = ("attend-rust".to_owned(), "kivi-4; recent=0".to_owned());
    let spec = ModelSpec { name, geometry, codec, calibration: bytes::Bytes::new() };
    let model = client.register_model(spec).await.expect("register").model;
    let sequence = client.open_sequence(model).await.expect("open");
    let rows = |seed| numbers(TOKENS * KV_HEADS * DIM, seed).into();
    let layer = LayerIndex(0);
    let (k, v) = (rows(1), rows(2));
    let chunk = StoreChunk { sequence, layer, start: 0, tokens: TOKENS, k, v };
    client.store_chunk(chunk).await.expect("store");
    let q: Vec<u8> = (0..Q_HEADS).flat_map(|head| numbers(DIM, 3 + head)).collect();
    let batch = AttendBatch {
        model,
        layer,
        q_heads: Q_HEADS,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: q.into(),
        per_query_errors: false,
    };
    let answer = client.attend_batch(batch).await.expect("attend");
    let out = answer.out.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
    out.chain(answer.lse.iter().copied()).collect()
}

/// The numbers that a program has printed.
fn printed(output: &Output) -> Vec<f32> {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    let text = std::str::from_utf8(&output.stdout).expect("UTF-8");
    text.lines().map(|line| line.parse().expect("a number")).collect()
}

/// Runs a program until it has ended; none where it is not there, which CI does not allow.
fn run(command: &mut Command) -> Option<Output> {
    match tokio::task::block_in_place(|| command.output()) {
        Ok(output) => Some(output),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "{command:?}: {error}");
            println!("SKIP {}: {error}", command.get_program().display());
            None
        }
    }
}

/// Compiles a C program against the library; none where there is no compiler.
fn compile(source: &Path, to: &Path) -> Option<PathBuf> {
    let program = to.join("program");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1"]);
    cc.arg(source).arg("-I").arg(example("..")).arg("-o").arg(&program);
    let compiled = run(cc.arg("-L").arg(library_folder()).args(["-lkvd_c", "-lpthread"]))?;
    let said = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{said}");
    Some(program)
}

/// Whether nothing is left of the programs: their sequences were of a session that has ended.
async fn assert_nothing_left(daemon: &TestDaemon) {
    let client = daemon.client().await;
    eventually("sequences of a program that has ended are closed", async || {
        let page = client.list_sequences(SequenceFilter::default()).await.expect("a list");
        page.sequences.len() == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_c_program_is_answered_what_the_rust_client_is() {
    let (daemon, dir, path) = start().await;
    let right = right_answer(&daemon).await;
    let Some(program) = compile(&example("attend.c"), dir.path()) else { return };
    let library = library_folder();
    let answer = run(Command::new(&program).arg(&path).env("LD_LIBRARY_PATH", &library));
    assert_eq!(printed(&answer.expect("a program")), right);
    assert_nothing_left(&daemon).await;
    // Where no daemon is, it says so and ends.
    let none = run(Command::new(&program).arg("/nowhere").env("LD_LIBRARY_PATH", &library));
    let none = none.expect("a program");
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(none.status.code() == Some(1) && said.starts_with("connect: code 100: "), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn python_is_answered_the_same_by_ctypes_alone() {
    let (daemon, _dir, path) = start().await;
    let right = right_answer(&daemon).await;
    let library = library_folder().join("libkvd_c.so");
    let script = example("attend.py");
    let Some(answer) = run(Command::new("python3").arg(script).arg(library).arg(&path)) else {
        return;
    };
    assert_eq!(printed(&answer), right);
    assert_nothing_left(&daemon).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_program_must_not_do_is_refused_with_its_code() {
    let (daemon, dir, path) = start().await;
    let source = example("../tests/misuse.c");
    let Some(program) = compile(&source, dir.path()) else { return };
    let ended = run(Command::new(&program).arg(&path).env("LD_LIBRARY_PATH", library_folder()));
    let ended = ended.expect("a program");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{}: {said}", ended.status);
    daemon.assert_serves().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_calibration_of_any_size_is_registered_as_by_grpc() {
    const CODEC: &str = "k=mean+pca/uniform(b=4,axis=token); v=mean+pca/uniform(b=4,axis=token)";
    let (daemon, dir, path) = start().await;
    // That of register.c.
    let shape = ModelShape {
        layers: 10,
        kv_heads: 8,
        group: 1,
        head_dim_k: DIM,
        head_dim_v: DIM,
        block_tokens: 64,
        dtype: DType::F16,
    };
    let mut rng = TestRng::new(5);
    let rows = |_| LayerRows::random_rows(&shape, 512, &mut rng);
    let rows: Vec<LayerRows> = (0..shape.layers).map(rows).collect();
    let calibration = fit_calibration(CODEC, &shape, &rows, 1);
    assert!(calibration.len() > 1 << 20, "{} bytes fit a message of a region", calibration.len());
    let (geometry, codec) = (shape.geometry(), CODEC.to_owned());
    let spec = ModelSpec { name: "large".to_owned(), geometry, codec, calibration };
    let client = daemon.client().await;
    let registered = client.register_model(spec.clone()).await.expect("register").model;

    let (file, library) = (dir.path().join("calibration"), library_folder());
    let source = example("../tests/register.c");
    let Some(program) = compile(&source, dir.path()) else { return };
    let register = |name: &str| {
        let mut command = Command::new(&program);
        command.arg(&path).args([name, CODEC]).arg(&file).env("LD_LIBRARY_PATH", &library);
        run(&mut command).expect("a program")
    };
    std::fs::write(&file, &spec.calibration).expect("a file");
    // The same content has the same id, and another name another.
    let [same, other] = ["large", "other"].map(register).map(|output| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        String::from_utf8_lossy(&output.stdout).trim().parse::<u64>().expect("an id")
    });
    assert_eq!(same, registered.0);
    assert_ne!(other, registered.0);
    // What is no calibration is refused by what it is.
    std::fs::write(&file, &spec.calibration[1..]).expect("a file");
    let refused = register("third");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("calibration"), "{said}");
    daemon.assert_serves().await;
}
