//! Multiplications and additions from registers alone: what a benchmark sets its figures against.

use super::simd::{InstructionSet, Simd, per_level};
use std::hint::black_box;

/// f32 of a sum; more than any register holds.
const LANES: usize = 16;
/// Sums side by side: the cycles of a fused operation, times the units that do it.
const SUMS: usize = 8;

/// Multiplies and adds f32 about `count` times in registers, on the machine's best instruction
/// set, and says how often.
#[must_use]
pub fn multiply_adds(count: usize) -> usize {
    run(Simd::detect(), count)
}

fn run(simd: Simd, count: usize) -> usize {
    let (turns, factor) = (count / (LANES * SUMS), black_box([0.5, 1.0]));
    black_box(match simd.set() {
        InstructionSet::Portable => separate(turns, factor),
        _ => fused(simd, turns, factor),
    });
    turns * LANES * SUMS
}

type Sums = [[f32; LANES]; SUMS];

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

per_level!(fn fused(turns: usize, factor: [f32; 2]) -> Sums = fused_body);

#[inline(always)]
fn fused_body(turns: usize, [factor, term]: [f32; 2]) -> Sums {
    turns!(turns, x => x.mul_add(factor, term))
}

/// Where the target has no fused operation, it would be a call.
fn separate(turns: usize, [factor, term]: [f32; 2]) -> Sums {
    turns!(turns, x => x * factor + term)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_says_how_much_it_did() {
        for simd in Simd::available() {
            let did = run(simd, 100_000);
            assert!((99_000..=100_000).contains(&did), "{simd:?}: {did}");
        }
    }
}
