//! Shapes of pages, quantizer by quantizer: the columns of functions of the kernel table. A shape
//! is made of a bound head, expected of a spec before anything is calibrated, and says how much
//! shared memory one tile takes.

use crate::abi::{LINE_BYTES, SideKernel, SideShape, TILE_TOKENS};
use crate::codebook_table::{CodebookRoom, TableWriter};
use crate::kernel_choice::{COPY_BYTES, base_shape};
use crate::kernel_table::RUNS_MAX;
use crate::lookup::{self, ALL_ENTRIES, LookupEntries};
use crate::specialized::polar_table_bytes;
use crate::unpack::{self, BitAllocation, GroupedSide};
use kvd_codec::{
    BitAllocSpec, CodebookScope, GroupAxis, HeadCodec, LloydSpec, PolarSpec, Quantizer, SideSpec,
    StoredLayout, UniformSpec,
};
use kvd_core::{Geometry, RopePairing, Side};

/// Every plane of a tile that is not full may end inside a byte.
const PLANES_MAX: usize = 8;
/// Smallest word of a hybrid group.
const WORD_BYTES_MIN: usize = 4;

/// A head whose pages a kernel is to read.
#[derive(Clone, Copy)]
pub(crate) struct PageHead<'a> {
    pub(crate) head: &'a HeadCodec,
    pub(crate) side: Side,
    /// Whether codes of both sides are multiplied in groups as they lie.
    pub(crate) grouped: bool,
}

/// A side whose pages a kernel will read, before it is calibrated.
#[derive(Clone, Copy)]
pub(crate) struct ExpectedPages<'a> {
    pub(crate) spec: &'a SideSpec,
    pub(crate) side: Side,
    /// Whether codes of both sides will be multiplied in groups as they lie.
    pub(crate) grouped: bool,
    pub(crate) dim: usize,
}

/// A tile of pages of so many tokens.
#[derive(Clone, Copy)]
pub(crate) struct TileShape<'a> {
    pub(crate) shape: &'a SideShape,
    pub(crate) tokens: usize,
}

/// Makes the shape of a head's pages, as if codes had a fixed width; what a kernel looks up goes to
/// the tables, and of codebooks what there is room for is to stand in registers and shared memory.
pub(crate) type ShapePages =
    fn(PageHead<'_>, &mut Vec<u8>, CodebookRoom) -> Result<SideShape, &'static str>;
/// Fills in the fields of a shape that decide the kernel.
pub(crate) type ExpectShape = fn(ExpectedPages<'_>, &mut SideShape);
/// Shared memory for one tile, bytes: the spans of the kernel's struct at their largest, each
/// rounded out to whole copies.
pub(crate) type TileBytes = fn(TileShape<'_>) -> usize;

/// A head that another row's quantizer has.
const OTHER: &str = "of another quantizer";

/// Rows in a dtype, without codes.
pub(crate) fn shape_rows(
    of: PageHead<'_>,
    _: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    let StoredLayout::Float(dtype) = of.head.stored_layout() else { return Err(OTHER) };
    Ok(base_shape(SideKernel::of_rows(dtype), of.head.dim(), 0))
}

/// FP8.
pub(crate) fn shape_fp8(
    of: PageHead<'_>,
    _: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    Ok(base_shape(SideKernel::Fp8, of.head.dim(), 8))
}

/// Codes by class, a byte each once they are decoded.
pub(crate) fn shape_grid(
    of: PageHead<'_>,
    _: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    Ok(base_shape(SideKernel::Grid, of.head.dim(), 8))
}

/// Equidistant levels.
pub(crate) fn shape_uniform(
    of: PageHead<'_>,
    _: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    let StoredLayout::Uniform(groups) = of.head.stored_layout() else { return Err(OTHER) };
    let (dim, page) = (of.head.dim(), Geometry::BLOCK_TOKENS_MAX as usize);
    let (tokens, channels) = match groups.axis {
        GroupAxis::Channel => (groups.group.unwrap_or(page), 1),
        GroupAxis::Token => (1, groups.group.unwrap_or(dim).min(dim)),
        GroupAxis::Block => (page, dim),
    };
    Ok(SideShape {
        scale_tokens: tokens as u32,
        scale_channels: channels as u32,
        top: groups.top.into(),
        ..base_shape(SideKernel::of_head(of.head)?, dim, groups.bits)
    })
}

/// Entries of codebooks.
pub(crate) fn shape_vq(
    of: PageHead<'_>,
    tables: &mut Vec<u8>,
    room: CodebookRoom,
) -> Result<SideShape, &'static str> {
    let StoredLayout::Codebooks(vq) = of.head.stored_layout() else { return Err(OTHER) };
    let bits = (vq.stage_codebook(0, 0).entries().len() / vq.dim()).ilog2();
    let mut shape = base_shape(SideKernel::Vq, of.head.dim(), bits);
    shape.book_dim = vq.dim() as u32;
    shape.stages = vq.stages() as u32;
    shape.sets = if vq.is_grouped() { vq.positions() as u32 } else { 1 };
    TableWriter::new(tables, &mut shape).append_codebooks(vq, of.side, room);
    let entries = LookupEntries::from_codebooks(vq);
    lookup::append_lookup(entries, tables, &mut shape, room.bytes);
    Ok(shape)
}

/// Angles and radii.
pub(crate) fn shape_polar(
    of: PageHead<'_>,
    tables: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    let StoredLayout::Polar { angle_bits, radius_bits, group, steps, directions, pairing } =
        of.head.stored_layout()
    else {
        return Err(OTHER);
    };
    let mut shape = base_shape(SideKernel::Polar, of.head.dim(), angle_bits + radius_bits);
    shape.scale_tokens = group.map_or(Geometry::BLOCK_TOKENS_MAX, |group| group as u32);
    shape.angle_bits = angle_bits;
    shape.interleaved = u32::from(pairing == RopePairing::Interleaved);
    TableWriter::new(tables, &mut shape)
        .append_floats(directions.as_flattened())
        .append_floats(steps);
    let entries = LookupEntries::from_polar(shape.bits, directions);
    lookup::append_lookup(entries, tables, &mut shape, ALL_ENTRIES);
    Ok(shape)
}

/// Levels of turned rows.
pub(crate) fn shape_lloyd(
    of: PageHead<'_>,
    tables: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    let StoredLayout::Lloyd { bits, levels } = of.head.stored_layout() else { return Err(OTHER) };
    let mut shape = base_shape(SideKernel::Lloyd, of.head.dim(), bits);
    TableWriter::new(tables, &mut shape).append_floats(levels);
    lookup::append_lookup(LookupEntries::from_levels(levels), tables, &mut shape, ALL_ENTRIES);
    Ok(shape)
}

/// A width for every coefficient.
pub(crate) fn shape_bit_alloc(
    of: PageHead<'_>,
    tables: &mut Vec<u8>,
    _: CodebookRoom,
) -> Result<SideShape, &'static str> {
    let StoredLayout::BitAlloc(bitalloc) = of.head.stored_layout() else { return Err(OTHER) };
    let (levels, scales) = (bitalloc.level_values(), bitalloc.scales());
    let runs = &bitalloc.run_numbers();
    let allocation = BitAllocation { runs, levels, scales };
    if runs.len() > RUNS_MAX {
        return Err("a bit allocation of more than nine runs");
    }
    let bits = runs.iter().map(|[_, len, width]| len * width).sum::<usize>();
    let mut shape = base_shape(SideKernel::BitAlloc, of.head.dim(), bits as u32);
    TableWriter::new(tables, &mut shape)
        .append_runs(runs, levels.len())
        .append_floats(levels)
        .append_floats(scales);
    let side = GroupedSide { side: of.side, grouped: of.grouped };
    unpack::append_unpack(side, allocation, tables, &mut shape);
    Ok(shape)
}

/// Nothing but what every spec says.
pub(crate) fn expect_nothing(_: ExpectedPages<'_>, _: &mut SideShape) {}

/// Decoded codes, which lie as rows do.
pub(crate) fn expect_grid(_: ExpectedPages<'_>, shape: &mut SideShape) {
    shape.stride = shape.dim;
}

/// As [`shape_uniform`].
pub(crate) fn expect_uniform(of: ExpectedPages<'_>, shape: &mut SideShape) {
    let Quantizer::Uniform(UniformSpec { axis, group, .. }) = of.spec.quantizer else { return };
    let (group, page) = (group.map(u32::from), Geometry::BLOCK_TOKENS_MAX);
    (shape.scale_tokens, shape.scale_channels) = match axis {
        GroupAxis::Channel => (group.unwrap_or(page), 1),
        GroupAxis::Token => (1, group.unwrap_or(shape.dim).min(shape.dim)),
        GroupAxis::Block => (page, shape.dim),
    };
}

/// As a fit leaves them: others' codebooks may be on whole levels nonetheless.
pub(crate) fn expect_vq(of: ExpectedPages<'_>, shape: &mut SideShape) {
    let Quantizer::Vq(vq) = of.spec.quantizer else { return };
    shape.bits = vq.bits.into();
    (shape.book_dim, shape.stages) = (vq.dim.into(), vq.stages.into());
    let grouped = vq.scope == CodebookScope::Group;
    shape.sets = if grouped { of.dim as u32 / u32::from(vq.dim) } else { 1 };
    let fits = vq.is_on_levels() && lookup::fits_lookup(vq.dim.into());
    shape.entry_bytes = if fits { vq.dim.into() } else { 0 };
    shape.entry_count = if vq.bits <= 8 { 1 << vq.bits } else { 0 };
}

/// As [`shape_polar`].
pub(crate) fn expect_polar(of: ExpectedPages<'_>, shape: &mut SideShape) {
    let Quantizer::Polar(PolarSpec { angle, radius, group }) = of.spec.quantizer else { return };
    shape.scale_tokens = group.map_or(Geometry::BLOCK_TOKENS_MAX, u32::from);
    shape.bits = u32::from(angle) + u32::from(radius);
    shape.angle_bits = angle.into();
    // Directions alone, where pages have the steps of their radii.
    let with_steps = polar_table_bytes(shape.angle_bits, shape.dim);
    shape.table_bytes = if group.is_some() { 8 << angle } else { with_steps };
    lookup::expect_all(shape, 4);
}

/// As [`shape_lloyd`].
pub(crate) fn expect_lloyd(of: ExpectedPages<'_>, shape: &mut SideShape) {
    let Quantizer::Lloyd(LloydSpec { bits }) = of.spec.quantizer else { return };
    shape.bits = bits.into();
    shape.table_bytes = 4 << bits;
    lookup::expect_all(shape, 2);
}

/// As [`shape_bit_alloc`].
pub(crate) fn expect_bit_alloc(of: ExpectedPages<'_>, shape: &mut SideShape) {
    let Quantizer::BitAlloc(BitAllocSpec { bits }) = of.spec.quantizer else { return };
    let (kind, dim) = (shape.kind, shape.dim);
    let bits = (bits * dim as f32).ceil() as u32;
    let side = GroupedSide { side: of.side, grouped: of.grouped };
    let spread = unpack::expected_unpack(side, of.dim);
    let (scale_tokens, scale_channels) = (1, 1);
    *shape = SideShape { kind, dim, bits, scale_tokens, scale_channels, ..spread };
}

/// Bytes, and what lies around them, in whole copies.
fn copied_bytes(bytes: usize) -> usize {
    (bytes + 2 * (COPY_BYTES - 1)) / COPY_BYTES * COPY_BYTES
}

impl TileShape<'_> {
    fn tile_rows(&self) -> usize {
        self.tokens.min(TILE_TOKENS)
    }

    fn head_dim(&self) -> usize {
        self.shape.dim as usize
    }

    /// Codes of rows of so many.
    fn code_bytes(&self, per_row: usize) -> usize {
        // Huffman codes are decoded, not staged.
        if self.shape.stride != 0 {
            return 0;
        }
        copied_bytes(
            (self.tile_rows() * per_row * self.shape.bits as usize).div_ceil(8) + PLANES_MAX,
        )
    }

    /// Rows of scales that a tile meets.
    fn scale_rows(&self) -> usize {
        let share = self.shape.scale_tokens as usize;
        self.tokens.div_ceil(share).min((TILE_TOKENS - 1) / share + 2)
    }

    /// Scales of a row.
    fn scale_pairs(&self) -> usize {
        self.head_dim().div_ceil(self.shape.scale_channels as usize)
    }

    fn row_bytes(&self, value_bytes: usize) -> usize {
        copied_bytes(self.tile_rows() * self.head_dim() * value_bytes).next_multiple_of(LINE_BYTES)
    }
}

/// Rows of f32.
pub(crate) fn tile_of_words(tile: TileShape<'_>) -> usize {
    tile.row_bytes(4)
}

/// Rows of f16 and bf16.
pub(crate) fn tile_of_halves(tile: TileShape<'_>) -> usize {
    tile.row_bytes(2)
}

/// Codes behind one scale.
pub(crate) fn tile_of_fp8(tile: TileShape<'_>) -> usize {
    copied_bytes(4) + tile.code_bytes(tile.head_dim()).next_multiple_of(LINE_BYTES)
}

/// Codes behind pairs of minimum and step.
pub(crate) fn tile_of_uniform(tile: TileShape<'_>) -> usize {
    copied_bytes(tile.scale_rows() * tile.scale_pairs() * 4) + tile.code_bytes(tile.head_dim())
}

/// Codes behind steps.
pub(crate) fn tile_of_symmetric(tile: TileShape<'_>) -> usize {
    copied_bytes(tile.scale_rows() * tile.scale_pairs() * 2) + tile.code_bytes(tile.head_dim())
}

/// Codes behind groups' modes, signs and steps.
pub(crate) fn tile_of_hybrid(tile: TileShape<'_>) -> usize {
    let share = tile.shape.scale_tokens as usize;
    let values = share.min(tile.tokens) * tile.shape.scale_channels as usize;
    let word = values.div_ceil(8).max(WORD_BYTES_MIN);
    let groups = tile.scale_rows() * tile.scale_pairs();
    copied_bytes(groups / 8 + 2)
        + copied_bytes(groups * (word + 2))
        + tile.code_bytes(tile.head_dim())
}

/// Codes of every stage.
pub(crate) fn tile_of_vq(tile: TileShape<'_>) -> usize {
    tile.code_bytes(tile.head_dim() / tile.shape.book_dim as usize * tile.shape.stages as usize)
}

/// Codes of pairs, behind steps where pages have them.
pub(crate) fn tile_of_polar(tile: TileShape<'_>) -> usize {
    let has_steps = tile.shape.table_bytes == 8 << tile.shape.angle_bits;
    let scales = if has_steps { copied_bytes(tile.scale_rows() * tile.head_dim()) } else { 0 };
    scales + tile.code_bytes(tile.head_dim() / 2)
}

/// Codes behind a scale of each row.
pub(crate) fn tile_of_lloyd(tile: TileShape<'_>) -> usize {
    copied_bytes(2 * tile.tile_rows()) + tile.code_bytes(tile.head_dim())
}

/// Its bits are those of a row; every run has a place of its own, that of a full tile.
pub(crate) fn tile_of_bit_alloc(tile: TileShape<'_>) -> usize {
    let bits = tile.shape.bits as usize;
    copied_bytes(TILE_TOKENS * bits / 8 + RUNS_MAX * (PLANES_MAX + 2 * COPY_BYTES))
}

/// All of its codes are decoded.
pub(crate) fn tile_of_grid(_: TileShape<'_>) -> usize {
    0
}
