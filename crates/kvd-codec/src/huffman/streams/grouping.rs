//! Grouping of codes into symbols: one code, or several that lie together.

use super::QUAD;

/// How codes become symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SymbolGrouping {
    /// Codes of a symbol: 1, 2 or 4.
    pub group: usize,
    /// Codes without their low bits are below this.
    pub levels: u16,
    /// Low bits of a code that follow the symbol as they are; with a group of 1 only.
    pub raw_bits: u32,
    /// The code, without low bits, that a missing one of a group counts as.
    pub missing: u16,
}

impl SymbolGrouping {
    /// A symbol for each code below `levels`.
    pub(crate) fn single_codes(levels: u16) -> Self {
        Self { group: 1, levels, raw_bits: 0, missing: 0 }
    }

    /// Symbols.
    pub fn symbol_count(self) -> usize {
        usize::from(self.levels).pow(self.group as u32)
    }

    /// The symbol of the first codes of a quad.
    pub fn symbol_from_codes(self, codes: &[u16]) -> u16 {
        let code = |index: usize| codes.get(index).map_or(self.missing, |c| c >> self.raw_bits);
        (0..self.group).rev().fold(0, |symbol, index| symbol * self.levels + code(index))
    }

    /// The codes of a symbol, low bits zero.
    pub fn symbol_codes(self, symbol: u16) -> [u16; QUAD] {
        if self.group == 1 {
            return [symbol << self.raw_bits, 0, 0, 0];
        }
        let mut rest = symbol;
        std::array::from_fn(|_| {
            let code = rest % self.levels;
            rest /= self.levels;
            code
        })
    }
}
