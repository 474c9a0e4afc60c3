//! Which multiply instruction a kernel uses, for comparing a benchmark with the machine's peak.

use crate::cpu::huffman::StreamTiles;
use crate::cpu::int_dot::wants_bytes;
use crate::cpu::kernel_table::{
    KernelTarget, KeyKernelId, ValueKernelId, find_key_kernel, find_value_kernel,
};
use crate::cpu::simd::{InstructionSet, KernelConfig, Simd};
use kvd_codec::ModelCodec;
use kvd_core::{LayerIndex, Side};

/// The operands of a kernel's multiply instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MultiplyKind {
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

impl MultiplyKind {
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

    /// The instructions for keys and values of a layer's first head, in units of so many query
    /// rows.
    pub(super) fn of_layer(
        config: KernelConfig,
        codec: &ModelCodec,
        layer: LayerIndex,
        rows: usize,
    ) -> [Self; 2] {
        let [k, v] = Side::BOTH.map(|side| codec.head_codec(layer, side, 0));
        let target = KernelTarget::new(config, rows);
        let [k_tiles, v_tiles] = [(k, Side::Key), (v, Side::Value)]
            .map(|(head, side)| head.stream_runs().and_then(|_| StreamTiles::new(head, side)));
        let keys = match find_key_kernel(target, k, k_tiles.as_ref()) {
            None | Some(KeyKernelId::Fp8) => Self::F32,
            Some(KeyKernelId::Bf16) => Self::Bf16,
            Some(KeyKernelId::Nibbles | KeyKernelId::ScoreTables | KeyKernelId::LevelTables) => {
                Self::Bytes
            }
            Some(_) => Self::of_integers(config.simd, rows),
        };
        let values = match find_value_kernel(target, v, v_tiles.as_ref()) {
            None | Some(ValueKernelId::Fp8) => Self::F32,
            Some(ValueKernelId::Bf16) => Self::Bf16,
            Some(ValueKernelId::Nibbles) => Self::Bytes,
            Some(_) => Self::of_integers(config.simd, rows),
        };
        [keys, values]
    }

    /// The instructions of `int_dot/`.
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
    use crate::cpu::simd::Precision;
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
        for simd in Simd::available_levels() {
            let config = |precision| KernelConfig { simd, precision };
            let of = |name: &str, precision| {
                MultiplyKind::of_layer(config(precision), &codec(name), LayerIndex(0), 4)
            };
            for precision in Precision::ALL {
                assert_eq!(of("raw", precision), [MultiplyKind::F32; 2], "{simd:?}");
                assert_eq!(of("fp8", precision), [MultiplyKind::F32; 2], "{simd:?}");
            }
            assert_eq!(of("kivi-4", Precision::Single), [MultiplyKind::F32; 2], "{simd:?}");
            let (fast, int8) = match simd.level() {
                InstructionSet::Avx2 => (MultiplyKind::Words, MultiplyKind::Bytes),
                InstructionSet::Portable | InstructionSet::Neon => [MultiplyKind::Words; 2].into(),
                _ if simd.has_bf16() => (MultiplyKind::Bytes, MultiplyKind::Bf16),
                _ => [MultiplyKind::Bytes; 2].into(),
            };
            assert_eq!(of("kivi-4", Precision::Fast), [fast; 2], "{simd:?}");
            // Without a kernel for `int8` the precision is `fast`.
            let precision = crate::cpu::attend_job::effective_precision(config(Precision::Int8), 4);
            assert_eq!(of("kivi-4", precision), [int8; 2], "{simd:?}");
            let mixed = of("k=raw; v=uniform(b=4,g=32,axis=token)", Precision::Fast);
            assert_eq!(mixed, [MultiplyKind::F32, fast], "{simd:?}");
        }
    }
}
