//! The model and the texts of an evaluation, as windows of tokens.

use super::EvalOptions;
use crate::{UsageError, model_report, samples, text};
use anyhow::{Context, Result, ensure};
use kvd_engine::{LanguageModel, ModelAssets, ModelConfig, TokenWindow};
use std::path::PathBuf;

/// A text to score.
pub(super) struct ScoredText {
    /// The file's name, or the model's.
    pub(super) name: String,
    pub(super) passages: Vec<TokenWindow>,
}

/// Everything that is the same in every run.
pub(super) struct EvalMaterial {
    pub(super) assets: ModelAssets,
    pub(super) model: LanguageModel,
    pub(super) texts: Vec<ScoredText>,
    /// Windows that calibrations are fitted on.
    pub(super) calibration: Vec<TokenWindow>,
}

impl EvalMaterial {
    pub(super) fn load_material(options: &EvalOptions) -> Result<Self> {
        let assets = ModelAssets::resolve_folder(options.model_dir.as_deref())?;
        let config = ModelConfig::parse_json(&assets.config)?;
        let (tokens, longest) = (options.passage_tokens, config.positions_max());
        ensure!(
            tokens <= longest,
            UsageError(format!(
                "passages of {tokens} tokens do not fit the {longest} positions of the model; give \
                 fewer --tokens"
            ))
        );
        let bos = config.bos_token_id;
        let passages = |ids: &[u32]| -> Result<Vec<TokenWindow>> {
            let (there, wanted) = (TokenWindow::count_windows(ids, tokens), options.passages);
            ensure!(
                wanted <= there,
                UsageError(format!(
                    "the text has {there} passages of {tokens} tokens, and {wanted} are asked \
                     for; give fewer --passages or fewer --tokens"
                ))
            );
            (0..wanted).map(|index| TokenWindow::new(ids, bos, tokens, index)).collect()
        };
        let own = TokenWindow::count_windows(&assets.held_out, tokens);
        // The model's own text gives passages from its front only where no other text is named.
        let scored = if options.texts.is_empty() { options.passages } else { 0 };
        let calibrated = options.calibration_windows.min(own.saturating_sub(scored));
        let calibrated = samples::windows_with_room(&config, tokens, calibrated);
        let needs = options.codecs.iter().any(|codec| codec.spec.needs_calibration());
        if options.texts.is_empty() {
            assets.held_out()?;
        } else if needs && options.calibration.is_none() {
            assets.held_out().context("a codec needs a calibration: give --calibration")?;
        }
        ensure!(
            calibrated > 0 || !needs || options.calibration.is_some(),
            UsageError(format!(
                "the model's held-out text has {own} windows of {tokens} tokens: none is left for \
                 calibration; give --calibration, fewer --passages or fewer --tokens"
            ))
        );
        let calibration = text::spread_windows(scored.min(own)..own, calibrated)
            .map(|index| TokenWindow::new(&assets.held_out, bos, tokens, index))
            .collect::<Result<_>>()?;
        let texts = if options.texts.is_empty() {
            let passages = passages(assets.held_out()?)?;
            vec![ScoredText { name: assets.name.clone(), passages }]
        } else {
            let read = |path: &PathBuf| {
                let ids = text::token_ids(&assets, path, options.passages * tokens)?;
                let passages = passages(&ids).with_context(|| path.display().to_string())?;
                let name =
                    path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into());
                Ok(ScoredText { name, passages })
            };
            options.texts.iter().map(read).collect::<Result<_>>()?
        };
        Ok(Self { model: model_report::load_model(config, &assets)?, assets, texts, calibration })
    }
}
