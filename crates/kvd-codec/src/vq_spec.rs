//! Parameters of vector quantization, and what follows from them: bits, codebooks, bytes.

use kvd_core::{Geometry, Side};
use std::fmt;

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
    /// bytes: those of one stage, of as many as were compared (`docs/perf/vq-quality.md`).
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
    pub(crate) fn tensor_shape(&self, geometry: &Geometry, side: Side) -> [usize; 6] {
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

    /// Checks parameters that no geometry could make valid.
    pub(crate) fn validate(&self) -> Result<(), String> {
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

    /// Checks the parameters against a head size.
    pub(crate) fn check_head_dim(&self, dim: usize) -> Result<(), String> {
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
