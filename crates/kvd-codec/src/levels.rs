//! The levels that a fitted codebook's values lie on: 127 to each side of zero, the last one the
//! largest magnitude. Attention kernels then hold entries as bytes and lose nothing but the
//! rounding to f16.

/// Levels on one side of zero.
const LEVELS: f32 = 127.0;

/// Moves every value to the nearest level. The codebook's own error hardly grows: with a largest
/// entry of three deviations, a level is 0.024 of a deviation wide and rounding to it adds 0.007,
/// squared, to an error of 0.3, squared, at 2 bits per value.
pub(crate) fn snap(values: &mut [f32]) {
    let largest = values.iter().fold(0f32, |m, value| m.max(value.abs()));
    let level = largest / LEVELS;
    // Too small for a level to be a number of its own, or nothing to move.
    if !level.is_normal() {
        return;
    }
    for value in values {
        *value = (*value / level).round() * level;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_move_to_the_nearest_level_and_the_largest_stays() {
        let mut values = [0.0, 1.27, -1.27, 0.5049, 0.5051, -0.001];
        snap(&mut values);
        for (got, want) in values.into_iter().zip([0.0, 1.27, -1.27, 0.5, 0.51, 0.0]) {
            assert!((got - want).abs() < 1e-6, "{got} instead of {want}");
        }
        let mut tiny = [0.0, 1e-40, -1e-40];
        snap(&mut tiny);
        assert_eq!(tiny, [0.0, 1e-40, -1e-40]);
    }
}
