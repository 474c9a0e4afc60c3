//! Substitutes for symbols without a code: the symbol that is cheapest with its outliers.

use super::{SymbolGrouping, outlier};

/// For each symbol, under code lengths (0 for none), the symbol that codes it in the fewest bits
/// and those bits, outliers counted; itself when it has a code.
pub fn cheapest_symbols(grouping: SymbolGrouping, lengths: &[u8]) -> Vec<(u16, u64)> {
    let all = (0..).zip(lengths).map(|(symbol, length)| (symbol, *length));
    let coded: Vec<(u16, u8, _)> = all
        .clone()
        .filter(|(_, length)| *length > 0)
        .map(|(symbol, length)| (symbol, length, grouping.symbol_codes(symbol)))
        .collect();
    let best = |(symbol, length): (u16, u8)| {
        if length > 0 {
            return (symbol, u64::from(length));
        }
        let wanted = grouping.symbol_codes(symbol);
        let bits = coded.iter().map(|(other, length, codes)| {
            let rests = wanted.iter().zip(codes).map(|(a, b)| i32::from(*a) - i32::from(*b));
            (*other, u64::from(*length) + rests.map(outlier::outlier_bits).sum::<u64>())
        });
        // A table has codes.
        bits.min_by_key(|(_, bits)| *bits).unwrap_or((symbol, 0))
    };
    all.map(best).collect()
}
