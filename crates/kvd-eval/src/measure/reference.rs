//! Passages without kvd: what every run on them is compared with.

use super::CleanWindow;
use crate::progress::RunProgress;
use anyhow::{Context, Result};
use kvd_engine::{
    AttentionRecorder, LanguageModel, LocalAttention, QualitySums, TextQuality, TextSteps,
    TokenWindow, WindowPredictions, teacher_forced,
};

/// Passages of one text and what the model makes of them with an f16 cache of its own.
pub(crate) struct PassageReference {
    pub(crate) passages: Vec<TokenWindow>,
    /// First position of a passage that is scored.
    pub(crate) scored_from: usize,
    pub(crate) predictions: Vec<WindowPredictions>,
    pub(crate) quality: TextQuality,
    /// Queries, keys and values of the first passage.
    pub(crate) clean: CleanWindow,
}

impl PassageReference {
    /// Runs every passage once, `chunk` tokens per step.
    pub(crate) async fn run_passages(
        model: &LanguageModel,
        passages: Vec<TokenWindow>,
        scored_from: usize,
        chunk: usize,
        progress: &RunProgress,
    ) -> Result<Self> {
        let config = model.config();
        let layers = config.num_hidden_layers;
        progress.name_step("without kvd", "held-out passages");
        let tick = |tokens| progress.add_steps(tokens);
        let (mut predictions, mut sums, mut clean) = (Vec::new(), QualitySums::default(), None);
        for window in &passages {
            let local = LocalAttention::new(config.attention_heads(), layers);
            let mut attention = AttentionRecorder::new(local, layers);
            let steps = TextSteps { chunk, start: 0, scored_from };
            let run = teacher_forced(model, window, steps, &mut attention, tick).await?;
            sums.add_window(&run, &run);
            predictions.push(run);
            clean.get_or_insert_with(|| attention.into_layers());
        }
        let clean = CleanWindow::new(config, clean.context("no passage")?);
        Ok(Self { passages, scored_from, predictions, quality: sums.mean_quality(), clean })
    }
}
