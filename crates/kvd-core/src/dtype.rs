//! Number formats of K, V, queries and outputs on the wire and in raw windows.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt;
use std::str::FromStr;

/// A floating-point format, little-endian wherever it is bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain float: 8 exponent bits, 7 mantissa bits.
    BF16,
}

/// A dtype's name that kvd does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("dtype {0:?} is not one of f32, f16, bf16")]
pub struct DTypeError(pub String);

impl DType {
    /// Bytes per value.
    #[must_use]
    pub const fn size_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// Largest finite value.
    #[must_use]
    pub const fn largest_finite(self) -> f32 {
        match self {
            Self::F32 => f32::MAX,
            Self::F16 => f16::MAX.to_f32_const(),
            Self::BF16 => bf16::MAX.to_f32_const(),
        }
    }

    /// Name as in configuration and metric labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
        }
    }

    /// Widens little-endian `bytes` into `out`.
    ///
    /// # Panics
    /// When `bytes` does not hold exactly `out.len()` values: lengths are checked on receive.
    pub fn widen_values(self, bytes: &[u8], out: &mut [f32]) {
        assert_eq!(bytes.len(), out.len() * self.size_bytes(), "widen: length");
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Self::F16 => with_u16(bytes, |bits| {
                bytemuck::cast_slice::<u16, f16>(bits).convert_to_f32_slice(out);
            }),
            Self::BF16 => with_u16(bytes, |bits| {
                bytemuck::cast_slice::<u16, bf16>(bits).convert_to_f32_slice(out);
            }),
        }
    }

    /// Rounds `values` to this format (nearest even) as little-endian bytes. What is finite stays
    /// so: beyond [`DType::largest_finite`] it becomes that. Infinities and NaN stay what they are.
    ///
    /// # Panics
    /// When `out` does not hold exactly `values.len()` values.
    pub fn narrow_values(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), values.len() * self.size_bytes(), "narrow: length");
        match self {
            Self::F32 => {
                for (o, v) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                    *o = v.to_le_bytes();
                }
            }
            Self::F16 => {
                // By slices, which take the processor's conversion instructions.
                let (mut narrow, mut within) = ([f16::ZERO; 64], [0f32; 64]);
                for (out, values) in out.chunks_mut(2 * 64).zip(values.chunks(64)) {
                    let (narrow, within) =
                        (&mut narrow[..values.len()], &mut within[..values.len()]);
                    within.iter_mut().zip(values).for_each(|(to, v)| *to = self.saturate_value(*v));
                    narrow.convert_from_f32_slice(within);
                    for (o, v) in out.as_chunks_mut::<2>().0.iter_mut().zip(narrow) {
                        *o = v.to_le_bytes();
                    }
                }
            }
            Self::BF16 => {
                for (o, v) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
                    *o = bf16::from_f32(self.saturate_value(*v)).to_le_bytes();
                }
            }
        }
    }

    /// A finite value, brought into the range of this format; others as they are.
    #[inline]
    fn saturate_value(self, value: f32) -> f32 {
        let within = value.clamp(-self.largest_finite(), self.largest_finite());
        if value.is_infinite() { value } else { within }
    }
}

/// Views `bytes` as `u16`, copying only when they are not aligned (or the host is big-endian).
fn with_u16(bytes: &[u8], run: impl FnOnce(&[u16])) {
    match bytemuck::try_cast_slice::<u8, u16>(bytes) {
        Ok(bits) if cfg!(target_endian = "little") => run(bits),
        _ => {
            let bits: Vec<u16> =
                bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            run(&bits);
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = DTypeError;

    fn from_str(text: &str) -> Result<Self, DTypeError> {
        match text {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::BF16),
            _ => Err(DTypeError(text.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn narrowing_saturates_what_is_finite_and_keeps_what_is_not() {
        for dtype in [DType::F16, DType::BF16] {
            let largest = dtype.largest_finite();
            let mut bytes = [0; 2];
            let mut back = [0f32];
            let mut narrowed = |value: f32| {
                dtype.narrow_values(&[value], &mut bytes);
                dtype.widen_values(&bytes, &mut back);
                back[0]
            };
            // The last but one lies between the largest and where rounding reaches infinity.
            for value in [largest, largest * 1.003, f32::MAX, largest.next_up()] {
                assert_eq!(narrowed(value), largest, "{dtype}: {value}");
                assert_eq!(narrowed(-value), -largest, "{dtype}: -{value}");
            }
            for value in [f32::INFINITY, f32::NEG_INFINITY] {
                assert_eq!(narrowed(value), value, "{dtype}");
            }
            assert!(narrowed(f32::NAN).is_nan(), "{dtype}");
        }
    }

    proptest! {
        #[test]
        fn widen_after_narrow_is_the_rounded_value(
            values in proptest::collection::vec(-60000.0f32..60000.0, 0..70),
            shift in 0usize..2,
        ) {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                // `shift` makes the bytes unaligned, as slices of a message are.
                let mut bytes = vec![0u8; values.len() * dtype.size_bytes() + shift];
                dtype.narrow_values(&values, &mut bytes[shift..]);
                let mut back = vec![0f32; values.len()];
                dtype.widen_values(&bytes[shift..], &mut back);
                for (v, b) in values.iter().zip(&back) {
                    let bits = match dtype { DType::F32 => 24, DType::F16 => 11, DType::BF16 => 8 };
                    let ulp = (v.abs() * 2f32.powi(-bits)).max(6.0e-8);
                    prop_assert!((v - b).abs() <= ulp, "{dtype}: {v} became {b}");
                }
            }
        }
    }
}
