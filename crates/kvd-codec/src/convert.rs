//! Rows as they come to f32, as wide as the machine allows.

#[cfg(target_arch = "x86_64")]
use crate::simd;
use kvd_core::DType;

/// As [`DType::widen_values`]: `bytes` are little-endian values of `dtype`, as many as `out` has.
///
/// # Panics
/// When `bytes` does not hold exactly `out.len()` values.
pub fn widen_values(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if dtype == DType::F16
        && let Some(by) = simd::of_512_bits()
    {
        assert_eq!(bytes.len(), out.len() * dtype.size_bytes(), "widen: length");
        return pulp::Simd::vectorize(by, f16::WidenF16 { by, bytes, out });
    }
    dtype.widen_values(bytes, out);
}

#[cfg(target_arch = "x86_64")]
mod f16 {
    use kvd_core::DType;
    use pulp::x86::V4;
    use pulp::{Simd, WithSimd, cast};

    /// Values of a register.
    const LANES: usize = 16;

    /// f16 by registers of 512 bits; `half` calls a function for every eight values.
    pub(super) struct WidenF16<'a> {
        pub(super) by: V4,
        pub(super) bytes: &'a [u8],
        pub(super) out: &'a mut [f32],
    }

    impl WithSimd for WidenF16<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            let (from, rest) = self.bytes.as_chunks::<{ 2 * LANES }>();
            let (to, last) = self.out.as_chunks_mut::<LANES>();
            for (to, from) in to.iter_mut().zip(from) {
                *to = cast(self.by.avx512f._mm512_cvtph_ps(cast(*from)));
            }
            DType::F16.widen_values(rest, last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widened_values_are_those_of_the_dtype() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for count in [0, 1, 15, 16, 17, 100] {
                // Every exponent, and bytes that are not aligned.
                let bytes: Vec<u8> =
                    (0..=count * dtype.size_bytes()).map(|i| (i * 41) as u8).collect();
                let [mut got, mut want] = [(); 2].map(|()| vec![0f32; count]);
                widen_values(dtype, &bytes[1..], &mut got);
                dtype.widen_values(&bytes[1..], &mut want);
                let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(got), bits(want), "{dtype}, {count} values");
            }
        }
    }
}
