//! Minima and maxima of groups of values, and the f16 numbers that cover them.
//!
//! All of it is arithmetic and choices between two values, inlined, so that a loop over groups
//! becomes vector instructions of whoever calls it.

use crate::row_block::RowBlock;
use pulp::Simd;

/// Values of a group that are compared at once.
pub(super) const LANES: usize = 8;
/// Values of a page that are compared at once: more lanes, so that none waits for the last.
const WIDE: usize = 32;
/// Registers of channels whose extremes are kept at once.
const COLUMNS: usize = 2;
/// The smallest normal f16, as the bits of an f32.
const NORMAL_BITS: u32 = 113 << 23;
/// Difference between the exponent biases of f32 and f16.
const BIAS_BITS: u32 = 112 << 23;
const INFINITY_BITS: u32 = 0x7C00;
const SIGN_BIT: u32 = 0x8000;

/// Rows `[n, dim]` whose channels are grouped by `span`.
#[derive(Clone, Copy)]
pub(super) struct GroupedRows<'a> {
    pub(super) rows: &'a [f32],
    pub(super) dim: usize,
    /// Channels of a group.
    pub(super) span: usize,
}

/// Minimum and maximum of each pair's values over `rows`, of equal ones the first: zeros have
/// signs. No value is NaN.
#[inline(always)]
pub(super) fn group_extremes<S: Simd>(
    simd: S,
    groups: GroupedRows<'_>,
    low: &mut [f32],
    high: &mut [f32],
) {
    let GroupedRows { rows, dim, span } = groups;
    if span == 1 {
        return column_extremes(simd, RowBlock { rows, dim }, low, high);
    }
    low.fill(f32::INFINITY);
    high.fill(f32::NEG_INFINITY);
    if span == dim && rows.len() > dim {
        low[0] = fold_values::<WIDE>(rows, |a, b| if a < b { a } else { b });
        high[0] = fold_values::<WIDE>(rows, |a, b| if a > b { a } else { b });
    } else {
        for row in rows.chunks_exact(dim) {
            for ((part, low), high) in row.chunks(span).zip(low.iter_mut()).zip(high.iter_mut()) {
                let least = fold_values::<LANES>(part, |a, b| if a < b { a } else { b });
                let most = fold_values::<LANES>(part, |a, b| if a > b { a } else { b });
                *low = if least < *low { least } else { *low };
                *high = if most > *high { most } else { *high };
            }
        }
    }
    for (pair, (low, high)) in low.iter_mut().zip(high).enumerate() {
        if *low == 0.0 || *high == 0.0 {
            let rows = rows.chunks_exact(dim).map(|row| &row[pair * span..]);
            sign_zeros(rows.flat_map(|row| &row[..span.min(row.len())]), low, high);
        }
    }
}

/// Where an extreme is a zero, it takes the sign of the first of the group.
fn sign_zeros<'a>(mut values: impl Iterator<Item = &'a f32>, low: &mut f32, high: &mut f32) {
    let first = values.find(|x| **x == 0.0).copied().unwrap_or(0.0);
    *low = if *low == 0.0 { first } else { *low };
    *high = if *high == 0.0 { first } else { *high };
}

/// As [`group_extremes`], of groups that follow one another, of `span` values each, a multiple of
/// [`LANES`]. Eight groups end together: by itself, each would end in a chain over the lanes of a
/// register.
#[inline(always)]
pub(super) fn run_extremes(rows: &[f32], span: usize, low: &mut [f32], high: &mut [f32]) {
    let into = low.chunks_mut(LANES).zip(high.chunks_mut(LANES));
    for (rows, (low, high)) in rows.chunks(LANES * span).zip(into) {
        let mut least = [[f32::INFINITY; LANES]; LANES];
        let mut most = [[f32::NEG_INFINITY; LANES]; LANES];
        let lanes = least.iter_mut().zip(&mut most);
        for (values, (least, most)) in rows.chunks_exact(span).zip(lanes) {
            let [mut a, mut b] = [*least, *most];
            for chunk in values.as_chunks::<LANES>().0 {
                for lane in 0..LANES {
                    a[lane] = if chunk[lane] < a[lane] { chunk[lane] } else { a[lane] };
                    b[lane] = if chunk[lane] > b[lane] { chunk[lane] } else { b[lane] };
                }
            }
            (*least, *most) = (a, b);
        }
        let least = fold_each_row(&least, |a, b| if a < b { a } else { b });
        let most = fold_each_row(&most, |a, b| if a > b { a } else { b });
        low.copy_from_slice(&least[..low.len()]);
        high.copy_from_slice(&most[..high.len()]);
        let groups = rows.chunks_exact(span);
        for (values, (low, high)) in groups.zip(low.iter_mut().zip(high)) {
            if *low == 0.0 || *high == 0.0 {
                sign_zeros(values.iter(), low, high);
            }
        }
    }
}

/// One of each row's values, by a choice between two.
#[inline(always)]
fn fold_each_row(
    rows: &[[f32; LANES]; LANES],
    choose: impl Fn(f32, f32) -> f32 + Copy,
) -> [f32; LANES] {
    let all = rows.as_flattened();
    let mut fours = [0f32; LANES * 4];
    let mut twos = [0f32; LANES * 2];
    fours.iter_mut().enumerate().for_each(|(i, to)| *to = choose(all[2 * i], all[2 * i + 1]));
    twos.iter_mut().enumerate().for_each(|(i, to)| *to = choose(fours[2 * i], fours[2 * i + 1]));
    std::array::from_fn(|i| choose(twos[2 * i], twos[2 * i + 1]))
}

/// Minima and maxima of all channels.
#[inline(always)]
fn column_extremes<S: Simd>(simd: S, block: RowBlock<'_>, low: &mut [f32], high: &mut [f32]) {
    let RowBlock { rows, dim } = block;
    let step = COLUMNS * S::F32_LANES;
    let whole = dim / step * step;
    for first in (0..whole).step_by(step) {
        // In registers: arrays of this size went to memory, by masked stores that none is
        // forwarded from.
        let mut least = [simd.splat_f32s(f32::INFINITY); COLUMNS];
        let mut most = [simd.splat_f32s(f32::NEG_INFINITY); COLUMNS];
        for row in rows.chunks_exact(dim) {
            let (part, _) = S::as_simd_f32s(&row[first..][..step]);
            for (x, (least, most)) in part.iter().zip(least.iter_mut().zip(&mut most)) {
                *least = simd.min_f32s(*least, *x);
                *most = simd.max_f32s(*most, *x);
            }
        }
        S::as_mut_simd_f32s(&mut low[first..][..step]).0.copy_from_slice(&least);
        S::as_mut_simd_f32s(&mut high[first..][..step]).0.copy_from_slice(&most);
    }
    for channel in whole..dim {
        let values = || rows[channel..].iter().step_by(dim).copied();
        low[channel] = values().fold(f32::INFINITY, |m, x| if x < m { x } else { m });
        high[channel] = values().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m });
    }
    let any = low.iter().chain(high.iter()).fold(false, |any, x| any | (*x == 0.0));
    if any {
        for (channel, (low, high)) in low.iter_mut().zip(high).enumerate() {
            if *low == 0.0 || *high == 0.0 {
                sign_zeros(rows[channel..].iter().step_by(dim), low, high);
            }
        }
    }
}

/// The largest magnitude of each group over `rows`.
#[inline(always)]
pub(super) fn largest_magnitudes(rows: &[f32], dim: usize, span: usize, largest: &mut [f32]) {
    largest.fill(0.0);
    for row in rows.chunks_exact(dim) {
        if span == 1 {
            for (x, largest) in row.iter().zip(largest.iter_mut()) {
                *largest = largest.max(x.abs());
            }
            continue;
        }
        for (part, largest) in row.chunks(span).zip(largest.iter_mut()) {
            let most =
                fold_values::<LANES>(
                    part,
                    |a, b| if a.abs() > b.abs() { a.abs() } else { b.abs() },
                );
            *largest = largest.max(most.abs());
        }
    }
}

/// One of all values, by a choice between two; which of equal ones is not said.
#[inline(always)]
fn fold_values<const W: usize>(values: &[f32], choose: impl Fn(f32, f32) -> f32) -> f32 {
    let (chunks, rest) = values.as_chunks::<W>();
    let Some((first, chunks)) = chunks.split_first() else {
        return rest.iter().copied().reduce(choose).unwrap_or(0.0);
    };
    let mut lanes = *first;
    for chunk in chunks {
        for lane in 0..W {
            lanes[lane] = choose(chunk[lane], lanes[lane]);
        }
    }
    let mut half = W / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] = choose(lanes[lane], lanes[lane + half]);
        }
        half /= 2;
    }
    let mut found = lanes[0];
    for x in rest {
        found = choose(*x, found);
    }
    found
}

/// The bits of the f16 nearest to `x`, ties to even; not for NaN.
#[inline(always)]
fn bits_of(x: f32) -> u32 {
    let sign = x.to_bits() >> 16 & SIGN_BIT;
    let magnitude = x.to_bits() & !(1 << 31);
    // Where an f32 is half, its last bit is the smallest f16.
    let half = 0.5f32.to_bits();
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(half);
    let rounded = magnitude.wrapping_add(0xFFF + (magnitude >> 13 & 1));
    let normal = (rounded.wrapping_sub(BIAS_BITS) >> 13).min(INFINITY_BITS);
    sign | if magnitude < NORMAL_BITS { small } else { normal }
}

#[inline(always)]
fn value_of(bits: u32) -> f32 {
    const SMALLEST: f32 = 1.0 / (1u32 << 24) as f32;
    let magnitude = bits & !SIGN_BIT;
    let small = magnitude.cast_signed() as f32 * SMALLEST;
    let normal = f32::from_bits((magnitude << 13).wrapping_add(BIAS_BITS));
    let finite = if magnitude < 1 << 10 { small } else { normal };
    let value = if magnitude < INFINITY_BITS { finite } else { f32::INFINITY };
    f32::from_bits(value.to_bits() | (bits & SIGN_BIT) << 16)
}

/// The largest f16 that is not above `x` (finite).
#[inline(always)]
pub(super) fn f16_at_most(x: f32) -> f32 {
    let near = bits_of(x);
    // One step down; zero has two encodings.
    let below = if near & SIGN_BIT == 0 { near.wrapping_sub(1) } else { near + 1 };
    let below = if near & !SIGN_BIT == 0 { SIGN_BIT + 1 } else { below };
    let value = value_of(near);
    if value <= x { value } else { value_of(below) }
}

/// The smallest f16 that is not below `x`.
#[inline(always)]
pub(super) fn f16_at_least(x: f32) -> f32 {
    // Adding zero turns -0 into 0.
    -f16_at_most(-x) + 0.0
}

/// Appends values that f16 holds exactly.
#[inline(always)]
pub(super) fn append_f16(values: &[f32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + 2 * values.len(), 0);
    for (to, value) in out[start..].as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *to = (bits_of(*value) as u16).to_le_bytes();
    }
}

/// Appends minima and steps that f16 holds exactly: of each scale row all of `pairs` minima, then
/// all steps. All are narrowed first, since a row has too few for a register.
#[inline(always)]
pub(super) fn append_pairs(minima: &[f32], steps: &[f32], pairs: usize, out: &mut Vec<u8>) {
    let [mut low, mut high] = [(); 2].map(|()| vec![0u16; minima.len()]);
    for (to, value) in low.iter_mut().zip(minima) {
        *to = bits_of(*value) as u16;
    }
    for (to, value) in high.iter_mut().zip(steps) {
        *to = bits_of(*value) as u16;
    }
    let start = out.len();
    out.resize(start + 4 * minima.len(), 0);
    let to = &mut out[start..];
    // Lets the compiler know how many there are in a row of usual groups.
    match pairs {
        1 => in_turns::<1>(&low, &high, to),
        2 => in_turns::<2>(&low, &high, to),
        4 => in_turns::<4>(&low, &high, to),
        _ => {
            let rows = low.chunks_exact(pairs).zip(high.chunks_exact(pairs));
            for (to, (low, high)) in to.chunks_exact_mut(4 * pairs).zip(rows) {
                let (to_low, to_high) = to.split_at_mut(2 * pairs);
                for (to, bits) in [(to_low, low), (to_high, high)] {
                    for (to, bits) in to.as_chunks_mut::<2>().0.iter_mut().zip(bits) {
                        *to = bits.to_le_bytes();
                    }
                }
            }
        }
    }
}

/// Rows of `P` of the first, then `P` of the second.
#[inline(always)]
fn in_turns<const P: usize>(low: &[u16], high: &[u16], to: &mut [u8]) {
    let rows = low.as_chunks::<P>().0.iter().zip(high.as_chunks::<P>().0);
    let to = to.as_chunks_mut::<2>().0.as_chunks_mut::<P>().0.as_chunks_mut::<2>().0;
    for (to, (low, high)) in to.iter_mut().zip(rows) {
        *to = [low.map(u16::to_le_bytes), high.map(u16::to_le_bytes)];
    }
}

/// A step's reciprocal; a step of zero has a single code.
#[inline(always)]
pub(super) fn step_reciprocal(step: f32) -> f32 {
    if step > 0.0 { step.recip() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{dispatch_simd, each_width};
    use half::f16;
    use proptest::prelude::*;
    use pulp::WithSimd;

    /// The bits of minima and maxima.
    struct Extremes<'a> {
        rows: &'a [f32],
        dim: usize,
        span: usize,
    }

    impl WithSimd for Extremes<'_> {
        type Output = [Vec<u32>; 2];

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let Self { rows, dim, span } = self;
            let [mut low, mut high] = [(); 2].map(|()| vec![0f32; dim.div_ceil(span)]);
            group_extremes(simd, GroupedRows { rows, dim, span }, &mut low, &mut high);
            [low, high].map(|values| values.into_iter().map(f32::to_bits).collect())
        }
    }

    proptest! {
        #[test]
        fn directed_rounding_brackets(x in -70000f32..70000.0, tiny in -1e-6f32..1e-6) {
            for x in [x, tiny] {
                let (low, high) = (f16_at_most(x), f16_at_least(x));
                prop_assert!(low <= x && x <= high);
                let ulp = (x.abs() / 1024.0).max(6.0e-8);
                prop_assert!(high - low <= ulp || high.is_infinite() || low.is_infinite());
            }
        }

        #[test]
        fn extremes_are_the_first_of_the_least_and_of_the_most(
            values in proptest::collection::vec(
                prop_oneof![Just(0.0f32), Just(-0.0), -1f32..1.0], 3 * 40),
            span in prop_oneof![Just(1usize), Just(5), Just(8), Just(20), Just(40)],
            sign in prop_oneof![Just(1f32), Just(-1.0)],
            one_sided in any::<bool>(),
        ) {
            let turned = |x: &f32| if one_sided && *x != 0.0 { sign * x.abs() } else { *x };
            let rows: Vec<f32> = values.iter().map(turned).collect();
            let pairs = 40usize.div_ceil(span);
            let mut most = vec![0f32; pairs];
            let [low, high] = each_width(|| dispatch_simd(Extremes { rows: &rows, dim: 40, span }))
                .map(|bits| bits.into_iter().map(f32::from_bits).collect::<Vec<_>>());
            largest_magnitudes(&rows, 40, span, &mut most);
            for pair in 0..pairs {
                let of_pair = || rows.iter().enumerate().filter(|(i, _)| i % 40 / span == pair);
                let of_pair = || of_pair().map(|(_, x)| *x);
                let least = of_pair().fold(f32::INFINITY, |m, x| if x < m { x } else { m });
                let top = of_pair().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m });
                prop_assert_eq!(low[pair].to_bits(), least.to_bits());
                prop_assert_eq!(high[pair].to_bits(), top.to_bits());
                prop_assert_eq!(most[pair], least.abs().max(top.abs()));
            }
            if span % 8 == 0 {
                let rows = &rows[..rows.len() / span * span];
                let [mut low, mut high] = [(); 2].map(|()| vec![0f32; rows.len() / span]);
                run_extremes(rows, span, &mut low, &mut high);
                for (group, values) in rows.chunks(span).enumerate() {
                    let values = || values.iter().copied();
                    let least = values().fold(f32::INFINITY, |m, x| if x < m { x } else { m });
                    let top = values().fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m });
                    prop_assert_eq!(low[group].to_bits(), least.to_bits());
                    prop_assert_eq!(high[group].to_bits(), top.to_bits());
                }
            }
        }
    }

    #[test]
    fn every_f16_and_what_lies_between_is_rounded_as_the_library_does() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            if half.is_nan() {
                continue;
            }
            let value = half.to_f32();
            assert_eq!(value_of(bits.into()).to_bits(), value.to_bits());
            for near in [value, value.next_up(), value.next_down(), value * 1.000_3, value * 1.4] {
                if !near.is_nan() {
                    assert_eq!(bits_of(near) as u16, f16::from_f32(near).to_bits(), "{near}");
                }
            }
        }
    }

    #[test]
    fn directed_rounding_at_the_edges() {
        assert_eq!(f16_at_most(65504.0), 65504.0);
        assert_eq!(f16_at_most(70000.0), 65504.0);
        assert_eq!(f16_at_least(70000.0), f32::INFINITY);
        assert_eq!(f16_at_most(-1e-12), -2f32.powi(-24));
        assert_eq!(f16_at_least(0.0).to_bits(), 0);
    }
}
