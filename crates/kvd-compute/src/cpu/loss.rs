//! How far integers took an answer from the truth, and whether that is more than `fast` allows
//! ([ADR 19](../../../../docs/adr/0019-rows-that-integers-do-not-serve.md)): estimates that kernels
//! make on the way, and their comparison with what f16 would cost, once per query row.

use crate::cpu::attend_f64;
use crate::cpu::attend_job::{AttendJob, AttendUnit};
use crate::cpu::grid::HeldMagnitudes;
use crate::cpu::int_operands::{RoundedRow, TOP};
use crate::cpu::left_of_sums::{LEFT_LEAST, LeftOfSums};
use crate::cpu::score_probe::{ProbeResult, RowDecoder, largest_product};
use crate::cpu::simd::per_level;
use crate::cpu::softmax::MAGIC;
use crate::cpu::span_scores::TILE;
use crate::cpu::unit_queries::UnitQueries;
use crate::{BackendError, PartialState};
use kvd_codec::RowSpace;
use kvd_core::Side;

/// Largest loss of a score that outputs take without asking further: f16 rounds each weight by
/// `2^-12.3` of it, root mean square, and four times that is allowed.
pub(super) const SCORE_LOSS_MAX: f32 = 8.0e-4;
/// Four times one rounding to f16, of the largest product that takes part.
const OF_LARGEST_TERM: f32 = 4.0 / 2048.0;
/// Sums of weights that are alike are so much larger than what was lost of each by itself: f16
/// loses as much.
const OF_LARGEST_SUM: f32 = OF_LARGEST_TERM / 4.0;
/// An error over its root mean square by the largest codes, which it hardly ever exceeds.
const PEAK: f32 = 1.5;
/// The error of a score that was measured stands for those of others up to so many times it.
const MEASURED: f32 = 2.5;
/// The joint loss of weights counts as chance up to so many root mean squares of their single
/// losses, and up to so many times the mean weight over the largest ones, since smaller weights
/// lose digits.
const CHANCE: f32 = 4.0;
const CHANCE_OF_SMALL: f32 = 48.0;
/// Weights of a row that come to so many times the largest are those of many tokens.
const MANY: f32 = 16.0;
/// Sums that carry the biases of codes lose so many roundings of f32 of those, until the biases are
/// taken back.
const ROUNDED_SUMS: f32 = 4.0;
/// Scores and queries beyond it leave f32 no room to add them up.
const SCORE_MAX: f32 = 1.0e30;
/// Integers are told apart by so many bits of a hash.
const BUCKET_BITS: u32 = 8;

/// The root mean square of what a sum of products loses by rounding factors to integers of so large
/// a unit, where `energy` is the sum of the squares that they are multiplied with.
pub(super) fn rounding_loss(unit: f32, energy: f32) -> f32 {
    unit * (energy / 12.0).sqrt()
}

per_level!(
    /// How many times [`rounding_loss`] the loss of these factors may be, since those that become
    /// the same integer round alike and add up; at least 1.
    pub(super) fn alike_factor(factors: &[f32], unit: f32) -> f32 = alike_factor_body
);

#[inline(always)]
fn alike_factor_body(factors: &[f32], unit: f32) -> f32 {
    const CHUNK: usize = 64;
    let inverse = unit.recip();
    let mut buckets = [0f32; 1 << BUCKET_BITS];
    for factors in factors.chunks(CHUNK) {
        let (mut lost, mut hashes) = ([0f32; CHUNK], [0u32; CHUNK]);
        for ((lost, hash), factor) in lost.iter_mut().zip(&mut hashes).zip(factors) {
            let scaled = (factor * inverse).abs();
            // The nearest integer is in the low bits.
            let shifted = scaled + MAGIC;
            *lost = (scaled - (shifted - MAGIC)).abs();
            *hash = shifted.to_bits().wrapping_mul(0x9E37_79B1) >> (u32::BITS - BUCKET_BITS);
        }
        for (lost, hash) in lost.iter().zip(hashes).take(factors.len()) {
            buckets[hash as usize] += lost;
        }
    }
    let mut squares = [0f32; 16];
    for chunk in buckets.as_chunks::<16>().0 {
        squares.iter_mut().zip(chunk).for_each(|(sum, lost)| *sum += lost * lost);
    }
    let factor = (12.0 * squares.iter().sum::<f32>() / factors.len() as f32).sqrt();
    // NaN where there is no unit.
    if factor > 1.0 { factor } else { 1.0 }
}

/// The largest magnitude. NaN counts as nothing.
#[inline(always)]
pub(super) fn largest_magnitude(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [0f32; 16];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let magnitude = value.abs();
            *lane = if magnitude > *lane { magnitude } else { *lane };
        }
    }
    // In halves: one after the other each would wait for the one before.
    for half in [8, 4, 2, 1] {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low = if *high > *low { *high } else { *low };
        }
    }
    rest.iter().fold(lanes[0], |most, value| most.max(value.abs()))
}

per_level!(pub(super) fn largest_of(values: &[f32]) -> f32 = largest_magnitude);

/// The sum of squares, which f32 holds neither of tiny values nor of huge ones.
pub(super) fn sum_of_squares(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum()
}

/// Whether all are numbers.
pub(super) fn all_finite(values: &[f32]) -> bool {
    // Bits of infinity: a reduction that vectors do.
    values.iter().fold(true, |all, value| all & (value.to_bits() << 1 < 0xFF00_0000))
}

/// The mean square of what rounding by lanes takes from a weight, in units: that of a fraction
/// times the rest of one.
const WEIGHT_VARIANCE: f64 = 1.0 / 6.0;

/// Loss of a weighted sum for what rounding took from its weights.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundingLoss {
    /// Square of the root mean square, of weights that round each its own way.
    square: f64,
    /// Signed sum: equal weights round equally.
    pub(super) lost: f32,
}

impl RoundingLoss {
    /// Takes a row of so many weights.
    pub(super) fn add_row(&mut self, pushed: &RoundedRow, tokens: usize) {
        self.square += f64::from(pushed.unit).powi(2) * (tokens as f64 * WEIGHT_VARIANCE);
        self.lost += pushed.lost;
    }

    /// As the sums are scaled.
    pub(super) fn scale_by(&mut self, factor: f32) {
        *self = self.times_magnitude(factor);
    }

    /// Where weights are multiplied with values of that magnitude.
    pub(super) fn times_magnitude(&self, magnitude: f32) -> Self {
        let square = self.square * f64::from(magnitude).powi(2);
        Self { square, lost: self.lost * magnitude }
    }

    /// The larger of both, each way.
    pub(super) fn larger_of(&self, other: &Self) -> Self {
        // `max` of both in a loop is a reduction that LLVM 22 crashes on.
        let (lost, other_lost) = (self.lost.abs(), other.lost.abs());
        let square = if self.square > other.square { self.square } else { other.square };
        Self { square, lost: if lost > other_lost { lost } else { other_lost } }
    }
}

/// Losses that a kernel of values tells of a row.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ValueLosses {
    /// The largest magnitude that weights were multiplied with after they were rounded.
    pub(super) magnitude: f32,
    /// The most that a sum lost for the residuals of all of those weights together.
    pub(super) lost: f32,
    /// Losses for weights that were rounded times the scale of their token.
    pub(super) folded: RoundingLoss,
    /// The largest bias of a code: see [`RowLoss::biased`].
    pub(super) bias: f32,
}

/// Costs of rounding for one query row, over some tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowLoss {
    /// Loss of a score, in logits.
    pub(super) score: f32,
    /// The sum over tokens of a unit of the square of the largest weight beside them, on the scale
    /// of the state's `weight_sum`, and how many tokens.
    weights: f32,
    tokens: f32,
    /// The sum of the weights beside those.
    sum: f32,
    /// Loss of a sum, on the scale of the state's sums.
    rounding: RoundingLoss,
    /// The loss of f32 in sums that carry the biases of codes until those are taken back.
    biased: f32,
    /// Whether the weights of some unit have lost more together than by chance.
    beyond_chance: bool,
    /// Keys that were decoded beside.
    pub(super) probed: ProbeResult,
    /// Magnitudes of the values, where they were looked at on the way.
    pub(super) held: Option<HeldMagnitudes>,
    /// Position of the token with the largest score.
    pub(super) largest_at: u32,
}

impl RowLoss {
    /// Takes the weights of some tiles, times gains, of which the largest and the sum are given.
    pub(super) fn add_weights(&mut self, largest: f32, sum: f32, tiles: usize) {
        self.sum += sum;
        let tokens = if largest > 0.0 { (tiles * TILE) as f32 } else { 0.0 };
        self.weights += largest * largest * tokens;
        self.tokens += tokens;
    }

    /// As the state's sums are scaled.
    pub(super) fn scale_by(&mut self, factor: f32) {
        self.weights *= factor * factor;
        self.sum *= factor;
    }

    /// At the end of a unit: takes the losses of its values.
    pub(super) fn take_value_losses(&mut self, losses: ValueLosses) {
        let ValueLosses { magnitude, lost, folded, bias } = losses;
        self.biased = ROUNDED_SUMS * f32::EPSILON * bias * self.sum;
        let square = f64::from(magnitude / TOP).powi(2) * f64::from(self.weights) * WEIGHT_VARIANCE;
        self.rounding = RoundingLoss { square, lost }.larger_of(&folded);
        let most = (self.weights * self.tokens).sqrt();
        let chance = if most > 0.0 { CHANCE.min(CHANCE_OF_SMALL * self.sum / most) } else { 0.0 };
        self.beyond_chance = self.rounding.lost > chance * self.rounding.square.sqrt() as f32;
    }

    /// Joins `other` as [`PartialState::merge`] joins the states that have these largest scores;
    /// to be called before it.
    pub(super) fn merge_loss(&mut self, other: &Self, maxima: [f32; 2]) {
        let [mine, theirs] = maxima;
        let max = mine.max(theirs);
        if theirs > mine {
            self.largest_at = other.largest_at;
        }
        let factor = |from: f32| if from > f32::NEG_INFINITY { (from - max).exp() } else { 0.0 };
        let (mine, theirs) = (factor(mine), factor(theirs));
        let (this, that) =
            (self.rounding.times_magnitude(mine), other.rounding.times_magnitude(theirs));
        self.rounding = RoundingLoss {
            square: this.square + that.square,
            lost: this.lost.abs() + that.lost.abs(),
        };
        self.biased = self.biased * mine + other.biased * theirs;
        self.beyond_chance |= other.beyond_chance;
        self.held = self.held.zip(other.held).map(|(mine, theirs)| mine.larger_of(theirs));
        self.score = self.score.max(other.score);
        self.probed = self.probed.larger_of(&other.probed);
    }
}

/// Losses of the sums of a row by the rounding of weights.
#[derive(Clone, Copy)]
struct SumLosses {
    /// The most that weights lost which round each its own way.
    apart: f32,
    /// The joint loss of all weights.
    lost: f32,
}

impl SumLosses {
    /// Where values have the largest codes that there could be.
    fn of_largest_codes(loss: &RowLoss) -> Self {
        Self::of_codes(loss, 1.0)
    }

    /// Where values have no larger codes than the held ones.
    fn of_held(loss: &RowLoss, held: &HeldMagnitudes) -> Self {
        Self::of_codes(loss, held.largest / held.possible)
    }

    /// Where values have that share of the largest code.
    fn of_codes(loss: &RowLoss, share: f32) -> Self {
        let RoundingLoss { square, lost } = loss.rounding;
        let apart = share * PEAK * square.sqrt() as f32;
        Self { apart: apart + loss.biased, lost: share * lost.abs() + loss.biased }
    }
}

/// The rows of one query and KV head, merged, and what they lost.
pub(super) struct MergedRows<'a> {
    pub(super) job: &'a AttendJob<'a>,
    /// The unit of these rows over all that their query reads.
    pub(super) unit: &'a AttendUnit<'a>,
    pub(super) queries: &'a UnitQueries,
    pub(super) states: &'a [PartialState],
    pub(super) losses: &'a [RowLoss],
    pub(super) left: &'a LeftOfSums,
}

impl MergedRows<'_> {
    /// The rows whose answers are not what `fast` promises, or no numbers. Those of whose
    /// coefficients transforms left little are not served where their values are less than
    /// [`LEFT_LEAST`] of the squares of those.
    pub(super) fn not_served(&self) -> Result<Vec<usize>, BackendError> {
        let mut decoder = RowDecoder::new(self.job, self.unit.head);
        let asked = (0..self.states.len()).filter(|row| !self.sums_are_larger(*row));
        let positions: Vec<u32> = asked.map(|row| self.losses[row].largest_at).collect();
        if positions.len() > 1 {
            decoder.decode_values_ahead(self.unit.parts, &positions)?;
        }
        let mut rows = Vec::new();
        for row in 0..self.states.len() {
            if self.states[row].weight_sum == 0.0 {
                continue;
            }
            let is_served = self.is_served(row, &mut decoder)?;
            let cancelled = is_served && self.left.cancelled.contains(&row);
            if !is_served || cancelled && self.has_small_values(row, &mut decoder)? {
                rows.push(row);
            }
        }
        Ok(rows)
    }

    fn is_served(&self, row: usize, decoder: &mut RowDecoder<'_>) -> Result<bool, BackendError> {
        let state = &self.states[row];
        let numbers = state.weight_sum.is_finite()
            && state.max.abs() < SCORE_MAX
            && self.queries.largest_in_row(row) < SCORE_MAX
            && all_finite(&state.raw)
            && all_finite(&state.coefficients);
        Ok(numbers && self.scores_are(row, decoder)? && self.sums_are(row, decoder)?)
    }

    /// Whether rounded queries cost no more than f16 ones.
    fn scores_are(&self, row: usize, decoder: &mut RowDecoder<'_>) -> Result<bool, BackendError> {
        let (state, loss) = (&self.states[row], &self.losses[row]);
        // An offset and the score that it is added to round as they do, however little is left.
        let offset = self.queries.offsets_of(RowSpace::Coefficient)[row].abs();
        if loss.score == 0.0 && offset == 0.0 {
            return Ok(true);
        }
        let lost = PEAK * loss.score + f32::EPSILON * offset;
        let lse = 4.0 * f32::EPSILON * state.lse().abs().max(1.0);
        let within = |probed: &ProbeResult| {
            probed.error <= PEAK * SCORE_LOSS_MAX
                && lost.max(MEASURED * probed.error) <= lse.max(OF_LARGEST_TERM * probed.term)
        };
        if loss.score > SCORE_LOSS_MAX || within(&loss.probed) {
            return Ok(loss.score <= SCORE_LOSS_MAX);
        }
        let key = decoder.decoded_row(Side::Key, self.unit.parts, loss.largest_at)?;
        let term = largest_product(self.job.simd, self.queries.row(RowSpace::Raw, row), key);
        let score = attend_f64::score_keys(self.job, self.unit, row, key).next();
        let error = score.map_or(0.0, |score| (f64::from(state.max) - score).abs() as f32);
        // Scores of other precisions err as theirs do.
        let error = if loss.score > 0.0 { error } else { 0.0 };
        Ok(within(&loss.probed.larger_of(&ProbeResult { term, error })))
    }

    /// Whether sums are so large that rounded weights cost them no more than f16 ones.
    fn sums_are_larger(&self, row: usize) -> bool {
        let loss = &self.losses[row];
        let SumLosses { apart, lost } = SumLosses::of_largest_codes(loss);
        if apart == 0.0 && lost == 0.0 {
            return true;
        }
        let sums = self.largest_sum(row);
        let outweighs = |losses| self.sums_outweigh(row, losses, sums);
        outweighs(SumLosses { apart, lost })
            || loss.held.is_some_and(|held| outweighs(SumLosses::of_held(loss, &held)))
    }

    fn sums_outweigh(&self, row: usize, losses: SumLosses, sums: f32) -> bool {
        // Rows that repeat add up what they lost, beside f16 as well, and so do their sums.
        let repeats = self.states[row].weight_sum >= MANY && losses.lost <= OF_LARGEST_SUM * sums;
        (repeats || !self.losses[row].beyond_chance) && losses.apart <= OF_LARGEST_SUM * sums
    }

    /// The largest sum, as far as an offset of values left it: f16 loses nothing that cancels.
    fn largest_sum(&self, row: usize) -> f32 {
        let (simd, state) = (self.job.simd, &self.states[row]);
        let left = self.left.share_beside_offset(row);
        left * largest_of(simd, &state.raw).max(largest_of(simd, &state.coefficients))
    }

    /// Whether rounded weights cost no more than f16 ones.
    fn sums_are(&self, row: usize, decoder: &mut RowDecoder<'_>) -> Result<bool, BackendError> {
        if self.sums_are_larger(row) {
            return Ok(true);
        }
        let loss = &self.losses[row];
        let SumLosses { apart, lost } = SumLosses::of_largest_codes(loss);
        // The weight of the token with the largest score is one.
        let value = decoder.decoded_row(Side::Value, self.unit.parts, loss.largest_at)?;
        let allowed = OF_LARGEST_TERM * largest_magnitude(value);
        if lost.max(apart) <= allowed {
            return Ok(true);
        }
        // The largest codes that there could be have failed; those that there are may not.
        let held = match loss.held {
            Some(held) => Some(held),
            None => decoder.held_magnitudes(self.unit)?,
        };
        let Some(held) = held else { return Ok(false) };
        let (losses, sums) = (SumLosses::of_held(loss, &held), self.largest_sum(row));
        let many = self.states[row].weight_sum >= MANY;
        let of_sums = if many { OF_LARGEST_SUM * sums } else { 0.0 };
        let served = losses.apart <= allowed.max(OF_LARGEST_SUM * sums)
            && losses.lost <= allowed.max(of_sums);
        Ok(served || self.sums_outweigh(row, losses, sums))
    }

    /// Whether the value of the token with the largest score has less than [`LEFT_LEAST`] of the
    /// squares of the row's coefficients: then what f32 loses of those is much beside any value.
    fn has_small_values(
        &self,
        row: usize,
        decoder: &mut RowDecoder<'_>,
    ) -> Result<bool, BackendError> {
        let (state, at) = (&self.states[row], self.losses[row].largest_at);
        let value = decoder.decoded_row(Side::Value, self.unit.parts, at)?;
        let squares = |values: &[f32]| sum_of_squares(values.iter().copied());
        let coefficients = squares(&state.coefficients) / f64::from(state.weight_sum).powi(2);
        Ok(squares(value) < LEFT_LEAST * coefficients)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::Simd;

    #[test]
    fn magnitudes_and_numbers_are_found_wherever_they_stand() {
        for len in [1usize, 15, 16, 17, 40] {
            for at in [0, len / 2, len - 1] {
                let mut values = vec![0.5f32; len];
                values[at] = -7.0;
                assert_eq!(largest_magnitude(&values), 7.0, "{len} {at}");
                assert!(all_finite(&values));
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    values[at] = wrong;
                    assert!(!all_finite(&values), "{len} {at} {wrong}");
                }
            }
        }
    }

    #[test]
    fn squares_neither_underflow_nor_overflow() {
        for size in [1e-30f32, 1e30] {
            let sum = sum_of_squares([size; 4].into_iter());
            assert!((sum / (4.0 * f64::from(size).powi(2)) - 1.0).abs() < 1e-12, "{size}");
        }
    }

    #[test]
    fn losses_merge_as_the_sums_that_they_are_of() {
        let of = |score, largest_at| RowLoss {
            score,
            weights: 8.0,
            tokens: 32.0,
            sum: 4.0,
            biased: 0.0,
            beyond_chance: largest_at == 9,
            rounding: RoundingLoss { square: 4.0, lost: -1.0 },
            probed: ProbeResult { term: score, error: 0.0 },
            held: None,
            largest_at,
        };
        let (a, b) = (of(1e-4, 3), of(2e-4, 9));
        let mut merged = a;
        merged.merge_loss(&b, [1.0, 1.0 + 2f32.ln()]);
        assert_eq!((merged.score, merged.largest_at, merged.beyond_chance), (2e-4, 9, true));
        assert_eq!(merged.probed.term, 2e-4);
        assert!((merged.rounding.square - (4.0 / 4.0 + 4.0)).abs() < 1e-4);
        assert!((merged.rounding.lost - (0.5 + 1.0)).abs() < 1e-4);
        let mut merged = a;
        merged.merge_loss(&RowLoss::default(), [1.0, f32::NEG_INFINITY]);
        assert_eq!((merged.rounding.lost, merged.largest_at), (1.0, 3));
    }

    #[test]
    fn factors_that_round_alike_count_together() {
        for simd in Simd::available_levels() {
            let unit = 5.0 / TOP;
            let apart: Vec<f32> = (0..128).map(|i| 5.0 * (i as f32 * 0.37).sin()).collect();
            assert!(alike_factor(simd, &apart, unit) < 1.5, "{}", alike_factor(simd, &apart, unit));
            // 0.469 is 3061.54 units: 0.46 of one is lost of each, one way.
            let mut same = [0.469f32; 128];
            (0..128).step_by(3).for_each(|at| same[at] = -0.469);
            let (all, one) = (128.0 * 0.46, (128f32 / 12.0).sqrt());
            assert!(
                (alike_factor(simd, &same, unit) - all / one).abs() < 0.5,
                "{}",
                alike_factor(simd, &same, unit)
            );
            assert_eq!(alike_factor(simd, &[0.0; 8], 0.0), 1.0);
        }
    }
}
