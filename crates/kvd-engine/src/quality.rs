//! Teacher-forced passes over held-out text and what they say about two runs.

use crate::assets::TokenWindow;
use crate::attention::LayerAttention;
use crate::model::LanguageModel;
use anyhow::{Result, ensure};
use std::ops::Range;

/// The steps in which a window is read.
#[derive(Clone, Copy, Debug)]
pub struct TextSteps {
    /// Tokens of a step.
    pub chunk: usize,
    /// First position to read; the attention has all tokens before it.
    pub start: usize,
    /// First position that is scored, `start` or later.
    pub scored_from: usize,
}

/// Natural-log next-token distributions `[positions, vocabulary]` of a window, from the first
/// scored position on, and what they give the true next tokens.
#[derive(Clone, Debug)]
pub struct WindowPredictions {
    /// The first scored position.
    pub first: usize,
    /// Log probabilities of every token at every scored position.
    pub log_probs: Vec<f32>,
    /// Entries of the vocabulary.
    pub vocabulary: usize,
    /// Minus the log probability of the true next token, by position.
    pub losses: Vec<f64>,
}

impl WindowPredictions {
    /// One past the last scored position.
    #[must_use]
    pub fn end_position(&self) -> usize {
        self.first + self.losses.len()
    }

    /// Distributions of some scored positions.
    fn rows_at(&self, positions: &Range<usize>) -> impl Iterator<Item = &[f32]> {
        self.log_probs.chunks(self.vocabulary).skip(positions.start - self.first)
    }

    /// The loss of some scored positions.
    fn loss_at(&self, positions: &Range<usize>) -> f64 {
        self.losses[positions.start - self.first..positions.end - self.first].iter().sum()
    }
}

/// Reads a window; the predictions of its scored positions are kept.
///
/// # Errors
/// When a target is not in the vocabulary, the attention fails or a loss is not finite.
pub async fn teacher_forced<A: LayerAttention>(
    model: &LanguageModel,
    window: &TokenWindow,
    steps: TextSteps,
    attention: &mut A,
    mut on_chunk: impl FnMut(usize),
) -> Result<WindowPredictions> {
    let vocabulary = model.config().vocab_size;
    model.check_tokens(&window.targets)?;
    let mut log_probs = Vec::new();
    let mut losses = Vec::new();
    let TextSteps { chunk, start, scored_from } = steps;
    let mut position = start;
    let inputs = window.inputs[start..].chunks(chunk);
    for (inputs, targets) in inputs.zip(window.targets[start..].chunks(chunk)) {
        let mut logits = model.forward_tokens(inputs, position, attention).await?;
        for (i, (row, &target)) in logits.chunks_mut(vocabulary).zip(targets).enumerate() {
            if position + i >= scored_from {
                log_softmax(row);
                let loss = -f64::from(row[target as usize]);
                ensure!(
                    loss.is_finite(),
                    "the loss of token {} is {loss}: the model's numbers leave f32, so nothing can \
                     be said about its text",
                    position + i
                );
                losses.push(loss);
                log_probs.extend_from_slice(row);
            }
        }
        position += inputs.len();
        on_chunk(inputs.len());
    }
    Ok(WindowPredictions { first: scored_from, log_probs, vocabulary, losses })
}

fn log_softmax(logits: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    for logit in logits {
        *logit = (f64::from(*logit) - log_sum) as f32;
    }
}

/// How a run predicts held-out text, alone and against the run without kvd.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct TextQuality {
    /// Positions that were scored.
    pub scored_tokens: u64,
    /// Mean loss in nats per token.
    pub loss_nats: f64,
    /// e to the power of the loss.
    pub perplexity: f64,
    /// Change of the perplexity against the run without kvd, in percent.
    pub perplexity_change_percent: f64,
    /// Mean KL(without kvd || this run) of the next-token distributions, in nats.
    pub kl_nats: f64,
    /// The KL that half of the positions stay below.
    pub kl_median_nats: f64,
    /// The KL that 99.9 % of the positions stay below; the largest of fewer than 1000 positions.
    pub kl_p999_nats: f64,
    /// Share of positions whose most likely token is the same, in percent.
    pub top1_agreement_percent: f64,
}

/// Sums of [`TextQuality`] over windows.
#[derive(Clone, Debug, Default)]
pub struct QualitySums {
    loss: f64,
    reference_loss: f64,
    /// By position.
    kl: Vec<f64>,
    agreed: u64,
}

impl QualitySums {
    /// Adds one window: the run's predictions and those of the run without kvd.
    pub fn add_window(&mut self, run: &WindowPredictions, reference: &WindowPredictions) {
        self.add_positions(run, reference, run.first..run.end_position());
    }

    /// [`QualitySums::add_window`] of some positions.
    ///
    /// # Panics
    /// When either run did not score one of them.
    pub fn add_positions(
        &mut self,
        run: &WindowPredictions,
        reference: &WindowPredictions,
        positions: Range<usize>,
    ) {
        let rows = reference.rows_at(&positions).zip(run.rows_at(&positions));
        for (p, q) in rows.take(positions.len()) {
            self.kl.push(kl_divergence(p, q));
            self.agreed += u64::from(argmax(p) == argmax(q));
        }
        self.loss += run.loss_at(&positions);
        self.reference_loss += reference.loss_at(&positions);
    }

    /// The means, and how KL is spread over positions.
    #[must_use]
    pub fn mean_quality(mut self) -> TextQuality {
        let positions = self.kl.len().max(1) as f64;
        let kl: f64 = self.kl.iter().sum();
        self.kl.sort_by(f64::total_cmp);
        let loss = self.loss / positions;
        let change = (loss - self.reference_loss / positions).exp() - 1.0;
        TextQuality {
            scored_tokens: self.kl.len() as u64,
            loss_nats: loss,
            perplexity: loss.exp(),
            perplexity_change_percent: 100.0 * change,
            kl_nats: kl / positions,
            kl_median_nats: value_at(&self.kl, 0.5),
            kl_p999_nats: value_at(&self.kl, 0.999),
            top1_agreement_percent: 100.0 * self.agreed as f64 / positions,
        }
    }
}

/// The smallest of the sorted values that is no smaller than that share of them; 0 of none.
fn value_at(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

fn kl_divergence(p: &[f32], q: &[f32]) -> f64 {
    let terms = p.iter().zip(q).map(|(&p, &q)| f64::from(p).exp() * (f64::from(p) - f64::from(q)));
    terms.sum()
}

/// Index of the largest value, the first of several.
#[must_use]
pub(crate) fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, value) in values.iter().enumerate() {
        if *value > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predictions(rows: &[[f32; 2]], targets: &[usize]) -> WindowPredictions {
        let mut rows = rows.to_vec();
        rows.iter_mut().for_each(|row| log_softmax(row));
        let losses = rows.iter().zip(targets).map(|(row, &t)| -f64::from(row[t])).collect();
        WindowPredictions { first: 0, log_probs: rows.concat(), vocabulary: 2, losses }
    }

    #[test]
    fn positions_are_counted_from_the_start_of_the_window() {
        let three = 3f32.ln();
        let reference = predictions(&[[0.0, 0.0], [three, 0.0], [0.0, 0.0]], &[0, 0, 0]);
        let later = predictions(&[[0.0, three], [0.0, 0.0]], &[0, 0]);
        let run = WindowPredictions { first: 1, ..later };
        let (mut both, mut one) = (QualitySums::default(), QualitySums::default());
        both.add_window(&run, &reference);
        one.add_positions(&run, &reference, 1..2);
        let (both, one) = (both.mean_quality(), one.mean_quality());
        assert!((one.kl_nats - 0.5 * 3f64.ln()).abs() < 1e-6, "{one:?}");
        assert!((both.kl_nats - 0.25 * 3f64.ln()).abs() < 1e-6, "{both:?}");
        assert_eq!((one.scored_tokens, both.scored_tokens), (1, 2));
        assert!((one.loss_nats - 4f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_few_bad_positions_show_in_the_tail_and_not_in_the_median() {
        let mut kl: Vec<f64> = (1..=1000).map(|rank| f64::from(rank) / 1000.0).rev().collect();
        kl[0] = 100.0;
        let sums = QualitySums { kl, ..QualitySums::default() };
        let quality = sums.mean_quality();
        assert_eq!((quality.kl_median_nats, quality.kl_p999_nats), (0.5, 0.999));
        assert_eq!(value_at(&[1.0, 7.0], 0.999), 7.0);
        assert_eq!(QualitySums::default().mean_quality().kl_p999_nats, 0.0);
    }

    #[test]
    fn kl_and_agreement_follow_from_the_distributions() {
        // Probabilities 3/4, 1/4 against 1/4, 3/4 at the first position; equal at the second.
        let three = 3f32.ln();
        let reference = predictions(&[[three, 0.0], [0.0, three]], &[0, 1]);
        let run = predictions(&[[0.0, three], [0.0, three]], &[0, 1]);
        let mut sums = QualitySums::default();
        sums.add_window(&run, &reference);
        let quality = sums.mean_quality();
        assert!((quality.kl_nats - 0.25 * 3f64.ln()).abs() < 1e-6, "{quality:?}");
        assert_eq!(quality.top1_agreement_percent, 50.0);
        assert!((quality.loss_nats - 0.5 * (4f64.ln() + (4f64 / 3.0).ln())).abs() < 1e-6);
        assert!((quality.perplexity_change_percent - 100.0 * (3f64.sqrt() - 1.0)).abs() < 1e-4);
    }

    #[test]
    fn a_run_equals_itself() {
        let reference = predictions(&[[0.3, -0.2], [5.0, 1.0]], &[1, 0]);
        let mut sums = QualitySums::default();
        sums.add_window(&reference, &reference);
        let quality = sums.mean_quality();
        assert_eq!((quality.kl_nats, quality.perplexity_change_percent), (0.0, 0.0));
        assert_eq!(quality.top1_agreement_percent, 100.0);
    }
}
