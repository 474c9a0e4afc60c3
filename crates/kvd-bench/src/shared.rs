//! Sequences with a common prefix in one call, beside as many with a copy of it each.

use crate::attend::{
    CachedSequence, PlanQueries, draw_queries, plan_of, read_floats, widen_to_f32,
};
use crate::data::{FillOptions, FilledBackend};
use crate::limits::CallSize;
use crate::measure::{MeasuredFigure, measure_time};
use crate::{BenchError, HeadShape, limits};
use kvd_compute::{AttendBackend, AttendPlan, Attended, Precision, Source};
use kvd_core::{DType, ProgressLines};
use serde::Serialize;

/// Blocks that are encoded before pages repeat: copies of a prefix begin at a multiple of it.
const REPEAT: usize = 4;

/// Options of `kvd bench shared`.
#[derive(Clone, Debug)]
pub struct SharedBench {
    /// Heads.
    pub shape: HeadShape,
    /// Codecs, as presets or specs.
    pub codecs: Vec<String>,
    /// Tokens of the prefix.
    pub prefix: u32,
    /// Tokens that each sequence has after it.
    pub own: u32,
    /// Sequences of a call, one query token each.
    pub sequences: usize,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Compute threads.
    pub threads: usize,
    /// Turns of each codec.
    pub rounds: usize,
}

/// One line of the answer.
#[derive(Clone, Debug, Serialize)]
pub struct SharedRow {
    /// How sequences are asked: in a batch, or by workers.
    pub asked: String,
    /// The codec.
    pub codec: String,
    /// Tokens of the prefix.
    pub prefix: u32,
    /// Milliseconds for all sequences, where nothing is shared.
    pub apart_ms: MeasuredFigure,
    /// Milliseconds where the prefix is.
    pub shared_ms: MeasuredFigure,
    /// The latter over the former, of medians.
    pub ratio: f64,
    /// The largest difference of two outputs, over the largest output.
    pub difference: f64,
}

/// Plans over a common prefix and over copies of it, with the same rows.
struct SharedPlans {
    apart: AttendPlan,
    shared: AttendPlan,
}

impl SharedBench {
    /// Measures batches of sequences.
    ///
    /// # Errors
    /// When a codec does not fit the shape, the memory is not there, or answers differ by more than
    /// two roundings to f16 of queries and weights explain.
    pub fn measure_batches(&self) -> Result<Vec<SharedRow>, BenchError> {
        limits::check_threads(self.threads)?;
        let sequences = self.sequences as u64;
        let tokens = sequences * u64::from(self.prefix + self.own);
        limits::check_call(&self.shape, CallSize { query_tokens: 1, tokens, batch: sequences })?;
        let progress = ProgressLines::on_stderr();
        progress.begin_task("bench shared", self.codecs.len() as u64);
        let measure = |codec: &String| {
            progress.name_step("bench shared", codec);
            let row = self.measure_batch(codec);
            progress.add_steps(1);
            row
        };
        self.codecs.iter().map(measure).collect()
    }

    fn measure_batch(&self, codec: &str) -> Result<SharedRow, BenchError> {
        let fill = FillOptions {
            shape: self.shape,
            block_tokens: self.block_tokens,
            threads: self.threads,
            instruction_set: None,
            precision: Precision::Fast,
            buffer_bytes: 0,
            blocks: self.blocks_of_sequence() * (self.sequences + 1),
        };
        let mut filled = FilledBackend::new(codec, fill)?;
        let plans = self.plan_both(&filled.blocks);
        let failed = || BenchError::failed_step(codec);
        let (mut apart, mut shared) = (Vec::new(), Vec::new());
        let mut difference = 0f64;
        for round in 0..=self.rounds {
            let mut answers = Vec::with_capacity(2);
            for (plan, times) in [(&plans.apart, &mut apart), (&plans.shared, &mut shared)] {
                let timed = measure_time(|| filled.backend.attend(plan));
                // The first round warms up.
                if round > 0 {
                    times.push(timed.cpu_ns / 1e6);
                }
                answers.push(timed.value.map_err(failed())?);
            }
            difference = difference.max(largest_difference(&answers[0], &answers[1]));
        }
        check_difference(codec, difference)?;
        let asked = format!("batch of {}", self.sequences);
        Ok(SharedRow::new(asked, codec, self.prefix, [apart, shared], difference))
    }

    /// Blocks of a prefix, whole groups of those that repeat.
    fn blocks_of_sequence(&self) -> usize {
        let blocks = |tokens: u32| tokens.div_ceil(self.block_tokens) as usize;
        (blocks(self.prefix) + blocks(self.own)).next_multiple_of(REPEAT)
    }

    fn plan_both(&self, blocks: &[Source]) -> SharedPlans {
        let (per, prefix) =
            (self.blocks_of_sequence(), self.prefix.div_ceil(self.block_tokens) as usize);
        let tokens = prefix as u32 * self.block_tokens + self.own;
        let count = tokens.div_ceil(self.block_tokens) as usize;
        let copies: Vec<Vec<Source>> = (0..self.sequences)
            .map(|sequence| blocks[(sequence + 1) * per..][..count].to_vec())
            .collect();
        let common = |copy: &Vec<Source>| [&blocks[..prefix], &copy[prefix..]].concat();
        let shared: Vec<Vec<Source>> = copies.iter().map(common).collect();
        let q = widen_to_f32(&draw_queries(&self.shape, self.sequences));
        let plan = |sequences: &[Vec<Source>]| {
            let cached = sequences.iter().map(|blocks| CachedSequence { blocks, tokens });
            let (block_tokens, q) = (self.block_tokens, q.clone());
            let queries = PlanQueries { query_tokens: 1, block_tokens, q };
            AttendPlan { dtype: DType::F32, ..plan_of(&self.shape, cached, queries) }
        };
        SharedPlans { apart: plan(&copies), shared: plan(&shared) }
    }
}

impl SharedRow {
    /// A row of times apart and shared, in milliseconds.
    pub(crate) fn new(
        asked: String,
        codec: &str,
        prefix: u32,
        times: [Vec<f64>; 2],
        difference: f64,
    ) -> Self {
        let [apart_ms, shared_ms] = times.map(MeasuredFigure::from_runs);
        let ratio = shared_ms.median / apart_ms.median;
        let codec = codec.to_owned();
        Self { asked, codec, prefix, apart_ms, shared_ms, ratio, difference }
    }
}

/// Answers differ by what rounding of queries and weights to f16 would change, at most.
pub(crate) fn check_difference(codec: &str, difference: f64) -> Result<(), BenchError> {
    const MOST: f64 = 8.0 / 2048.0;
    if difference <= MOST {
        return Ok(());
    }
    let reason = format!("answers over a shared prefix differ by {difference:.1e} of the largest");
    Err(BenchError::Failed { what: codec.to_owned(), reason })
}

/// The largest difference of two outputs in f32, over the largest output.
fn largest_difference(a: &Attended, b: &Attended) -> f64 {
    let [a, b] = [a, b].map(|answer| read_floats(&answer.out));
    compare_outputs(&a, &b)
}

/// The largest difference of two outputs, over the largest output.
pub(crate) fn compare_outputs(a: &[f64], b: &[f64]) -> f64 {
    let most = a.iter().fold(0f64, |most, value| most.max(value.abs()));
    let gap = a.iter().zip(b).fold(0f64, |gap, (a, b)| gap.max((a - b).abs()));
    gap / most.max(f64::MIN_POSITIVE)
}
