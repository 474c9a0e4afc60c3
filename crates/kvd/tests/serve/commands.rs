//! Commands that ask a daemon: `kvd health`, `status`, `models`, `namespaces`, `describe`.

use super::process::{Process, run_at};
use super::tiny_geometry;
use kvd_client::{Client, Endpoint, ModelSpec, Namespace};
use serde_json::Value;

/// The JSON that a command prints.
fn read_json(endpoint: &str, arguments: &[&str]) -> Value {
    let (code, text) = run_at(endpoint, &[arguments, &["--json"]].concat());
    assert_eq!(code, Some(0), "{text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A model with a sequence in a namespace.
async fn fill(endpoint: &str, namespace: &str) {
    let endpoint: Endpoint = endpoint.parse().expect("a set-up");
    let client = Client::connect(endpoint).await.expect("a set-up");
    let client = client.with_namespace(&Namespace::new(namespace).expect("a set-up"));
    let spec = ModelSpec {
        name: "tiny".to_owned(),
        geometry: tiny_geometry(),
        codec: "kivi-4".to_owned(),
        calibration: bytes::Bytes::new(),
    };
    let model = client.register_model(spec).await.expect("a set-up");
    client.open_sequence(model.model).await.expect("a set-up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_tells_operators_what_it_is_and_holds() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("kvd.sock");
    let unix = socket.display().to_string();
    let daemon = Process::start(&["--unix", &unix, "--set", "namespaces.allowed=[\"a\", \"b\"]"]);
    let endpoint = format!("http://{}", daemon.tcp());
    let of_unix = format!("unix:{unix}");
    fill(&endpoint, "a").await;
    fill(&endpoint, "b").await;
    for endpoint in [&endpoint, &of_unix] {
        assert_eq!(run_at(endpoint, &["health"]), (Some(0), "serving\n".to_owned()));
    }
    let status = read_json(&of_unix, &["status", "--namespace", "a"]);
    assert_eq!(status["serving"], true);
    assert_eq!(status["pools"][0]["capacity_bytes"], 64 << 20);
    assert_eq!(status["models"][0]["name"], "tiny");
    let (code, text) = run_at(&of_unix, &["status", "--namespace", "a"]);
    assert!(code == Some(0) && text.contains("sequences 1"), "{text}");
    let models = read_json(&endpoint, &["models", "list", "--namespace", "b"]);
    assert_eq!((&models[0]["codec"], &models[0]["sequences"]), (&"kivi-4".into(), &1.into()));
    let namespaces = read_json(&endpoint, &["namespaces", "list", "--namespace", "a"]);
    let names: Vec<_> =
        namespaces.as_array().unwrap().iter().map(|row| &row["namespace"]).collect();
    assert_eq!(names, ["a", "b"]);
    let model = read_json(&endpoint, &["describe", "model", "tiny", "--namespace", "a"]);
    assert_eq!((&model["layers"], &model["head_dim_k"]), (&1.into(), &64.into()));
    let top = ["top", "--once", "--interval", "100ms", "--namespace", "a"];
    let (code, text) = run_at(&endpoint, &top);
    assert!(code == Some(0) && text.contains("sequences 1") && text.contains("tiny"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let (code, text) = run_at(&endpoint, &["describe", "model", "none", "--namespace", "a"]);
    assert!(code == Some(1) && text.contains("kvd models list"), "{text}");
}

#[test]
fn exit_codes_say_that_nobody_answers() {
    for command in ["health", "status", "top", "models list", "sequences list", "cache stat"] {
        let words: Vec<_> = command.split(' ').collect();
        let (code, text) = run_at("http://127.0.0.1:1", &words);
        assert!(code == Some(69) && text.contains("no daemon answers"), "{command}: {text}");
    }
}
