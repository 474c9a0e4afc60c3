//! How far integers took an answer from the truth, and whether that is more than `fast` allows
//! ([ADR 19](../../../../docs/adr/0019-rows-that-integers-do-not-serve.md)): estimates that kernels
//! make on the way, and their comparison with what f16 would cost, once per query row.

use crate::cpu::job::{Job, Unit, group, payload_row};
use crate::cpu::parts::TOP;
use crate::cpu::rows::restore;
use crate::cpu::scores::TILE;
use crate::cpu::unit_queries::Queries;
use crate::{BackendError, PartialState, PlanPart, Source};
use kvd_codec::RowSpace;
use kvd_core::Side;

/// Largest loss of a score that outputs take without asking further: f16 rounds each weight by
/// `2^-12.3` of it, root mean square, and four times that is allowed.
const SCORE_LOSS_MAX: f32 = 8.0e-4;
/// Four times one rounding to f16, of the largest product that takes part.
const OF_LARGEST_TERM: f32 = 4.0 / 2048.0;
/// Outputs that are so much larger than what was lost stand for the largest product: it is not
/// looked for then.
const OF_LARGEST_SUM: f32 = OF_LARGEST_TERM / 4.0;
/// An error over its root mean square by the largest codes, which it hardly ever exceeds.
const PEAK: f32 = 1.5;
/// Scores and queries beyond it leave f32 no room to add them up.
const SCORE_MAX: f32 = 1.0e30;

/// The root mean square of what a sum of products loses by rounding factors to integers of so large
/// a unit, where `energy` is the sum of the squares that they are multiplied with.
pub(super) fn rounding_loss(unit: f32, energy: f32) -> f32 {
    unit * (energy / 12.0).sqrt()
}

/// The largest magnitude. NaN counts as nothing.
pub(super) fn largest(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut lanes = [0f32; 16];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            let magnitude = value.abs();
            *lane = if magnitude > *lane { magnitude } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(0f32, |most, value| most.max(value.abs()))
}

/// The sum of squares, which f32 holds neither of tiny values nor of huge ones.
pub(super) fn squares(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum()
}

/// Whether all are numbers.
pub(super) fn all_finite(values: &[f32]) -> bool {
    // Bits of infinity: a reduction that vectors do.
    values.iter().fold(true, |all, value| all & (value.to_bits() << 1 < 0xFF00_0000))
}

/// Costs of rounding for one query row, over some tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RowLoss {
    /// Loss of a score, in logits.
    pub(super) score: f32,
    /// Loss of rounded weights: the sum over tokens of the square of the largest weight beside
    /// them, on the scale of the state's `weight_sum`.
    weights: f32,
    /// The largest magnitude that those weights were multiplied with.
    magnitude: f32,
    /// Loss of a sum for what rounding took from all weights together, on the scale of the state's
    /// sums: equal weights round equally.
    lost: f32,
    /// Position of the token with the largest score.
    pub(super) largest_at: u32,
}

impl RowLoss {
    /// Takes the weights of some tiles, of which the largest is given.
    pub(super) fn add_weights(&mut self, largest: f32, tiles: usize) {
        self.weights += largest * largest * (tiles * TILE) as f32;
    }

    /// As the state's sums are scaled.
    pub(super) fn scale(&mut self, factor: f32) {
        self.weights *= factor * factor;
    }

    /// At the end of a unit: what its kernels estimate.
    pub(super) fn close(&mut self, score: f32, magnitude: f32, lost: f32) {
        (self.score, self.magnitude, self.lost) = (score, magnitude, lost);
    }

    /// Joins `other` as [`PartialState::merge`] joins the states that have these largest scores;
    /// to be called before it.
    pub(super) fn merge(&mut self, other: &Self, [mine, theirs]: [f32; 2]) {
        let max = mine.max(theirs);
        if theirs > mine {
            self.largest_at = other.largest_at;
        }
        let factor = |from: f32| if from > f32::NEG_INFINITY { (from - max).exp() } else { 0.0 };
        self.lost = self.lost * factor(mine) + other.lost * factor(theirs);
        let square =
            |from: f32| if from > f32::NEG_INFINITY { (2.0 * (from - max)).exp() } else { 0.0 };
        self.weights = self.weights * square(mine) + other.weights * square(theirs);
        self.score = self.score.max(other.score);
        self.magnitude = self.magnitude.max(other.magnitude);
    }

    /// Loss of a weighted sum of values, on the scale of the state's sums: as of weights that round
    /// each its own way, and as values of one sign add up what all of them lost together.
    fn sum(&self) -> f32 {
        // The sum is of squares of weights: each unit is one over `TOP` of them.
        let apart = self.magnitude / TOP * (self.weights / 12.0).sqrt();
        // What rounds each its own way comes to about as much together.
        (PEAK * apart).max(self.lost - apart)
    }
}

/// A row of K or V of a part, and the space that it is in.
struct Row {
    space: RowSpace,
    values: Vec<f32>,
}

/// The rows of one query and KV head, merged, and what they lost.
pub(super) struct Merged<'a> {
    pub(super) job: &'a Job<'a>,
    /// The first of the units that they come from.
    pub(super) unit: &'a Unit<'a>,
    pub(super) queries: &'a Queries,
    pub(super) states: &'a [PartialState],
    pub(super) losses: &'a [RowLoss],
}

impl Merged<'_> {
    /// The rows whose answers are not what `fast` promises, or no numbers.
    pub(super) fn not_served(&self) -> Result<Vec<usize>, BackendError> {
        let mut key = None;
        let mut rows = Vec::new();
        for row in 0..self.states.len() {
            if self.states[row].weight_sum != 0.0 && !self.is_served(row, &mut key)? {
                rows.push(row);
            }
        }
        Ok(rows)
    }

    fn is_served(&self, row: usize, key: &mut Option<(u32, Row)>) -> Result<bool, BackendError> {
        let (state, loss) = (&self.states[row], &self.losses[row]);
        let numbers = state.weight_sum.is_finite()
            && state.max.abs() < SCORE_MAX
            && self.queries.largest(row) < SCORE_MAX
            && all_finite(&state.raw)
            && all_finite(&state.coefficients);
        Ok(numbers && self.scores_are(row, loss, key)? && self.sums_are(state, loss)?)
    }

    /// Whether rounded queries cost no more than f16 ones.
    fn scores_are(
        &self,
        row: usize,
        loss: &RowLoss,
        known: &mut Option<(u32, Row)>,
    ) -> Result<bool, BackendError> {
        // An offset and the score that it is added to round as they do, however little is left.
        let offset = self.queries.offsets_of(RowSpace::Coefficient)[row].abs();
        if loss.score == 0.0 && offset == 0.0 {
            return Ok(true);
        }
        let state = &self.states[row];
        let exact = self.is_exact_in_f16(row);
        if loss.score > SCORE_LOSS_MAX && exact {
            return Ok(false);
        }
        let lost = PEAK * loss.score + f32::EPSILON * offset;
        let within = loss.score <= SCORE_LOSS_MAX;
        if within && lost <= 4.0 * f32::EPSILON * state.lse().abs().max(1.0) {
            return Ok(true);
        }
        // Any token will do that the row sees: one of raw rows, which need no decoding, or else the
        // one that was decoded for another row.
        let first = known.as_ref().map_or_else(|| self.raw_token(row), |(at, _)| Some(*at));
        for at in [first, Some(loss.largest_at)] {
            let Some(at) = at.filter(|at| self.sees(row, *at)) else { continue };
            if known.as_ref().is_none_or(|(known, _)| *known != at) {
                *known = Some((at, self.row_at(Side::Key, at)?));
            }
            let Some((_, key)) = known else { continue };
            let query = self.queries.row(key.space, row);
            let terms = || query.iter().zip(&key.values).map(|(q, k)| (q * k).abs());
            let largest = terms().fold(0f32, f32::max);
            // What f16 costs a score of a query that it rounds.
            let spread = squares(terms()).sqrt() as f32;
            let allowed = SCORE_LOSS_MAX * if exact { 1.0 } else { spread.max(1.0) };
            if loss.score <= allowed && lost <= OF_LARGEST_TERM * largest {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether rounded weights cost no more than f16 ones.
    fn sums_are(&self, state: &PartialState, loss: &RowLoss) -> Result<bool, BackendError> {
        let lost = loss.sum();
        let sums = largest(&state.raw).max(largest(&state.coefficients));
        if lost <= OF_LARGEST_SUM * sums {
            return Ok(true);
        }
        // The weight of the token with the largest score is one.
        let value = self.row_at(Side::Value, loss.largest_at)?;
        Ok(lost <= OF_LARGEST_TERM * largest(&value.values))
    }

    /// Whether f16 would hold the query row as it came.
    fn is_exact_in_f16(&self, row: usize) -> bool {
        let dim = self.queries.dim();
        let first = payload_row(self.job, self.unit, row) * dim;
        self.job.q[first..first + dim].iter().all(|q| q.to_bits() & 0x1FFF == 0)
    }

    fn sees(&self, row: usize, at: u32) -> bool {
        let token = self.unit.q.start + (row / group(self.job)) as u32;
        self.unit.query.visible(token).contains(&at)
    }

    /// Whether the value of the token with the largest score has less than that share of the
    /// squares of the row's coefficients: then what f32 loses of those is much beside any value.
    pub(super) fn has_small_values(&self, row: usize, share: f64) -> Result<bool, BackendError> {
        let (reader, state) = (self.job.reader, &self.states[row]);
        let Row { space, mut values } = self.row_at(Side::Value, self.losses[row].largest_at)?;
        restore(
            reader.codec.head_codec(reader.layer, Side::Value, self.unit.head),
            space,
            &mut values,
        );
        let squares = |values: &[f32]| squares(values.iter().copied());
        let coefficients = squares(&state.coefficients) / f64::from(state.weight_sum).powi(2);
        Ok(squares(&values) < share * coefficients)
    }

    /// A token of raw rows that the row sees.
    fn raw_token(&self, row: usize) -> Option<u32> {
        let mut parts = self.unit.query.parts.iter();
        let is_raw = |part: &&PlanPart| matches!(part.source, Source::Raw { .. });
        let raw = parts.find(|part| is_raw(part) && self.sees(row, part.first_token));
        raw.map(|part| part.first_token)
    }

    /// Decodes the row of the token at that position.
    fn row_at(&self, side: Side, at: u32) -> Result<Row, BackendError> {
        let (reader, head) = (self.job.reader, self.unit.head);
        let dim = reader.codec.geometry().head_dim(side);
        let mut values = vec![0f32; dim];
        let parts = &self.unit.query.parts;
        let part = parts.partition_point(|part| part.end_token() <= at);
        let Some(part) = parts.get(part).filter(|part| part.first_token <= at) else {
            return Ok(Row { space: RowSpace::Raw, values });
        };
        let rows = reader.open(&part.source, part.rows, side, head)?;
        rows.decode(at - part.first_token, 1, &mut values)?;
        Ok(Row { space: rows.space(), values })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magnitudes_and_numbers_are_found_wherever_they_stand() {
        for len in [1usize, 15, 16, 17, 40] {
            for at in [0, len / 2, len - 1] {
                let mut values = vec![0.5f32; len];
                values[at] = -7.0;
                assert_eq!(largest(&values), 7.0, "{len} {at}");
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
            let sum = squares([size; 4].into_iter());
            assert!((sum / (4.0 * f64::from(size).powi(2)) - 1.0).abs() < 1e-12, "{size}");
        }
    }

    #[test]
    fn losses_merge_as_the_sums_that_they_are_of() {
        let of = |score, largest_at| RowLoss {
            score,
            weights: 8.0,
            magnitude: 2.0,
            lost: 1.0,
            largest_at,
        };
        let (a, b) = (of(1e-4, 3), of(2e-4, 9));
        let mut merged = a;
        merged.merge(&b, [1.0, 1.0 + 2f32.ln()]);
        assert_eq!((merged.score, merged.largest_at), (2e-4, 9));
        assert!((merged.weights - (8.0 / 4.0 + 8.0)).abs() < 1e-4);
        assert!((merged.lost - (0.5 + 1.0)).abs() < 1e-4);
        let mut merged = a;
        merged.merge(&RowLoss::default(), [1.0, f32::NEG_INFINITY]);
        assert_eq!((merged.weights, merged.largest_at), (8.0, 3));
    }
}
