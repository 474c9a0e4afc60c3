//! The quantizers: one row each, and what each says about itself before it is bound to a head.
//!
//! A quantizer is a spec (a few numbers) that implements [`QuantizerSpec`], and what the spec
//! becomes once it is bound, which implements [`HeadQuantizer`](super::HeadQuantizer). Nothing else
//! in this crate tells quantizers apart, but for the five forms of a payload (`reader.rs`).

use super::HeadQuantizer;
use super::bind::{HeadBinder, SideBinding};
use super::bitalloc::BitAllocSpec;
use super::grid::GridSpec;
use super::lloyd::LloydSpec;
use super::polar_spec::PolarSpec;
use super::uniform_spec::UniformSpec;
use crate::bits::CodeLayout;
use crate::huffman::ALPHABET_MAX;
use crate::parse::{ParseResult, QuantizerWord, SpecCursor};
use crate::{CodecError, EntropyCoding, FloatFormat, VqSpec};
use kvd_core::{DType, Geometry, Side};
use std::fmt;
use std::sync::Arc;

/// The parameters of a quantizer, and all that follows from them alone. Its text is the one that
/// specs have.
pub(crate) trait QuantizerSpec: fmt::Display {
    /// Names in spec texts, `()` behind those that take arguments.
    fn spec_names() -> &'static [&'static str]
    where
        Self: Sized;

    /// Reads what follows one of the names.
    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self>
    where
        Self: Sized;

    /// Id in the headers of pages, of rows that arrive in `native`.
    fn page_id(&self, native: DType) -> u8;

    /// Checks parameters that no geometry could make valid.
    fn check_parameters(&self) -> Result<(), String> {
        Ok(())
    }

    /// Checks the parameters against a head size.
    fn check_head_dim(&self, _dim: usize) -> Result<(), String> {
        Ok(())
    }

    /// Checks what turns its codes into bytes.
    fn check_entropy(&self, entropy: EntropyCoding) -> Result<(), String> {
        match (entropy, self.code_count()) {
            (EntropyCoding::Huffman, None) => {
                Err("huffman needs codes; raw floats have none".to_owned())
            }
            (EntropyCoding::Huffman, Some(n)) if n > ALPHABET_MAX => {
                Err(format!("huffman takes at most {ALPHABET_MAX} codes, this quantizer has {n}"))
            }
            _ => Ok(()),
        }
    }

    /// Number of distinct codes; `None` where codes have no fixed alphabet.
    fn code_count(&self) -> Option<u32>;

    /// Codes of a row of `dim` channels.
    fn codes_per_row(&self, dim: usize) -> usize {
        dim
    }

    /// Bytes of scales in a page.
    fn scale_bytes(&self, _tokens: usize, _dim: usize) -> usize {
        0
    }

    /// Bytes of the codes of a full block, or of its floats, without an entropy stage.
    fn code_bytes(&self, geometry: &Geometry, side: Side) -> usize {
        let codes = self.code_count().expect("quantizers without an alphabet say it themselves");
        let bits = u32::BITS - (codes - 1).leading_zeros();
        let per_row = self.codes_per_row(geometry.head_dim(side));
        CodeLayout::new(side, geometry.block_tokens as usize, per_row, bits).size_bytes()
    }

    /// Bits per value that its fit aims at, everything counted; `None` where the bits follow from
    /// the parameters.
    fn target_bits(&self) -> Option<f32> {
        None
    }

    /// Whether it takes anything from a calibration.
    fn is_fitted(&self) -> bool {
        false
    }

    /// Makes the binder of the heads of one side of one layer, and all that these heads share.
    ///
    /// # Errors
    /// When the calibration lacks what it needs.
    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError>;
}

/// One row per quantizer: its name in code, and its spec.
macro_rules! register_quantizers {
    ($($(#[$doc:meta])* $name:ident($spec:ty),)+) => {
        /// The method that turns coefficients into codes.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Quantizer {
            $($(#[$doc])* $name($spec),)+
        }

        impl Quantizer {
            /// Its parameters, as the trait sees them.
            pub(crate) fn as_spec(&self) -> &dyn QuantizerSpec {
                match self {
                    $(Self::$name(spec) => spec,)+
                }
            }

            /// Names of all of them in spec texts.
            pub(crate) fn known_names() -> Vec<&'static str> {
                [$(<$spec>::spec_names(),)+].concat()
            }

            /// The quantizer of that name, from what follows it; `None` where none has the name.
            pub(crate) fn parse_named(
                cursor: &mut SpecCursor<'_>,
                word: QuantizerWord<'_>,
            ) -> Option<ParseResult<Self>> {
                let is_named = |name: &&str| name.trim_end_matches("()") == word.name;
                $(if <$spec>::spec_names().iter().any(is_named) {
                    return Some(<$spec>::parse_spec(cursor, word).map(Self::$name));
                })+
                None
            }
        }
    };
}

register_quantizers! {
    /// A float format.
    Float(FloatFormat),
    /// Equidistant levels between a group's minimum and maximum.
    Uniform(UniformSpec),
    /// Vector quantization: sub-vectors become indices of codebook entries (VecInfer §2.2, eq. 2),
    /// in one or more residual stages.
    Vq(VqSpec),
    /// Pairs of channels that RoPE turns together, as angle and radius (PolarQuant §3.2).
    Polar(PolarSpec),
    /// The best `2^bits` levels for a coordinate of a randomly turned row, and the row's norm
    /// (TurboQuant without its residual stage). Meant to follow `rotate` or `hadamard`.
    Lloyd(LloydSpec),
    /// One uniform step for all coefficients of a head (reverse water-filling), codes of
    /// coefficients of like spread sharing a Huffman table; step, classes and tables come from
    /// the calibration. Best after `mean+qpca` (keys) and `mean+gain+pca` (values).
    Grid(GridSpec),
    /// A fixed width for every coefficient, 0 to 8 bits by greedy reduction of the distortion, and
    /// levels trained by width (Lloyd-Max); all from the calibration. No entropy stage. Best after
    /// `mean+qpca` (keys) and `mean+gain+pca` (values).
    BitAlloc(BitAllocSpec),
}

impl Quantizer {
    /// Id in the headers of its pages, of rows that arrive in `native`.
    #[must_use]
    pub fn page_id(&self, native: DType) -> u8 {
        self.as_spec().page_id(native)
    }

    /// Number of distinct codes; `None` when floats are stored as they are.
    #[must_use]
    pub fn code_count(&self) -> Option<u32> {
        self.as_spec().code_count()
    }

    /// Bits per value that its fit aims at, everything counted; `None` where the bits follow from
    /// the parameters.
    #[must_use]
    pub fn target_bits(&self) -> Option<f32> {
        self.as_spec().target_bits()
    }

    /// Whether it takes anything from a calibration.
    #[must_use]
    pub fn is_trained(&self) -> bool {
        self.as_spec().is_fitted()
    }
}

impl fmt::Display for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_spec().fmt(f)
    }
}

/// Binds the same quantizer to every head.
pub(super) fn share_quantizer<'a>(quantizer: impl HeadQuantizer + 'static) -> HeadBinder<'a> {
    let shared: Arc<dyn HeadQuantizer> = Arc::new(quantizer);
    Box::new(move |_, _| Ok(Arc::clone(&shared)))
}
