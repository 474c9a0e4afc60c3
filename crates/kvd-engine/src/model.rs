//! A Llama- or Qwen2-style causal language model on candle, with its attention left open.

use crate::attention::{Attention, AttentionInput};
use crate::config::{Heads, ModelConfig};
use anyhow::{Context, Result, ensure};
use candle_core::{D, DType, Device, Tensor};
use std::collections::HashMap;

/// Weights in f32 (read from f16, bf16 or f32) and everything but the attention.
pub struct Model {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
    rope: Rope,
    parameters: u64,
}

struct Layer {
    input_norm: Tensor,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    post_norm: Tensor,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// A projection; the weight is kept transposed, `[in, out]`.
struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.matmul(&self.weight)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

/// The tensors of a file, in f32.
struct Weights(HashMap<String, Tensor>);

impl Weights {
    fn tensor(&self, name: &str) -> Result<Tensor> {
        let tensor = self.0.get(name).with_context(|| format!("the model has no {name}"))?;
        Ok(tensor.to_dtype(DType::F32)?)
    }

    fn linear(&self, name: &str) -> Result<Linear> {
        let weight = self.tensor(&format!("{name}.weight"))?.t()?.contiguous()?;
        let bias = format!("{name}.bias");
        let bias = self.0.contains_key(&bias).then(|| self.tensor(&bias)).transpose()?;
        Ok(Linear { weight, bias })
    }
}

impl Model {
    /// Reads `model.safetensors` for `config`.
    ///
    /// # Errors
    /// When a tensor is missing or the file does not parse.
    pub fn load(config: ModelConfig, safetensors: &[u8]) -> Result<Self> {
        let weights = candle_core::safetensors::load_buffer(safetensors, &Device::Cpu);
        let weights = Weights(weights.context("model.safetensors")?);
        let parameters = weights.0.values().map(|tensor| tensor.elem_count() as u64).sum();
        let embedding = weights.tensor("model.embed_tokens.weight")?;
        let head = if config.tie_word_embeddings {
            Linear { weight: embedding.t()?.contiguous()?, bias: None }
        } else {
            weights.linear("lm_head")?
        };
        let layers = (0..config.num_hidden_layers).map(|i| Layer::load(&weights, i));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            norm: weights.tensor("model.norm.weight")?,
            rope: Rope::new(config.head_dim(), config.rope_theta),
            config,
            embedding,
            head,
            parameters,
        })
    }

    /// The configuration it was read with.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Numbers in the weights; a tied embedding counts once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// Runs `tokens`, the first at `position`, and returns logits `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// When a token is not in the vocabulary or the attention fails.
    pub async fn forward<A: Attention>(
        &self,
        tokens: &[u32],
        position: usize,
        attention: &mut A,
    ) -> Result<Vec<f32>> {
        let known = tokens.iter().all(|&token| (token as usize) < self.config.vocab_size);
        ensure!(known, "a token lies outside the vocabulary");
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let [q, k, v] = self.project(layer, &x, position)?;
            let n_tokens = tokens.len();
            let step = AttentionInput { position, n_tokens, q: &q, k: &k, v: &v };
            let attended = attention.attend(index, step).await?;
            x = self.finish(layer, &x, attended)?;
        }
        let x = self.rms_norm(&x, &self.norm)?;
        Ok(self.head.forward(&x)?.flatten_all()?.to_vec1()?)
    }

    /// Queries, keys (both rotated) and values of the new tokens.
    fn project(&self, layer: &Layer, x: &Tensor, position: usize) -> Result<[Vec<f32>; 3]> {
        let x = self.rms_norm(x, &layer.input_norm)?;
        let values = |linear: &Linear| -> Result<Vec<f32>> {
            Ok(linear.forward(&x)?.flatten_all()?.to_vec1()?)
        };
        let (mut q, mut k, v) = (values(&layer.q)?, values(&layer.k)?, values(&layer.v)?);
        let Heads { query, kv, .. } = self.config.heads();
        self.rope.rotate(&mut q, query, position);
        self.rope.rotate(&mut k, kv, position);
        Ok([q, k, v])
    }

    /// The output projection, the residual and the MLP.
    fn finish(&self, layer: &Layer, x: &Tensor, attended: Vec<f32>) -> Result<Tensor> {
        let n_tokens = x.dim(0)?;
        let width = self.config.heads().query_width();
        let attended = Tensor::from_vec(attended, (n_tokens, width), &Device::Cpu)?;
        let x = (x + layer.o.forward(&attended)?)?;
        let h = self.rms_norm(&x, &layer.post_norm)?;
        let gated = (layer.gate.forward(&h)?.silu()? * layer.up.forward(&h)?)?;
        Ok((x + layer.down.forward(&gated)?)?)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (mean_square + self.config.rms_norm_eps)?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(weight)
    }
}

impl Layer {
    fn load(weights: &Weights, index: usize) -> Result<Self> {
        let name = |part: &str| format!("model.layers.{index}.{part}");
        Ok(Self {
            input_norm: weights.tensor(&name("input_layernorm.weight"))?,
            q: weights.linear(&name("self_attn.q_proj"))?,
            k: weights.linear(&name("self_attn.k_proj"))?,
            v: weights.linear(&name("self_attn.v_proj"))?,
            o: weights.linear(&name("self_attn.o_proj"))?,
            post_norm: weights.tensor(&name("post_attention_layernorm.weight"))?,
            gate: weights.linear(&name("mlp.gate_proj"))?,
            up: weights.linear(&name("mlp.up_proj"))?,
            down: weights.linear(&name("mlp.down_proj"))?,
        })
    }
}

/// Rotary position embedding, channels `i` and `i + dim/2` together.
struct Rope {
    frequencies: Vec<f64>,
}

impl Rope {
    fn new(dim: usize, theta: f64) -> Self {
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / dim as f64);
        Self { frequencies: (0..dim / 2).map(frequency).collect() }
    }

    /// Rotates `[tokens, heads, dim]` in place, the first token at `position`.
    fn rotate(&self, values: &mut [f32], heads: usize, position: usize) {
        let half = self.frequencies.len();
        for (token, row) in values.chunks_mut(heads * 2 * half).enumerate() {
            let at = (position + token) as f64;
            for (i, frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = (at * frequency).sin_cos();
                let (sin, cos) = (sin as f32, cos as f32);
                for head in row.chunks_mut(2 * half) {
                    let (a, b) = (head[i], head[i + half]);
                    head[i] = a * cos - b * sin;
                    head[i + half] = b * cos + a * sin;
                }
            }
        }
    }
}
