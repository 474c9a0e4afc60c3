//! Expected kernels of both sides of a codec, before anything is calibrated.

use super::{
    choose_variant, fixed_bytes, resident_blocks, rows_of_kernel, staged_bytes, table_bytes,
    tensor_factor, tiles_together, uses_tensor_cores, work_bytes,
};
use crate::abi::SideShape;
use crate::kernel_side::{KernelPair, KernelVariant, SideKernel};
use crate::late_pairs::LatePairs;
use crate::lookup;
use crate::specialized::{self, polar_table_bytes};
use crate::unpack;
use kvd_codec::{
    BitAllocSpec, CodebookScope, EntropyCoding, GroupAxis, LloydSpec, PolarSpec, Quantizer,
    SideSpec, UniformSpec,
};
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
            && unpack::expects_groups((*side, geometry.block_tokens), geometry.head_dim(*side))
    });
    let [key, value] = Side::BOTH.map(|side| {
        let dim = geometry.head_dim(side);
        expected_shape(specs[side.index()], (side, grouped), dim, kernels[side.index()])
    });
    let huffman = specs.iter().any(|spec| spec.entropy == EntropyCoding::Huffman);
    let pair = KernelPair { keys: kernels[0], values: kernels[1], huffman };
    let variant = choose_variant(pair, &key, &value, late);
    let rows = rows_of_kernel(variant, rows);
    let multiplies = Side::BOTH.map(|side| tensor_factor(kernels[side.index()], side).is_some());
    let not = |side: Side| match variant {
        _ if !multiplies[side.index()] => Some(match kernels[side.index()] {
            SideKernel::Polar | SideKernel::Lloyd => "of such codes keys alone have such products",
            _ => "its values are neither codes that stand for bytes nor halves",
        }),
        _ if multiplies != [true; 2] => Some("the other side has none, and they share a kernel"),
        KernelVariant::Own | KernelVariant::Groups if uses_tensor_cores((pair, variant)) => None,
        KernelVariant::Late => None,
        KernelVariant::Own | KernelVariant::Groups => Some("its kernel multiplies floats"),
        KernelVariant::Floats => {
            Some("a side has several stages, over 4096 entries, or some of other lengths")
        }
        KernelVariant::Any => Some("the pair or its groups have no such kernel"),
    };
    let of_side = |side: Side, shape| {
        let bytes = work_bytes((pair, variant), side, shape, rows as usize);
        let tokens = geometry.block_tokens as usize;
        let stage = staged_bytes((pair, variant), side, (shape, tokens), rows);
        let is_vq = kernels[side.index()] == SideKernel::Vq;
        let table = if is_vq { 0 } else { table_bytes((pair, variant), side, shape) };
        ExpectedSide { not: not(side), bytes, stage, table }
    };
    let dim = geometry.head_dim(Side::Key);
    let is_fixed = specialized::specialized_kernel((pair, variant), rows, &key, &value).is_some();
    ExpectedKernel {
        rows,
        sides: [of_side(Side::Key, &key), of_side(Side::Value, &value)],
        fixed_bytes: fixed_bytes((pair, variant), rows as usize, dim),
        tiles: tiles_together((pair, variant), rows as usize),
        resident: resident_blocks((pair, variant), is_fixed),
        is_late: variant == KernelVariant::Late,
    }
}

/// The fields of a side's shape that decide the kernel, before calibration.
fn expected_shape(
    side: &SideSpec,
    (which, grouped): (Side, bool),
    dim: usize,
    kernel: SideKernel,
) -> SideShape {
    let mut shape = SideShape { scale_tokens: 1, sets: 1, ..SideShape::default() };
    (shape.kind, shape.dim) = (kernel as u32, dim as u32);
    let page = Geometry::BLOCK_TOKENS_MAX;
    shape.bits = side.quantizer.code_count().map_or(8, |codes| codes.next_power_of_two().ilog2());
    (shape.scale_channels, shape.stages, shape.book_dim) = (1, 1, 1);
    if side.entropy == EntropyCoding::Huffman {
        shape.stride = shape.dim;
    }
    match side.quantizer {
        Quantizer::Uniform(UniformSpec { axis, group, .. }) => {
            let group = group.map(u32::from);
            (shape.scale_tokens, shape.scale_channels) = match axis {
                GroupAxis::Channel => (group.unwrap_or(page), 1),
                GroupAxis::Token => (1, group.unwrap_or(shape.dim).min(shape.dim)),
                GroupAxis::Block => (page, shape.dim),
            };
        }
        // As a fit leaves them: others' codebooks may be on whole levels nonetheless.
        Quantizer::Vq(vq) => {
            shape.bits = vq.bits.into();
            (shape.book_dim, shape.stages) = (vq.dim.into(), vq.stages.into());
            let grouped = vq.scope == CodebookScope::Group;
            shape.sets = if grouped { dim as u32 / u32::from(vq.dim) } else { 1 };
            let fits = vq.is_on_levels() && lookup::fits_lookup(vq.dim.into());
            shape.entry_bytes = if fits { vq.dim.into() } else { 0 };
            shape.entry_count = if vq.bits <= 8 { 1 << vq.bits } else { 0 };
        }
        Quantizer::Polar(PolarSpec { angle, radius, group }) => {
            shape.scale_tokens = group.map_or(page, u32::from);
            shape.bits = u32::from(angle) + u32::from(radius);
            shape.angle_bits = angle.into();
            // Directions alone, where pages have the steps of their radii.
            let with_steps = polar_table_bytes(shape.angle_bits, shape.dim);
            shape.table_bytes = if group.is_some() { 8 << angle } else { with_steps };
            lookup::expect_all(&mut shape, 4);
        }
        Quantizer::Lloyd(LloydSpec { bits }) => {
            shape.bits = bits.into();
            shape.table_bytes = 4 << bits;
            lookup::expect_all(&mut shape, 2);
        }
        Quantizer::Grid(_) => shape.stride = shape.dim,
        Quantizer::BitAlloc(BitAllocSpec { bits }) => {
            let (kind, dim) = (shape.kind, shape.dim);
            let bits = (bits * dim as f32).ceil() as u32;
            let spread = unpack::expected_unpack((which, grouped), dim as usize);
            let (scale_tokens, scale_channels) = (1, 1);
            shape = SideShape { kind, dim, bits, scale_tokens, scale_channels, ..spread };
        }
        Quantizer::Float(_) => {}
    }
    shape
}
