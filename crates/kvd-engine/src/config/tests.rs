use super::*;
use serde_json::json;

fn base(model_type: &str) -> Value {
    json!({"model_type": model_type, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "bos_token_id": 0})
}

/// The base with some keys replaced.
fn changed(model_type: &str, changes: &Value) -> Value {
    let mut config = base(model_type);
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn parse(config: &Value) -> Result<ModelConfig> {
    ModelConfig::parse_json(config.to_string().as_bytes())
}

fn without(model_type: &str, key: &str) -> Value {
    let mut config = base(model_type);
    config.as_object_mut().unwrap().remove(key);
    config
}

/// The key that is refused, and the whole message.
fn refused(model_type: &str, changes: &Value) -> (String, String) {
    let error = parse(&changed(model_type, changes));
    let error = error.expect_err(&format!("{model_type} with {changes} was read"));
    let ModelError::Key { key, .. } = &error else { panic!("{error:?}") };
    (key.clone(), error.to_string())
}

fn rope(model_type: &str, changes: &Value) -> RopeSpec {
    parse(&changed(model_type, changes)).unwrap().rope_spec(LayerKind::Full).clone()
}

#[test]
fn absent_keys_and_null_take_the_defaults_of_the_class() {
    for family in ModelFamily::ALL {
        let mut config = base(family.name());
        let optional = [
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "hidden_act",
            "bos_token_id",
            "max_position_embeddings",
            "intermediate_size",
        ];
        for key in optional {
            config[key] = Value::Null;
        }
        let read = parse(&config).unwrap();
        assert_eq!(read.attention_heads(), HeadCounts { query: 4, kv: 4, dim: 16 });
        assert_eq!((read.rms_norm_eps, read.bos_token_id), (1e-6, 0));
        assert!(!read.tie_word_embeddings);
        assert_eq!(read.max_position_embeddings, family.positions_default());
        assert_eq!(read.rope_spec(LayerKind::Full).theta, 10_000.0);
    }
    assert_eq!(parse(&without("qwen3", "head_dim")).unwrap().head_dim(), 128);
    assert_eq!(parse(&without("qwen2", "head_dim")).unwrap().head_dim(), 16);
    assert_eq!(parse(&base("mistral")).unwrap().layer_window(1), Some(4096));
    assert_eq!(parse(&base("llama")).unwrap().layer_window(1), None);
}

/// One row for each key that changes the computation: the refused value, and the key's name.
#[test]
fn what_is_not_computed_is_refused_by_its_key() {
    let yarn = json!({"rope_type": "yarn", "factor": 2.0, "foo": 1});
    let cases = [
        ("model_type", json!({"model_type": "gpt2"})),
        ("model_type", json!({"model_type": null})),
        ("architectures", json!({"architectures": ["LlamaForSequenceClassification"]})),
        ("architectures", json!({"architectures": ["MistralForCausalLM"]})),
        ("hidden_act", json!({"hidden_act": "tanh"})),
        ("hidden_activation", json!({"hidden_activation": "gelu_pytorch_tanh"})),
        ("partial_rotary_factor", json!({"partial_rotary_factor": 0.5})),
        (
            "rope_parameters.partial_rotary_factor",
            json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
        ),
        ("sliding_window", json!({"sliding_window": 128})),
        ("use_sliding_window", json!({"use_sliding_window": true})),
        ("layer_types", json!({"layer_types": ["full_attention", "sliding_attention"]})),
        ("layer_types", json!({"layer_types": ["full_attention"]})),
        ("layer_types", json!({"layer_types": ["full_attention", "linear_attention"]})),
        ("attn_logit_softcapping", json!({"attn_logit_softcapping": 50.0})),
        ("final_logit_softcapping", json!({"final_logit_softcapping": 30.0})),
        ("query_pre_attn_scalar", json!({"query_pre_attn_scalar": 224})),
        ("attention_multiplier", json!({"attention_multiplier": 0.5})),
        ("residual_multiplier", json!({"residual_multiplier": 0.22})),
        ("embedding_multiplier", json!({"embedding_multiplier": 12.0})),
        ("logits_scaling", json!({"logits_scaling": 8.0})),
        ("logit_scale", json!({"logit_scale": 0.0625})),
        ("quantization_config", json!({"quantization_config": {"quant_method": "gptq"}})),
        ("num_local_experts", json!({"num_local_experts": 8})),
        ("num_experts", json!({"num_experts": 60})),
        ("num_experts_per_tok", json!({"num_experts_per_tok": 2})),
        ("use_qk_norm", json!({"use_qk_norm": true})),
        ("clip_qkv", json!({"clip_qkv": 8.0})),
        ("is_causal", json!({"is_causal": false})),
        ("is_encoder_decoder", json!({"is_encoder_decoder": true})),
        ("rope_interleaved", json!({"rope_interleaved": true})),
        ("pruned_heads", json!({"pruned_heads": {"0": [1]}})),
        ("attention_chunk_size", json!({"attention_chunk_size": 128})),
        ("no_rope_layers", json!({"no_rope_layers": [1, 0]})),
        ("per_layer_config", json!({"per_layer_config": {"0": {"head_dim": 8}}})),
        ("auto_map", json!({"auto_map": {"AutoModelForCausalLM": "modeling.Foo"}})),
        ("a_key_of_tomorrow", json!({"a_key_of_tomorrow": false})),
        ("rope_scaling.rope_type", json!({"rope_scaling": {"rope_type": "proportional"}})),
        ("rope_scaling.type", json!({"rope_scaling": {"type": "su", "factor": 2.0}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"factor": 4.0}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"rope_type": "linear"}})),
        ("rope_scaling.foo", json!({"rope_scaling": yarn})),
        (
            "rope_parameters.mrope_section",
            json!({"rope_parameters": {"rope_type": "default", "mrope_section": [8]}}),
        ),
    ];
    for (key, changes) in cases {
        let (found, message) = refused("llama", &changes);
        assert_eq!(found, key, "{message}");
        assert!(message.starts_with(&format!("config.json: {key}: ")), "{message}");
    }
}

#[test]
fn biases_that_a_family_does_not_have_are_refused() {
    for (family, changes) in [
        ("mistral", json!({"attention_bias": true})),
        ("mistral", json!({"mlp_bias": true})),
        ("qwen2", json!({"attention_bias": false})),
        ("qwen2", json!({"mlp_bias": true})),
        ("qwen3", json!({"mlp_bias": true})),
    ] {
        let (key, _) = refused(family, &changes);
        assert!(changes.get(&key).is_some(), "{key}");
    }
    let biases = |family: &str, changes: &Value| parse(&changed(family, changes)).unwrap().biases;
    let all = json!({"attention_bias": true, "mlp_bias": true});
    assert_eq!(biases("llama", &all), BiasFlags { qkv: true, o: true, mlp: true });
    assert_eq!(biases("qwen2", &json!({})), BiasFlags { qkv: true, o: false, mlp: false });
    let attention = json!({"attention_bias": true});
    assert_eq!(biases("qwen3", &attention), BiasFlags { qkv: true, o: true, mlp: false });
}

#[test]
fn values_that_change_nothing_are_read() {
    for changes in [
        json!({"attn_logit_softcapping": null, "final_logit_softcapping": 0.0}),
        json!({"residual_multiplier": 1, "embedding_multiplier": 1.0, "logits_scaling": 1}),
        json!({"attention_multiplier": 0.25, "query_pre_attn_scalar": 16}),
        json!({"quantization_config": null, "num_local_experts": 0, "mlp_only_layers": []}),
        json!({"partial_rotary_factor": 1.0, "rope_interleaved": false, "is_causal": true}),
        json!({"pretraining_tp": 2, "attention_dropout": 0.1, "eos_token_id": [1, 2]}),
        json!({"bos_token_id": null, "rope_scaling": {}, "rope_parameters": null}),
        json!({"rope_scaling": {"rope_type": "default"}}),
        json!({"rope_scaling": {"type": "default", "factor": 1.0}}),
        json!({"dtype": "bfloat16", "torch_dtype": "float16", "use_cache": false}),
        json!({"architectures": ["LlamaForCausalLM"], "pruned_heads": {}, "a_key": null}),
        json!({"layer_types": ["full_attention", "full_attention"], "max_window_layers": 28}),
        json!({"hidden_act": "gelu", "hidden_activation": "gelu"}),
    ] {
        let read = parse(&changed("llama", &changes)).unwrap_or_else(|e| panic!("{changes}: {e}"));
        assert_eq!(read.rope_spec(LayerKind::Full).scaling, RopeScaling::None);
    }
}

#[test]
fn rope_is_read_in_both_places_and_under_both_names() {
    let linear = |theta| RopeSpec { theta, scaling: RopeScaling::Linear { factor: 4.0 } };
    for changes in [
        json!({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4}}),
        json!({"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}),
        json!({"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 1000000}}),
        json!({"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
        json!({"rope_theta": 1e6,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}),
        json!({"rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}}),
        json!({"rope_scaling": {"type": "linear", "factor": 4, "rope_theta": 1e6},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}}),
    ] {
        assert_eq!(rope("llama", &changes), linear(1e6), "{changes}");
    }
}

#[test]
fn places_that_disagree_are_refused() {
    let linear = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6});
    for (key, changes) in [
        (
            "rope_scaling",
            json!({"rope_parameters": linear,
            "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1e6}}),
        ),
        ("rope_parameters.rope_theta", json!({"rope_theta": 1e4, "rope_parameters": linear})),
        (
            "rope_scaling.type",
            json!({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}),
        ),
        (
            "rope_parameters.original_max_position_embeddings",
            json!({"original_max_position_embeddings": 512, "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}),
        ),
        (
            "rope_parameters.rope_theta",
            json!({"rope_parameters": {
            "full_attention": {"rope_type": "default"}, "rope_theta": 1e6}}),
        ),
        (
            "rope_parameters.full_attention",
            json!({"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e6}}}),
        ),
        (
            "rope_parameters.full_attention.factor",
            json!({"rope_parameters": {
            "full_attention": {"rope_type": "default", "factor": 3.0}}}),
        ),
        (
            "original_max_position_embeddings",
            json!({"original_max_position_embeddings": 512,
            "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ),
    ] {
        assert_eq!(refused("llama", &changes).0, key, "{changes}");
    }
}

#[test]
fn each_kind_of_layer_has_its_own_rope() {
    let config = parse(&changed(
        "qwen3",
        &json!({
        "use_sliding_window": true, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}}),
    ));
    let config = config.unwrap();
    assert_eq!(config.rope_spec(LayerKind::Full).theta, 1e6);
    let sliding = config.rope_spec(LayerKind::Sliding);
    assert_eq!(sliding.scaling, RopeScaling::Linear { factor: 2.0 });
    assert_eq!((config.layer_window(0), config.layer_window(1)), (Some(128), None));
}

#[test]
fn windows_are_those_of_the_family() {
    let windows = |family: &str, changes: &Value| {
        let config = parse(&changed(family, changes));
        let config = config.unwrap_or_else(|error| panic!("{changes}: {error}"));
        [config.layer_window(0), config.layer_window(1)]
    };
    let none = [None, None];
    assert_eq!(windows("mistral", &json!({"sliding_window": null})), none);
    assert_eq!(windows("mistral", &json!({"sliding_window": 9})), [Some(9); 2]);
    let unused = json!({"sliding_window": 9, "max_window_layers": 0});
    assert_eq!(windows("qwen2", &unused), none);
    let used = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1});
    assert_eq!(windows("qwen2", &used), [None, Some(9)]);
    let null = json!({"use_sliding_window": true, "sliding_window": null});
    assert_eq!(windows("qwen3", &null), none);
    let absent = json!({"use_sliding_window": true, "max_window_layers": 0});
    assert_eq!(windows("qwen3", &absent), [Some(4096); 2]);
    for (family, key, changes) in [
        ("mistral", "sliding_window", json!({"sliding_window": 0})),
        ("mistral", "sliding_window", json!({"sliding_window": -1})),
        ("mistral", "use_sliding_window", json!({"use_sliding_window": false})),
        ("mistral", "layer_types", json!({"layer_types": ["full_attention", "sliding_attention"]})),
        ("qwen2", "layer_types", json!({"layer_types": ["full_attention", "sliding_attention"]})),
    ] {
        assert_eq!(refused(family, &changes).0, key, "{changes}");
    }
}

#[test]
fn texts_beyond_what_the_embedding_is_computed_for_are_counted_out() {
    let positions = |scaling| {
        parse(&changed("llama", &json!({"rope_scaling": scaling}))).unwrap().positions_max()
    };
    let factors = [1.0; 8];
    assert_eq!(positions(json!({"type": "dynamic", "factor": 4.0})), 2048);
    let long = json!({"rope_type": "longrope", "short_factor": factors, "long_factor": factors,
        "original_max_position_embeddings": 512});
    assert_eq!(positions(long), 512);
    let short = json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0],
        "long_factor": factors}});
    assert_eq!(refused("llama", &short).0, "rope_scaling.short_factor");
}

#[test]
fn numbers_that_are_none_are_refused_by_their_key() {
    let wrong = [
        json!("64"),
        json!(-1),
        json!(0),
        json!(64.5),
        json!(true),
        json!([]),
        json!({}),
        json!(u64::MAX),
        json!(1e300),
    ];
    for key in [
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "intermediate_size",
    ] {
        for value in &wrong {
            assert_eq!(refused("llama", &json!({key: value})).0, key, "{value}");
        }
    }
    for (key, value) in [
        ("rms_norm_eps", json!(-1e-5)),
        ("rms_norm_eps", json!("1e-5")),
        ("rope_theta", json!(0)),
        ("rope_theta", json!("1e6")),
        ("bos_token_id", json!(300)),
        ("bos_token_id", json!(-1)),
        ("tie_word_embeddings", json!("true")),
        ("rope_scaling", json!("linear")),
        ("rope_parameters", json!([1])),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(15)),
        ("hidden_act", json!(3)),
    ] {
        assert_eq!(refused("llama", &json!({key: value})).0, key, "{value}");
    }
    let odd = json!({"head_dim": null, "num_attention_heads": 3, "num_key_value_heads": 3});
    assert_eq!(refused("llama", &odd).0, "num_attention_heads");
    for key in ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"] {
        let error = parse(&without("llama", key)).unwrap_err().to_string();
        assert!(error.contains(key) && error.contains("missing"), "{error}");
    }
}

#[test]
fn what_is_no_json_object_is_refused() {
    for text in ["", "[]", "3", "{", "{\"model_type\": NaN}", "\u{feff}{}"] {
        let error = ModelConfig::parse_json(text.as_bytes()).unwrap_err();
        assert!(matches!(error, ModelError::File { .. }), "{text}: {error}");
    }
    let error = |text: &str| ModelConfig::parse_json(text.as_bytes()).unwrap_err().to_string();
    let long = format!("{{\"hidden_size\": {}64, \"rms_norm_eps\": Infinity}}", " ".repeat(500));
    for text in ["{\n  \"hidden_size\": 64,\n  \"rms_norm_eps\": NaN\n}", &long] {
        let message = error(text);
        assert!(message.contains("rms_norm_eps") && message.len() < 200, "{message}");
    }
    assert!(error("\u{feff}{}").contains("byte order mark"));
    let deep = "[".repeat(100_000);
    assert!(ModelConfig::parse_json(deep.as_bytes()).is_err());
}

/// Published configs, with every key that they have.
#[test]
fn published_configs_are_read() {
    let llama3 = json!({"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"});
    let configs = [
        json!({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": llama3,
            "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}),
        json!({"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}),
        json!({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
            "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
            "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
            "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false,
            "use_sliding_window": false, "vocab_size": 151936}),
        json!({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "initializer_range": 0.02, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
            "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
            "vocab_size": 151936}),
        json!({"architectures": ["LlamaForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
            "hidden_size": 576, "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192,
            "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
            "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "transformers_version": "4.40.1", "use_cache": true, "vocab_size": 49152}),
        json!({"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 5632, "max_position_embeddings": 2048, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
            "tie_word_embeddings": false, "torch_dtype": "float32",
            "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}),
    ];
    for config in configs {
        parse(&config).unwrap_or_else(|error| panic!("{}: {error}", config["model_type"]));
    }
}
