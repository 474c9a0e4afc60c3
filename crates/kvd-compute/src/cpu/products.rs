//! Which multiply instruction a kernel uses, for comparing a benchmark with the machine's peak.

use crate::cpu::dots::wants_bytes;
use crate::cpu::fused::{Keys, Values};
use crate::cpu::huffman::LaneTiles;
use crate::cpu::simd::{How, InstructionSet, Precision, Simd};
use kvd_codec::{HeadCodec, ModelCodec};
use kvd_core::{LayerIndex, Side};

/// The operands of a kernel's multiply instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// f32, with fused additions where the instruction set has them.
    F32,
    /// Two bf16 of each lane: `vdpbf16ps`.
    Bf16,
    /// Words: `vpmaddwd`, `smlal`.
    Words,
    /// Bytes: `vpdpbusd`, `vpmaddubsw` in plain AVX2, `sdot`, `usmmla`. Factors of two bytes take
    /// two of them for a multiplication. Score tables are summed with them, one for all channels of
    /// a code.
    Bytes,
    /// Bytes in tiles of AMX.
    Tiles,
}

impl Products {
    /// Name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Words => "words",
            Self::Bytes => "bytes",
            Self::Tiles => "tiles",
        }
    }

    /// Those of keys and values of a layer's first head, for units of so many query rows.
    pub(super) fn of(how: How, codec: &ModelCodec, layer: LayerIndex, rows: usize) -> [Self; 2] {
        let head = |side| codec.head_codec(layer, side, 0);
        let tiles = |side: Side| {
            let coded = how.1 != Precision::Single && head(side).stream_runs().is_some();
            coded.then(|| LaneTiles::new(head(side), side)).flatten()
        };
        let [k, v] = Side::BOTH.map(|side| (head(side), tiles(side)));
        [Self::of_keys(how, k, rows), Self::of_values(how, v, rows)]
    }

    fn of_keys(how: How, (side, tiles): (&HeadCodec, Option<LaneTiles>), rows: usize) -> Self {
        let queries = vec![1.0; rows * side.dim()];
        match Keys::new(how, side, tiles.as_ref(), &queries) {
            None | Some(Keys::Fp8(_)) => Self::F32,
            Some(Keys::Bf16(_)) => Self::Bf16,
            Some(Keys::Nibbles(_) | Keys::Tables(_)) => Self::Bytes,
            Some(_) => Self::of_integers(how.0, rows),
        }
    }

    fn of_values(how: How, (side, tiles): (&HeadCodec, Option<LaneTiles>), rows: usize) -> Self {
        match Values::new(how, side, tiles.as_ref(), rows) {
            None | Some(Values::Fp8(_)) => Self::F32,
            Some(Values::Bf16(_)) => Self::Bf16,
            Some(Values::Nibbles(_)) => Self::Bytes,
            Some(_) => Self::of_integers(how.0, rows),
        }
    }

    /// Those of `dots/`.
    fn of_integers(simd: Simd, rows: usize) -> Self {
        match simd.level() {
            _ if wants_bytes(simd, rows) => Self::Tiles,
            InstructionSet::Portable | InstructionSet::Avx2 | InstructionSet::Neon => Self::Words,
            InstructionSet::AvxVnni
            | InstructionSet::Avx512
            | InstructionSet::Amx
            | InstructionSet::NeonDotprod
            | InstructionSet::NeonI8mm => Self::Bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{DType, Geometry, RopePairing};

    fn codec(name: &str) -> ModelCodec {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        ModelCodec::new(geometry, kvd_codec::resolve_spec(name).unwrap(), None).unwrap()
    }

    #[test]
    fn products_are_those_of_the_level_and_the_precision() {
        for simd in Simd::available() {
            let of = |name: &str, precision| {
                Products::of((simd, precision), &codec(name), LayerIndex(0), 4)
            };
            for precision in Precision::ALL {
                assert_eq!(of("raw", precision), [Products::F32; 2], "{simd:?}");
                assert_eq!(of("fp8", precision), [Products::F32; 2], "{simd:?}");
            }
            assert_eq!(of("kivi-4", Precision::Single), [Products::F32; 2], "{simd:?}");
            let (fast, int8) = match simd.level() {
                InstructionSet::Avx2 => (Products::Words, Products::Bytes),
                InstructionSet::Portable | InstructionSet::Neon => [Products::Words; 2].into(),
                _ if simd.has_bf16() => (Products::Bytes, Products::Bf16),
                _ => [Products::Bytes; 2].into(),
            };
            assert_eq!(of("kivi-4", Precision::Fast), [fast; 2], "{simd:?}");
            // Without a kernel for `int8` the precision is `fast`.
            let precision = crate::cpu::unit::effective((simd, Precision::Int8), 4);
            assert_eq!(of("kivi-4", precision), [int8; 2], "{simd:?}");
            let mixed = of("k=raw; v=uniform(b=4,g=32,axis=token)", Precision::Fast);
            assert_eq!(mixed, [Products::F32, fast], "{simd:?}");
        }
    }
}
