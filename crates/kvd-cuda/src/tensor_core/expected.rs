//! Expected kernels of both sides of a codec, before anything is calibrated.

use super::{
    choose_variant, fixed_bytes, resident_blocks, rows_of_kernel, staged_bytes, table_bytes,
    tensor_factor, tiles_together, uses_tensor_cores, work_bytes,
};
use crate::abi::{SideKernel, SideShape};
use crate::kernel_choice::{ChosenKernel, KernelPair, KernelVariant};
use crate::late_pairs::LatePairs;
use crate::page_shapes::{ExpectedPages, TileShape};
use crate::specialized::{self, TokenBlock};
use crate::unpack;
use kvd_codec::{EntropyCoding, SideSpec};
use kvd_core::{Geometry, Side};

/// The expected products of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedSide {
    /// Why they are not on tensor cores.
    pub(crate) not: Option<&'static str>,
    /// Shared memory that they take, bytes.
    pub(crate) bytes: usize,
    /// Shared memory of one staged tile, bytes.
    pub(crate) stage: usize,
    /// Shared memory of what it looks up, bytes: codebooks, which take what is left, apart.
    pub(crate) table: usize,
}

/// The expected kernel for both sides.
pub(crate) struct ExpectedKernel {
    /// Query rows that it takes.
    pub(crate) rows: u32,
    /// Products of each side.
    pub(crate) sides: [ExpectedSide; 2],
    /// Shared memory that is neither side's, bytes.
    pub(crate) fixed_bytes: usize,
    /// As [`tiles_together`].
    pub(crate) tiles: usize,
    /// As [`resident`].
    pub(crate) resident: (usize, u32),
    /// Whether it is compiled when a model is registered.
    pub(crate) is_late: bool,
    /// The thread block, where its warps own tokens.
    pub(crate) of_tokens: Option<TokenBlock>,
}

/// The kernel that will serve both sides for units of `rows` query rows, where `late` were
/// compiled.
pub(crate) fn expected_kernel(
    specs: [&SideSpec; 2],
    geometry: &Geometry,
    rows: u32,
    late: LatePairs,
) -> ExpectedKernel {
    let kernels = specs.map(|spec| {
        let kernel = SideKernel::of_page(spec.quantizer.page_id(geometry.dtype));
        kernel.expect("every page id has a kernel")
    });
    let grouped = Side::BOTH.iter().all(|side| {
        kernels[side.index()] == SideKernel::BitAlloc
            && unpack::expects_groups(*side, geometry.block_tokens, geometry.head_dim(*side))
    });
    let [key, value] = Side::BOTH.map(|side| {
        let (spec, dim) = (specs[side.index()], geometry.head_dim(side));
        expected_shape(ExpectedPages { spec, side, grouped, dim }, kernels[side.index()])
    });
    let huffman = specs.iter().any(|spec| spec.entropy == EntropyCoding::Huffman);
    let pair = KernelPair { keys: kernels[0], values: kernels[1], huffman };
    let variant = choose_variant(pair, &key, &value, late);
    let rows = rows_of_kernel(variant, rows);
    let chosen = ChosenKernel { pair, variant };
    let multiplies = Side::BOTH.map(|side| tensor_factor(kernels[side.index()], side).is_some());
    let not = |side: Side| match variant {
        _ if !multiplies[side.index()] => Some(match kernels[side.index()] {
            SideKernel::Polar | SideKernel::Lloyd => "of such codes keys alone have such products",
            _ => "its values are neither codes that stand for bytes nor halves",
        }),
        _ if multiplies != [true; 2] => Some("the other side has none, and they share a kernel"),
        KernelVariant::Own | KernelVariant::Groups if uses_tensor_cores(chosen) => None,
        KernelVariant::Late => None,
        KernelVariant::Own | KernelVariant::Groups => Some("its kernel multiplies floats"),
        KernelVariant::Floats => {
            Some("a side has several stages, over 4096 entries, or some of other lengths")
        }
        KernelVariant::Any => Some("the pair or its groups have no such kernel"),
    };
    let of_side = |side: Side, shape| {
        let bytes = work_bytes(chosen, side, shape, rows as usize);
        let tokens = geometry.block_tokens as usize;
        let stage = staged_bytes(chosen, side, TileShape { shape, tokens }, rows);
        let is_vq = kernels[side.index()] == SideKernel::Vq;
        let table = if is_vq { 0 } else { table_bytes(chosen, side, shape) };
        ExpectedSide { not: not(side), bytes, stage, table }
    };
    let dim = geometry.head_dim(Side::Key);
    let fixed = specialized::specialized_kernel(chosen, rows, &key, &value);
    let of_tokens = fixed.and_then(specialized::token_block);
    ExpectedKernel {
        rows,
        sides: [of_side(Side::Key, &key), of_side(Side::Value, &value)],
        fixed_bytes: fixed_bytes(chosen, rows as usize, dim),
        tiles: tiles_together(chosen, rows as usize),
        resident: of_tokens
            .map_or_else(|| resident_blocks(chosen, fixed.is_some()), |block| block.resident),
        is_late: variant == KernelVariant::Late,
        of_tokens,
    }
}

/// The fields of a side's shape that decide the kernel, before calibration.
fn expected_shape(of: ExpectedPages<'_>, kernel: SideKernel) -> SideShape {
    let mut shape = SideShape { scale_tokens: 1, sets: 1, ..SideShape::default() };
    (shape.kind, shape.dim) = (kernel as u32, of.dim as u32);
    shape.bits =
        of.spec.quantizer.code_count().map_or(8, |codes| codes.next_power_of_two().ilog2());
    (shape.scale_channels, shape.stages, shape.book_dim) = (1, 1, 1);
    if of.spec.entropy == EntropyCoding::Huffman {
        shape.stride = shape.dim;
    }
    kernel.expect_shape(of, &mut shape);
    shape
}
