//! The codec algebra as plain data, and its canonical text.

use crate::{Quantizer, SpecOverride};
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
    /// Rotation onto the principal axes of the queries (OSCAR §3.1). Keys only.
    QueryAxes,
    /// Rotation onto the principal axes of values that count as much as their keys score (OSCAR
    /// §3.1): as `kᵀ E[q qᵀ] k`. Values only; stands before `mean`.
    ScoredAxes,
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
    /// Each of them, in the order of a list for people.
    pub(crate) const ALL: [Self; 10] = [
        Self::Smooth,
        Self::Norm,
        Self::Hadamard,
        Self::Rotate { seed: 0 },
        Self::Mean,
        Self::Gain,
        Self::Pca,
        Self::QueryPca,
        Self::QueryAxes,
        Self::ScoredAxes,
    ];

    /// Name in spec texts and calibration artefacts.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Smooth => "smooth",
            Self::Hadamard => "hadamard",
            Self::Mean => "mean",
            Self::Pca => "pca",
            Self::QueryPca => "qpca",
            Self::QueryAxes => "qeig",
            Self::ScoredAxes => "sveig",
            Self::Norm => "norm",
            Self::Gain => "gain",
            Self::Rotate { .. } => "rotate",
        }
    }

    /// Whether it is a matrix from the calibration; a side has one at most.
    #[must_use]
    pub fn is_matrix(&self) -> bool {
        matches!(self, Self::Pca | Self::QueryPca | Self::QueryAxes | Self::ScoredAxes)
    }

    /// Whether its fit looks at queries.
    #[must_use]
    pub fn reads_queries(&self) -> bool {
        matches!(self, Self::QueryPca | Self::QueryAxes | Self::ScoredAxes)
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
        self.entropy == EntropyCoding::Huffman && self.quantizer.code_count().is_some()
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
        if self.transforms.iter().filter(|transform| transform.is_matrix()).count() > 1 {
            return Err("pca, qpca, qeig and sveig exclude each other".to_owned());
        }
        let place = |of: Transform| self.transforms.iter().position(|transform| *transform == of);
        if place(Transform::Gain).is_some_and(|gain| place(Transform::Mean) > Some(gain)) {
            return Err("gain stands after mean: rows are raised towards the mean".to_owned());
        }
        if place(Transform::Mean).is_some_and(|mean| place(Transform::ScoredAxes) > Some(mean)) {
            return Err("sveig stands before mean: scores weigh values as they came".to_owned());
        }
        self.quantizer.as_spec().check_parameters()?;
        self.quantizer.as_spec().check_entropy(self.entropy)
    }
}

impl SideSpec {
    /// [`SideSpec::validate`], and what a geometry asks for.
    pub fn check_geometry(&self, geometry: &Geometry, side: Side) -> Result<(), String> {
        self.validate()?;
        self.quantizer.as_spec().check_head_dim(geometry.head_dim(side))?;
        for transform in [Transform::QueryPca, Transform::QueryAxes] {
            if side == Side::Value && self.transforms.contains(&transform) {
                return Err(format!("{transform} is for keys: queries meet no values"));
            }
        }
        if side == Side::Key && self.transforms.contains(&Transform::ScoredAxes) {
            return Err("sveig is for values: scores weigh no keys".to_owned());
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
