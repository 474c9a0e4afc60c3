//! Which sides have products on tensor cores, and the shared memory that these take: the sides that
//! are `Tensor<Side>` in `kernels/attend_*.cu`, under the conditions that their headers name.

use crate::abi::{FEW_ROWS, LINE_BYTES, SideKernel, SideShape, TILE_TOKENS, WEIGHT_SETS_MAX};
use crate::buffers::tile_stop_bytes;
use crate::kernel_choice::{COPY_BYTES, ChosenKernel, KernelPair, KernelVariant, ROWS, rows_of};
use crate::late_pairs::LatePairs;
use crate::lookup;
use crate::page_shapes::TileShape;
use kvd_core::{Geometry, Side};

mod expected;

pub(crate) use expected::expected_kernel;

/// Terms of one product, and its columns.
const STEP_TERMS: usize = 32;
const STEP_COLUMNS: u32 = 8;
/// Warps of a thread block.
const WARPS: u32 = 4;
/// Channels of values for whose sums a thread has registers, and the same where codes are looked
/// up: `BLOCKS` of `sums.cuh`.
const VALUE_DIM_MAX: u32 = 192;
const LOOKED_UP_DIM_MAX: u32 = 128;
/// Neighbours in a word.
const QUAD: u32 = 4;
/// Terms of a query that are cut for every tile at most: `KEPT` of `scores.cuh`, quads of 32 lanes.
const CUT_TERMS_MAX: u32 = 2 * 32 * QUAD;
/// Widest codes to whose bytes a sign can be added.
const SIGNED_BITS_MAX: u32 = 7;
/// Words beside digits for each row: unit, base, and what three sums begin with.
const ROW_WORDS: usize = 5;
/// Bytes of a `SpreadPosition` of `unpack.cuh`.
const PLACE_BYTES: usize = 8;
/// Terms of one product of halves, and the largest head size: `split_fp.cuh`.
const HALF_TERMS: usize = 16;
const HALF_DIM_MAX: u32 = 256;
/// Channels of rows from which a lane takes sixteen bytes at a time.
const HALF_GROUP: usize = 64;

/// Pairs of which a side may hold Huffman codes and whose late kernels on tensor cores
/// were compiled without spills.
const DECODED: [(SideKernel, SideKernel); 1] = [(SideKernel::Grid, SideKernel::Uniform)];

/// Whether a kernel of a pair multiplies codes on tensor cores.
pub(crate) fn uses_tensor_cores(ChosenKernel { pair, variant }: ChosenKernel) -> bool {
    match variant {
        KernelVariant::Own | KernelVariant::Groups => {}
        KernelVariant::Late => return true,
        KernelVariant::Floats | KernelVariant::Any => return false,
    }
    matches!(
        (pair.keys, pair.values),
        (SideKernel::Uniform | SideKernel::Polar | SideKernel::Lloyd, SideKernel::Uniform)
            | (SideKernel::Grid, SideKernel::Grid)
            | (SideKernel::Vq, SideKernel::Vq)
            | (SideKernel::BitAlloc, SideKernel::BitAlloc)
            | (SideKernel::Hybrid, SideKernel::Hybrid)
            | (SideKernel::F16, SideKernel::F16)
            | (SideKernel::Bf16, SideKernel::Bf16)
            | (SideKernel::Fp8, SideKernel::Fp8)
    )
}

/// The operands that tensor cores multiply of a side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TensorFactor {
    Bytes,
    Halves,
}

/// That of a kernel's side; none where they take nothing of it.
fn tensor_factor(kernel: SideKernel, side: Side) -> Option<TensorFactor> {
    match kernel {
        SideKernel::F32 | SideKernel::Symmetric => None,
        SideKernel::F16 | SideKernel::Bf16 | SideKernel::Fp8 => Some(TensorFactor::Halves),
        // Scales of a token's values would be of levels of two bytes.
        SideKernel::Polar | SideKernel::Lloyd if side == Side::Value => None,
        _ => Some(TensorFactor::Bytes),
    }
}

/// Whether a pair, none that has a kernel ahead of time, can have one late with products of both
/// sides on tensor cores. Of pairs that decode, those whose kernels need no more registers than
/// there are.
pub(crate) fn multiplies_late(pair: KernelPair) -> bool {
    let takes = |kernel, side| tensor_factor(kernel, side).is_some();
    let has_registers = !pair.huffman || DECODED.contains(&(pair.keys, pair.values));
    !pair.is_known()
        && has_registers
        && takes(pair.keys, Side::Key)
        && takes(pair.values, Side::Value)
}

/// Whether products of a side are of bytes.
fn multiplies_bytes(ChosenKernel { pair, variant }: ChosenKernel, side: Side) -> bool {
    let kernel = if side == Side::Key { pair.keys } else { pair.values };
    uses_tensor_cores(ChosenKernel { pair, variant })
        && tensor_factor(kernel, side) == Some(TensorFactor::Bytes)
}

/// Tiles that it works on together for so many query rows: `TILES` of `tile_scheduler.cuh`.
pub(crate) fn tiles_together(ChosenKernel { pair, variant }: ChosenKernel, rows: usize) -> usize {
    let allocated = [pair.keys, pair.values].contains(&SideKernel::BitAlloc);
    let spreads = allocated && variant != KernelVariant::Groups;
    let alone = pair.huffman && rows > FEW_ROWS as usize;
    let both =
        Side::BOTH.iter().all(|side| multiplies_bytes(ChosenKernel { pair, variant }, *side));
    if both && !spreads && !alone { 2 } else { 1 }
}

/// Whether a shape's values become factors of products of halves.
fn is_half(shape: &SideShape) -> bool {
    [SideKernel::F16 as u32, SideKernel::Bf16 as u32, SideKernel::Fp8 as u32].contains(&shape.kind)
}

/// Whether it makes bytes of that side's codes first, or takes them in groups, and what of the
/// table for it stands in shared memory.
pub(crate) fn spread_table(
    ChosenKernel { pair, variant }: ChosenKernel,
    shape: &SideShape,
) -> Option<usize> {
    let spreads = uses_tensor_cores(ChosenKernel { pair, variant }) && shape.spread_row > 0;
    spreads.then_some(shape.spread_table as usize)
}

/// Whether a side's codes are in groups that are not spread: `bit_groups.cuh`.
fn is_grouped(shape: &SideShape) -> bool {
    shape.kind == SideKernel::BitAlloc as u32 && shape.spread_row > 0 && shape.spread_bytes == 0
}

/// Whether it looks codes of that side up as bytes.
pub(crate) fn looks_up(ChosenKernel { pair, variant }: ChosenKernel, side: Side) -> bool {
    let kernel = if side == Side::Key { pair.keys } else { pair.values };
    let looked_up = matches!(kernel, SideKernel::Vq | SideKernel::Polar | SideKernel::Lloyd);
    looked_up && uses_tensor_cores(ChosenKernel { pair, variant })
}

/// Shared memory of what it looks up of a side, bytes: of Huffman codes what stands behind apart.
pub(crate) fn table_bytes(kernel: ChosenKernel, side: Side, shape: &SideShape) -> usize {
    let bytes = match spread_table(kernel, shape) {
        Some(bytes) => bytes,
        None if looks_up(kernel, side) => lookup::table_bytes(shape),
        None => shape.table_bytes as usize,
    };
    bytes.next_multiple_of(COPY_BYTES)
}

/// The kernel that reads such pages of a pair, where `late` were compiled.
pub(crate) fn choose_variant(
    pair: KernelPair,
    key: &SideShape,
    value: &SideShape,
    late: LatePairs,
) -> KernelVariant {
    if !pair.is_known() {
        let fits = late.has_pair(pair) && fits_late(pair, key, value);
        return if fits { KernelVariant::Late } else { KernelVariant::Any };
    }
    if fits_kernel(ChosenKernel { pair, variant: KernelVariant::Own }, key, value) {
        return KernelVariant::Own;
    }
    if !pair.huffman && is_grouped(key) && is_grouped(value) {
        return KernelVariant::Groups;
    }
    let floats = !pair.huffman && (pair.keys, pair.values) == (SideKernel::Vq, SideKernel::Vq);
    if floats { KernelVariant::Floats } else { KernelVariant::Any }
}

/// Whether a pair's late kernel with products on tensor cores reads such pages. Of Huffman codes
/// those of levels and grids are decoded to what tensor cores take.
pub(crate) fn fits_late(pair: KernelPair, key: &SideShape, value: &SideShape) -> bool {
    let is_read = |kernel: SideKernel, shape: &SideShape| {
        shape.stride == 0 || matches!(kernel, SideKernel::Uniform | SideKernel::Grid)
    };
    multiplies_late(pair)
        && is_read(pair.keys, key)
        && is_read(pair.values, value)
        && fits_kernel(ChosenKernel { pair, variant: KernelVariant::Late }, key, value)
}

/// Whether a pair's own kernel reads such pages: with products on tensor cores, rows and codes of
/// fp8 are whole steps, other codes are bytes, and what scales them can go into queries or weights.
fn fits_kernel(
    ChosenKernel { pair, variant }: ChosenKernel,
    key: &SideShape,
    value: &SideShape,
) -> bool {
    let of_side = |side, shape: &SideShape| {
        if !uses_tensor_cores(ChosenKernel { pair, variant }) {
            return true;
        }
        if is_half(shape) {
            return shape.dim.is_multiple_of(HALF_TERMS as u32) && shape.dim <= HALF_DIM_MAX;
        }
        if shape.kind == SideKernel::BitAlloc as u32 {
            let places = side == Side::Key || shape.spread_places <= VALUE_DIM_MAX;
            return shape.spread_bytes > 0 && places;
        }
        let looks_up = looks_up(ChosenKernel { pair, variant }, side);
        let dim_max = if looks_up { LOOKED_UP_DIM_MAX } else { VALUE_DIM_MAX };
        let codes = if looks_up { shape.entry_bytes > 0 } else { shape.bits <= 8 };
        codes
            && shape.dim.is_multiple_of(QUAD)
            && (side == Side::Key || shape.dim <= dim_max)
            && (shape.kind != SideKernel::Uniform as u32 || folds_steps(side, shape))
            && (shape.kind != SideKernel::Polar as u32 || fits_polar(shape))
            && (shape.kind != SideKernel::Hybrid as u32 || is_of_steps(side, shape))
    };
    of_side(Side::Key, key) && of_side(Side::Value, value)
}

/// Thread blocks for which a multiprocessor's registers are enough, and registers of a thread, of a
/// kernel that has one codec's shapes as constants or takes any: `declare.cuh`.
pub(crate) fn resident_blocks(
    ChosenKernel { pair, variant }: ChosenKernel,
    is_fixed: bool,
) -> (usize, u32) {
    let takes_any = multiplies_bytes(ChosenKernel { pair, variant }, Side::Key) && !is_fixed;
    let takes_any = takes_any || variant == KernelVariant::Late;
    if pair.huffman || takes_any { (3, 168) } else { (4, 128) }
}

/// Codes of a row that are looked up.
fn codes_of(shape: &SideShape) -> usize {
    let dim = shape.dim as usize;
    if shape.kind == SideKernel::Polar as u32 {
        dim / 2
    } else {
        dim / shape.book_dim.max(1) as usize
    }
}

/// Whether all tokens of a tile share their scales.
fn has_one_row(shape: &SideShape) -> bool {
    shape.scale_tokens.is_multiple_of(TILE_TOKENS as u32)
        || shape.scale_tokens >= Geometry::BLOCK_TOKENS_MAX
}

/// Whether the steps of a pair's radii, if pages have them, go into queries: two bytes of cosine
/// and sine each.
fn fits_polar(shape: &SideShape) -> bool {
    has_one_row(shape) && 2 * shape.dim <= CUT_TERMS_MAX
}

/// Whether steps of uniform codes go into queries or weights.
fn folds_steps(side: Side, shape: &SideShape) -> bool {
    let one_row = has_one_row(shape);
    let by_token = one_row || shape.scale_tokens == 1;
    let whole = shape.scale_channels >= shape.dim;
    match side {
        Side::Key => {
            let by_channel = shape.scale_channels == 1 && shape.dim <= CUT_TERMS_MAX;
            (by_channel && one_row) || (whole && by_token)
        }
        Side::Value => {
            let of_warp = STEP_COLUMNS * shape.dim.div_ceil(STEP_COLUMNS * WARPS);
            by_token && (whole || shape.scale_channels.is_multiple_of(of_warp))
        }
    }
}

/// Whether, of groups that choose their mode, one has all of a token's channels of a step of the
/// products of keys, or all of a channel's tokens of a tile of values.
fn is_of_steps(side: Side, shape: &SideShape) -> bool {
    let whole = |number: u32| number.is_multiple_of(STEP_TERMS as u32);
    let is_one = match side {
        Side::Key => shape.scale_tokens == 1 && whole(shape.scale_channels) && whole(shape.dim),
        Side::Value => shape.scale_channels == 1 && has_one_row(shape),
    };
    is_one && shape.bits <= SIGNED_BITS_MAX
}

/// Shared memory of a side's products for `rows` query rows, bytes: `Scores` of `scores.cuh`,
/// `Sums` of `sums.cuh`.
pub(crate) fn work_bytes(
    kernel: ChosenKernel,
    side: Side,
    shape: &SideShape,
    rows: usize,
) -> usize {
    if !uses_tensor_cores(kernel) {
        return 0;
    }
    if is_half(shape) {
        return half_bytes(side, shape, rows);
    }
    let (dim, grid) = (shape.dim as usize, shape.kind == SideKernel::Grid as u32);
    let spread = spread_table(kernel, shape).is_some();
    let is_hybrid = shape.kind == SideKernel::Hybrid as u32;
    let bytes = match side {
        Side::Key => {
            let positions = match () {
                () if grid => shape.stride as usize,
                () if spread => shape.spread_row as usize,
                () => dim,
            };
            let steps = match looks_up(kernel, side) {
                true => lookup::key_steps(shape, codes_of(shape)),
                false => positions.div_ceil(STEP_TERMS),
            };
            // Where the sums of a step are scaled, those of its queries too.
            let sums = if is_hybrid { steps * rows } else { 0 };
            // If channels have scales, each tile has its own sums.
            let by_channel = shape.kind == SideKernel::Uniform as u32 && shape.scale_channels == 1;
            let scaled = by_channel || shape.kind == SideKernel::Polar as u32;
            let cuts = if scaled { tiles_together(kernel, rows) } else { 1 };
            let head = (rows * ROW_WORDS).next_multiple_of(4);
            4 * (cuts * (head + steps * digit_words(rows)) + sums)
        }
        // Where each channel is, and what is taken from its codes.
        Side::Value if grid => 4 * rows * dim + 3 * dim + 4,
        // The unit of each place, and places by channel.
        Side::Value if spread => {
            4 * rows * dim + PLACE_BYTES * shape.spread_places as usize + dim.next_multiple_of(4)
        }
        // A part of the unit for each of several codebooks.
        Side::Value => 4 * (rows * dim + if shape.sets > 1 { shape.sets as usize } else { 0 }),
    };
    let tile = if spread { shape.spread_bytes as usize } else { 0 };
    bytes.next_multiple_of(COPY_BYTES) + tile
}

/// Words of the weights of a tile beside floats: digits of each set, and their units.
pub(crate) fn weight_words(ChosenKernel { pair, variant }: ChosenKernel, rows: usize) -> usize {
    if !multiplies_bytes(ChosenKernel { pair, variant }, Side::Value) {
        return 0;
    }
    let sets = if pair.values == SideKernel::Uniform { WEIGHT_SETS_MAX } else { 1 };
    let tiles = tiles_together(ChosenKernel { pair, variant }, rows);
    (rows * sets).next_multiple_of(4) + tiles * sets * digit_words(rows)
}

/// Shared memory of products of halves, `mma_f16.cuh`: a unit of each row and the parts of its
/// query, two of f16 and three of bf16 for each term; for values a row of zeros.
fn half_bytes(side: Side, shape: &SideShape, rows: usize) -> usize {
    if side == Side::Value {
        return COPY_BYTES;
    }
    let (dim, parts) = (shape.dim as usize, 2 + usize::from(shape.kind == SideKernel::Bf16 as u32));
    let terms = if shape.kind == SideKernel::Fp8 as u32 { HALF_TERMS } else { HALF_GROUP };
    4 * rows.next_multiple_of(4) + 2 * rows * parts * dim.next_multiple_of(terms)
}

/// Shared memory of a side's staged tiles, those that are worked on together, bytes.
pub(crate) fn staged_bytes(
    ChosenKernel { pair, variant }: ChosenKernel,
    side: Side,
    tile: TileShape<'_>,
    rows: u32,
) -> usize {
    let kernel = if side == Side::Key { pair.keys } else { pair.values };
    let tiles = tiles_together(ChosenKernel { pair, variant }, rows as usize);
    let bytes = tiles * kernel.tile_bytes(tile);
    // Pieces of the values behind them change places within lines.
    let halves = tensor_factor(pair.values, Side::Value) == Some(TensorFactor::Halves);
    let is_before_lines = variant == KernelVariant::Late && side == Side::Key && halves;
    if is_before_lines { bytes.next_multiple_of(LINE_BYTES) } else { bytes }
}

/// Words of digits of the queries for one step, of four lanes each.
fn digit_words(rows: usize) -> usize {
    if rows <= FEW_ROWS as usize { 4 * 4 * (rows + rows.min(2)) } else { 4 * 6 * rows }
}

/// Queries, scores, factors, digits and stops of a thread block: `AttendShared` of `shared.cuh`.
/// On CUDA cores all warps read the queries and have a part of every score, and at the end every
/// thread has a sum of values.
pub(crate) fn fixed_bytes(
    ChosenKernel { pair, variant }: ChosenKernel,
    rows: usize,
    dim: usize,
) -> usize {
    let (query, sums) = match uses_tensor_cores(ChosenKernel { pair, variant }) {
        true => (0, tiles_together(ChosenKernel { pair, variant }, rows) * TILE_TOKENS),
        false => (rows * dim, WARPS as usize * 32),
    };
    let floats = query.next_multiple_of(4) + rows * sums + rows.next_multiple_of(4);
    4 * (floats + weight_words(ChosenKernel { pair, variant }, rows))
        + tile_stop_bytes(
            pair.tile_spans(variant),
            pair.huffman,
            tiles_together(ChosenKernel { pair, variant }, rows),
        )
}

/// Query rows for which a kernel has room, that is given units of `rows`.
pub(crate) fn rows_of_kernel(variant: KernelVariant, rows: u32) -> u32 {
    if variant == KernelVariant::Any { ROWS[2] } else { rows_of(rows) }
}

#[cfg(test)]
mod tests;
