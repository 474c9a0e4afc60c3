//! Second integers of weights, or of weights times steps: they hold the rest that the first
//! rounding left, so that both together have 30 bits of the largest in their row.

use crate::cpu::int_dot::ROWS;
use crate::cpu::int_operands::{IntOperands, IntRows, RoundedRow};
use crate::cpu::scratch::ScratchVec;
use crate::cpu::simd::{KernelConfig, Simd, per_level};
use kvd_codec::HeadCodec;
use kvd_core::DType;

/// Second terms of a few rows of weights.
pub(super) struct SecondTerms {
    parts: IntOperands,
    steps: ScratchVec<f32>,
    residuals: ScratchVec<f32>,
}

impl SecondTerms {
    /// Those of a side where one term is not enough: behind a transform. A value that is large in
    /// one channel is as large in all of its coefficients, and what these lose alike the transform
    /// adds up in that channel again.
    pub(super) fn of_side(config: KernelConfig, side: &HeadCodec) -> Option<Self> {
        side.uniform_groups()?;
        let parts = IntOperands::of_weights(config);
        let needed = parts.are_words() && !side.is_identity();
        needed.then(|| Self {
            parts,
            steps: ScratchVec::default(),
            residuals: ScratchVec::default(),
        })
    }

    /// Takes what the rows of `first` leave of `weights`, times `steps` (f16) where there are some,
    /// and returns what the second rounding left, by row.
    pub(super) fn take_residuals(
        &mut self,
        simd: Simd,
        weights: &[&[f32]],
        steps: Option<&[u8]>,
        first: &IntOperands,
        pushed: &[RoundedRow; ROWS],
    ) -> [RoundedRow; ROWS] {
        let tokens = weights.first().map_or(0, |row| row.len());
        self.steps.clear();
        self.steps.resize_with_room(tokens, 1.0);
        if let Some(steps) = steps {
            DType::F16.widen_values(steps, &mut self.steps);
        }
        self.parts.clear_rows(tokens);
        let mut second = [RoundedRow::default(); ROWS];
        for (row, weights) in weights.iter().enumerate() {
            self.residuals.resize_with_room(tokens, 0.0);
            first.widen_row(simd, row, &mut self.residuals);
            let factors = WeightFactors { weights, steps: &self.steps, unit: pushed[row].unit };
            let [largest, total] = subtract_integers(simd, factors, &mut self.residuals);
            // A step that overflows has no unit; the sum is then of no use anyway.
            let largest = if largest.is_finite() { largest } else { 0.0 };
            second[row] = self.parts.push(simd, &self.residuals, largest, Some(total));
        }
        second
    }

    /// The rows taken last.
    pub(super) fn last_rows(&self) -> IntRows<'_> {
        self.parts.rows_from(0)
    }
}

/// Weights and steps, and one unit of the integers that their products were rounded to.
#[derive(Clone, Copy)]
struct WeightFactors<'a> {
    weights: &'a [f32],
    steps: &'a [f32],
    unit: f32,
}

per_level!(
    fn subtract_integers(factors: WeightFactors<'_>, integers: &mut [f32]) -> [f32; 2]
        = subtract_integers_body
);

/// Writes what integers left of products, and returns its largest magnitude and its sum.
#[inline(always)]
fn subtract_integers_body(factors: WeightFactors<'_>, integers: &mut [f32]) -> [f32; 2] {
    const LANES: usize = 16;
    let WeightFactors { weights, steps, unit } = factors;
    let (mut largest, mut sums) = ([0f32; LANES], [0f32; LANES]);
    let products = weights.as_chunks::<LANES>().0.iter().zip(steps.as_chunks::<LANES>().0);
    for (integers, (weights, steps)) in integers.as_chunks_mut::<LANES>().0.iter_mut().zip(products)
    {
        for lane in 0..LANES {
            let left = weights[lane] * steps[lane] - unit * integers[lane];
            integers[lane] = left;
            sums[lane] += left;
            largest[lane] = if left.abs() > largest[lane] { left.abs() } else { largest[lane] };
        }
    }
    [largest.iter().fold(0f32, |most, left| most.max(*left)), sums.iter().sum()]
}
