//! The two inner products of attention, compiled once per instruction set and chosen at start.
//!
//! The bodies are plain Rust; a `#[target_feature]` wrapper lets the compiler use wider
//! registers and fused multiply-add for the same loop.
#![allow(unsafe_code)] // Only to call a wrapper after its feature was detected.

/// Instruction set in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Simd {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Simd {
    /// The widest this machine has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Every level this machine can run, for tests.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        let mut levels = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                levels.push(Self::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                levels.push(Self::Avx512);
            }
        }
        levels
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
        }
    }

    /// `scores[t] = q · rows[t]` for row-major `rows` of `q.len()` channels.
    pub(crate) fn scores(self, q: &[f32], rows: &[f32], scores: &mut [f32]) {
        assert_eq!(rows.len(), q.len() * scores.len(), "scores: rows");
        match self {
            Self::Portable => scores_body::<false>(q, rows, scores),
            // SAFETY: `detect` and `available` return this level only where the CPU has it.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { scores_avx2(q, rows, scores) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { scores_avx512(q, rows, scores) },
        }
    }

    /// `acc += Σ weights[t] · rows[t]` for row-major `rows` of `acc.len()` channels.
    pub(crate) fn accumulate(self, weights: &[f32], rows: &[f32], acc: &mut [f32]) {
        assert_eq!(rows.len(), acc.len() * weights.len(), "accumulate: rows");
        match self {
            Self::Portable => accumulate_body::<false>(weights, rows, acc),
            // SAFETY: `detect` and `available` return this level only where the CPU has it.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { accumulate_avx2(weights, rows, acc) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { accumulate_avx512(weights, rows, acc) },
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn scores_avx2(q: &[f32], rows: &[f32], scores: &mut [f32]) {
    scores_body::<true>(q, rows, scores);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn scores_avx512(q: &[f32], rows: &[f32], scores: &mut [f32]) {
    scores_body::<true>(q, rows, scores);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn accumulate_avx2(weights: &[f32], rows: &[f32], acc: &mut [f32]) {
    accumulate_body::<true>(weights, rows, acc);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx2,fma")]
fn accumulate_avx512(weights: &[f32], rows: &[f32], acc: &mut [f32]) {
    accumulate_body::<true>(weights, rows, acc);
}

/// Channels in flight: four AVX2 or two AVX-512 registers hide the latency of the additions.
const LANES: usize = 32;

#[inline(always)]
fn multiply_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    // Without the instruction `mul_add` is a library call.
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn scores_body<const FMA: bool>(q: &[f32], rows: &[f32], scores: &mut [f32]) {
    for (score, row) in scores.iter_mut().zip(rows.chunks_exact(q.len())) {
        let mut lanes = [0f32; LANES];
        let (q_chunks, q_tail) = q.as_chunks::<LANES>();
        let (row_chunks, row_tail) = row.as_chunks::<LANES>();
        for (a, b) in q_chunks.iter().zip(row_chunks) {
            for i in 0..LANES {
                lanes[i] = multiply_add::<FMA>(a[i], b[i], lanes[i]);
            }
        }
        let mut tail = 0f32;
        for (a, b) in q_tail.iter().zip(row_tail) {
            tail = multiply_add::<FMA>(*a, *b, tail);
        }
        // Halving keeps the order of additions fixed, whatever the register width.
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        *score = lanes[0] + tail;
    }
}

#[inline(always)]
fn accumulate_body<const FMA: bool>(weights: &[f32], rows: &[f32], acc: &mut [f32]) {
    let dim = acc.len();
    let (chunks, tail) = acc.as_chunks_mut::<LANES>();
    let tail_start = dim - tail.len();
    for (c, chunk) in chunks.iter_mut().enumerate() {
        let mut sum = *chunk;
        for (weight, row) in weights.iter().zip(rows.chunks_exact(dim)) {
            let values: &[f32; LANES] =
                row[c * LANES..][..LANES].try_into().expect("a chunk of LANES");
            for i in 0..LANES {
                sum[i] = multiply_add::<FMA>(*weight, values[i], sum[i]);
            }
        }
        *chunk = sum;
    }
    for (i, value) in tail.iter_mut().enumerate() {
        for (weight, row) in weights.iter().zip(rows.chunks_exact(dim)) {
            *value = multiply_add::<FMA>(*weight, row[tail_start + i], *value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_level_equals_f64(
            dim in 1usize..150,
            tokens in 1usize..9,
            seed in any::<u32>(),
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(state >> 8) / f64::from(1 << 23) - 1.0
            };
            let q: Vec<f32> = (0..dim).map(|_| next() as f32).collect();
            let rows: Vec<f32> = (0..dim * tokens).map(|_| next() as f32).collect();
            let weights: Vec<f32> = (0..tokens).map(|_| next() as f32).collect();
            for level in Simd::available() {
                let mut scores = vec![0f32; tokens];
                level.scores(&q, &rows, &mut scores);
                for (t, score) in scores.iter().enumerate() {
                    let exact: f64 =
                        (0..dim).map(|i| f64::from(q[i]) * f64::from(rows[t * dim + i])).sum();
                    prop_assert!((f64::from(*score) - exact).abs() < 1e-5 * dim as f64);
                }
                let mut acc = vec![0.5f32; dim];
                level.accumulate(&weights, &rows, &mut acc);
                for (i, value) in acc.iter().enumerate() {
                    let exact: f64 = 0.5 + (0..tokens)
                        .map(|t| f64::from(weights[t]) * f64::from(rows[t * dim + i]))
                        .sum::<f64>();
                    prop_assert!((f64::from(*value) - exact).abs() < 1e-5 * tokens as f64);
                }
            }
        }
    }
}
