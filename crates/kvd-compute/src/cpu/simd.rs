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

/// How far a kernel may round what it multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Products of f32: answers are as exact as plain single precision.
    #[default]
    Single,
    /// Queries and weights rounded to 15 bits of the largest in their row, where a side has a
    /// kernel for its codes; the error this adds is below a thousandth of the output.
    Fast,
}

impl Precision {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Single, Self::Fast];

    /// Name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Fast => "fast",
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

    /// `scores[r * stride + t] = q[r] · rows[t]` for row-major `q` and `rows` of `dim` channels.
    pub(crate) fn scores(
        self,
        dim: usize,
        q: &[f32],
        rows: &[f32],
        (scores, stride): (&mut [f32], usize),
    ) {
        let (queries, tokens) = (q.len() / dim, rows.len() / dim);
        assert!(tokens <= stride && (queries - 1) * stride + tokens <= scores.len(), "scores");
        let blocks = q.chunks(BLOCK_ROWS * dim).zip(scores.chunks_mut(BLOCK_ROWS * stride));
        for (q, scores) in blocks {
            if q.len() == BLOCK_ROWS * dim {
                scores_of_block(self, dim, q, rows, scores, stride);
                continue;
            }
            for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_mut(stride)) {
                scores_of_row(self, q, rows, &mut scores[..tokens]);
            }
        }
    }

    /// `acc += Σ weights[t] · rows[t]` for row-major `rows` of `acc.len()` channels.
    pub(crate) fn accumulate(self, weights: &[f32], rows: &[f32], acc: &mut [f32]) {
        assert_eq!(rows.len(), acc.len() * weights.len(), "accumulate: rows");
        accumulate_row(self, weights, rows, acc);
    }

    /// As [`Simd::accumulate`], for four rows that share `rows`: each is read once.
    pub(crate) fn accumulate_block(
        self,
        weights: [&[f32]; BLOCK_ROWS],
        rows: &[f32],
        acc: [&mut [f32]; BLOCK_ROWS],
    ) {
        let (dim, tokens) = (acc[0].len(), weights[0].len());
        assert!(acc.iter().all(|acc| acc.len() == dim), "accumulate_block: channels");
        assert!(weights.iter().all(|w| w.len() == tokens), "accumulate_block: tokens");
        assert_eq!(rows.len(), dim * tokens, "accumulate_block: rows");
        accumulate_of_block(self, weights, rows, acc);
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

/// Query rows that one pass over decoded rows serves.
pub(crate) const BLOCK_ROWS: usize = 4;

/// As `per_level`, for bodies that are told whether there is a fused multiply-add.
macro_rules! per_level_fma {
    (fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $body:ident) => {
        fn $name(simd: Simd, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) {
                $body::<true>($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) {
                $body::<true>($($arg),*);
            }
            match simd.0 {
                // SAFETY: a `Simd` of this set exists only where the CPU has it.
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512 => unsafe { avx512($($arg),*) },
                _ => $body::<false>($($arg),*),
            }
        }
    };
}

per_level_fma!(fn scores_of_row(q: &[f32], rows: &[f32], scores: &mut [f32]) = scores_body);
per_level_fma!(fn scores_of_block(
    dim: usize,
    q: &[f32],
    rows: &[f32],
    scores: &mut [f32],
    stride: usize,
) = scores_block_body);
per_level_fma!(fn accumulate_row(weights: &[f32], rows: &[f32], acc: &mut [f32])
    = accumulate_body);
per_level_fma!(fn accumulate_of_block(
    weights: [&[f32]; BLOCK_ROWS],
    rows: &[f32],
    acc: [&mut [f32]; BLOCK_ROWS],
) = accumulate_block_body);

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

/// Channels of a register of AVX-512.
const WIDTH: usize = 16;
/// Tokens that share the queries' loads.
const BLOCK_TOKENS: usize = 4;

#[inline(always)]
fn add_products<const FMA: bool>(a: &[f32; WIDTH], b: &[f32; WIDTH], sums: &mut [f32; WIDTH]) {
    for i in 0..WIDTH {
        sums[i] = multiply_add::<FMA>(a[i], b[i], sums[i]);
    }
}

/// Sixteen sums at once, four queries of four tokens: each register of either is loaded once for
/// four products.
#[inline(always)]
fn scores_block_body<const FMA: bool>(
    dim: usize,
    q: &[f32],
    rows: &[f32],
    scores: &mut [f32],
    stride: usize,
) {
    let tokens = rows.len() / dim;
    let whole = tokens / BLOCK_TOKENS * BLOCK_TOKENS;
    for first in (0..whole).step_by(BLOCK_TOKENS) {
        let mut sums = [[[0f32; WIDTH]; BLOCK_TOKENS]; BLOCK_ROWS];
        let tokens: [&[f32]; BLOCK_TOKENS] =
            std::array::from_fn(|t| &rows[(first + t) * dim..][..dim]);
        let queries: [&[f32]; BLOCK_ROWS] = std::array::from_fn(|row| &q[row * dim..][..dim]);
        for chunk in 0..dim / WIDTH {
            let of = |values: &[f32]| -> [f32; WIDTH] {
                values[chunk * WIDTH..][..WIDTH].try_into().expect("a chunk")
            };
            let tokens = tokens.map(of);
            for (query, sums) in queries.iter().zip(&mut sums) {
                let query = of(query);
                for (token, sums) in tokens.iter().zip(sums) {
                    add_products::<FMA>(&query, token, sums);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (t, lanes) in sums.iter().enumerate() {
                let eight: [f32; 8] = std::array::from_fn(|i| lanes[i] + lanes[i + 8]);
                let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
                let mut sum = (four[0] + four[2]) + (four[1] + four[3]);
                for i in dim / WIDTH * WIDTH..dim {
                    sum = multiply_add::<FMA>(queries[row][i], tokens[t][i], sum);
                }
                scores[row * stride + first + t] = sum;
            }
        }
    }
    if whole < tokens {
        for (q, scores) in q.chunks_exact(dim).zip(scores.chunks_mut(stride)) {
            scores_body::<FMA>(q, &rows[whole * dim..], &mut scores[whole..tokens]);
        }
    }
}

/// Two registers of channels of four rows: each value is loaded once for four products.
#[inline(always)]
fn accumulate_block_body<const FMA: bool>(
    weights: [&[f32]; BLOCK_ROWS],
    rows: &[f32],
    mut acc: [&mut [f32]; BLOCK_ROWS],
) {
    let dim = acc[0].len();
    let whole = dim / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        let mut sums = [[0f32; LANES]; BLOCK_ROWS];
        for (sums, acc) in sums.iter_mut().zip(&acc) {
            sums.copy_from_slice(&acc[first..first + LANES]);
        }
        for (t, row) in rows.chunks_exact(dim).enumerate() {
            let values: &[f32; LANES] = row[first..][..LANES].try_into().expect("LANES");
            for (sums, weights) in sums.iter_mut().zip(&weights) {
                let weight = weights[t];
                for i in 0..LANES {
                    sums[i] = multiply_add::<FMA>(weight, values[i], sums[i]);
                }
            }
        }
        for (sums, acc) in sums.iter().zip(&mut acc) {
            acc[first..first + LANES].copy_from_slice(sums);
        }
    }
    for (weights, acc) in weights.iter().zip(acc) {
        for (i, value) in acc.iter_mut().enumerate().skip(whole) {
            for (weight, row) in weights.iter().zip(rows.chunks_exact(dim)) {
                *value = multiply_add::<FMA>(*weight, row[i], *value);
            }
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
            tokens in 1usize..14,
            queries in 1usize..10,
            seed in any::<u32>(),
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                f64::from(state >> 8) / f64::from(1 << 23) - 1.0
            };
            let q: Vec<f32> = (0..dim * queries).map(|_| next() as f32).collect();
            let rows: Vec<f32> = (0..dim * tokens).map(|_| next() as f32).collect();
            let weights: Vec<f32> = (0..tokens).map(|_| next() as f32).collect();
            for level in Simd::available() {
                let mut scores = vec![0f32; queries * 16];
                level.scores(dim, &q, &rows, (&mut scores, 16));
                for (r, scores) in scores.chunks(16).enumerate() {
                    for (t, score) in scores[..tokens].iter().enumerate() {
                        let product =
                            |i| f64::from(q[r * dim + i]) * f64::from(rows[t * dim + i]);
                        let exact: f64 = (0..dim).map(product).sum();
                        prop_assert!((f64::from(*score) - exact).abs() < 1e-5 * dim as f64);
                    }
                }
                let mut block = vec![0.5f32; 4 * dim];
                {
                    let mut acc = block.chunks_exact_mut(dim);
                    let acc = std::array::from_fn(|_| acc.next().unwrap());
                    level.accumulate_block([&weights[..]; 4], &rows, acc);
                }
                let mut one = vec![0.5f32; dim];
                level.accumulate(&weights, &rows, &mut one);
                for acc in block.chunks_exact(dim) {
                    for (a, b) in acc.iter().zip(&one) {
                        prop_assert!((a - b).abs() < 1e-5 * tokens as f32);
                    }
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
