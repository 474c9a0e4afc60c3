//! One head's side as a kernel sees it: which kernel, with which shape, in how much shared memory.

use crate::abi::{SideKernel, SideShape, TILE_TOKENS};
use crate::codebook_table::CodebookRoom;
use crate::huffman_tables::HeadStreams;
use crate::kernel_table::HUFFMAN_PAIRS;
pub(crate) use crate::kernel_table::{KERNELS, RUNS_MAX};
use crate::page_shapes::PageHead;
use crate::unpack::{self, BitAllocation};
use kvd_codec::{CodeLayout, HeadCodec, StreamTable};
use kvd_core::{DType, Side};

// The layout of codes and the kernels agree on tiles.
const _: () = assert!(TILE_TOKENS == CodeLayout::TILE_TOKENS);
/// Copies are whole aligned pieces of this size.
pub(crate) const COPY_BYTES: usize = 16;
/// Bits of a code that the kernels read.
const CODE_BITS_MAX: u32 = 16;

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

/// A pair, and the kernel that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChosenKernel {
    pub(crate) pair: KernelPair,
    pub(crate) variant: KernelVariant,
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
pub(crate) fn base_shape(kernel: SideKernel, dim: usize, bits: u32) -> SideShape {
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

/// The Huffman tables of a head so far, the prior first, and which of them pages are written with.
#[derive(Clone, Copy)]
pub(crate) struct TrainedTables<'a> {
    pub(crate) versions: &'a [StreamTable],
    pub(crate) current: usize,
}

/// The lookup tables of one layer.
#[derive(Default)]
pub(crate) struct LayerTables {
    pub(crate) bytes: Vec<u8>,
    /// Runs and Huffman tables so far: heads share equal ones.
    lanes: Vec<(u64, usize)>,
}

/// Whether a side's codes can be multiplied in groups as they lie in pages of so many tokens.
pub(crate) fn in_groups(head: &HeadCodec, side: Side, tokens: u32) -> bool {
    let Some(bitalloc) = head.bitalloc() else { return false };
    let (levels, scales) = (bitalloc.level_values(), bitalloc.scales());
    let runs = &bitalloc.run_numbers();
    unpack::takes_groups(side, tokens, BitAllocation { runs, levels, scales })
}

/// How a head's pages are read, where both sides can be [in groups](in_groups) so. What kernels
/// look values up in goes to `tables`; of codebooks what `room` says is to stand in registers and
/// shared memory.
pub(crate) fn head_shapes(
    of: PageHead<'_>,
    trained: TrainedTables<'_>,
    tables: &mut LayerTables,
    room: CodebookRoom,
) -> Result<HeadShapes, &'static str> {
    let (kernel, shape) = page_shape(of, &mut tables.bytes, room)?;
    let Some(runs) = of.head.stream_runs() else {
        return Ok(HeadShapes { kernel, fixed: shape, versions: vec![shape], current: 0 });
    };
    let grid = of.head.grid();
    let TrainedTables { versions, current } = trained;
    let versions: Vec<&[StreamTable]> = match grid {
        Some(grid) => vec![grid.tables()],
        None => versions.iter().map(std::slice::from_ref).collect(),
    };
    let fixed = shape;
    let shapes = versions.into_iter().map(|of_version| {
        let lanes = HeadStreams { side: of.side, runs, tables: of_version, grid };
        let mut shape = shape;
        lanes.append_tables(&mut tables.bytes, &mut tables.lanes, &mut shape);
        shape
    });
    Ok(HeadShapes { kernel, fixed, versions: shapes.collect(), current })
}

/// The kernel and shape of a head's pages, as if its codes had a fixed width.
fn page_shape(
    of: PageHead<'_>,
    tables: &mut Vec<u8>,
    room: CodebookRoom,
) -> Result<(SideKernel, SideShape), &'static str> {
    let kernel = SideKernel::of_head(of.head)?;
    let shape = kernel.shape_pages(of, tables, room)?;
    if kernel != SideKernel::BitAlloc && shape.bits > CODE_BITS_MAX {
        return Err("codes of more than 16 bits");
    }
    Ok((kernel, shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page_shapes::TileShape;

    #[test]
    fn a_tile_fits_its_stage_wherever_it_begins() {
        // KIVI keys: 4 bits, 128 channels, one scale row of 512 bytes or two.
        let kivi = SideShape { scale_tokens: 32, ..base_shape(SideKernel::Uniform, 128, 4) };
        let bytes = SideKernel::Uniform.tile_bytes(TileShape { shape: &kivi, tokens: 64 });
        assert!(bytes >= 2048 + 512 + 4 * 15, "{bytes}");
        // A raw tile needs no more than its rows and what lies around them, in whole lines.
        let rows = rows_shape(DType::F16, 128);
        let bytes = SideKernel::F16.tile_bytes(TileShape { shape: &rows, tokens: 64 });
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
