//! Rows that a model makes of text, computed without a daemon.

use super::{KvDump, LayerRows};
use crate::progress::RunProgress;
use crate::split::ModelWindows;
use crate::{UsageError, model_report, samples, text};
use anyhow::{Result, ensure};
use kvd_core::Geometry;
use kvd_engine::{LanguageModel, ModelAssets, ModelConfig, TokenWindow};
use std::path::PathBuf;

/// One of so many windows of the model's own text is left for evaluations.
const FRONT: usize = 8;

/// A model and text.
#[derive(Clone, Debug)]
pub struct ModelSource {
    /// Model directory; the compiled-in fixture when absent.
    pub dir: Option<PathBuf>,
    /// Texts in UTF-8, `tokens` tokens from the front of each; when empty, windows spread over the
    /// model's own, whose front is left for evaluations as long as there is other text.
    pub texts: Vec<PathBuf>,
    /// Tokens to take, in whole windows; fewer where a text is short.
    pub tokens: usize,
    /// Tokens of a window: the model begins anew with each.
    pub window: usize,
    /// Tokens per block of the model that will use the artefact.
    pub block_tokens: u32,
}

/// A model that is read, and windows of text for it.
pub(super) struct ReadModel {
    model: LanguageModel,
    windows: Vec<TokenWindow>,
    geometry: Geometry,
}

impl ReadModel {
    /// The model and the windows that rows are recorded of.
    pub(super) fn model_windows(&self) -> ModelWindows<'_> {
        ModelWindows { model: &self.model, windows: &self.windows }
    }

    /// Queries, keys and values of every layer, keys and values rounded to f16 as a cache keeps
    /// them.
    pub(super) async fn record_rows(&self, progress: &RunProgress) -> Result<KvDump> {
        let Self { model, windows, geometry } = self;
        let tokens: usize = windows.iter().map(|window| window.inputs.len()).sum();
        progress.begin_steps("text", tokens);
        let layers = vec![LayerRows::default(); model.config().num_hidden_layers];
        let query_heads = model.config().attention_heads().query;
        let mut dump = KvDump { geometry: geometry.clone(), query_heads, layers };
        for window in windows {
            let recorded =
                samples::record_window(model, window, &mut |n| progress.add_steps(n)).await?;
            for (layer, rows) in dump.layers.iter_mut().zip(recorded) {
                layer.k.extend(rows.k);
                layer.v.extend(rows.v);
                layer.q.extend(rows.q);
            }
        }
        Ok(dump)
    }
}

impl ModelSource {
    /// Reads the model and chooses windows.
    pub(super) fn read_model(&self) -> Result<ReadModel> {
        let assets = ModelAssets::resolve_folder(self.dir.as_deref())?;
        let config = ModelConfig::parse_json(&assets.config)?;
        let longest = config.positions_max();
        let window = self.window;
        let refused = |reason: &str| UsageError(format!("--window {window}: {reason}"));
        ensure!(window > 0, refused("a window has one token at least"));
        let most = format!("the model has {longest} positions");
        ensure!(window <= longest, refused(&most));
        let wanted = (self.tokens / window).max(1);
        let wanted = samples::windows_with_room(&config, window, wanted);
        let windows = self.choose_windows(&assets, config.bos_token_id, wanted)?;
        ensure!(
            !windows.is_empty(),
            refused("the text has no whole window of so many tokens; give --text or fewer")
        );
        let model = model_report::load_model(config, &assets)?;
        let geometry = model.config().kv_geometry(self.block_tokens)?;
        Ok(ReadModel { model, windows, geometry })
    }

    fn choose_windows(
        &self,
        assets: &ModelAssets,
        bos: u32,
        wanted: usize,
    ) -> Result<Vec<TokenWindow>> {
        let mut windows = Vec::new();
        if self.texts.is_empty() {
            let own = assets.held_out()?;
            let count = TokenWindow::count_windows(own, self.window);
            let first = (count / FRONT).min(count.saturating_sub(wanted));
            for index in text::spread_windows(first..count, wanted.min(count)) {
                windows.push(TokenWindow::new(own, bos, self.window, index)?);
            }
        }
        for path in &self.texts {
            let ids = text::token_ids(assets, path, wanted * self.window)?;
            for index in 0..TokenWindow::count_windows(&ids, self.window).min(wanted) {
                windows.push(TokenWindow::new(&ids, bos, self.window, index)?);
            }
        }
        Ok(windows)
    }
}
