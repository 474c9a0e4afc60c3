//! How far attention over a page is from attention over its rows.
//!
//! Softmax turns an error of a score into the same relative error of a token's weight, whatever the
//! length of the rows is. So keys are measured by their scores: by those of queries where some are
//! known ([`PageScores::key_error`]), else against what the rows themselves say about how scores
//! differ ([`key_error_of_rows`]). Values are measured as weights mix them
//! ([`PageScores::value_error`]), else row by row ([`value_error_of_rows`]).
//!
//! All give the square of an error relative to what attention sees: 0 is exact, 1 is as wrong as
//! can be. Numbers that leave f32 count as 1.

use crate::simd::dispatch_simd;
use pulp::{Simd, WithSimd};

/// Below one nat softmax is flat, and above two it sees few tokens: a score error matters against
/// how scores differ only between these.
const SPREAD_NATS: (f32, f32) = (1.0, 2.0);

/// Rows, and channels of keys, count as at most this many times the middle one of them in what an
/// error is held against: one that is larger hides no error of the others.
const LARGEST_SHARE: f64 = 4.0;
/// [`LARGEST_SHARE`] for channels of pages that have too few tokens to know how channels differ.
const LARGEST_SHARE_OF_FEW: f64 = 16.0;
const FEW_TOKENS: usize = 8;
/// And channels of keys at most this many times what a fourth of them differ by: a long common row
/// can turn in more than half of all channels.
const LARGEST_SHARE_OF_FOURTH: f64 = 8.0;
/// Channels of less than this share of the middle power are in none of the fourths: they have no
/// part of a common row.
const SMALLEST_POWER: f64 = 0.25;
/// Nor are those whose variance is less than this share of their power.
const TURNING: f64 = 1e-5;

/// Channels of long keys draw queries to them; one counts as much as this many others at most.
const LARGEST_WEIGHT: f64 = 8.0;

/// Variance below this share of a channel's mean square is rounding.
const ROUNDING: f64 = 1e-12;

/// Dot products that are summed beside each other.
const SUMS: usize = 16;

/// Squared error and the square that it is relative to, summed over pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorSum {
    /// Squared errors.
    pub error: f64,
    /// Squares of what they are relative to.
    pub norm: f64,
}

impl ErrorSum {
    /// The relative error: 0 of nothing, infinite when there is an error and nothing else.
    #[must_use]
    pub fn relative_error(&self) -> f64 {
        if self.error == 0.0 { 0.0 } else { (self.error / self.norm).sqrt() }
    }
}

impl std::ops::AddAssign for ErrorSum {
    fn add_assign(&mut self, other: Self) {
        self.error += other.error;
        self.norm += other.norm;
    }
}

/// Squared error of the rows themselves (`delta` of `rows`), and their squared norm.
pub(crate) fn row_error(delta: &[f32], rows: &[f32]) -> ErrorSum {
    let squares = |values: &[f32]| values.iter().map(|x| square(f64::from(*x))).sum();
    ErrorSum { error: squares(delta), norm: squares(rows) }
}

fn square(x: f64) -> f64 {
    x * x
}

/// `error / norm` where `0 / 0` is no error.
fn divide_error(error: f64, norm: f64) -> f64 {
    if error == 0.0 { 0.0 } else { error / norm }
}

/// The middle one of those above zero; none when there is none.
fn positive_median(values: &[f64]) -> Option<f64> {
    positive_quantile(values.iter().copied(), 2)
}

/// The one that one in so many of those above zero are below; none when there is none.
fn positive_quantile(values: impl Iterator<Item = f64>, one_in: usize) -> Option<f64> {
    let mut positive: Vec<f64> = values.filter(|x| *x > 0.0).collect();
    let index = positive.len() / one_in;
    (!positive.is_empty()).then(|| *positive.select_nth_unstable_by(index, f64::total_cmp).1)
}

/// How much each row counts: 1, and less for those much longer than the middle one.
fn row_weights(rows: &[f32], dim: usize) -> Vec<f64> {
    let norms: Vec<f64> = rows.chunks_exact(dim).map(|row| row_error(&[], row).norm).collect();
    let most = LARGEST_SHARE * positive_median(&norms).unwrap_or_default();
    norms.iter().map(|norm| if *norm > most { most / norm } else { 1.0 }).collect()
}

/// Squared error of values when attention may look at any of them: that of rows, and that of rows
/// of which none counts much more than others.
pub(crate) fn value_error_of_rows(delta: &[f32], rows: &[f32], dim: usize) -> f64 {
    let plain = row_error(delta, rows);
    let mut weighted = ErrorSum::default();
    let of_rows = delta.chunks_exact(dim).zip(rows.chunks_exact(dim));
    for ((delta, row), weight) in of_rows.zip(row_weights(rows, dim)) {
        let ErrorSum { error, norm } = row_error(delta, row);
        weighted += ErrorSum { error: weight * error, norm: weight * norm };
    }
    divide_error(plain.error, plain.norm).max(divide_error(weighted.error, weighted.norm))
}

/// Sizes, differences and errors of each channel of a page.
struct ChannelStats {
    /// Mean square.
    power: Vec<f64>,
    /// Variance over tokens; the mean square of a single token.
    variance: Vec<f64>,
    /// Mean squared error.
    error: Vec<f64>,
}

impl ChannelStats {
    fn new(delta: &[f32], rows: &[f32], dim: usize) -> Self {
        let tokens = rows.len() / dim;
        let weights = row_weights(rows, dim);
        let total: f64 = weights.iter().sum();
        let mut mean = vec![0.0; dim];
        let [mut power, mut variance, mut error] = [(); 3].map(|()| vec![0.0; dim]);
        for (row, weight) in rows.chunks_exact(dim).zip(&weights) {
            let weight = weight / total;
            for ((mean, power), x) in mean.iter_mut().zip(&mut power).zip(row) {
                *mean += weight * f64::from(*x);
                *power += weight * square(f64::from(*x));
            }
        }
        let unbiased = if tokens > 1 { tokens as f64 / (tokens - 1) as f64 } else { 1.0 };
        let with_deltas = rows.chunks_exact(dim).zip(delta.chunks_exact(dim));
        for ((row, delta), weight) in with_deltas.zip(&weights) {
            let weight = unbiased * weight / total;
            for (variance, (x, mean)) in variance.iter_mut().zip(row.iter().zip(&mean)) {
                *variance += weight * square(f64::from(*x) - mean);
            }
            for (error, delta) in error.iter_mut().zip(delta) {
                *error += square(f64::from(*delta)) / tokens as f64;
            }
        }
        if tokens == 1 {
            variance.copy_from_slice(&power);
        }
        for (variance, power) in variance.iter_mut().zip(&power) {
            *variance = if *variance > ROUNDING * power { *variance } else { 0.0 };
        }
        Self { power, variance, error }
    }

    /// The largest variance that a channel counts with; none where tokens are all alike.
    fn largest_variance(&self, tokens: usize) -> Option<f64> {
        let middle = positive_median(&self.variance)?;
        if tokens < FEW_TOKENS {
            return Some(LARGEST_SHARE_OF_FEW * middle);
        }
        let least = SMALLEST_POWER * positive_median(&self.power).unwrap_or_default();
        // Of a common row that turns, most is variance.
        let turns = |variance: f64, power: f64| power >= least && variance >= TURNING * power;
        let channels = self.variance.iter().zip(&self.power);
        let common = channels.filter(|(variance, power)| turns(**variance, **power));
        let common = common.map(|(variance, _)| *variance);
        let fourth = positive_quantile(common, 4).unwrap_or(middle);
        Some((LARGEST_SHARE * middle).min(LARGEST_SHARE_OF_FOURTH * fourth))
    }

    /// Squared error against how scores differ, for queries that see a channel as `weight` says.
    fn weighted_error(&self, most: f64, weight: impl Fn(f64) -> f64) -> f64 {
        let (mut error, mut spread) = (0.0, 0.0);
        for ((power, variance), lost) in self.power.iter().zip(&self.variance).zip(&self.error) {
            let weight = weight(*power);
            error += weight * lost;
            spread += weight * variance.min(most);
        }
        divide_error(error, spread)
    }
}

/// Squared error of keys where no query is known, and never less than that of their rows.
///
/// A part that all tokens have in common changes no weight, however long it makes the rows: errors
/// are held against how tokens differ. A common row that RoPE has turned differs from token to
/// token as well, by far more than others do: no channel counts for much more than the middle one,
/// nor than a fourth of those that may have a part of such a row. And queries of a model look where
/// its keys are long: errors there count for more.
pub(crate) fn key_error_of_rows(delta: &[f32], rows: &[f32], dim: usize) -> f64 {
    let plain = row_error(delta, rows);
    let plain = divide_error(plain.error, plain.norm);
    if plain == 0.0 {
        return 0.0;
    }
    let channels = ChannelStats::new(delta, rows, dim);
    // Tokens that are all alike get the same weight.
    let Some(most) = channels.largest_variance(rows.len() / dim) else { return plain };
    let power = positive_median(&channels.power).unwrap_or(f64::INFINITY);
    let alike = channels.weighted_error(most, |_| 1.0);
    let drawn = channels.weighted_error(most, |of| (of / power).clamp(1.0, LARGEST_WEIGHT));
    plain.max(alike).max(drawn)
}

/// Scores that queries give the rows of a page, and what softmax over the page makes of them.
pub(crate) struct PageScores {
    tokens: usize,
    /// In nats, `[queries, tokens]`.
    scores: Vec<f32>,
    weights: Vec<f32>,
    /// Standard deviation of each query's scores.
    spread: Vec<f32>,
}

impl PageScores {
    /// Scores of `queries` (`[n, dim]`, times their scale) with the keys `rows` (`[tokens, dim]`).
    pub(crate) fn new(queries: &[f32], rows: &[f32], dim: usize) -> Self {
        let tokens = rows.len() / dim;
        let scores = query_row_products(queries, rows, dim);
        let mut weights = vec![0.0; scores.len()];
        let of_queries = scores.chunks_exact(tokens).zip(weights.chunks_exact_mut(tokens));
        let spread = of_queries.map(|(scores, weights)| {
            fill_softmax(scores, weights);
            standard_deviation(scores)
        });
        let spread = spread.collect();
        Self { tokens, scores, weights, spread }
    }

    /// Mean over the queries of the squared error of scores, where tokens count by the attention
    /// that they get or would get, relative to how the query's scores differ; a token's error is at
    /// most as large as that. `queries` and `delta` may be in any space that keeps their products.
    pub(crate) fn key_error(&self, queries: &[f32], delta: &[f32], dim: usize) -> f64 {
        let lost = query_row_products(queries, delta, dim);
        let (mut wrong, mut given) = (vec![0.0; self.tokens], vec![0.0; self.tokens]);
        let mut total = 0.0;
        for (index, spread) in self.spread.iter().enumerate() {
            let at = index * self.tokens..(index + 1) * self.tokens;
            let (scores, weights) = (&self.scores[at.clone()], &self.weights[at.clone()]);
            let lost = &lost[at];
            wrong.iter_mut().zip(scores.iter().zip(lost)).for_each(|(to, (s, e))| *to = s + e);
            fill_softmax(&wrong, &mut given);
            let against = spread.clamp(SPREAD_NATS.0, SPREAD_NATS.1);
            let of_token = |((weight, given), lost): ((&f32, &f32), &f32)| {
                let share = (lost.abs() / against).min(1.0);
                f64::from((weight + given) / 2.0 * share * share)
            };
            let error: f64 = weights.iter().zip(&given).zip(lost).map(of_token).sum();
            total += if error.is_finite() { error.min(1.0) } else { 1.0 };
        }
        total / self.spread.len() as f64
    }

    /// Mean over the queries of the squared error of their outputs over the page, relative to these
    /// outputs and at most 1, for values `rows` (`[tokens, dim]`) that are wrong by `delta`.
    pub(crate) fn value_error(&self, delta: &[f32], rows: &[f32], dim: usize) -> f64 {
        let [mut lost, mut whole] = [(); 2].map(|()| vec![0f32; dim]);
        let mut total = 0.0;
        for weights in self.weights.chunks_exact(self.tokens) {
            dispatch_simd(WeightedRowSum { weights, rows: delta, out: &mut lost });
            dispatch_simd(WeightedRowSum { weights, rows, out: &mut whole });
            let ErrorSum { error, norm } = row_error(&lost, &whole);
            let error = divide_error(error, norm);
            total += if error.is_finite() { error.min(1.0) } else { 1.0 };
        }
        total / self.spread.len() as f64
    }
}

/// Softmax of `scores`.
fn fill_softmax(scores: &[f32], weights: &mut [f32]) {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    weights.iter_mut().zip(scores).for_each(|(weight, score)| *weight = (score - most).exp());
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

fn standard_deviation(scores: &[f32]) -> f32 {
    let count = scores.len() as f32;
    let mean = scores.iter().sum::<f32>() / count;
    let squares = scores.iter().map(|score| (score - mean) * (score - mean));
    (squares.sum::<f32>() / count).sqrt()
}

/// `[queries, rows]` products of each query with each row.
fn query_row_products(queries: &[f32], rows: &[f32], dim: usize) -> Vec<f32> {
    let mut out = vec![0.0; queries.len() / dim * (rows.len() / dim)];
    dispatch_simd(QueryRowProducts { queries, rows, dim, out: &mut out });
    out
}

/// See [`query_row_products`].
struct QueryRowProducts<'a> {
    queries: &'a [f32],
    rows: &'a [f32],
    dim: usize,
    out: &'a mut [f32],
}

impl WithSimd for QueryRowProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { queries, rows, dim, out } = self;
        let of_queries = queries.chunks_exact(dim).zip(out.chunks_exact_mut(rows.len() / dim));
        for (query, out) in of_queries {
            for (out, row) in out.iter_mut().zip(rows.chunks_exact(dim)) {
                *out = dot_product(query, row);
            }
        }
    }
}

#[inline(always)]
fn dot_product(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; SUMS];
    let (a, a_rest) = a.as_chunks::<SUMS>();
    let (b, b_rest) = b.as_chunks::<SUMS>();
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest = a_rest.iter().zip(b_rest).fold(0.0, |sum, (a, b)| sum + a * b);
    sums.iter().sum::<f32>() + rest
}

/// The sum of rows by weight.
struct WeightedRowSum<'a> {
    weights: &'a [f32],
    rows: &'a [f32],
    out: &'a mut [f32],
}

impl WithSimd for WeightedRowSum<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self { weights, rows, out } = self;
        out.fill(0.0);
        let dim = out.len();
        for (row, weight) in rows.chunks_exact(dim).zip(weights) {
            out.iter_mut().zip(row).for_each(|(out, x)| *out += weight * x);
        }
    }
}
