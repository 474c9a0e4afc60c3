//! Canonical, length-limited Huffman codes over at most 4096 symbols (KVComp §3.2).
//!
//! Every symbol of the alphabet has a code, so data that the table was not built from still
//! encodes; partial tables leave symbols out, and whoever encodes needs another way for those.
//! Bits are packed least significant first, codes bit-reversed, so that the next code
//! is always in the low bits of the reservoir.

/// Longest code for alphabets of up to 128 symbols: one look-up in a table of 256.
const LIMIT_SMALL: u32 = 8;
/// Longest code for alphabets of up to 256 symbols.
const LIMIT_LARGE: u32 = 12;
/// Longest code for larger alphabets.
const LIMIT_WIDE: u32 = 15;

/// Most symbols of an alphabet.
pub(crate) const ALPHABET_MAX: u32 = 4096;

/// Longest code for an alphabet.
fn longest_code(alphabet: usize) -> u32 {
    match alphabet {
        0..=128 => LIMIT_SMALL,
        129..=256 => LIMIT_LARGE,
        _ => LIMIT_WIDE,
    }
}

/// A code for each symbol, and the look-up table that decodes one symbol at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HuffmanTable {
    limit: u32,
    lengths: Vec<u8>,
    codes: Vec<u16>,
    /// Indexed by the next `limit` bits: `length << 12 | symbol`.
    decode: Vec<u16>,
}

impl HuffmanTable {
    /// Builds the table for symbol counts; every symbol counts at least once.
    pub(crate) fn new(counts: &[u64]) -> Self {
        debug_assert!((2..=ALPHABET_MAX as usize).contains(&counts.len()));
        let limit = longest_code(counts.len());
        let counts: Vec<u64> = counts.iter().map(|count| (*count).max(1)).collect();
        Self::from_lengths(limit, package_merge(&counts, limit))
    }

    /// A table of codes of at most 8 bits for the symbols that are `kept`, 2 to 256 of them; the
    /// others have none.
    pub fn for_kept_symbols(counts: &[u64], kept: &[bool]) -> Self {
        let symbols: Vec<usize> = (0..counts.len()).filter(|symbol| kept[*symbol]).collect();
        debug_assert!((2..=1 << LIMIT_SMALL).contains(&symbols.len()));
        let counts_kept: Vec<u64> = symbols.iter().map(|symbol| counts[*symbol].max(1)).collect();
        let mut lengths = vec![0u8; counts.len()];
        let of_kept = package_merge(&counts_kept, LIMIT_SMALL);
        symbols.into_iter().zip(of_kept).for_each(|(symbol, length)| lengths[symbol] = length);
        Self::from_lengths(LIMIT_SMALL, lengths)
    }

    /// Canonical codes: shorter first, then by symbol.
    fn from_lengths(limit: u32, lengths: Vec<u8>) -> Self {
        let mut order: Vec<usize> = (0..lengths.len()).filter(|s| lengths[*s] > 0).collect();
        order.sort_by_key(|symbol| (lengths[*symbol], *symbol));
        let mut codes = vec![0u16; lengths.len()];
        let mut decode = vec![0u16; 1 << limit];
        let (mut next, mut previous) = (0u32, 0u32);
        for symbol in order {
            let length = u32::from(lengths[symbol]);
            next <<= length - previous;
            previous = length;
            let code = next.reverse_bits() >> (32 - length);
            next += 1;
            codes[symbol] = code as u16;
            let entry = (length << 12) as u16 | symbol as u16;
            for slot in decode.iter_mut().skip(code as usize).step_by(1 << length) {
                *slot = entry;
            }
        }
        Self { limit, lengths, codes, decode }
    }

    /// The table of given code lengths, 0 for none, when they are what
    /// [`HuffmanTable::for_kept_symbols`] could have made: within the limit and complete (Kraft's
    /// equality).
    pub(crate) fn try_partial(lengths: &[u8]) -> Option<Self> {
        let filled = |length: &u8| match u32::from(*length) {
            0 => Some(0u32),
            length => (LIMIT_SMALL.checked_sub(length)).map(|rest| 1 << rest),
        };
        let filled: Option<u32> = lengths.iter().map(filled).sum();
        let complete = filled == Some(1 << LIMIT_SMALL);
        complete.then(|| Self::from_lengths(LIMIT_SMALL, lengths.to_vec()))
    }

    /// The table of given code lengths, one for each symbol, when they are what
    /// [`HuffmanTable::new`] could have made: within the alphabet's limit and complete.
    pub(crate) fn try_full(lengths: &[u8]) -> Option<Self> {
        if !(2..=ALPHABET_MAX as usize).contains(&lengths.len()) {
            return None;
        }
        let limit = longest_code(lengths.len());
        let filled = |length: &u8| {
            let rest = limit.checked_sub(u32::from(*length)).filter(|_| *length > 0)?;
            Some(1u64 << rest)
        };
        let filled: Option<u64> = lengths.iter().map(filled).sum();
        let complete = filled == Some(1 << limit);
        complete.then(|| Self::from_lengths(limit, lengths.to_vec()))
    }

    /// Code and length of a symbol; length 0 when it has none.
    pub(crate) fn symbol_code(&self, symbol: u16) -> (u16, u32) {
        let symbol = usize::from(symbol);
        (self.codes[symbol], u32::from(self.lengths[symbol]))
    }

    /// Code length of each symbol, in bits; 0 for one without a code.
    #[must_use]
    pub fn code_lengths(&self) -> &[u8] {
        &self.lengths
    }

    /// Longest code, in bits: the decode table has `2^limit` entries.
    #[must_use]
    pub fn longest_code(&self) -> u32 {
        self.limit
    }

    /// Indexed by the next [`HuffmanTable::longest_code`] bits, least significant first:
    /// `length << 12 | symbol`. Every entry is a valid code.
    #[must_use]
    pub fn decode_table(&self) -> &[u16] {
        &self.decode
    }

    /// The symbol in the low bits, and its length.
    #[inline]
    pub(crate) fn decode_first(&self, bits: u32) -> (u16, u32) {
        let entry = self.decode[(bits & ((1 << self.limit) - 1)) as usize];
        (entry & 0xFFF, u32::from(entry >> 12))
    }

    /// Bytes that a store must keep to rebuild the table: one length per symbol.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.lengths.len() as u64
    }
}

/// Optimal code lengths of at most `limit` bits (Larmore and Hirschberg's package-merge).
fn package_merge(counts: &[u64], limit: u32) -> Vec<u8> {
    let mut order: Vec<usize> = (0..counts.len()).collect();
    order.sort_by_key(|symbol| (counts[*symbol], *symbol));
    // Per level: weights in ascending order, and which of them are symbols (not packages).
    let mut levels: Vec<Vec<bool>> = Vec::new();
    let mut weights: Vec<u64> = Vec::new();
    for _ in 0..limit {
        let packages: Vec<u64> = weights.as_chunks::<2>().0.iter().map(|[a, b]| a + b).collect();
        let mut leaves = order.iter().map(|symbol| counts[*symbol]).peekable();
        let mut packages = packages.into_iter().peekable();
        let (mut merged, mut is_leaf) = (Vec::new(), Vec::new());
        loop {
            let leaf = match (leaves.peek(), packages.peek()) {
                (Some(leaf), Some(package)) => leaf <= package,
                (leaf, package) => {
                    if leaf.is_none() && package.is_none() {
                        break;
                    }
                    leaf.is_some()
                }
            };
            merged.extend(if leaf { leaves.next() } else { packages.next() });
            is_leaf.push(leaf);
        }
        weights = merged;
        levels.push(is_leaf);
    }
    let mut lengths = vec![0u8; counts.len()];
    let mut wanted = 2 * counts.len() - 2;
    for is_leaf in levels.iter().rev() {
        let leaves = is_leaf[..wanted].iter().filter(|leaf| **leaf).count();
        for symbol in &order[..leaves] {
            lengths[*symbol] += 1;
        }
        wanted = 2 * (wanted - leaves);
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kraft(table: &HuffmanTable) -> u32 {
        table.lengths.iter().map(|l| 1 << (16 - u32::from(*l))).sum()
    }

    proptest! {
        #[test]
        fn codes_are_complete_and_look_up_their_symbol(
            counts in proptest::collection::vec(
                prop_oneof![Just(0u64), 1u64..50, 1000u64..10_000_000],
                2..=600),
            noise in any::<u32>(),
        ) {
            let table = HuffmanTable::new(&counts);
            prop_assert_eq!(kraft(&table), 1 << 16);
            prop_assert!(table.lengths.iter().all(|l| (1..=table.limit).contains(&u32::from(*l))));
            for symbol in 0..counts.len() as u16 {
                let (code, length) = table.symbol_code(symbol);
                let bits = u32::from(code) | noise << length;
                prop_assert_eq!(table.decode_first(bits), (symbol, length));
            }
        }
    }

    #[test]
    fn a_skewed_source_costs_close_to_its_entropy() {
        // Two-sided geometric around 10 of 21 symbols, as block-quantized keys are.
        let counts: Vec<u64> =
            (0..21i32).map(|s| (1e6 * 0.6f64.powi((s - 10).abs())) as u64).collect();
        let table = HuffmanTable::new(&counts);
        let total: u64 = counts.iter().sum();
        let entropy: f64 =
            counts.iter().map(|c| *c as f64 / total as f64).map(|p| -p * p.log2()).sum();
        let bits: u64 = counts.iter().zip(&table.lengths).map(|(c, l)| c * u64::from(*l)).sum();
        let mean = bits as f64 / total as f64;
        assert!(mean >= entropy && mean <= entropy * 1.03, "{mean} bits for {entropy}");
    }

    #[test]
    fn two_symbols_take_one_bit() {
        assert_eq!(HuffmanTable::new(&[5, 1_000_000]).lengths, [1, 1]);
    }

    #[test]
    fn unlimited_lengths_equal_plain_huffman() {
        assert_eq!(HuffmanTable::new(&[1, 1, 2, 4, 8]).lengths, [4, 4, 3, 2, 1]);
    }
}
