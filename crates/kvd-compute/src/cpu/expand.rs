//! Codes to bytes of values, for tables that do not fit the registers of an instruction set: a
//! code becomes one byte per channel, in a plane per channel, and planes lie like positions do.
//! Products then take bytes as they are.

#[cfg(target_arch = "aarch64")]
use super::expand_neon;
use super::simd::{InstructionSet, Simd};

/// Entries of a codebook as bytes.
pub(crate) struct Expand {
    dims: usize,
    /// Per channel, each code's byte.
    tables: Vec<[u8; 256]>,
    /// Four channels of each code as one number, where there are four.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for AVX2"))]
    fours: Vec<u32>,
    bytes: Vec<u8>,
}

impl Expand {
    /// Takes a table per channel.
    pub(crate) fn new(tables: &[[u8; 256]]) -> Self {
        let four =
            |code: usize| u32::from_le_bytes(std::array::from_fn(|channel| tables[channel][code]));
        let fours = if tables.len() == 4 { (0..256).map(four).collect() } else { Vec::new() };
        Self { dims: tables.len(), tables: tables.to_vec(), fours, bytes: Vec::new() }
    }

    /// Takes codes of a byte each, `group` of them at a time; the bytes of a group's first channel
    /// come before those of its second.
    pub(crate) fn expand(&mut self, simd: Simd, codes: &[u8], group: usize) -> &[u8] {
        let len = codes.len() * self.dims;
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
        let out = &mut self.bytes[..len];
        #[cfg(target_arch = "aarch64")]
        if simd.set() != InstructionSet::Portable && group.is_multiple_of(expand_neon::STEP) {
            expand_neon::expand(codes, group, &self.tables, out);
            return out;
        }
        for (codes, out) in codes.chunks_exact(group).zip(out.chunks_exact_mut(group * self.dims)) {
            #[cfg(target_arch = "x86_64")]
            if simd.set() == InstructionSet::Avx2 && self.dims == 4 && group.is_multiple_of(16) {
                super::expand_x86::fours(simd, codes, &self.fours, out);
                continue;
            }
            for (out, table) in out.chunks_exact_mut(group).zip(&self.tables) {
                for (out, code) in out.iter_mut().zip(codes) {
                    *out = table[usize::from(*code)];
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_expands_alike() {
        let codes: Vec<u8> =
            (0..640u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
        for dims in [1, 2, 4, 8] {
            let table = |d: usize| std::array::from_fn(|code| (code * 7 + d * 31) as u8);
            let tables: Vec<[u8; 256]> = (0..dims).map(table).collect();
            for group in [32, 40, 640] {
                for simd in Simd::available() {
                    let mut expand = Expand::new(&tables);
                    let bytes = expand.expand(simd, &codes, group);
                    for (index, byte) in bytes.iter().enumerate() {
                        let (at, rest) = (index / (group * dims), index % (group * dims));
                        let (channel, place) = (rest / group, rest % group);
                        let code = codes[at * group + place];
                        assert_eq!(*byte, tables[channel][usize::from(code)], "{simd:?} {dims}");
                    }
                }
            }
        }
    }
}
