//! Why a plan has no launch.

use kvd_core::{Coded, ErrorCode, Side};

/// Requests that the kernels cannot serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No kernel reads this side.
    #[error(
        "no CUDA kernel reads the {} of layer {layer}, head {head} ({what}); \
         use another codec, or the cpu device",
        if *side == Side::Key { "keys" } else { "values" }
    )]
    NoSide {
        /// Keys or values.
        side: Side,
        /// Layer.
        layer: u32,
        /// KV head.
        head: usize,
        /// Kind of the codes that have no kernel.
        what: &'static str,
    },
    /// The head is too large.
    #[error("values of {dim} channels; the CUDA kernels take at most {max}, use the cpu device")]
    HeadDim {
        /// Channels.
        dim: usize,
        /// Most.
        max: usize,
    },
    /// Its tables and decoded codes are too large.
    #[error(
        "thread blocks of layer {layer} would take {bytes} bytes of shared memory, of which the \
         GPU has {max}: use another codec, a calibration with fewer changes of class along a \
         head, or the cpu device"
    )]
    SharedMemory {
        /// Layer.
        layer: u32,
        /// Bytes that a thread block needs at least.
        bytes: usize,
        /// Bytes that it may take.
        max: usize,
    },
    /// The backend does not know a page that the plan names.
    #[error("no page is known at offset {0} of the arena")]
    UnknownPage(u64),
    /// Keys and values of a page differ in length.
    #[error("the page at offset {offset} has {keys} keys and {values} values")]
    Lengths {
        /// Offset of the keys' page.
        offset: u64,
        /// Rows of the keys.
        keys: u16,
        /// Rows of the values.
        values: u16,
    },
    /// A page says that it has more rows than blocks have.
    #[error("the page at offset {offset} has {tokens} rows; blocks have {max}")]
    TooLong {
        /// Offset of the keys' page.
        offset: u64,
        /// Its rows.
        tokens: u16,
        /// Rows of a block.
        max: u32,
    },
}

impl Coded for PlanError {
    fn code(&self) -> ErrorCode {
        match self {
            Self::UnknownPage(_) | Self::Lengths { .. } | Self::TooLong { .. } => {
                ErrorCode::CorruptPage
            }
            _ => ErrorCode::InvalidCodec,
        }
    }
}
