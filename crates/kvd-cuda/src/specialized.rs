//! Kernels that have the shapes of one codec as constants: `kernels/include/kvd/specialized.cuh`
//! has the same ones. Others take any shape, in more instructions. Of some a warp owns tokens
//! (`tokens.cuh`): they take fewer rows too, and need other shared memory.

use crate::abi::{SideKernel, SideShape};
use crate::kernel_choice::{ChosenKernel, KernelVariant};

/// Channels of their heads, and query rows.
const DIM: u32 = 128;
const ROWS: u32 = 4;

/// Tokens of a stop, of keys or values of which a warp that owns tokens has one in shared memory.
pub(crate) const STOP_TOKENS: usize = 64;

/// A kernel whose warps own tokens: `kivi-4` and `kivi-2`, for up to so many query rows.
struct TokenKernel {
    name: &'static str,
    bits: u32,
    dim: u32,
    rows: u32,
}

const fn token_kernel(name: &'static str, bits: u32, dim: u32, rows: u32) -> TokenKernel {
    TokenKernel { name, bits, dim, rows }
}

/// All of them, those for few rows first: `KVD_TOKENS` of `kernels/attend_uniform_fixed.cu`.
static TOKEN_KERNELS: [TokenKernel; 8] = [
    token_kernel("kvd_attend_kivi4_4", 4, 128, 4),
    token_kernel("kvd_attend_kivi4_8", 4, 128, 8),
    token_kernel("kvd_attend_kivi4_64_4", 4, 64, 4),
    token_kernel("kvd_attend_kivi4_64_8", 4, 64, 8),
    token_kernel("kvd_attend_kivi2_4", 2, 128, 4),
    token_kernel("kvd_attend_kivi2_8", 2, 128, 8),
    token_kernel("kvd_attend_kivi2_64_4", 2, 64, 4),
    token_kernel("kvd_attend_kivi2_64_8", 2, 64, 8),
];

/// Warps of a thread block.
const WARPS: usize = 4;

/// A thread block of a kernel whose warps own tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenBlock {
    /// Its shared memory.
    pub(crate) shared_bytes: usize,
    /// Bytes of keys or values that its warps have under way together, at least.
    pub(crate) bytes_under_way: usize,
    /// Thread blocks on a multiprocessor, and the registers of a thread that leaves.
    pub(crate) resident: (usize, u32),
}

/// The thread block of a kernel; none where its warps own no tokens. Each of its warps has, as
/// `WARP_BYTES` of `token_pages.cuh` says: scales and codes of a stop's keys and values; ordered
/// steps of values; 16 stops that come next; earlier sums of each four rows.
pub(crate) fn token_block(kernel: &str) -> Option<TokenBlock> {
    let TokenKernel { bits, dim, rows, .. } =
        TOKEN_KERNELS.iter().find(|known| known.name == kernel)?;
    let (dim, bands) = (*dim as usize, *rows as usize / 4);
    let codes = STOP_TOKENS * dim * *bits as usize / 8;
    // Scales of 64 channels are half of what they have memory for.
    let (side, copied) = (1024 + codes, 8 * dim + codes);
    let kept = bands * 4 * 32 * (dim / 8 + 5);
    Some(TokenBlock {
        shared_bytes: WARPS * (2 * side + 512 + 16 * 32 + kept),
        bytes_under_way: WARPS * copied,
        resident: if bands > 1 { (2, 255) } else { (3, 168) },
    })
}

/// The constants of a side in a specialized kernel.
#[derive(Clone, Copy)]
enum SpecializedSide {
    /// Bits of a code; tokens and channels that share a scale.
    Scaled { bits: u32, tokens: u32, channels: u32 },
    /// Bits of a code and channels of an entry, of one codebook that shared memory has whole.
    Vq { bits: u32, channels: u32 },
    /// Bits of a level.
    Lloyd { bits: u32 },
    /// Bits of angle and radius, whose steps are the calibration's.
    Polar { angle: u32, radius: u32 },
    /// Channels alone.
    Dim,
    /// Groups of one width; each channel has one place.
    Groups,
}

use SpecializedSide::{Dim, Groups, Lloyd, Polar, Scaled, Vq};

/// A scale for 32 tokens of a channel, or for 32 channels of a token.
const BY_CHANNEL: fn(u32) -> SpecializedSide = |bits| Scaled { bits, tokens: 32, channels: 1 };
const BY_TOKEN: fn(u32) -> SpecializedSide = |bits| Scaled { bits, tokens: 1, channels: 32 };

/// A kernel, its sides' kernels, and their constants.
type SpecializedKernel = (&'static str, [SideKernel; 2], [SpecializedSide; 2]);

/// All there are: `KVD_FIXED` of `kernels/attend_*_fixed.cu`.
fn specialized_kernels() -> [SpecializedKernel; 7] {
    let vq = [SideKernel::Vq; 2];
    let polar = Polar { angle: 4, radius: 4 };
    let whole = Scaled { bits: 4, tokens: 1, channels: DIM };
    [
        ("kvd_attend_innerq2_4", [SideKernel::Hybrid; 2], [BY_TOKEN(2), BY_CHANNEL(2)]),
        ("kvd_attend_vecinfer4_4", vq, [Vq { bits: 8, channels: 2 }; 2]),
        ("kvd_attend_vecinfer2_4", vq, [Vq { bits: 8, channels: 4 }; 2]),
        ("kvd_attend_vecinfer2reg_4", vq, [Vq { bits: 4, channels: 2 }; 2]),
        ("kvd_attend_polar44_4", [SideKernel::Polar, SideKernel::Uniform], [polar, BY_TOKEN(4)]),
        (
            "kvd_attend_turbo4_4",
            [SideKernel::Lloyd, SideKernel::Uniform],
            [Lloyd { bits: 4 }, whole],
        ),
        ("kvd_attend_kvd2fast_4", [SideKernel::BitAlloc; 2], [Dim, Groups]),
    ]
}

impl SpecializedSide {
    /// Whether a shape is that, in heads of `dim` channels.
    fn matches_shape(self, shape: &SideShape, dim: u32) -> bool {
        // One table, which shared memory holds whole.
        let is_whole = shape.sets == 1 && u64::from(shape.entry_count) == 1 << shape.bits.min(32);
        let fits = match self {
            Scaled { bits, tokens, channels } => {
                let of_shape = (shape.bits, shape.scale_tokens, shape.scale_channels);
                of_shape == (bits, tokens, channels)
            }
            Vq { bits, channels } => {
                let of_shape = (shape.bits, shape.book_dim, shape.entry_bytes);
                of_shape == (bits, channels, channels) && shape.stages == 1 && is_whole
            }
            Lloyd { bits } => (shape.bits, shape.entry_bytes) == (bits, 2) && is_whole,
            Polar { angle, radius } => {
                let of_shape = (shape.bits, shape.angle_bits, shape.entry_bytes);
                let with_steps = shape.table_bytes == polar_table_bytes(angle, DIM);
                of_shape == (angle + radius, angle, 4) && with_steps && is_whole
            }
            Dim => true,
            Groups => shape.spread_places == DIM,
        };
        fits && shape.dim == dim && shape.stride == 0
    }
}

/// Bytes of the directions of angles, and of the steps of radii that the calibration has.
pub(crate) fn polar_table_bytes(angle_bits: u32, dim: u32) -> u32 {
    (8 << angle_bits) + 4 * dim / 2
}

/// The kernel for units of so many rows whose sides have these shapes, if one has them as
/// constants.
pub(crate) fn specialized_kernel(
    ChosenKernel { pair, variant }: ChosenKernel,
    rows: u32,
    key: &SideShape,
    value: &SideShape,
) -> Option<&'static str> {
    let grouped = pair.keys == SideKernel::BitAlloc;
    let wanted = if grouped { KernelVariant::Groups } else { KernelVariant::Own };
    if variant != wanted || pair.huffman {
        return None;
    }
    let kernels = [pair.keys, pair.values];
    let is = |sides: [SpecializedSide; 2], dim| {
        sides[0].matches_shape(key, dim) && sides[1].matches_shape(value, dim)
    };
    let owns_tokens = |known: &&TokenKernel| {
        rows <= known.rows && is([BY_CHANNEL(known.bits), BY_TOKEN(known.bits)], known.dim)
    };
    if kernels == [SideKernel::Uniform; 2]
        && let Some(known) = TOKEN_KERNELS.iter().find(owns_tokens)
    {
        return Some(known.name);
    }
    let mut all = specialized_kernels().into_iter();
    let (name, ..) = all.find(|(_, of, sides)| *of == kernels && is(*sides, DIM))?;
    (rows == ROWS).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_choice::KernelPair;

    #[test]
    fn a_shape_that_differs_in_one_constant_has_the_kernel_for_any() {
        let pair =
            KernelPair { keys: SideKernel::Uniform, values: SideKernel::Uniform, huffman: false };
        let shape = |scale_tokens, scale_channels| SideShape {
            dim: 128,
            bits: 4,
            scale_tokens,
            scale_channels,
            ..SideShape::default()
        };
        let (key, value) = (shape(32, 1), shape(1, 32));
        let of = |rows, key, value| {
            specialized_kernel(
                ChosenKernel { pair, variant: KernelVariant::Own },
                rows,
                &key,
                &value,
            )
        };
        assert_eq!(of(4, key, value), Some("kvd_attend_kivi4_4"));
        assert_eq!(of(8, key, value), Some("kvd_attend_kivi4_8"));
        // Where a warp owns tokens fewer rows leave columns empty; other kernels are for four.
        assert_eq!(of(1, key, value), Some("kvd_attend_kivi4_4"));
        let of_64 = |shape| SideShape { dim: 64, ..shape };
        assert_eq!(of(4, of_64(key), of_64(value)), Some("kvd_attend_kivi4_64_4"));
        let bytes = |kernel| token_block(kernel).map(|block| block.shared_bytes);
        assert_eq!(bytes("kvd_attend_kivi4_4"), Some(4 * 13_952));
        assert_eq!(bytes("kvd_attend_kivi4_8"), Some(4 * (13_952 + 2688)));
        assert_eq!(bytes("kvd_attend_kivi2_4"), Some(4 * 9856));
        assert_eq!(bytes("kvd_attend_kivi2_64_4"), Some(4 * 6784));
        assert_eq!(bytes("kvd_attend_turbo4_4"), None);
        for (key, value) in [
            (SideShape { dim: 256, ..key }, SideShape { dim: 256, ..value }),
            (key, of_64(value)),
            (SideShape { bits: 2, ..key }, value),
            (shape(64, 1), value),
            (key, shape(1, 128)),
            (SideShape { stride: 128, ..key }, value),
        ] {
            assert_eq!(of(4, key, value), None, "{key:?} {value:?}");
        }
        let huffman = KernelPair { huffman: true, ..pair };
        assert_eq!(
            specialized_kernel(
                ChosenKernel { pair: huffman, variant: KernelVariant::Own },
                4,
                &key,
                &value
            ),
            None
        );
        assert_eq!(
            specialized_kernel(ChosenKernel { pair, variant: KernelVariant::Any }, 4, &key, &value),
            None
        );
        // Tables that shared memory has in part.
        let lloyd = KernelPair { keys: SideKernel::Lloyd, ..pair };
        let levels = SideShape { dim: 128, bits: 4, entry_bytes: 2, sets: 1, ..key };
        let of = |entry_count| {
            let key = SideShape { entry_count, ..levels };
            specialized_kernel(
                ChosenKernel { pair: lloyd, variant: KernelVariant::Own },
                4,
                &key,
                &shape(1, 128),
            )
        };
        assert_eq!((of(16), of(8)), (Some("kvd_attend_turbo4_4"), None));
    }
}
