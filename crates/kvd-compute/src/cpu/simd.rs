//! Instruction sets, and loops compiled once for each: the bodies are plain Rust; a
//! `#[target_feature]` wrapper lets the compiler use wider registers for the same loop. On aarch64
//! NEON is part of the target: such a loop is the same on every level.
#![allow(unsafe_code)] // Only to call a wrapper after its feature was detected.

use super::OpenError;
use crate::cpu::int_dot::VECTOR_ROWS;
use kvd_codec::RegisterWidth;
#[cfg(target_arch = "aarch64")]
use std::arch::is_aarch64_feature_detected;

/// Makes `$name(simd, ..)` from an `#[inline(always)]` body: the same code, compiled for each
/// instruction set.
macro_rules! per_level {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?)
        $(-> $out:ty)? = $body:expr) => {
        $(#[$doc])*
        $vis fn $name(simd: $crate::cpu::simd::Simd, $($arg: $ty),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $out)? {
                $body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")]
            fn avx512($($arg: $ty),*) $(-> $out)? {
                $body($($arg),*)
            }
            #[cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "after detection"))]
            match simd.vector_set() {
                // SAFETY: a `Simd` of this set exists only where the CPU has it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::InstructionSet::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::simd::InstructionSet::Avx512 => unsafe { avx512($($arg),*) },
                _ => $body($($arg),*),
            }
        }
    };
}
pub(super) use per_level;

/// Prefetches the cache lines of `bytes`, to be read soon.
pub(super) fn prefetch_lines(bytes: &[u8]) {
    #[cfg(target_arch = "aarch64")]
    for line in bytes.chunks(64) {
        // SAFETY: a prefetch reads nothing.
        unsafe {
            std::arch::asm!(
                "prfm pldl1keep, [{0}]",
                in(reg) line.as_ptr(),
                options(readonly, nostack, preserves_flags)
            );
        }
    }
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of the target, and a prefetch reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = bytes;
}

/// Instruction sets that the CPU backend has code for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// The instructions that every processor of the target has.
    Portable,
    /// AVX2, FMA, F16C and POPCNT.
    Avx2,
    /// `Avx2` with AVX-VNNI for products of four bytes, as on Alder Lake and Sierra Forest.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL, VNNI, VBMI and VBMI2, as on Ice Lake and Zen 4.
    Avx512,
    /// `Avx512` with AMX for products of bytes, as on Sapphire Rapids.
    Amx,
    /// NEON, which every aarch64 processor has.
    Neon,
    /// NEON with products of four bytes (`sdot`), as on Neoverse N1 and Apple M1.
    NeonDotprod,
    /// `NeonDotprod` with products of eight (`usmmla`), as on Neoverse V1 and Apple M2.
    NeonI8mm,
}

impl InstructionSet {
    /// All of them, of each machine the widest last.
    pub const ALL: [Self; 8] = [
        Self::Portable,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Amx,
        Self::Neon,
        Self::NeonDotprod,
        Self::NeonI8mm,
    ];

    /// The one whose vector registers it has: AMX adds products to AVX-512, AVX-VNNI to AVX2.
    pub(crate) fn vector_set(self) -> Self {
        match self {
            Self::AvxVnni => Self::Avx2,
            Self::Amx => Self::Avx512,
            other => other,
        }
    }

    /// Whether products with so many rows of a unit are better of bytes, looked up once for all
    /// rows: AMX takes nothing else. It multiplies eight rows in the time of one, so that few are
    /// no faster than in vector registers (`docs/perf/cpu.md`).
    pub(crate) fn wants_bytes(self, rows: usize) -> bool {
        self == Self::Amx && rows > VECTOR_ROWS
    }

    /// Whether machines may add products of bf16 to it.
    pub(crate) fn may_have_bf16(self) -> bool {
        matches!(self, Self::Avx512 | Self::Amx)
    }

    /// Whether this program has code for it; those of other architectures are left out.
    pub(crate) fn is_compiled(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Avx2 | Self::AvxVnni | Self::Avx512 | Self::Amx => cfg!(target_arch = "x86_64"),
            Self::Neon | Self::NeonDotprod | Self::NeonI8mm => cfg!(target_arch = "aarch64"),
        }
    }

    /// Name in logs and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
            Self::Neon => "neon",
            Self::NeonDotprod => "neon-dotprod",
            Self::NeonI8mm => "neon-i8mm",
        }
    }
}

/// How far a kernel may round what it multiplies (`docs/adr/0008-kernel-error-budget.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Products of f32: answers are as exact as plain single precision.
    Single,
    /// Queries and weights rounded to 16 bits of the largest in their row, where a side has a
    /// kernel for its codes: no further off than f16 queries and weights with f32 sums.
    #[default]
    Fast,
    /// As [`Precision::Fast`], with 8 bits in AVX-512 and AVX-VNNI, for half of the products: about
    /// as far off as other kernels that round queries to 8 bits. In AVX-512 and plain AVX2 keys of
    /// 16 codes a position are scored by tables of bytes, and in AVX2 uniform codes of up to four
    /// bits (keys by channel, values by token) are multiplied as bytes, with a unit for each 8
    /// channels or 16 tokens; that is all that AVX2 has of it. Uniform codes of up to five bits,
    /// keys by channel and values by token in groups of whole 32s, are multiplied as bf16 where the
    /// machine has AVX512-BF16. Other queries times scales of channels or levels of two bytes keep
    /// 16 bits, and so do more rows than vectors take, where AMX multiplies. Elsewhere it is
    /// [`Precision::Fast`].
    Int8,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Single, Self::Fast, Self::Int8];

    /// Name on the command line and in the configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Fast => "fast",
            Self::Int8 => "int8",
        }
    }
}

/// How a kernel is to work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelConfig {
    /// With which instructions it multiplies.
    pub(crate) simd: Simd,
    /// How far it rounds.
    pub(crate) precision: Precision,
}

/// An instruction set that this machine was found to have: only then does one exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Simd {
    set: InstructionSet,
    /// Whether products of bf16 as wide as its registers are used: AVX-512 has them or has not.
    bf16: bool,
}

impl Simd {
    /// The one asked for; the widest this machine has where none is.
    ///
    /// # Errors
    /// When this machine does not have it.
    pub fn named(set: Option<InstructionSet>) -> Result<Self, OpenError> {
        let named =
            |set: InstructionSet| Self::of_set(set).ok_or(OpenError::InstructionSet(set.name()));
        set.map_or_else(|| Ok(Self::detect_widest()), named)
    }

    /// The widest this machine has.
    pub(crate) fn detect_widest() -> Self {
        Self::available_levels().pop().expect("portable at least")
    }

    /// Every level this machine can run, the widest last: one with products of bf16 also without.
    pub(crate) fn available_levels() -> Vec<Self> {
        let sets = InstructionSet::ALL.into_iter().filter_map(Self::of_set);
        sets.flat_map(|simd| [simd.without_bf16(), Some(simd)]).flatten().collect()
    }

    /// This level as on a machine without products of bf16; `None` where it uses none.
    fn without_bf16(self) -> Option<Self> {
        self.bf16.then_some(Self { bf16: false, ..self })
    }

    /// The level of an instruction set, if the machine has it.
    pub(crate) fn of_set(set: InstructionSet) -> Option<Self> {
        let has = match set {
            InstructionSet::Portable => true,
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::AvxVnni => has_avx2() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => has_avx2() && has_avx512(),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Amx => {
                has_avx2() && has_avx512() && crate::cpu::int_dot::amx::is_available()
            }
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => true,
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonDotprod => is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::NeonI8mm => {
                is_aarch64_feature_detected!("dotprod") && is_aarch64_feature_detected!("i8mm")
            }
            _ => false,
        };
        let bf16 = has && has_bf16(set);
        #[cfg(test)]
        skip::tell_skipped(set, has, bf16);
        has.then_some(Self { set, bf16 })
    }

    /// Which one it is.
    #[must_use]
    pub fn level(self) -> InstructionSet {
        self.set
    }

    /// Its registers, as the codec's loops take them.
    #[must_use]
    pub fn width(self) -> RegisterWidth {
        match self.vector_set() {
            InstructionSet::Avx2 | InstructionSet::AvxVnni => RegisterWidth::Bits256,
            InstructionSet::Avx512 | InstructionSet::Amx => RegisterWidth::Bits512,
            InstructionSet::Neon | InstructionSet::NeonDotprod | InstructionSet::NeonI8mm => {
                RegisterWidth::Bits128
            }
            InstructionSet::Portable => RegisterWidth::Scalar,
        }
    }

    /// As [`InstructionSet::vector_set`].
    pub(crate) fn vector_set(self) -> InstructionSet {
        self.set.vector_set()
    }

    /// Whether registers of 256 bits have products of four bytes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused, reason = "no kernel asks"))]
    pub(crate) fn has_avx_vnni(self) -> bool {
        self.set == InstructionSet::AvxVnni
    }

    /// Whether products of bytes are those of AMX.
    pub(crate) fn has_amx(self) -> bool {
        self.set == InstructionSet::Amx
    }

    /// Whether it has products of bf16 as wide as its registers.
    pub(crate) fn has_bf16(self) -> bool {
        self.bf16
    }

    /// Gives back what a thread keeps of the processor's state, when dropped.
    pub(super) fn in_use(self) -> Option<InUse> {
        self.has_amx().then(InUse::new)
    }
}

#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) use crate::cpu::int_dot::amx::InUse;

/// No other instruction set has such state.
#[cfg(not(target_arch = "x86_64"))]
pub(super) struct InUse;

#[cfg(not(target_arch = "x86_64"))]
impl InUse {
    fn new() -> Self {
        Self
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
}

/// Whether the machine adds products of bf16 to that set.
fn has_bf16(set: InstructionSet) -> bool {
    #[cfg(target_arch = "x86_64")]
    return set.may_have_bf16() && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let _ = set;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Says which levels are not tested, as this processor does not have them.
#[cfg(test)]
mod skip {
    use super::InstructionSet;
    use std::io::Write;
    use std::sync::Once;

    /// Once for each level in a run of the tests, past what libtest keeps of tests that pass.
    pub(super) fn tell_skipped(set: InstructionSet, has: bool, bf16: bool) {
        static TOLD: [Once; InstructionSet::ALL.len()] =
            [const { Once::new() }; InstructionSet::ALL.len()];
        static BF16: Once = Once::new();
        let line = |name: &str| {
            let line = format!("SKIP {name}: this processor has none\n");
            // Nobody hears what cannot be written.
            let _ = std::io::stderr().write_all(line.as_bytes());
        };
        let index = InstructionSet::ALL.iter().position(|other| *other == set);
        if !has && set.is_compiled() {
            TOLD[index.unwrap()].call_once(|| line(set.name()));
        }
        if !bf16 && set == InstructionSet::Avx512 && set.is_compiled() {
            BF16.call_once(|| line("avx512 with bf16"));
        }
    }
}
