//! Float pages: rows as they are in a dtype, or FP8 e4m3 with one power-of-two scale per page.
//!
//! Payload of a dtype page: the rows, row-major. Payload of an FP8 page: the scale as f32, then
//! one byte per coefficient.

use super::bind::{HeadBinder, SideBinding};
use super::codes::{CodeLoop, CodeSink, MeasuredRows, append_codes};
use super::registry::{QuantizerSpec, share_quantizer};
use super::stored::StoredLayout;
use super::uniform::ScaleRow;
use super::{CodeShape, HeadQuantizer, PageScales, PayloadRows, Unquantizable};
use crate::page::id;
use crate::parse::{ParseResult, QuantizerWord, SpecCursor};
use crate::row_block::RowBlock;
use crate::simd::dispatch_simd;
use crate::{CodecError, FloatFormat, PageBytes};
use kvd_core::{DType, Geometry, Side};
use pulp::{Simd, WithSimd};
use std::fmt;

/// Largest finite e4m3 value.
const E4M3_MAX: f32 = 448.0;
/// Bytes of an FP8 page's scale.
pub(crate) const E4M3_SCALE_BYTES: usize = 4;

/// Largest finite value of a dtype.
pub(crate) fn largest_finite(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => f32::MAX,
        DType::F16 => half::f16::MAX.to_f32(),
        DType::BF16 => half::bf16::MAX.to_f32(),
    }
}

/// Whether no magnitude is over `limit`, and no value NaN. Looks at all of them: a loop that may
/// end early would be one value at a time.
pub(crate) fn all_within(rows: &[f32], limit: f32) -> bool {
    largest_within(rows, limit).is_some()
}

/// The largest magnitude, if none is over `limit` and no value NaN.
pub(crate) fn largest_within(rows: &[f32], limit: f32) -> Option<f32> {
    // On the bits of a magnitude, order is that of integers, with infinity and NaN at the top.
    let most = dispatch_simd(LargestMagnitude { rows });
    (most <= limit.to_bits()).then_some(f32::from_bits(most))
}

/// The bits of the largest magnitude.
struct LargestMagnitude<'a> {
    rows: &'a [f32],
}

impl WithSimd for LargestMagnitude<'_> {
    type Output = u32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> u32 {
        let (registers, rest) = S::as_simd_u32s(bytemuck::cast_slice(self.rows));
        let (fours, few) = registers.as_chunks::<4>();
        let magnitude = simd.splat_u32s(!(1 << 31));
        let mut most = [simd.splat_u32s(0); 4];
        for four in fours {
            for (most, bits) in most.iter_mut().zip(four) {
                *most = simd.max_u32s(*most, simd.and_u32s(*bits, magnitude));
            }
        }
        for bits in few {
            most[0] = simd.max_u32s(most[0], simd.and_u32s(*bits, magnitude));
        }
        let rest = rest.iter().map(|bits| bits & !(1 << 31));
        let lanes: &[u32] = bytemuck::cast_slice(&most);
        lanes.iter().copied().chain(rest).max().unwrap_or(0)
    }
}

/// Appends `rows` in `dtype`.
pub(crate) fn encode_rows(
    dtype: DType,
    rows: &[f32],
    out: &mut Vec<u8>,
) -> Result<(), Unquantizable> {
    if !all_within(rows, largest_finite(dtype)) {
        return Err(Unquantizable);
    }
    let start = out.len();
    out.resize(start + rows.len() * dtype.size_bytes(), 0);
    dtype.narrow_values(rows, &mut out[start..]);
    Ok(())
}

/// The largest magnitude of `rows`. A transform's sum may have overflowed to infinity, and the
/// difference of two infinities is NaN: neither has a code.
pub(crate) fn largest_magnitude(rows: &[f32]) -> Result<f32, Unquantizable> {
    let top = f32::from_bits(dispatch_simd(LargestMagnitude { rows }));
    if top.is_finite() { Ok(top) } else { Err(Unquantizable) }
}

impl QuantizerSpec for FloatFormat {
    fn spec_names() -> &'static [&'static str] {
        &["raw", "f32", "f16", "bf16", "fp8"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        match word.name {
            "raw" => Ok(Self::Native),
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::BF16),
            "fp8" => Ok(Self::E4M3),
            name => cursor.fail_at(word.start, format!("{name:?} is no float format")),
        }
    }

    fn page_id(&self, native: DType) -> u8 {
        self.stored_dtype(native).map_or(id::E4M3, id::float_id)
    }

    fn code_count(&self) -> Option<u32> {
        (*self == Self::E4M3).then_some(256)
    }

    fn scale_bytes(&self, _tokens: usize, _dim: usize) -> usize {
        if *self == Self::E4M3 { E4M3_SCALE_BYTES } else { 0 }
    }

    fn code_bytes(&self, geometry: &Geometry, side: Side) -> usize {
        let values = geometry.block_tokens as usize * geometry.head_dim(side);
        values * self.stored_dtype(geometry.dtype).map_or(1, DType::size_bytes)
    }

    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        Ok(match self.stored_dtype(side.geometry.dtype) {
            Some(dtype) => share_quantizer(FloatRows(dtype)),
            None => share_quantizer(E4m3),
        })
    }
}

impl fmt::Display for FloatFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "raw",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::E4M3 => "fp8",
        })
    }
}

/// Rows in a dtype, no codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatRows(pub(crate) DType);

impl HeadQuantizer for FloatRows {
    fn page_id(&self) -> u8 {
        id::float_id(self.0)
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::Float(self.0)
    }

    fn code_bytes(&self, _side: Side, tokens: usize, dim: usize) -> usize {
        tokens * dim * self.0.size_bytes()
    }

    fn append_payload(
        &self,
        rows: PayloadRows<'_>,
        _symbols: &mut Vec<u16>,
        out: &mut Vec<u8>,
    ) -> Option<Result<PageBytes, Unquantizable>> {
        let codes = (rows.block.rows.len() * self.0.size_bytes()) as u64;
        let written = encode_rows(self.0, rows.block.rows, out);
        Some(written.map(|()| PageBytes { codes, ..PageBytes::default() }))
    }
}

/// FP8 codes under a scale per page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct E4m3;

impl HeadQuantizer for E4m3 {
    fn page_id(&self) -> u8 {
        id::E4M3
    }

    fn stored_layout(&self) -> StoredLayout<'_> {
        StoredLayout::E4m3
    }

    fn code_shape(&self, dim: usize) -> CodeShape {
        CodeShape { per_row: dim, bits: 8 }
    }

    fn scale_bytes(&self, _tokens: usize, _dim: usize) -> usize {
        E4M3_SCALE_BYTES
    }

    fn quantize_rows(
        &self,
        block: RowBlock<'_>,
        symbols: &mut Vec<u16>,
        scales: &mut Vec<u8>,
    ) -> Result<(), Unquantizable> {
        append_codes(self, block, symbols, scales)
    }

    fn dequantize_row(
        &self,
        scales: PageScales<'_>,
        _row: usize,
        symbols: &[u16],
        _loaded: &mut ScaleRow,
        out: &mut [f32],
    ) {
        decode_e4m3(scales.bytes, symbols, out);
    }
}

impl CodeLoop for E4m3 {
    #[inline(always)]
    fn quantize_within<S: Simd>(
        &self,
        _: S,
        rows: MeasuredRows<'_>,
        into: CodeSink<'_>,
    ) -> Result<(), Unquantizable> {
        let MeasuredRows { block, absmax } = rows;
        // Rounding to 3 mantissa bits adds up to 1/16, which must stay finite.
        if !(absmax * 1.0625).is_finite() {
            return Err(Unquantizable);
        }
        let scale = power_of_two_scale(absmax);
        let inverse = scale.recip();
        for (symbol, x) in into.symbols.iter_mut().zip(block.rows) {
            *symbol = e4m3_from_f32(x * inverse).into();
        }
        into.scales.extend(scale.to_le_bytes());
        Ok(())
    }
}

/// Writes the values of FP8 codes under a page's scale.
pub(crate) fn decode_e4m3(scales: &[u8], symbols: &[u16], out: &mut [f32]) {
    let scale = scales.first_chunk::<4>().map_or(0.0, |bytes| f32::from_le_bytes(*bytes));
    for (out, symbol) in out.iter_mut().zip(symbols) {
        *out = E4M3_VALUES[usize::from(*symbol & 0xFF)] * scale;
    }
}

/// The smallest power of two that brings `absmax` to at most 448; 1 for a page of zeros.
fn power_of_two_scale(absmax: f32) -> f32 {
    if absmax == 0.0 {
        return 1.0;
    }
    // Both bounds keep the scale and its reciprocal normal, so both products are exact.
    let mut scale = 2f32.powi(-120);
    while absmax > scale * E4M3_MAX {
        scale *= 2.0;
    }
    scale
}

/// The value of an e4m3 code (OCP FP8: bias 7, no infinity, 0x7F and 0xFF are NaN).
const fn e4m3_to_f32(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let exponent = (code >> 3 & 15) as u32;
    let mantissa = (code & 7) as f32;
    match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa / 512.0,
        // (8 + m) * 2^(e - 10), with e - 10 + 127 as the bits of an f32 exponent.
        _ => sign * (8.0 + mantissa) * f32::from_bits((exponent + 117) << 23),
    }
}

/// Every code's value.
static E4M3_VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = e4m3_to_f32(code as u8);
        code += 1;
    }
    values
};

/// The nearest e4m3 code, ties to even; saturates at 448.
#[inline(always)]
pub(crate) fn e4m3_from_f32(x: f32) -> u8 {
    let sign = x.to_bits() >> 24 & 0x80;
    let magnitude = if x.abs() < E4M3_MAX { x.abs() } else { E4M3_MAX };
    let bits = magnitude.to_bits();
    // Subnormal: multiples of 2^-9. Adding 2^14 leaves exactly those in an f32 mantissa.
    let small = (magnitude + 16384.0).to_bits() - 16384f32.to_bits();
    // Round the mantissa to 3 bits in place; a carry moves into the exponent as it should.
    let rounded = bits + 0x7_FFFF + (bits >> 20 & 1);
    let normal = (rounded >> 20).wrapping_sub((127 - 7) << 3);
    let code = if bits < (127 - 6) << 23 { small } else { normal };
    (sign | code) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes of finite, non-negative values in ascending order.
    fn ladder() -> Vec<(u8, f32)> {
        (0..0x7F).map(|code| (code, e4m3_to_f32(code))).collect()
    }

    #[test]
    fn every_code_is_its_own_nearest() {
        let ladder = ladder();
        assert_eq!(ladder[0x7E].1, 448.0);
        assert_eq!(ladder[1].1, 2f32.powi(-9));
        assert!(ladder.windows(2).all(|w| w[0].1 < w[1].1));
        for (code, value) in ladder {
            assert_eq!(e4m3_from_f32(value), code);
            assert_eq!(e4m3_from_f32(-value), code | 0x80);
        }
    }

    #[test]
    fn rounding_is_to_the_nearest_even_everywhere() {
        for pair in ladder().windows(2) {
            let ((low, a), (high, b)) = (pair[0], pair[1]);
            let middle = (a + b) / 2.0;
            let even = if low % 2 == 0 { low } else { high };
            assert_eq!(e4m3_from_f32(middle), even, "between {a} and {b}");
            assert_eq!(e4m3_from_f32(middle.next_down()), low, "below {middle}");
            assert_eq!(e4m3_from_f32(middle.next_up()), high, "above {middle}");
        }
        assert_eq!(e4m3_from_f32(1e30), 0x7E);
        assert_eq!(e4m3_from_f32(f32::MIN_POSITIVE / 8.0), 0);
    }

    #[test]
    fn every_f32_with_a_short_mantissa_matches_a_search() {
        let ladder = ladder();
        for top in 0..0x7F80u32 {
            let x = f32::from_bits(top << 16);
            let nearest = ladder
                .iter()
                .min_by(|l, r| {
                    // Everything above saturates; f64 would lose the difference.
                    let distance = |to: f32| (to - x.min(448.0)).abs();
                    let (dl, dr) = (distance(l.1), distance(r.1));
                    dl.total_cmp(&dr).then((l.0 % 2).cmp(&(r.0 % 2)))
                })
                .unwrap();
            assert_eq!(e4m3_from_f32(x), nearest.0, "{x}");
        }
    }

    #[test]
    fn what_is_not_finite_has_no_code() {
        assert!(matches!(largest_magnitude(&[1.0, -3.5, 0.0]), Ok(3.5)));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..3 {
                let mut rows = [1.0, 2.0, 3.0];
                rows[at] = bad;
                let (mut symbols, mut scales) = (Vec::new(), Vec::new());
                let block = RowBlock { rows: &rows, dim: 3 };
                let result = append_codes(&E4m3, block, &mut symbols, &mut scales);
                assert!(result.is_err(), "{bad} at {at}");
            }
        }
    }

    #[test]
    fn scale_is_the_smallest_that_does_not_saturate() {
        for absmax in [1e-30f32, 0.3, 448.0, 448.1, 65504.0, f32::MAX] {
            let scale = power_of_two_scale(absmax);
            assert!(absmax / scale <= 448.0);
            assert!(absmax / scale > 224.0, "{absmax}: {scale}");
        }
    }
}
