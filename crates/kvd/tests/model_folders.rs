//! `kvd eval` of model folders that `transformers` wrote, and of ones that are refused.
#![cfg(feature = "eval")]
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use std::path::Path;
use std::process::{Command, Output};

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// A copy of a folder with 96 tokens of text; `change` edits its config.
fn folder(name: &str, change: impl Fn(&mut serde_json::Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join("models").join(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let tokenizer = fixtures().join("kv-tiny-b/tokenizer.json");
    std::fs::copy(tokenizer, folder.path().join("tokenizer.json")).unwrap();
    let ids: Vec<u8> = (0..96u16).flat_map(|i| (i * i % 47).to_le_bytes()).collect();
    std::fs::write(folder.path().join("eval_ids.u16"), ids).unwrap();
    let config = folder.path().join("config.json");
    let mut json = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(config, json.to_string()).unwrap();
    folder
}

fn eval(folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvd"));
    command.args(["eval", "--codec", "raw", "--passages", "2", "--tokens", "48", "--json", "-"]);
    command.arg("--model").arg(folder).output().unwrap()
}

fn report(folder: &Path) -> serde_json::Value {
    let done = eval(folder);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// The daemon hides what lies before a layer's window, as the run without kvd does.
#[test]
fn windows_of_layers_are_those_of_the_model_through_the_daemon_too() {
    for (name, key) in [("mistral-window", "sliding_window"), ("qwen3-layer-types", "layer_types")]
    {
        let read = report(folder(name, |_| ()).path());
        let block = &read["blocks"][0];
        let row = &block["rows"][0];
        let kl = row["quality"]["kl_nats"].as_f64().unwrap();
        let kernel = row["attention_error"]["kernel"].as_f64().unwrap();
        assert!(kl.abs() < 1e-6 && kernel < 1e-5, "{name}: {row}");
        let whole = folder(name, |config| config[key] = serde_json::Value::Null);
        if name == "qwen3-layer-types" {
            // The window of the class begins at layer 28: this model has none then.
            let config = std::fs::read_to_string(whole.path().join("config.json")).unwrap();
            assert!(config.contains(r#""max_window_layers":28"#), "{config}");
        }
        let perplexity =
            |report: &serde_json::Value| report["blocks"][0]["without_kvd"]["perplexity"].as_f64();
        let (with, without) = (perplexity(&read), perplexity(&report(whole.path())));
        assert!((with.unwrap() / without.unwrap() - 1.0).abs() > 1e-3, "{with:?} {without:?}");
    }
}

#[test]
fn what_is_refused_ends_with_64_and_its_name() {
    let set = |key: &'static str, value: serde_json::Value| {
        folder("llama", move |config| config[key] = value.clone())
    };
    for (key, value, named) in [
        ("num_attention_heads", 0.into(), "num_attention_heads"),
        ("num_key_value_heads", serde_json::Value::Null, "self_attn.k_proj.weight"),
        ("final_logit_softcapping", 30.into(), "final_logit_softcapping"),
        ("attention_bias", true.into(), "self_attn.q_proj.bias"),
        ("hidden_size", "16".into(), "hidden_size"),
    ] {
        let done = eval(set(key, value).path());
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(64), "{key}: {said}");
        assert!(said.contains(named), "{said}");
    }
    let silent = folder("llama", |_| ());
    std::fs::remove_file(silent.path().join("eval_ids.u16")).unwrap();
    let done = eval(silent.path());
    assert_eq!(done.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&done.stderr).contains("eval.txt"));
    // A text with a token that the model does not have, in the last place: a target alone.
    let foreign = folder("llama", |_| ());
    let mut ids = std::fs::read(foreign.path().join("eval_ids.u16")).unwrap();
    ids[94..96].copy_from_slice(&48u16.to_le_bytes());
    std::fs::write(foreign.path().join("eval_ids.u16"), ids).unwrap();
    let done = eval(foreign.path());
    assert_eq!(done.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&done.stderr).contains("token 48 lies outside"));
}
