//! How a head's pages hold their values, told to kernels that read pages by themselves.

use super::bitalloc::BitAlloc;
use super::grid::Grid;
use super::vq::VectorQuantizer;
use crate::{GroupAxis, UniformMode};
use kvd_core::{DType, RopePairing};

/// How a uniform side groups its values, for kernels that read its pages themselves.
///
/// A scale row is all its minima, where the mode has them, then all its steps, f16;
/// `docs/format.md` says which tokens and channels share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniformGroups {
    /// The axis along which values of a group lie.
    pub axis: GroupAxis,
    /// Values of a group; `None` is the whole extent of the axis in the page.
    pub group: Option<usize>,
    /// Bits of a code.
    pub bits: u32,
    /// Where the levels stand.
    pub mode: UniformMode,
    /// Largest code; in the symmetric mode the largest magnitude of one, half of the largest code.
    pub top: u16,
}

/// Layout of a head's page payload (`docs/format.md`, "Sides"), fallbacks and gains apart.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoredLayout<'a> {
    /// Rows in a dtype.
    Float(DType),
    /// FP8 e4m3 codes under one f32 scale.
    E4m3,
    /// Fixed-width codes of equidistant levels.
    Uniform(UniformGroups),
    /// Fixed-width indices of codebook entries.
    Codebooks(&'a VectorQuantizer),
    /// Fixed-width codes `radius << angle_bits | angle`.
    Polar {
        /// Bits of the angle.
        angle_bits: u32,
        /// Bits of the radius.
        radius_bits: u32,
        /// Tokens that share a pair's step; without it the steps are `steps`.
        group: Option<usize>,
        /// Radius step of each pair, where pages hold none.
        steps: &'a [f32],
        /// Cosine and sine of each angle.
        directions: &'a [[f32; 2]],
        /// Which channels are a pair.
        pairing: RopePairing,
    },
    /// Fixed-width indices of levels under one f16 per row.
    Lloyd {
        /// Bits of a code.
        bits: u32,
        /// `2^bits` levels.
        levels: &'a [f32],
    },
    /// Runs of fixed-width codes, and outliers.
    BitAlloc(&'a BitAlloc),
    /// Codes under one step, by class; always Huffman codes.
    Grid(&'a Grid),
}
