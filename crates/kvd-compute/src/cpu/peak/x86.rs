//! `mod.rs` for products of integers and of bf16: what kernels issue for a register of them, in as
//! many sums side by side as hide how long one takes.
#![allow(unsafe_code)] // Calls after detection.

use crate::cpu::multiply_kind::MultiplyKind;
use crate::cpu::simd::{InstructionSet, Simd};
use std::arch::x86_64::*;
use std::hint::black_box;

/// Sums side by side: up to six cycles of an operation, times the two units that do it.
const SUMS: usize = 12;

/// As often as is said, `$sum` becomes `$next`, for as many sums as have names: an array of them
/// would be stored and loaded in every turn.
macro_rules! turns {
    ($turns:expr, $first:expr, $sum:ident => $next:expr) => {
        turns!(@ $turns, $first, $sum => $next; a b c d e f g h i j k l)
    };
    (@ $turns:expr, $first:expr, $sum:ident => $next:expr; $($name:ident)*) => {{
        $(let mut $name = $first;)*
        for _ in 0..$turns {
            $({
                let $sum = $name;
                $name = $next;
            })*
        }
        black_box([$($name),*]);
    }};
}

/// Multiplies and adds about `count` times and says how often; `None` where the instruction set has
/// no such products.
pub(super) fn multiply_products(simd: Simd, products: MultiplyKind, count: usize) -> Option<usize> {
    let turns = |lanes: usize| (count / (SUMS * lanes), SUMS * lanes);
    let bytes = match simd.level() {
        InstructionSet::Avx512 | InstructionSet::Amx => 64,
        InstructionSet::Avx2 | InstructionSet::AvxVnni => 32,
        _ => return None,
    };
    let lanes = if products == MultiplyKind::Bytes { bytes } else { bytes / 2 };
    let (turns, each) = turns(lanes);
    // SAFETY: a `Simd` of this set exists only where the CPU has it, with bf16 only where it has
    // those products.
    unsafe {
        match (products, simd.level()) {
            (MultiplyKind::Words, InstructionSet::Avx2) => multiply_words(turns),
            (MultiplyKind::Bytes, InstructionSet::Avx2) => bytes_avx2(turns),
            (MultiplyKind::Bytes, InstructionSet::AvxVnni) => bytes_vnni(turns),
            (MultiplyKind::Bytes, _) => bytes_512(turns),
            (MultiplyKind::Bf16, _) if simd.has_bf16() => multiply_bf16(turns),
            _ => return None,
        }
    }
    Some(turns * each)
}

/// `vpmaddwd` and the addition that it needs.
#[target_feature(enable = "avx2")]
fn multiply_words(turns: usize) {
    let factor = _mm256_set1_epi16(black_box(3));
    turns!(turns, factor, sum => _mm256_add_epi32(sum, _mm256_madd_epi16(sum, factor)));
}

/// `vpmaddubsw` and the addition that it needs; the widening is shared by a few.
#[target_feature(enable = "avx2")]
fn bytes_avx2(turns: usize) {
    let factor = _mm256_set1_epi8(black_box(3));
    turns!(turns, factor, sum => _mm256_add_epi16(sum, _mm256_maddubs_epi16(sum, factor)));
}

#[target_feature(enable = "avx2,avxvnni")]
fn bytes_vnni(turns: usize) {
    let factor = _mm256_set1_epi8(black_box(3));
    turns!(turns, factor, sum => _mm256_dpbusd_avx_epi32(sum, factor, factor));
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn bytes_512(turns: usize) {
    let factor = _mm512_set1_epi8(black_box(3));
    turns!(turns, factor, sum => _mm512_dpbusd_epi32(sum, factor, factor));
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_bf16(turns: usize) {
    let factors = _mm512_set1_epi16(black_box(0x3f80));
    // SAFETY: both are 512 bits.
    let factors = unsafe { std::mem::transmute::<__m512i, __m512bh>(factors) };
    turns!(turns, _mm512_setzero_ps(), sum => _mm512_dpbf16_ps(sum, factors, factors));
}
