//! Folders that `transformers` wrote, against its own logits: `tests/fixtures/models/make.py`.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use kvd_engine::{LanguageModel, LocalAttention, ModelConfig, WeightFiles};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// Folders that the script writes; one that is lost would be a test that is not run.
const FOLDERS: usize = 45;

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models");
    let entries = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

/// Output of transformers: tokens and logits `[tokens, vocabulary]`.
struct Expected {
    tokens: Vec<u32>,
    logits: Vec<f32>,
}

fn expected(folder: &Path) -> Expected {
    let bytes = std::fs::read(folder.join("logits.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    Expected {
        tokens: words("tokens").into_iter().map(u32::from_le_bytes).collect(),
        logits: words("logits").into_iter().map(f32::from_le_bytes).collect(),
    }
}

fn load(folder: &Path) -> LanguageModel {
    let config = ModelConfig::parse_json(&std::fs::read(folder.join("config.json")).unwrap());
    let config = config.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let weights = WeightFiles::find_files(folder).unwrap();
    LanguageModel::load_model(config, &weights)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
}

async fn logits(model: &LanguageModel, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let config = model.config();
    let mut attention =
        LocalAttention::exact_cache(config.attention_heads(), config.num_hidden_layers);
    let mut logits = Vec::new();
    for (i, step) in tokens.chunks(chunk).enumerate() {
        logits.extend(model.forward_tokens(step, i * chunk, &mut attention).await.unwrap());
    }
    logits
}

/// Largest difference of two runs; infinite where one has a value that is no number.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let each = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    each.fold(0.0, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) })
}

#[tokio::test]
async fn every_folder_gives_the_logits_that_transformers_gives() {
    let folders = folders();
    assert_eq!(folders.len(), FOLDERS, "{folders:?}");
    let mut wrong = Vec::new();
    for folder in &folders {
        let (model, expected) = (load(folder), expected(folder));
        for chunk in [expected.tokens.len(), 7] {
            let ours = logits(&model, &expected.tokens, chunk).await;
            let off = difference(&ours, &expected.logits);
            println!("{} in steps of {chunk}: {off:.1e}", folder.display());
            if off > 1e-4 {
                wrong.push(format!("{} in steps of {chunk}: {off}", folder.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The comparison can fail: each folder's keys matter.
#[tokio::test]
async fn a_folder_read_as_another_one_gives_other_logits() {
    for (name, key, value) in [
        ("llama-theta", "rope_parameters", "null"),
        ("llama-linear", "rope_parameters", "null"),
        ("llama-yarn", "rope_parameters", r#"{"rope_type": "default", "rope_theta": 500.0}"#),
        ("llama-dynamic", "rope_parameters", "null"),
        ("llama-gelu", "hidden_act", r#""gelu_new""#),
        ("mistral-window", "sliding_window", "null"),
        ("qwen2-window", "max_window_layers", "0"),
        ("llama", "rms_norm_eps", "0.01"),
    ] {
        let folder = folders().into_iter().find(|path| path.ends_with(name)).unwrap();
        let json = std::fs::read(folder.join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        json[key] = serde_json::from_str(value).unwrap();
        if name == "qwen2-window" {
            json["layer_types"] = serde_json::Value::Null;
        }
        let config = ModelConfig::parse_json(json.to_string().as_bytes()).unwrap();
        let model =
            LanguageModel::load_model(config, &WeightFiles::find_files(&folder).unwrap()).unwrap();
        let expected = expected(&folder);
        let off = difference(&logits(&model, &expected.tokens, 40).await, &expected.logits);
        assert!(off > 1e-3, "{name} with {key} = {value} differs by {off}");
    }
}
