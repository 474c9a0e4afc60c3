//! The codec algebra as plain data, and its canonical text.

use crate::huffman::ALPHABET_MAX;
use crate::{SpecOverride, VqSpec};
use kvd_core::{DType, Geometry, Side};
use std::fmt;

/// Number format of the `float` quantizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FloatFormat {
    /// The geometry's dtype: what arrived is what is kept. Spelled `raw`.
    Native,
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Brain float.
    BF16,
    /// FP8: 4 exponent bits, 3 mantissa bits, no infinity, with one power-of-two scale per page
    /// so that nothing saturates. Spelled `fp8`.
    E4M3,
}

impl FloatFormat {
    /// The dtype whose bits are stored as they are; `None` for FP8.
    #[must_use]
    pub fn stored_dtype(self, native: DType) -> Option<DType> {
        match self {
            Self::Native => Some(native),
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            Self::E4M3 => None,
        }
    }
}

/// The axis along which the values that share one scale lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupAxis {
    /// One channel: a group spans tokens.
    Channel,
    /// One token: a group spans channels.
    Token,
    /// The page: one group for all of it.
    Block,
}

/// How wide one uniform level is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UniformStep {
    /// `2^bits - 1` steps cover the group's range (KIVI); 1 to 8 bits.
    Bits(u8),
    /// The step is this fraction of the group's range (KVComp §3.1.1); 1/255 to 1.
    Relative(f32),
}

/// Where a group's levels stand (InnerQ §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UniformMode {
    /// From the group's minimum to its maximum (eq. 10 to 12).
    Asym,
    /// Around zero, a sign and a magnitude each (eq. 13): one level less than twice as many.
    Sym,
    /// Per group whichever of the two has the smaller squared error (§4.1.2).
    Hybrid,
}

/// The method that turns coefficients into codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Quantizer {
    /// A float format.
    Float(FloatFormat),
    /// Equidistant levels between a group's minimum and maximum.
    Uniform {
        /// Width of a level.
        step: UniformStep,
        /// Which values form a group.
        axis: GroupAxis,
        /// Values per group; `None` is the whole extent of the axis in the page.
        group: Option<u16>,
        /// Where the levels stand.
        mode: UniformMode,
    },
    /// Pairs of channels that RoPE turns together, as angle and radius (PolarQuant §3.2).
    Polar {
        /// Bits of the angle, 1 to 8.
        angle: u8,
        /// Bits of the radius, 1 to 8.
        radius: u8,
        /// Tokens that share a pair's scale; `None` takes one scale per pair for all tokens from
        /// the calibration, as the paper does at 4+4 bits.
        group: Option<u16>,
    },
    /// The best `2^bits` levels for a coordinate of a randomly turned row, and the row's norm
    /// (TurboQuant without its residual stage). Meant to follow `rotate` or `hadamard`.
    Lloyd {
        /// Bits per coefficient, 1 to 8.
        bits: u8,
    },
    /// Vector quantization: sub-vectors become indices of codebook entries (VecInfer §2.2, eq. 2),
    /// in one or more residual stages.
    Vq(VqSpec),
    /// One uniform step for all coefficients of a head (reverse water-filling), codes of
    /// coefficients of like spread sharing a Huffman table; step, classes and tables come from
    /// the calibration. Best after `mean+qpca` (keys) and `mean+gain+pca` (values).
    Grid {
        /// Bits per value that pages should take on the calibration text, everything counted.
        rate: f32,
    },
    /// A fixed width for every coefficient, 0 to 8 bits by greedy reduction of the distortion, and
    /// levels trained by width (Lloyd-Max); all from the calibration. No entropy stage. Best after
    /// `mean+qpca` (keys) and `mean+gain+pca` (values).
    BitAlloc {
        /// Mean bits per coefficient over the side's layers and heads.
        bits: f32,
    },
}

impl Quantizer {
    /// Number of distinct codes; `None` when floats are stored as they are.
    #[must_use]
    pub fn code_count(&self) -> Option<u32> {
        match *self {
            Self::Float(FloatFormat::E4M3) => Some(256),
            Self::Float(_) => None,
            Self::Uniform { step, mode: UniformMode::Sym, .. } => Some(2 * step.level_count() - 1),
            Self::Uniform { step, .. } => Some(step.level_count()),
            Self::Vq(vq) => Some(1 << vq.bits.min(16)),
            Self::Lloyd { bits } => Some(1 << bits.min(16)),
            Self::Polar { angle, radius, .. } => Some(1 << (angle.min(8) + radius.min(8))),
            Self::Grid { .. } | Self::BitAlloc { .. } => None,
        }
    }

    /// Checks parameters that no geometry could make valid.
    fn validate(&self) -> Result<(), String> {
        let bits = 1..=8u8;
        match *self {
            Self::Uniform { step: UniformStep::Bits(b), .. } if !bits.contains(&b) => {
                Err(format!("uniform b={b}: must be 1 to 8"))
            }
            Self::Uniform { step: UniformStep::Relative(rel), .. }
                if !(1.0 / 255.0..=1.0).contains(&rel) =>
            {
                Err(format!("uniform rel={rel}: must be 1/255 to 1"))
            }
            Self::Uniform { group: Some(0), .. } => {
                Err("uniform g=0: must be at least 1".to_owned())
            }
            Self::Uniform { axis: GroupAxis::Block, group: Some(_), .. } => {
                Err("uniform axis=block takes no g: the group is the page".to_owned())
            }
            Self::Vq(vq) => vq.validate(),
            Self::Polar { angle: a, radius: r, .. } if !bits.contains(&a) || !bits.contains(&r) => {
                Err(format!("polar(a={a},r={r}): a and r must be 1 to 8"))
            }
            Self::Polar { group: Some(0), .. } => Err("polar g=0: must be at least 1".to_owned()),
            Self::Lloyd { bits: b } if !bits.contains(&b) => {
                Err(format!("lloyd b={b}: must be 1 to 8"))
            }
            Self::Grid { rate } if !(0.25..=10.0).contains(&rate) => {
                Err(format!("grid rate={rate}: must be 0.25 to 10 bits per value"))
            }
            Self::BitAlloc { bits } if !(0.25..=8.0).contains(&bits) => {
                Err(format!("bitalloc b={bits}: must be 0.25 to 8 bits per coefficient"))
            }
            _ => Ok(()),
        }
    }

    /// Whether the quantizer is fitted to the coefficients of all heads of a side at once.
    pub(crate) fn fits_coefficients(&self) -> bool {
        matches!(self, Self::Grid { .. } | Self::BitAlloc { .. })
    }

    /// Codes of a row of `dim` channels.
    pub(crate) fn codes_per_row(&self, dim: usize) -> usize {
        match self {
            Self::Vq(vq) => dim / usize::from(vq.dim) * usize::from(vq.stages),
            Self::Polar { .. } => dim / 2,
            Self::Float(_) | Self::Uniform { .. } | Self::Lloyd { .. } => dim,
            Self::Grid { .. } | Self::BitAlloc { .. } => dim,
        }
    }

    /// Whether it takes anything from a calibration.
    #[must_use]
    pub fn is_trained(&self) -> bool {
        self.fits_coefficients() || matches!(self, Self::Vq(_) | Self::Polar { group: None, .. })
    }
}

impl UniformStep {
    /// Levels of a group, or of its magnitudes where signs are apart.
    pub(crate) fn level_count(self) -> u32 {
        match self {
            Self::Bits(bits) => 1 << bits.min(16),
            Self::Relative(rel) => relative_levels(rel),
        }
    }
}

/// Codes `0..=ceil(1/rel)`. The small slack keeps 1/0.02f32 (just above 50) at 50.
fn relative_levels(rel: f32) -> u32 {
    (1.0 / f64::from(rel) - 1e-4).ceil().clamp(1.0, 65534.0) as u32 + 1
}

/// A linear map that folds into the query or out of the accumulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transform {
    /// Divides channel `i` by `sqrt(max |x_i|)` of the calibration samples (VecInfer eq. 4).
    Smooth,
    /// Orthonormal Walsh-Hadamard rotation, block-diagonal where the head size is no power of two
    /// (VecInfer eq. 6).
    Hadamard,
    /// Removes the mean of the calibration samples. On keys it costs nothing: `q·mean` is the same
    /// for every key of the page.
    Mean,
    /// Rotation onto the principal axes of the calibration samples.
    Pca,
    /// Principal axes in the metric of the queries: `Uᵀ S` with `S = (E[q qᵀ])^½` and `U` the
    /// eigenvectors of the covariance of `S x`. What counts of a key is its product with queries.
    QueryPca,
    /// Divides channel `i` by `sqrt(max |x_i|)` of the calibration samples (InnerQ §4.3). The
    /// formula is that of `smooth`; InnerQ uses it alone, for groups that span channels.
    Norm,
    /// Raises rows shorter than the median of the calibration samples by a power of two that is
    /// stored per row (`gain.rs`). Values only.
    Gain,
    /// A random orthogonal map, the same for every head and on every machine.
    Rotate {
        /// Which map.
        seed: u64,
    },
}

impl Transform {
    /// Name in spec texts and calibration artefacts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Smooth => "smooth",
            Self::Hadamard => "hadamard",
            Self::Mean => "mean",
            Self::Pca => "pca",
            Self::QueryPca => "qpca",
            Self::Norm => "norm",
            Self::Gain => "gain",
            Self::Rotate { .. } => "rotate",
        }
    }

    /// Whether it comes from a calibration.
    fn is_fitted(self) -> bool {
        !matches!(self, Self::Hadamard | Self::Rotate { .. })
    }
}

/// Entropy coding of codes before they become bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntropyCoding {
    /// Fixed-width bit fields.
    None,
    /// Canonical Huffman, one table per layer and side (KVComp §3.2).
    Huffman,
}

/// `transforms → quantizer → entropy stage`.
#[derive(Clone, Debug, PartialEq)]
pub struct SideSpec {
    /// Applied in this order to a row before it is quantized.
    pub transforms: Vec<Transform>,
    /// Coefficients to codes.
    pub quantizer: Quantizer,
    /// Codes to bytes.
    pub entropy: EntropyCoding,
}

/// A codec: two sides, the windows that stay in the stored precision, and exceptions.
#[derive(Clone, Debug, PartialEq)]
pub struct CodecSpec {
    /// How keys are kept.
    pub key: SideSpec,
    /// How values are kept.
    pub value: SideSpec,
    /// First tokens of a sequence that stay raw.
    pub sink: u32,
    /// Last tokens of a sequence that stay raw.
    pub recent: u32,
    /// Exceptions for layers and heads; where several name a head, the last one holds.
    pub overrides: Vec<SpecOverride>,
    /// Largest relative root-mean-square error that a page's rows may have, by side; a page over
    /// it that is checked falls back to a safer side. Above 0, at most 1.
    pub bounds: [Option<f32>; 2],
}

impl SideSpec {
    /// Whether this side takes anything from a calibration.
    #[must_use]
    pub fn needs_calibration(&self) -> bool {
        self.transforms.iter().any(|transform| transform.is_fitted()) || self.quantizer.is_trained()
    }

    /// Whether Huffman tables are built from the blocks themselves (and named by version in each
    /// page); `grid` takes its tables from the calibration instead.
    #[must_use]
    pub fn has_trained_tables(&self) -> bool {
        self.entropy == EntropyCoding::Huffman && !matches!(self.quantizer, Quantizer::Grid { .. })
    }

    /// The transforms as in a spec text (`smooth+hadamard`), empty when there are none.
    fn transforms_text(&self) -> String {
        self.transforms.iter().map(Transform::to_string).collect::<Vec<_>>().join("+")
    }

    /// The calibrated part of this side, as text: the transforms, and the quantizer where it is
    /// trained. Sides of equal text share what was fitted.
    #[must_use]
    pub fn fitted_text(&self) -> String {
        let transforms = self.transforms_text();
        if self.quantizer.is_trained() {
            format!("{transforms}/{}", self.quantizer)
        } else {
            transforms
        }
    }

    /// Checks parameters that no geometry could make valid.
    ///
    /// # Errors
    /// A sentence that names the parameter and its range.
    pub fn validate(&self) -> Result<(), String> {
        for (i, transform) in self.transforms.iter().enumerate() {
            if self.transforms[..i].iter().any(|other| other.name() == transform.name()) {
                return Err(format!("transform {} appears twice", transform.name()));
            }
        }
        let is_matrix = |t: &&Transform| matches!(t, Transform::Pca | Transform::QueryPca);
        if self.transforms.iter().filter(is_matrix).count() > 1 {
            return Err("pca and qpca exclude each other".to_owned());
        }
        let place = |of: Transform| self.transforms.iter().position(|transform| *transform == of);
        if place(Transform::Gain).is_some_and(|gain| place(Transform::Mean) > Some(gain)) {
            return Err("gain stands after mean: rows are raised towards the mean".to_owned());
        }
        self.quantizer.validate()?;
        if let Quantizer::Grid { .. } = self.quantizer {
            return match self.entropy {
                EntropyCoding::Huffman => Ok(()),
                EntropyCoding::None => {
                    Err("grid needs /huffman: its codes have no fixed width".to_owned())
                }
            };
        }
        match (self.entropy, self.quantizer.code_count()) {
            (EntropyCoding::Huffman, None) if self.quantizer.fits_coefficients() => {
                Err("bitalloc takes no /huffman: its codes have fixed widths".to_owned())
            }
            (EntropyCoding::Huffman, None) => {
                Err("huffman needs codes; raw floats have none".to_owned())
            }
            (EntropyCoding::Huffman, Some(n)) if n > ALPHABET_MAX => {
                Err(format!("huffman takes at most {ALPHABET_MAX} codes, this quantizer has {n}"))
            }
            _ => Ok(()),
        }
    }
}

impl SideSpec {
    /// [`SideSpec::validate`], and what a geometry asks for.
    pub(crate) fn check_geometry(&self, geometry: &Geometry, side: Side) -> Result<(), String> {
        self.validate()?;
        if let Quantizer::Vq(vq) = self.quantizer {
            vq.check_head_dim(geometry.head_dim(side))?;
        }
        if side == Side::Value && self.transforms.contains(&Transform::QueryPca) {
            return Err("qpca is for keys: queries meet no values".to_owned());
        }
        if side == Side::Key && self.transforms.contains(&Transform::Gain) {
            return Err("gain is for values: keys are measured by their scores".to_owned());
        }
        Ok(())
    }
}

impl CodecSpec {
    /// The spec of one side, where no override names the head.
    #[must_use]
    pub fn side(&self, side: Side) -> &SideSpec {
        match side {
            Side::Key => &self.key,
            Side::Value => &self.value,
        }
    }

    /// Whether any side takes anything from a calibration.
    #[must_use]
    pub fn needs_calibration(&self) -> bool {
        let overrides = self.overrides.iter().map(|o| &o.spec);
        [&self.key, &self.value].into_iter().chain(overrides).any(SideSpec::needs_calibration)
    }
}

impl fmt::Display for Quantizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Float(format) => f.write_str(match format {
                FloatFormat::Native => "raw",
                FloatFormat::F32 => "f32",
                FloatFormat::F16 => "f16",
                FloatFormat::BF16 => "bf16",
                FloatFormat::E4M3 => "fp8",
            }),
            Self::Uniform { step, axis, group, mode } => {
                match step {
                    UniformStep::Bits(bits) => write!(f, "uniform(b={bits}")?,
                    UniformStep::Relative(rel) => write!(f, "uniform(rel={rel}")?,
                }
                if let Some(group) = group {
                    write!(f, ",g={group}")?;
                }
                let axis = match axis {
                    GroupAxis::Channel => "channel",
                    GroupAxis::Token => "token",
                    GroupAxis::Block => "block",
                };
                let mode = match mode {
                    UniformMode::Asym => "",
                    UniformMode::Sym => ",mode=sym",
                    UniformMode::Hybrid => ",mode=hybrid",
                };
                write!(f, ",axis={axis}{mode})")
            }
            Self::Polar { angle, radius, group: None } => write!(f, "polar(a={angle},r={radius})"),
            Self::Polar { angle, radius, group: Some(group) } => {
                write!(f, "polar(a={angle},r={radius},g={group})")
            }
            Self::Lloyd { bits } => write!(f, "lloyd(b={bits})"),
            Self::Vq(vq) => vq.fmt(f),
            Self::Grid { rate } => write!(f, "grid(rate={rate})"),
            Self::BitAlloc { bits } => write!(f, "bitalloc(b={bits})"),
        }
    }
}

impl fmt::Display for Transform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rotate { seed } if *seed != 0 => write!(f, "rotate(seed={seed})"),
            _ => f.write_str(self.name()),
        }
    }
}

impl fmt::Display for SideSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.transforms.is_empty() {
            write!(f, "{}/", self.transforms_text())?;
        }
        write!(f, "{}", self.quantizer)?;
        match self.entropy {
            EntropyCoding::None => Ok(()),
            EntropyCoding::Huffman => f.write_str("/huffman"),
        }
    }
}

impl fmt::Display for CodecSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "k={}; v={}", self.key, self.value)?;
        if self.sink != 0 {
            write!(f, "; sink={}", self.sink)?;
        }
        if self.recent != 0 {
            write!(f, "; recent={}", self.recent)?;
        }
        for (side, bound) in Side::BOTH.into_iter().zip(self.bounds) {
            if let Some(bound) = bound {
                write!(f, "; {side}.bound={bound}")?;
            }
        }
        self.overrides.iter().try_for_each(|o| write!(f, "; {o}"))
    }
}
