//! Instruction sets, and loops compiled once for each: the bodies are plain Rust; a
//! `#[target_feature]` wrapper lets the compiler use wider registers for the same loop.
#![allow(unsafe_code)] // Only to call a wrapper after its feature was detected.

/// Makes `$name(simd, ..)` from an `#[inline(always)]` body: the same code, compiled for each
/// instruction set.
macro_rules! per_level {
    ($vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $out:ty)? = $body:expr) => {
        $vis fn $name(simd: $crate::cpu::simd::Simd, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                $body($($arg),*)
            }
            #[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "after detection"))]
            match simd.set() {
                // SAFETY: a `Simd` of this set exists only where the CPU has it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::InstructionSet::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::InstructionSet::Avx512 => unsafe { avx512($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
}
pub(super) use per_level;

/// Asks for the cache lines of `bytes`, to be read soon.
pub(super) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of the target, and a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Instruction sets that the CPU backend has code for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// What every processor of the target has.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL, VNNI and VBMI, as on Ice Lake and Zen 4.
    Avx512,
}

impl InstructionSet {
    /// All of them, the widest last.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Name in logs and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

/// An instruction set that this machine was found to have: only then does one exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Simd(InstructionSet);

impl Simd {
    /// The widest this machine has.
    pub(crate) fn detect() -> Self {
        Self::available().pop().expect("portable at least")
    }

    /// Every level this machine can run, the widest last.
    pub(crate) fn available() -> Vec<Self> {
        InstructionSet::ALL.into_iter().filter_map(Self::of).collect()
    }

    /// That instruction set, if the machine has it.
    pub(crate) fn of(set: InstructionSet) -> Option<Self> {
        let has = match set {
            InstructionSet::Portable => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => has_avx2() && has_avx512(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        };
        has.then_some(Self(set))
    }

    /// Which one it is.
    pub(crate) fn set(self) -> InstructionSet {
        self.0
    }

    /// `scores[t] = q · rows[t]` for row-major `rows` of `q.len()` channels.
    pub(crate) fn scores(self, q: &[f32], rows: &[f32], scores: &mut [f32]) {
        assert_eq!(rows.len(), q.len() * scores.len(), "scores: rows");
        match self.0 {
            // SAFETY: `of` gave this level only where the CPU has it.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { scores_avx2(q, rows, scores) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { scores_avx512(q, rows, scores) },
            _ => scores_body::<false>(q, rows, scores),
        }
    }

    /// `acc += Σ weights[t] · rows[t]` for row-major `rows` of `acc.len()` channels.
    pub(crate) fn accumulate(self, weights: &[f32], rows: &[f32], acc: &mut [f32]) {
        assert_eq!(rows.len(), acc.len() * weights.len(), "accumulate: rows");
        match self.0 {
            // SAFETY: `of` gave this level only where the CPU has it.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { accumulate_avx2(weights, rows, acc) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { accumulate_avx512(weights, rows, acc) },
            _ => accumulate_body::<false>(weights, rows, acc),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
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
