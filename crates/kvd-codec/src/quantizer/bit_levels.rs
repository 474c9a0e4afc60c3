//! Levels of bit-allocation pages, and the one nearest to a value.

use crate::simd::count_below;
use pulp::Simd;

/// Widest code.
pub const WIDTH_MAX: usize = 8;
/// Levels of all widths from 1 to [`WIDTH_MAX`].
pub const LEVELS: usize = (2 << WIDTH_MAX) - 2;
/// Levels of widths up to this are found by counting the midpoints below, others by halving.
const COUNTED_MAX: usize = 4;

/// Where the levels of a width begin; there are `2^width`.
pub const fn levels_at(width: usize) -> usize {
    (1 << width) - 2
}

/// Levels for coefficients of unit spread, ascending, and the bounds between them.
#[derive(Clone, Debug)]
pub struct BitLevels {
    values: Vec<f32>,
    /// Per width, `2^width - 1` midpoints and an infinity.
    midpoints: Vec<f32>,
}

impl BitLevels {
    /// From [`LEVELS`] values, width 1 first.
    pub fn new(values: &[f32]) -> Self {
        let mut midpoints = Vec::with_capacity(values.len());
        for width in 1..=WIDTH_MAX {
            let table = &values[levels_at(width)..][..1 << width];
            midpoints.extend(table.windows(2).map(|pair| pair[0].midpoint(pair[1])));
            midpoints.push(f32::INFINITY);
        }
        Self { values: values.to_vec(), midpoints }
    }

    /// All values, width 1 first.
    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    /// The bounds between the levels of each width, width 1 first, an infinity after each.
    pub(super) fn midpoints(&self) -> &[f32] {
        &self.midpoints
    }

    /// The levels of a width; one zero for width 0.
    #[inline(always)]
    pub(super) fn width_levels(&self, width: usize) -> &[f32] {
        if width == 0 { &[0.0] } else { &self.values[levels_at(width)..][..1 << width] }
    }

    /// The nearest level of `width`, the lower of two.
    #[inline(always)]
    pub fn nearest_code(&self, width: usize, x: f32) -> usize {
        if width == 0 {
            return 0;
        }
        let midpoints = &self.midpoints[levels_at(width)..][..1 << width];
        let mut code = 0;
        for bit in (0..width).rev() {
            code += usize::from(midpoints[code + (1 << bit) - 1] < x) << bit;
        }
        code
    }

    /// The codes of [`BitLevels::nearest_code`] for values over their scales, which lie in whole
    /// `quotients`: zeros follow them.
    #[inline(always)]
    pub(super) fn nearest_codes<S: Simd>(
        &self,
        simd: S,
        width: usize,
        quotients: &[f32],
        codes: &mut [u32],
    ) {
        if width == 0 {
            codes.fill(0);
        } else if width <= COUNTED_MAX {
            let midpoints = &self.midpoints[levels_at(width)..][..(1 << width) - 1];
            count_below(simd, midpoints, quotients, codes);
        } else {
            for (code, x) in codes.iter_mut().zip(quotients) {
                *code = self.nearest_code(width, *x) as u32;
            }
        }
    }

    /// A level by width and code.
    pub fn level_value(&self, width: usize, code: usize) -> f32 {
        self.width_levels(width)[code]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::dispatch_simd;
    use pulp::WithSimd;

    fn levels() -> BitLevels {
        let table = |width: usize| {
            let count = 1usize << width;
            (0..count).map(move |i| (i as f32 + 0.5) * 6.0 / count as f32 - 3.0)
        };
        BitLevels::new(&(1..=WIDTH_MAX).flat_map(table).collect::<Vec<_>>())
    }

    #[test]
    fn a_code_names_the_nearest_level() {
        let levels = levels();
        for width in 0..=WIDTH_MAX {
            for step in -80..=80 {
                let x = step as f32 * 0.0613;
                let error = |code: usize| (levels.level_value(width, code) - x).abs();
                let nearest = (0..1 << width).map(error).fold(f32::INFINITY, f32::min);
                assert_eq!(error(levels.nearest_code(width, x)), nearest, "width {width}, {x}");
            }
        }
    }

    struct Codes<'a>(&'a BitLevels, usize, &'a [f32]);

    impl WithSimd for Codes<'_> {
        type Output = Vec<u32>;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Vec<u32> {
            let mut codes = vec![9; self.2.len()];
            self.0.nearest_codes(simd, self.1, self.2, &mut codes);
            codes
        }
    }

    #[test]
    fn many_at_once_are_as_one_by_one() {
        let levels = levels();
        let mut x: Vec<f32> = (-200..=205).map(|step| step as f32 * 0.031).collect();
        x[7] = f32::NAN;
        for width in 0..=WIDTH_MAX {
            let wanted: Vec<u32> =
                x.iter().map(|x| levels.nearest_code(width, *x) as u32).collect();
            assert_eq!(dispatch_simd(Codes(&levels, width, &x)), wanted, "width {width}");
        }
    }
}
