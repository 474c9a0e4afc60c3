//! Stored bits of a side that follow from its spec alone, without encoding anything.

use crate::gain::gain_bytes;
use crate::page::{HEADER_BYTES, page_bytes};
use crate::{CHUNK_TOKENS, EntropyCoding, SideSpec, Transform};
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
        let scales = self.quantizer.as_spec().scale_bytes(tokens, dim) + gains;
        let (codes, offsets, header) = match self.entropy {
            EntropyCoding::Huffman => {
                // A grid counts outliers as well as words.
                let outliers = self.quantizer.code_count().is_none();
                let lengths = if outliers { 4 } else { 2 } * tokens.div_ceil(CHUNK_TOKENS);
                (None, lengths, HEADER_BYTES)
            }
            EntropyCoding::None => {
                let codes = self.quantizer.as_spec().code_bytes(geometry, side);
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
}
