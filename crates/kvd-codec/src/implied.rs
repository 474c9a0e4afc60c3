//! Stored bits of a side that follow from its spec alone, without encoding anything.

use crate::bits::CodeLayout;
use crate::gain::gain_bytes;
use crate::page::{HEADER_BYTES, page_bytes};
use crate::quantizer::float::E4M3_SCALE_BYTES;
use crate::quantizer::hybrid::Hybrid;
use crate::quantizer::lloyd::LloydMax;
use crate::quantizer::polar::Polar;
use crate::quantizer::symmetric::Symmetric;
use crate::quantizer::uniform::Uniform;
use crate::{
    CHUNK_TOKENS, EntropyCoding, FloatFormat, Quantizer, SideSpec, Transform, UniformMode,
};
use kvd_core::{Geometry, Side};
use std::fmt;

/// Stored bits per value of a page that holds a full block, by part; pages that fall back and
/// what belongs to the model (calibration, Huffman tables) are not in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImpliedBits {
    /// Codes or floats; `None` where an entropy stage makes them depend on the data.
    pub codes: Option<f64>,
    /// Steps, minima, signs, masks, norms, and gains, which pages without short rows leave out.
    pub scales: f64,
    /// Lengths of entropy-coded streams.
    pub offsets: f64,
    /// The page header, and the padding where the length of the codes is known.
    pub header: f64,
}

impl ImpliedBits {
    /// All parts; `None` where the codes depend on the data.
    #[must_use]
    pub fn total_bits(&self) -> Option<f64> {
        Some(self.codes? + self.scales + self.offsets + self.header)
    }
}

impl fmt::Display for ImpliedBits {
    /// `2.000 codes + 1.531 scales + 0.031 header = 3.562`; parts of zero are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes {
            Some(bits) => write!(f, "{bits:.3} codes")?,
            None => f.write_str("codes depend on the data")?,
        }
        let parts = [("scales", self.scales), ("offsets", self.offsets), ("header", self.header)];
        for (name, bits) in parts.into_iter().filter(|(_, bits)| *bits > 0.0) {
            write!(f, " + {bits:.3} {name}")?;
        }
        match self.total_bits() {
            Some(total) => write!(f, " = {total:.3}"),
            None => Ok(()),
        }
    }
}

impl SideSpec {
    /// Bits per value that the side stores for full blocks of `geometry`.
    #[must_use]
    pub fn implied_bits(&self, geometry: &Geometry, side: Side) -> ImpliedBits {
        let (tokens, dim) = (geometry.block_tokens as usize, geometry.head_dim(side));
        let gains = if self.transforms.contains(&Transform::Gain) { gain_bytes(tokens) } else { 0 };
        let scales = self.quantizer.scale_bytes(tokens, dim) + gains;
        let (codes, offsets, header) = match self.entropy {
            EntropyCoding::Huffman => {
                // A grid counts outliers as well as words.
                let grid = matches!(self.quantizer, Quantizer::Grid { .. });
                let lengths = if grid { 4 } else { 2 } * tokens.div_ceil(CHUNK_TOKENS);
                (None, lengths, HEADER_BYTES)
            }
            EntropyCoding::None => {
                let codes = self.code_bytes(geometry, side);
                (Some(codes), 0, page_bytes(scales + codes) - scales - codes)
            }
        };
        let per_value = |bytes: usize| bytes as f64 * 8.0 / (tokens * dim) as f64;
        ImpliedBits {
            codes: codes.map(per_value),
            scales: per_value(scales),
            offsets: per_value(offsets),
            header: per_value(header),
        }
    }

    /// Bytes of the fixed-width codes, or of the floats, of a full block.
    fn code_bytes(&self, geometry: &Geometry, side: Side) -> usize {
        let (tokens, dim) = (geometry.block_tokens as usize, geometry.head_dim(side));
        if let Quantizer::Float(format) = self.quantizer
            && let Some(dtype) = format.stored_dtype(geometry.dtype)
        {
            return tokens * dim * dtype.size_bytes();
        }
        if let Quantizer::BitAlloc { bits } = self.quantizer {
            // The mean over the side's heads, outliers apart.
            return (f64::from(bits) * (tokens * dim) as f64 / 8.0) as usize;
        }
        let codes = self.quantizer.code_count().expect("only floats and grids have no alphabet");
        let per_row = self.quantizer.codes_per_row(dim);
        let bits = u32::BITS - (codes - 1).leading_zeros();
        CodeLayout::new(side, tokens, per_row, bits).size_bytes()
    }
}

impl Quantizer {
    /// Bytes of scales in a page.
    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        match *self {
            Self::Float(FloatFormat::E4M3) => E4M3_SCALE_BYTES,
            Self::Float(_) | Self::Vq { .. } | Self::Grid { .. } | Self::BitAlloc { .. } => 0,
            Self::Uniform { step, axis, group, mode } => {
                let base = Uniform::new(step, axis, group, (step.level_count() - 1) as u16);
                match mode {
                    UniformMode::Asym => base.scale_bytes(tokens, dim),
                    UniformMode::Sym => Symmetric { base }.scale_bytes(tokens, dim),
                    UniformMode::Hybrid => Hybrid { base }.scale_bytes(tokens, dim),
                }
            }
            Self::Polar { group, .. } => Polar::scale_bytes(group, tokens, dim),
            Self::Lloyd { .. } => LloydMax::scale_bytes(tokens),
        }
    }
}
