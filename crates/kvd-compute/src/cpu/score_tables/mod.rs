//! Score tables: what each code of a position adds to a row's score, as one byte, so that a score
//! is a sum of look-ups and no product with a query is left (`Precision::Int8`, 16 codes a
//! position). Bytes count in a unit of their position, which is a whole number of the row's units:
//! large queries take no digits from small ones.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;

use crate::cpu::int_dot::TileCodes;
use crate::cpu::row_block::RowBlock;
use crate::cpu::simd::{InstructionSet, Simd};
use crate::cpu::span_scores::SpanScores;
use kvd_codec::HeadCodec;

/// Codes of a position.
pub(super) const CODES: usize = 16;
/// Bits of one.
const WIDTH: u32 = 4;
/// Positions whose tables fill a register together.
pub(super) const QUAD: usize = 4;
/// Positions whose codes share bytes.
pub(super) const PAIR: usize = 2 * QUAD;
/// Rows that one call of a kernel scores.
pub(super) const ROWS: usize = 4;

/// Tables of a quad of positions: a cache line, as registers load them.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no kernel reads it"))]
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct QuadTables(pub(super) [[u8; CODES]; QUAD]);

/// Queries of a unit as score tables.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no kernel reads it"))]
pub(crate) struct TableKeys {
    /// Positions of a row.
    pub(super) positions: usize,
    pub(super) rows: usize,
    /// By quad of positions and row.
    pub(super) tables: Vec<QuadTables>,
    /// By quad and row, how many units of the row one of a position's bytes is; in AVX2 those of
    /// positions that share bytes are side by side.
    pub(super) factors: Vec<[u8; QUAD]>,
    /// By row.
    pub(super) units: Vec<f32>,
    /// The sum of the least scores of all positions, by row.
    pub(super) bases: Vec<f32>,
}

/// Whether codes of a codebook are looked up.
pub(crate) fn takes_codebook(side: &HeadCodec) -> bool {
    codebook_entries(side).is_some_and(|entries| takes_entries(side, entries))
}

/// Whether codes of levels are looked up.
pub(crate) fn takes_levels(side: &HeadCodec) -> bool {
    let levels = side.lloyd_levels();
    levels.is_some_and(|values| takes_entries(side, RowBlock { values, dim: 1 }))
}

/// Entries of the one codebook of a side.
fn codebook_entries(side: &HeadCodec) -> Option<RowBlock<'_>> {
    let vq = side.vq().filter(|vq| vq.stages() == 1 && !vq.is_grouped())?;
    let book = vq.stage_codebook(0, 0);
    Some(RowBlock { values: book.entries(), dim: book.dim() })
}

fn takes_entries(side: &HeadCodec, entries: RowBlock<'_>) -> bool {
    // Decoded entropy codes are a byte each.
    let packed = side.stream_runs().is_none();
    // Two quads share bytes.
    let whole = (side.dim() / entries.dim).is_multiple_of(PAIR);
    packed && whole && entries.values.len() == CODES * entries.dim
}

impl TableKeys {
    /// Takes folded queries `[rows, dim]` of a side whose [codebook](takes_codebook) it takes;
    /// `None` when one is not finite.
    pub(crate) fn of_codebook(simd: Simd, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        Self::new(simd, RowBlock { values: queries, dim: side.dim() }, codebook_entries(side)?)
    }

    /// Takes folded queries `[rows, dim]` where each channel has a code, of a level;
    /// [`takes_levels`] says of which sides. `None` when one is not finite.
    pub(crate) fn of_levels(simd: Simd, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let entries = RowBlock { values: side.lloyd_levels()?, dim: 1 };
        Self::new(simd, RowBlock { values: queries, dim: side.dim() }, entries)
    }

    /// Takes queries `[rows, dim]` and the entries of codes, `[codes, dims]`.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused, reason = "no kernel there"))]
    fn new(simd: Simd, queries: RowBlock<'_>, entries: RowBlock<'_>) -> Option<Self> {
        let RowBlock { values: queries, dim } = queries;
        let RowBlock { values: entries, dim: dims } = entries;
        let (rows, positions) = (queries.len() / dim, dim / dims);
        if !queries.iter().all(|q| q.is_finite()) {
            return None;
        }
        let count = positions / QUAD * rows;
        let mut keys = Self {
            positions,
            rows,
            tables: vec![QuadTables([[0; CODES]; QUAD]); count],
            factors: vec![[1; QUAD]; count],
            units: Vec::with_capacity(rows),
            bases: Vec::with_capacity(rows),
        };
        let channel = |d: usize| std::array::from_fn(|code| entries[code * dims + d]);
        let entries: Vec<[f32; CODES]> = (0..dims).map(channel).collect();
        #[cfg(target_arch = "x86_64")]
        for query in queries.chunks_exact(dim) {
            match simd.vector_set() {
                InstructionSet::Avx2 => avx2::push_query(simd, &mut keys, query, &entries),
                _ => avx512::push_query(simd, &mut keys, query, &entries),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (&mut keys, entries);
        Some(keys)
    }

    /// Scores all rows against a few tiles of codes.
    pub(crate) fn score_tiles(
        &self,
        simd: Simd,
        codes: TileCodes<'_>,
        tile: usize,
        scores: &mut SpanScores,
    ) {
        assert!(has_kernel(simd), "score tables: instruction set");
        assert_eq!((codes.width, codes.per_row), (WIDTH, self.positions), "score tables: codes");
        for first in (0..self.rows).step_by(ROWS) {
            let rows = first..self.rows.min(first + ROWS);
            let out = scores.rows_mut(first, tile);
            #[cfg(target_arch = "x86_64")]
            match simd.vector_set() {
                InstructionSet::Avx2 => avx2::sum_tables(codes, self, rows, out),
                _ => avx512::sum_tables(codes, self, rows, out),
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = (codes, rows, out);
        }
    }
}

/// Whether scores are looked up with that instruction set.
fn has_kernel(simd: Simd) -> bool {
    matches!(simd.vector_set(), InstructionSet::Avx2 | InstructionSet::Avx512)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::prefetch::PrefetchBytes;
    use crate::cpu::span_scores::{SPAN, TILE};

    /// Positions: a few, and more than AVX2 sums up in 16 bits, with a rest.
    const POSITIONS: [usize; 3] = [24, 80, 128];
    const DIMS: usize = 2;

    fn wave(i: usize) -> f32 {
        (i as f32 * 0.7).sin() * (1.0 + (i % 7) as f32)
    }

    /// Levels that have score tables.
    fn levels() -> impl Iterator<Item = Simd> {
        let sets = [InstructionSet::Avx2, InstructionSet::Avx512];
        sets.into_iter().filter_map(Simd::of_set)
    }

    /// Tables of rows of waves, beside what they stand for.
    fn filled(simd: Simd, rows: usize, positions: usize) -> (TableKeys, Vec<f32>, Vec<f32>) {
        let queries: Vec<f32> = (0..rows * positions * DIMS).map(wave).collect();
        let entries: Vec<f32> = (0..CODES * DIMS).map(|i| wave(i * i + 3)).collect();
        let rows = RowBlock { values: &queries, dim: positions * DIMS };
        let keys = TableKeys::new(simd, rows, RowBlock { values: &entries, dim: DIMS });
        (keys.expect("tables"), queries, entries)
    }

    /// The code of a token at a position.
    fn code(token: usize, position: usize) -> usize {
        (token * 5 + position * 11 + token * position / 3) % CODES
    }

    /// Two planes of four bits, quads of positions beside each other.
    fn codes(tiles: usize, positions: usize) -> Vec<u8> {
        let half = positions / 2;
        let byte = |i: usize| {
            let (tile, i) = (i / (TILE * half), i % (TILE * half));
            let (quad, token, place) = (i / (TILE * QUAD), i / QUAD % TILE, i % QUAD);
            let (token, position) = (tile * TILE + token, quad * QUAD + place);
            (code(token, position) | code(token, position + half) << 4) as u8
        };
        (0..tiles * TILE * half).map(byte).collect()
    }

    #[test]
    fn sums_are_those_of_the_tables() {
        let shapes = [(1, 1), (2, 4), (3, 3), (4, 2), (7, 4)];
        let shapes = shapes.into_iter().flat_map(|shape| POSITIONS.map(|p| (shape, p)));
        let shapes = levels().flat_map(|simd| shapes.clone().map(move |shape| (simd, shape)));
        for (simd, ((rows, tiles), positions)) in shapes {
            let (mut keys, ..) = filled(simd, rows, positions);
            let (bytes, mut scores) = (codes(tiles, positions), SpanScores::new(rows));
            let of_tiles = TileCodes {
                bytes: &bytes,
                width: WIDTH,
                per_row: positions,
                prefetch: PrefetchBytes::default(),
            };
            keys.score_tiles(simd, of_tiles, 4 - tiles, &mut scores);
            for (row, token) in (0..rows).flat_map(|row| (0..SPAN).map(move |t| (row, t))) {
                let Some(at) = token.checked_sub((4 - tiles) * TILE) else {
                    assert_eq!(scores.row(row)[token], 0.0);
                    continue;
                };
                let mut entry = |position: usize| {
                    let (quad, place) = (position / QUAD * rows + row, position % QUAD);
                    let byte = keys.tables[quad].0[place][code(at, position)];
                    i32::from(byte) * i32::from(factor(simd, &mut keys, row, position))
                };
                let sum = (0..positions).map(&mut entry).sum::<i32>() as f32;
                let want = sum * keys.units[row] + keys.bases[row];
                let context = format!("{simd:?}, {positions} positions, row {row}, token {token}");
                assert_eq!(scores.row(row)[token], want, "{context}");
            }
        }
    }

    #[test]
    fn scores_are_those_of_products() {
        for (simd, positions) in levels().flat_map(|simd| POSITIONS.map(|p| (simd, p))) {
            let (keys, queries, entries) = filled(simd, 4, positions);
            let (bytes, mut scores) = (codes(2, positions), SpanScores::new(4));
            let (width, per_row, prefetch) = (WIDTH, positions, PrefetchBytes::default());
            keys.score_tiles(
                simd,
                TileCodes { bytes: &bytes, width, per_row, prefetch },
                0,
                &mut scores,
            );
            let (mut off, mut all) = (0f64, 0f64);
            for (row, token) in (0..4).flat_map(|row| (0..2 * TILE).map(move |t| (row, t))) {
                let product = |i: usize| {
                    let entry = entries[code(token, i / DIMS) * DIMS + i % DIMS];
                    f64::from(queries[row * positions * DIMS + i]) * f64::from(entry)
                };
                let exact: f64 = (0..positions * DIMS).map(product).sum();
                off += (f64::from(scores.row(row)[token]) - exact).powi(2);
                all += exact.powi(2);
            }
            // A byte for what 16 codes reach, rounded: some 0.6 % of what they deviate.
            let error = (off / all).sqrt();
            assert!(error < 8e-3, "{simd:?}, {positions} positions: {error}");
        }
    }

    /// How many units a position's byte is.
    fn factor(simd: Simd, keys: &mut TableKeys, row: usize, position: usize) -> u8 {
        match simd.vector_set() {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => *avx2::factor_of(keys, row, position),
            _ => keys.factors[position / QUAD * keys.rows + row][position % QUAD],
        }
    }

    #[test]
    fn factors_of_positions_that_are_summed_together_fit() {
        let Some(simd) = Simd::of_set(InstructionSet::Avx2) else { return };
        let (positions, some) = (128, 16);
        for (seed, gain) in (0..50).flat_map(|seed| [1.0, 30.0, 1e6].map(|gain| (seed, gain))) {
            let mut queries: Vec<f32> = (0..positions).map(|i| wave(i * (seed + 1))).collect();
            queries[seed] *= gain;
            let levels: Vec<f32> = (0..CODES).map(|i| wave(i * i + seed)).collect();
            let rows = RowBlock { values: &queries, dim: positions };
            let levels = RowBlock { values: &levels, dim: 1 };
            let mut keys = TableKeys::new(simd, rows, levels).unwrap();
            let mut factor = |position| u32::from(factor(simd, &mut keys, 0, position));
            for first in (0..positions / 2).step_by(some) {
                let low: u32 = (first..first + some).map(&mut factor).sum();
                let high: u32 = (first..first + some).map(|at| factor(positions / 2 + at)).sum();
                assert!(low + high <= 128, "{seed} {gain}: {low} {high}");
            }
            assert!((0..positions).all(|at| (1..=127).contains(&factor(at))), "{seed} {gain}");
        }
    }

    #[test]
    fn queries_of_nothing_score_nothing_and_others_are_no_tables() {
        let new = |simd, query: f32| {
            let queries = RowBlock { values: &[query; 8], dim: 8 };
            TableKeys::new(simd, queries, RowBlock { values: &[0.5; CODES], dim: 1 })
        };
        for simd in levels() {
            let keys = new(simd, 0.0).unwrap();
            assert_eq!((&keys.units[..], &keys.bases[..]), (&[0.0][..], &[0.0][..]));
            // All codes score alike: no unit, but a base.
            let keys = new(simd, 2.0).unwrap();
            assert_eq!((&keys.units[..], &keys.bases[..]), (&[0.0][..], &[8.0][..]));
            assert!(new(simd, f32::NAN).is_none());
        }
    }
}
