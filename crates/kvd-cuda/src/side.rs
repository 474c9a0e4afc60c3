//! One head's side as a kernel sees it: which kernel, with which shape, in how much shared memory.

use crate::abi::SideShape;
use kvd_codec::{CodeLayout, GroupAxis, HeadSide, Stored};
use kvd_core::{DType, Geometry};

/// Tokens of a tile.
pub(crate) const TILE_TOKENS: usize = CodeLayout::TILE_TOKENS;
/// Copies are whole aligned pieces of this size.
const COPY_BYTES: usize = 16;
/// Bits of a code that the kernels read.
const CODE_BITS_MAX: u32 = 8;

/// The kernel of one side: a struct of `kernels/include/kvd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Rows in f32.
    F32,
    /// Rows in f16.
    F16,
    /// Rows in bf16.
    Bf16,
    /// FP8 e4m3.
    Fp8,
    /// Equidistant levels between minimum and maximum.
    Uniform,
    /// Vector quantization.
    Vq,
}

/// The pairs that `kernels/attend.cu` has.
const PAIRS: [(Kernel, Kernel); 7] = [
    (Kernel::F32, Kernel::F32),
    (Kernel::F16, Kernel::F16),
    (Kernel::Bf16, Kernel::Bf16),
    (Kernel::Fp8, Kernel::Fp8),
    (Kernel::Uniform, Kernel::Uniform),
    (Kernel::Vq, Kernel::Vq),
    (Kernel::Fp8, Kernel::Uniform),
];

impl Kernel {
    /// Its part of a kernel's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Uniform => "uniform",
            Self::Vq => "vq",
        }
    }

    /// Whether keys of this kernel meet values of that one.
    #[must_use]
    pub fn pairs_with(self, values: Self) -> bool {
        PAIRS.contains(&(self, values))
    }

    pub(crate) fn of_rows(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            DType::BF16 => Self::Bf16,
        }
    }

    /// Bytes of a float row's value.
    fn value_bytes(self) -> Option<usize> {
        match self {
            Self::F32 => Some(4),
            Self::F16 | Self::Bf16 => Some(2),
            _ => None,
        }
    }
}

/// The shape of rows in a dtype.
pub(crate) fn rows_shape(dim: usize) -> SideShape {
    let dim = dim as u32;
    SideShape { dim, scale_tokens: 1, scale_channels: 1, book_dim: 1, ..SideShape::default() }
}

/// The kernel and shape of a head's pages; a codebook is appended to `books`.
pub(crate) fn page_shape(
    side: &HeadSide,
    books: &mut Vec<u8>,
) -> Result<(Kernel, SideShape), &'static str> {
    let mut shape = rows_shape(side.dim());
    let kernel = match side.stored() {
        Stored::Float(dtype) => Kernel::of_rows(dtype),
        Stored::E4m3 => {
            shape.bits = 8;
            Kernel::Fp8
        }
        Stored::Uniform { bits, axis, group } => {
            shape.bits = bits;
            let page = Geometry::BLOCK_TOKENS_MAX as usize;
            let (tokens, channels) = match axis {
                GroupAxis::Channel => (group.unwrap_or(page), 1),
                GroupAxis::Token => (1, group.unwrap_or(side.dim())),
                GroupAxis::Block => (page, side.dim()),
            };
            (shape.scale_tokens, shape.scale_channels) = (tokens as u32, channels as u32);
            Kernel::Uniform
        }
        Stored::Codebook(book) => {
            books.resize(books.len().next_multiple_of(COPY_BYTES), 0);
            shape.book = books.len() as u64;
            shape.book_dim = book.dim() as u32;
            shape.bits = (book.entries().len() / book.dim()).ilog2();
            let start = books.len();
            books.resize(start + 2 * book.entries().len(), 0);
            DType::F16.narrow(book.entries(), &mut books[start..]);
            Kernel::Vq
        }
        _ => return Err("entropy-coded or of another quantizer"),
    };
    if shape.bits > CODE_BITS_MAX {
        return Err("codes of more than 8 bits");
    }
    Ok((kernel, shape))
}

/// Shared memory for one tile of a page of `tokens` rows, bytes: `spans` of the kernel's struct at
/// its largest, each part rounded out to whole copies.
pub(crate) fn stage_bytes(kernel: Kernel, shape: &SideShape, tokens: usize) -> usize {
    let (dim, bits) = (shape.dim as usize, shape.bits as usize);
    let rows = tokens.min(TILE_TOKENS);
    let per_row = dim / shape.book_dim as usize;
    let codes = kernel.value_bytes().map_or_else(
        // Every plane of a tile that is not full may end inside a byte.
        || (rows * per_row * bits).div_ceil(8) + CODE_BITS_MAX as usize,
        |bytes| rows * dim * bytes,
    );
    let scales = match kernel {
        Kernel::Fp8 => 4,
        Kernel::Uniform => {
            let share = shape.scale_tokens as usize;
            let scale_rows = tokens.div_ceil(share).min((TILE_TOKENS - 1) / share + 2);
            scale_rows * dim.div_ceil(shape.scale_channels as usize) * 4
        }
        _ => 0,
    };
    let copied = |bytes: usize| (bytes + 2 * (COPY_BYTES - 1)) / COPY_BYTES * COPY_BYTES;
    copied(codes) + if scales > 0 { copied(scales) } else { 0 }
}

/// Shared memory for a side's codebook, bytes.
pub(crate) fn book_bytes(kernel: Kernel, shape: &SideShape) -> usize {
    match kernel {
        Kernel::Vq => (2 * ((shape.book_dim as usize) << shape.bits)).next_multiple_of(COPY_BYTES),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_fits_its_stage_wherever_it_begins() {
        // KIVI keys: 4 bits, 128 channels, one scale row of 512 bytes or two.
        let shape = SideShape { bits: 4, scale_tokens: 32, ..rows_shape(128) };
        let bytes = stage_bytes(Kernel::Uniform, &shape, 64);
        assert!(bytes >= 2048 + 512 + 4 * 15, "{bytes}");
        // A raw tile needs no more than its rows and what lies around them.
        let bytes = stage_bytes(Kernel::F16, &rows_shape(128), 64);
        assert_eq!(bytes, 32 * 256 + 16);
    }

    #[test]
    fn pairs_are_those_that_kernels_have() {
        assert!(Kernel::Uniform.pairs_with(Kernel::Uniform));
        assert!(Kernel::Fp8.pairs_with(Kernel::Uniform));
        assert!(!Kernel::Uniform.pairs_with(Kernel::Fp8));
    }
}
