//! The closed list of keys: a key that no other module reads must be known to change nothing.

use super::keys::{ConfigKeys, shorten_value};
use super::{ModelConfig, ModelFamily};
use crate::error::Result;
use serde_json::Value;

/// Keys that [`ModelConfig::parse_json`] reads.
const READ: &[&str] = &[
    "model_type",
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "hidden_activation",
    "attention_bias",
    "mlp_bias",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "bos_token_id",
];

/// Keys whose value does not change the logits of a text, whatever it is: names, versions, how
/// weights were initialised and stored, training, labels, generation, kinds of kernels.
const HARMLESS: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "attention_dropout",
    "attn_implementation",
    "attn_pdrop",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cls_token_id",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dropout",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "label2id",
    "length_penalty",
    "mask_token_id",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "model_max_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attn",
];

/// Keys with one value that leaves the computation as it is.
fn neutral_value(key: &str, config: &ModelConfig) -> Option<Value> {
    let dim = config.head_dim();
    Some(match key {
        "residual_multiplier"
        | "embedding_multiplier"
        | "logits_scaling"
        | "logit_scale"
        | "embedding_scale"
        | "rotary_pct" => Value::from(1.0),
        "attention_multiplier" => Value::from((dim as f64).sqrt().recip()),
        "query_pre_attn_scalar" => Value::from(dim as f64),
        "attn_logit_softcapping"
        | "final_logit_softcapping"
        | "num_experts"
        | "num_local_experts"
        | "num_experts_per_tok"
        | "n_routed_experts"
        | "n_shared_experts"
        | "num_nextn_predict_layers"
        | "moe_intermediate_size"
        | "shared_expert_intermediate_size" => Value::from(0.0),
        "is_causal" | "use_causal_mask" | "causal" | "use_rope" => Value::Bool(true),
        "use_qk_norm" | "qk_norm" | "qk_layernorm" | "use_qk_layernorm" => {
            Value::Bool(config.family == ModelFamily::Qwen3)
        }
        "qkv_bias" => Value::Bool(config.biases.qkv),
        "add_cross_attention"
        | "bias"
        | "is_encoder_decoder"
        | "parallel_attn"
        | "rope_interleaved"
        | "tie_encoder_decoder"
        | "use_bias"
        | "use_mrope"
        | "use_parallel_residual" => Value::Bool(false),
        _ => return None,
    })
}

fn values_equal(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        // A scale of heads is written with the digits its writer chose.
        (Some(a), Some(b)) => (a - b).abs() <= 1e-6 * b.abs(),
        _ => a == b,
    }
}

/// Refuses every key that nothing reads, unless its value changes nothing.
pub(super) fn check_keys(keys: ConfigKeys<'_>, config: &ModelConfig) -> Result<()> {
    for (key, value) in keys.present_keys() {
        let empty = match value {
            Value::String(text) => text.is_empty(),
            Value::Array(items) => items.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            _ => false,
        };
        if empty || READ.contains(&key) || HARMLESS.contains(&key) {
            continue;
        }
        let Some(neutral) = neutral_value(key, config) else {
            return Err(keys.refuse_key(key, refusal_reason(key, value)));
        };
        if !values_equal(value, &neutral) {
            let reason = format!(
                "{} is not supported; a {} model is computed as with {neutral}",
                shorten_value(value),
                config.family.name()
            );
            return Err(keys.refuse_key(key, reason));
        }
    }
    Ok(())
}

fn refusal_reason(key: &str, value: &Value) -> String {
    let what = match key {
        "quantization_config" | "compression_config" | "quantization" => {
            "quantized weights are not read; use the folder of f16, bf16 or f32 weights"
        }
        "auto_map" => "models with code of their own are not supported",
        _ => {
            "the key is not known and may change what the model computes; take it out of \
             config.json if it does not"
        }
    };
    format!("{what} (its value is {})", shorten_value(value))
}
