//! Fits of codecs with their bits shared by sensitivity, and of all others as they are.

use super::report::{BitSplit, JudgedCodec, SplitReport, SplitVerdict};
use super::{CodecCounts, ModelJudge, RowsJudge, SplitJudge};
use crate::calibrate::KvDump;
use crate::fits::{FittedCodec, FittedSides};
use crate::progress::RunProgress;
use crate::samples;
use anyhow::{Context, Result};
use kvd_codec::{Calibration, CodecSpec, SideSpec};
use kvd_core::{Geometry, Side};
use kvd_engine::{LanguageModel, TokenWindow};
use kvd_fit::{GroupCost, OpenCodec, OpenSide, RatedCodec, Samples};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

/// A split by costs is taken that loses at most this share of the even split's loss.
const BETTER: f64 = 0.98;
/// Bits of a split by costs over those of the even split, on the text that both are judged by.
const BITS_SLACK: f64 = 1.002;
/// Parts of the text, two of which are held out, at least.
const PARTS_MIN: usize = 8;
/// Tokens of a part: queries should look beyond the windows of a codec.
const PART_TOKENS_MIN: usize = 512;
/// Tokens of a part where one text is cut into parts: a context of usual length.
const PART_TOKENS: usize = 2048;

/// Fitted codecs, and how bits of those are shared whose bits can be.
#[derive(Clone, Debug, Default)]
pub(crate) struct CodecFits {
    pub(crate) fits: FittedSides,
    pub(crate) splits: Vec<SplitReport>,
}

/// A fit on windows of a model's text.
pub(crate) struct WindowFits<'a> {
    pub(crate) model: &'a LanguageModel,
    pub(crate) geometry: &'a Geometry,
    pub(crate) windows: &'a [TokenWindow],
    pub(crate) specs: Vec<CodecSpec>,
    pub(crate) split: BitSplit,
    pub(crate) seed: u64,
    pub(crate) progress: &'a RunProgress,
}

/// Runs the windows and fits every codec.
pub(crate) async fn fit_windows(job: WindowFits<'_>) -> Result<CodecFits> {
    let WindowFits { model, geometry, windows, specs, split, seed, progress } = job;
    let tokens = windows.first().map_or(0, |window| window.inputs.len());
    progress.begin_steps("calibration text", windows.len() * tokens);
    let tick = |tokens| progress.add_steps(tokens);
    let mut samples = samples::collect_samples(model, windows, geometry, tick).await?;
    let sharing = SharingCodecs::choose_codecs(specs, split);
    let verdict = text_verdict(windows.len(), tokens);
    let mut fitted = sharing.fit_others(&samples, verdict, seed, progress)?;
    if sharing.shared.is_empty() || verdict.is_some() {
        return Ok(fitted);
    }
    let held = held_parts(windows.len());
    drop(samples.hold_out(windows.len(), &held));
    let held = held.map(|index| windows[index].clone());
    let judge = SplitJudge::Model(Box::new(ModelJudge::new(model, geometry, held, progress)));
    sharing.fit_shared(samples, judge, &mut fitted, seed, progress).await?;
    Ok(fitted)
}

/// A fit on rows, of a model's windows where they are known.
pub(crate) struct DumpFits<'a> {
    pub(crate) specs: Vec<CodecSpec>,
    pub(crate) split: BitSplit,
    pub(crate) seed: u64,
    pub(crate) progress: &'a RunProgress,
    /// The model and the windows that the rows are of.
    pub(crate) model: Option<ModelWindows<'a>>,
}

/// Windows that rows were recorded of, one after another.
#[derive(Clone, Copy)]
pub(crate) struct ModelWindows<'a> {
    pub(crate) model: &'a LanguageModel,
    pub(crate) windows: &'a [TokenWindow],
}

/// Fits every codec to rows; `samples` are those of `dump`.
pub(crate) async fn fit_dump(
    mut dump: KvDump,
    samples: Samples,
    job: DumpFits<'_>,
) -> Result<CodecFits> {
    let DumpFits { specs, split, seed, progress, model } = job;
    let tokens = dump.token_count();
    let sharing = SharingCodecs::choose_codecs(specs, split);
    let parts = match model {
        Some(ModelWindows { windows, .. }) => windows.len(),
        None => (tokens / PART_TOKENS).max(PARTS_MIN),
    };
    let part = tokens / parts.max(1);
    let verdict = match text_verdict(parts, part) {
        None if model.is_none() && !dump.has_query_of_each_token() => {
            Some(SplitVerdict::QueriesWithoutTokens)
        }
        verdict => verdict,
    };
    if sharing.shared.is_empty() || verdict.is_some() {
        drop(dump);
        return sharing.fit_others(&samples, verdict, seed, progress);
    }
    let mut fitted = sharing.fit_others(&samples, None, seed, progress)?;
    drop(samples);
    let held = held_parts(parts);
    // The later one first: those before it keep their places.
    let [second, first] = [held[1], held[0]].map(|index| {
        let tokens = index * part..(index + 1) * part;
        dump.take_tokens(tokens)
    });
    let geometry = dump.geometry.clone();
    let samples = dump.to_samples()?;
    let query_heads = dump.query_heads;
    drop(dump);
    let judge = match model {
        Some(ModelWindows { model, windows }) => {
            let windows = held.map(|index| windows[index].clone());
            SplitJudge::Model(Box::new(ModelJudge::new(model, &geometry, windows, progress)))
        }
        None => SplitJudge::Rows(RowsJudge::new(
            &geometry,
            query_heads,
            [first.layers, second.layers],
            progress,
        )?),
    };
    sharing.fit_shared(samples, judge, &mut fitted, seed, progress).await?;
    Ok(fitted)
}

/// The parts that no fit sees, well inside the text.
fn held_parts(parts: usize) -> [usize; 2] {
    [parts / 4, 3 * parts / 4]
}

/// Why so many parts of so many tokens are too little.
fn text_verdict(parts: usize, tokens: usize) -> Option<SplitVerdict> {
    let enough = parts >= PARTS_MIN && tokens >= PART_TOKENS_MIN;
    let needed = PARTS_MIN * tokens.max(PART_TOKENS_MIN);
    (!enough).then_some(SplitVerdict::TooLittleText { tokens: parts * tokens, needed })
}

/// Codecs by how their bits are shared.
struct SharingCodecs {
    /// Those whose bits can be shared, none twice but for windows.
    shared: Vec<CodecSpec>,
    others: Vec<CodecSpec>,
}

impl SharingCodecs {
    fn choose_codecs(specs: Vec<CodecSpec>, split: BitSplit) -> Self {
        if split == BitSplit::Even {
            return Self { shared: Vec::new(), others: specs };
        }
        let sides = |spec: &CodecSpec| Side::BOTH.map(|side| spec.side(side).fitted_text());
        let all = specs.clone();
        // A side that two codecs have with different partners is fitted once, evenly.
        let alone = |spec: &CodecSpec| {
            let own = sides(spec);
            all.iter().all(|other| {
                let fitted = Side::BOTH.map(|side| {
                    other.side_specs(side).iter().any(|s| s.fitted_text() == own[side.index()])
                });
                (sides(other) == own && other.overrides.is_empty()) || fitted == [false, false]
            })
        };
        let mut chosen = Self { shared: Vec::new(), others: Vec::new() };
        for spec in specs {
            if !OpenCodec::can_share(&spec) || !alone(&spec) {
                chosen.others.push(spec);
            } else if !chosen.shared.iter().any(|other| sides(other) == sides(&spec)) {
                chosen.shared.push(spec);
            }
        }
        chosen
    }

    /// Fits those whose bits are not shared: all of them where `verdict` says why.
    fn fit_others(
        &self,
        samples: &Samples,
        verdict: Option<SplitVerdict>,
        seed: u64,
        progress: &RunProgress,
    ) -> Result<CodecFits> {
        let shared = if verdict.is_some() { &self.shared[..] } else { &[] };
        let fits = FittedSides::new(self.others.iter().chain(shared), samples, seed, progress)?;
        let report = |spec: &CodecSpec| Some(SplitReport::new(spec, false, verdict?));
        Ok(CodecFits { fits, splits: shared.iter().filter_map(report).collect() })
    }

    /// Codecs under which costs are measured: the first of those with the same transforms.
    fn count_probed(&self) -> usize {
        let mut first: Vec<&CodecSpec> = Vec::new();
        for spec in &self.shared {
            if !first.iter().any(|other| has_same_costs(other, spec)) {
                first.push(spec);
            }
        }
        first.len()
    }

    /// Codecs with their indices, those of a middle rate first: their costs serve the others.
    fn probing_order(&self) -> Vec<(usize, &CodecSpec)> {
        let mut specs: Vec<_> = self.shared.iter().enumerate().collect();
        specs.sort_by(|(_, a), (_, b)| {
            OpenCodec::total_rate(a).total_cmp(&OpenCodec::total_rate(b))
        });
        let middle = specs.len() / 2;
        specs[..=middle].rotate_right(1);
        specs
    }

    /// Fits the others, each with the better of two splits.
    async fn fit_shared(
        &self,
        samples: Samples,
        mut judge: SplitJudge<'_>,
        fitted: &mut CodecFits,
        seed: u64,
        progress: &RunProgress,
    ) -> Result<()> {
        let open = open_sides(&self.shared, &samples, progress)?;
        drop(samples);
        let counts = CodecCounts { probed: self.count_probed(), judged: self.shared.len() };
        progress.begin_steps("sensitivity", judge.step_count(counts));
        let by_model = matches!(judge, SplitJudge::Model(_));
        let (mut probed, mut splits) = (Vec::new(), Vec::new());
        for (index, spec) in self.probing_order() {
            let side = |side: Side| {
                let found = open.get(&open_key(side, spec.side(side)));
                found.context("a side that was not fitted")
            };
            let open = OpenCodec { key: side(Side::Key)?, value: side(Side::Value)?, seed };
            let begin = Instant::now();
            let chosen = split_codec(spec, &open, &mut judge, &mut probed).await?;
            let (calibration, verdict) = (chosen.calibration, chosen.verdict);
            let seconds = begin.elapsed().as_secs_f64();
            fitted.fits.insert_codec(spec, &FittedCodec { calibration, seconds });
            splits.push((index, SplitReport::new(spec, by_model, verdict)));
        }
        splits.sort_by_key(|(index, _)| *index);
        fitted.splits.extend(splits.into_iter().map(|(_, report)| report));
        progress.remove_bar();
        Ok(())
    }
}

/// The better of two splits.
struct ChosenSplit {
    calibration: Calibration,
    verdict: SplitVerdict,
}

/// Costs of errors under one codec's even split.
struct ProbedCodec {
    spec: CodecSpec,
    calibration: Calibration,
    costs: Vec<GroupCost>,
}

/// Whether costs under one codec follow from those under the other: the same transforms of the
/// same tokens.
fn has_same_costs(one: &CodecSpec, other: &CodecSpec) -> bool {
    let keys = |spec: &CodecSpec| Side::BOTH.map(|side| open_key(side, spec.side(side)));
    let windows = |spec: &CodecSpec| [spec.sink, spec.recent];
    keys(one) == keys(other) && windows(one) == windows(other)
}

/// The split by costs where it loses less than the even one. Costs under a codec that was probed
/// are carried over.
async fn split_codec(
    spec: &CodecSpec,
    open: &OpenCodec<'_>,
    judge: &mut SplitJudge<'_>,
    probed: &mut Vec<ProbedCodec>,
) -> Result<ChosenSplit> {
    let even = open.split_evenly(spec)?;
    let even_judged = judge.judge_codec(spec, &even).await?;
    let costs = match probed.iter().find(|probed| has_same_costs(&probed.spec, spec)) {
        Some(ProbedCodec { spec: from, calibration, costs }) => {
            let from = RatedCodec { spec: from, calibration };
            open.carry_costs(costs, from, RatedCodec { spec, calibration: &even })?
        }
        None => {
            let costs = judge.measure_costs(spec, &even).await?;
            let (spec, calibration) = (spec.clone(), even.clone());
            probed.push(ProbedCodec { spec, calibration, costs: costs.clone() });
            costs
        }
    };
    let mut split = open.split_by_costs(spec, &even, &costs, 1.0)?;
    let mut judged = judge.judge_codec(spec, &split).await?;
    if judged.bits > even_judged.bits * BITS_SLACK {
        let share = even_judged.bits / judged.bits;
        split = open.split_by_costs(spec, &even, &costs, share)?;
        judged = judge.judge_codec(spec, &split).await?;
    }
    let (taken, even_judged, by_costs) = (takes_split(even_judged, judged), even_judged, judged);
    Ok(if taken {
        let verdict = SplitVerdict::ByCosts { even: even_judged, by_costs };
        ChosenSplit { calibration: split, verdict }
    } else {
        let verdict = SplitVerdict::NotBetter { even: even_judged, by_costs };
        ChosenSplit { calibration: even, verdict }
    })
}

/// Whether the split by costs is taken: it loses less and takes no more bits.
fn takes_split(even: JudgedCodec, by_costs: JudgedCodec) -> bool {
    by_costs.loss <= even.loss * BETTER && by_costs.bits <= even.bits * BITS_SLACK
}

/// Sides that share what their transforms take.
fn open_key(side: Side, spec: &SideSpec) -> String {
    let transforms: Vec<String> = spec.transforms.iter().map(ToString::to_string).collect();
    format!("{side} {}", transforms.join("+"))
}

fn open_sides(
    specs: &[CodecSpec],
    samples: &Samples,
    progress: &RunProgress,
) -> Result<BTreeMap<String, OpenSide>> {
    let geometry = samples.geometry();
    let sides = specs.iter().flat_map(|spec| Side::BOTH.map(|side| (side, spec.side(side))));
    let sides: BTreeMap<String, (Side, &SideSpec)> =
        sides.map(|(side, spec)| (open_key(side, spec), (side, spec))).collect();
    let heads = (geometry.layers * geometry.kv_heads) as usize;
    progress.begin_steps("calibration", heads * sides.len());
    let open = |(key, (side, spec)): (String, (Side, &SideSpec))| {
        let mut one_more = || progress.add_steps(1);
        let open = OpenSide::fit_transforms(side, spec, samples, &mut one_more);
        Ok((key, open.with_context(|| format!("calibration of {spec}"))?))
    };
    sides.into_par_iter().map(open).collect()
}

impl KvDump {
    /// Whether queries are of the same tokens as keys and values, one row for each.
    fn has_query_of_each_token(&self) -> bool {
        let tokens = self.token_count();
        let width = self.query_heads * self.geometry.head_dim_k as usize;
        width > 0 && self.layers.iter().all(|layer| layer.q.len() == tokens * width)
    }

    /// Takes out some tokens.
    fn take_tokens(&mut self, tokens: Range<usize>) -> Self {
        let widths = self.token_widths();
        let (geometry, query_heads) = (self.geometry.clone(), self.query_heads);
        let mut taken = Self { geometry, query_heads, layers: Vec::new() };
        for layer in &mut self.layers {
            let [k, v, q] = [&mut layer.k, &mut layer.v, &mut layer.q];
            let mut rows = [k, v, q].into_iter().zip(widths).map(|(rows, width)| {
                let end = (tokens.end * width).min(rows.len());
                rows.drain((tokens.start * width).min(end)..end).collect::<Vec<f32>>()
            });
            let mut next = || rows.next().unwrap_or_default();
            let (k, v, q) = (next(), next(), next());
            taken.layers.push(crate::calibrate::LayerRows { k, v, q });
        }
        taken
    }
}
