//! Which sides have products on tensor cores, and the shared memory that these take: the sides that
//! are `Tensor<Side>` in `kernels/attend_*.cu`, under the conditions that their headers name.

use crate::abi::SideShape;
use crate::side::{COPY_BYTES, Kernel, Pair, TILE_TOKENS};
use kvd_codec::{CodecSpec, Entropy, GroupAxis, Quantizer, SideSpec, UniformMode};
use kvd_core::{Geometry, Side};

/// Terms of one product, and its columns.
const STEP_TERMS: usize = 32;
const STEP_COLUMNS: u32 = 8;
/// Warps of a thread block.
const WARPS: u32 = 4;
/// Channels of values for whose sums a thread has registers: `BLOCKS` of `sums.cuh`.
const VALUE_DIM_MAX: u32 = 192;
/// Neighbours in a word.
const QUAD: u32 = 4;
/// Words of digits that four lanes hold of a row, for one step.
const DIGIT_WORDS: usize = 4 * 6;
/// Words beside them for each row: unit, base, and what three sums begin with.
const ROW_WORDS: usize = 5;

/// Whether the kernel of a pair multiplies codes of that side on tensor cores.
pub(crate) fn on_tensor_cores(pair: Pair, side: Side) -> bool {
    match (pair.keys, pair.values) {
        (Kernel::Uniform, Kernel::Uniform) | (Kernel::Grid, Kernel::Grid) => true,
        (Kernel::Polar | Kernel::Lloyd, Kernel::Uniform) => side == Side::Value,
        _ => false,
    }
}

/// Whether a pair's own kernel reads such pages: with products on tensor cores, codes are bytes,
/// and what scales them can go into queries or weights.
pub(crate) fn fits(pair: Pair, key: &SideShape, value: &SideShape) -> bool {
    let of_side = |side, shape: &SideShape| {
        !on_tensor_cores(pair, side)
            || (shape.bits <= 8
                && shape.dim.is_multiple_of(QUAD)
                && (side == Side::Key || shape.dim <= VALUE_DIM_MAX)
                && (shape.kind != Kernel::Uniform as u32 || folds(side, shape)))
    };
    of_side(Side::Key, key) && of_side(Side::Value, value)
}

/// Thread blocks for which a multiprocessor's registers are enough, and registers of a thread:
/// `declare.cuh`.
pub(crate) fn resident(huffman: bool) -> (usize, u32) {
    if huffman { (3, 168) } else { (4, 128) }
}

/// Whether steps of uniform codes go into queries or weights.
fn folds(side: Side, shape: &SideShape) -> bool {
    let one_row = shape.scale_tokens.is_multiple_of(TILE_TOKENS as u32)
        || shape.scale_tokens >= Geometry::BLOCK_TOKENS_MAX;
    let by_token = one_row || shape.scale_tokens == 1;
    let whole = shape.scale_channels >= shape.dim;
    match side {
        Side::Key => (shape.scale_channels == 1 && one_row) || (whole && by_token),
        Side::Value => {
            let of_warp = STEP_COLUMNS * shape.dim.div_ceil(STEP_COLUMNS * WARPS);
            by_token && (whole || shape.scale_channels.is_multiple_of(of_warp))
        }
    }
}

/// Shared memory of a side's products for `rows` query rows, bytes: `Scores` of `scores.cuh`,
/// `Sums` of `sums.cuh`.
pub(crate) fn work_bytes(pair: Pair, side: Side, shape: &SideShape, rows: usize) -> usize {
    if !on_tensor_cores(pair, side) {
        return 0;
    }
    let (dim, grid) = (shape.dim as usize, shape.kind == Kernel::Grid as u32);
    let words = match side {
        Side::Key => {
            let positions = if grid { shape.stride as usize } else { dim };
            rows * ROW_WORDS + 1 + positions.div_ceil(STEP_TERMS) * rows * DIGIT_WORDS
        }
        Side::Value => rows * dim + if grid { 2 * dim + 1 } else { 0 },
    };
    (4 * words).next_multiple_of(COPY_BYTES)
}

/// What a plan expects of one side's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    /// Why they are not on tensor cores.
    pub(crate) not: Option<&'static str>,
    /// Shared memory that they take, bytes.
    pub(crate) bytes: usize,
}

/// What the kernel for both sides of a codec will do, for `rows` query rows.
pub(crate) fn expected(codec: &CodecSpec, geometry: &Geometry, rows: usize) -> [Expected; 2] {
    let sides = Side::BOTH.map(|side| (codec.side(side), geometry.head_dim(side)));
    let kernels = sides.map(|(side, _)| kernel_of(side));
    let shapes = sides.map(|(side, dim)| expected_shape(side, dim));
    let [Some(keys), Some(values)] = kernels else {
        let not = |kernel: Option<Kernel>| match kernel {
            None => "its values are not codes that stand for bytes",
            Some(_) => "the other side has none, and they share a kernel",
        };
        return kernels.map(|kernel| Expected { not: Some(not(kernel)), bytes: 0 });
    };
    let huffman = sides.iter().any(|(side, _)| side.entropy == Entropy::Huffman);
    let pair = Pair { keys, values, huffman };
    let own = pair.is_known() && fits(pair, &shapes[0], &shapes[1]);
    Side::BOTH.map(|side| {
        let index = side.index();
        if !own {
            return Expected { not: Some("the pair or its groups have no such kernel"), bytes: 0 };
        }
        let bytes = work_bytes(pair, side, &shapes[index], rows);
        let not = (bytes == 0).then_some("its kernel multiplies floats");
        Expected { not, bytes }
    })
}

/// The kernel of sides that have products of bytes with some other side.
fn kernel_of(side: &SideSpec) -> Option<Kernel> {
    Some(match side.quantizer {
        Quantizer::Uniform { mode: UniformMode::Asym, .. } => Kernel::Uniform,
        Quantizer::Grid { .. } => Kernel::Grid,
        Quantizer::Polar { .. } => Kernel::Polar,
        Quantizer::Lloyd { .. } => Kernel::Lloyd,
        _ => return None,
    })
}

/// What a side's shape will have of what decides.
fn expected_shape(side: &SideSpec, dim: usize) -> SideShape {
    let mut shape = SideShape { dim: dim as u32, scale_tokens: 1, ..SideShape::default() };
    let page = Geometry::BLOCK_TOKENS_MAX;
    shape.bits = side.quantizer.alphabet().map_or(8, |codes| codes.next_power_of_two().ilog2());
    match side.quantizer {
        Quantizer::Uniform { axis, group, .. } => {
            shape.kind = Kernel::Uniform as u32;
            let group = group.map(u32::from);
            (shape.scale_tokens, shape.scale_channels) = match axis {
                GroupAxis::Channel => (group.unwrap_or(page), 1),
                GroupAxis::Token => (1, group.unwrap_or(shape.dim).min(shape.dim)),
                GroupAxis::Block => (page, shape.dim),
            };
        }
        Quantizer::Grid { .. } => {
            shape.kind = Kernel::Grid as u32;
            shape.stride = shape.dim;
        }
        _ => {}
    }
    shape
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_fit_no_query_or_weight_go_to_the_other_kernel() {
        let pair = Pair { keys: Kernel::Uniform, values: Kernel::Uniform, huffman: false };
        let shape = |scale_tokens, scale_channels, bits| SideShape {
            kind: Kernel::Uniform as u32,
            dim: 128,
            bits,
            scale_tokens,
            scale_channels,
            ..SideShape::default()
        };
        let (key, value) = (shape(32, 1, 4), shape(1, 32, 4));
        assert!(fits(pair, &key, &value));
        // A tile of 32 tokens has two scales of a channel, a warp of 32 channels two of a token.
        for (key, value) in [
            (shape(48, 1, 4), value),
            (key, shape(1, 48, 4)),
            (shape(1, 32, 4), value),
            (key, shape(32, 1, 4)),
            (shape(32, 1, 9), value),
            (SideShape { dim: 126, ..key }, value),
            (key, SideShape { dim: 256, ..value }),
        ] {
            assert!(!fits(pair, &key, &value), "{key:?} {value:?}");
        }
        // Pairs that multiply floats take every shape.
        let hybrid = Pair { keys: Kernel::Hybrid, values: Kernel::Hybrid, huffman: false };
        assert!(fits(hybrid, &shape(48, 1, 9), &shape(1, 48, 9)));
        assert_eq!(work_bytes(hybrid, Side::Key, &key, 4), 0);
    }
}
