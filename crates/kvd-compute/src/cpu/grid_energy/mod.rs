//! The largest energy of a token's codes, of tiles of keys.

#[cfg(target_arch = "x86_64")]
mod x86;

use crate::cpu::huffman::QUAD;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::InstructionSet;
use crate::cpu::simd::Simd;
use crate::cpu::span_scores::TILE;

/// Codes of one quad of positions: four of each token.
const LANES: usize = QUAD * TILE;

/// The largest sum over a token's codes of the squares of their distances from `biases`. There is a
/// bias for each position of a token, in whole quads; codes are bytes, as biases are.
pub(super) fn largest_energy(simd: Simd, tiles: &[u8], biases: &[u8]) -> f32 {
    assert!(biases.len().is_multiple_of(QUAD), "energy: positions");
    let mut most = 0;
    for tile in tiles.chunks_exact((TILE * biases.len()).max(1)) {
        most = most.max(match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 | InstructionSet::Avx2 => x86::tile_energy(simd, tile, biases),
            _ => tile_energy(tile, biases),
        });
    }
    most as f32
}

fn tile_energy(tile: &[u8], biases: &[u8]) -> i32 {
    let mut tokens = [0i32; TILE];
    // Four codes of each token, then the next four.
    let quads: &[[u8; QUAD]] = biases.as_chunks().0;
    for (codes, biases) in tile.as_chunks::<LANES>().0.iter().zip(quads) {
        for (token, codes) in tokens.iter_mut().zip(codes.as_chunks::<QUAD>().0) {
            for (code, bias) in codes.iter().zip(biases) {
                *token += i32::from(code.abs_diff(*bias)).pow(2);
            }
        }
    }
    tokens.into_iter().fold(0, i32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_energy_is_of_one_token_and_without_biases() {
        const PER_ROW: usize = 12;
        let biases: Vec<u8> = (0..PER_ROW).map(|at| (at * 7 % 40) as u8).collect();
        let tiles: Vec<u8> = (0..3 * TILE * PER_ROW).map(|at| (at * 89 % 251) as u8).collect();
        let energy = |tile: &[u8], token: usize| -> u32 {
            let code = |at: usize| tile[at / QUAD * QUAD * TILE + token * QUAD + at % QUAD];
            let square = |at: usize| u32::from(code(at).abs_diff(biases[at])).pow(2);
            (0..PER_ROW).map(square).sum()
        };
        let all = tiles
            .chunks_exact(TILE * PER_ROW)
            .flat_map(|tile| (0..TILE).map(move |token| (tile, token)));
        let most = all.map(|(tile, token)| energy(tile, token)).max().unwrap();
        for simd in Simd::available_levels() {
            assert_eq!(largest_energy(simd, &tiles, &biases), most as f32, "{simd:?}");
            // Codes at their biases are zeros.
            let zeros: Vec<u8> =
                biases.chunks_exact(QUAD).flat_map(|quad| quad.repeat(TILE)).collect();
            assert_eq!(largest_energy(simd, &zeros, &biases), 0.0, "{simd:?}");
        }
    }
}
