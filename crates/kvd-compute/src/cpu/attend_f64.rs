//! Attention in f64 over rows as `LoadBlocks` decodes them, for the query rows that other kernels
//! do not serve: those with channels so unlike that integers lose the small ones, with logits so
//! large that f32 does, and those whose sums leave the range of f32.

use crate::BackendError;
use crate::cpu::attend_job::{AttendJob, AttendUnit, group_size, payload_row};
use crate::cpu::raw_slots::restore_rows;
use crate::cpu::row_reader::TILE_TOKENS;
use crate::cpu::simd::{Simd, per_level};
use kvd_core::Side;

/// Partial sums of a product.
const LANES: usize = 16;

/// As [`PartialState`](crate::PartialState), in f64 and of rows alone.
pub(super) struct WideState {
    max: f64,
    weight_sum: f64,
    values: Vec<f64>,
}

impl WideState {
    fn empty(dim: usize) -> Self {
        Self { max: f64::NEG_INFINITY, weight_sum: 0.0, values: vec![0.0; dim] }
    }

    /// Scales everything so far down to a larger score.
    fn raise_max(&mut self, max: f64) {
        if max <= self.max {
            return;
        }
        let factor = (self.max - max).exp();
        self.weight_sum *= factor;
        self.values.iter_mut().for_each(|sum| *sum *= factor);
        self.max = max;
    }

    /// Adds weighted values (`[tokens, dim]`) of tokens with these scores.
    fn add_tokens(&mut self, simd: Simd, scores: &[f64], values: &[f32]) {
        self.raise_max(scores.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        let dim = self.values.len();
        for (score, value) in scores.iter().zip(values.chunks_exact(dim)) {
            let weight = (score - self.max).exp();
            self.weight_sum += weight;
            add_weighted(simd, weight, value, &mut self.values);
        }
    }

    /// Adds what `other` has seen.
    pub(super) fn merge_split(&mut self, other: &Self) {
        if other.weight_sum == 0.0 {
            return;
        }
        self.raise_max(other.max);
        let factor = (other.max - self.max).exp();
        self.weight_sum += other.weight_sum * factor;
        let sums = self.values.iter_mut().zip(&other.values);
        sums.for_each(|(sum, other)| *sum += other * factor);
    }

    /// Writes the output row, and returns the log-sum-exp.
    pub(super) fn write_output(&self, out: &mut [f32]) -> f32 {
        let narrow = |value: f64| (value as f32).clamp(-f32::MAX, f32::MAX);
        if self.weight_sum == 0.0 {
            out.fill(0.0);
            return f32::NEG_INFINITY;
        }
        for (out, sum) in out.iter_mut().zip(&self.values) {
            *out = narrow(sum / self.weight_sum);
        }
        narrow(self.max + self.weight_sum.ln())
    }
}

/// Attends for some rows of a unit; their states in that order.
pub(super) fn attend_rows(
    job: &AttendJob<'_>,
    unit: &AttendUnit<'_>,
    rows: &[usize],
) -> Result<Vec<WideState>, BackendError> {
    let head = |side| job.reader.codec.head_codec(job.reader.layer, side, unit.head);
    let sides = Side::BOTH.map(head);
    let [dim_k, dim_v] = sides.map(|side| side.dim());
    let mut states: Vec<_> = rows.iter().map(|_| WideState::empty(dim_v)).collect();
    let mut tiles = [dim_k, dim_v].map(|dim| vec![0f32; TILE_TOKENS as usize * dim]);
    let seen = unit.seen_by_any();
    for part in unit.parts {
        let (first, end) = (part.first_token.max(seen.start), part.end_token().min(seen.end));
        if first >= end {
            continue;
        }
        job.stop.check()?;
        let open = |side| job.reader.open_rows(&part.source, part.rows, side, unit.head);
        let opened = [open(Side::Key)?, open(Side::Value)?];
        for token in (first..end).step_by(TILE_TOKENS as usize) {
            let count = TILE_TOKENS.min(end - token);
            for ((rows, side), tile) in opened.iter().zip(sides).zip(&mut tiles) {
                let tile = &mut tile[..count as usize * side.dim()];
                rows.decode_in_part(token - part.first_token, count, tile)?;
                restore_rows(side, rows.row_space(), tile);
            }
            for (row, state) in rows.iter().zip(&mut states) {
                let visible = unit.visible(row / group_size(job));
                let (start, end) = (visible.start.max(token), visible.end.min(token + count));
                if start >= end {
                    continue;
                }
                let (start, end) = ((start - token) as usize, (end - token) as usize);
                let keys = &tiles[0][start * dim_k..end * dim_k];
                let scores: Vec<f64> = score_keys(job, unit, *row, keys).collect();
                state.add_tokens(job.simd, &scores, &tiles[1][start * dim_v..end * dim_v]);
            }
        }
    }
    Ok(states)
}

/// The scores of a query row against keys (`[tokens, dim]`).
pub(super) fn score_keys(
    job: &AttendJob<'_>,
    unit: &AttendUnit<'_>,
    row: usize,
    keys: &[f32],
) -> impl Iterator<Item = f64> {
    let dim = job.reader.codec.geometry().head_dim(Side::Key);
    let query = &job.q[payload_row(job, unit, row) * dim..][..dim];
    let scale = job.plan.scale.map_or_else(|| 1.0 / (dim as f64).sqrt(), f64::from);
    let (simd, soft_cap) = (job.simd, job.plan.soft_cap);
    let score = move |key: &[f32]| {
        let score = dot_product(simd, query, key) * scale;
        soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
    };
    keys.chunks_exact(dim).map(score)
}

per_level!(fn dot_product(a: &[f32], b: &[f32]) -> f64 = dot_product_body);
per_level!(fn add_weighted(weight: f64, values: &[f32], sums: &mut [f64]) = add_weighted_body);

#[inline(always)]
fn dot_product_body(a: &[f32], b: &[f32]) -> f64 {
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let mut lanes = [0f64; LANES];
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += f64::from(*a) * f64::from(*b);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b));
    lanes.iter().sum::<f64>() + rest.sum::<f64>()
}

#[inline(always)]
fn add_weighted_body(weight: f64, values: &[f32], sums: &mut [f64]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * f64::from(*value));
}
