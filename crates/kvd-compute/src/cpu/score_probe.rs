//! Single rows decoded beside what kernels do, to see how far those are off.

use crate::BackendError;
use crate::cpu::attend_f64;
use crate::cpu::attend_job::{AttendJob, AttendUnit};
use crate::cpu::grid::{self, HeldMagnitudes, MagnitudeFinder};
use crate::cpu::huffman::{self, PageRequest, StreamTiles, TOGETHER};
use crate::cpu::loss::largest_magnitude;
use crate::cpu::raw_slots::restore_rows;
use crate::cpu::row_reader::RowReader;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::simd::per_level;
use crate::cpu::span_scores::SpanScores;
use crate::cpu::token_span::{TokenSpan, spans_of};
use crate::cpu::unit_queries::UnitQueries;
use crate::{PlanPart, Source};
use kvd_codec::{HeadCodec, RowSpace};
use kvd_core::Side;
use std::ops::Range;

/// Findings about a query row at the keys of a few tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ProbeResult {
    /// The largest product of a query's and a key's channel.
    pub(super) term: f32,
    /// The largest error of a score.
    pub(super) error: f32,
}

impl ProbeResult {
    /// The larger of both, each way.
    pub(super) fn larger_of(&self, other: &Self) -> Self {
        Self { term: self.term.max(other.term), error: self.error.max(other.error) }
    }
}

/// Decodes rows of one KV head, one at a time and back to K or V; keeps the last of each side.
pub(super) struct RowDecoder<'a> {
    job: &'a AttendJob<'a>,
    head: usize,
    rows: [ScratchVec<f32>; 2],
    /// Positions of those.
    known: [Option<u32>; 2],
    /// For pages that are entropy-coded.
    streams: [Vec<StreamTiles>; 2],
    /// Values that were decoded together, by position.
    ahead: Vec<(u32, ScratchVec<f32>)>,
    /// The magnitudes of values, once asked for.
    held: Option<Option<HeldMagnitudes>>,
}

impl<'a> RowDecoder<'a> {
    pub(super) fn new(job: &'a AttendJob<'a>, head: usize) -> Self {
        let (rows, streams) = (Default::default(), Default::default());
        Self { job, head, rows, known: [None; 2], streams, ahead: Vec::new(), held: None }
    }

    /// The row of the token at that position, of one of the parts.
    pub(super) fn decoded_row(
        &mut self,
        side: Side,
        parts: &[PlanPart],
        at: u32,
    ) -> Result<&[f32], BackendError> {
        if self.known[side.index()] != Some(at) {
            self.decode_row(side, parts, at)?;
            self.known[side.index()] = Some(at);
        }
        Ok(&self.rows[side.index()])
    }

    /// Decodes the values at these positions that lie in entropy-coded pages, which takes little
    /// longer than one of them.
    pub(super) fn decode_values_ahead(
        &mut self,
        parts: &[PlanPart],
        positions: &[u32],
    ) -> Result<(), BackendError> {
        let reader = self.job.reader;
        let head = reader.codec.head_codec(reader.layer, Side::Value, self.head);
        if head.stream_runs().is_none() {
            return Ok(());
        }
        for positions in positions.chunks(TOGETHER) {
            let mut opened = Vec::with_capacity(positions.len());
            for at in positions {
                opened.extend(self.open_row(Side::Value, parts, *at)?);
            }
            for (wanted, row) in opened.iter().zip(self.decode_coded(Side::Value, &opened)?) {
                self.ahead.extend(row.map(|row| (wanted.at, row)));
            }
        }
        Ok(())
    }

    fn open_row(
        &self,
        side: Side,
        parts: &[PlanPart],
        at: u32,
    ) -> Result<Option<WantedRow<'a>>, BackendError> {
        let part = parts.get(parts.partition_point(|part| part.end_token() <= at));
        let Some(part) = part.filter(|part| part.first_token <= at) else { return Ok(None) };
        let rows = self.job.reader.open_rows(&part.source, part.rows, side, self.head)?;
        Ok(Some(WantedRow { rows, at, in_part: at - part.first_token }))
    }

    fn decode_row(&mut self, side: Side, parts: &[PlanPart], at: u32) -> Result<(), BackendError> {
        if side == Side::Value
            && let Some(found) = self.ahead.iter().position(|(known, _)| *known == at)
        {
            self.rows[side.index()] = self.ahead.swap_remove(found).1;
            return Ok(());
        }
        let reader = self.job.reader;
        let head = reader.codec.head_codec(reader.layer, side, self.head);
        let wanted = self.open_row(side, parts, at)?;
        let coded = match &wanted {
            Some(wanted) => self.decode_coded(side, std::slice::from_ref(wanted))?.pop().flatten(),
            None => None,
        };
        self.rows[side.index()] = match (coded, wanted) {
            (Some(row), _) => row,
            (None, wanted) => {
                let mut row = ScratchVec::repeat_value(0.0, head.dim());
                if let Some(WantedRow { rows, in_part, .. }) = wanted {
                    rows.decode_in_part(in_part, 1, &mut row)?;
                    restore_rows(head, rows.row_space(), &mut row);
                }
                row
            }
        };
        Ok(())
    }

    /// Magnitudes of the values in the tiles that a unit reads, of a grid side.
    pub(super) fn held_magnitudes(
        &mut self,
        unit: &AttendUnit<'_>,
    ) -> Result<Option<HeldMagnitudes>, BackendError> {
        if self.held.is_none() {
            let reader = self.job.reader;
            self.job.looks.keep_asked(reader.codec.head_codec(
                reader.layer,
                Side::Value,
                self.head,
            ));
            self.held = Some(self.find_magnitudes(unit)?);
        }
        Ok(self.held.flatten())
    }

    fn find_magnitudes(
        &self,
        unit: &AttendUnit<'_>,
    ) -> Result<Option<HeldMagnitudes>, BackendError> {
        let reader = self.job.reader;
        let side = reader.codec.head_codec(reader.layer, Side::Value, self.head);
        let Some(grid) = side.grid() else { return Ok(None) };
        let Some(mut tiles) = StreamTiles::new(side, Side::Value) else { return Ok(None) };
        let Some(mut finder) = MagnitudeFinder::new(grid, &tiles) else { return Ok(None) };
        let seen = unit.seen_by_any();
        for part in unit.parts {
            let rows = reader.open_rows(&part.source, part.rows, Side::Value, self.head)?;
            let Some(page) = rows.as_page().filter(|page| !page.header().fallback) else {
                continue;
            };
            let spans = spans_of(part, seen.clone());
            let wanted = spans.clone().map(|span| span.source_rows());
            let wanted = wanted.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
            let Some(wanted) = wanted else { continue };
            let mut decoded = false;
            let request =
                PageRequest { tiles: &mut tiles, page, rows: wanted, decoded: &mut decoded };
            huffman::decode_pages(self.job.simd, vec![request])?;
            for span in spans.filter(|_| decoded) {
                let read = span.tile_range().map(|tile| span.page_tile(tile));
                read.filter_map(|tile| tiles.full_tile(tile))
                    .for_each(|tile| finder.add_tiles(self.job.simd, tile));
            }
        }
        Ok(Some(finder.held_magnitudes()))
    }

    /// Decodes rows of entropy-coded pages by the kernel for those, many times as fast as the
    /// codec; none where it has none.
    fn decode_coded(
        &mut self,
        side: Side,
        wanted: &[WantedRow<'a>],
    ) -> Result<Vec<Option<ScratchVec<f32>>>, BackendError> {
        let reader = self.job.reader;
        let head = reader.codec.head_codec(reader.layer, side, self.head);
        let streams = &mut self.streams[side.index()];
        let mut decoded = vec![false; wanted.len()];
        let mut requests = Vec::with_capacity(wanted.len());
        while streams.len() < wanted.len() {
            let Some(tiles) = StreamTiles::new(head, side) else { break };
            streams.push(tiles);
        }
        for ((wanted, tiles), decoded) in wanted.iter().zip(&mut *streams).zip(&mut decoded) {
            let RowReader::Page { page, .. } = &wanted.rows else { continue };
            if !page.header().fallback {
                let rows = wanted.in_source()..wanted.in_source() + 1;
                requests.push(PageRequest { tiles, page, rows, decoded });
            }
        }
        huffman::decode_pages(self.job.simd, requests)?;
        let streams = streams.iter().map(Some).chain(std::iter::repeat(None));
        let restore =
            |((wanted, decoded), tiles): ((&WantedRow<'_>, bool), Option<&StreamTiles>)| {
                let tiles = tiles.filter(|_| decoded)?;
                let mut row = ScratchVec::repeat_value(0.0, head.dim());
                let (rows, token) = (&wanted.rows, wanted.in_source());
                decode_from_tiles(head, rows, tiles, token, &mut row).then(|| {
                    restore_rows(head, rows.row_space(), &mut row);
                    row
                })
            };
        Ok(wanted.iter().zip(decoded).zip(streams).map(restore).collect())
    }
}

/// A row that is to be decoded.
struct WantedRow<'a> {
    rows: RowReader<'a>,
    at: u32,
    /// Counted in its part.
    in_part: u32,
}

impl WantedRow<'_> {
    /// The row, counted in its source.
    fn in_source(&self) -> usize {
        let first = if let RowReader::Page { first_row, .. } = self.rows { first_row } else { 0 };
        first + self.in_part as usize
    }
}

/// Decodes a row, counted in its source, of a page whose codes are in `tiles`; whether they hold
/// it.
fn decode_from_tiles(
    head: &HeadCodec,
    rows: &RowReader<'_>,
    tiles: &StreamTiles,
    token: usize,
    row: &mut [f32],
) -> bool {
    let RowReader::Page { page, .. } = rows else { return false };
    let Some((_, scales)) = page.stream_codes().filter(|_| !page.header().fallback) else {
        return false;
    };
    if !tiles.holds_token(token) {
        return false;
    }
    let Some(grid) = head.grid() else {
        return page.decode_from_codes(tiles.as_fixed_codes(scales), token, row);
    };
    grid::decode_row(grid, tiles, token, row);
    page.restore_length(token, row);
    true
}

/// A token that all rows of a unit see, its key and its scores.
pub(super) struct ScoreProbe {
    token: u32,
    /// By row.
    scores: ScratchVec<f32>,
    /// Back to K; none before its part had its turn.
    key: ScratchVec<f32>,
    /// Where the token is in the span at work, if it is.
    in_span: Option<usize>,
}

impl ScoreProbe {
    /// Chooses the token: one of a page first, whose kernel rounds. `None` where none is seen by
    /// all rows, or rows would take long to decode.
    pub(super) fn choose_token(
        unit: &AttendUnit<'_>,
        side: &HeadCodec,
        rows: usize,
    ) -> Option<Self> {
        let seen = unit.seen_by_all();
        let in_part =
            |part: &PlanPart| part.first_token.max(seen.start)..part.end_token().min(seen.end);
        let is_page = |part: &&PlanPart| matches!(part.source, Source::Pages { .. });
        let is_seen = |part: &&PlanPart| !in_part(part).is_empty();
        let slow = side.stream_runs().is_some() && side.grid().is_none();
        let page = unit.parts.iter().find(|part| !slow && is_page(part) && is_seen(part));
        let raw = || unit.parts.iter().find(|part| !is_page(part) && is_seen(part));
        let token = in_part(page.or_else(raw)?).start;
        Some(Self {
            token,
            scores: ScratchVec::repeat_value(0.0, rows),
            key: ScratchVec::default(),
            in_span: None,
        })
    }

    /// Keeps the scores of some rows, where the span of [`ScoreProbe::keep_key`] holds the token.
    pub(super) fn keep_scores(&mut self, rows: Range<usize>, scores: &SpanScores) {
        if let Some(at) = self.in_span {
            rows.for_each(|row| self.scores[row] = scores.row(row)[at]);
        }
    }

    /// Decodes the token's key, where the span holds it, and from `tiles` where those hold the
    /// codes of its page.
    pub(super) fn keep_key(
        &mut self,
        side: &HeadCodec,
        keys: &RowReader<'_>,
        tiles: Option<&StreamTiles>,
        span: &TokenSpan,
    ) -> Result<(), BackendError> {
        self.in_span = None;
        if !self.key.is_empty() {
            return Ok(());
        }
        let Some(at) = span.visible_rows(&(self.token..self.token + 1)).next() else {
            return Ok(());
        };
        self.in_span = Some(at);
        let row = span.first + at;
        self.key.resize_with_room(side.dim(), 0.0);
        let key = &mut self.key[..];
        if !tiles.is_some_and(|tiles| decode_from_tiles(side, keys, tiles, row, key)) {
            keys.decode_at(row, 1, key)?;
        }
        restore_rows(side, keys.row_space(), key);
        Ok(())
    }

    /// Compares each row's score of the token with that in f64.
    pub(super) fn measure_errors(
        &self,
        job: &AttendJob<'_>,
        unit: &AttendUnit<'_>,
        queries: &UnitQueries,
    ) -> ScratchVec<ProbeResult> {
        let measure = |(row, score): (usize, &f32)| {
            let query = queries.row(RowSpace::Raw, row);
            let term = largest_product(job.simd, query, &self.key);
            let exact = attend_f64::score_keys(job, unit, row, &self.key).next();
            let error = exact.map_or(0.0, |exact| (f64::from(*score) - exact).abs() as f32);
            ProbeResult { term, error }
        };
        ScratchVec::collect_values(self.scores.iter().enumerate().map(measure))
    }
}

per_level!(
    /// The largest magnitude of a product of two rows' channels.
    pub(super) fn largest_product(a: &[f32], b: &[f32]) -> f32 = largest_product_body
);

#[inline(always)]
fn largest_product_body(a: &[f32], b: &[f32]) -> f32 {
    let mut products = [0f32; 64];
    let mut most = 0f32;
    for (a, b) in a.chunks(products.len()).zip(b.chunks(products.len())) {
        for (product, (a, b)) in products.iter_mut().zip(a.iter().zip(b)) {
            *product = a * b;
        }
        most = most.max(largest_magnitude(&products[..a.len().min(b.len())]));
    }
    most
}
