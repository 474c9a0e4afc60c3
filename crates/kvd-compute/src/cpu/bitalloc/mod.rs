//! Bit-allocation sides, straight from their codes: the levels of each run are bytes, its scales
//! and units go into the query or out of the sum, and outliers are added one by one.
//!
//! AVX-512 multiplies the codes of runs of whole registers as they lie, run after run
//! (`avx512_runs.rs`). Elsewhere, and where AMX takes over or a run has other lengths, codes of a
//! tile become bytes first, those of all runs side by side, so that one integer product serves
//! widths of every kind. Fits put the levels of narrow codes on bytes; levels that are not take
//! positions of their own for each byte, two of keys and three of values.

#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_runs;

use crate::cpu::int_dot::{CodeLookup, ROWS, SumTarget, TileCodes, key_dots, value_dots};
#[cfg(target_arch = "x86_64")]
use crate::cpu::int_dot::{VECTOR_ROWS, wants_bytes};
use crate::cpu::int_operands::{self, IntOperands, ScaledRows};
use crate::cpu::levels::{LevelBytes, LevelTable, OutputLayout, RunCodes, SPILL, look_up};
use crate::cpu::loss::{alike_factor, rounding_loss};
use crate::cpu::outlier_sums::OutlierSums;
#[cfg(target_arch = "x86_64")]
use crate::cpu::prefetch::{PrefetchBytes, PrefetchSteps};
#[cfg(target_arch = "x86_64")]
use crate::cpu::row_block::StridedRows;
use crate::cpu::simd::{KernelConfig, Simd};
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::TileCursor;
use kvd_codec::{BitAlloc, CodeLayout, HeadCodec, WidthRun};
use kvd_core::Side;
use std::ops::Range;

/// Positions that are summed together.
const QUAD: usize = 4;
/// Bytes of a line of the cache.
const LINE: usize = 64;

/// The codes of one run.
struct RunTables {
    run: WidthRun,
    /// Each table and the position of its first byte.
    tables: Vec<(LevelTable, usize)>,
    /// Where they begin in a page of [`RunBook::tokens`].
    start: usize,
}

/// A head's runs as bytes.
struct RunBook {
    side: Side,
    codes: Vec<RunTables>,
    /// Coefficient and factor of every position; padding has none.
    positions: Vec<Option<(usize, f32)>>,
    /// Rows of the page that places are for.
    tokens: usize,
    bytes: Vec<u8>,
    /// Whether codes are multiplied as they lie.
    direct: bool,
}

/// Whether the codes of these runs are multiplied as they lie, in a unit of so many rows.
fn is_direct(simd: Simd, rows: usize, runs: &[WidthRun]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let lens = runs.iter().filter(|run| run.width > 0).map(|run| run.len);
        !wants_bytes(simd, rows) && avx512_runs::has_kernel(simd, lens)
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (simd, rows, runs);
        false
    }
}

/// Whether there is a kernel for the side.
pub(crate) fn takes_side(side: &HeadCodec) -> bool {
    side.bitalloc().is_some()
}

impl RunBook {
    /// For a unit of so many rows.
    fn new(simd: Simd, rows: usize, head: &HeadCodec, side: Side) -> Option<Self> {
        let bitalloc = head.bitalloc()?;
        let (mut codes, mut positions) = (Vec::new(), Vec::new());
        for run in bitalloc.runs() {
            let levels = LevelBytes::new(bitalloc.levels_of(run), side);
            let mut tables = Vec::new();
            // Without bits there is but a zero.
            for (table, unit) in levels.tables.into_iter().filter(|_| run.width > 0) {
                tables.push((table, positions.len()));
                let factor = |at| (at, bitalloc.scales()[at] * unit);
                positions.extend((run.first..run.first + run.len).map(|at| Some(factor(at))));
                if side == Side::Key {
                    positions.resize(positions.len().next_multiple_of(QUAD), None);
                }
            }
            codes.push(RunTables { run: *run, tables, start: 0 });
        }
        let direct = is_direct(simd, rows, bitalloc.runs());
        Some(Self { side, codes, positions, tokens: 0, bytes: Vec::new(), direct })
    }

    /// The positions that are multiplied together, without rows yet.
    fn new_queries(&self, config: KernelConfig) -> Vec<RunQueries> {
        let cut = |positions: Range<usize>| {
            // Of all together one large channel would leave others next to nothing of a byte.
            let mut parts = if self.direct {
                IntOperands::of_queries(config)
            } else {
                IntOperands::of_scaled_queries(config)
            };
            parts = parts.multiplied_with(CodeLookup::biased_bytes().largest_value());
            parts.clear_rows(positions.len());
            RunQueries { positions, parts, units: Vec::new(), losses: Vec::new() }
        };
        if !self.direct {
            return vec![cut(0..self.positions.len())];
        }
        self.each_table().map(|(codes, _, first)| cut(first..first + codes.run.len)).collect()
    }

    /// The runs, each table, and the position of its first byte.
    fn each_table(&self) -> impl Iterator<Item = (&RunTables, &LevelTable, usize)> {
        self.codes
            .iter()
            .flat_map(|codes| codes.tables.iter().map(move |(table, first)| (codes, table, *first)))
    }

    /// Prefetches in as many steps as registers of so many tiles are multiplied.
    #[cfg(target_arch = "x86_64")]
    fn prefetch_steps<'a>(&self, prefetch: PrefetchBytes<'a>, tiles: usize) -> PrefetchSteps<'a> {
        prefetch.in_steps(tiles * self.positions.len() / avx512_runs::POSITIONS)
    }

    /// Finds where codes lie in a page of so many rows.
    fn place_runs(&mut self, tokens: usize) {
        if self.tokens == tokens {
            return;
        }
        let mut start = 0;
        for codes in &mut self.codes {
            let WidthRun { width, len, .. } = codes.run;
            codes.start = start;
            start += CodeLayout::new(self.side, tokens, len, width as u32).size_bytes();
        }
        self.tokens = tokens;
    }

    /// The bytes of some tiles of a page.
    fn unpack_tiles<'a>(&'a mut self, simd: Simd, cursor: &TileCursor<'a>) -> TileCodes<'a> {
        let TileCursor { page, prefetch, .. } = *cursor;
        let tiles = cursor.page_tiles();
        self.place_runs(page.layout.tokens());
        let per_row = self.positions.len();
        let size = TILE * per_row;
        let used = size * tiles.len();
        self.bytes.resize(self.bytes.len().max(used + LINE), 0);
        let Self { side, codes, bytes, .. } = self;
        // From where a line begins: registers are loaded faster.
        let skip = bytes.as_ptr().align_offset(LINE).min(LINE);
        let bytes = &mut bytes[skip..][..used];
        for codes in codes.iter().filter(|codes| codes.run.width > 0) {
            let run = codes.codes_of(page.codes, tiles.clone());
            match side {
                Side::Key => codes.unpack_keys(simd, run, per_row, bytes),
                Side::Value => codes.unpack_values(simd, run, per_row, bytes),
            }
        }
        TileCodes { bytes, width: 8, per_row, prefetch }
    }
}

impl RunTables {
    /// The codes of some tiles of a page, which are full ones.
    fn codes_of<'a>(&self, page: &'a [u8], tiles: Range<usize>) -> RunCodes<'a> {
        let WidthRun { width, len, .. } = self.run;
        let tile = TILE / 8 * len * width;
        let bytes = &page[self.start + tiles.start * tile..self.start + tiles.end * tile];
        RunCodes { bytes, width: width as u32, len }
    }

    /// A run of tiles of keys: fours of positions, of each token in turn.
    fn unpack_keys(&self, simd: Simd, codes: RunCodes<'_>, per_row: usize, bytes: &mut [u8]) {
        let (whole, rest) = (codes.len / QUAD * QUAD, codes.len % QUAD);
        for (table, first) in &self.tables {
            let behind = TILE * (per_row - first - codes.len);
            let first = TILE * first;
            let (chunk, tile) = (codes.chunk_codes(), TILE * per_row);
            let to = OutputLayout { first, chunk, tile, free: behind >= SPILL };
            look_up(simd, codes, table, to, bytes);
            for tile in bytes.chunks_exact_mut(tile).filter(|_| rest > 0) {
                let last = &mut tile[first + TILE * whole..];
                // The last positions are fewer than four.
                match rest {
                    1 => space_quads::<1>(last),
                    2 => space_quads::<2>(last),
                    _ => space_quads::<3>(last),
                }
            }
        }
    }

    /// A run of tiles of values: fours of tokens, of each position in turn.
    fn unpack_values(&self, simd: Simd, codes: RunCodes<'_>, per_row: usize, bytes: &mut [u8]) {
        for (table, first) in &self.tables {
            let behind = QUAD * (per_row - first - codes.len);
            let (first, chunk, tile) = (QUAD * first, QUAD * per_row, TILE * per_row);
            let to = OutputLayout { first, chunk, tile, free: behind >= SPILL };
            look_up(simd, codes, table, to, bytes);
        }
    }
}

/// Puts the `N` bytes of each token of a tile [`QUAD`] apart.
fn space_quads<const N: usize>(bytes: &mut [u8]) {
    let mut packed = [[0u8; N]; TILE];
    packed.copy_from_slice(&bytes.as_chunks::<N>().0[..TILE]);
    for (out, packed) in bytes.as_chunks_mut::<QUAD>().0.iter_mut().zip(packed) {
        out[..N].copy_from_slice(&packed);
    }
}

/// Queries of a unit times scales and units, of positions that are multiplied together.
struct RunQueries {
    positions: Range<usize>,
    parts: IntOperands,
    units: Vec<f32>,
    /// See [`BitAllocKeys::score_loss`].
    losses: Vec<f32>,
}

/// Keys of a unit.
pub(crate) struct BitAllocKeys {
    book: RunBook,
    lookup: CodeLookup,
    /// One for each run and byte of its levels where runs are multiplied one by one; else one for
    /// all.
    cuts: Vec<RunQueries>,
    /// Queries `[rows, dim]`, for outliers.
    queries: Vec<f32>,
    dim: usize,
}

impl BitAllocKeys {
    /// Takes folded queries `[rows, dim]`.
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, queries: &[f32]) -> Option<Self> {
        let book = RunBook::new(config.simd, queries.len() / side.dim(), side, Side::Key)?;
        let mut cuts = book.new_queries(config);
        let lookup = CodeLookup::biased_bytes();
        if !cuts
            .iter()
            .all(|cut| int_operands::sums_fit(cut.positions.len(), lookup.largest_value()))
        {
            return None;
        }
        let level = (lookup.largest_value() as f32).powi(2);
        let mut row = vec![0f32; book.positions.len()];
        for query in queries.chunks_exact(side.dim()) {
            for (value, position) in row.iter_mut().zip(&book.positions) {
                *value = position.map_or(0.0, |(coefficient, factor)| query[coefficient] * factor);
            }
            if !row.iter().chain(query).all(|value| value.is_finite()) {
                return None;
            }
            for RunQueries { positions, parts, units, losses } in &mut cuts {
                let row = &row[positions.clone()];
                let largest = row.iter().fold(0f32, |m, q| m.max(q.abs()));
                let unit = parts.push(config.simd, row, largest, None).unit;
                losses.push(
                    rounding_loss(unit, level * row.len() as f32)
                        * alike_factor(config.simd, row, unit),
                );
                units.push(unit);
            }
        }
        Some(Self { book, lookup, cuts, queries: queries.to_vec(), dim: side.dim() })
    }

    /// How far rounding may take a score of that row: see [`rounding_loss`].
    pub(crate) fn score_loss(&self, row: usize) -> f32 {
        self.cuts.iter().map(|cut| cut.losses[row]).fold(0f32, f32::hypot)
    }

    /// Scores all rows against a few tiles.
    pub(crate) fn score_tiles(
        &mut self,
        simd: Simd,
        cursor: &TileCursor<'_>,
        scores: &mut SpanScores,
    ) {
        let TileCursor { page, in_page, in_span, count, .. } = *cursor;
        match self.book.direct {
            #[cfg(target_arch = "x86_64")]
            true => self.score_runs(simd, cursor, scores),
            _ => self.score_bytes(simd, cursor, scores),
        }
        for outlier in BitAlloc::residuals(page.scales, rows_of(in_page, count)) {
            let token = outlier.row + in_span * TILE - in_page * TILE;
            for (row, query) in self.queries.chunks_exact(self.dim).enumerate() {
                scores.row_mut(row)[token] += query[outlier.coefficient] * outlier.residual;
            }
        }
    }

    /// Products of bytes, of all runs together.
    fn score_bytes(&mut self, simd: Simd, cursor: &TileCursor<'_>, scores: &mut SpanScores) {
        let codes = self.book.unpack_tiles(simd, cursor);
        let RunQueries { parts, units, .. } = &self.cuts[0];
        for first in (0..units.len()).step_by(ROWS) {
            let rows = parts.rows_from(first);
            let units = &units[first..first + rows.row_count()];
            let out = scores.rows_mut(first, cursor.in_span);
            if codes.per_row > 0 {
                key_dots(simd, codes, &self.lookup, ScaledRows { rows, units }, out);
            } else {
                (0..units.len()).for_each(|row| out[row * SPAN..][..cursor.count * TILE].fill(0.0));
            }
        }
    }

    /// Products of codes as they lie, run after run.
    #[cfg(target_arch = "x86_64")]
    fn score_runs(&mut self, simd: Simd, cursor: &TileCursor<'_>, scores: &mut SpanScores) {
        let TileCursor { page, in_page, in_span, count, prefetch } = *cursor;
        self.book.place_runs(page.layout.tokens());
        let all = self.queries.len() / self.dim;
        let tokens = in_span * TILE..(in_span + count) * TILE;
        (0..all).for_each(|row| scores.row_mut(row)[tokens.clone()].fill(0.0));
        for first in (0..all).step_by(VECTOR_ROWS) {
            let rows = VECTOR_ROWS.min(all - first);
            let out = scores.rows_mut(first, in_span);
            // Once for all rows.
            let mut prefetch = if first == 0 {
                self.book.prefetch_steps(prefetch, count)
            } else {
                PrefetchSteps::default()
            };
            for ((codes, table, _), cut) in self.book.each_table().zip(&self.cuts) {
                let codes = codes.codes_of(page.codes, in_page..in_page + count);
                let q = ScaledRows {
                    rows: cut.parts.rows_from(first).slice_rows(0, rows),
                    units: &cut.units[first..first + rows],
                };
                avx512_runs::key_dots(simd, codes, table, q, &mut prefetch, out);
            }
        }
    }
}

/// Cuts the weights of some tiles of a few rows; returns what their units are, and adds what
/// rounding took to `lost`.
fn round_weights(
    simd: Simd,
    parts: &mut IntOperands,
    lost: &mut [f32],
    rows: Range<usize>,
    tiles: Range<usize>,
    weights: &SpanScores,
) -> [f32; ROWS] {
    let pushed = parts.push_weights(simd, weights, rows.clone(), &tiles);
    lost[rows].iter_mut().zip(&pushed).for_each(|(lost, pushed)| *lost += pushed.lost);
    pushed.map(|row| row.unit)
}

/// Rows of a page in some of its tiles.
fn rows_of(tile: usize, count: usize) -> Range<usize> {
    tile * TILE..(tile + count) * TILE
}

/// Weighted sums of a unit over one head's value codes.
pub(crate) struct BitAllocValues {
    book: RunBook,
    lookup: CodeLookup,
    parts: IntOperands,
    /// `[rows, positions]`.
    sums: Vec<f32>,
    /// Signed sums of the rounding residuals of weights, by row.
    lost: Vec<f32>,
    outliers: OutlierSums,
}

impl BitAllocValues {
    pub(crate) fn new(config: KernelConfig, side: &HeadCodec, rows: usize) -> Option<Self> {
        let book = RunBook::new(config.simd, rows, side, Side::Value)?;
        Some(Self {
            sums: vec![0.0; rows * book.positions.len()],
            lost: vec![0.0; rows],
            outliers: OutlierSums::new(rows, side.dim()),
            book,
            lookup: CodeLookup::biased_bytes(),
            parts: IntOperands::of_weights(config),
        })
    }

    /// The largest magnitude of a value that rounded weights are multiplied with.
    pub(crate) fn largest_value(&self) -> f32 {
        let factors = self.book.positions.iter().flatten().map(|(_, factor)| factor.abs());
        factors.fold(0f32, f32::max) * self.lookup.largest_value() as f32
    }

    /// The part that rounding took from all weights of a row together.
    pub(crate) fn joint_residual(&self, row: usize) -> f32 {
        self.lost[row]
    }

    /// Adds a few weighted tiles.
    pub(crate) fn add_tiles(&mut self, simd: Simd, cursor: &TileCursor<'_>, weights: &SpanScores) {
        let TileCursor { page, in_page, in_span, count, .. } = *cursor;
        self.parts.change_offsets();
        match self.book.direct {
            #[cfg(target_arch = "x86_64")]
            true => self.add_runs(simd, cursor, weights),
            _ => self.add_bytes(simd, cursor, weights),
        }
        for outlier in BitAlloc::residuals(page.scales, rows_of(in_page, count)) {
            let token = outlier.row + in_span * TILE - in_page * TILE;
            for row in 0..weights.row_count() {
                let weighted = f64::from(weights.row(row)[token]) * f64::from(outlier.residual);
                self.outliers.add_weighted(row, outlier.coefficient, weighted);
            }
        }
    }

    /// Products of bytes, of all runs together.
    fn add_bytes(&mut self, simd: Simd, cursor: &TileCursor<'_>, weights: &SpanScores) {
        let tiles = cursor.span_tiles();
        // Once for all rows.
        let codes = self.book.unpack_tiles(simd, cursor);
        let per_row = codes.per_row;
        for first in (0..weights.row_count()).step_by(ROWS).filter(|_| per_row > 0) {
            let rows = first..weights.row_count().min(first + ROWS);
            let units = round_weights(
                simd,
                &mut self.parts,
                &mut self.lost,
                rows.clone(),
                tiles.clone(),
                weights,
            );
            let units = &units[..rows.len()];
            let target = SumTarget { units, factors: &[], first: 0, count: per_row };
            let sums = &mut self.sums[rows.start * per_row..rows.end * per_row];
            value_dots(simd, codes, &self.lookup, self.parts.rows_from(0), target, sums);
        }
    }

    /// Products of codes as they lie, run after run.
    #[cfg(target_arch = "x86_64")]
    fn add_runs(&mut self, simd: Simd, cursor: &TileCursor<'_>, weights: &SpanScores) {
        let TileCursor { page, in_page, in_span, count, prefetch } = *cursor;
        self.book.place_runs(page.layout.tokens());
        let per_row = self.book.positions.len();
        for first in (0..weights.row_count()).step_by(VECTOR_ROWS) {
            let rows = first..weights.row_count().min(first + VECTOR_ROWS);
            let tiles = in_span..in_span + count;
            let units =
                round_weights(simd, &mut self.parts, &mut self.lost, rows.clone(), tiles, weights);
            let weights = ScaledRows { rows: self.parts.rows_from(0), units: &units[..rows.len()] };
            let sums = &mut self.sums[rows.start * per_row..rows.end * per_row];
            let mut prefetch = if first == 0 {
                self.book.prefetch_steps(prefetch, count)
            } else {
                PrefetchSteps::default()
            };
            for (codes, table, first) in self.book.each_table() {
                let run = codes.codes_of(page.codes, in_page..in_page + count);
                let out = StridedRows { values: &mut sums[first..], stride: per_row };
                avx512_runs::value_dots(simd, run, table, weights, &mut prefetch, out);
            }
        }
    }

    /// Scales the sums of a row.
    pub(crate) fn scale_row(&mut self, row: usize, factor: f32) {
        let count = self.book.positions.len();
        self.lost[row] *= factor;
        self.sums[row * count..][..count].iter_mut().for_each(|sum| *sum *= factor);
        self.outliers.scale_row(row, factor);
    }

    /// Adds the sums of row `row` to `out`, in the order of coefficients.
    pub(crate) fn unfold_row(&self, row: usize, out: &mut [f32]) {
        let sums = &self.sums[row * self.book.positions.len()..];
        let sums = self.book.positions.iter().zip(sums);
        let sums =
            sums.filter_map(|(position, sum)| position.map(|(at, factor)| (at, factor, sum)));
        let Some(outliers) = self.outliers.row_sums(row) else {
            return sums.for_each(|(coefficient, factor, sum)| out[coefficient] += factor * sum);
        };
        let mut wide = outliers.to_vec();
        sums.for_each(|(at, factor, sum)| wide[at] += f64::from(factor) * f64::from(*sum));
        out.iter_mut().zip(&wide).for_each(|(out, sum)| *out += *sum as f32);
    }
}
