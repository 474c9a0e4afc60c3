//! Huffman streams decoded several symbols per look-up and several streams at once.
//!
//! The next bits of a stream name an entry that holds every whole symbol among them, up to six.
//! The next look-up needs the bits that this one took, so a single stream would leave the
//! processor waiting: up to [`LANES`] streams are read in turns.

use crate::PageError;
use crate::huffman::HuffmanTable;

/// Streams that are read in turns.
pub(crate) const LANES: usize = 4;
/// Most symbols in an entry: the other two of its eight bytes count symbols and bits.
const ENTRY_SYMBOLS: usize = 6;
/// Look-ups after one load of at least 57 bits, of up to 12 bits each.
const LOOKUPS: usize = 4;
/// Symbols that one turn may write, and as many again as the last entry writes past its count.
const TURN_SYMBOLS: usize = LOOKUPS * ENTRY_SYMBOLS + 2;

/// A table of a model, and how it is decoded.
#[derive(Clone, Debug)]
pub(crate) struct TrainedTable {
    pub(crate) code: HuffmanTable,
    /// Per index: up to six symbols, their count, their bits. Empty where symbols take more than
    /// a byte: these are read one by one.
    entries: Box<[[u8; 8]]>,
}

/// One stream on its way into symbols.
pub(crate) struct Lane<'a> {
    bytes: &'a [u8],
    /// Bits read; past the end they are zeros.
    read: usize,
}

impl<'a> Lane<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, read: 0 }
    }

    /// The next bits, at least 57 of them.
    #[inline]
    fn peek(&self) -> u64 {
        let rest = self.bytes.get(self.read >> 3..).unwrap_or(&[]);
        let word = match rest.first_chunk::<8>() {
            Some(word) => u64::from_le_bytes(*word),
            None => {
                let mut word = [0; 8];
                word[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(word)
            }
        };
        word >> (self.read & 7)
    }

    /// Tests that what was read lies inside the stream, and, where all of it was read, that it
    /// ends in the last byte.
    pub(crate) fn check(&self, complete: bool) -> Result<(), PageError> {
        let end = self.bytes.len();
        if self.read > end * 8 || (complete && self.read.div_ceil(8) != end) {
            return Err(PageError::Payload("a stream does not end where its length says"));
        }
        Ok(())
    }
}

impl TrainedTable {
    pub(crate) fn new(code: HuffmanTable) -> Self {
        let entries = if code.lengths().len() <= 256 {
            let bits = index_bits(&code);
            (0..1u32 << bits).map(|index| entry(&code, bits, index)).collect()
        } else {
            Box::default()
        };
        Self { code, entries }
    }

    /// Reads `symbols.len() / lanes.len()` symbols of each of at most [`LANES`] lanes into its
    /// equal share of `symbols`.
    pub(crate) fn read(&self, lanes: &mut [Lane<'_>], symbols: &mut [u16]) {
        let each = symbols.len() / lanes.len();
        if each == 0 {
            return;
        }
        if self.entries.is_empty() {
            for (lane, symbols) in lanes.iter_mut().zip(symbols.chunks_exact_mut(each)) {
                symbols.fill_with(|| self.next(lane));
            }
            return;
        }
        let mut narrow = vec![0u8; symbols.len()];
        self.read_narrow(lanes, &mut narrow, each);
        for (to, symbol) in symbols.iter_mut().zip(narrow) {
            *to = symbol.into();
        }
    }

    fn read_narrow(&self, lanes: &mut [Lane<'_>], symbols: &mut [u8], each: usize) {
        let mut at = [0usize; LANES];
        if let [a, b, c, d] = lanes {
            let mut lanes = [a, b, c, d];
            while at.iter().all(|at| at + TURN_SYMBOLS <= each) {
                for (lane, (symbols, at)) in
                    lanes.iter_mut().zip(symbols.chunks_exact_mut(each).zip(&mut at))
                {
                    *at += self.turn(lane, &mut symbols[*at..]);
                }
            }
        }
        for (lane, (symbols, at)) in lanes.iter_mut().zip(symbols.chunks_exact_mut(each).zip(at)) {
            self.read_one(lane, &mut symbols[at..]);
        }
    }

    fn read_one(&self, lane: &mut Lane<'_>, symbols: &mut [u8]) {
        let mut at = 0;
        while at + TURN_SYMBOLS <= symbols.len() {
            at += self.turn(lane, &mut symbols[at..]);
        }
        for symbol in &mut symbols[at..] {
            *symbol = self.next(lane) as u8;
        }
    }

    fn next(&self, lane: &mut Lane<'_>) -> u16 {
        let (symbol, length) = self.code.first(lane.peek() as u32);
        lane.read += length as usize;
        symbol
    }

    /// [`LOOKUPS`] look-ups into at least [`TURN_SYMBOLS`] symbols; returns how many they gave.
    #[inline]
    fn turn(&self, lane: &mut Lane<'_>, symbols: &mut [u8]) -> usize {
        let mut word = lane.peek();
        let mask = self.entries.len() - 1;
        let mut at = 0;
        for _ in 0..LOOKUPS {
            let entry = self.entries[word as usize & mask];
            symbols[at..at + 8].copy_from_slice(&entry);
            at += usize::from(entry[6]);
            word >>= entry[7];
            lane.read += usize::from(entry[7]);
        }
        at
    }
}

/// Bits that name an entry: no code is longer.
fn index_bits(code: &HuffmanTable) -> u32 {
    code.limit().max(11)
}

/// Every whole symbol of `index`.
fn entry(code: &HuffmanTable, bits: u32, mut index: u32) -> [u8; 8] {
    let mut entry = [0; 8];
    let mut left = bits;
    for count in 0..ENTRY_SYMBOLS {
        let (symbol, length) = code.first(index);
        if length > left {
            break;
        }
        entry[count] = symbol as u8;
        entry[6] += 1;
        entry[7] += length as u8;
        index >>= length;
        left -= length;
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::huffman::single::Stream;
    use proptest::prelude::*;

    proptest! {
        /// Against the decoder that reads one symbol at a time.
        #[test]
        #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
        fn lanes_give_what_single_look_ups_give(
            counts in proptest::collection::vec(
                prop_oneof![Just(0u64), 1u64..50, 1000u64..10_000_000],
                2..=300),
            picks in proptest::collection::vec(any::<u16>(), 0..4 * 300),
            lanes in 1usize..=LANES,
        ) {
            let code = HuffmanTable::new(&counts);
            let each = picks.len() / lanes;
            let symbols: Vec<u16> =
                picks[..each * lanes].iter().map(|p| p % counts.len() as u16).collect();
            let mut streams = vec![Vec::new(); lanes];
            for (symbols, bytes) in symbols.chunks(each.max(1)).zip(&mut streams) {
                code.encode(symbols, bytes);
            }
            let table = TrainedTable::new(code);
            let mut open: Vec<Lane<'_>> = streams.iter().map(|bytes| Lane::new(bytes)).collect();
            let mut back = vec![0u16; symbols.len()];
            table.read(&mut open, &mut back);
            prop_assert_eq!(&back, &symbols);
            prop_assert!(open.iter().all(|lane| lane.check(true).is_ok()));
        }

        #[test]
        #[cfg_attr(miri, ignore = "too many numbers for an interpreter")]
        fn any_bytes_end_as_single_look_ups_end(
            counts in proptest::collection::vec(0u64..1000, 2..=256),
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            count in 0usize..400,
            complete in any::<bool>(),
        ) {
            let table = TrainedTable::new(HuffmanTable::new(&counts));
            let mut stream = Stream::new(&table.code, &bytes);
            let mut expected = vec![0u16; count];
            stream.read(&mut expected);
            let mut lanes = [Lane::new(&bytes)];
            let mut symbols = vec![0u16; count];
            table.read(&mut lanes, &mut symbols);
            prop_assert_eq!(symbols, expected);
            prop_assert_eq!(lanes[0].check(complete).is_ok(), stream.check(complete).is_ok());
        }
    }
}
