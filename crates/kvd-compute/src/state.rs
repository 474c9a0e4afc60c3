//! Partial results of attention and how they merge: windows, pages and split ranges are one
//! mechanism (design section 4).

use crate::cpu::ScratchVec;

/// Attention of one query row over the tokens so far: `out = acc / weight_sum`, `lse = max +
/// ln(weight_sum)`.
///
/// Accumulators of raw rows and of page coefficients stay apart, because the value side's
/// transform is undone once at the end instead of once per token.
#[derive(Clone, Debug)]
pub(crate) struct PartialState {
    /// Largest score seen; `-inf` while nothing was seen.
    pub(crate) max: f32,
    /// Sum of `exp(score - max)`.
    pub(crate) weight_sum: f32,
    /// The part of `weight_sum` that came from coefficient pages.
    pub(crate) coefficient_weight: f32,
    /// Weighted sum of raw values, `head_dim_v` long.
    pub(crate) raw: ScratchVec<f32>,
    /// Weighted sum of value coefficients, `head_dim_v` long.
    pub(crate) coefficients: ScratchVec<f32>,
}

impl PartialState {
    /// Nothing seen yet.
    pub(crate) fn empty(head_dim_v: usize) -> Self {
        Self {
            max: f32::NEG_INFINITY,
            weight_sum: 0.0,
            coefficient_weight: 0.0,
            raw: ScratchVec::repeat_value(0.0, head_dim_v),
            coefficients: ScratchVec::repeat_value(0.0, head_dim_v),
        }
    }

    /// Makes room for scores up to `max`: everything so far is scaled down to the new maximum.
    pub(crate) fn raise_max(&mut self, max: f32) {
        if max <= self.max {
            return;
        }
        if self.weight_sum > 0.0 {
            let factor = (self.max - max).exp();
            self.weight_sum *= factor;
            self.coefficient_weight *= factor;
            // Not one loop over a chain, which would go value by value.
            for values in [&mut self.raw[..], &mut self.coefficients[..]] {
                values.iter_mut().for_each(|value| *value *= factor);
            }
        }
        self.max = max;
    }

    /// Adds what `other` has seen; two empty states stay empty.
    pub(crate) fn merge(&mut self, other: &Self) {
        if other.weight_sum == 0.0 {
            return;
        }
        self.raise_max(other.max);
        let factor = (other.max - self.max).exp();
        self.weight_sum += other.weight_sum * factor;
        self.coefficient_weight += other.coefficient_weight * factor;
        for (mine, theirs) in self.raw.iter_mut().zip(&other.raw) {
            *mine += theirs * factor;
        }
        for (mine, theirs) in self.coefficients.iter_mut().zip(&other.coefficients) {
            *mine += theirs * factor;
        }
    }

    /// Natural log of the sum of `exp(score)`; `-inf` when nothing was seen.
    pub(crate) fn lse(&self) -> f32 {
        if self.weight_sum > 0.0 { self.max + self.weight_sum.ln() } else { f32::NEG_INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(scores: &[f32], value: f32) -> PartialState {
        let mut state = PartialState::empty(1);
        for &score in scores {
            state.raise_max(score);
            let weight = (score - state.max).exp();
            state.weight_sum += weight;
            state.raw[0] += weight * value;
        }
        state
    }

    #[test]
    fn merge_of_two_empties_is_empty() {
        let mut state = PartialState::empty(2);
        state.merge(&PartialState::empty(2));
        assert_eq!(state.lse(), f32::NEG_INFINITY);
        assert_eq!(*state.raw, [0.0, 0.0]);
    }

    #[test]
    fn merge_equals_seeing_everything_at_once() {
        let (a, b) = ([1.0f32, -3.0, 80.0], [79.5f32, 2.0]);
        let mut merged = seen(&a, 2.0);
        merged.merge(&seen(&b, 2.0));
        let mut other_way = seen(&b, 2.0);
        other_way.merge(&seen(&a, 2.0));
        let exact = a.iter().chain(&b).map(|s| f64::from(*s - 80.0).exp()).sum::<f64>().ln() + 80.0;
        for state in [merged, other_way] {
            assert!((f64::from(state.lse()) - exact).abs() < 1e-5);
            assert!((state.raw[0] / state.weight_sum - 2.0).abs() < 1e-6);
        }
    }

    #[test]
    fn merge_far_below_the_maximum_changes_nothing_and_is_finite() {
        let mut state = seen(&[0.0], 1.0);
        state.merge(&seen(&[-1.0e30], 5.0));
        assert_eq!(state.lse(), 0.0);
        assert_eq!(*state.raw, [1.0]);
    }
}
