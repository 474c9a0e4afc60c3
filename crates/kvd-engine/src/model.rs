//! A causal language model on candle, with its attention left open.

use crate::attention::{AttentionInput, LayerAttention};
use crate::config::{ActivationFunction, HeadCounts, LayerKind, ModelConfig};
use crate::error::ModelError;
use crate::rope::RopeTable;
use crate::weights::{UnusedTensors, WeightFiles};
use anyhow::{Result, ensure};
use candle_core::{D, Device, Tensor};

/// Weights in f32 (read from f16, bf16 or f32) and everything but the attention.
pub struct LanguageModel {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<ModelLayer>,
    norm: Tensor,
    head: LinearLayer,
    full_rope: RopeTable,
    sliding_rope: RopeTable,
    parameters: u64,
    remarks: Vec<String>,
}

struct ModelLayer {
    input_norm: Tensor,
    q: LinearLayer,
    k: LinearLayer,
    v: LinearLayer,
    o: LinearLayer,
    head_norms: Option<HeadNorms>,
    post_norm: Tensor,
    gate: LinearLayer,
    up: LinearLayer,
    down: LinearLayer,
}

/// Norms of single heads before the rotation.
struct HeadNorms {
    q: Tensor,
    k: Tensor,
}

/// A projection; the weight is kept transposed, `[in, out]`.
struct LinearLayer {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl LinearLayer {
    fn apply_linear(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let y = x.matmul(&self.weight)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }
}

impl LanguageModel {
    /// Reads the weights for `config`.
    ///
    /// # Errors
    /// [`ModelError`] when a tensor is missing, unknown, or has another shape than `config` says,
    /// or a file does not parse.
    pub fn load_model(config: ModelConfig, weights: &WeightFiles) -> Result<Self> {
        let mut weights = weights.read_tensors()?;
        let parameters = weights.number_count();
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let shape = [vocabulary, hidden];
        let keys = format!("vocab_size {vocabulary}, hidden_size {hidden}");
        let embedding = weights.take_tensor("model.embed_tokens.weight", &shape, &keys)?;
        let mut remarks = Vec::new();
        let head = load_head(&config, &mut weights, &embedding, &keys)?;
        let parameters = parameters - head.stored_twice;
        let mut loader = LayerLoader::new(&config, weights, &mut remarks)?;
        let layers: Vec<_> =
            (0..config.num_hidden_layers).map(|i| loader.load_layer(i)).collect::<Result<_>>()?;
        let mut weights = loader.weights;
        let norm = weights.take_tensor("model.norm.weight", &[hidden], &keys)?;
        weights.refuse_unused()?;
        Ok(Self {
            layers,
            norm,
            full_rope: RopeTable::new(config.rope_spec(LayerKind::Full), config.head_dim()),
            sliding_rope: RopeTable::new(config.rope_spec(LayerKind::Sliding), config.head_dim()),
            config,
            embedding,
            head: head.linear,
            parameters,
            remarks,
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

    /// Remarks on the folder for the user, one sentence each.
    #[must_use]
    pub fn folder_remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Runs `tokens`, the first at `position`, and returns logits `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// When a token is not in the vocabulary, the text is longer than the model's positions, or
    /// the attention fails.
    pub async fn forward_tokens<A: LayerAttention>(
        &self,
        tokens: &[u32],
        position: usize,
        attention: &mut A,
    ) -> Result<Vec<f32>> {
        let vocabulary = self.config.vocab_size;
        self.check_tokens(tokens)?;
        let (end, longest) = (position.saturating_add(tokens.len()), self.config.positions_max());
        ensure!(end <= longest, "a text of {end} tokens: the model has {longest} positions");
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let [q, k, v] = self.project_tokens(index, layer, &x, position)?;
            let (n_tokens, window) = (tokens.len(), self.config.layer_window(index));
            let step = AttentionInput { position, n_tokens, window, q: &q, k: &k, v: &v };
            let attended = attention.attend_layer(index, step).await?;
            x = self.finish_layer(layer, &x, attended)?;
        }
        let x = self.rms_norm(&x, &self.norm)?;
        let logits: Vec<f32> = self.head.apply_linear(&x)?.flatten_all()?.to_vec1()?;
        debug_assert_eq!(logits.len(), tokens.len() * vocabulary);
        Ok(logits)
    }

    /// Checks that every token is in the vocabulary.
    ///
    /// # Errors
    /// When one is not: the tokenizer is of another model.
    pub fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.config.vocab_size;
        let outside = tokens.iter().find(|&&token| token as usize >= vocabulary);
        let Some(token) = outside else { return Ok(()) };
        let reason = format!(
            "token {token} lies outside the vocabulary of {vocabulary}: the tokenizer or \
             eval_ids.u16 is of another model"
        );
        Err(ModelError::key_error("vocab_size", reason).into())
    }

    /// Queries, keys (both rotated) and values of the new tokens.
    fn project_tokens(
        &self,
        index: usize,
        layer: &ModelLayer,
        x: &Tensor,
        position: usize,
    ) -> Result<[Vec<f32>; 3]> {
        let x = self.rms_norm(x, &layer.input_norm)?;
        let HeadCounts { query, kv, dim } = self.config.attention_heads();
        let norms = layer.head_norms.as_ref();
        let values = |linear: &LinearLayer, norm: Option<&Tensor>| -> Result<Vec<f32>> {
            let mut y = linear.apply_linear(&x)?;
            if let Some(norm) = norm {
                y = self.rms_norm(&y.reshape(((), dim))?, norm)?;
            }
            Ok(y.flatten_all()?.to_vec1()?)
        };
        let mut q = values(&layer.q, norms.map(|norms| &norms.q))?;
        let mut k = values(&layer.k, norms.map(|norms| &norms.k))?;
        let v = values(&layer.v, None)?;
        let rope = match self.config.layer_kind(index) {
            LayerKind::Full => &self.full_rope,
            LayerKind::Sliding => &self.sliding_rope,
        };
        rope.rotate_heads(&mut q, query, position);
        rope.rotate_heads(&mut k, kv, position);
        Ok([q, k, v])
    }

    /// The output projection, the residual and the MLP.
    fn finish_layer(&self, layer: &ModelLayer, x: &Tensor, attended: Vec<f32>) -> Result<Tensor> {
        let n_tokens = x.dim(0)?;
        let width = self.config.attention_heads().query_width();
        let attended = Tensor::from_vec(attended, (n_tokens, width), &Device::Cpu)?;
        let x = (x + layer.o.apply_linear(&attended)?)?;
        let h = self.rms_norm(&x, &layer.post_norm)?;
        let gate = self.config.activation.apply_to(&layer.gate.apply_linear(&h)?)?;
        let gated = (gate * layer.up.apply_linear(&h)?)?;
        Ok((x + layer.down.apply_linear(&gated)?)?)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor) -> candle_core::Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let scale = (mean_square + self.config.rms_norm_eps)?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(weight)
    }
}

impl ActivationFunction {
    fn apply_to(self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Silu => x.silu(),
            Self::Gelu => x.gelu_erf(),
            Self::GeluTanh => x.gelu(),
            Self::QuickGelu => {
                let sigmoid = ((x * -1.702)?.exp()? + 1.0)?.recip()?;
                x * sigmoid
            }
            Self::Relu => x.relu(),
            Self::ReluSquared => x.relu()?.sqr(),
        }
    }
}

/// The output projection and how many of its numbers the weights hold a second time.
struct OutputHead {
    linear: LinearLayer,
    stored_twice: u64,
}

fn load_head(
    config: &ModelConfig,
    weights: &mut UnusedTensors,
    embedding: &Tensor,
    keys: &str,
) -> Result<OutputHead> {
    let name = "lm_head.weight";
    let shape = [config.vocab_size, config.hidden_size];
    let transposed = |weight: &Tensor| -> Result<LinearLayer> {
        Ok(LinearLayer { weight: weight.t()?.contiguous()?, bias: None })
    };
    if !config.tie_word_embeddings {
        if !weights.has_tensor(name) {
            let reason = "the weights have no tensor of this name, and tie_word_embeddings is \
                          false or absent in config.json";
            return Err(ModelError::tensor_error(name, reason).into());
        }
        let linear = transposed(&weights.take_tensor(name, &shape, keys)?)?;
        return Ok(OutputHead { linear, stored_twice: 0 });
    }
    let mut stored_twice = 0;
    if weights.has_tensor(name) {
        let head = weights.take_tensor(name, &shape, keys)?;
        let same = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        if same(&head)? != same(embedding)? {
            let reason = "differs from model.embed_tokens.weight, and tie_word_embeddings is true \
                          in config.json";
            return Err(ModelError::tensor_error(name, reason).into());
        }
        stored_twice = head.elem_count() as u64;
    }
    Ok(OutputHead { linear: transposed(embedding)?, stored_twice })
}

/// Takes the tensors of layers, each with the shape that the config says.
struct LayerLoader<'a> {
    config: &'a ModelConfig,
    weights: UnusedTensors,
    intermediate: usize,
    qkv_bias: bool,
}

impl<'a> LayerLoader<'a> {
    fn new(
        config: &'a ModelConfig,
        weights: UnusedTensors,
        remarks: &mut Vec<String>,
    ) -> Result<Self> {
        let first = weights.tensor_shape("model.layers.0.mlp.gate_proj.weight");
        let first = first.and_then(|shape| shape.first().copied());
        let intermediate = config.intermediate_size.or(first).unwrap_or(config.hidden_size);
        let mut qkv_bias = config.biases.qkv;
        let families_own = qkv_bias && !config.biases.o;
        if families_own && !has_any_qkv_bias(config, &weights) {
            // Readers of such folders start missing biases from zero.
            qkv_bias = false;
            remarks.push(format!(
                "the weights have no biases of q, k and v, which a {} model has: they count as 0",
                config.family.name()
            ));
        }
        Ok(Self { config, weights, intermediate, qkv_bias })
    }

    fn load_layer(&mut self, index: usize) -> Result<ModelLayer> {
        let prefix = format!("model.layers.{index}.");
        let name = |part: &str| format!("{prefix}{part}");
        let config = self.config;
        let HeadCounts { dim, .. } = config.attention_heads();
        let (q, kv) = (config.attention_heads().query_width(), config.attention_heads().kv_width());
        let (hidden, inner) = (config.hidden_size, self.intermediate);
        let (qkv, o, mlp) = (self.qkv_bias, config.biases.o, config.biases.mlp);
        Ok(ModelLayer {
            input_norm: self.load_norm(&name("input_layernorm.weight"), hidden)?,
            q: self.load_linear(&name("self_attn.q_proj"), [q, hidden], qkv)?,
            k: self.load_linear(&name("self_attn.k_proj"), [kv, hidden], qkv)?,
            v: self.load_linear(&name("self_attn.v_proj"), [kv, hidden], qkv)?,
            o: self.load_linear(&name("self_attn.o_proj"), [hidden, q], o)?,
            head_norms: match config.has_head_norms() {
                true => Some(HeadNorms {
                    q: self.load_norm(&name("self_attn.q_norm.weight"), dim)?,
                    k: self.load_norm(&name("self_attn.k_norm.weight"), dim)?,
                }),
                false => None,
            },
            post_norm: self.load_norm(&name("post_attention_layernorm.weight"), hidden)?,
            gate: self.load_linear(&name("mlp.gate_proj"), [inner, hidden], mlp)?,
            up: self.load_linear(&name("mlp.up_proj"), [inner, hidden], mlp)?,
            down: self.load_linear(&name("mlp.down_proj"), [hidden, inner], mlp)?,
        })
    }

    /// The keys that shapes of a layer follow from.
    fn shape_keys(&self) -> String {
        let heads = self.config.attention_heads();
        format!(
            "hidden_size {}, intermediate_size {}, num_attention_heads {}, num_key_value_heads \
             {}, head_dim {}",
            self.config.hidden_size, self.intermediate, heads.query, heads.kv, heads.dim
        )
    }

    fn load_norm(&mut self, name: &str, width: usize) -> Result<Tensor> {
        let keys = self.shape_keys();
        Ok(self.weights.take_tensor(name, &[width], &keys)?)
    }

    fn load_linear(&mut self, name: &str, shape: [usize; 2], biased: bool) -> Result<LinearLayer> {
        let keys = self.shape_keys();
        let weight = self.weights.take_tensor(&format!("{name}.weight"), &shape, &keys)?;
        let bias = biased.then(|| format!("{name}.bias"));
        let bias =
            bias.map(|bias| self.weights.take_tensor(&bias, &shape[..1], &keys)).transpose()?;
        Ok(LinearLayer { weight: weight.t()?.contiguous()?, bias })
    }
}

fn has_any_qkv_bias(config: &ModelConfig, weights: &UnusedTensors) -> bool {
    let bias =
        |layer: usize, side: &str| format!("model.layers.{layer}.self_attn.{side}_proj.bias");
    (0..config.num_hidden_layers)
        .any(|layer| ["q", "k", "v"].iter().any(|side| weights.has_tensor(&bias(layer, side))))
}
