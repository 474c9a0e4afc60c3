//! Pairs that no kernel was compiled for ahead of time and whose own, compiled when a model is
//! registered, multiplies on tensor cores: which of them are loaded. Launches of the others are for
//! the kernel that all pairs share.

use crate::products::fits_late;
use crate::side::{KERNELS, Kernel, Pair};
use crate::table::CodebookRoom;
use crate::tables::Shapes;
use kvd_codec::ModelCodec;
use kvd_core::{LayerIndex, Side};

/// Words of a bit for each pair, with and without Huffman codes.
const WORDS: usize = (2 * KERNELS * KERNELS).div_ceil(64);

/// A set of pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatePairs([u64; WORDS]);

impl LatePairs {
    /// None.
    pub const NONE: Self = Self([0; WORDS]);
    /// Every pair.
    pub const ALL: Self = Self([!0; WORDS]);

    /// With one pair more.
    #[must_use]
    pub(crate) fn with(mut self, pair: Pair) -> Self {
        let bit = bit(pair);
        self.0[bit / 64] |= 1 << (bit % 64);
        self
    }

    /// Whether it is one of them.
    pub(crate) fn has(&self, pair: Pair) -> bool {
        let bit = bit(pair);
        self.0[bit / 64] >> (bit % 64) & 1 != 0
    }
}

fn bit(Pair { keys, values, huffman }: Pair) -> usize {
    (usize::from(huffman) * KERNELS + keys as usize) * KERNELS + values as usize
}

/// The pairs of a layer's heads that have no kernel of their own, and whether the one to compile
/// for a head multiplies on tensor cores.
pub(crate) fn wanted(codec: &ModelCodec, layer: LayerIndex) -> Vec<(Pair, bool)> {
    let heads = 0..codec.geometry().kv_heads as usize;
    let coded = |head, side| codec.head(layer, side, head).lane_runs().is_some();
    let kernels: Vec<_> = heads
        .filter_map(|head| {
            let sides = Side::BOTH.map(|side| Kernel::of(codec.head(layer, side, head)));
            let [Some(keys), Some(values)] = sides else { return None };
            let huffman = Side::BOTH.iter().any(|side| coded(head, *side));
            Some((head, Pair { keys, values, huffman }))
        })
        .filter(|(_, pair)| !pair.is_known())
        .collect();
    if kernels.is_empty() {
        return Vec::new();
    }
    let shapes = Shapes::new(codec, layer, [CodebookRoom::NONE; 2]);
    let of_head = |(head, pair): (usize, Pair)| {
        let shape = |side| {
            let mut shape = shapes.fixed(head, side)?.1;
            // As with any table; there may be none yet.
            shape.stride = if coded(head, side) { shape.dim } else { 0 };
            Some(shape)
        };
        let [Some(key), Some(value)] = Side::BOTH.map(shape) else { return None };
        Some((pair, fits_late(pair, &key, &value)))
    };
    kernels.into_iter().filter_map(of_head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_put_into_it() {
        let pair = |keys, values, huffman| Pair { keys, values, huffman };
        let last = pair(Kernel::Grid, Kernel::Grid, true);
        let set = LatePairs::NONE.with(last).with(pair(Kernel::Vq, Kernel::F32, false));
        assert!(set.has(last) && set.has(pair(Kernel::Vq, Kernel::F32, false)));
        for other in [pair(Kernel::Grid, Kernel::Grid, false), pair(Kernel::F32, Kernel::Vq, false)]
        {
            assert!(!set.has(other) && LatePairs::ALL.has(other), "{other:?}");
        }
    }
}
