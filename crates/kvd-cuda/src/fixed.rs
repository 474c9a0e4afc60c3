//! Kernels that have the shapes of one codec as constants: `kernels/include/kvd/fixed.cuh` has the
//! same ones. Others take any shape, in more instructions.

use crate::abi::SideShape;
use crate::side::{Kernel, Pair, Variant};

/// Channels of their heads, and query rows.
const DIM: u32 = 128;
const ROWS: u32 = 4;

/// What is fixed of a side.
#[derive(Clone, Copy)]
enum FixedSide {
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
    /// Groups of one width, of which each channel has one place.
    Groups,
}

use FixedSide::{Dim, Groups, Lloyd, Polar, Scaled, Vq};

/// A scale for 32 tokens of a channel, or for 32 channels of a token.
const BY_CHANNEL: fn(u32) -> FixedSide = |bits| Scaled { bits, tokens: 32, channels: 1 };
const BY_TOKEN: fn(u32) -> FixedSide = |bits| Scaled { bits, tokens: 1, channels: 32 };

/// A kernel, its sides' kernels, and what is fixed of them.
type Fixed = (&'static str, [Kernel; 2], [FixedSide; 2]);

/// All there are: `KVD_FIXED` of `kernels/attend_*_fixed.cu`.
fn all() -> [Fixed; 9] {
    let (uniform, vq) = ([Kernel::Uniform; 2], [Kernel::Vq; 2]);
    let polar = Polar { angle: 4, radius: 4 };
    let whole = Scaled { bits: 4, tokens: 1, channels: DIM };
    [
        ("kvd_attend_kivi4_4", uniform, [BY_CHANNEL(4), BY_TOKEN(4)]),
        ("kvd_attend_kivi2_4", uniform, [BY_CHANNEL(2), BY_TOKEN(2)]),
        ("kvd_attend_innerq2_4", [Kernel::Hybrid; 2], [BY_TOKEN(2), BY_CHANNEL(2)]),
        ("kvd_attend_vecinfer4_4", vq, [Vq { bits: 8, channels: 2 }; 2]),
        ("kvd_attend_vecinfer2_4", vq, [Vq { bits: 8, channels: 4 }; 2]),
        ("kvd_attend_vecinfer2reg_4", vq, [Vq { bits: 4, channels: 2 }; 2]),
        ("kvd_attend_polar44_4", [Kernel::Polar, Kernel::Uniform], [polar, BY_TOKEN(4)]),
        ("kvd_attend_turbo4_4", [Kernel::Lloyd, Kernel::Uniform], [Lloyd { bits: 4 }, whole]),
        ("kvd_attend_kvd2fast_4", [Kernel::BitAlloc; 2], [Dim, Groups]),
    ]
}

impl FixedSide {
    /// Whether a shape is that.
    fn is(self, shape: &SideShape) -> bool {
        // Of one table, which shared memory has whole.
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
        fits && shape.dim == DIM && shape.stride == 0
    }
}

/// Bytes of the directions of angles, and of the steps of radii that the calibration has.
pub(crate) fn polar_table_bytes(angle_bits: u32, dim: u32) -> u32 {
    (8 << angle_bits) + 4 * dim / 2
}

/// The kernel for units of so many rows whose sides have these shapes, if one has them as
/// constants.
pub(crate) fn kernel(
    (pair, variant): (Pair, Variant),
    rows: u32,
    key: &SideShape,
    value: &SideShape,
) -> Option<&'static str> {
    let grouped = pair.keys == Kernel::BitAlloc;
    let wanted = if grouped { Variant::Groups } else { Variant::Own };
    if variant != wanted || pair.huffman || rows != ROWS {
        return None;
    }
    let is = |(_, kernels, sides): &Fixed| {
        *kernels == [pair.keys, pair.values] && sides[0].is(key) && sides[1].is(value)
    };
    all().into_iter().find(is).map(|(name, ..)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_differs_in_one_constant_has_the_kernel_for_any() {
        let pair = Pair { keys: Kernel::Uniform, values: Kernel::Uniform, huffman: false };
        let shape = |scale_tokens, scale_channels| SideShape {
            dim: 128,
            bits: 4,
            scale_tokens,
            scale_channels,
            ..SideShape::default()
        };
        let (key, value) = (shape(32, 1), shape(1, 32));
        let of = |rows, key, value| kernel((pair, Variant::Own), rows, &key, &value);
        assert_eq!(of(4, key, value), Some("kvd_attend_kivi4_4"));
        assert_eq!(of(8, key, value), None);
        for (key, value) in [
            (SideShape { dim: 64, ..key }, SideShape { dim: 64, ..value }),
            (SideShape { bits: 2, ..key }, value),
            (shape(64, 1), value),
            (key, shape(1, 128)),
            (SideShape { stride: 128, ..key }, value),
        ] {
            assert_eq!(of(4, key, value), None, "{key:?} {value:?}");
        }
        let huffman = Pair { huffman: true, ..pair };
        assert_eq!(kernel((huffman, Variant::Own), 4, &key, &value), None);
        assert_eq!(kernel((pair, Variant::Any), 4, &key, &value), None);
        // Tables that shared memory has in part.
        let lloyd = Pair { keys: Kernel::Lloyd, ..pair };
        let levels = SideShape { dim: 128, bits: 4, entry_bytes: 2, sets: 1, ..key };
        let of = |entry_count| {
            let key = SideShape { entry_count, ..levels };
            kernel((lloyd, Variant::Own), 4, &key, &shape(1, 128))
        };
        assert_eq!((of(16), of(8)), (Some("kvd_attend_turbo4_4"), None));
    }
}
