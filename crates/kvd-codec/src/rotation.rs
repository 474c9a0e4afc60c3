//! Seeded random orthogonal maps: rounds of random signs, a random permutation and a Hadamard
//! rotation by blocks.
//!
//! A round mixes each channel with the others of a block, the permutation sends them to other
//! blocks; there are enough rounds for every channel to reach every other twice over. Signs and
//! permutations come from integers alone, so the map is the same on every machine, and it takes
//! `O(d log d)` steps where a dense matrix takes `d²`.

use crate::random::SplitMix64;
use crate::transform::hadamard_transform;
use kvd_core::Geometry;

const DIM_MAX: usize = Geometry::HEAD_DIM_MAX as usize;

/// A random orthogonal map of one head size.
#[derive(Clone, Debug)]
pub(crate) struct RandomRotation {
    /// Channels of a Hadamard block: the largest power of two that divides the head size.
    block: usize,
    rounds: Vec<RotationRound>,
}

/// `x[i] ← sign[i] · x[order[i]]`, then Hadamard.
#[derive(Clone, Debug)]
struct RotationRound {
    order: Vec<u16>,
    signs: Vec<f32>,
}

impl RandomRotation {
    /// The map of `seed` for `dim` channels, an even number.
    pub(crate) fn new(dim: usize, seed: u64) -> Self {
        // Hashed through the generator, so that neighbouring seeds do not share draws.
        let mut rng = SplitMix64(
            SplitMix64(seed).next_bits() ^ (dim as u64).wrapping_mul(0xA24B_AED4_963E_E407),
        );
        let mixed_per_round = dim.trailing_zeros();
        let channel_bits = usize::BITS - (dim - 1).leading_zeros();
        let rounds = (2 * channel_bits).div_ceil(mixed_per_round).max(2);
        let rounds = (0..rounds).map(|_| RotationRound::new(dim, &mut rng)).collect();
        Self { block: 1 << mixed_per_round, rounds }
    }

    /// Channels of a Hadamard block.
    pub(crate) fn block_size(&self) -> usize {
        self.block
    }

    /// Order and signs of each round.
    pub(crate) fn rounds(&self) -> impl DoubleEndedIterator<Item = (&[u16], &[f32])> {
        self.rounds.iter().map(|round| (&round.order[..], &round.signs[..]))
    }

    #[inline(always)]
    pub(crate) fn rotate_row(&self, x: &mut [f32]) {
        let mut buffer = [0f32; DIM_MAX];
        let from = &mut buffer[..x.len()];
        for RotationRound { order, signs } in &self.rounds {
            from.copy_from_slice(x);
            for ((x, place), sign) in x.iter_mut().zip(order).zip(signs) {
                *x = sign * from[usize::from(*place)];
            }
            hadamard_transform(x, self.block);
        }
    }

    /// Its inverse, which is its transpose.
    pub(crate) fn rotate_back(&self, x: &mut [f32]) {
        let mut buffer = [0f32; DIM_MAX];
        let from = &mut buffer[..x.len()];
        for RotationRound { order, signs } in self.rounds.iter().rev() {
            hadamard_transform(x, self.block);
            from.copy_from_slice(x);
            for ((from, place), sign) in from.iter().zip(order).zip(signs) {
                x[usize::from(*place)] = sign * from;
            }
        }
    }
}

impl RotationRound {
    fn new(dim: usize, rng: &mut SplitMix64) -> Self {
        let mut order: Vec<u16> = (0..dim as u16).collect();
        // Fisher and Yates; the modulus favours a place by less than one in 2^53.
        for last in (1..dim).rev() {
            order.swap(last, (rng.next_bits() % (last as u64 + 1)) as usize);
        }
        let sign = |_| if rng.next_bits() >> 63 == 0 { 1.0 } else { -1.0 };
        Self { order, signs: (0..dim).map(sign).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Images of the unit vectors.
    fn columns(dim: usize, seed: u64) -> Vec<Vec<f32>> {
        let rotation = RandomRotation::new(dim, seed);
        let column = |hot| {
            let mut x = vec![0f32; dim];
            x[hot] = 1.0;
            rotation.rotate_row(&mut x);
            x
        };
        (0..dim).map(column).collect()
    }

    #[test]
    fn it_is_orthogonal_and_the_inverse_undoes_it() {
        for dim in [2, 6, 30, 64, 80, 96, 128, 254, 256] {
            let columns = columns(dim, 3);
            for (i, a) in columns.iter().enumerate() {
                for (j, b) in columns.iter().enumerate() {
                    let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    let want = if i == j { 1.0 } else { 0.0 };
                    assert!((dot - want).abs() < 1e-5, "dim {dim}: {i}·{j} = {dot}");
                }
                let mut back = a.clone();
                RandomRotation::new(dim, 3).rotate_back(&mut back);
                back[i] -= 1.0;
                assert!(back.iter().all(|x| x.abs() < 1e-5), "dim {dim}");
            }
        }
    }

    #[test]
    fn every_channel_reaches_every_other_evenly() {
        // A random rotation's entries have a variance of 1/d and fourth moments of about 3/d².
        for dim in [64, 80, 96, 128, 254] {
            let entries: Vec<f32> = columns(dim, 0).concat();
            let mean = |power: i32| {
                entries.iter().map(|x| f64::from(*x).powi(power)).sum::<f64>()
                    / entries.len() as f64
            };
            let kurtosis = mean(4) / (mean(2) * mean(2));
            assert!((2.0..4.0).contains(&kurtosis), "dim {dim}: kurtosis {kurtosis}");
            let largest = entries.iter().fold(0f32, |m, x| m.max(x.abs()));
            assert!(largest * (dim as f32).sqrt() < 6.5, "dim {dim}: entry {largest}");
        }
    }

    #[test]
    fn seeds_and_sizes_give_other_maps_and_the_same_seed_the_same() {
        assert_eq!(columns(32, 5), columns(32, 5));
        assert_ne!(columns(32, 5), columns(32, 6));
        // Fixed: pages on disk depend on these.
        let rotation = RandomRotation::new(16, 0);
        assert_eq!(rotation.rounds.len(), 2);
        let RotationRound { order, signs } = &rotation.rounds[0];
        let signs: String = signs.iter().map(|s| if *s > 0.0 { '+' } else { '-' }).collect();
        assert_eq!(order[..], [13, 9, 8, 5, 3, 6, 2, 14, 15, 10, 12, 1, 11, 7, 4, 0]);
        assert_eq!(signs, "---+-+++---+++-+");
    }
}
