//! Scales of pages whose groups choose their mode: zero points, steps and signs, apart; and codes
//! with their signs as bytes.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_dots;
#[cfg(target_arch = "aarch64")]
pub(super) mod neon;

use crate::cpu::int_dot::{BIAS, TileCodes};
use crate::cpu::int_operands::IntRows;
use crate::cpu::row_block::StridedRows;
use crate::cpu::simd::{InstructionSet, Simd, per_level};
use crate::cpu::span_scores::TILE;
use kvd_codec::HybridLayout;
use kvd_core::DType;

/// Codes along the summed axis that lie side by side.
pub(super) const QUAD: usize = 4;

/// Groups of a tile, `[scale rows, groups of a row]` or turned.
#[derive(Default)]
pub(super) struct HybridScales {
    /// Zero points; 0 where levels stand around zero.
    pub(super) zeros: Vec<f32>,
    pub(super) steps: Vec<f32>,
    /// The steps where codes are not negative, else 0: what the code in the middle is worth.
    pub(super) centres: Vec<f32>,
    /// A bit per value, set for negative ones.
    pub(super) signs: Vec<u32>,
    /// As they lie: f16 steps, zero points or signs, and all ones for groups around zero.
    halves: Vec<u8>,
    words: Vec<u32>,
    modes: Vec<u32>,
    turned: Vec<u32>,
}

/// Some scale rows of a page.
#[derive(Clone, Copy)]
pub(super) struct ScaleRows<'a> {
    pub(super) bytes: &'a [u8],
    /// Its words have four bytes.
    pub(super) layout: HybridLayout,
    pub(super) first: usize,
    pub(super) count: usize,
    /// Groups of a row.
    pub(super) pairs: usize,
}

impl HybridScales {
    /// Loads scale rows; turned, groups come before rows.
    pub(super) fn load_rows(&mut self, simd: Simd, rows: ScaleRows<'_>, turned: bool) {
        let count = rows.count * rows.pairs;
        self.halves.resize(2 * count, 0);
        for words in [&mut self.words, &mut self.modes, &mut self.turned, &mut self.signs] {
            words.resize(count, 0);
        }
        for values in [&mut self.zeros, &mut self.steps, &mut self.centres] {
            values.resize(count, 0.0);
        }
        #[cfg(target_arch = "x86_64")]
        if avx512::load_scales(simd, self, rows, turned) {
            return;
        }
        read_scales(simd, self, rows);
        DType::F16.widen_values(&self.halves, &mut self.steps);
        select_modes(simd, self, if turned { rows.pairs } else { 1 });
    }
}

per_level!(fn read_scales(groups: &mut HybridScales, rows: ScaleRows<'_>) = read_scales_body);

/// Copies words and steps, and spreads the mask.
#[inline(always)]
fn read_scales_body(groups: &mut HybridScales, rows: ScaleRows<'_>) {
    // With a number that the compiler knows a row is one register.
    match rows.pairs {
        4 => copy_scales(groups, rows, 4),
        pairs => copy_scales(groups, rows, pairs),
    }
    let (first, modes) = (rows.first * rows.pairs, &mut groups.modes[..]);
    if first.is_multiple_of(8) && modes.len().is_multiple_of(8) {
        let bytes = &rows.bytes[first / 8..][..modes.len() / 8];
        for (modes, byte) in modes.as_chunks_mut::<8>().0.iter_mut().zip(bytes) {
            for (bit, mode) in modes.iter_mut().enumerate() {
                *mode = 0u32.wrapping_sub(u32::from(*byte) >> bit & 1);
            }
        }
        return;
    }
    for (group, mode) in (first..).zip(modes) {
        *mode = 0u32.wrapping_sub(u32::from(rows.bytes[group / 8] >> (group % 8) & 1));
    }
}

#[inline(always)]
fn copy_scales(groups: &mut HybridScales, rows: ScaleRows<'_>, pairs: usize) {
    let ScaleRows { bytes, layout, first, .. } = rows;
    let bytes = &bytes[layout.mask_bytes + first * layout.row_bytes..];
    let outs = groups.words.chunks_exact_mut(pairs).zip(groups.halves.chunks_exact_mut(2 * pairs));
    for ((words, halves), row) in outs.zip(bytes.chunks_exact(layout.row_bytes)) {
        let (from, steps) = row.split_at(4 * pairs);
        for (word, from) in words.iter_mut().zip(from.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*from);
        }
        for (half, from) in halves.as_chunks_mut::<2>().0.iter_mut().zip(steps.as_chunks::<2>().0) {
            *half = *from;
        }
    }
}

per_level!(fn select_modes(groups: &mut HybridScales, pairs: usize) = select_modes_body);

/// Makes zero points and signs of words; rows of several `pairs` are turned before.
#[inline(always)]
fn select_modes_body(groups: &mut HybridScales, pairs: usize) {
    let HybridScales { zeros, steps, centres, signs, words, modes, turned, .. } = groups;
    if pairs > 1 {
        transpose_words(words, pairs, turned);
        std::mem::swap(words, turned);
        transpose_words(modes, pairs, turned);
        std::mem::swap(modes, turned);
        steps.iter().zip(&mut signs[..]).for_each(|(step, bits)| *bits = step.to_bits());
        transpose_words(signs, pairs, turned);
        steps.iter_mut().zip(&*turned).for_each(|(step, bits)| *step = f32::from_bits(*bits));
    }
    let levels = zeros.iter_mut().zip(centres.iter_mut()).zip(signs.iter_mut());
    for (((zero, centre), sign), ((word, mode), step)) in
        levels.zip(words.iter().zip(&*modes).zip(&*steps))
    {
        *zero = f32::from_bits(word & !mode);
        *centre = f32::from_bits(step.to_bits() & !mode);
        *sign = word & mode;
    }
}

/// Turns `[rows, pairs]` into `[pairs, rows]`.
#[inline(always)]
fn transpose_words(values: &[u32], pairs: usize, out: &mut [u32]) {
    let rows = values.len() / pairs;
    if pairs == 4 {
        // Loads of whole registers and shuffles.
        let (low, high) = out.split_at_mut(2 * rows);
        let ((a, b), (c, d)) = (low.split_at_mut(rows), high.split_at_mut(rows));
        let outs = a.iter_mut().zip(b).zip(c.iter_mut().zip(d));
        for (((a, b), (c, d)), row) in outs.zip(values.as_chunks::<4>().0) {
            [*a, *b, *c, *d] = *row;
        }
        return;
    }
    for (row, values) in values.chunks_exact(pairs).enumerate() {
        for (pair, value) in values.iter().enumerate() {
            out[pair * rows + row] = *value;
        }
    }
}

/// Signs of a tile's codes, whose summed axis has groups.
#[derive(Clone, Copy)]
pub(super) struct SignWords<'a> {
    /// A bit per summed code of a group, `[groups, lanes]`.
    pub(super) words: &'a [u32],
    pub(super) lanes: usize,
    /// Fours of summed codes of a group.
    pub(super) quads: usize,
}

/// A tile's codes, and their signs.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no kernel reads it"))]
#[derive(Clone, Copy)]
pub(super) struct SignedCodes<'a> {
    pub(super) codes: TileCodes<'a>,
    pub(super) signs: SignWords<'a>,
}

/// Writes a tile's codes (`[summed / 4, lanes, 4]`, below 128) as bytes of signed values plus
/// [`BIAS`].
pub(super) fn unpack_signed(
    simd: Simd,
    codes: TileCodes<'_>,
    signs: SignWords<'_>,
    out: &mut [u8],
) {
    #[cfg(target_arch = "x86_64")]
    if avx512::unpack_signed(simd, codes, signs, out) {
        return;
    }
    codes.unpack_to(simd, out);
    let groups = out.chunks_mut(QUAD * signs.quads * signs.lanes);
    groups.zip(signs.words.chunks_exact(signs.lanes)).for_each(|(codes, words)| {
        apply_signs(simd, codes, words);
    });
}

/// The factors of a group of summed codes, by row.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no kernel reads it"))]
#[derive(Clone, Copy)]
pub(super) struct GroupFactors<'a> {
    pub(super) rows: IntRows<'a>,
    /// Whether integers of one byte have no sign.
    pub(super) positive: bool,
    /// One unit of their integers.
    pub(super) units: &'a [f32],
    /// The share of a sum that comes from a centre and from a zero point of one.
    pub(super) adds: &'a [[f32; 2]],
}

/// Whether [`add_signed_dots`] has a kernel for a tile of so many groups, and `rows` are not better
/// of bytes.
pub(super) fn has_dots(simd: Simd, codes: SignedCodes<'_>, groups: usize, rows: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if simd.vector_set() == InstructionSet::Avx512 && !crate::cpu::int_dot::wants_bytes(simd, rows)
    {
        return avx512_dots::plane_quads(codes, groups).is_some();
    }
    let _ = (simd, codes, groups, rows);
    false
}

/// Adds products of a tile's codes with signs to `out`, rows of lanes so far apart: the factors of
/// each group in turn, of at most [`VECTOR_ROWS`](super::int_dot::VECTOR_ROWS) rows, times the
/// steps of its lanes. Only where there [are](has_dots) kernels.
pub(super) fn add_signed_dots<'a>(
    simd: Simd,
    codes: SignedCodes<'_>,
    groups: &HybridScales,
    factors: impl ExactSizeIterator<Item = GroupFactors<'a>>,
    out: StridedRows<'_>,
) {
    #[cfg(target_arch = "x86_64")]
    avx512_dots::add_signed_dots(simd, codes, groups, factors, out);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (simd, codes, groups, factors, out);
}

/// Makes codes (`[summed / 4, lanes, 4]`, at most [`TILE`] summed, below 128) bytes of signed
/// values plus [`BIAS`]; each lane's signs are a word of a bit per summed code.
fn apply_signs(simd: Simd, codes: &mut [u8], signs: &[u32]) {
    assert!(codes.len() <= TILE * signs.len(), "sign: more codes than signs");
    #[cfg(target_arch = "x86_64")]
    if simd.vector_set() != InstructionSet::Portable {
        return avx2::apply_signs(simd, codes.as_chunks_mut::<QUAD>().0, signs);
    }
    for (quad, codes) in codes.chunks_exact_mut(QUAD * signs.len()).enumerate() {
        let (codes, first) = (codes.as_chunks_mut::<QUAD>().0, (QUAD * quad) as u32);
        #[cfg(target_arch = "aarch64")]
        if simd.vector_set() != InstructionSet::Portable {
            neon::apply_signs(codes, signs, first);
            continue;
        }
        for (codes, signs) in codes.iter_mut().zip(signs) {
            sign_four(codes, signs >> first);
        }
    }
}

/// Four codes and their signs, the lowest bits of a word.
pub(super) fn sign_four(codes: &mut [u8; QUAD], signs: u32) {
    for (bit, code) in codes.iter_mut().enumerate() {
        let value = if signs >> bit & 1 == 1 { -i32::from(*code) } else { i32::from(*code) };
        *code = (value + BIAS) as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::int_operands::IntOperands;
    use crate::cpu::prefetch::PrefetchBytes;
    use crate::cpu::simd::{KernelConfig, Precision};

    #[test]
    fn signs_reach_their_codes() {
        for (lanes, summed, of_group) in [
            (2usize, 4usize, 4),
            (8, 20, 20),
            (32, 128, 32),
            (80, 32, 32),
            (128, 32, 32),
            (32, 80, 32),
        ] {
            let signs: Vec<u32> = (0..(lanes * summed.div_ceil(of_group)) as u32)
                .map(|i| i.wrapping_mul(2_654_435_761))
                .collect();
            for width in [1, 2, 4, 8] {
                let bytes: Vec<u8> = (0..lanes * summed * width / 8)
                    .map(|i| (i * 37 % 251) as u8 & if width == 8 { 127 } else { 255 })
                    .collect();
                let codes = TileCodes {
                    bytes: &bytes,
                    width: width as u32,
                    per_row: 1,
                    prefetch: PrefetchBytes::default(),
                };
                for simd in Simd::available_levels() {
                    let mut out = vec![0; lanes * summed];
                    let quads = of_group / QUAD;
                    unpack_signed(simd, codes, SignWords { words: &signs, lanes, quads }, &mut out);
                    for (at, byte) in out.iter().enumerate() {
                        let (plane, from) = (at / bytes.len(), at % bytes.len());
                        let mask = u8::MAX >> (8 - width);
                        let code = i32::from(bytes[from] >> (plane * width) & mask);
                        let (lane, index) = (at / 4 % lanes, at / (4 * lanes) * 4 + at % 4);
                        let word = signs[index / of_group * lanes + lane];
                        let value = if word >> (index % of_group) & 1 == 1 { -code } else { code };
                        let context = format!("{simd:?} {lanes} {summed} {width} {at}");
                        assert_eq!(i32::from(*byte) - BIAS, value, "{context}");
                    }
                }
            }
        }
    }

    /// Factors of so many groups, integers of one or two bytes, of one sign or both.
    fn factors(
        precision: Precision,
        positive: bool,
        groups: usize,
        rows: usize,
        len: usize,
    ) -> Vec<IntOperands> {
        let config = KernelConfig { simd: Simd::detect_widest(), precision };
        let cut = |group: usize| {
            let mut parts = if positive {
                IntOperands::of_weights(config)
            } else {
                IntOperands::of_queries(config)
            };
            parts.clear_rows(len);
            for row in 0..rows {
                let value = |i: usize| {
                    let wave = ((i + 17 * row + 31 * group) as f32 * 0.7).sin();
                    if positive { wave.abs() } else { wave }
                };
                let values: Vec<f32> = (0..len).map(value).collect();
                parts.push(config.simd, &values, 1.0, None);
            }
            parts
        };
        (0..groups).map(cut).collect()
    }

    fn waves(count: usize) -> HybridScales {
        let of = |gain: f32| (0..count).map(|i| (i as f32 * gain).sin()).collect::<Vec<_>>();
        HybridScales {
            zeros: of(0.3),
            steps: of(0.9),
            centres: of(1.7),
            signs: (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect(),
            ..HybridScales::default()
        }
    }

    /// Compares with products of codes as bytes.
    #[test]
    fn products_with_signs_are_those_of_signed_bytes() {
        let shapes =
            [(32, 32, 4, 2), (32, 8, 6, 4), (64, 32, 1, 2), (32, 32, 4, 1), (32, 16, 2, 8)];
        let ways = [(Precision::Int8, false), (Precision::Int8, true), (Precision::Fast, true)];
        let shapes = shapes.into_iter().flat_map(|shape| ways.map(|way| (shape, way)));
        for (((lanes, len, groups, width), (precision, positive)), rows) in
            shapes.flat_map(|shape| [1, 2, 3, 4].map(|rows| (shape, rows)))
        {
            let simd = Simd::detect_widest();
            let scales = waves(groups * lanes);
            let byte = |i: usize| (i * 37 % 251) as u8 & if width == 8 { 127 } else { 255 };
            let bytes: Vec<u8> = (0..groups * len * lanes * width / 8).map(byte).collect();
            let codes = TileCodes {
                bytes: &bytes,
                width: width as u32,
                per_row: 1,
                prefetch: PrefetchBytes::default(),
            };
            let signs = SignWords { words: &scales.signs, lanes, quads: len / QUAD };
            let parts = factors(precision, positive, groups, rows, len);
            let units = [0.5, 0.25, 2.0, 1.0];
            let adds = [[0.1, 0.2], [-0.3, 1.0], [0.0, 0.5], [2.0, -1.0]];
            let each = parts.iter().map(|parts| GroupFactors {
                rows: parts.rows_from(0),
                positive,
                units: &units[..rows],
                adds: &adds[..rows],
            });
            let mut out = vec![3f32; rows * (lanes + 16)];
            if !has_dots(simd, SignedCodes { codes, signs }, groups, rows) {
                assert_ne!(
                    simd.vector_set(),
                    InstructionSet::Avx512,
                    "{lanes} {len} {groups} {width}"
                );
                return;
            }
            let to = StridedRows { values: &mut out, stride: lanes + 16 };
            add_signed_dots(simd, SignedCodes { codes, signs }, &scales, each, to);
            let mut signed = vec![0; groups * len * lanes];
            unpack_signed(simd, codes, signs, &mut signed);
            for (row, lane) in (0..rows).flat_map(|row| (0..lanes).map(move |lane| (row, lane))) {
                let group = |group: usize| {
                    let rows = parts[group].rows_from(0);
                    let term = |i: usize| {
                        let summed = group * len + i;
                        let byte = signed[(summed / QUAD * lanes + lane) * QUAD + summed % QUAD];
                        let factor = rows.value_at(simd, row, i);
                        // A byte of weights has no sign.
                        let positive = positive && rows.digits == 1;
                        let factor = if positive { factor & 255 } else { factor };
                        (i32::from(byte) - BIAS) * factor
                    };
                    let sum = (0..len).map(term).sum::<i32>() as f32;
                    let at = group * lanes + lane;
                    sum * units[row] * scales.steps[at]
                        + adds[row][0] * scales.centres[at]
                        + adds[row][1] * scales.zeros[at]
                };
                let want = 3.0 + (0..groups).map(group).sum::<f32>();
                let got = out[row * (lanes + 16) + lane];
                let context = format!("{precision:?} {positive} {lanes} {len} {groups} {width}");
                assert!(
                    (got - want).abs() <= 1e-5 * want.abs().max(1e3),
                    "{context}: {got} {want}"
                );
            }
        }
    }

    #[test]
    fn scales_are_the_same_on_every_level() {
        for (pairs, rows, first, turned) in [
            (4, 32, 32, true),
            (4, 16, 4, true),
            (3, 32, 0, true),
            (2, 32, 32, true),
            (128, 1, 3, false),
            (80, 2, 1, false),
            (40, 1, 1, false),
        ] {
            let (mask_bytes, row_bytes) = ((rows + first) * pairs / 8 + 1, 6 * pairs);
            let layout = HybridLayout { mask_bytes, word_bytes: 4, row_bytes };
            let byte = |i: usize| (i.wrapping_mul(2_654_435_761) >> 13) as u8;
            let mut bytes: Vec<u8> =
                (0..mask_bytes + (rows + first) * row_bytes).map(byte).collect();
            for row in bytes[mask_bytes..].chunks_exact_mut(row_bytes) {
                // Steps are finite and zero points no NaN.
                row[4 * pairs..].iter_mut().for_each(|byte| *byte &= 0x7B);
                row[..4 * pairs].iter_mut().skip(3).step_by(4).for_each(|byte| *byte &= 0xBF);
            }
            let rows = ScaleRows { bytes: &bytes, layout, first, count: rows, pairs };
            let load = |simd| {
                let mut groups = HybridScales::default();
                groups.load_rows(simd, rows, turned);
                let bits = [groups.zeros, groups.steps, groups.centres]
                    .map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>());
                (bits, groups.signs)
            };
            let levels = Simd::available_levels();
            let portable = load(Simd::of_set(InstructionSet::Portable).unwrap());
            for simd in levels {
                assert_eq!(load(simd), portable, "{simd:?} {pairs} {turned}");
            }
        }
    }
}
