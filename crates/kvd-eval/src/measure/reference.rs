//! Passages without kvd: what every run on them is compared with.

use super::CleanWindow;
use crate::progress::Progress;
use anyhow::{Context, Result};
use kvd_engine::{
    LocalAttention, Model, Predictions, Quality, QualitySums, Recorder, Window, teacher_forced,
};

/// Passages of one text and what the model makes of them with an f16 cache of its own.
pub(crate) struct PassageReference {
    pub(crate) passages: Vec<Window>,
    /// First position of a passage that is scored.
    pub(crate) scored_from: usize,
    pub(crate) predictions: Vec<Predictions>,
    pub(crate) quality: Quality,
    /// Queries, keys and values of the first passage.
    pub(crate) clean: CleanWindow,
}

impl PassageReference {
    /// Runs every passage once, `chunk` tokens per step.
    pub(crate) async fn run(
        model: &Model,
        passages: Vec<Window>,
        scored_from: usize,
        chunk: usize,
        progress: &Progress,
    ) -> Result<Self> {
        let config = model.config();
        let layers = config.num_hidden_layers;
        progress.stage("without kvd", "held-out passages");
        let tick = |tokens| progress.add(tokens);
        let (mut predictions, mut sums, mut clean) = (Vec::new(), QualitySums::default(), None);
        for window in &passages {
            let local = LocalAttention::new(config.heads(), layers);
            let mut attention = Recorder::new(local, layers);
            let run =
                teacher_forced(model, window, chunk, scored_from, &mut attention, tick).await?;
            sums.add(&run, &run);
            predictions.push(run);
            clean.get_or_insert_with(|| attention.into_layers());
        }
        let clean = CleanWindow::new(config, clean.context("no passage")?);
        Ok(Self { passages, scored_from, predictions, quality: sums.finish(), clean })
    }
}
