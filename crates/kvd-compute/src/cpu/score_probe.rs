//! Single rows decoded beside what kernels do, to see how far those are off.

use crate::BackendError;
use crate::cpu::attend_f64;
use crate::cpu::attend_job::{AttendJob, AttendUnit};
use crate::cpu::grid;
use crate::cpu::huffman::{self, PageRequest, StreamTiles};
use crate::cpu::loss::largest_magnitude;
use crate::cpu::raw_slots::restore_rows;
use crate::cpu::row_reader::RowReader;
use crate::cpu::simd::per_level;
use crate::cpu::span_scores::SpanScores;
use crate::cpu::token_span::TokenSpan;
use crate::cpu::unit_queries::UnitQueries;
use crate::{PlanPart, Source};
use kvd_codec::{HeadCodec, RowSpace};
use kvd_core::Side;
use std::ops::Range;

/// Tokens of a unit that are looked at.
const TOKENS: u32 = 1;

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
    rows: [Vec<f32>; 2],
    /// Positions of those.
    known: [Option<u32>; 2],
    streams: [Option<StreamTiles>; 2],
}

impl<'a> RowDecoder<'a> {
    pub(super) fn new(job: &'a AttendJob<'a>, head: usize) -> Self {
        Self { job, head, rows: Default::default(), known: [None; 2], streams: [None, None] }
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

    fn decode_row(&mut self, side: Side, parts: &[PlanPart], at: u32) -> Result<(), BackendError> {
        let reader = self.job.reader;
        let head = reader.codec.head_codec(reader.layer, side, self.head);
        let mut row = std::mem::take(&mut self.rows[side.index()]);
        row.clear();
        row.resize(head.dim(), 0.0);
        let part = parts.get(parts.partition_point(|part| part.end_token() <= at));
        if let Some(part) = part.filter(|part| part.first_token <= at) {
            let rows = reader.open_rows(&part.source, part.rows, side, self.head)?;
            let first = at - part.first_token;
            if !self.decode_coded(side, &rows, first, &mut row)? {
                rows.decode_in_part(first, 1, &mut row)?;
            }
            restore_rows(head, rows.row_space(), &mut row);
        }
        self.rows[side.index()] = row;
        Ok(())
    }

    /// Decodes a row of an entropy-coded page by the kernel for those, many times as fast as the
    /// codec; whether it has one.
    fn decode_coded(
        &mut self,
        side: Side,
        rows: &RowReader<'_>,
        first: u32,
        row: &mut [f32],
    ) -> Result<bool, BackendError> {
        let reader = self.job.reader;
        let head = reader.codec.head_codec(reader.layer, side, self.head);
        let RowReader::Page { page, first_row } = rows else { return Ok(false) };
        let Some((_, scales)) = page.stream_codes().filter(|_| !page.header().fallback) else {
            return Ok(false);
        };
        let token = first_row + first as usize;
        let tiles = &mut self.streams[side.index()];
        if tiles.is_none() {
            *tiles = StreamTiles::new(head, side);
        }
        let Some(tiles) = tiles else { return Ok(false) };
        let mut decoded = false;
        let wanted =
            PageRequest { tiles: &mut *tiles, page, rows: token..token + 1, decoded: &mut decoded };
        huffman::decode_pages(self.job.simd, vec![wanted])?;
        if !decoded || !tiles.holds_token(token) {
            return Ok(false);
        }
        let Some(grid) = head.grid() else {
            return Ok(page.decode_from_codes(tiles.as_fixed_codes(scales), token, row));
        };
        grid::decode_row(grid, tiles, token, row);
        page.restore_length(token, row);
        Ok(true)
    }
}

/// A few tokens that all rows of a unit see, and their scores.
pub(super) struct ScoreProbe {
    tokens: Range<u32>,
    /// `[rows, tokens]`.
    scores: Vec<f32>,
}

impl ScoreProbe {
    /// Chooses the tokens: those of a page first, whose kernel rounds. `None` where none is seen by
    /// all rows, or rows would take long to decode.
    pub(super) fn choose_tokens(
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
        let tokens = in_part(page.or_else(raw)?);
        let tokens = tokens.start..tokens.end.min(tokens.start + TOKENS);
        let scores = vec![0.0; rows * tokens.len()];
        Some(Self { tokens, scores })
    }

    /// Keeps the scores of some rows, where the span holds the tokens.
    pub(super) fn keep_scores(
        &mut self,
        rows: Range<usize>,
        span: &TokenSpan,
        scores: &SpanScores,
    ) {
        for at in span.visible_rows(&self.tokens) {
            let token = span.position_of(at) - self.tokens.start as usize;
            for row in rows.clone() {
                self.scores[row * self.tokens.len() + token] = scores.row(row)[at];
            }
        }
    }

    /// Decodes the tokens' keys, and compares each row's scores with those in f64.
    pub(super) fn measure_errors(
        &self,
        job: &AttendJob<'_>,
        unit: &AttendUnit<'_>,
        queries: &UnitQueries,
    ) -> Result<Vec<ProbeResult>, BackendError> {
        let count = self.tokens.len();
        let mut found = vec![ProbeResult::default(); self.scores.len() / count.max(1)];
        let mut decoder = RowDecoder::new(job, unit.head);
        for (index, at) in self.tokens.clone().enumerate() {
            let key = decoder.decoded_row(Side::Key, unit.parts, at)?;
            for (row, found) in found.iter_mut().enumerate() {
                let query = queries.row(RowSpace::Raw, row);
                let term = largest_product(job.simd, query, key);
                let exact = attend_f64::score_keys(job, unit, row, key).first().copied();
                let score = f64::from(self.scores[row * count + index]);
                let error = exact.map_or(0.0, |exact| (score - exact).abs() as f32);
                *found = found.larger_of(&ProbeResult { term, error });
            }
        }
        Ok(found)
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
