//! Model folders that are broken, or whose config and weights do not fit: each is refused with the
//! name of what is wrong, and none of them ends the program.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

use kvd_engine::{
    LanguageModel, LocalAttention, ModelAssets, ModelConfig, ModelError, WeightFiles,
};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models").join(name)
}

/// A tensor as it lies in a file.
#[derive(Clone)]
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

type Named = BTreeMap<String, Stored>;

fn tensors(name: &str) -> Named {
    let bytes = std::fs::read(fixture(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |(name, view): (String, TensorView<'_>)| {
        let (dtype, shape) = (view.dtype(), view.shape().to_vec());
        (name, Stored { dtype, shape, bytes: view.data().to_vec() })
    };
    file.tensors().into_iter().map(stored).collect()
}

fn write(path: &Path, tensors: &Named) {
    let views = tensors.iter().map(|(name, t)| {
        (name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap())
    });
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn config(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name).join("config.json")).unwrap()).unwrap()
}

/// Reads `folder` with this config, as the program does.
fn load(config: &Value, folder: &Path) -> anyhow::Result<LanguageModel> {
    let config = ModelConfig::parse_json(config.to_string().as_bytes())?;
    LanguageModel::load_model(config, &WeightFiles::find_files(folder)?)
}

/// The refusal of a folder with one file of these tensors.
fn refused(config: &Value, tensors: &Named) -> ModelError {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    refusal(load(config, folder.path()))
}

fn refusal(read: anyhow::Result<LanguageModel>) -> ModelError {
    let error = read.err().expect("the folder was read");
    error.downcast::<ModelError>().unwrap_or_else(|error| panic!("no typed refusal: {error:#}"))
}

fn with(name: &str, changes: &Value) -> Value {
    let mut config = config(name);
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

#[test]
fn a_shape_that_disagrees_is_refused_with_both_shapes() {
    let at = |part: &str| format!("model.layers.0.{part}.weight");
    let cases = [
        ("llama", json!({"num_key_value_heads": null}), at("self_attn.k_proj"), [16, 16], [32, 16]),
        ("llama", json!({"num_key_value_heads": 1}), at("self_attn.k_proj"), [16, 16], [8, 16]),
        ("llama", json!({"num_attention_heads": 8}), at("self_attn.q_proj"), [32, 16], [64, 16]),
        ("llama", json!({"head_dim": null}), at("self_attn.q_proj"), [32, 16], [16, 16]),
        ("llama", json!({"head_dim": 16}), at("self_attn.q_proj"), [32, 16], [64, 16]),
        ("llama", json!({"intermediate_size": 32}), at("mlp.gate_proj"), [24, 16], [32, 16]),
        (
            "llama",
            json!({"vocab_size": 49}),
            "model.embed_tokens.weight".into(),
            [48, 16],
            [49, 16],
        ),
        ("qwen2", json!({"hidden_size": 8}), "model.embed_tokens.weight".into(), [48, 16], [48, 8]),
    ];
    for (folder, changes, tensor, is, described) in cases {
        let error = refusal(load(&with(folder, &changes), &fixture(folder)));
        let ModelError::Shape { name, found, expected, .. } = &error else { panic!("{error:?}") };
        assert_eq!((name, &found[..], &expected[..]), (&tensor, &is[..], &described[..]));
        let message = error.to_string();
        for part in [&tensor, &format!("{is:?}"), &format!("{described:?}")] {
            assert!(message.contains(part.as_str()), "{message}");
        }
    }
}

#[test]
fn tensors_that_are_missing_or_unknown_are_named() {
    let biased = with("llama", &json!({"attention_bias": true}));
    let error = refusal(load(&biased, &fixture("llama")));
    assert!(error.to_string().contains("layers.0.self_attn.q_proj.bias"), "{error}");
    let deep = with("llama", &json!({"num_hidden_layers": 3}));
    let error = refusal(load(&deep, &fixture("llama")));
    assert!(error.to_string().contains("model.layers.2."), "{error}");
    let shallow = with("llama", &json!({"num_hidden_layers": 1}));
    let error = refusal(load(&shallow, &fixture("llama")));
    assert!(error.to_string().contains("model.layers.1."), "{error}");
    let silent = with("llama-biases", &json!({"attention_bias": false}));
    let error = refusal(load(&silent, &fixture("llama-biases")));
    assert!(error.to_string().contains("attention_bias"), "{error}");
    let normless = with("qwen3", &json!({"model_type": "llama", "architectures": null}));
    let error = refusal(load(&normless, &fixture("qwen3")));
    assert!(error.to_string().contains("self_attn.k_norm.weight"), "{error}");
    let mut normed = with("llama", &json!({"model_type": "qwen3", "architectures": null}));
    let error = refusal(load(&normed, &fixture("llama")));
    assert!(error.to_string().contains("self_attn.q_norm.weight"), "{error}");
    normed["model_type"] = json!("qwen2");
    for key in ["attention_bias", "mlp_bias"] {
        normed[key] = Value::Null;
    }
    assert_eq!(load(&normed, &fixture("llama")).unwrap().folder_remarks().len(), 1);
}

#[test]
fn weights_that_are_not_read_are_named_with_what_to_do() {
    for (file, wanted) in [
        ("model-00001-of-00002.safetensors", "model.safetensors.index.json makes readable"),
        ("consolidated.safetensors", "another layout"),
        ("model.Q4_K_M.gguf", "gguf_model.py"),
        ("pytorch_model-00001-of-00002.bin", "safe_serialization"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(file), "x").unwrap();
        let error = WeightFiles::find_files(dir.path()).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(wanted), "{error}");
    }
}

/// It would be waited for, or read without end.
#[cfg(unix)]
#[test]
fn weights_that_are_no_file_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let weights = dir.path().join("model.safetensors");
    std::os::unix::fs::symlink("/dev/zero", &weights).unwrap();
    let error = refusal(load(&config("llama"), dir.path()));
    assert!(error.to_string().contains("no file"), "{error}");
    std::fs::remove_file(&weights).unwrap();
    std::fs::write(&weights, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    let error = refusal(load(&config("llama"), dir.path()));
    assert!(error.to_string().contains("git lfs pull"), "{error}");
}

#[test]
fn some_biases_of_qwen2_are_not_enough() {
    let mut tensors = tensors("qwen2");
    tensors.remove("model.layers.1.self_attn.v_proj.bias").unwrap();
    let error = refused(&config("qwen2"), &tensors);
    assert!(error.to_string().contains("layers.1.self_attn.v_proj.bias"), "{error}");
}

#[test]
fn the_output_projection_is_the_one_that_the_config_says() {
    let untied = with("llama-tied", &json!({"tie_word_embeddings": false}));
    let error = refusal(load(&untied, &fixture("llama-tied")));
    assert!(error.to_string().contains("lm_head.weight"), "{error}");
    assert!(error.to_string().contains("tie_word_embeddings"), "{error}");
    let tied = with("llama", &json!({"tie_word_embeddings": true}));
    let error = refusal(load(&tied, &fixture("llama")));
    assert!(error.to_string().contains("differs"), "{error}");
    let (once, twice) = ("llama-tied", "llama-tied-twice");
    let numbers = |name: &str| load(&config(name), &fixture(name)).unwrap().parameters();
    assert_eq!(numbers(once), numbers(twice));
}

#[test]
fn old_frequencies_are_left_out_and_other_types_refused() {
    let mut tensors = tensors("llama");
    let stored = Stored { dtype: Dtype::F32, shape: vec![4], bytes: vec![0; 16] };
    tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), stored);
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), &tensors);
    load(&config("llama"), folder.path()).unwrap();
    let norm = tensors.get_mut("model.norm.weight").unwrap();
    *norm = Stored { dtype: Dtype::I8, shape: vec![16], bytes: vec![0; 16] };
    let error = refused(&config("llama"), &tensors);
    assert!(error.to_string().contains("model.norm.weight: is I8"), "{error}");
}

#[test]
fn a_weight_that_is_no_number_is_refused_by_its_tensor() {
    for (name, bad) in [
        ("model.norm.weight", f32::NAN),
        ("lm_head.weight", f32::INFINITY),
        ("model.layers.1.mlp.down_proj.weight", f32::NEG_INFINITY),
        ("model.layers.0.self_attn.k_proj.weight", f32::NAN),
    ] {
        let mut tensors = tensors("llama-f32");
        let stored = tensors.get_mut(name).unwrap();
        assert_eq!(stored.dtype, Dtype::F32);
        stored.bytes[12..16].copy_from_slice(&bad.to_le_bytes());
        let error = refused(&config("llama-f32"), &tensors).to_string();
        assert!(error.starts_with(&format!("tensor {name}: number 3 is {bad}")), "{error}");
    }
}

/// A copy of the sharded fixture.
fn sharded() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("llama-sharded")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn change_index(folder: &Path, change: impl Fn(&mut serde_json::Map<String, Value>)) {
    let path = folder.join("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(index["weight_map"].as_object_mut().unwrap());
    std::fs::write(path, index.to_string()).unwrap();
}

#[test]
fn shards_and_their_index_must_agree() {
    let config = config("llama-sharded");
    let second = "model-00002-of-00004.safetensors";
    let folder = sharded();
    std::fs::remove_file(folder.path().join(second)).unwrap();
    let error = refusal(load(&config, folder.path())).to_string();
    assert!(error.contains(second) && error.contains("missing"), "{error}");
    let cases: [(&str, &str, &str); 5] = [
        ("model.norm.weight", second, "has no model.norm.weight"),
        ("model.norm.weight", "../model.safetensors", "not a file of this folder"),
        ("model.norm.weight", "/etc/passwd", "not a file of this folder"),
        ("model.norm.weight", "..", "not a file of this folder"),
        ("a.tensor", second, "has no a.tensor"),
    ];
    for (tensor, file, expected) in cases {
        let folder = sharded();
        change_index(folder.path(), |map| {
            map.insert(tensor.to_owned(), json!(file));
        });
        let error = refusal(load(&config, folder.path())).to_string();
        let other = "which the index does not list there";
        assert!(error.contains(expected) || error.contains(other), "{file}: {error}");
    }
    let folder = sharded();
    change_index(folder.path(), |map| drop(map.remove("model.norm.weight")));
    let error = refusal(load(&config, folder.path())).to_string();
    assert!(error.contains("model.norm.weight, which the index does not list"), "{error}");
    change_index(folder.path(), serde_json::Map::clear);
    let error = refusal(load(&config, folder.path())).to_string();
    assert!(error.contains("lists no tensors"), "{error}");
    std::fs::write(folder.path().join("model.safetensors.index.json"), "{}").unwrap();
    let error = refusal(load(&config, folder.path())).to_string();
    assert!(error.contains("weight_map"), "{error}");
}

#[test]
fn files_that_are_missing_or_cut_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let message = |folder: &Path| format!("{:#}", ModelAssets::from_dir(folder).err().unwrap());
    assert!(message(folder.path()).contains("config.json: cannot be read"));
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    std::fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    let found = message(folder.path());
    assert!(found.contains("model.safetensors.index.json"), "{found}");
    assert!(found.contains("pytorch_model.bin is not read"), "{found}");
    let weights = std::fs::read(fixture("llama").join("model.safetensors")).unwrap();
    for end in [0, 7, 8, 100, weights.len() - 1] {
        std::fs::write(folder.path().join("model.safetensors"), &weights[..end]).unwrap();
        let error = refusal(load(&config("llama"), folder.path())).to_string();
        assert!(error.contains("is not a safetensors file"), "{error}");
    }
    assert!(message(folder.path()).contains("tokenizer.json: cannot be read"));
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert!(message(folder.path()).contains("tokenizer.json: "));
    let tokenizer = include_bytes!("../../../tests/fixtures/kv-tiny-b/tokenizer.json");
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let assets = ModelAssets::from_dir(folder.path()).unwrap();
    assert!(assets.held_out().unwrap_err().to_string().contains("eval.txt"));
    std::fs::write(folder.path().join("eval.txt"), b"good\xff").unwrap();
    assert!(message(folder.path()).contains("eval.txt: is not UTF-8 from byte 4 on"));
    std::fs::write(folder.path().join("eval_ids.u16"), b"odd").unwrap();
    assert!(message(folder.path()).contains("eval_ids.u16: has an odd number of bytes"));
}

#[tokio::test]
async fn texts_of_other_models_and_texts_that_are_too_long_are_refused() {
    let model = load(&config("llama-longrope"), &fixture("llama-longrope")).unwrap();
    let heads = model.config().attention_heads();
    let mut attention = LocalAttention::new(heads, model.config().num_hidden_layers);
    let error = model.forward_tokens(&[3, 48], 0, &mut attention).await.unwrap_err().to_string();
    assert!(error.contains("token 48 lies outside the vocabulary of 48"), "{error}");
    let error = model.forward_tokens(&[1; 49], 0, &mut attention).await.unwrap_err().to_string();
    assert!(error.contains("48 positions"), "{error}");
    assert!(model.forward_tokens(&[], 0, &mut attention).await.unwrap().is_empty());
    assert!(model.forward_tokens(&[1], usize::MAX, &mut attention).await.is_err());
}

/// Values that a person or a writer may put anywhere.
fn strange() -> Vec<Value> {
    let numbers = [0.0, -1.0, 1.0, 2.0, 3.0, 7.0, 16.0, 1e9, 1e18, 1e300, 1e-300, 0.5];
    let mut values: Vec<_> = numbers
        .into_iter()
        .map(|number: f64| {
            if number.fract() == 0.0 && number.abs() < 1e10 {
                json!(number as i64)
            } else {
                json!(number)
            }
        })
        .collect();
    values.extend([json!(null), json!(true), json!(false), json!(""), json!("64"), json!([])]);
    values.extend([json!({}), json!([null]), json!(["full_attention", "sliding_attention"])]);
    values.extend([
        json!(u64::MAX),
        json!(i64::MIN),
        json!({"rope_type": "yarn", "factor": 1e300}),
    ]);
    let two = |kind: &str| {
        json!({"rope_type": kind, "factor": 2, "low_freq_factor": 1,
        "high_freq_factor": 4, "rope_theta": 1.0000001, "original_max_position_embeddings": 1})
    };
    values.extend(["linear", "llama3", "yarn", "dynamic", "longrope"].map(two));
    values
}

const EXTRA: [&str; 8] = [
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "layer_types",
    "sliding_window",
    "original_max_position_embeddings",
    "num_experts",
    "attention_bias",
];

/// Reads a folder with a changed config and runs three tokens; says whether it was read.
async fn tried(config: &Value, name: &str) -> bool {
    let model = match load(config, &fixture(name)) {
        Ok(model) => model,
        Err(error) => {
            assert!(error.is::<ModelError>(), "{config}: {error:#}");
            return false;
        }
    };
    let layers = model.config().num_hidden_layers;
    let mut attention = LocalAttention::exact_cache(model.config().attention_heads(), layers);
    if let Ok(logits) = model.forward_tokens(&[1, 2, 3], 0, &mut attention).await {
        assert!(logits.iter().all(|x| x.is_finite()), "{config}");
    }
    true
}

/// Every key of every kind of folder with every strange value: read or refused, never a panic,
/// and what is read computes finite logits.
#[tokio::test]
async fn no_value_of_any_key_ends_the_program() {
    let (mut read, mut refused) = (0, 0);
    for name in ["llama-yarn", "mistral-window", "qwen2-window", "qwen3-layer-types"] {
        let original = config(name);
        let keys = original.as_object().unwrap().keys().map(String::as_str).chain(EXTRA);
        for key in keys {
            for value in strange() {
                let mut config = original.clone();
                config[key] = value;
                *(if tried(&config, name).await { &mut read } else { &mut refused }) += 1;
            }
        }
    }
    assert!(read > 500 && refused > 1500, "{read} read, {refused} refused");
}

/// Four keys changed at once, 4,000 times.
#[tokio::test]
async fn no_combination_of_values_ends_the_program() {
    // Numerical Recipes' generator: the same changes in every run.
    let mut state = 1u32;
    let mut below = |count: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % count
    };
    let strange = strange();
    for name in ["llama-llama3", "mistral-window-1", "qwen2-yarn", "qwen3-layer-types"] {
        let original = config(name);
        let keys = original.as_object().unwrap().keys().map(String::as_str).chain(EXTRA);
        let keys: Vec<_> = keys.collect();
        for _ in 0..1000 {
            let mut config = original.clone();
            for _ in 0..4 {
                config[keys[below(keys.len())]] = strange[below(strange.len())].clone();
            }
            tried(&config, name).await;
        }
    }
}
