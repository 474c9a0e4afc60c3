//! The kernels of a side, one row each: which pages they read, and where they are. A row is found
//! by the quantizer id of the pages' headers, which codecs say before they are calibrated.

use crate::abi::{SideKernel, SideShape};
use crate::codebook_table::CodebookRoom;
use crate::page_shapes::{
    self, ExpectShape, ExpectedPages, PageHead, ShapePages, TileBytes, TileShape,
};
use kvd_codec::HeadCodec;
use kvd_core::DType;

/// A kernel with its pages and its place.
struct KernelRow {
    kernel: SideKernel,
    /// Quantizer id in the headers of the pages that it reads.
    page_id: u8,
    /// Its part of a kernel's name.
    name: &'static str,
    /// Its header in `kernels/include/kvd`,
    header: &'static str,
    /// and its struct there: as `with` of `any.cuh` has them.
    device_struct: &'static str,
    /// Spans of a tile.
    spans: usize,
    shape_pages: ShapePages,
    expect_shape: ExpectShape,
    tile_bytes: TileBytes,
}

/// Each kernel, at its number.
const TABLE: [KernelRow; 12] = [
    KernelRow {
        kernel: SideKernel::F32,
        page_id: 0,
        name: "f32",
        header: "float.cuh",
        device_struct: "kvd::Float<kvd::F32>",
        spans: 1,
        shape_pages: page_shapes::shape_rows,
        expect_shape: page_shapes::expect_nothing,
        tile_bytes: page_shapes::tile_of_words,
    },
    KernelRow {
        kernel: SideKernel::F16,
        page_id: 1,
        name: "f16",
        header: "float.cuh",
        device_struct: "kvd::Float<kvd::F16>",
        spans: 1,
        shape_pages: page_shapes::shape_rows,
        expect_shape: page_shapes::expect_nothing,
        tile_bytes: page_shapes::tile_of_halves,
    },
    KernelRow {
        kernel: SideKernel::Bf16,
        page_id: 2,
        name: "bf16",
        header: "float.cuh",
        device_struct: "kvd::Float<kvd::Bf16>",
        spans: 1,
        shape_pages: page_shapes::shape_rows,
        expect_shape: page_shapes::expect_nothing,
        tile_bytes: page_shapes::tile_of_halves,
    },
    KernelRow {
        kernel: SideKernel::Fp8,
        page_id: 3,
        name: "fp8",
        header: "float.cuh",
        device_struct: "kvd::Fp8",
        spans: 2,
        shape_pages: page_shapes::shape_fp8,
        expect_shape: page_shapes::expect_nothing,
        tile_bytes: page_shapes::tile_of_fp8,
    },
    KernelRow {
        kernel: SideKernel::Uniform,
        page_id: 16,
        name: "uniform",
        header: "uniform.cuh",
        device_struct: "kvd::Uniform<kvd::Asymmetric>",
        spans: 2,
        shape_pages: page_shapes::shape_uniform,
        expect_shape: page_shapes::expect_uniform,
        tile_bytes: page_shapes::tile_of_uniform,
    },
    KernelRow {
        kernel: SideKernel::Symmetric,
        page_id: 17,
        name: "symmetric",
        header: "uniform.cuh",
        device_struct: "kvd::Uniform<kvd::Symmetric>",
        spans: 2,
        shape_pages: page_shapes::shape_uniform,
        expect_shape: page_shapes::expect_uniform,
        tile_bytes: page_shapes::tile_of_symmetric,
    },
    KernelRow {
        kernel: SideKernel::Hybrid,
        page_id: 18,
        name: "hybrid",
        header: "hybrid.cuh",
        device_struct: "kvd::Hybrid",
        spans: 3,
        shape_pages: page_shapes::shape_uniform,
        expect_shape: page_shapes::expect_uniform,
        tile_bytes: page_shapes::tile_of_hybrid,
    },
    KernelRow {
        kernel: SideKernel::Vq,
        page_id: 32,
        name: "vq",
        header: "vq.cuh",
        device_struct: "kvd::Vq",
        spans: 1,
        shape_pages: page_shapes::shape_vq,
        expect_shape: page_shapes::expect_vq,
        tile_bytes: page_shapes::tile_of_vq,
    },
    KernelRow {
        kernel: SideKernel::Polar,
        page_id: 64,
        name: "polar",
        header: "polar.cuh",
        device_struct: "kvd::Polar",
        spans: 2,
        shape_pages: page_shapes::shape_polar,
        expect_shape: page_shapes::expect_polar,
        tile_bytes: page_shapes::tile_of_polar,
    },
    KernelRow {
        kernel: SideKernel::Lloyd,
        page_id: 80,
        name: "lloyd",
        header: "lloyd.cuh",
        device_struct: "kvd::Lloyd",
        spans: 2,
        shape_pages: page_shapes::shape_lloyd,
        expect_shape: page_shapes::expect_lloyd,
        tile_bytes: page_shapes::tile_of_lloyd,
    },
    KernelRow {
        kernel: SideKernel::BitAlloc,
        page_id: 49,
        name: "bitalloc",
        header: "bitalloc.cuh",
        device_struct: "kvd::BitAlloc",
        spans: RUNS_MAX,
        shape_pages: page_shapes::shape_bit_alloc,
        expect_shape: page_shapes::expect_bit_alloc,
        tile_bytes: page_shapes::tile_of_bit_alloc,
    },
    KernelRow {
        kernel: SideKernel::Grid,
        page_id: 48,
        name: "grid",
        header: "grid.cuh",
        device_struct: "kvd::Grid",
        spans: 0,
        shape_pages: page_shapes::shape_grid,
        expect_shape: page_shapes::expect_grid,
        tile_bytes: page_shapes::tile_of_grid,
    },
];

/// Kernels, whose numbers are below this.
pub(crate) const KERNELS: usize = TABLE.len();
/// Runs of a bit allocation: `BitAlloc::RUNS_MAX` of `bitalloc.cuh`.
pub(crate) const RUNS_MAX: usize = 9;

/// The pairs that have kernels of their own (`kernels/attend_*.cu`).
const PAIRS: [(SideKernel, SideKernel); 10] = [
    (SideKernel::F32, SideKernel::F32),
    (SideKernel::F16, SideKernel::F16),
    (SideKernel::Bf16, SideKernel::Bf16),
    (SideKernel::Fp8, SideKernel::Fp8),
    (SideKernel::Uniform, SideKernel::Uniform),
    (SideKernel::Hybrid, SideKernel::Hybrid),
    (SideKernel::Vq, SideKernel::Vq),
    (SideKernel::Polar, SideKernel::Uniform),
    (SideKernel::Lloyd, SideKernel::Uniform),
    (SideKernel::BitAlloc, SideKernel::BitAlloc),
];

/// Pairs that have a kernel ahead of time where one side holds Huffman codes.
pub(crate) const HUFFMAN_PAIRS: [(SideKernel, SideKernel); 2] =
    [(SideKernel::Uniform, SideKernel::Uniform), (SideKernel::Grid, SideKernel::Grid)];

impl SideKernel {
    /// Each of them, at its number.
    pub const ALL: [Self; KERNELS] = {
        let (mut all, mut number) = ([Self::F32; KERNELS], 0);
        while number < KERNELS {
            all[number] = TABLE[number].kernel;
            number += 1;
        }
        all
    };

    /// The kernel of pages with that quantizer id in their header.
    pub(crate) fn of_page(id: u8) -> Option<Self> {
        TABLE.iter().find(|row| row.page_id == id).map(|row| row.kernel)
    }

    /// The kernel of a head's pages.
    pub(crate) fn of_head(head: &HeadCodec) -> Result<Self, &'static str> {
        Self::of_page(head.quantizer_id()).ok_or("of another quantizer")
    }

    pub(crate) fn of_rows(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
        }
    }

    /// Its part of a kernel's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        TABLE[self as usize].name
    }

    /// Its header in `kernels/include/kvd`.
    pub(crate) fn header_file(self) -> &'static str {
        TABLE[self as usize].header
    }

    /// Its struct in the header.
    pub(crate) fn device_struct(self) -> &'static str {
        TABLE[self as usize].device_struct
    }

    /// Whether keys of this kernel with values of that one have a kernel of their own, where codes
    /// have a fixed width; the others share a slower one.
    #[must_use]
    pub fn pairs_with(self, values: Self) -> bool {
        PAIRS.contains(&(self, values))
    }

    /// Spans of a tile.
    pub(crate) fn tile_spans(self) -> usize {
        TABLE[self as usize].spans
    }

    /// Makes the shape of a head's pages, as if its codes had a fixed width.
    pub(crate) fn shape_pages(
        self,
        of: PageHead<'_>,
        tables: &mut Vec<u8>,
        room: CodebookRoom,
    ) -> Result<SideShape, &'static str> {
        (TABLE[self as usize].shape_pages)(of, tables, room)
    }

    /// Fills in the fields of a shape that decide the kernel, before calibration.
    pub(crate) fn expect_shape(self, of: ExpectedPages<'_>, shape: &mut SideShape) {
        (TABLE[self as usize].expect_shape)(of, shape);
    }

    /// Shared memory for one tile, bytes.
    pub(crate) fn tile_bytes(self, tile: TileShape<'_>) -> usize {
        (TABLE[self as usize].tile_bytes)(tile)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::{presets, resolve_spec};
    use kvd_core::Side;

    #[test]
    fn rows_stand_at_their_numbers_and_no_two_read_the_same_pages() {
        for (number, row) in TABLE.iter().enumerate() {
            assert_eq!(row.kernel as usize, number);
            assert_eq!(SideKernel::of_page(row.page_id), Some(row.kernel));
        }
    }

    #[test]
    fn every_preset_has_kernels() {
        for preset in presets() {
            let spec = resolve_spec(preset.name).unwrap();
            for side in Side::BOTH {
                let id = spec.side(side).quantizer.page_id(DType::F16);
                assert!(SideKernel::of_page(id).is_some(), "{}: {side} pages of {id}", preset.name);
            }
        }
    }
}
