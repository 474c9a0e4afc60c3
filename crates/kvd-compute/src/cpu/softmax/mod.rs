//! Scores to weights: a vectorised `exp` whose bits do not depend on the instruction set.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;

#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::{Simd, per_level};
use crate::cpu::span_scores::SPAN;
use std::ops::Range;

/// Scores are kept finite. One that leaves f32 on the way, be it as NaN, as infinity or as its
/// negative, becomes this one whatever its sign was: sums that overflowed say nothing of it, and
/// the row, whose largest score is then out of range, is answered in f64.
pub(super) const SCORE_MAX: f32 = 1.0e38;
/// Partial sums: one register of AVX-512.
pub(super) const LANES: usize = 16;

/// Below it `exp` stays what it is there.
pub(super) const LEAST: f32 = -87.0;
/// Added to a small number, leaves the nearest integer in the low bits.
pub(super) const MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts: products of the first with small integers are exact.
pub(super) const LN2_HIGH: f32 = 0.693_359_4;
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;
/// The polynomial of degree 5 with 1 for its constant that is least wrong for `exp(r)` between
/// `-ln 2 / 2` and `ln 2 / 2`: by 9.4e-8 of it, before rounding.
pub(super) const SERIES: [f32; 6] =
    [1.0, 0.999_999_7, 0.499_991_48, 0.166_676_39, 0.041_898_16, 0.008_290_272];

/// `exp(x)` for `x <= 0`, to 2 units in the last place; below [`LEAST`] it stays what it is there.
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`. Every machine gives the same bits: products and sums
/// are fused by all of them, by those without such an instruction at some cost.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let x = if x > LEAST { x } else { LEAST };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    // Written out: a loop over the series was left a call for each lane of a short row.
    let series = r.mul_add(SERIES[5], SERIES[4]);
    let series = r.mul_add(series, SERIES[3]);
    let series = r.mul_add(series, SERIES[2]);
    let series = r.mul_add(series, SERIES[1]);
    let series = r.mul_add(series, SERIES[0]);
    // The low bits of `shifted` are `n`, which is added to the exponent; the rest falls off.
    f32::from_bits(series.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// Rows that are weighed at once.
pub(super) const ROWS: usize = 4;

/// Sums and largest weights of some rows.
#[derive(Default)]
pub(super) struct WeightSums {
    pub(super) weights: [f32; ROWS],
    /// How far the largest score lies from the maximum; then the largest weight.
    pub(super) largest: [f32; ROWS],
}

/// The scores of at most [`ROWS`] rows that see the same tokens.
pub(super) struct SeenScores<'a> {
    /// Scores of a [`SpanScores`](crate::cpu::span_scores::SpanScores), from the first row on.
    pub(super) rows: &'a mut [f32],
    pub(super) tokens: Range<usize>,
}

impl SeenScores<'_> {
    fn each_row(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let tokens = self.tokens.clone();
        let rows = self.rows.as_chunks_mut::<SPAN>().0.iter_mut();
        rows.map(move |row| &mut row[tokens.clone()])
    }
}

/// Adds each row's offset, applies the soft cap, brings scores into range, and finds the largest of
/// each row.
pub(super) fn finish_scores(
    simd: Simd,
    seen: SeenScores<'_>,
    offsets: &[f32],
    cap: Option<f32>,
    maxima: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    if simd.vector_set() == InstructionSet::Avx512 && cap.is_none() {
        return avx512::finish_scores(simd, seen, offsets, maxima);
    }
    finish_any(simd, seen, offsets, cap, maxima);
}

/// Turns scores into `exp(score - maximum)` of their row, and sums them.
pub(super) fn weigh_scores(
    simd: Simd,
    seen: SeenScores<'_>,
    maxima: &[f32; ROWS],
    sums: &mut WeightSums,
) {
    #[cfg(target_arch = "x86_64")]
    if simd.vector_set() == InstructionSet::Avx512 {
        return avx512::weigh_scores(simd, seen, maxima, sums);
    }
    weigh_any(simd, seen, maxima, sums);
}

per_level!(
    fn finish_any(seen: SeenScores<'_>, offsets: &[f32], cap: Option<f32>, maxima: &mut [f32])
        = finish_body
);
per_level!(
    fn weigh_any(seen: SeenScores<'_>, maxima: &[f32; ROWS], sums: &mut WeightSums) = weigh_body
);

#[inline(always)]
fn finish_body(mut seen: SeenScores<'_>, offsets: &[f32], cap: Option<f32>, maxima: &mut [f32]) {
    for ((scores, offset), maximum) in seen.each_row().zip(offsets).zip(maxima) {
        let mut offset = *offset;
        if let Some(cap) = cap {
            for score in scores.iter_mut() {
                let sum = *score + offset;
                // What left f32 must not pass for one that the cap holds.
                let capped = cap * (sum / cap).tanh();
                *score = if sum.abs() < SCORE_MAX { capped } else { SCORE_MAX };
            }
            offset = 0.0;
        }
        let mut largest = [-SCORE_MAX; LANES];
        let (chunks, rest) = scores.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (score, largest) in chunk.iter_mut().zip(&mut largest) {
                *score = clamp_score(*score + offset);
                *largest = if *score > *largest { *score } else { *largest };
            }
        }
        for (score, largest) in rest.iter_mut().zip(&mut largest) {
            *score = clamp_score(*score + offset);
            *largest = if *score > *largest { *score } else { *largest };
        }
        *maximum = combine_lanes(largest, |a, b| if a > b { a } else { b });
    }
}

/// NaN and what is out of range, either way, become the largest score: see [`SCORE_MAX`].
#[inline(always)]
fn clamp_score(score: f32) -> f32 {
    if score.abs() < SCORE_MAX { score } else { SCORE_MAX }
}

#[inline(always)]
fn weigh_body(mut seen: SeenScores<'_>, maxima: &[f32; ROWS], sums: &mut WeightSums) {
    // A whole register of them: one by one each would wait for itself.
    let mut largest = [0f32; LANES];
    largest[..ROWS].copy_from_slice(&sums.largest);
    largest.iter_mut().for_each(|largest| *largest = exp(*largest));
    sums.largest.copy_from_slice(&largest[..ROWS]);
    for ((scores, maximum), sum) in seen.each_row().zip(maxima).zip(&mut sums.weights) {
        let mut lanes = [0f32; LANES];
        let (chunks, rest) = scores.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for (score, sum) in chunk.iter_mut().zip(&mut lanes) {
                *score = exp(*score - maximum);
                *sum += *score;
            }
        }
        for (score, sum) in rest.iter_mut().zip(&mut lanes) {
            *score = exp(*score - maximum);
            *sum += *score;
        }
        *sum = combine_lanes(lanes, |a, b| a + b);
    }
}

/// Combines lanes in the order of `Lanes::sums`, without a chain of sixteen.
#[inline(always)]
fn combine_lanes(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let four = |first: usize| {
        let even = combine(lanes[first], lanes[first + 2]);
        combine(even, combine(lanes[first + 1], lanes[first + 3]))
    };
    combine(combine(four(0), four(8)), combine(four(4), four(12)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere_and_exact_at_zero() {
        assert_eq!(exp(0.0), 1.0);
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.5e-7, "exp({x}): {error:e}");
        }
        assert!(exp(-1e30) < 1.7e-38);
    }

    /// Rows of waves.
    fn waves(rows: usize) -> Vec<f32> {
        (0..rows * SPAN).map(|i| (i as f32 * 0.37).sin() * 9.0).collect()
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let run = |simd: Simd, count: usize, cap, tokens: Range<usize>| {
            let (mut scores, mut maxima, mut sums) =
                (waves(count), [0.0; ROWS], WeightSums::default());
            for (at, odd) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38].iter().enumerate() {
                scores[at * SPAN % (count * SPAN) + 5 + 17 * at] = *odd;
            }
            let offsets = &[0.25, -3.0, 0.0, 1.5][..count];
            let seen = SeenScores { rows: &mut scores[..], tokens: tokens.clone() };
            finish_scores(simd, seen, offsets, cap, &mut maxima);
            sums.largest = [-0.5, 0.0, -3.0, -88.0];
            weigh_scores(simd, SeenScores { rows: &mut scores[..], tokens }, &maxima, &mut sums);
            let sums = sums.weights.into_iter().chain(sums.largest);
            let bits = maxima.into_iter().chain(sums).chain(scores).map(f32::to_bits);
            bits.collect::<Vec<_>>()
        };
        for (count, cap) in (1..=ROWS).flat_map(|count| [None, Some(5.0)].map(|cap| (count, cap))) {
            for tokens in [2..77, 0..SPAN, 5..6, 16..64] {
                let portable = run(Simd::available_levels()[0], count, cap, tokens.clone());
                for simd in Simd::available_levels() {
                    let bits = run(simd, count, cap, tokens.clone());
                    assert_eq!(bits, portable, "{simd:?} {count} {tokens:?}");
                }
            }
        }
    }

    #[test]
    fn rows_are_weighed_apart_and_others_left_alone() {
        let (before, mut scores) = (waves(ROWS), waves(ROWS));
        let (mut maxima, mut sums) = ([0.0; ROWS], WeightSums::default());
        let simd = Simd::detect_widest();
        finish_scores(
            simd,
            SeenScores { rows: &mut scores, tokens: 2..77 },
            &[0.0; ROWS],
            None,
            &mut maxima,
        );
        weigh_scores(simd, SeenScores { rows: &mut scores, tokens: 2..77 }, &maxima, &mut sums);
        for row in 0..ROWS {
            let (before, after) = (&before[row * SPAN..][..SPAN], &scores[row * SPAN..][..SPAN]);
            assert_eq!((&before[..2], &before[77..]), (&after[..2], &after[77..]));
            let largest = before[2..77].iter().fold(f32::MIN, |a, b| a.max(*b));
            assert_eq!(maxima[row], largest);
            let exact = before[2..77].iter().map(|score| f64::from(score - largest).exp());
            assert!((f64::from(sums.weights[row]) - exact.sum::<f64>()).abs() < 1e-5);
            assert_eq!(sums.largest[row], 1.0);
            assert!(after[2..77].contains(&exp(0.0)));
        }
    }

    fn ways() -> impl Iterator<Item = (Simd, Option<f32>)> {
        Simd::available_levels().into_iter().flat_map(|simd| [(simd, None), (simd, Some(5.0))])
    }

    #[test]
    fn scores_that_leave_f32_become_the_largest() {
        for (simd, cap) in ways() {
            for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -2e38, 3e38] {
                let (mut scores, mut maxima) = ([0.0; SPAN], [0.0]);
                scores[1] = odd;
                let seen = SeenScores { rows: &mut scores, tokens: 0..20 };
                finish_scores(simd, seen, &[0.0], cap, &mut maxima);
                assert_eq!((maxima, scores[1]), ([SCORE_MAX], SCORE_MAX), "{simd:?} {odd}");
                assert!(scores[2..].iter().all(|score| *score == 0.0));
            }
        }
    }
}
