//! The model and the held-out text a run is made of, and the run without kvd.

use super::options::DemoOptions;
use super::report::{GeneratedText, ReferenceReport};
use crate::measure::PassageReference;
use crate::model_report::{self, ModelReport};
use crate::progress::RunProgress;
use crate::{UsageError, samples, text};
use anyhow::{Context, Result, ensure};
use kvd_engine::{
    Continuation, LanguageModel, LocalAttention, ModelAssets, ModelConfig, TokenWindow,
    generate_tokens,
};
use std::ops::Range;

/// Where the fixture's prompt begins: a source file whose continuation reads well.
const FIXTURE_PROMPT: usize = 82_538;

/// Everything that is the same in every run.
pub(crate) struct DemoSubject {
    pub(crate) assets: ModelAssets,
    pub(crate) model: LanguageModel,
    pub(crate) passages: Vec<TokenWindow>,
    pub(crate) calibration: Vec<TokenWindow>,
    pub(crate) prompt: Vec<u32>,
}

impl DemoSubject {
    /// Reads the model and takes passages from the front of the held-out text, the prompt from
    /// behind them, and calibration windows from all over the rest.
    pub(crate) fn load_subject(options: &DemoOptions) -> Result<Self> {
        let assets = ModelAssets::resolve_folder(options.model_dir.as_deref())?;
        let config = ModelConfig::parse_json(&assets.config)?;
        let (tokens, longest) = (options.passage_tokens, config.positions_max());
        let written = options.prompt_tokens + options.new_tokens;
        ensure!(
            tokens.max(written) <= longest,
            UsageError(format!(
                "passages of {tokens} and {written} tokens of prompt and text do not fit the \
                 {longest} positions of the model; give fewer --tokens"
            ))
        );
        let (ids, bos) = (assets.held_out()?, config.bos_token_id);
        let windows = TokenWindow::count_windows(ids, tokens);
        ensure!(
            windows > options.passages,
            UsageError(format!(
                "held-out text of {windows} windows has no {} passages and a calibration window; \
                 give fewer --passages",
                options.passages
            ))
        );
        // One window is left for the calibration where the text is short.
        let between = options.passages * tokens..(windows - 1) * tokens;
        let preferred = assets.embedded.then_some(FIXTURE_PROMPT);
        let start = prompt_start(ids, bos, between, written, preferred)
            .context("held-out text has no room for a prompt between passages and calibration")?;
        let prompt = start..start + written;
        let apart = |w: &usize| (w + 1) * tokens <= prompt.start || w * tokens >= prompt.end;
        let free: Vec<usize> = (options.passages..windows).filter(apart).collect();
        let calibrated = options.calibration_windows.min(free.len());
        let calibrated = samples::windows_with_room(&config, tokens, calibrated);
        let calibration = text::spread_windows(0..free.len(), calibrated);
        let window = |index| TokenWindow::new(ids, bos, tokens, index);
        Ok(Self {
            passages: (0..options.passages).map(window).collect::<Result<_>>()?,
            calibration: calibration.map(|i| window(free[i])).collect::<Result<_>>()?,
            prompt: ids[start..start + options.prompt_tokens].to_vec(),
            model: model_report::load_model(config, &assets)?,
            assets,
        })
    }

    pub(crate) fn model_report(&self) -> ModelReport {
        ModelReport::new(&self.assets, &self.model)
    }

    pub(crate) fn compare_generation(
        &self,
        run: Continuation,
        reference: Option<&[u32]>,
    ) -> Result<GeneratedText> {
        let same = |reference: &[u32]| {
            run.tokens.iter().zip(reference).take_while(|(a, b)| a == b).count()
        };
        Ok(GeneratedText {
            text: self.assets.decode_ids(&run.tokens)?,
            same_tokens: same(reference.unwrap_or(&run.tokens)),
            tokens: run.tokens,
            tokens_per_second: run.tokens_per_second,
        })
    }
}

/// A place in `between` with `needed` tokens of one document after it: the preferred one, else
/// the first document that is long enough, else the front.
fn prompt_start(
    ids: &[u32],
    separator: u32,
    between: Range<usize>,
    needed: usize,
    preferred: Option<usize>,
) -> Option<usize> {
    let fits = |start: usize| start >= between.start && start + needed <= between.end;
    let documents = || between.clone().filter(|&i| ids[i] == separator);
    let long = |&start: &usize| fits(start) && !ids[start + 1..start + needed].contains(&separator);
    preferred
        .filter(|&start| fits(start))
        .or_else(|| documents().find(long))
        .or_else(|| fits(between.start).then_some(between.start))
}

/// The run without kvd, and what the other runs are compared with.
pub(crate) struct DemoReference {
    pub(crate) passages: PassageReference,
    pub(crate) report: ReferenceReport,
}

impl DemoReference {
    pub(crate) async fn run_reference(
        subject: &DemoSubject,
        options: &DemoOptions,
        progress: &RunProgress,
    ) -> Result<Self> {
        let (model, chunk) = (&subject.model, options.chunk_tokens);
        let (windows, from) = (subject.passages.clone(), options.scored_from());
        let passages =
            PassageReference::run_passages(model, windows, from, chunk, progress).await?;
        let config = model.config();
        let mut local = LocalAttention::new(config.attention_heads(), config.num_hidden_layers);
        let tick = |tokens| progress.add_steps(tokens);
        progress.name_step("without kvd", "text");
        let (prompt, new) = (&subject.prompt, options.new_tokens);
        let written = generate_tokens(model, prompt, new, chunk, &mut local, tick).await?;
        let report = ReferenceReport {
            quality: passages.quality,
            generation: subject.compare_generation(written, None)?,
        };
        Ok(Self { passages, report })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_stays_inside_one_document_when_one_is_long_enough() {
        let mut ids = vec![7; 100];
        for separator in [12, 20, 60] {
            ids[separator] = 0;
        }
        assert_eq!(prompt_start(&ids, 0, 10..90, 30, None), Some(20));
        assert_eq!(prompt_start(&ids, 0, 10..90, 30, Some(40)), Some(40));
        assert_eq!(prompt_start(&ids, 0, 10..90, 30, Some(5)), Some(20));
        assert_eq!(prompt_start(&ids, 0, 10..90, 70, None), Some(10));
        assert_eq!(prompt_start(&ids, 0, 10..90, 81, None), None);
    }
}
