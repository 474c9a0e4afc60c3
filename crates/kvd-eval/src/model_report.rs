//! The model that was run, for reports.

use anyhow::Result;
use kvd_engine::{LanguageModel, ModelAssets, ModelConfig};
use serde::Serialize;

/// The model that was run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ModelReport {
    /// Its name.
    pub name: String,
    /// Whether it is the fixture compiled into the program.
    pub embedded: bool,
    /// Caveats of its numbers.
    pub note: String,
    /// Parameters.
    pub parameters: u64,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub query_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
}

impl ModelReport {
    /// Describes a model as it was read.
    pub(crate) fn new(assets: &ModelAssets, model: &LanguageModel) -> Self {
        let heads = model.config().attention_heads();
        let note = if assets.embedded {
            "It is a tiny model, a test fixture: it writes plausible Rust documentation for a few \
             lines.\nIts numbers compare codecs; they do not say what a large model would lose."
        } else {
            "Its numbers hold for this model and this text."
        };
        Self {
            name: assets.name.clone(),
            embedded: assets.embedded,
            note: note.to_owned(),
            parameters: model.parameters(),
            layers: model.config().num_hidden_layers,
            query_heads: heads.query,
            kv_heads: heads.kv,
            head_dim: heads.dim,
        }
    }
}

/// Reads the weights and says what a user should know of them.
pub(crate) fn load_model(config: ModelConfig, assets: &ModelAssets) -> Result<LanguageModel> {
    let model = LanguageModel::load_model(config, &assets.weights)?;
    for remark in model.folder_remarks() {
        tracing::warn!("{}: {remark}", assets.name);
    }
    Ok(model)
}
