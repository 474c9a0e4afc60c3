//! How a head's pages hold their values, told to kernels that read pages by themselves.

use super::UniformGroups;
use super::bitalloc::BitAlloc;
use super::grid::Grid;
use super::vq::VectorQuantizer;
use kvd_core::{DType, RopePairing};

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
