//! Scores to weights: a vectorised `exp` whose bits do not depend on the instruction set.

use super::simd::per_level;

/// Scores are kept finite, so that huge keys saturate instead of turning into NaN.
const SCORE_MAX: f32 = 1.0e38;
/// Partial sums: one register of AVX-512.
pub(super) const LANES: usize = 16;

/// `exp(x)` for `x <= 0`, to 2 units in the last place; below -87 it stays at `exp(-87)`.
///
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`, and a Taylor series of degree 6, whose remainder is
/// below `r^7/5040 = 1.2e-7`. No fused multiply-add: every machine must give the same bits.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    // ln 2 in two parts: products of the first with small integers are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let series = 1.0 / 120.0 + r * (1.0 / 720.0);
    let series = 1.0 / 24.0 + r * series;
    let series = 1.0 / 6.0 + r * series;
    let series = 0.5 + r * series;
    let series = 1.0 + r * (1.0 + r * series);
    // The low bits of `shifted` are `n`; moved to the exponent, the rest falls off.
    let power = (shifted.to_bits() << 23).wrapping_add(1f32.to_bits());
    series * f32::from_bits(power)
}

per_level!(pub(super) fn finish(scores: &mut [f32], offset: f32, cap: Option<f32>) -> f32
    = finish_body);
per_level!(pub(super) fn weigh(scores: &mut [f32], max: f32) -> (f32, f32) = weigh_body);

/// Adds `offset`, applies the soft cap, brings scores into range, and returns the largest.
#[inline(always)]
fn finish_body(scores: &mut [f32], offset: f32, cap: Option<f32>) -> f32 {
    let mut offset = offset;
    if let Some(cap) = cap {
        for score in scores.iter_mut() {
            *score = cap * ((*score + offset) / cap).tanh();
        }
        offset = 0.0;
    }
    let mut largest = [-SCORE_MAX; LANES];
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (score, largest) in chunk.iter_mut().zip(&mut largest) {
            *score = bounded(*score + offset);
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
    for (score, largest) in rest.iter_mut().zip(&mut largest) {
        *score = bounded(*score + offset);
        *largest = if *score > *largest { *score } else { *largest };
    }
    halve(largest, |a, b| if a > b { a } else { b })
}

/// NaN becomes the smallest score.
#[inline(always)]
fn bounded(score: f32) -> f32 {
    let score = if score > -SCORE_MAX { score } else { -SCORE_MAX };
    if score < SCORE_MAX { score } else { SCORE_MAX }
}

/// Turns scores into `exp(score - max)`; returns their sum and the largest.
#[inline(always)]
fn weigh_body(scores: &mut [f32], max: f32) -> (f32, f32) {
    let (mut sums, mut largest) = ([0f32; LANES], [0f32; LANES]);
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for ((score, sum), largest) in chunk.iter_mut().zip(&mut sums).zip(&mut largest) {
            *score = exp(*score - max);
            *sum += *score;
            *largest = if *score > *largest { *score } else { *largest };
        }
    }
    for ((score, sum), largest) in rest.iter_mut().zip(&mut sums).zip(&mut largest) {
        *score = exp(*score - max);
        *sum += *score;
        *largest = if *score > *largest { *score } else { *largest };
    }
    (halve(sums, |a, b| a + b), halve(largest, |a, b| if a > b { a } else { b }))
}

/// Combines lanes in halves: a fixed order, and no chain of sixteen.
#[inline(always)]
pub(super) fn halve(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| combine(lanes[i], lanes[i + 8]));
    let four: [f32; 4] = std::array::from_fn(|i| combine(eight[i], eight[i + 4]));
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}

#[cfg(test)]
mod tests {
    use super::super::simd::Simd;
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

    #[test]
    fn every_level_gives_the_same_bits() {
        let scores: Vec<f32> = (0..75).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let run = |simd: Simd, cap| {
            let mut scores = scores.clone();
            let max = finish(simd, &mut scores, 0.25, cap);
            let (sum, largest) = weigh(simd, &mut scores, max);
            let bits = [max, sum, largest].into_iter().chain(scores).map(f32::to_bits);
            bits.collect::<Vec<_>>()
        };
        for cap in [None, Some(5.0)] {
            let portable = run(Simd::available()[0], cap);
            for simd in Simd::available() {
                assert_eq!(run(simd, cap), portable, "{simd:?}");
            }
        }
    }

    #[test]
    fn scores_become_finite() {
        let mut scores = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0];
        assert_eq!(finish(Simd::detect(), &mut scores, 0.0, None), SCORE_MAX);
        assert_eq!(scores, [SCORE_MAX, -SCORE_MAX, -SCORE_MAX, 1.0]);
    }
}
