//! Queries and answers that stay in a worker's device memory: what the kernels of
//! `kernels/region.cu` are given. [`QueryTransforms`] are the transforms of a layer's heads,
//! queries into coefficient space and sums of values out of it. Pure: reads no memory of a device.

use crate::abi::{REGION_THREADS, TRANSFORM_ROWS, TransformUnit};
use kvd_codec::{ModelCodec, QueryTransformStep};
use kvd_core::{LayerIndex, Side};

/// Bytes of a step, without the data that it reads.
const STEP_BYTES: usize = 16;
/// Marks a channel that is negated.
const NEGATED: u32 = 1 << 31;

/// How queries and answers of one layer are turned. Made once per model and layer.
#[derive(Clone, Debug, Default)]
pub struct QueryTransforms {
    /// Steps and the data that they read, in the device's layout.
    pub steps: Vec<u8>,
    /// Offsets of each KV head's steps: the keys', then the values'.
    heads: Vec<[u64; 2]>,
}

impl QueryTransforms {
    /// The transforms of a layer.
    #[must_use]
    pub fn new(codec: &ModelCodec, layer: LayerIndex) -> Self {
        let mut turns = Self::default();
        for head in 0..codec.geometry().kv_heads as usize {
            let side = |side| codec.head_codec(layer, side, head);
            let fold = turns.push(&side(Side::Key).fold_steps());
            let unfold = turns.push(&side(Side::Value).unfold_steps());
            turns.heads.push([fold, unfold]);
        }
        turns
    }

    /// Tells units where the steps of their heads are; `group` query heads share a KV head.
    ///
    /// # Panics
    /// When a head is not the layer's.
    pub fn set_steps(&self, units: &mut [TransformUnit], group: u32) {
        for unit in units {
            [unit.fold, unit.unfold] = self.heads[(unit.head / group) as usize];
        }
    }

    /// Shared memory of a thread block for rows of so many channels: two copies of the rows, a
    /// number per row, a word per thread.
    #[must_use]
    pub fn shared_bytes(dim: usize) -> usize {
        4 * (2 * TRANSFORM_ROWS * dim + TRANSFORM_ROWS + REGION_THREADS as usize)
    }

    /// Appends steps and their end; gives their offset.
    fn push(&mut self, turns: &[QueryTransformStep<'_>]) -> u64 {
        let steps = &mut self.steps;
        let start = steps.len();
        steps.resize(start + STEP_BYTES * (turns.len() + 1), 0);
        for (index, step) in turns.iter().enumerate() {
            let offset = (steps.len() - start) as u32;
            let words = match step {
                QueryTransformStep::Scale(factors) => {
                    [1, 0, append_floats(steps, factors, offset), 0]
                }
                QueryTransformStep::Mean(mean) => [2, 0, append_floats(steps, mean, offset), 0],
                QueryTransformStep::Hadamard { block, norm } => {
                    [3, *block as u32, 0, norm.to_bits()]
                }
                QueryTransformStep::Permute { order, signs } => {
                    for (place, sign) in order.iter().zip(signs) {
                        let word = u32::from(*place) | if *sign < 0.0 { NEGATED } else { 0 };
                        steps.extend(word.to_le_bytes());
                    }
                    [4, 0, offset, 0]
                }
                QueryTransformStep::Matrix(columns) => {
                    [5, 0, append_floats(steps, columns, offset), 0]
                }
            };
            let at = start + STEP_BYTES * index;
            steps[at..at + STEP_BYTES].copy_from_slice(bytemuck::cast_slice(&words));
        }
        start as u64
    }
}

/// Appends floats and gives back where they begin.
fn append_floats(steps: &mut Vec<u8>, values: &[f32], offset: u32) -> u32 {
    steps.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    offset
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{DType, Geometry, RopePairing};

    #[test]
    fn steps_are_where_their_heads_say_and_end() {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 2,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let spec =
            kvd_codec::resolve_spec("k=hadamard/lloyd(b=4); v=hadamard/uniform(b=4,axis=token)")
                .unwrap();
        let codec = ModelCodec::new(geometry, spec, None).unwrap();
        let turns = QueryTransforms::new(&codec, LayerIndex(0));
        let mut units = [TransformUnit { head: 5, ..TransformUnit::default() }];
        turns.set_steps(&mut units, 4);
        assert_eq!([units[0].fold, units[0].unfold], turns.heads[1]);
        for start in turns.heads.iter().flatten() {
            let words = turns.steps[*start as usize..].as_chunks::<16>().0.iter();
            let kinds: Vec<u8> = words.map(|step| step[0]).take_while(|kind| *kind != 0).collect();
            let known = !kinds.is_empty() && kinds.iter().all(|kind| *kind <= 5);
            assert!(known, "{kinds:?}");
            assert_eq!(start % 4, 0);
        }
    }
}
