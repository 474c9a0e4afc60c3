//! Errors of specs, calibrations, blocks to encode and pages to read.

use kvd_core::{Coded, ErrorCode, GeometryError, Side};

/// A codec text that does not parse; points at the character, unless that is the first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("codec spec{}: {message}", at_character(*position))]
pub struct SpecError {
    /// Characters before the place where the text stops making sense.
    pub position: usize,
    /// The token that was expected there, or the limit that was passed.
    pub message: String,
}

impl SpecError {
    /// Line and column of the position in the text that was read, both from 1.
    #[must_use]
    pub fn line_and_column(&self, text: &str) -> (usize, usize) {
        let before = text.trim_start_matches('\u{feff}').chars().take(self.position);
        before.fold(
            (1, 1),
            |(line, column), c| {
                if c == '\n' { (line + 1, 1) } else { (line, column + 1) }
            },
        )
    }
}

/// The place, where it is not the begin of the text.
fn at_character(position: usize) -> String {
    if position == 0 { String::new() } else { format!(", character {position}") }
}

impl Coded for SpecError {
    fn code(&self) -> ErrorCode {
        ErrorCode::InvalidCodec
    }
}

/// A calibration that cannot be made, read or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The bytes are no calibration of a version that is known here.
    #[error("calibration artefact: {0}")]
    Malformed(String),
    /// Rows have the wrong length, or a layer, side or head lies outside the geometry.
    #[error("calibration samples: {0}")]
    Shape(String),
    /// A sample is NaN or infinite.
    #[error("calibration samples of layer {layer} {side} head {head} hold NaN or infinity")]
    NonFinite {
        /// Layer of the rows.
        layer: u32,
        /// Side of the rows.
        side: Side,
        /// KV head of the rows.
        head: usize,
    },
    /// A head that the codec calibrates has no samples.
    #[error("no calibration samples for layer {layer} {side} head {head}")]
    NoSamples {
        /// Layer without rows.
        layer: u32,
        /// Side without rows.
        side: Side,
        /// KV head without rows.
        head: usize,
    },
    /// Fewer sub-vectors than codebook entries: every entry needs one at least, and a useful
    /// codebook ten or more.
    #[error(
        "{vq} of layer {layer} {side} head {head} needs at least {entries} sub-vectors, one per \
         entry, and the samples hold {found}: sample more tokens, ask for a smaller b, or share \
         codebooks (scope=layer, scope=model)"
    )]
    TooFewSamples {
        /// Layer of the codebook (the last, where layers share it).
        layer: u32,
        /// Side of the codebook.
        side: Side,
        /// KV head of the codebook (the last, where heads share it).
        head: usize,
        /// The quantizer as a spec text.
        vq: String,
        /// Entries of the codebook.
        entries: usize,
        /// Sub-vectors in the samples.
        found: usize,
    },
    /// `qpca` found no queries for a head.
    #[error("no calibration queries for layer {layer} head {head}")]
    NoQueries {
        /// Layer without queries.
        layer: u32,
        /// KV head without queries.
        head: usize,
    },
    /// A fitted value does not fit the format in which it is kept, or a fitted matrix has no
    /// inverse there.
    #[error("calibration of layer {layer} {side} head {head} leaves the range of its format")]
    OutOfRange {
        /// Layer of the value.
        layer: u32,
        /// Side of the value.
        side: Side,
        /// KV head of the value.
        head: usize,
    },
    /// The codec cannot serve this geometry.
    #[error(transparent)]
    Codec(#[from] Box<CodecError>),
}

impl Coded for CalibrationError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Codec(error) => error.code(),
            Self::NonFinite { .. } => ErrorCode::NonFinite,
            _ => ErrorCode::InvalidCalibration,
        }
    }
}

/// A codec that cannot be built, or a block that cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The geometry itself is out of range.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// The codec does not fit the geometry, or its parameters contradict each other.
    #[error("codec side {side}: {reason}")]
    InvalidCodec {
        /// Side that is wrong.
        side: Side,
        /// Why.
        reason: String,
    },
    /// The codec needs a calibration and none was given.
    #[error(
        "codec {spec} needs a calibration: make one with `kvd calibrate --codec ... --out FILE` \
         and pass its bytes as RegisterModel.calibration"
    )]
    CalibrationMissing {
        /// The codec.
        spec: String,
    },
    /// The calibration was fitted for something else.
    #[error("calibration does not fit the codec: {reason}")]
    CalibrationMismatch {
        /// Which part disagrees.
        reason: String,
    },
    /// A row holds NaN or infinity.
    #[error("{side} head {head} token {token} channel {channel} is NaN or infinite")]
    NonFinite {
        /// Side of the value.
        side: Side,
        /// KV head of the value.
        head: usize,
        /// Token of the value, counted from the start of the block.
        token: usize,
        /// Channel of the value.
        channel: usize,
    },
    /// A finite value that the geometry's dtype cannot hold.
    #[error("{side} head {head} token {token} channel {channel} is outside the range of {dtype}")]
    OutOfRange {
        /// Side of the value.
        side: Side,
        /// KV head of the value.
        head: usize,
        /// Token of the value, counted from the start of the block.
        token: usize,
        /// Channel of the value.
        channel: usize,
        /// The geometry's dtype.
        dtype: kvd_core::DType,
    },
    /// A block's slices, token count or layer do not fit the geometry.
    #[error("block: {0}")]
    Shape(String),
    /// More table versions than the page header can name.
    #[error("layer {layer} already has the most Huffman table versions a page can name")]
    TableVersions {
        /// The layer.
        layer: u32,
    },
}

impl Coded for CodecError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Geometry(_) => ErrorCode::InvalidArgument,
            Self::InvalidCodec { .. } => ErrorCode::InvalidCodec,
            Self::CalibrationMissing { .. } | Self::CalibrationMismatch { .. } => {
                ErrorCode::InvalidCalibration
            }
            Self::NonFinite { .. } | Self::OutOfRange { .. } => ErrorCode::NonFinite,
            Self::Shape(_) => ErrorCode::ShapeMismatch,
            Self::TableVersions { .. } => ErrorCode::LimitExceeded,
        }
    }
}

/// Page bytes that cannot be trusted. To a reader each of them is a miss, never data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// Shorter than a header, or not as long as the header says.
    #[error("page has {got} bytes; its header says {want}")]
    Length {
        /// Bytes given.
        got: usize,
        /// Bytes expected.
        want: usize,
    },
    /// Does not begin with the page magic.
    #[error("not a page: the magic bytes are {0:?}")]
    Magic([u8; 4]),
    /// Written by another version of the format.
    #[error("page format version {0} is unknown; it was written by a later kvd")]
    Version(u8),
    /// A header field that this codec never writes, or that belongs to another page.
    #[error("page header field {field} is {got}, expected {want}")]
    Field {
        /// Which field.
        field: &'static str,
        /// Its value.
        got: u64,
        /// The value the reader expected.
        want: u64,
    },
    /// The checksum does not match.
    #[error("page checksum is {got:016x}, expected {want:016x}")]
    Checksum {
        /// Checksum in the header.
        got: u64,
        /// Checksum of the bytes.
        want: u64,
    },
    /// A Huffman table version that this model does not have.
    #[error("page needs Huffman table version {0}, which the model does not have")]
    Table(u16),
    /// The payload contradicts itself: stream lengths, code values or its end.
    #[error("page payload: {0}")]
    Payload(&'static str),
    /// The caller asked for rows outside the page, or gave a buffer of another size.
    #[error("rows {first}..{end} of a page with {tokens} (buffer of {buffer} values)")]
    Range {
        /// First row asked for.
        first: usize,
        /// One past the last row.
        end: usize,
        /// Rows in the page.
        tokens: usize,
        /// Length of the output buffer.
        buffer: usize,
    },
}

impl Coded for PageError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::Range { .. } => ErrorCode::InvalidArgument,
            _ => ErrorCode::CorruptPage,
        }
    }
}
