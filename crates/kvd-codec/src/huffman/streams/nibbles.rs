//! A table of up to 8 bits as sixteen-byte look-ups read it: four bits, then the next four where
//! a code has not ended.

/// Sixteen entries, by four bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NibbleRow {
    /// The four bits before these, in every byte; of the first row anything.
    pub before: [u8; 16],
    /// As [`ByteTables::codes`](super::ByteTables::codes).
    pub codes: [u8; 16],
    /// As [`ByteTables::lengths`](super::ByteTables::lengths).
    pub lengths: [u8; 16],
    /// As [`ByteTables::small`](super::ByteTables::small), zeros where there is none.
    pub small: [u8; 16],
}

/// Short codes need one look-up, and long ones begin with few different bits: far fewer rows than
/// sixteen serve most tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NibbleTables {
    /// By the first four bits; meaningless where a code is longer.
    pub first: NibbleRow,
    /// By the next four, a row for each first four that some longer code has.
    pub longer: Vec<NibbleRow>,
}

impl NibbleTables {
    pub(super) fn new(codes: &[u8; 256], lengths: &[u8; 256], small: Option<&[u8; 256]>) -> Self {
        let small = small.unwrap_or(&[0; 256]);
        let row = |before: usize, index: &dyn Fn(usize) -> usize| {
            let of = |table: &[u8; 256]| std::array::from_fn(|at| table[index(at)]);
            let before = [before as u8; 16];
            NibbleRow { before, codes: of(codes), lengths: of(lengths), small: of(small) }
        };
        let differs = |low: &usize| {
            let same = |high: usize| {
                let (here, there) = (*low, high << 4 | *low);
                codes[here] == codes[there] && lengths[here] == lengths[there]
            };
            !(1..16).all(same)
        };
        let longer = (0..16).filter(differs).map(|low| row(low, &|high| high << 4 | low));
        Self { first: row(0, &|low| low), longer: longer.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_say_what_the_table_says() {
        // Codes of 1, 2, 6 and 6 bits, the next bit lowest.
        let of = |bits: usize| match bits {
            _ if bits & 1 == 0 => (10, 1),
            _ if bits & 2 == 0 => (11, 2),
            _ => (12 + (bits >> 5 & 1) as u8, 6),
        };
        let codes: [u8; 256] = std::array::from_fn(|bits| of(bits).0);
        let lengths: [u8; 256] = std::array::from_fn(|bits| of(bits).1);
        let small: [u8; 256] = std::array::from_fn(|bits| of(bits).0 << 3 | (8 - of(bits).1));
        let nibbles = NibbleTables::new(&codes, &lengths, Some(&small));
        let rows: Vec<u8> = nibbles.longer.iter().map(|row| row.before[0]).collect();
        assert_eq!(rows, [3, 7, 11, 15]);
        for (bits, small) in small.into_iter().enumerate() {
            let (low, high) = (bits & 15, bits >> 4);
            let longer = nibbles.longer.iter().find(|row| usize::from(row.before[0]) == low);
            let (row, at) = longer.map_or((&nibbles.first, low), |row| (row, high));
            assert_eq!((row.codes[at], row.lengths[at]), of(bits), "{bits}");
            assert_eq!(row.small[at], small, "{bits}");
        }
        let all: [u8; 256] = std::array::from_fn(|bits| bits as u8);
        let nibbles = NibbleTables::new(&all, &[8; 256], None);
        assert_eq!(nibbles.longer.len(), 16);
        assert!((0..256).all(|bits| nibbles.longer[bits & 15].codes[bits >> 4] == bits as u8));
    }
}
