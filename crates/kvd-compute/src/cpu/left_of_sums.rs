//! How much of the sums of rows is left when they are turned back into values: where a transform
//! or an offset takes most of them away, what the sums lost counts.

use crate::PartialState;
use crate::cpu::loss::sum_of_squares;
use crate::cpu::scratch::ScratchVec;

/// Least share of the squares of coefficients that those of an output have, for f32 to do.
pub(super) const LEFT_LEAST: f64 = 1.0 / 64.0;
/// Values that are looked at together.
const LANES: usize = 16;

/// The shares that were left of the rows of a group.
#[derive(Default)]
pub(super) struct LeftOfSums {
    /// Rows of which transforms left little.
    pub(super) cancelled: Vec<usize>,
    /// The largest value over the largest one before an offset was added, at most 1, by row; empty
    /// where the side has no offset.
    beside_offset: ScratchVec<f32>,
}

impl LeftOfSums {
    /// Takes the values that the coefficients of a row became, with the offset of their side.
    pub(super) fn take_row(
        &mut self,
        row: usize,
        values: &[f32],
        state: &PartialState,
        offset: Option<&[f32]>,
    ) {
        if has_cancelled(values, &state.coefficients) {
            self.cancelled.push(row);
        }
        let Some(offset) = offset else { return };
        self.beside_offset.resize_with_room(row, 1.0);
        self.beside_offset.push_value(share_beside_offset(
            values,
            offset,
            state.coefficient_weight,
        ));
    }

    /// The share that an offset left of the largest value of a row.
    pub(super) fn share_beside_offset(&self, row: usize) -> f32 {
        self.beside_offset.get(row).copied().unwrap_or(1.0)
    }
}

/// The largest value over the largest one without so many times the offset, at most 1.
fn share_beside_offset(values: &[f32], offset: &[f32], weight: f32) -> f32 {
    let (mut after, mut before) = ([0f32; LANES], [0f32; LANES]);
    for (values, offset) in values.chunks(LANES).zip(offset.chunks(LANES)) {
        let lanes = after.iter_mut().zip(&mut before);
        for ((after, before), (value, offset)) in lanes.zip(values.iter().zip(offset)) {
            let without = (value - weight * offset).abs();
            *after = if value.abs() > *after { value.abs() } else { *after };
            *before = if without > *before { without } else { *before };
        }
    }
    let [after, before] = [after, before].map(|lanes| lanes.into_iter().fold(0f32, f32::max));
    if after < before { after / before } else { 1.0 }
}

/// Whether values have less than [`LEFT_LEAST`] of the squares of the coefficients that they are
/// made from.
fn has_cancelled(values: &[f32], coefficients: &[f32]) -> bool {
    let squares = |values: &[f32]| {
        let (chunks, rest) = values.as_chunks::<LANES>();
        let mut lanes = [0f32; LANES];
        for chunk in chunks {
            lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value * value);
        }
        lanes.iter().sum::<f32>() + rest.iter().map(|value| value * value).sum::<f32>()
    };
    let (left, of) = (squares(values), squares(coefficients));
    // Far from the bound and from the ends of f32, its sums do.
    if left > 2.0 * LEFT_LEAST as f32 * of && left > 1e-30 && of.is_finite() {
        return false;
    }
    let squares = |values: &[f32]| sum_of_squares(values.iter().copied());
    squares(values) < LEFT_LEAST * squares(coefficients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_that_takes_most_of_a_value_leaves_its_share() {
        for dim in [8usize, 16, 33] {
            for at in [0, dim - 1] {
                let offset: Vec<f32> = (0..dim).map(|i| if i == at { 4.0 } else { 0.0 }).collect();
                let mut values = vec![0.25f32; dim];
                // Sums of -8.25, behind two times the offset.
                values[at] = -0.25;
                let share = share_beside_offset(&values, &offset, 2.0);
                assert_eq!(share, 0.25 / 8.25, "{dim} {at}");
                values[at] = 16.0;
                assert_eq!(share_beside_offset(&values, &offset, 2.0), 1.0, "{dim} {at}");
            }
        }
    }

    #[test]
    fn rows_without_an_offset_keep_their_share() {
        let mut left = LeftOfSums::default();
        let mut state = PartialState::empty(16);
        state.coefficients.fill(1.0);
        (state.coefficient_weight, state.weight_sum) = (1.0, 1.0);
        left.take_row(0, &[1.0; 16], &state, None);
        left.take_row(2, &[1e-3; 16], &state, Some(&[-0.999; 16]));
        assert_eq!(left.cancelled, [2]);
        let shares = [0, 1, 2, 3].map(|row| left.share_beside_offset(row));
        assert_eq!(shares, [1.0, 1.0, 1e-3, 1.0]);
    }
}
