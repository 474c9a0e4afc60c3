//! The set of (K, V) pairs whose JIT-compiled tensor-core kernel is loaded, and the pairs that a
//! codec wants compiled. All other pairs use the generic kernel.

use crate::block_table::LayerShapes;
use crate::codebook_table::CodebookRoom;
use crate::kernel_choice::{KERNELS, KernelPair, KernelVariant};
use crate::tensor_core::choose_variant;
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
    pub(crate) fn with_pair(mut self, pair: KernelPair) -> Self {
        let bit = pair_bit(pair);
        self.0[bit / 64] |= 1 << (bit % 64);
        self
    }

    /// Whether it is one of them.
    pub(crate) fn has_pair(&self, pair: KernelPair) -> bool {
        let bit = pair_bit(pair);
        self.0[bit / 64] >> (bit % 64) & 1 != 0
    }
}

fn pair_bit(KernelPair { keys, values, huffman }: KernelPair) -> usize {
    (usize::from(huffman) * KERNELS + keys as usize) * KERNELS + values as usize
}

/// The pairs of a layer's heads whose pages no kernel of their own reads, because there is none
/// ahead of time or it refuses their shapes, and whether the one to compile for a head multiplies
/// on tensor cores.
pub(crate) fn wanted_pairs(codec: &ModelCodec, layer: LayerIndex) -> Vec<(KernelPair, bool)> {
    let shapes = LayerShapes::new(codec, layer, [CodebookRoom::NONE; 2]);
    let of_side = |head, side| {
        let (kernel, mut shape) = shapes.fixed_width_shape(head, side)?;
        let coded = codec.head_codec(layer, side, head).stream_runs().is_some();
        // As with any table; there may be none yet.
        shape.stride = if coded { shape.dim } else { 0 };
        Some((kernel, shape))
    };
    let of_head = |head| {
        let [Some((keys, key)), Some((values, value))] = Side::BOTH.map(|side| of_side(head, side))
        else {
            return None;
        };
        let pair = KernelPair { keys, values, huffman: key.stride > 0 || value.stride > 0 };
        match choose_variant(pair, &key, &value, LatePairs::ALL) {
            KernelVariant::Late => Some((pair, true)),
            KernelVariant::Any => Some((pair, false)),
            KernelVariant::Own | KernelVariant::Groups | KernelVariant::Floats => None,
        }
    };
    (0..codec.geometry().kv_heads as usize).filter_map(of_head).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::SideKernel;
    use kvd_core::{DType, Geometry, RopePairing};

    /// The wanted pairs of a codec's only head, for `dim` channels.
    fn of(codec: &str, dim: u32) -> Vec<(KernelPair, bool)> {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim_k: dim,
            head_dim_v: dim,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        let spec = kvd_codec::resolve_spec(codec).unwrap();
        wanted_pairs(&ModelCodec::new(geometry, spec, None).unwrap(), LayerIndex(0))
    }

    #[test]
    fn a_pair_is_wanted_where_no_kernel_of_its_own_reads_its_pages() {
        let pair = |keys, values, huffman| KernelPair { keys, values, huffman };
        let (uniform, hybrid) = (SideKernel::Uniform, SideKernel::Hybrid);
        let plain = |huffman| vec![(pair(uniform, uniform, huffman), false)];
        let values = "v=uniform(b=4,g=32,axis=token)";
        let coded = "k=uniform(b=4,axis=token)/huffman; v=uniform(b=4,axis=token)/huffman";
        for (codec, dim, wanted) in [
            (&*format!("k=uniform(b=4,g=32,axis=channel); {values}"), 128, vec![]),
            // A tile of two scales; a warp of two; over eight bits; over 192 channels of values.
            (&format!("k=uniform(b=4,g=48,axis=channel); {values}"), 128, plain(false)),
            ("k=uniform(b=4,axis=token); v=uniform(b=4,g=20,axis=token)", 128, plain(false)),
            (&format!("k=polar(a=4,r=4,g=64); {values}"), 128, vec![]),
            (
                &format!("k=polar(a=5,r=4,g=64); {values}"),
                128,
                vec![(pair(SideKernel::Polar, uniform, false), false)],
            ),
            ("k=uniform(b=4,axis=token); v=uniform(b=4,axis=token)", 256, plain(false)),
            (coded, 128, vec![]),
            (coded, 256, plain(true)),
            ("k=f16; v=f16", 128, vec![]),
            ("k=f16; v=f16", 36, vec![(pair(SideKernel::F16, SideKernel::F16, false), false)]),
            ("k=f32; v=f32", 36, vec![]),
            (
                "k=uniform(b=2,g=16,axis=token,mode=hybrid); v=uniform(b=2,axis=channel,mode=hybrid)",
                128,
                vec![(pair(hybrid, hybrid, false), false)],
            ),
            // No kernel ahead of time.
            (&format!("k=f16; {values}"), 128, vec![(pair(SideKernel::F16, uniform, false), true)]),
            (&format!("k=f16; {values}"), 36, vec![(pair(SideKernel::F16, uniform, false), false)]),
            (
                &format!("k=f32; {values}"),
                128,
                vec![(pair(SideKernel::F32, uniform, false), false)],
            ),
        ] {
            assert_eq!(of(codec, dim), wanted, "{codec}, {dim} channels");
        }
    }

    #[test]
    fn a_set_has_what_was_put_into_it() {
        let pair = |keys, values, huffman| KernelPair { keys, values, huffman };
        let last = pair(SideKernel::Grid, SideKernel::Grid, true);
        let set =
            LatePairs::NONE.with_pair(last).with_pair(pair(SideKernel::Vq, SideKernel::F32, false));
        assert!(set.has_pair(last) && set.has_pair(pair(SideKernel::Vq, SideKernel::F32, false)));
        for other in [
            pair(SideKernel::Grid, SideKernel::Grid, false),
            pair(SideKernel::F32, SideKernel::Vq, false),
        ] {
            assert!(!set.has_pair(other) && LatePairs::ALL.has_pair(other), "{other:?}");
        }
    }
}
