//! A side's transform as `kernels/include/kvd/store/transform.cuh` reads it.

use crate::kernel_choice::COPY_BYTES;
use kvd_codec::{ForwardStep, HeadCodec};
use kvd_core::DType;

/// Bytes of a step, without the data that it reads.
pub(super) const STEP_BYTES: usize = 16;
/// Marks a channel that is negated.
const NEGATED: u32 = 1 << 31;

/// Appends a side's steps and their ends; gives their offset.
pub(super) fn push(steps: &mut Vec<u8>, side: &HeadCodec) -> u64 {
    align_sixteen(steps);
    let start = steps.len();
    let forward = side.forward_steps();
    steps.resize(start + STEP_BYTES * (forward.len() + 1), 0);
    for (index, step) in forward.iter().enumerate() {
        align_sixteen(steps);
        let offset = (steps.len() - start) as u32;
        let words = match step {
            ForwardStep::Scale(factors) => [1, 0, append_floats(steps, factors, offset), 0],
            ForwardStep::Offset(mean) => [2, 0, append_floats(steps, mean, offset), 0],
            ForwardStep::Hadamard { block, norm } => [3, *block as u32, 0, norm.to_bits()],
            ForwardStep::Permute { order, signs } => {
                for (place, sign) in order.iter().zip(*signs) {
                    let word = u32::from(*place) | if *sign < 0.0 { NEGATED } else { 0 };
                    steps.extend(word.to_le_bytes());
                }
                [4, 0, offset, 0]
            }
            ForwardStep::Matrix(columns) => {
                // Entries are f16 in the calibration.
                let from = steps.len();
                steps.resize(from + 2 * columns.len(), 0);
                DType::F16.narrow_values(columns, &mut steps[from..]);
                [5, 0, offset, 0]
            }
        };
        let at = start + STEP_BYTES * index;
        for (word, bytes) in words.iter().zip(steps[at..].as_chunks_mut::<4>().0) {
            *bytes = word.to_le_bytes();
        }
    }
    start as u64
}

/// Appends floats and gives back where they begin.
pub(super) fn append_floats(steps: &mut Vec<u8>, values: &[f32], offset: u32) -> u32 {
    steps.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    offset
}

/// Offsets are those of whole sixteens.
pub(super) fn align_sixteen(steps: &mut Vec<u8>) {
    steps.resize(steps.len().next_multiple_of(COPY_BYTES), 0);
}
