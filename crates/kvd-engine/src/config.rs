//! The part of a Hugging Face `config.json` that decides the computation.

use anyhow::{Context, Result, ensure};
use kvd_core::{DType, Geometry, RopePairing};
use serde::Deserialize;

/// Shape and constants of a Llama- or Qwen2-style causal language model.
#[derive(Clone, Debug, Deserialize)]
pub struct ModelConfig {
    /// `llama`, `qwen2` or `mistral`: the layouts whose forward pass this is.
    pub model_type: String,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// KV heads; absent means one per query head.
    pub num_key_value_heads: Option<usize>,
    /// Channels per head; absent means hidden size over query heads.
    pub head_dim: Option<usize>,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Positions the model was trained on.
    pub max_position_embeddings: usize,
    /// Base of the rotary frequencies.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Not supported; refused when present.
    pub rope_scaling: Option<serde_json::Value>,
    /// Epsilon of the RMS norms.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Beginning of a text.
    #[serde(default)]
    pub bos_token_id: u32,
}

fn default_rope_theta() -> f64 {
    10_000.0
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

impl ModelConfig {
    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// When it does not parse or describes a model this engine does not compute.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let config: Self = serde_json::from_slice(json).context("config.json")?;
        let known = ["llama", "qwen2", "mistral"];
        ensure!(
            known.contains(&config.model_type.as_str()),
            "config.json: model_type {:?} is not one of {}",
            config.model_type,
            known.join(", ")
        );
        ensure!(config.rope_scaling.is_none(), "config.json: rope_scaling is not supported");
        let (q, kv) = (config.num_attention_heads, config.kv_heads());
        ensure!(kv > 0 && q % kv == 0, "config.json: {q} query heads over {kv} KV heads");
        Ok(config)
    }

    /// KV heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Channels per head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Shape of one layer's attention.
    #[must_use]
    pub fn heads(&self) -> Heads {
        Heads { query: self.num_attention_heads, kv: self.kv_heads(), dim: self.head_dim() }
    }

    /// The KV geometry to register with kvd.
    ///
    /// # Errors
    /// When kvd does not support it.
    pub fn geometry(&self, block_tokens: u32) -> Result<Geometry> {
        let geometry = Geometry {
            layers: u32::try_from(self.num_hidden_layers)?,
            kv_heads: u32::try_from(self.kv_heads())?,
            head_dim_k: u32::try_from(self.head_dim())?,
            head_dim_v: u32::try_from(self.head_dim())?,
            block_tokens,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        geometry.validate()?;
        Ok(geometry)
    }
}

/// Heads of a layer and their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// KV heads; each serves `query / kv` query heads in a row.
    pub kv: usize,
    /// Channels of each.
    pub dim: usize,
}

impl Heads {
    /// Values of one token's queries.
    #[must_use]
    pub fn query_width(self) -> usize {
        self.query * self.dim
    }

    /// Values of one token's keys, or of its values.
    #[must_use]
    pub fn kv_width(self) -> usize {
        self.kv * self.dim
    }

    /// Query heads that share one KV head.
    #[must_use]
    pub fn group(self) -> usize {
        self.query / self.kv
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 10, "max_position_embeddings": 128}"#;

    #[test]
    fn absent_fields_take_the_defaults_of_the_layout() {
        let config = ModelConfig::parse(CONFIG.as_bytes()).unwrap();
        assert_eq!(config.heads(), Heads { query: 4, kv: 4, dim: 16 });
        assert!(!config.tie_word_embeddings);
    }

    #[test]
    fn what_the_engine_does_not_compute_is_refused_by_name() {
        let other = CONFIG.replace("qwen2", "gpt2");
        let error = ModelConfig::parse(other.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("gpt2"), "{error}");
        let scaled = CONFIG.replace("\"vocab_size\"", "\"rope_scaling\": {}, \"vocab_size\"");
        let error = ModelConfig::parse(scaled.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("rope_scaling"), "{error}");
    }
}
