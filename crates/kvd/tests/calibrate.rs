//! `kvd calibrate`: from a model, a dump and a daemon, and its command line.
#![cfg(feature = "eval")]
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

mod support;

use kvd_client::{
    AttendBatch, AttendQuery, CalibrationOrder, Client, ErrorCode, LayerIndex, ModelSpec,
    StoreChunk,
};
use kvd_codec::{Calibration, ModelCodec};
use kvd_core::{DType, ModelId, Namespace, SequenceId};
use kvd_eval::calibrate::{
    self, CalibrateError, CalibrateOptions, DaemonSource, DumpSource, KvDump, LayerRows, RowSource,
};
use kvd_eval::split::BitSplit;
use std::path::Path;
use std::process::{Command, Output};

const VQ: &str = "k=smooth/vq(d=4,b=4); v=vq(d=4,b=4)";

fn kvd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvd")).args(arguments).output().unwrap()
}

/// Runs `kvd calibrate` in `dir`; returns what it printed.
fn calibrate(dir: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
    let output = command.arg("calibrate").args(arguments).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_same_text_codecs_and_seed_give_the_same_bytes_also_by_way_of_a_dump() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    let text = ["--tokens", "128", "--window", "64"];
    let codecs = ["--codec", VQ, "--codec", "k=raw; v=smooth/fp8"];
    let run = |rows: &[&str], out: &str, seed: &str| {
        calibrate(dir.path(), &[rows, &codecs, &["--out", out, "--seed", seed]].concat())
    };
    let said = run(&text, "a", "7");
    assert!(
        said.contains("a: ") && said.contains("128 tokens") && said.contains("seed 7"),
        "{said}"
    );
    run(&text, "b", "7");
    assert!(read("a") == read("b"), "equal runs wrote different artefacts");
    run(&text, "c", "8");
    assert!(read("a") != read("c"), "the seed changed nothing");
    let said = calibrate(dir.path(), &[&text[..], &["--dump", "rows"]].concat());
    assert!(said.contains("rows: 128 tokens per layer, with queries"), "{said}");
    run(&["--samples", "rows"], "d", "7");
    assert!(read("a") == read("d"), "the dump's artefact is not the model's");

    let artefact = Calibration::from_bytes(&read("a")).unwrap();
    let parts: Vec<_> = artefact.parts().map(|(side, text)| format!("{side} {text}")).collect();
    assert_eq!(parts, ["k smooth/vq(d=4,b=4)", "v /vq(d=4,b=4)", "v smooth"]);
    for codec in [codecs[1], codecs[3]] {
        let spec = kvd_codec::resolve_spec(codec).unwrap();
        ModelCodec::new(artefact.geometry().clone(), spec, Some(&artefact)).unwrap();
    }
}

/// Rows of one layer whose values f16 holds exactly.
fn rows() -> KvDump {
    let geometry = kvd_core::Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 32,
        head_dim_v: 32,
        block_tokens: 16,
        dtype: DType::F16,
        rope_pairing: kvd_core::RopePairing::Half,
    };
    // No token is a copy of another: copies count once.
    let draw = |i: u32, seed: u32| (i.wrapping_mul(2_654_435_761) >> 8).wrapping_add(seed) % 101;
    let values = |seed| (0..700 * 64).map(|i| draw(i, seed) as f32 / 8.0).collect();
    let layers = vec![LayerRows { k: values(0), v: values(5), q: Vec::new() }];
    KvDump { geometry, query_heads: 0, layers }
}

fn packed(values: &[f32]) -> bytes::Bytes {
    let mut bytes = vec![0; values.len() * 2];
    DType::F16.narrow_values(values, &mut bytes);
    bytes.into()
}

fn options(source: RowSource, codec: &str) -> CalibrateOptions {
    CalibrateOptions {
        source,
        codecs: vec![codec.parse().unwrap()],
        split: BitSplit::Sensitivity,
        seed: 3,
        dump: None,
    }
}

/// Attends layer 0 with 300 query tokens of four heads, 100 in a call as of a prefill that is cut
/// into pieces: fewer than a sample has memory for, and all of them are kept.
async fn attend(client: &Client, model: ModelId, sequence: SequenceId) -> Vec<f32> {
    // No query is a copy of another: copies count once.
    let draw = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) % 97;
    let q: Vec<f32> = (0..300 * 4 * 32).map(|i| draw(i) as f32 / 16.0 - 3.0).collect();
    for q in q.chunks(100 * 4 * 32) {
        let queries = vec![AttendQuery::new(sequence, 100)];
        let batch = AttendBatch {
            model,
            layer: LayerIndex(0),
            q_heads: 4,
            dtype: DType::F16,
            scale: None,
            soft_cap: None,
            queries,
            q: packed(q),
            per_query_errors: false,
        };
        client.attend_batch(batch).await.unwrap();
    }
    q
}

/// A sequence of 700 tokens and 600 queries of each KV head.
#[derive(Clone, Copy)]
struct SampledSequence {
    model: ModelId,
    sequence: SequenceId,
}

/// The daemon itself makes the same bytes, and none of too few rows or for strangers.
async fn assert_daemon_makes(client: &Client, of: SampledSequence, artefact: &[u8]) {
    let order = CalibrationOrder {
        model: of.model,
        sequences: vec![of.sequence],
        codecs: vec!["kvd-2".to_owned()],
        seed: 3,
        tokens_max: None,
    };
    let made = client.calibrate_model(order.clone()).await.unwrap();
    assert_eq!((made.tokens, made.queries_per_head), (700, 600));
    assert_eq!(made.calibration, artefact);
    let few = CalibrationOrder { tokens_max: Some(40), ..order.clone() };
    let refused = client.calibrate_model(few).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::InvalidArgument));
    assert!(refused.to_string().contains("at least 128 tokens"), "{refused}");
    let other = client.clone().with_namespace(&Namespace::new("other").unwrap());
    let refused = other.calibrate_model(order).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::NamespaceDenied));
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_and_queries_of_a_daemon_fit_like_the_same_rows_of_a_file() {
    let running = support::start(&[("limits.page_tokens_min", "1")]).await;
    let endpoint: kvd_client::Endpoint =
        format!("http://{}", running.bound_addresses().tcp.unwrap()).parse().unwrap();
    let client = Client::connect(endpoint.clone()).await.unwrap();
    let mut rows = rows();
    let spec = ModelSpec {
        name: "m".to_owned(),
        geometry: rows.geometry.clone(),
        codec: "raw".to_owned(),
        calibration: Default::default(),
    };
    let model = client.register_model(spec).await.unwrap().model;
    let sequence = client.open_sequence(model).await.unwrap();
    let source = |tokens| {
        let endpoint = endpoint.clone();
        RowSource::Daemon(DaemonSource {
            endpoint,
            options: Box::default(),
            namespace: None,
            sequences: vec![sequence],
            tokens,
        })
    };
    let error = calibrate::run_calibration(&options(source(None), VQ)).await.unwrap_err();
    let error = error.downcast::<CalibrateError>().unwrap();
    assert_eq!(error, CalibrateError::Empty { sequence: sequence.0 });

    let (k, v) = (packed(&rows.layers[0].k), packed(&rows.layers[0].v));
    let chunk = StoreChunk { sequence, layer: LayerIndex(0), start: 0, tokens: 700, k, v };
    client.store_chunk(chunk).await.unwrap();
    let live = calibrate::run_calibration(&options(source(None), VQ)).await.unwrap();
    assert_eq!((live.tokens, live.queries), (700, false));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows");
    std::fs::write(&path, rows.to_bytes().unwrap()).unwrap();
    let file = DumpSource { files: vec![path], block_tokens: 16, tokens: None };
    let dumped = calibrate::run_calibration(&options(RowSource::Dump(file), VQ)).await.unwrap();
    assert_eq!(live.artefact, dumped.artefact);
    let few = calibrate::run_calibration(&options(source(Some(40)), VQ)).await.unwrap();
    assert_eq!(few.tokens, 40);

    let error = calibrate::run_calibration(&options(source(None), "kvd-2")).await.unwrap_err();
    let error = error.downcast::<CalibrateError>().unwrap();
    assert_eq!(error, CalibrateError::NoQueries { codec: "kvd-2".to_owned() });
    assert!(error.to_string().contains("--model"), "{error}");

    let q = attend(&client, model, sequence).await;
    let live = calibrate::run_calibration(&options(source(None), "kvd-2")).await.unwrap();
    let found = (live.queries, live.queries_per_head, live.key_channels, live.set_aside.len());
    assert_eq!(found, (true, 600, 32, 0));
    let made = live.artefact.as_ref().unwrap().to_bytes();
    assert_daemon_makes(&client, SampledSequence { model, sequence }, &made).await;
    (rows.query_heads, rows.layers[0].q) = (4, q);
    let path = dir.path().join("rows with queries");
    std::fs::write(&path, rows.to_bytes().unwrap()).unwrap();
    let file = DumpSource { files: vec![path], block_tokens: 16, tokens: None };
    let dumped =
        calibrate::run_calibration(&options(RowSource::Dump(file), "kvd-2")).await.unwrap();
    assert_eq!(live.artefact, dumped.artefact);

    // Nobody else sees them, and another layer has its own.
    let other = client.clone().with_namespace(&Namespace::new("other").unwrap());
    let refused = other.sample_queries(model, LayerIndex(0)).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::NamespaceDenied));
    let refused = client.sample_queries(model, LayerIndex(1)).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::InvalidArgument));
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_calibrates_from_so_many_rows_and_only_from_exact_ones() {
    let rows = rows();
    // 200 tokens of 128 values of 4 bytes.
    let limit = ("limits.calibration_rows_bytes_max", "102400");
    let running = support::start(&[("limits.page_tokens_min", "1"), limit]).await;
    let address = running.bound_addresses().tcp.unwrap();
    let client = Client::connect(format!("http://{address}").parse().unwrap()).await.unwrap();
    let (k, v) = (packed(&rows.layers[0].k), packed(&rows.layers[0].v));
    for (codec, tokens_max, code, said) in [
        ("raw", None, ErrorCode::LimitExceeded, "so that 200 are left"),
        ("raw", Some(201), ErrorCode::LimitExceeded, "calibration_rows_bytes_max = 102400"),
        ("kivi-4", Some(200), ErrorCode::InvalidArgument, "registered with codec raw"),
    ] {
        let spec = ModelSpec {
            name: codec.to_owned(),
            geometry: rows.geometry.clone(),
            codec: codec.to_owned(),
            calibration: Default::default(),
        };
        let model = client.register_model(spec).await.unwrap().model;
        let sequence = client.open_sequence(model).await.unwrap();
        let (k, v) = (k.clone(), v.clone());
        let chunk = StoreChunk { sequence, layer: LayerIndex(0), start: 0, tokens: 700, k, v };
        client.store_chunk(chunk).await.unwrap();
        let (sequences, codecs) = (vec![sequence], vec![VQ.to_owned()]);
        let order = CalibrationOrder { model, sequences, codecs, seed: 3, tokens_max };
        let refused = client.calibrate_model(order.clone()).await.unwrap_err();
        assert_eq!(refused.code, Some(code), "{refused}");
        assert!(refused.to_string().contains(said), "{refused}");
        if codec == "raw" {
            let order = CalibrationOrder { tokens_max: Some(200), ..order };
            assert_eq!(client.calibrate_model(order).await.unwrap().tokens, 200);
        }
    }
    running.drain().await;
}

#[test]
fn what_cannot_be_calibrated_is_refused_with_its_exit_code() {
    let fixture =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/kv-tiny-b/model.safetensors");
    let out = ["--out", "/no/such/folder/file"];
    let vq = ["--codec", VQ];
    for (arguments, code, part) in [
        (vec![], 64, "--out"),
        (vec!["--out", "x"], 64, "--codec"),
        (vec!["--codec", "zip", "--out", "x"], 64, "not a preset"),
        (vec!["--endpoint", "http://127.0.0.1:9", "--out", "x", vq[0], vq[1]], 64, "--sequence"),
        (vec!["--samples", "x", "--model", "y", "--dump", "z"], 64, "cannot be used with"),
        (vec!["--samples", "/no/such", vq[0], vq[1], "--out", "x"], 64, "/no/such"),
        (vec!["--samples", fixture, vq[0], vq[1], "--out", "x"], 64, "no tensor layer.0.k"),
        (vec!["--tokens", "64", "--window", "64", "--codec", "fp8", "--out", "x"], 64, "fp8"),
        (vec!["--tokens", "64", "--window", "64", vq[0], vq[1], out[0], out[1]], 64, out[1]),
        (vec!["--window", "4096", vq[0], vq[1], "--out", "x"], 64, "2048 positions"),
    ] {
        let output = kvd(&[&["calibrate"], &arguments[..]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}
