//! A Hugging Face `config.json`, read so that every key that decides the computation is honoured
//! or refused by name.

mod keys;
mod known;
mod layers;
mod rope;
#[cfg(test)]
mod tests;

pub use layers::LayerKind;
pub(crate) use rope::{Llama3Scaling, RopeScaling, RopeSpec, YarnScaling};

use crate::error::{ModelError, Result};
use keys::ConfigKeys;
use kvd_core::{DType, Geometry, RopePairing};
use layers::LayerKinds;
use rope::{RopeContext, RopeSpecs};
use serde_json::Value;

/// Shape and constants of a causal language model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The layout whose forward pass this is.
    pub family: ModelFamily,
    /// Channels of the residual stream.
    pub hidden_size: usize,
    /// Channels inside the MLP; absent means what the weights have.
    pub intermediate_size: Option<usize>,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Positions the model was trained on.
    pub max_position_embeddings: usize,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Beginning of a text; 0 where the config has none.
    pub bos_token_id: u32,
    /// Function between the two halves of the MLP.
    pub(crate) activation: ActivationFunction,
    /// Projections with a bias.
    pub(crate) biases: BiasFlags,
    heads: HeadCounts,
    layers: LayerKinds,
    ropes: RopeSpecs,
}

/// Layouts of models that are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelFamily {
    /// `llama`.
    Llama,
    /// `mistral`: Llama with a sliding window.
    Mistral,
    /// `qwen2`: biases of q, k and v.
    Qwen2,
    /// `qwen3`: norms of q and k.
    Qwen3,
}

impl ModelFamily {
    const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// Its `model_type`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    fn has_qwen_windows(self) -> bool {
        matches!(self, Self::Qwen2 | Self::Qwen3)
    }

    /// `max_position_embeddings` of its class, for a config without the key.
    fn positions_default(self) -> usize {
        match self {
            Self::Llama => 2048,
            Self::Mistral => 131_072,
            Self::Qwen2 | Self::Qwen3 => 32_768,
        }
    }
}

/// Functions between the two halves of an MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ActivationFunction {
    Silu,
    /// With the error function.
    Gelu,
    /// With the hyperbolic tangent.
    GeluTanh,
    /// `x sigmoid(1.702 x)`.
    QuickGelu,
    Relu,
    /// The square of ReLU.
    ReluSquared,
}

impl ActivationFunction {
    fn parse_name(name: &str) -> Option<Self> {
        Some(match name {
            "silu" | "swish" => Self::Silu,
            "gelu" | "gelu_python" => Self::Gelu,
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" | "gelu_python_tanh"
            | "gelu_accurate" => Self::GeluTanh,
            "quick_gelu" => Self::QuickGelu,
            "relu" => Self::Relu,
            "relu2" => Self::ReluSquared,
            _ => return None,
        })
    }
}

/// Projections with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BiasFlags {
    /// Bias of the query, key and value projections.
    pub(crate) qkv: bool,
    /// Bias of the attention's output projection.
    pub(crate) o: bool,
    /// Bias of the MLP's projections.
    pub(crate) mlp: bool,
}

impl ModelConfig {
    /// Largest `hidden_size` and `intermediate_size`.
    pub const WIDTH_MAX: usize = 1 << 20;
    /// Largest `num_attention_heads`.
    pub const HEADS_MAX: usize = 1 << 16;
    /// Largest `vocab_size`.
    pub const VOCABULARY_MAX: usize = 1 << 24;
    /// Largest number of positions.
    pub const POSITIONS_MAX: usize = 1 << 31;

    /// Reads and checks a `config.json`.
    ///
    /// # Errors
    /// [`ModelError`] with the key, when it does not parse or describes a model that this engine
    /// does not compute.
    pub fn parse_json(json: &[u8]) -> Result<Self> {
        let file = |reason: String| ModelError::File { file: "config.json".into(), reason };
        let value: Value =
            serde_json::from_slice(json).map_err(|error| file(not_json(json, &error)))?;
        let Value::Object(map) = value else {
            return Err(file("is not a JSON object".to_owned()));
        };
        let keys = ConfigKeys::new(&map, "");
        let family = parse_family(keys)?;
        let wide = |key| keys.read_count(key, 1, Self::WIDTH_MAX);
        let hidden_size = keys.require_key("hidden_size", wide("hidden_size")?)?;
        let layers_max = Geometry::LAYERS_MAX as usize;
        let layers = keys.read_count("num_hidden_layers", 1, layers_max)?;
        let num_hidden_layers = keys.require_key("num_hidden_layers", layers)?;
        let vocab_size = keys.read_count("vocab_size", 1, Self::VOCABULARY_MAX)?;
        let vocab_size = keys.require_key("vocab_size", vocab_size)?;
        let heads = parse_heads(keys, family, hidden_size)?;
        let layers = LayerKinds::parse_layers(keys, family, num_hidden_layers)?;
        let positions = keys.read_count("max_position_embeddings", 1, Self::POSITIONS_MAX)?;
        let positions = positions.unwrap_or(family.positions_default());
        let head_dim = heads.dim;
        let rope = RopeContext { top: keys, head_dim, positions, kinds: &layers.kinds };
        let config = Self {
            family,
            hidden_size,
            intermediate_size: wide("intermediate_size")?,
            num_hidden_layers,
            vocab_size,
            max_position_embeddings: positions,
            rms_norm_eps: keys.read_number("rms_norm_eps", 0.0)?.unwrap_or(1e-6),
            tie_word_embeddings: keys.read_flag("tie_word_embeddings")?.unwrap_or(false),
            bos_token_id: parse_bos(keys, vocab_size)?,
            activation: parse_activation(keys)?,
            biases: parse_biases(keys, family)?,
            heads,
            ropes: rope.parse_specs()?,
            layers,
        };
        known::check_keys(keys, &config)?;
        Ok(config)
    }

    /// KV heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.heads.kv
    }

    /// Channels per head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.heads.dim
    }

    /// Shape of one layer's attention.
    #[must_use]
    pub fn attention_heads(&self) -> HeadCounts {
        self.heads
    }

    /// Whether a layer sees all tokens or a window of them.
    ///
    /// # Panics
    /// When the model has no such layer.
    #[must_use]
    pub fn layer_kind(&self, layer: usize) -> LayerKind {
        self.layers.kinds[layer]
    }

    /// Tokens that a query of `layer` sees, its own counted; `None` for all.
    ///
    /// # Panics
    /// When the model has no such layer.
    #[must_use]
    pub fn layer_window(&self, layer: usize) -> Option<usize> {
        match self.layer_kind(layer) {
            LayerKind::Full => None,
            LayerKind::Sliding => self.layers.window,
        }
    }

    /// Whether queries and keys have norms.
    pub(crate) fn has_head_norms(&self) -> bool {
        self.family == ModelFamily::Qwen3
    }

    /// The embedding of a kind of layer.
    pub(crate) fn rope_spec(&self, kind: LayerKind) -> &RopeSpec {
        self.ropes.kind_spec(kind)
    }

    /// Positions that a text may have: those of the training, and of longrope those of the short
    /// factors.
    #[must_use]
    pub fn positions_max(&self) -> usize {
        let limits = self.layers.kinds.iter().map(|&kind| match &self.rope_spec(kind).scaling {
            RopeScaling::LongRope(rope) => rope.original_positions,
            _ => usize::MAX,
        });
        limits.fold(self.max_position_embeddings, usize::min)
    }

    /// The KV geometry to register with kvd.
    ///
    /// # Errors
    /// When kvd does not support it.
    pub fn kv_geometry(&self, block_tokens: u32) -> anyhow::Result<Geometry> {
        let geometry = Geometry {
            layers: u32::try_from(self.num_hidden_layers)?,
            kv_heads: u32::try_from(self.heads.kv)?,
            head_dim_k: u32::try_from(self.heads.dim)?,
            head_dim_v: u32::try_from(self.heads.dim)?,
            block_tokens,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        geometry.validate_fields()?;
        Ok(geometry)
    }
}

/// Why a text is not JSON, with the text at that place: it has the key.
fn not_json(json: &[u8], error: &serde_json::Error) -> String {
    const SHOWN_BYTES: usize = 60;
    if json.starts_with(b"\xef\xbb\xbf") {
        return "begins with a byte order mark: write it as UTF-8 without one".to_owned();
    }
    let line = json.split(|byte| *byte == b'\n').nth(error.line().saturating_sub(1));
    let line = line.unwrap_or_default();
    // The place is that behind what was read last.
    let end = (error.column() + SHOWN_BYTES / 3).min(line.len());
    let shown = &line[end.saturating_sub(SHOWN_BYTES)..end];
    format!("is not JSON: {error}, in {:?}", String::from_utf8_lossy(shown.trim_ascii()))
}

/// The layout, which `model_type` and `architectures` must agree on.
fn parse_family(keys: ConfigKeys<'_>) -> Result<ModelFamily> {
    let name = keys.require_key("model_type", keys.read_word("model_type")?)?;
    let supported = || ModelFamily::ALL.map(ModelFamily::name).join(", ");
    let found = ModelFamily::ALL.into_iter().find(|family| family.name() == name);
    let unsupported = || format!("{name:?} is not supported; supported are {}", supported());
    let family = found.ok_or_else(|| keys.refuse_key("model_type", unsupported()))?;
    let class = format!("{name}forcausallm");
    match keys.read_words("architectures")? {
        Some(classes) if !classes.iter().any(|c| c.to_ascii_lowercase() == class) => {
            let reason = format!("{classes:?} names no {name} model with a language head");
            Err(keys.refuse_key("architectures", reason))
        }
        _ => Ok(family),
    }
}

fn parse_heads(
    keys: ConfigKeys<'_>,
    family: ModelFamily,
    hidden_size: usize,
) -> Result<HeadCounts> {
    let query = keys.read_count("num_attention_heads", 1, ModelConfig::HEADS_MAX)?;
    let query = keys.require_key("num_attention_heads", query)?;
    let kv_max = Geometry::KV_HEADS_MAX as usize;
    // Null is one per query head in every class.
    let kv = keys.read_count("num_key_value_heads", 1, kv_max)?.unwrap_or(query);
    if !query.is_multiple_of(kv) || kv > kv_max {
        let reason = format!(
            "{kv} KV heads for num_attention_heads {query}: it must divide them and be at most \
             {kv_max}"
        );
        return Err(keys.refuse_key("num_key_value_heads", reason));
    }
    let dim_max = Geometry::HEAD_DIM_MAX as usize;
    let dim = match keys.read_count("head_dim", 2, dim_max)? {
        Some(dim) => dim,
        None if family == ModelFamily::Qwen3 && !keys.is_written("head_dim") => 128,
        None if hidden_size.is_multiple_of(query) => hidden_size / query,
        None => {
            let reason =
                format!("{query} does not divide hidden_size {hidden_size}: give head_dim");
            return Err(keys.refuse_key("num_attention_heads", reason));
        }
    };
    if !(2..=dim_max).contains(&dim) || !dim.is_multiple_of(2) {
        let reason = format!("is {dim}; it must be even and from 2 to {dim_max}");
        return Err(keys.refuse_key("head_dim", reason));
    }
    Ok(HeadCounts { query, kv, dim })
}

fn parse_bos(keys: ConfigKeys<'_>, vocab_size: usize) -> Result<u32> {
    let bos = keys.read_count("bos_token_id", 0, vocab_size - 1)?.unwrap_or(0);
    u32::try_from(bos).map_err(|_| keys.refuse_key("bos_token_id", "is not a token id"))
}

fn parse_activation(keys: ConfigKeys<'_>) -> Result<ActivationFunction> {
    let (act, alias) = (keys.read_word("hidden_act")?, keys.read_word("hidden_activation")?);
    let name = act.unwrap_or("silu");
    // Only other families read the second key.
    if alias.is_some_and(|alias| alias != name) {
        return Err(
            keys.refuse_key("hidden_activation", format!("disagrees with hidden_act {name:?}"))
        );
    }
    let unsupported = || format!("{name:?} is not supported; silu, gelu and relu variants are");
    ActivationFunction::parse_name(name).ok_or_else(|| keys.refuse_key("hidden_act", unsupported()))
}

fn parse_biases(keys: ConfigKeys<'_>, family: ModelFamily) -> Result<BiasFlags> {
    let (attention, mlp) = (keys.read_flag("attention_bias")?, keys.read_flag("mlp_bias")?);
    let never = |key: &str| {
        let reason = format!("a {} model has no such biases", family.name());
        keys.refuse_key(key, reason)
    };
    if mlp == Some(true) && family != ModelFamily::Llama {
        return Err(never("mlp_bias"));
    }
    let (qkv, o) = match (family, attention) {
        (ModelFamily::Mistral, Some(true)) => return Err(never("attention_bias")),
        (ModelFamily::Qwen2, Some(false)) => {
            let reason = "a qwen2 model has biases of q, k and v; set the key to null";
            return Err(keys.refuse_key("attention_bias", reason));
        }
        (ModelFamily::Qwen2, _) => (true, false),
        (_, attention) => (attention == Some(true), attention == Some(true)),
    };
    Ok(BiasFlags { qkv, o, mlp: mlp == Some(true) })
}

/// Heads of a layer and their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadCounts {
    /// Query heads.
    pub query: usize,
    /// KV heads; each serves `query / kv` query heads in a row.
    pub kv: usize,
    /// Channels of each.
    pub dim: usize,
}

impl HeadCounts {
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
    pub fn query_group(self) -> usize {
        self.query / self.kv
    }
}
