//! Multiplications and additions from registers alone: what a benchmark sets its figures against.

#[cfg(target_arch = "x86_64")]
mod x86;

use crate::cpu::multiply_kind::MultiplyKind;
use crate::cpu::simd::{InstructionSet, Simd, per_level};
use std::hint::black_box;

/// f32 of a sum; more than any register holds.
const LANES: usize = 16;
/// Sums side by side: the cycles of a fused operation, times the units that do it.
const SUMS: usize = 8;

/// Multiplies and adds about `count` times in registers, with such products of an instruction set,
/// and says how often; `None` where the machine does not have them, or nothing here makes them.
#[must_use]
pub fn multiply_adds(set: InstructionSet, products: MultiplyKind, count: usize) -> Option<usize> {
    let simd = Simd::of_set(set)?;
    match products {
        MultiplyKind::F32 => Some(multiply_floats(simd, count)),
        #[cfg(target_arch = "x86_64")]
        _ => x86::multiply_products(simd, products, count),
        #[cfg(not(target_arch = "x86_64"))]
        _ => None,
    }
}

fn multiply_floats(simd: Simd, count: usize) -> usize {
    let (turns, factor) = (count / (LANES * SUMS), black_box([0.5, 1.0]));
    black_box(match simd.vector_set() {
        InstructionSet::Portable => multiply_separate(turns, factor),
        _ => multiply_fused(simd, turns, factor),
    });
    turns * LANES * SUMS
}

type LaneSums = [[f32; LANES]; SUMS];

/// Sums that have names stay in registers; an array of them is stored and loaded in every turn.
macro_rules! turns {
    ($turns:expr, $x:ident => $next:expr) => {{
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = [[1f32; LANES]; SUMS];
        for _ in 0..$turns {
            for lane in 0..LANES {
                for sum in [&mut a, &mut b, &mut c, &mut d, &mut e, &mut f, &mut g, &mut h] {
                    let $x = sum[lane];
                    sum[lane] = $next;
                }
            }
        }
        [a, b, c, d, e, f, g, h]
    }};
}

per_level!(fn multiply_fused(turns: usize, factor: [f32; 2]) -> LaneSums = multiply_fused_body);

#[inline(always)]
fn multiply_fused_body(turns: usize, by: [f32; 2]) -> LaneSums {
    let [factor, term] = by;
    turns!(turns, x => x.mul_add(factor, term))
}

/// Where the target has no fused operation, it would be a call.
fn multiply_separate(turns: usize, by: [f32; 2]) -> LaneSums {
    let [factor, term] = by;
    turns!(turns, x => x * factor + term)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_says_how_much_it_did() {
        for simd in Simd::available_levels() {
            let did = |products| multiply_adds(simd.level(), products, 100_000);
            let about = |did: Option<usize>| (99_000..=100_000).contains(&did.unwrap_or(0));
            assert!(about(did(MultiplyKind::F32)), "{simd:?}");
            let has = |products| match (simd.level(), products) {
                (InstructionSet::Avx2, MultiplyKind::Words | MultiplyKind::Bytes) => true,
                (InstructionSet::AvxVnni, MultiplyKind::Bytes) => true,
                (InstructionSet::Avx512 | InstructionSet::Amx, MultiplyKind::Bytes) => true,
                (_, MultiplyKind::Bf16) => Simd::of_set(simd.level()).is_some_and(Simd::has_bf16),
                _ => false,
            };
            for products in
                [MultiplyKind::Bf16, MultiplyKind::Words, MultiplyKind::Bytes, MultiplyKind::Tiles]
            {
                let did = did(products);
                assert_eq!(did.is_some(), has(products), "{simd:?} {products:?}");
                assert!(did.is_none() || about(did), "{simd:?} {products:?}: {did:?}");
            }
        }
    }
}
