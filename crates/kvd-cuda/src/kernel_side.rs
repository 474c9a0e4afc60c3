//! One head's side as a kernel sees it: which kernel, with which shape, in how much shared memory.

use crate::abi::SideShape;
use crate::codebook_table::{CodebookRoom, TableWriter};
use crate::huffman_tables::HeadStreams;
use crate::kernel_table::HUFFMAN_PAIRS;
pub use crate::kernel_table::SideKernel;
pub(crate) use crate::kernel_table::{KERNELS, RUNS_MAX};
use crate::lookup::{self, ALL_ENTRIES, LookupEntries};
use crate::unpack::{self, BitAllocation};
use kvd_codec::{CodeLayout, GroupAxis, HeadCodec, StoredLayout, StreamTable, UniformGroups};
use kvd_core::{DType, Geometry, RopePairing, Side};

/// Tokens of a tile.
pub(crate) const TILE_TOKENS: usize = CodeLayout::TILE_TOKENS;
/// Copies are whole aligned pieces of this size.
pub(crate) const COPY_BYTES: usize = 16;
/// Bytes within which pieces of a tile of halves change places: `LINE_BYTES` of `split_fp.cuh`.
pub(crate) const LINE_BYTES: usize = 128;
/// Bits of a code that the kernels read.
const CODE_BITS_MAX: u32 = 16;
/// Every plane of a tile that is not full may end inside a byte.
const PLANES_MAX: usize = 8;
/// Smallest word of a hybrid group.
const WORD_BYTES_MIN: usize = 4;

/// Query rows that one thread block can take, by kernel.
pub(crate) const ROWS: [u32; 3] = [1, 4, 8];

/// Both sides of a part, and whether one of them holds Huffman codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KernelPair {
    pub(crate) keys: SideKernel,
    pub(crate) values: SideKernel,
    pub(crate) huffman: bool,
}

/// Which kernel reads a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KernelVariant {
    /// Its own, with products on tensor cores where it has such.
    Own,
    /// Its own for bit allocations in whole groups, with products on tensor cores.
    Groups,
    /// Its own for what tensor cores do not take.
    Floats,
    /// Its own with products on tensor cores, compiled when a model was registered.
    Late,
    /// The one for all pairs.
    Any,
}

impl KernelPair {
    /// Whether it has a kernel of its own; the others share a slower one.
    pub(crate) fn is_known(self) -> bool {
        if self.huffman {
            return HUFFMAN_PAIRS.contains(&(self.keys, self.values));
        }
        self.keys.pairs_with(self.values)
    }

    /// Name of the kernel for a number of query rows.
    pub(crate) fn kernel_name(self, variant: KernelVariant, rows: u32) -> String {
        let stage = if self.huffman { "huffman_" } else { "" };
        let (keys, values, rows) = (self.keys.name(), self.values.name(), rows_of(rows));
        match variant {
            KernelVariant::Own => format!("kvd_attend_{stage}{keys}_{values}_{rows}"),
            KernelVariant::Groups => format!("kvd_attend_groups_groups_{rows}"),
            KernelVariant::Floats => format!("kvd_attend_{stage}{keys}float_{values}float_{rows}"),
            KernelVariant::Late => format!("kvd_attend_{stage}tensor_{keys}_{values}_{rows}"),
            KernelVariant::Any => format!("kvd_attend_{stage}any_any_{}", ROWS[2]),
        }
    }

    /// Spans of a tile of each side, as its kernel knows them: `SPANS` of the kernels' headers.
    pub(crate) fn tile_spans(self, variant: KernelVariant) -> [usize; 2] {
        [self.keys, self.values].map(|side| match variant {
            KernelVariant::Any => RUNS_MAX,
            KernelVariant::Groups => 1,
            KernelVariant::Own | KernelVariant::Floats | KernelVariant::Late => side.tile_spans(),
        })
    }
}

/// The kernel's rows for a unit of `rows` rows.
pub(crate) fn rows_of(rows: u32) -> u32 {
    ROWS.into_iter().find(|most| rows <= *most).unwrap_or(ROWS[2])
}

/// A shape with what every kernel reads.
fn base_shape(kernel: SideKernel, dim: usize, bits: u32) -> SideShape {
    SideShape {
        kind: kernel as u32,
        dim: dim as u32,
        bits,
        scale_tokens: 1,
        scale_channels: 1,
        book_dim: 1,
        stages: 1,
        sets: 1,
        parts: 1,
        ..SideShape::default()
    }
}

/// The shape of rows in a dtype.
pub(crate) fn rows_shape(dtype: DType, dim: usize) -> SideShape {
    base_shape(SideKernel::of_rows(dtype), dim, 0)
}

/// The shape of a page that stands in for another, by the quantizer of its header: rows in a
/// dtype, FP8, or `uniform(b=4,g=32,axis=token)` (docs/format.md, "Fallback").
pub(crate) fn fallback_shape(quantizer: u8, dim: usize) -> Option<(SideKernel, SideShape)> {
    let kernel = SideKernel::of_page(quantizer)?;
    let shape = match kernel {
        SideKernel::F32 | SideKernel::F16 | SideKernel::Bf16 => base_shape(kernel, dim, 0),
        SideKernel::Fp8 => base_shape(kernel, dim, 8),
        SideKernel::Uniform => {
            SideShape { scale_channels: dim.min(32) as u32, ..base_shape(kernel, dim, 4) }
        }
        _ => return None,
    };
    Some((kernel, shape))
}

/// How a head's pages are read.
#[derive(Clone, Debug)]
pub(crate) struct HeadShapes {
    pub(crate) kernel: SideKernel,
    /// As if codes had a fixed width.
    fixed: SideShape,
    /// By the version of their Huffman tables, the prior first; else one.
    versions: Vec<SideShape>,
    /// Table version of pages that are written now, an index into `versions`.
    current: usize,
}

impl HeadShapes {
    /// Kernel and shape of pages that are written now.
    pub(crate) fn current_shape(&self) -> Option<(SideKernel, SideShape)> {
        self.versions.get(self.current).map(|shape| (self.kernel, *shape))
    }

    /// The shape of pages as far as their codes, whatever their Huffman table.
    pub(crate) fn fixed_width_shape(&self) -> (SideKernel, SideShape) {
        (self.kernel, self.fixed)
    }

    /// The shape of pages with that table version in their header, 0 for none.
    pub(crate) fn version_shape(
        &self,
        version: u16,
    ) -> Result<(SideKernel, SideShape), &'static str> {
        let shape = self.versions.get(usize::from(version));
        Ok((self.kernel, *shape.ok_or("a page of an unknown Huffman table")?))
    }
}

/// The lookup tables of one layer.
#[derive(Default)]
pub(crate) struct LayerTables {
    pub(crate) bytes: Vec<u8>,
    /// Runs and Huffman tables so far: heads share equal ones.
    lanes: Vec<(u64, usize)>,
}

/// Whether a side's codes can be multiplied in groups as they lie in pages of so many tokens.
pub(crate) fn in_groups((side, which): (&HeadCodec, Side), tokens: u32) -> bool {
    let Some(bitalloc) = side.bitalloc() else { return false };
    let (levels, scales) = (bitalloc.level_values(), bitalloc.scales());
    let runs = &bitalloc.run_numbers();
    unpack::takes_groups((which, tokens), BitAllocation { runs, levels, scales })
}

/// How a head's pages are read, where both sides can be [in groups](in_groups) so. What kernels
/// look values up in goes to `tables`; of codebooks what `room` says is to stand in registers and
/// shared memory. `trained` are the Huffman tables so far, the prior first, and which of them pages
/// are written with.
pub(crate) fn head_shapes(
    (side, which, grouped): (&HeadCodec, Side, bool),
    (trained, current): (&[StreamTable], usize),
    tables: &mut LayerTables,
    room: CodebookRoom,
) -> Result<HeadShapes, &'static str> {
    let (kernel, shape) = page_shape((side, which, grouped), &mut tables.bytes, room)?;
    let Some(runs) = side.stream_runs() else {
        return Ok(HeadShapes { kernel, fixed: shape, versions: vec![shape], current: 0 });
    };
    let grid = side.grid();
    let versions: Vec<&[StreamTable]> = match grid {
        Some(grid) => vec![grid.tables()],
        None => trained.iter().map(std::slice::from_ref).collect(),
    };
    let fixed = shape;
    let shapes = versions.into_iter().map(|of_version| {
        let lanes = HeadStreams { side: which, runs, tables: of_version, grid };
        let mut shape = shape;
        lanes.append_tables(&mut tables.bytes, &mut tables.lanes, &mut shape);
        shape
    });
    Ok(HeadShapes { kernel, fixed, versions: shapes.collect(), current })
}

/// The shape of equidistant levels.
fn uniform_shape(kernel: SideKernel, groups: &UniformGroups, dim: usize) -> SideShape {
    let page = Geometry::BLOCK_TOKENS_MAX as usize;
    let (tokens, channels) = match groups.axis {
        GroupAxis::Channel => (groups.group.unwrap_or(page), 1),
        GroupAxis::Token => (1, groups.group.unwrap_or(dim).min(dim)),
        GroupAxis::Block => (page, dim),
    };
    SideShape {
        scale_tokens: tokens as u32,
        scale_channels: channels as u32,
        top: groups.top.into(),
        ..base_shape(kernel, dim, groups.bits)
    }
}

/// The shape of pages of a bit allocation; its tables are appended.
fn bit_alloc_shape(
    dim: usize,
    side: (Side, bool),
    allocation: BitAllocation<'_>,
    tables: &mut Vec<u8>,
) -> Result<SideShape, &'static str> {
    let BitAllocation { runs, levels, scales } = allocation;
    if runs.len() > RUNS_MAX {
        return Err("a bit allocation of more than nine runs");
    }
    let bits = runs.iter().map(|[_, len, width]| len * width).sum::<usize>();
    let mut shape = base_shape(SideKernel::BitAlloc, dim, bits as u32);
    TableWriter::new(tables, &mut shape)
        .append_runs(runs, levels.len())
        .append_floats(levels)
        .append_floats(scales);
    unpack::append_unpack(side, allocation, tables, &mut shape);
    Ok(shape)
}

/// The kernel and shape of a head's pages, as if its codes had a fixed width.
fn page_shape(
    (side, which, grouped): (&HeadCodec, Side, bool),
    tables: &mut Vec<u8>,
    room: CodebookRoom,
) -> Result<(SideKernel, SideShape), &'static str> {
    let dim = side.dim();
    let page = Geometry::BLOCK_TOKENS_MAX as usize;
    let kernel = SideKernel::of_head(side)?;
    let shape = match side.stored_layout() {
        StoredLayout::Float(dtype) => rows_shape(dtype, dim),
        StoredLayout::E4m3 | StoredLayout::Grid(_) => base_shape(kernel, dim, 8),
        StoredLayout::Uniform(groups) => uniform_shape(kernel, &groups, dim),
        StoredLayout::Codebooks(vq) => {
            let bits = (vq.stage_codebook(0, 0).entries().len() / vq.dim()).ilog2();
            let mut shape = base_shape(kernel, dim, bits);
            shape.book_dim = vq.dim() as u32;
            shape.stages = vq.stages() as u32;
            shape.sets = if vq.is_grouped() { vq.positions() as u32 } else { 1 };
            TableWriter::new(tables, &mut shape).append_codebooks(vq, which, room);
            let entries = LookupEntries::from_codebooks(vq);
            lookup::append_lookup(entries, tables, &mut shape, room.bytes);
            shape
        }
        StoredLayout::Polar { angle_bits, radius_bits, group, steps, directions, pairing } => {
            let mut shape = base_shape(kernel, dim, angle_bits + radius_bits);
            shape.scale_tokens = group.unwrap_or(page) as u32;
            shape.angle_bits = angle_bits;
            shape.interleaved = u32::from(pairing == RopePairing::Interleaved);
            TableWriter::new(tables, &mut shape)
                .append_floats(directions.as_flattened())
                .append_floats(steps);
            let entries = LookupEntries::from_polar(shape.bits, directions);
            lookup::append_lookup(entries, tables, &mut shape, ALL_ENTRIES);
            shape
        }
        StoredLayout::Lloyd { bits, levels } => {
            let mut shape = base_shape(kernel, dim, bits);
            TableWriter::new(tables, &mut shape).append_floats(levels);
            let entries = LookupEntries::from_levels(levels);
            lookup::append_lookup(entries, tables, &mut shape, ALL_ENTRIES);
            shape
        }
        StoredLayout::BitAlloc(bitalloc) => {
            let (levels, scales) = (bitalloc.level_values(), bitalloc.scales());
            let allocation = BitAllocation { runs: &bitalloc.run_numbers(), levels, scales };
            bit_alloc_shape(dim, (which, grouped), allocation, tables)?
        }
        _ => return Err("of another quantizer"),
    };
    if kernel != SideKernel::BitAlloc && shape.bits > CODE_BITS_MAX {
        return Err("codes of more than 16 bits");
    }
    Ok((kernel, shape))
}

/// Shared memory for one tile of a page of `tokens` rows, bytes: the spans of the kernel's struct
/// at their largest, each rounded out to whole copies.
pub(crate) fn stage_bytes(kernel: SideKernel, shape: &SideShape, tokens: usize) -> usize {
    let (dim, bits) = (shape.dim as usize, shape.bits as usize);
    let rows = tokens.min(TILE_TOKENS);
    let copied = |bytes: usize| (bytes + 2 * (COPY_BYTES - 1)) / COPY_BYTES * COPY_BYTES;
    if let Some(bytes) = kernel.value_bytes() {
        return copied(rows * dim * bytes).next_multiple_of(LINE_BYTES);
    }
    let codes = |per_row: usize| match shape.stride {
        0 => copied((rows * per_row * bits).div_ceil(8) + PLANES_MAX),
        // Huffman codes are decoded, not staged.
        _ => 0,
    };
    let share = shape.scale_tokens as usize;
    let scale_rows = tokens.div_ceil(share).min((TILE_TOKENS - 1) / share + 2);
    let pairs = dim.div_ceil(shape.scale_channels as usize);
    match kernel {
        SideKernel::Uniform => copied(scale_rows * pairs * 4) + codes(dim),
        SideKernel::Symmetric => copied(scale_rows * pairs * 2) + codes(dim),
        SideKernel::Hybrid => {
            let values = share.min(tokens) * shape.scale_channels as usize;
            let word = values.div_ceil(8).max(WORD_BYTES_MIN);
            let mask = copied(scale_rows * pairs / 8 + 2);
            mask + copied(scale_rows * pairs * (word + 2)) + codes(dim)
        }
        SideKernel::Vq => codes(dim / shape.book_dim as usize * shape.stages as usize),
        SideKernel::Polar => {
            let has_steps = shape.table_bytes == 8 << shape.angle_bits;
            let scales = if has_steps { copied(scale_rows * dim) } else { 0 };
            scales + codes(dim / 2)
        }
        SideKernel::Lloyd => copied(2 * rows) + codes(dim),
        // Its bits are those of a row; every run has a place of its own, that of a full tile.
        SideKernel::BitAlloc => {
            copied(TILE_TOKENS * bits / 8 + RUNS_MAX * (PLANES_MAX + 2 * COPY_BYTES))
        }
        SideKernel::Grid => 0,
        _ => copied(4) + codes(dim).next_multiple_of(LINE_BYTES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_fits_its_stage_wherever_it_begins() {
        // KIVI keys: 4 bits, 128 channels, one scale row of 512 bytes or two.
        let kivi = SideShape { scale_tokens: 32, ..base_shape(SideKernel::Uniform, 128, 4) };
        let bytes = stage_bytes(SideKernel::Uniform, &kivi, 64);
        assert!(bytes >= 2048 + 512 + 4 * 15, "{bytes}");
        // A raw tile needs no more than its rows and what lies around them, in whole lines.
        let bytes = stage_bytes(SideKernel::F16, &rows_shape(DType::F16, 128), 64);
        assert_eq!(bytes, 32 * 256 + 128);
    }

    #[test]
    fn pairs_without_a_kernel_share_one() {
        let name = |keys, values, huffman, rows| {
            let pair = KernelPair { keys, values, huffman };
            pair.kernel_name(
                if pair.is_known() { KernelVariant::Own } else { KernelVariant::Any },
                rows,
            )
        };
        assert_eq!(name(SideKernel::Vq, SideKernel::Vq, false, 3), "kvd_attend_vq_vq_4");
        assert_eq!(name(SideKernel::Vq, SideKernel::F16, false, 1), "kvd_attend_any_any_8");
        let uniform = SideKernel::Uniform;
        assert_eq!(name(uniform, uniform, false, 9), "kvd_attend_uniform_uniform_8");
        assert_eq!(name(uniform, uniform, true, 1), "kvd_attend_huffman_uniform_uniform_1");
        assert_eq!(
            name(SideKernel::Grid, SideKernel::F16, true, 1),
            "kvd_attend_huffman_any_any_8"
        );
    }

    #[test]
    fn pages_that_stand_in_for_others_are_known_by_their_header() {
        let (kernel, shape) = fallback_shape(16, 128).unwrap();
        assert_eq!((kernel, shape.bits, shape.scale_channels), (SideKernel::Uniform, 4, 32));
        assert_eq!(fallback_shape(1, 64).unwrap().0, SideKernel::F16);
        assert_eq!(fallback_shape(48, 64), None);
    }
}
