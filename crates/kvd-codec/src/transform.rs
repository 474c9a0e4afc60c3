//! Linear maps between rows and coefficients, applied in place.
//!
//! A key `k` becomes `c = T k`; the query becomes `q' = T⁻ᵀ q`, so `q'·c = q·k` (VecInfer eq. 7).
//! A value `v` becomes `c = T v`; the weighted sum of coefficients is mapped back once by `T⁻¹`.

/// One step of a side's transform, bound to a head.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// `c_i = x_i / factor_i`.
    Scale { factors: Vec<f32>, inverse: Vec<f32> },
    /// Orthonormal Hadamard rotation of consecutive blocks: its own inverse and transpose.
    Hadamard { block: usize },
}

impl Step {
    pub(crate) fn scale(factors: Vec<f32>) -> Self {
        let inverse = factors.iter().map(|f| 1.0 / f).collect();
        Self::Scale { factors, inverse }
    }

    /// A rotation for `dim` channels: blocks of the largest power of two that divides it.
    pub(crate) fn hadamard(dim: usize) -> Self {
        Self::Hadamard { block: 1 << dim.trailing_zeros() }
    }

    /// Bytes kept from a calibration: one f32 factor per channel.
    pub(crate) fn calibration_bytes(&self) -> u64 {
        match self {
            Self::Scale { factors, .. } => 4 * factors.len() as u64,
            Self::Hadamard { .. } => 0,
        }
    }

    /// `T x`.
    pub(crate) fn forward(&self, x: &mut [f32]) {
        match self {
            Self::Scale { inverse, .. } => multiply(x, inverse),
            Self::Hadamard { block } => hadamard(x, *block),
        }
    }

    /// `T⁻¹ c`.
    pub(crate) fn inverse(&self, c: &mut [f32]) {
        match self {
            Self::Scale { factors, .. } => multiply(c, factors),
            Self::Hadamard { block } => hadamard(c, *block),
        }
    }

    /// `T⁻ᵀ q`. For both steps the transpose changes nothing.
    pub(crate) fn fold(&self, q: &mut [f32]) {
        self.inverse(q);
    }
}

fn multiply(x: &mut [f32], by: &[f32]) {
    for (x, by) in x.iter_mut().zip(by) {
        *x *= by;
    }
}

/// Fast Walsh-Hadamard transform of each `block` of `x`, scaled to be orthonormal.
fn hadamard(x: &mut [f32], block: usize) {
    let norm = (block as f32).sqrt().recip();
    for block in x.chunks_exact_mut(block) {
        let mut half = 1;
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        for x in block {
            *x *= norm;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hadamard_is_orthonormal_and_its_own_inverse() {
        for dim in [2, 32, 80, 96, 128, 256] {
            let step = Step::hadamard(dim);
            for hot in 0..dim {
                let mut x = vec![0.0; dim];
                x[hot] = 1.0;
                step.forward(&mut x);
                let energy: f32 = x.iter().map(|v| v * v).sum();
                assert!((energy - 1.0).abs() < 1e-5, "dim {dim}: energy {energy}");
                step.inverse(&mut x);
                for (i, v) in x.iter().enumerate() {
                    assert!((v - f32::from(u8::from(i == hot))).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn hadamard_of_96_is_three_blocks_of_32() {
        let mut x = vec![0.0; 96];
        x[40] = 1.0;
        Step::hadamard(96).forward(&mut x);
        assert!(x[..32].iter().chain(&x[64..]).all(|v| *v == 0.0));
        assert!(x[32..64].iter().all(|v| (v.abs() - 32f32.sqrt().recip()).abs() < 1e-6));
    }
}
