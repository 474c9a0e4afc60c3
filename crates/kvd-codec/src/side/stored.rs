//! How a head's pages hold their values, told to kernels that read pages by themselves.

use super::vq::Codebook;
use super::{HeadQuantizer, HeadSide};
use crate::GroupAxis;
use kvd_core::DType;

/// What the payload of a head's pages is (`docs/format.md`, "Sides"), fallbacks apart.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Stored<'a> {
    /// Rows in a dtype.
    Float(DType),
    /// FP8 e4m3 codes under one f32 scale.
    E4m3,
    /// Fixed-width codes `minimum + code * step` under scale rows of f16 pairs.
    Uniform {
        /// Bits of a code.
        bits: u32,
        /// What shares a pair.
        axis: GroupAxis,
        /// Tokens (channel axis) or channels (token axis) that share a pair; all when absent.
        group: Option<usize>,
    },
    /// Fixed-width indices of entries of one codebook, which serves every sub-vector.
    Codebook(&'a Codebook),
    /// Anything else, entropy-coded pages included.
    Other,
}

impl HeadSide {
    /// How this head's pages hold their values.
    #[must_use]
    pub fn stored(&self) -> Stored<'_> {
        if self.trained_tables {
            return Stored::Other;
        }
        match &self.quantizer {
            HeadQuantizer::Float(dtype) => Stored::Float(*dtype),
            HeadQuantizer::E4m3 => Stored::E4m3,
            HeadQuantizer::Uniform(uniform) => Stored::Uniform {
                bits: uniform.code_bits(),
                axis: uniform.axis,
                group: uniform.group,
            },
            HeadQuantizer::Vq(vq) if vq.stages() == 1 && !vq.is_grouped() => {
                Stored::Codebook(vq.codebook(0, 0))
            }
            _ => Stored::Other,
        }
    }
}
