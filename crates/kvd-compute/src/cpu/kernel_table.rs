//! Which kernel multiplies a side, as a table: quantizer x instruction set x precision.
//!
//! The first row that takes a side is its kernel. A kernel may still refuse numbers (a query that
//! is not finite, a codebook that fits no bytes): then rows are decoded, and no other row is asked.

use super::{
    bitalloc, fp8, lloyd, polar, score_tables, uniform, uniform::bf16, uniform::by_token,
    uniform::nibbles, uniform::values, vq,
};
use crate::cpu::huffman::StreamTiles;
use crate::cpu::simd::{InstructionSet, KernelConfig, Precision};
use kvd_codec::{HeadCodec, ModelCodec};
use kvd_core::{LayerIndex, Side};

/// Processor, precision and rows that a kernel is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KernelTarget {
    set: InstructionSet,
    /// Whether it has products of bf16 as wide as its registers.
    bf16: bool,
    precision: Precision,
    /// Query rows of a unit.
    rows: usize,
}

impl KernelTarget {
    pub(super) fn new(config: KernelConfig, rows: usize) -> Self {
        let KernelConfig { simd, precision } = config;
        Self { set: simd.level(), bf16: simd.has_bf16(), precision, rows }
    }

    /// The precision that is used: AVX-512 has products of single bytes and score tables, AVX-VNNI
    /// mostly the former and AVX2 without it the latter; AMX multiplies factors of two bytes in the
    /// time of one.
    pub(super) fn effective_precision(self) -> Precision {
        let has = matches!(self.set.vector_set(), InstructionSet::Avx2 | InstructionSet::Avx512);
        let bytes = has && !self.wants_bytes();
        if self.precision == Precision::Int8 && !bytes { Precision::Fast } else { self.precision }
    }

    fn wants_bytes(self) -> bool {
        self.set.wants_bytes(self.rows)
    }

    /// The vector registers of its instruction set.
    pub(super) fn vector_set(self) -> InstructionSet {
        self.set.vector_set()
    }

    /// Whether pages of a side are multiplied as they are; else their rows are decoded.
    pub(super) fn has_kernel(self, head: &HeadCodec, side: Side) -> bool {
        match side {
            Side::Key => find_row(KEY_KERNELS, self, head).is_some(),
            Side::Value => find_row(VALUE_KERNELS, self, head).is_some(),
        }
    }
}

/// Kernels of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyKernelId {
    Fp8,
    Grid,
    BitAlloc,
    ScoreTables,
    Vq,
    LevelTables,
    Lloyd,
    Polar,
    ByToken,
    Bf16,
    Nibbles,
    Uniform,
}

/// Kernels of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueKernelId {
    Fp8,
    Grid,
    BitAlloc,
    Vq,
    Lloyd,
    Bf16,
    Nibbles,
    Uniform,
}

/// Instruction sets that a kernel exists for.
#[derive(Clone, Copy, Debug)]
enum KernelSets {
    /// All.
    All,
    /// All with vector registers.
    Vectors,
    /// AVX2 and AVX-512, where AMX does not take the rows.
    ByteLookUps,
    /// `ByteLookUps` without AVX-VNNI, which multiplies entries in fewer operations than AVX2 needs
    /// to look up what they add.
    EntryLookUps,
    /// Those with products of bf16, where AMX does not take the rows.
    Bf16Products,
    /// AVX2 without AVX-VNNI.
    PlainAvx2,
}

impl KernelSets {
    fn has_kernel(self, target: KernelTarget) -> bool {
        let looks_up =
            matches!(target.set.vector_set(), InstructionSet::Avx2 | InstructionSet::Avx512)
                && !target.wants_bytes();
        match self {
            Self::All => true,
            Self::Vectors => target.set.vector_set() != InstructionSet::Portable,
            Self::ByteLookUps => looks_up,
            Self::EntryLookUps => looks_up && target.set != InstructionSet::AvxVnni,
            Self::Bf16Products => target.bf16 && !target.wants_bytes(),
            Self::PlainAvx2 => target.set == InstructionSet::Avx2,
        }
    }
}

/// All precisions: the kernel rounds nothing.
const EXACT: &[Precision] = &Precision::ALL;
/// Kernels that round to words.
const ROUNDED: &[Precision] = &[Precision::Fast, Precision::Int8];
/// Kernels that round to bytes.
const BYTES: &[Precision] = &[Precision::Int8];

/// A row of the table.
struct KernelRow<K> {
    kernel: K,
    /// The name of its file or folder.
    name: &'static str,
    sets: KernelSets,
    precisions: &'static [Precision],
    /// Whether it takes pages of a side.
    takes_side: fn(&HeadCodec) -> bool,
}

/// Kernels of keys; the first that takes a side is used.
const KEY_KERNELS: &[KernelRow<KeyKernelId>] = {
    use KernelSets::{All, Bf16Products, ByteLookUps, EntryLookUps, PlainAvx2, Vectors};
    use KeyKernelId as K;
    &[
        kernel_row(K::Fp8, "fp8", Vectors, EXACT, fp8::takes_side),
        kernel_row(K::Grid, "grid", All, ROUNDED, |side| side.grid().is_some()),
        kernel_row(K::BitAlloc, "bitalloc", All, ROUNDED, bitalloc::takes_side),
        kernel_row(
            K::ScoreTables,
            "score_tables",
            EntryLookUps,
            BYTES,
            score_tables::takes_codebook,
        ),
        kernel_row(K::Vq, "vq", All, ROUNDED, vq::takes_side),
        kernel_row(K::LevelTables, "score_tables", ByteLookUps, BYTES, score_tables::takes_levels),
        kernel_row(K::Lloyd, "lloyd", All, ROUNDED, lloyd::takes_side),
        kernel_row(K::Polar, "polar", All, ROUNDED, polar::takes_side),
        kernel_row(K::ByToken, "uniform/by_token", All, ROUNDED, by_token::takes_side),
        kernel_row(K::Bf16, "uniform/bf16", Bf16Products, BYTES, bf16::takes_keys),
        kernel_row(K::Nibbles, "uniform/nibbles", PlainAvx2, BYTES, nibbles::takes_keys),
        kernel_row(K::Uniform, "uniform", All, ROUNDED, uniform::takes_keys),
    ]
};

/// Kernels of values; the first that takes a side is used.
const VALUE_KERNELS: &[KernelRow<ValueKernelId>] = {
    use KernelSets::{All, Bf16Products, PlainAvx2, Vectors};
    use ValueKernelId as V;
    &[
        kernel_row(V::Fp8, "fp8", Vectors, EXACT, fp8::takes_side),
        kernel_row(V::Grid, "grid", All, ROUNDED, |side| side.grid().is_some()),
        kernel_row(V::BitAlloc, "bitalloc", All, ROUNDED, bitalloc::takes_side),
        kernel_row(V::Vq, "vq", All, ROUNDED, vq::takes_side),
        kernel_row(V::Lloyd, "lloyd", All, ROUNDED, lloyd::takes_side),
        kernel_row(V::Bf16, "uniform/bf16", Bf16Products, BYTES, bf16::takes_values),
        kernel_row(V::Nibbles, "uniform/nibbles", PlainAvx2, BYTES, nibbles::takes_values),
        kernel_row(V::Uniform, "uniform", All, ROUNDED, values::takes_side),
    ]
};

const fn kernel_row<K>(
    kernel: K,
    name: &'static str,
    sets: KernelSets,
    precisions: &'static [Precision],
    takes_side: fn(&HeadCodec) -> bool,
) -> KernelRow<K> {
    KernelRow { kernel, name, sets, precisions, takes_side }
}

/// The row of a side; none where its rows are decoded.
fn find_row<'a, K>(
    rows: &'a [KernelRow<K>],
    target: KernelTarget,
    side: &HeadCodec,
) -> Option<&'a KernelRow<K>> {
    rows.iter().find(|row| {
        row.precisions.contains(&target.precision)
            && row.sets.has_kernel(target)
            && (row.takes_side)(side)
    })
}

/// The kernel for keys in units of so many rows. `tiles` are those of entropy-coded pages.
pub(super) fn find_key_kernel(
    target: KernelTarget,
    side: &HeadCodec,
    tiles: Option<&StreamTiles>,
) -> Option<KeyKernelId> {
    let row = find_row(KEY_KERNELS, target, side)?;
    // Without a stream's runs there are no tiles of it.
    (row.kernel != KeyKernelId::Grid || tiles.is_some()).then_some(row.kernel)
}

/// The kernel for values in units of so many rows. `tiles` are those of entropy-coded pages.
pub(super) fn find_value_kernel(
    target: KernelTarget,
    side: &HeadCodec,
    tiles: Option<&StreamTiles>,
) -> Option<ValueKernelId> {
    let row = find_row(VALUE_KERNELS, target, side)?;
    (row.kernel != ValueKernelId::Grid || tiles.is_some()).then_some(row.kernel)
}

/// Kernels of a codec with one instruction set and precision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelChoice {
    /// The instruction set, `avx512-bf16` where it has products of bf16 too.
    pub set: String,
    /// The precision that is asked for.
    pub precision: Precision,
    /// The kernels of keys and of values, by their files in `cpu/`; `float` where rows are decoded.
    pub kernels: [&'static str; 2],
}

/// Kernels of a layer's first head on every instruction set of this architecture, in units of so
/// many query rows. Those of this machine are [`InstructionSet`]s that it has.
#[must_use]
pub fn list_kernels(codec: &ModelCodec, layer: LayerIndex, rows: usize) -> Vec<KernelChoice> {
    let mut choices = Vec::new();
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_compiled()) {
        let bf16 = [Some(false), set.may_have_bf16().then_some(true)];
        for bf16 in bf16.into_iter().flatten() {
            for precision in Precision::ALL {
                let target = KernelTarget { set, bf16, precision, rows };
                let target = KernelTarget { precision: target.effective_precision(), ..target };
                let [k, v] = Side::BOTH.map(|side| codec.head_codec(layer, side, 0));
                let k = find_row(KEY_KERNELS, target, k).map_or("float", |row| row.name);
                let v = find_row(VALUE_KERNELS, target, v).map_or("float", |row| row.name);
                let set = format!("{}{}", set.name(), if bf16 { "-bf16" } else { "" });
                choices.push(KernelChoice { set, precision, kernels: [k, v] });
            }
        }
    }
    choices
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{DType, Geometry, RopePairing};

    fn codec(text: &str) -> ModelCodec {
        let geometry = Geometry {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 64,
            head_dim_v: 64,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        };
        ModelCodec::new(geometry, kvd_codec::resolve_spec(text).unwrap(), None).unwrap()
    }

    /// Kernels by the names of sets and precisions, whatever this machine has.
    fn kernels(text: &str, set: &str, precision: Precision, rows: usize) -> [&'static str; 2] {
        let choices = list_kernels(&codec(text), LayerIndex(0), rows);
        let found = choices.iter().find(|c| c.set == set && c.precision == precision);
        found.unwrap().kernels
    }

    #[test]
    fn rows_are_decoded_where_there_are_no_kernels_or_none_may_round() {
        for precision in Precision::ALL {
            assert_eq!(kernels("fp8", "portable", precision, 4), ["float"; 2]);
            assert_eq!(kernels("raw", "portable", precision, 4), ["float"; 2]);
        }
        assert_eq!(kernels("kivi-4", "portable", Precision::Single, 4), ["float"; 2]);
        assert_eq!(kernels("kivi-4", "portable", Precision::Fast, 4), ["uniform"; 2]);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn bytes_are_multiplied_where_an_instruction_set_has_a_kernel_for_them() {
        let int8 = |text, set, rows| kernels(text, set, Precision::Int8, rows);
        assert_eq!(int8("kivi-4", "avx2", 4), ["uniform/nibbles"; 2]);
        assert_eq!(int8("kivi-4", "avx-vnni", 4), ["uniform"; 2]);
        assert_eq!(int8("kivi-4", "avx512", 4), ["uniform"; 2]);
        assert_eq!(int8("kivi-4", "avx512-bf16", 4), ["uniform/bf16"; 2]);
        assert_eq!(int8("kivi-4", "amx-bf16", 4), ["uniform/bf16"; 2]);
        assert_eq!(int8("kivi-4", "amx-bf16", 5), ["uniform"; 2], "AMX takes bytes itself");
        for set in ["avx2", "avx-vnni", "avx512"] {
            assert_eq!(int8("k=lloyd(b=4); v=raw", set, 4), ["score_tables", "float"], "{set}");
        }
        assert_eq!(int8("k=lloyd(b=2); v=raw", "avx2", 4), ["lloyd", "float"]);
        assert_eq!(kernels("fp8", "avx2", Precision::Single, 4), ["fp8"; 2]);
    }

    #[test]
    fn every_set_of_the_architecture_has_every_precision() {
        let choices = list_kernels(&codec("kivi-2"), LayerIndex(0), 4);
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_compiled()) {
            let of_set = choices.iter().filter(|choice| choice.set == set.name());
            assert!(of_set.map(|choice| choice.precision).eq(Precision::ALL), "{}", set.name());
        }
    }
}
