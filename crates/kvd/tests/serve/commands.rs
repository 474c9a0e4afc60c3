//! Commands that ask a daemon: `kvd health`, `status`, `models`, `namespaces`, `describe`.

use super::process::{Process, kvd, output, run_at};
use super::tiny_geometry;
use kvd_client::{Client, Endpoint, HeldSession, ModelSpec, Namespace, SessionOptions};
use serde_json::Value;

/// Commands that tell something of a daemon, with the values of their JSON that their text has too.
const OF_DAEMON: [(&str, &[&str]); 8] = [
    ("health", &["/serving"]),
    (
        "status",
        &[
            "/serving",
            "/version",
            "/boot_id",
            "/device",
            "/precision",
            "/namespace",
            "/pools/0/device",
            "/pools/0/tier",
            "/sessions",
            "/models/0/name",
            "/models/0/model_id",
        ],
    ),
    ("models list", &["/0/model_id", "/0/name", "/0/codec", "/0/sequences"]),
    ("namespaces list", &["/0/namespace", "/0/models", "/0/sequences", "/0/sessions", "/0/weight"]),
    (
        "describe model",
        &[
            "/model_id",
            "/name",
            "/codec",
            "/codec_spec",
            "/fingerprint",
            "/layers",
            "/kv_heads",
            "/head_dim_k",
            "/head_dim_v",
            "/block_tokens",
            "/sequences",
        ],
    ),
    ("sequences list", &["/0/sequence", "/0/model", "/0/session", "/0/tokens"]),
    ("sessions list", &["/0/session", "/0/name", "/0/sequences"]),
    ("cache stat", &["/0/device", "/0/blocks", "/0/leases", "/0/published", "/0/evicted"]),
];
/// Commands that ask none.
const OF_PROGRAM: [(&str, &[&str]); 3] = [
    (
        "describe codec",
        &["/codec", "/summary", "/spec", "/bits_k", "/bits_v", "/source", "/recent"],
    ),
    ("codecs", &["/presets/0/name"]),
    ("metrics", &["/0/name", "/0/kind"]),
];
/// Commands that ask a daemon and change, measure or watch it.
const OTHERS: [&str; 7] = [
    "bench mixed",
    "cache drop",
    "calibrate",
    "namespaces set",
    "sequences close",
    "sessions close",
    "top",
];

/// Whether a text says what a JSON has at a pointer: a flag by its name.
fn says(text: &str, json: &Value, pointer: &str) -> bool {
    match json.pointer(pointer) {
        Some(Value::String(value)) => !value.is_empty() && text.contains(value),
        Some(Value::Number(value)) => {
            text.split(|c: char| !c.is_alphanumeric()).any(|word| word == value.to_string())
        }
        Some(Value::Bool(true)) => text.contains(&pointer[1..]),
        _ => false,
    }
}

/// Holds a command's text against its JSON.
fn check_command(run: impl Fn(&[&str]) -> (Option<i32>, String), command: &str, facts: &[&str]) {
    let named = match command {
        "describe model" => Some("tiny"),
        "describe codec" => Some("kivi-4"),
        _ => None,
    };
    let words: Vec<_> = command.split(' ').chain(named).collect();
    let (code, text) = run(&words);
    assert!(code == Some(0), "{command}: {text}");
    let (code, json) = run(&[&words[..], &["--json"]].concat());
    assert!(code == Some(0), "{command}: {json}");
    let json: Value = serde_json::from_str(&json).unwrap_or_else(|e| panic!("{command}: {e}"));
    for fact in facts {
        assert!(says(&text, &json, fact), "{command}: {fact} of {json:#} in {text}");
    }
}

/// Commands whose manual page has an option in its synopsis.
fn commands_with(option: &str) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a set-up");
    let mut command = kvd();
    command.arg("man-pages").arg(folder.path());
    assert!(output(command).status.success());
    let option = format!("[\\fB\\-\\-{option}\\fR]");
    let pages = std::fs::read_dir(folder.path()).expect("a folder").map_while(Result::ok);
    let has = |page: &std::fs::DirEntry| {
        std::fs::read_to_string(page.path()).expect("a page").contains(&option)
    };
    let name = |page: std::fs::DirEntry| page.file_name().to_string_lossy().into_owned();
    let command =
        |page: String| page.trim_start_matches("kvd-").trim_end_matches(".1").replace('-', " ");
    pages.filter(has).map(name).map(command).collect()
}

/// The JSON that a command prints.
fn read_json(endpoint: &str, arguments: &[&str]) -> Value {
    let (code, text) = run_at(endpoint, &[arguments, &["--json"]].concat());
    assert_eq!(code, Some(0), "{text}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A model with a sequence in a namespace, of a session.
async fn fill(endpoint: &str, namespace: &str) -> HeldSession {
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
    let session = client.hold_session(SessionOptions::new("of-test")).await.expect("a set-up");
    session.open_sequence(model.model).await.expect("a set-up");
    session
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_tells_operators_what_it_is_and_holds() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("kvd.sock");
    let unix = socket.display().to_string();
    let daemon = Process::start(&["--unix", &unix, "--set", "namespaces.allowed=[\"a\", \"b\"]"]);
    let endpoint = format!("http://{}", daemon.tcp());
    let of_unix = format!("unix:{unix}");
    let _sessions = (fill(&endpoint, "a").await, fill(&endpoint, "b").await);
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_that_tells_something_says_the_same_as_json() {
    let daemon = Process::start(&[]);
    let endpoint = format!("http://{}", daemon.tcp());
    let _session = fill(&endpoint, "default").await;
    for (command, facts) in OF_DAEMON {
        check_command(|words| run_at(&endpoint, words), command, facts);
    }
    for (command, facts) in OF_PROGRAM {
        let run = |words: &[&str]| {
            let mut command = kvd();
            command.args(words);
            let said = output(command);
            (said.status.code(), String::from_utf8(said.stdout).expect("text"))
        };
        check_command(run, command, facts);
    }
    let (asking, with_json) = (commands_with("endpoint"), commands_with("json"));
    assert!(asking.len() >= OF_DAEMON.len(), "{asking:?}");
    for command in asking.iter().filter(|command| !OTHERS.contains(&command.as_str())) {
        assert!(OF_DAEMON.iter().any(|(of, _)| of == command), "{command} is not tried here");
        assert!(with_json.contains(command), "{command} has no --json");
    }
}

#[test]
fn exit_codes_say_that_nobody_answers() {
    for command in ["health", "status", "top", "models list", "sequences list", "cache stat"] {
        let words: Vec<_> = command.split(' ').collect();
        let (code, text) = run_at("http://127.0.0.1:1", &words);
        assert!(code == Some(69) && text.contains("no daemon answers"), "{command}: {text}");
    }
}
