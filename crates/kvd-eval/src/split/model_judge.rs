//! Effect of a codec's errors on a model's predictions, on text that no fit has seen.

use super::packed_attention::{LayerOutputs, PackedAttention, PackedHeads};
use super::{CodecCounts, JudgedCodec, ProbeGroups};
use crate::progress::RunProgress;
use anyhow::{Context, Result};
use kvd_codec::{Calibration, CodecSpec, ModelCodec};
use kvd_core::Geometry;
use kvd_engine::{
    LanguageModel, ModelConfig, QualitySums, TextSteps, TokenWindow, WindowPredictions,
    teacher_forced,
};
use kvd_fit::GroupCost;

/// Tokens of a step: queries see fewer of their newest neighbours packed than later ones will.
const CHUNK: usize = 32;
/// Memory that log probabilities of a text may take; a run takes twice as much.
const PREDICTION_BYTES_MAX: usize = 256 << 20;
/// Memory that attention outputs of a text may take; beyond it, layers are computed again.
const OUTPUT_BYTES_MAX: usize = 512 << 20;

/// A text and what the model makes of it without a codec.
struct JudgedText {
    window: TokenWindow,
    scored_from: usize,
    predictions: WindowPredictions,
    outputs: Option<LayerOutputs>,
}

/// A model and two texts: by one each group's cost is measured, by the other whole codecs.
pub(super) struct ModelJudge<'a> {
    model: &'a LanguageModel,
    geometry: &'a Geometry,
    progress: &'a RunProgress,
    texts: Option<[JudgedText; 2]>,
    windows: [TokenWindow; 2],
}

impl<'a> ModelJudge<'a> {
    pub(super) fn new(
        model: &'a LanguageModel,
        geometry: &'a Geometry,
        windows: [TokenWindow; 2],
        progress: &'a RunProgress,
    ) -> Self {
        Self { model, geometry, progress, texts: None, windows }
    }

    /// Steps of measuring costs under some codecs and judging others or the same, in tokens.
    pub(super) fn step_count(&self, codecs: CodecCounts) -> usize {
        let tokens = self.windows[0].inputs.len();
        let probes = self.probe_groups().0.len();
        2 * tokens + codecs.probed * probes * tokens + codecs.judged * 2 * tokens
    }

    /// The groups that costs are measured of.
    fn probe_groups(&self) -> ProbeGroups {
        let tokens = self.windows[0].inputs.len();
        ProbeGroups::affordable_groups(self.geometry, self.model.parameters(), tokens)
    }

    /// The cost of each group's errors under a calibration: the KL that they make.
    pub(super) async fn measure_costs(
        &mut self,
        spec: &CodecSpec,
        calibration: &Calibration,
    ) -> Result<Vec<GroupCost>> {
        let codec = ModelCodec::new(self.geometry.clone(), spec.clone(), Some(calibration))?;
        self.read_texts(&codec).await?;
        let mut costs = Vec::new();
        for group in self.probe_groups().0 {
            let judged = self.run_text(0, &codec, PackedHeads::Group(&group)).await?;
            costs.push(GroupCost { group, cost: judged.loss });
        }
        Ok(costs)
    }

    /// The KL of a whole codec on the other text.
    pub(super) async fn judge_codec(
        &mut self,
        spec: &CodecSpec,
        calibration: &Calibration,
    ) -> Result<JudgedCodec> {
        let codec = ModelCodec::new(self.geometry.clone(), spec.clone(), Some(calibration))?;
        self.read_texts(&codec).await?;
        self.run_text(1, &codec, PackedHeads::Everything).await
    }

    /// Runs both texts without a codec, once.
    async fn read_texts(&mut self, codec: &ModelCodec) -> Result<()> {
        if self.texts.is_some() {
            return Ok(());
        }
        let mut texts = Vec::new();
        for window in self.windows.clone() {
            let config = self.model.config();
            let (tokens, scored_from) = (window.inputs.len(), scored_from(config, &window));
            let heads = config.attention_heads();
            let mut run = PackedAttention::new(heads, codec, PackedHeads::Nothing, None);
            let steps = TextSteps { chunk: CHUNK, start: 0, scored_from };
            let tick = |tokens| self.progress.add_steps(tokens);
            let predictions = teacher_forced(self.model, &window, steps, &mut run, tick).await?;
            let values = tokens * heads.query_width() * config.num_hidden_layers;
            let fits = values * size_of::<f32>() <= OUTPUT_BYTES_MAX;
            let outputs = fits.then_some(run.outputs);
            texts.push(JudgedText { window, scored_from, predictions, outputs });
        }
        self.texts = Some(texts.try_into().ok().context("two texts are read")?);
        Ok(())
    }

    async fn run_text(
        &self,
        text: usize,
        codec: &ModelCodec,
        packed: PackedHeads<'_>,
    ) -> Result<JudgedCodec> {
        let texts = self.texts.as_ref().context("no text was read")?;
        let JudgedText { window, scored_from, predictions, outputs } = &texts[text];
        let heads = self.model.config().attention_heads();
        let mut attention = PackedAttention::new(heads, codec, packed, outputs.as_ref());
        let steps = TextSteps { chunk: CHUNK, start: 0, scored_from: *scored_from };
        let tick = |tokens| self.progress.add_steps(tokens);
        let run = teacher_forced(self.model, window, steps, &mut attention, tick).await?;
        let mut sums = QualitySums::default();
        sums.add_window(&run, predictions);
        let loss = sums.mean_quality().kl_nats;
        Ok(JudgedCodec { loss, bits: attention.taken.bits_per_value() })
    }
}

/// From an eighth of a text on, or later where predictions of a large vocabulary would take too
/// much memory.
fn scored_from(config: &ModelConfig, window: &TokenWindow) -> usize {
    let room = PREDICTION_BYTES_MAX / (config.vocab_size * size_of::<f32>()).max(1);
    let tokens = window.inputs.len();
    (tokens / 8).max(tokens.saturating_sub(room.max(1)))
}
