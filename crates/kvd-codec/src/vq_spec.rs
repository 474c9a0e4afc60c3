//! Parameters of vector quantization, and what follows from them: bits, codebooks, bytes.

use crate::CodecError;
use crate::page::id;
use crate::parse::{Argument, ParseResult, QuantizerWord, SpecCursor};
use crate::quantizer::HeadQuantizer;
use crate::quantizer::bind::{HeadBinder, SideBinding, mismatch_error};
use crate::quantizer::registry::QuantizerSpec;
use crate::quantizer::vq::VectorQuantizer;
use kvd_core::{DType, Geometry, Side};
use std::fmt;
use std::sync::Arc;

/// Sub-vectors that one codebook serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodebookScope {
    /// All layers and heads of a side.
    Model,
    /// All heads of a layer.
    Layer,
    /// One KV head, all its sub-vector positions (VecInfer §2.2). What a spec without `scope=`
    /// means.
    Head,
    /// One position of one KV head: a group of `d` channels (CQ, as VQ-LLM §III-B describes it).
    Group,
}

impl CodebookScope {
    /// Name in spec texts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Layer => "layer",
            Self::Head => "head",
            Self::Group => "group",
        }
    }

    /// The scope of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Model, Self::Layer, Self::Head, Self::Group].into_iter().find(|s| s.name() == name)
    }
}

/// Vector quantization as a spec asks for it (VQ-LLM Table I: vector size, entries, residuals).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VqSpec {
    /// Channels per sub-vector.
    pub dim: u8,
    /// A codebook has `2^bits` entries.
    pub bits: u8,
    /// Codebooks in a row, each for what the ones before it left over (VQ-LLM §II-A).
    pub stages: u8,
    /// Who shares a codebook.
    pub scope: CodebookScope,
}

impl VqSpec {
    /// Most residual stages.
    pub const STAGES_MAX: u8 = 3;

    /// One stage, one codebook per head.
    #[must_use]
    pub const fn new(dim: u8, bits: u8) -> Self {
        Self { dim, bits, stages: 1, scope: CodebookScope::Head }
    }

    /// Entries of one codebook.
    #[must_use]
    pub fn entry_count(&self) -> usize {
        1 << self.bits.min(16)
    }

    /// Whether a fit puts the entries on whole levels, so that attention kernels hold them as
    /// bytes: those of one stage, of as many as were compared (`bench/results/vq-levels.json`).
    #[must_use]
    pub fn is_on_levels(&self) -> bool {
        const ENTRIES_ON_LEVELS_MAX: usize = 4096;
        self.stages == 1 && self.entry_count() <= ENTRIES_ON_LEVELS_MAX
    }

    /// Bits of codes per value.
    #[must_use]
    pub fn code_bits_per_value(&self) -> f64 {
        f64::from(self.bits) * f64::from(self.stages) / f64::from(self.dim)
    }

    /// Bytes of one codebook: `2^b * d` values of f16 (VecInfer §2.2).
    #[must_use]
    pub fn codebook_bytes(&self) -> u64 {
        2 * u64::from(self.dim) * self.entry_count() as u64
    }

    /// Codebooks that the codec keeps for one side of a model.
    #[must_use]
    pub fn codebook_count(&self, geometry: &Geometry, side: Side) -> u64 {
        self.tensor_shape(geometry, side)[..4].iter().map(|n| *n as u64).product()
    }

    /// `[layers, kv_heads, positions, stages, 2^b, d]`, with 1 for every axis along which
    /// codebooks are shared.
    pub fn tensor_shape(&self, geometry: &Geometry, side: Side) -> [usize; 6] {
        let (layers, heads) = (geometry.layers as usize, geometry.kv_heads as usize);
        let [layers, heads, positions] = match self.scope {
            CodebookScope::Model => [1, 1, 1],
            CodebookScope::Layer => [layers, 1, 1],
            CodebookScope::Head => [layers, heads, 1],
            CodebookScope::Group => {
                [layers, heads, geometry.head_dim(side) / usize::from(self.dim)]
            }
        };
        let (stages, dim) = (usize::from(self.stages), usize::from(self.dim));
        [layers, heads, positions, stages, self.entry_count(), dim]
    }
}

impl QuantizerSpec for VqSpec {
    fn spec_names() -> &'static [&'static str] {
        &["vq()"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        let (mut dim, mut bits) = (None, None);
        let (mut stages, mut scope) = (1, CodebookScope::Head);
        for Argument { start, name, value_start, value } in cursor.parse_arguments()? {
            match name {
                "d" => dim = Some(cursor.parse_at(value_start, value, "channels")?),
                "b" => bits = Some(cursor.parse_at(value_start, value, "bits")?),
                "stages" => stages = cursor.parse_at(value_start, value, "stages")?,
                "scope" => match CodebookScope::from_name(value) {
                    Some(known) => scope = known,
                    None => {
                        return cursor.fail_at(value_start, "scope is model, layer, head or group");
                    }
                },
                _ => return cursor.fail_at(start, format!("vq has no argument {name:?}")),
            }
        }
        match (dim, bits) {
            (Some(dim), Some(bits)) => Ok(Self { dim, bits, stages, scope }),
            _ => cursor.fail_at(word.start, "vq needs d= and b="),
        }
    }

    fn page_id(&self, _native: DType) -> u8 {
        id::VQ
    }

    fn check_parameters(&self) -> Result<(), String> {
        if !matches!(self.dim, 1..=16) || !matches!(self.bits, 1..=16) {
            return Err(format!("{self}: d must be 1 to 16 and b 1 to 16"));
        }
        if !(1..=Self::STAGES_MAX).contains(&self.stages) {
            return Err(format!("{self}: stages must be 1 to {}", Self::STAGES_MAX));
        }
        if self.stages > 1 && self.dim < 2 {
            return Err(format!("{self}: residual stages need d of at least 2"));
        }
        Ok(())
    }

    fn check_head_dim(&self, dim: usize) -> Result<(), String> {
        if dim.is_multiple_of(usize::from(self.dim)) {
            return Ok(());
        }
        let divisors: Vec<String> =
            (1..=16).filter(|d| dim.is_multiple_of(*d)).map(|d| d.to_string()).collect();
        Err(format!(
            "vq d={} does not divide the head size {dim}; d can be {}",
            self.dim,
            divisors.join(", ")
        ))
    }

    fn code_count(&self) -> Option<u32> {
        Some(1 << self.bits.min(16))
    }

    fn codes_per_row(&self, dim: usize) -> usize {
        dim / usize::from(self.dim) * usize::from(self.stages)
    }

    fn is_fitted(&self) -> bool {
        true
    }

    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        let SideBinding { geometry, side: which, layer, part, .. } = side;
        let Some(books) = part.and_then(|part| part.codebooks.as_ref()) else {
            return Err(mismatch_error(format!("{which} has no codebooks")));
        };
        let (spec, want) = (*self, self.tensor_shape(geometry, which));
        if books.shape() != want {
            let text = format!(
                "{which} has codebooks of shape [layers, kv_heads, positions, stages, entries, \
                 channels] = {:?}, {spec} wants {want:?}",
                books.shape()
            );
            return Err(mismatch_error(text));
        }
        Ok(Box::new(move |index, hash| {
            let head = index % geometry.kv_heads as usize;
            let of_head = books.of_head(layer.0 as usize, head);
            let vq = VectorQuantizer::new(geometry.head_dim(which), &spec, of_head);
            vq.books().for_each(|book| book.update_hash(hash));
            Ok(Arc::new(vq) as Arc<dyn HeadQuantizer>)
        }))
    }
}

impl fmt::Display for VqSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vq(d={},b={}", self.dim, self.bits)?;
        if self.stages != 1 {
            write!(f, ",stages={}", self.stages)?;
        }
        if self.scope != CodebookScope::Head {
            write!(f, ",scope={}", self.scope.name())?;
        }
        f.write_str(")")
    }
}
