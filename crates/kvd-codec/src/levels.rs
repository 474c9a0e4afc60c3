//! The levels that a fitted codebook's values lie on: at most 127 to each side of zero, a whole
//! number of units that has four significant bits. Seven bits times four fit an f16, so every
//! level is one exactly: attention kernels hold entries as bytes and lose nothing.

/// Levels on one side of zero.
const LEVELS: f32 = 127.0;
/// Significant bits of a unit.
const UNIT_BITS: u32 = 4;
/// Units below this would need more digits than an f16 has there.
const UNIT_MIN: f32 = 1.0 / (1u32 << 20) as f32;
/// A small number added to it has no bits below one: adding and subtracting it rounds.
const WHOLE: f32 = 12_582_912.0;

/// The smallest number of [`UNIT_BITS`] significant bits that is not below `x`, which is normal.
fn round_up(x: f32) -> f32 {
    let below = (1u32 << (f32::MANTISSA_DIGITS - UNIT_BITS)) - 1;
    f32::from_bits((x.to_bits() + below) & !below)
}

/// Moves every value to the nearest level. The codebook's own error hardly grows: with a largest
/// entry of three deviations, a level is at most 0.027 of a deviation wide and rounding to it adds
/// 0.008, squared, to an error of 0.3, squared, at 2 bits per value.
pub fn snap_to_levels(values: &mut [f32]) {
    let largest = values.iter().fold(0f32, |m, value| m.max(value.abs()));
    let unit = largest / LEVELS;
    if !(unit >= UNIT_MIN && unit.is_finite()) {
        return;
    }
    let unit = round_up(unit);
    for value in values {
        *value = (*value / unit).round() * unit;
    }
}

/// The unit that all values are at most 127 of, in either direction, if there is one: what
/// [`snap_to_levels`] moved them to. The largest value may lie a few levels below the last one.
#[must_use]
pub fn level_unit(values: &[f32]) -> Option<f32> {
    let largest = values.iter().fold(0f32, |m, value| m.max(value.abs()));
    let least = largest / LEVELS;
    if !(least >= UNIT_MIN && least.is_finite()) {
        return None;
    }
    let first = round_up(least);
    // No exit half-way and no call for each value: many at once.
    let fits = |unit: &f32| {
        values.iter().fold(true, |fit, value| {
            let level = (value / unit + WHOLE) - WHOLE;
            fit & (level.abs() <= LEVELS) & (level * unit == *value)
        })
    };
    let next = |unit: &f32| Some(round_up(unit * (1.0 + f32::EPSILON)));
    // A unit is at most an eighth more than it had to be.
    std::iter::successors(Some(first), next).take(3).find(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn values_move_to_the_nearest_level() {
        let mut values = [0.0, 1.27, -1.27, 0.5049, 0.5051, -0.001];
        snap_to_levels(&mut values);
        // The unit is 0.01 rounded up to four bits: 11 / 1024.
        for (got, want) in values.into_iter().zip([0.0, 118.0, -118.0, 47.0, 47.0, 0.0]) {
            assert_eq!(got, want * 11.0 / 1024.0);
        }
        let mut tiny = [0.0, 1e-40, -1e-40];
        snap_to_levels(&mut tiny);
        assert_eq!(tiny, [0.0, 1e-40, -1e-40]);
    }

    #[test]
    fn levels_are_exact_in_f16_and_their_unit_is_found() {
        let mut state = 1u32;
        for round in 0..2000 {
            let gain = 2f32.powi(round % 24 - 12);
            let mut draw = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            let mut values: Vec<f32> = (0..32).map(|_| draw() * gain).collect();
            snap_to_levels(&mut values);
            assert!(values.iter().all(|value| f16::from_f32(*value).to_f32() == *value));
            let unit = level_unit(&values).expect("snapped values have a unit");
            assert!(values.iter().all(|value| (value / unit).fract() == 0.0), "{values:?}");
        }
        assert_eq!(level_unit(&[1.0, 0.337]), None);
        assert_eq!(level_unit(&[0.0]), None);
    }
}
