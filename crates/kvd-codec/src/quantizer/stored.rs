//! How a head's pages hold their values, told to kernels that read pages by themselves.

use super::grid::Grid;
use super::vq::VectorQuantizer;
use super::{HeadCodec, HeadQuantizer};
use crate::{GroupAxis, UniformMode};
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
    Uniform {
        /// Where the levels stand.
        mode: UniformMode,
        /// Bits of a code.
        bits: u32,
        /// Largest code; in the symmetric mode the largest magnitude of one.
        top: u16,
        /// The axis along which values share a pair.
        axis: GroupAxis,
        /// Tokens (channel axis) or channels (token axis) that share a pair; all when absent.
        group: Option<usize>,
    },
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
    BitAlloc {
        /// First coefficient, length and width of each run.
        runs: Vec<[usize; 3]>,
        /// Levels, those of width 1 first, up to width 8.
        levels: &'a [f32],
        /// A factor per coefficient.
        scales: &'a [f32],
    },
    /// Codes under one step, by class; always Huffman codes.
    Grid(&'a Grid),
}

impl HeadCodec {
    /// How this head's pages hold their values. Where [`HeadCodec::stream_runs`] names runs, codes
    /// are Huffman codes and not of a fixed width.
    #[must_use]
    pub fn stored_layout(&self) -> StoredLayout<'_> {
        let uniform = |mode, bits, base: &super::uniform::Uniform| StoredLayout::Uniform {
            mode,
            bits,
            top: base.top,
            axis: base.axis,
            group: base.group,
        };
        match &self.quantizer {
            HeadQuantizer::Float(dtype) => StoredLayout::Float(*dtype),
            HeadQuantizer::E4m3 => StoredLayout::E4m3,
            HeadQuantizer::Uniform(side) => uniform(UniformMode::Asym, side.code_bits(), side),
            HeadQuantizer::Symmetric(side) => {
                uniform(UniformMode::Sym, side.code_bits(), &side.base)
            }
            HeadQuantizer::Hybrid(side) => {
                uniform(UniformMode::Hybrid, side.base.code_bits(), &side.base)
            }
            HeadQuantizer::Vq(vq) => StoredLayout::Codebooks(vq),
            HeadQuantizer::Polar(polar) => polar.stored_layout(),
            HeadQuantizer::Lloyd(lloyd) => {
                StoredLayout::Lloyd { bits: lloyd.code_bits(), levels: lloyd.levels() }
            }
            HeadQuantizer::BitAlloc(bitalloc) => bitalloc.stored_layout(),
            HeadQuantizer::Grid(grid) => StoredLayout::Grid(grid),
        }
    }
}
