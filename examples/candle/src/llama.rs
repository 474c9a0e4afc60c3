//! A Llama on candle, in f32 on the CPU. Its attention is that of a [`KvdCache`].

use crate::cache::KvdCache;
use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::{Embedding, Linear, Module, RmsNorm, VarBuilder, ops, rotary_emb};
use serde::Deserialize;
use std::fs::File;
use std::path::Path;

/// The keys of `config.json`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct LlamaConfig {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) head_dim: usize,
    max_position_embeddings: usize,
    rope_theta: f32,
    rope_scaling: Option<serde_json::Value>,
    rms_norm_eps: f64,
    tie_word_embeddings: bool,
}

/// The model.
pub(crate) struct LlamaModel {
    config: LlamaConfig,
    embedding: Embedding,
    layers: Vec<LlamaLayer>,
    norm: RmsNorm,
    head: Linear,
    rotation: RotationTable,
}

struct LlamaLayer {
    input_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    post_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Cosines and sines of every position, `[positions, head_dim / 2]`.
struct RotationTable {
    cos: Tensor,
    sin: Tensor,
}

impl LlamaModel {
    /// Reads `config.json` and `model.safetensors`.
    pub(crate) fn load_model(folder: &Path) -> Result<Self> {
        let file = File::open(folder.join("config.json")).context("config.json")?;
        let config: LlamaConfig = serde_json::from_reader(file).context("config.json")?;
        ensure!(config.model_type == "llama", "a {}, not a llama", config.model_type);
        ensure!(config.rope_scaling.is_none(), "this example knows no rope_scaling");
        let tensors = safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        let weights = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let (hidden, body) = (config.hidden_size, weights.pp("model"));
        let embedding = candle_nn::embedding(config.vocab_size, hidden, body.pp("embed_tokens"))?;
        let layers = (0..config.num_hidden_layers)
            .map(|at| LlamaLayer::load_layer(&config, &body.pp(format!("layers.{at}"))))
            .collect::<Result<_>>()?;
        let head = if config.tie_word_embeddings {
            Linear::new(embedding.embeddings().clone(), None)
        } else {
            candle_nn::linear_no_bias(hidden, config.vocab_size, weights.pp("lm_head"))?
        };
        let norm = candle_nn::rms_norm(hidden, config.rms_norm_eps, body.pp("norm"))?;
        let rotation = RotationTable::new(&config)?;
        Ok(Self { config, embedding, layers, norm, head, rotation })
    }

    pub(crate) fn model_config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Logits after `tokens`, which follow those that the cache holds.
    pub(crate) async fn forward_tokens(
        &self,
        tokens: &[u32],
        cache: &mut KvdCache,
    ) -> Result<Tensor> {
        let (begin, end) = (cache.stored_tokens(), cache.stored_tokens() + tokens.len());
        let longest = self.config.max_position_embeddings;
        ensure!(end <= longest, "{end} tokens: the model has {longest} positions");
        let mut x = self.embedding.forward(&Tensor::new(tokens, &Device::Cpu)?)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = layer.input_norm.forward(&x)?;
            let heads = self.config.num_attention_heads;
            let kv_heads = self.config.num_key_value_heads;
            let q =
                self.rotation.rotate_heads(&self.split_heads(&layer.q, &normed, heads)?, begin)?;
            let k = self
                .rotation
                .rotate_heads(&self.split_heads(&layer.k, &normed, kv_heads)?, begin)?;
            let v = self.split_heads(&layer.v, &normed, kv_heads)?;
            let attended = cache.attend_layer(index, &q, &k, &v).await?;
            x = layer.finish_layer(&x, &attended.flatten_from(1)?)?;
        }
        // All layers have these tokens now: kvd takes them.
        cache.store_step().await?;
        let last = self.norm.forward(&x.narrow(0, tokens.len() - 1, 1)?)?;
        Ok(self.head.forward(&last)?.squeeze(0)?)
    }

    /// A projection as `[tokens, heads, head_dim]`.
    fn split_heads(&self, linear: &Linear, x: &Tensor, heads: usize) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        Ok(linear.forward(x)?.reshape((tokens, heads, self.config.head_dim))?)
    }
}

impl LlamaLayer {
    fn load_layer(config: &LlamaConfig, weights: &VarBuilder<'_>) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let width = config.num_attention_heads * config.head_dim;
        let kv_width = config.num_key_value_heads * config.head_dim;
        let linear = |from, to, name| candle_nn::linear_no_bias(from, to, weights.pp(name));
        let norm = |name| candle_nn::rms_norm(hidden, config.rms_norm_eps, weights.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            q: linear(hidden, width, "self_attn.q_proj")?,
            k: linear(hidden, kv_width, "self_attn.k_proj")?,
            v: linear(hidden, kv_width, "self_attn.v_proj")?,
            o: linear(width, hidden, "self_attn.o_proj")?,
            post_norm: norm("post_attention_layernorm")?,
            gate: linear(hidden, inner, "mlp.gate_proj")?,
            up: linear(hidden, inner, "mlp.up_proj")?,
            down: linear(inner, hidden, "mlp.down_proj")?,
        })
    }

    /// The output projection, the residuals and the MLP.
    fn finish_layer(&self, x: &Tensor, attended: &Tensor) -> Result<Tensor> {
        let x = (x + self.o.forward(attended)?)?;
        let normed = self.post_norm.forward(&x)?;
        let gated = (ops::silu(&self.gate.forward(&normed)?)? * self.up.forward(&normed)?)?;
        Ok((&x + self.down.forward(&gated)?)?)
    }
}

impl RotationTable {
    fn new(config: &LlamaConfig) -> Result<Self> {
        let half = config.head_dim / 2;
        let mut angles = Vec::new();
        for position in 0..config.max_position_embeddings {
            for pair in 0..half {
                let exponent = (2 * pair) as f32 / config.head_dim as f32;
                angles.push(position as f32 * config.rope_theta.powf(exponent).recip());
            }
        }
        let shape = (config.max_position_embeddings, half);
        let angles = Tensor::from_vec(angles, shape, &Device::Cpu)?;
        Ok(Self { cos: angles.cos()?, sin: angles.sin()? })
    }

    /// Rotates `[tokens, heads, head_dim]`, the first token at a position.
    fn rotate_heads(&self, x: &Tensor, position: usize) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        let (cos, sin) =
            (self.cos.narrow(0, position, tokens)?, self.sin.narrow(0, position, tokens)?);
        let by_head = x.transpose(0, 1)?.unsqueeze(0)?.contiguous()?;
        Ok(rotary_emb::rope(&by_head, &cos, &sin)?.squeeze(0)?.transpose(0, 1)?)
    }
}
