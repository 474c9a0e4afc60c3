//! Deals the coefficients of a layer's side to classes by what they cost there, and makes the
//! classes' tables (`docs/adr/0005-grid-codec.md`).
//!
//! As in k-means: with the tables as they are, every unit goes to the class that codes its samples
//! in the fewest bits; then each class gets the best table for what it has, as far as smoothed
//! counts tell.

use kvd_codec::HuffmanTable;
use kvd_codec::fitting::{
    CLASSES, CodeClass, GridTensors, QUAD, cheapest_symbols, class_of, outlier_bits, round_row,
};
use kvd_core::Side;
use std::iter::repeat_n;

/// Times that units choose their class.
const ROUNDS: usize = 3;
/// Larger codes are counted as this: outliers of one length in any class.
const CODE_SPAN: i32 = 300;
/// Tables are tried that leave symbols out which are rarer than one in two to the power of these.
const RARE: [u32; 7] = [6, 7, 8, 9, 10, 11, 12];
/// Estimated bits of a symbol without a code: an outlier and another symbol.
const ABSENT_BITS: u64 = 22;
/// Samples per symbol that are added.
const PRIOR: f64 = 2.0;
/// One of the classes that join two codes, and one of those that join four: their like cut codes
/// and make symbols in the same way.
const JOINT: [CodeClass; 2] = [CLASSES[4], CLASSES[1]];

/// Coefficients that take a class together, in the samples of a head: positions whose codes lie in
/// one quad of keys, one position of values.
struct ClassUnit {
    /// Positions.
    len: usize,
    class: u8,
    /// By code, from `-CODE_SPAN` on.
    codes: Vec<u32>,
    /// Counts by symbol of the classes that join two codes, and four.
    joint: [Vec<u32>; 2],
    /// Bits of what those classes cut off.
    cut: [u64; 2],
}

/// The symbols of a class and their cost in bits.
struct ClassTable {
    lengths: Vec<u8>,
    /// By symbol; its substitute and outliers where it has no code.
    bits: Vec<u64>,
}

/// The classes of a layer's side.
pub(crate) struct LayerClasses {
    side: Side,
    units: Vec<ClassUnit>,
    tables: Vec<ClassTable>,
    /// Bits of rows whose page would hold raw floats.
    raw_bits: u64,
}

impl ClassUnit {
    fn new(len: usize, spread: f64) -> Self {
        let alphabets = JOINT.map(|class| vec![0; class.symbol_count()]);
        let codes = vec![0; 2 * CODE_SPAN as usize + 1];
        Self { len, class: class_of(spread as f32), codes, joint: alphabets, cut: [0; 2] }
    }

    /// Counts up to four codes that lie in one quad.
    fn count_quad(&mut self, quad: &[i32]) {
        for code in quad {
            self.codes[(code.clamp(&-CODE_SPAN, &CODE_SPAN) + CODE_SPAN) as usize] += 1;
        }
        for (index, class) in JOINT.into_iter().enumerate() {
            for codes in quad.chunks(class.group) {
                let mut kept = [0; QUAD];
                for (kept, code) in kept.iter_mut().zip(codes) {
                    let rest;
                    (*kept, rest) = class.cut_code(*code);
                    self.cut[index] += outlier_bits(rest);
                }
                let symbol = class.symbol_grouping().symbol_from_codes(&kept[..codes.len()]);
                self.joint[index][usize::from(symbol)] += 1;
            }
        }
    }

    /// Visits the symbols of a class with their counts; returns the bits of what no symbol stands
    /// for.
    fn visit_symbols(&self, class: CodeClass, mut visit: impl FnMut(usize, u64)) -> u64 {
        if let Some(index) = JOINT.iter().position(|joint| joint.group == class.group) {
            let counts = self.joint[index].iter().copied().map(u64::from);
            counts.enumerate().for_each(|(symbol, count)| visit(symbol, count));
            return self.cut[index];
        }
        let mut other = 0;
        for (code, count) in (-CODE_SPAN..).zip(&self.codes).filter(|(_, count)| **count > 0) {
            let (kept, rest) = class.cut_code(code);
            let count = u64::from(*count);
            visit(usize::from(class.symbol_grouping().symbol_from_codes(&[kept])), count);
            other += count * (outlier_bits(rest) + u64::from(class.raw_bits));
        }
        other
    }

    /// Bits under a class's table; the zero class has none.
    fn coded_bits(&self, class: CodeClass, table: &ClassTable) -> u64 {
        let mut bits = 0;
        let other = self.visit_symbols(class, |symbol, count| bits += count * table.bits[symbol]);
        bits + other
    }
}

/// Counts of few samples, as if some more had been met that follow the codes alone: a symbol of
/// likely codes is likely, also where no sample has it. In units of a sixteenth.
fn smooth_counts(class: CodeClass, counts: &[u64]) -> Vec<u64> {
    let grouping = class.symbol_grouping();
    let codes = |symbol: usize| {
        grouping.symbol_codes(symbol as u16).map(|c| usize::from(c >> class.raw_bits))
    };
    // Tails of both signs are alike.
    let levels = usize::from(grouping.levels);
    let mut shares = vec![0.5; levels];
    for (symbol, count) in counts.iter().enumerate() {
        for code in &codes(symbol)[..class.group] {
            shares[*code] += 0.5 * *count as f64;
            shares[levels - 1 - code] += 0.5 * *count as f64;
        }
    }
    let total: f64 = shares.iter().sum();
    let prior = |symbol: usize| -> f64 {
        codes(symbol)[..class.group].iter().map(|code| shares[*code] / total).product()
    };
    let more = PRIOR * counts.len() as f64;
    let smooth = |(symbol, count): (usize, &u64)| 16.0 * (*count as f64 + more * prior(symbol));
    counts.iter().enumerate().map(smooth).map(|count| count as u64).collect()
}

impl ClassTable {
    /// The best of some tables for symbols that are met so often, as far as can be told before
    /// substitutes are known.
    fn best_table(class: CodeClass, counts: &[u64]) -> Self {
        let total: u64 = counts.iter().sum();
        let mut order: Vec<usize> = (0..counts.len()).collect();
        order.sort_by_key(|symbol| std::cmp::Reverse(counts[*symbol]));
        let mut sizes: Vec<usize> = RARE
            .iter()
            .map(|rare| counts.iter().filter(|count| **count << rare > total).count().max(2))
            .collect();
        sizes.push(counts.len());
        sizes.dedup();
        let tables = sizes.into_iter().map(|size| {
            let mut kept = vec![false; counts.len()];
            order[..size].iter().for_each(|symbol| kept[*symbol] = true);
            HuffmanTable::for_kept_symbols(counts, &kept).code_lengths().to_vec()
        });
        let guess = |lengths: &Vec<u8>| -> u64 {
            let bits = |length: &u8| if *length == 0 { ABSENT_BITS } else { u64::from(*length) };
            counts.iter().zip(lengths).map(|(count, length)| count * bits(length)).sum()
        };
        // There is at least the table of all symbols.
        let lengths = tables.min_by_key(guess).unwrap_or_default();
        let bits = cheapest_symbols(class.symbol_grouping(), &lengths)
            .into_iter()
            .map(|(_, bits)| bits)
            .collect();
        Self { lengths, bits }
    }
}

impl LayerClasses {
    pub(crate) fn new(side: Side) -> Self {
        Self { side, units: Vec::new(), tables: Vec::new(), raw_bits: 0 }
    }

    /// Counts a head's rows, whose coefficients have these spreads.
    pub(crate) fn count_rows(&mut self, rows: &[&[f32]], step: f32, spreads: &[f64]) {
        let dim = spreads.len();
        let first = self.units.len();
        let width = if self.side == Side::Key { QUAD } else { 1 };
        self.units.extend(spreads.chunks(width).map(|spreads| {
            let square = spreads.iter().map(|s| s * s).sum::<f64>() / spreads.len() as f64;
            ClassUnit::new(spreads.len(), square.sqrt() / f64::from(step))
        }));
        let units = &mut self.units[first..];
        let mut codes = vec![0i32; QUAD * dim];
        for rows in rows.chunks(QUAD) {
            let mut count = 0;
            for row in rows {
                let codes = &mut codes[count * dim..][..dim];
                match round_row(row, step, codes) {
                    Ok(()) => count += 1,
                    Err(_) => self.raw_bits += 16 * dim as u64,
                }
            }
            let codes = &codes[..count * dim];
            for (index, unit) in units.iter_mut().enumerate() {
                let mut quad = [0; QUAD];
                if self.side == Side::Key {
                    codes.chunks_exact(dim).for_each(|row| {
                        unit.count_quad(&row[index * QUAD..][..unit.len]);
                    });
                } else {
                    let of_tokens = codes.iter().skip(index).step_by(dim);
                    quad.iter_mut().zip(of_tokens).for_each(|(quad, code)| *quad = *code);
                    unit.count_quad(&quad[..count]);
                }
            }
        }
    }

    /// Deals the units; returns the bits of all that was counted.
    pub(crate) fn assign_classes(&mut self) -> u64 {
        self.make_tables();
        for _ in 0..ROUNDS {
            let mut moved = false;
            for unit in &mut self.units {
                let cost = |class: &usize| unit.coded_bits(CLASSES[*class], &self.tables[*class]);
                let best = (0..CLASSES.len()).min_by_key(cost).unwrap_or(0) as u8;
                moved |= best != unit.class;
                unit.class = best;
            }
            if !moved {
                break;
            }
            self.make_tables();
        }
        let bits = |unit: &ClassUnit| {
            let class = usize::from(unit.class);
            unit.coded_bits(CLASSES[class], &self.tables[class])
        };
        self.units.iter().map(bits).sum::<u64>() + self.raw_bits
    }

    /// The best table of each class for the units that it has.
    fn make_tables(&mut self) {
        let table = |(index, class): (usize, &CodeClass)| {
            let mut counts = vec![0; class.symbol_count()];
            for unit in self.units.iter().filter(|unit| usize::from(unit.class) == index) {
                unit.visit_symbols(*class, |symbol, count| counts[symbol] += count);
            }
            if index == 0 {
                return ClassTable { lengths: Vec::new(), bits: vec![0; counts.len()] };
            }
            ClassTable::best_table(*class, &smooth_counts(*class, &counts))
        };
        self.tables = CLASSES.iter().enumerate().map(table).collect();
    }

    /// Appends the class of every coefficient, and the code lengths of every class.
    pub(crate) fn append_tensors(&self, tensors: &mut GridTensors) {
        for unit in &self.units {
            tensors.classes.extend(repeat_n(unit.class, unit.len));
        }
        for table in &self.tables {
            tensors.tables.extend(&table.lengths);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_codec::{Grid, StreamTable};

    /// Rows of sums of noise, narrower from position to position.
    fn rows(count: usize, dim: usize) -> Vec<f32> {
        let mut state = 7u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let mut value = |at: usize| (0..4).map(|_| noise()).sum::<f32>() * 0.6f32.powi(at as i32);
        (0..count * dim).map(|index| value(index % dim)).collect()
    }

    fn fitted(side: Side, rows: &[f32], dim: usize) -> (GridTensors, u64) {
        let spread = |at: usize| {
            let squares = rows.iter().skip(at).step_by(dim).map(|c| f64::from(c * c));
            (squares.sum::<f64>() / (rows.len() / dim) as f64).sqrt()
        };
        let spreads: Vec<f64> = (0..dim).map(spread).collect();
        let mut classes = LayerClasses::new(side);
        classes.count_rows(&rows.chunks_exact(dim).collect::<Vec<_>>(), 0.05, &spreads);
        let bits = classes.assign_classes();
        let mut tensors = GridTensors { steps: vec![0.05], classes: vec![], tables: vec![] };
        classes.append_tensors(&mut tensors);
        (tensors, bits)
    }

    #[test]
    fn counted_bits_are_those_that_pages_take() {
        let dim = 14;
        for side in Side::BOTH {
            let rows = rows(64 * 20, dim);
            let (tensors, bits) = fitted(side, &rows, dim);
            if side == Side::Key {
                // A quad of positions shares a class, also the last two.
                let mut quads = tensors.classes.chunks(QUAD);
                assert!(quads.all(|quad| quad.iter().all(|class| *class == quad[0])));
            }
            let tables = tensors.layer_tables(0).unwrap();
            let tables = tables.into_iter().zip(&CLASSES[1..]);
            let tables =
                tables.map(|(table, class)| StreamTable::new(table, class.symbol_grouping()));
            let grid = Grid::new(side, 0.05, &tensors.classes, tables.collect());
            let mut bytes = Vec::new();
            let lengths = grid.append_chunks(&rows, usize::MAX, &mut bytes).unwrap();
            let taken = 8.0 * (bytes.len() as u64 - lengths) as f64;
            // Lanes leave 16 bits over at most, in 20 chunks.
            let most = bits as f64 * 1.02 + 20.0 * 16.0 * 16.0;
            assert!((bits as f64 * 0.98..most).contains(&taken), "{side}: {bits} and {taken}");
        }
    }

    #[test]
    fn rows_that_do_not_fit_count_as_floats_and_no_rows_give_tables() {
        let (tensors, bits) = fitted(Side::Key, &[1e9; 8], 8);
        assert_eq!(bits, 16 * 8);
        assert!(tensors.layer_tables(0).is_some());
    }
}
