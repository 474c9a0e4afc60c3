//! One unit of attention: some query rows of one KV head over some parts. Spans of tokens go
//! through three steps, scores, softmax, weighted sum; the first and last by the side's fused
//! kernel where it has one, else over rows decoded to f32.

use crate::cpu::attend_job::{AttendJob, AttendUnit, effective_config, effective_precision};
use crate::cpu::float::ROWS;
use crate::cpu::huffman::{self, PageRequest, StreamTiles, TOGETHER};
use crate::cpu::loss::{RowLoss, ValueLosses};
use crate::cpu::part_bytes::{PARTS, PartBytes};
use crate::cpu::prefetch::PartPrefetch;
use crate::cpu::row_block::StridedRows;
use crate::cpu::row_reader::RowReader;
use crate::cpu::score_probe::ScoreProbe;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::side_kernels::{KeyKernel, ValueKernel};
use crate::cpu::simd::Precision;
use crate::cpu::span_scores::{SPAN, SpanScores, TILE};
use crate::cpu::tile_cursor::{TileCursor, grow_buffer};
use crate::cpu::token_span::{TokenSpan, spans_of};
use crate::cpu::unit_answer::UnitAnswer;
use crate::cpu::unit_queries::UnitQueries;
use crate::{BackendError, PartialState};
use kvd_codec::{HeadCodec, PageReader, RowSpace};
use kvd_core::Side;
use smallvec::SmallVec;
use std::ops::Range;

/// Tiles of the entropy-coded pages of the parts at work.
struct DecodedParts {
    /// By part and side; none where no page is entropy-coded.
    tiles: Vec<[Option<StreamTiles>; 2]>,
    /// Whether they hold that part's pages.
    decoded: [[bool; 2]; TOGETHER],
    /// Which of the parts is attended to.
    slot: usize,
}

impl DecodedParts {
    /// The tiles of one side of the part that is attended to, where its page was decoded.
    fn tiles_of(&self, side: Side) -> Option<&StreamTiles> {
        let tiles = self.tiles.get(self.slot)?[side.index()].as_ref();
        tiles.filter(|_| self.decoded[self.slot][side.index()])
    }
}

/// Tokens of float rows that are multiplied between two prefetch steps, in scores and in sums.
const SCORE_TOKENS: usize = 8;
const SUM_TOKENS: usize = 16;

/// In how many calls a kernel reads rows, so many tiles at once.
fn count_calls(rows: u32, tiles: usize) -> usize {
    // Mostly one: a division takes longer.
    let (rows, at_once) = (rows as usize, tiles * TILE);
    if rows <= at_once { 1 } else { rows.div_ceil(at_once) }
}

/// A range in pieces of at most `len`.
pub(super) fn split_range(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(len).map(move |start| start..end.min(start + len))
}

/// The state of a unit from span to span.
pub(super) struct UnitState<'a> {
    pub(super) job: &'a AttendJob<'a>,
    pub(super) unit: &'a AttendUnit<'a>,
    pub(super) queries: UnitQueries,
    pub(super) states: ScratchVec<PartialState>,
    pub(super) losses: ScratchVec<RowLoss>,
    pub(super) scores: SpanScores,
    keys: Option<KeyKernel>,
    pub(super) values: Option<ValueKernel>,
    streams: DecodedParts,
    /// Sums of the fused value side, `[rows, dim]` in its order.
    pub(super) sums: ScratchVec<f32>,
    /// Codes of a span, a byte each.
    codes: ScratchVec<u8>,
    /// Rows of a tile, decoded.
    tile: ScratchVec<f32>,
    pub(super) prefetch: PartPrefetch<'a>,
    /// Where queries are rounded.
    pub(super) probe: Option<ScoreProbe>,
    /// Positions that all query tokens see.
    pub(super) seen_by_all: Range<u32>,
}

/// Answers a unit: partial states of its rows, and the losses of its kernels.
pub(super) fn answer_unit(
    job: &AttendJob<'_>,
    unit: &AttendUnit<'_>,
) -> Result<UnitAnswer, BackendError> {
    let mut state = UnitState::new(job, unit)?;
    state.score_parts(&Side::BOTH, |state, rows, span| {
        let [keys, values] = [&rows[0], &rows[1]];
        state.keep_probed_key(keys, span)?;
        state.prefetch.next_step();
        state.weigh_span(span, keys.row_space(), values.row_space());
        state.add_values(values, span)
    })?;
    state.finish_unit(job.reader.codec.head_codec(job.reader.layer, Side::Value, unit.head))
}

impl<'a> UnitState<'a> {
    pub(super) fn new(
        job: &'a AttendJob<'a>,
        unit: &'a AttendUnit<'a>,
    ) -> Result<Self, BackendError> {
        let head = |side| job.reader.codec.head_codec(job.reader.layer, side, unit.head);
        let (key_side, value_side) = (head(Side::Key), head(Side::Value));
        let queries = UnitQueries::new(job, unit, key_side)?;
        let rows = queries.offsets.len();
        let dim_v = value_side.dim();
        let config = effective_config(job.config(), rows);
        let fast = config.precision != Precision::Single;
        let coded = |side: &HeadCodec| fast && side.stream_runs().is_some();
        let streams = || {
            Side::BOTH.map(|side| {
                let head = if side == Side::Key { key_side } else { value_side };
                StreamTiles::new(head, side)
            })
        };
        let slots = if coded(key_side) || coded(value_side) { TOGETHER } else { 0 };
        let streams: Vec<_> = (0..slots).map(|_| streams()).collect();
        let tiles = |side: Side| streams.first().and_then(|tiles| tiles[side.index()].as_ref());
        let keys = KeyKernel::new(config, key_side, tiles(Side::Key), &queries.folded);
        let looks = job.looks.wants_look(value_side);
        let values = ValueKernel::new(config, value_side, tiles(Side::Value), rows);
        let values = values.map(|values| values.looking_at(looks, value_side, tiles(Side::Value)));
        let rounds = config.precision == Precision::Fast
            && keys.as_ref().is_some_and(KeyKernel::rounds_queries);
        let probe = if rounds { ScoreProbe::choose_token(unit, key_side, rows) } else { None };
        Ok(Self {
            job,
            unit,
            queries,
            states: ScratchVec::collect_values((0..rows).map(|_| PartialState::empty(dim_v))),
            losses: ScratchVec::repeat_value(RowLoss::default(), rows),
            scores: SpanScores::new(rows),
            keys,
            streams: DecodedParts { tiles: streams, decoded: [[false; 2]; TOGETHER], slot: 0 },
            sums: ScratchVec::repeat_value(0.0, if values.is_some() { rows * dim_v } else { 0 }),
            values,
            codes: ScratchVec::default(),
            tile: ScratchVec::default(),
            prefetch: PartPrefetch::default(),
            probe,
            seen_by_all: unit.seen_by_all(),
        })
    }

    /// Scores keys span by span and hands each on, with the rows of its part, of `sides`: keys, and
    /// values where they are read.
    pub(super) fn score_parts(
        &mut self,
        sides: &[Side],
        mut scored: impl FnMut(&mut Self, &[RowReader<'a>], &TokenSpan) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        // Spans outside are never decoded.
        let seen = self.unit.seen_by_any();
        let parts =
            self.unit.parts.iter().filter(|part| spans_of(part, seen.clone()).next().is_some());
        let (reader, head) = (self.job.reader, self.unit.head);
        let parts: SmallVec<[PartBytes<'a>; PARTS]> =
            parts.map(|part| PartBytes::new(part, reader, head, sides)).collect();
        let coded = !self.streams.tiles.is_empty();
        let together = if coded { TOGETHER } else { 1 };
        let at_once = [
            self.keys.as_ref().map(KeyKernel::tiles_at_once),
            self.values.as_ref().map(ValueKernel::tiles_at_once),
        ];
        let mut opened = SmallVec::with_capacity(together * sides.len());
        for first in (0..parts.len()).step_by(together) {
            self.job.stop.check()?;
            let at_work = &parts[first..parts.len().min(first + together)];
            for (slot, part) in at_work.iter().enumerate() {
                part.open_sides(reader, head, sides, slot, &mut opened)?;
            }
            if coded {
                self.decode_pages(at_work, opened.chunks_exact(sides.len()), &seen)?;
            }
            let rows = opened.chunks_exact(sides.len());
            for (slot, (part, rows)) in at_work.iter().zip(rows).enumerate() {
                self.streams.slot = slot;
                let next = parts.get(first + together + slot);
                let bytes = next.map_or([&[][..]; 2], |part| part.bytes);
                for (side, (at_once, rows)) in at_once.iter().zip(rows).enumerate() {
                    let at_once = at_once.filter(|_| rows.as_page().is_some());
                    let calls = at_once.map(|tiles| count_calls(part.plan.rows, tiles));
                    self.prefetch.begin_side(side, bytes[side], calls);
                }
                for span in spans_of(part.plan, seen.clone()) {
                    self.score_span(&rows[0], &span)?;
                    scored(self, rows, &span)?;
                }
            }
        }
        Ok(())
    }

    /// Decodes what is seen of entropy-coded pages of sides that have a kernel.
    fn decode_pages(
        &mut self,
        parts: &[PartBytes<'_>],
        opened: std::slice::ChunksExact<'_, RowReader<'_>>,
        seen: &Range<u32>,
    ) -> Result<(), BackendError> {
        let has = [self.keys.is_some(), self.values.is_some()];
        self.streams.decoded = [[false; 2]; TOGETHER];
        let mut wanted = Vec::with_capacity(2 * TOGETHER);
        let DecodedParts { tiles, decoded, .. } = &mut self.streams;
        let slots = tiles.iter_mut().zip(decoded).zip(parts.iter().zip(opened));
        for ((tiles, decoded), (part, rows)) in slots {
            let seen = spans_of(part.plan, seen.clone()).map(|span| span.source_rows());
            let seen = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
            for (side, (tiles, decoded)) in tiles.iter_mut().zip(decoded).enumerate() {
                let tiles = tiles.as_mut().filter(|_| has[side]);
                let page = rows.get(side).and_then(RowReader::as_page);
                if let (Some(tiles), Some(page)) = (tiles, page) {
                    wanted.push(PageRequest { tiles, page, rows: seen.clone(), decoded });
                }
            }
        }
        huffman::decode_pages(self.job.simd, wanted)
    }

    /// Writes the scores of the span's tokens.
    fn score_span(&mut self, rows: &RowReader<'_>, span: &TokenSpan) -> Result<(), BackendError> {
        let mut tiles = span.tile_range();
        if let Some(keys) = &mut self.keys
            && let Some(page) = rows.codes_by_tile(self.streams.tiles_of(Side::Key))
        {
            let full = tiles.start + span.full_tiles(&page);
            for some in split_range(tiles.start..full, keys.tiles_at_once()) {
                let cursor = &TileCursor {
                    page: &page,
                    in_page: span.page_tile(some.start),
                    in_span: some.start,
                    count: some.len(),
                    prefetch: self.prefetch.next_share(Side::Key),
                };
                keys.score_tiles(self.job.simd, cursor, &mut self.codes, &mut self.scores);
            }
            tiles.start = full;
        }
        for tile in tiles {
            self.prefetch.next_step();
            let wanted = span.wanted_of(tile);
            let queries = match rows.row_space() {
                RowSpace::Raw => &self.queries.raw,
                RowSpace::Coefficient => &self.queries.folded,
            };
            let dim = queries.len() / self.states.len();
            let (first, count) = (span.first + wanted.start, wanted.len());
            let floats =
                rows.float_rows(first, count, grow_buffer(&mut self.tile, wanted.len() * dim))?;
            for piece in split_range(0..wanted.len(), SCORE_TOKENS) {
                self.prefetch.next_step();
                let rows = floats.slice_rows(dim, piece.clone());
                let scores = StridedRows {
                    values: self.scores.tail_mut(wanted.start + piece.start),
                    stride: SPAN,
                };
                self.job.simd.score_rows(dim, queries, rows, scores);
            }
        }
        let streams = self.streams.tiles_of(Side::Key).into_iter();
        if let Some(keys) = &self.keys {
            for (rest, token) in streams.flat_map(|streams| streams.rests_of(span)) {
                keys.add_outlier(rest, token, &mut self.scores);
            }
        }
        Ok(())
    }

    /// Decodes the key that is looked at, where the span has it.
    fn keep_probed_key(
        &mut self,
        keys: &RowReader<'_>,
        span: &TokenSpan,
    ) -> Result<(), BackendError> {
        let Some(probe) = &mut self.probe else { return Ok(()) };
        let (reader, tiles) = (self.job.reader, self.streams.tiles_of(Side::Key));
        let side = reader.codec.head_codec(reader.layer, Side::Key, self.unit.head);
        probe.keep_key(side, keys, tiles, span)
    }

    /// Adds the weighted values of the span's tokens.
    fn add_values(&mut self, rows: &RowReader<'_>, span: &TokenSpan) -> Result<(), BackendError> {
        let mut tiles = span.tile_range();
        if let Some(values) = &mut self.values {
            let streams = self.streams.tiles_of(Side::Value);
            let page = rows.codes_by_tile(streams);
            let count = page.as_ref().map_or(0, |page| span.full_tiles(page));
            // By reference: a copy waits for the stores of what it copies.
            if let Some(page) = page.as_ref().filter(|_| count > 0) {
                let full = tiles.start..tiles.start + count;
                raise_weights(&mut self.scores, rows, span, full.clone());
                for (row, loss) in self.losses.iter_mut().enumerate() {
                    let sum = self.scores.total_weight(row, &full);
                    loss.add_weights(self.scores.largest_weight(row), sum, count);
                }
                for some in split_range(full, values.tiles_at_once()) {
                    let cursor = &TileCursor {
                        page,
                        in_page: span.page_tile(some.start),
                        in_span: some.start,
                        count: some.len(),
                        prefetch: self.prefetch.next_share(Side::Value),
                    };
                    let (codes, sums) = (&mut self.codes, &mut self.sums);
                    values.add_tiles(self.job.simd, cursor, codes, &self.scores, sums);
                }
                tiles.start += count;
            }
            for (rest, token) in streams.into_iter().flat_map(|streams| streams.rests_of(span)) {
                values.add_outlier(rest, token, &self.scores);
            }
        }
        for tile in tiles {
            self.accumulate_decoded(rows, span, tile)?;
        }
        Ok(())
    }

    /// Decodes the wanted rows of a tile and adds them.
    fn accumulate_decoded(
        &mut self,
        rows: &RowReader<'_>,
        span: &TokenSpan,
        tile: usize,
    ) -> Result<(), BackendError> {
        let wanted = span.wanted_of(tile);
        let dim = self.states[0].raw.len();
        let (first, count) = (span.first + wanted.start, wanted.len());
        let floats =
            rows.float_rows(first, count, grow_buffer(&mut self.tile, wanted.len() * dim))?;
        let space = rows.row_space();
        let seen = |row: usize| {
            let seen = self.scores.seen_tokens(row);
            let seen = seen.start.max(wanted.start)..seen.end.min(wanted.end);
            if seen.is_empty() { wanted.start..wanted.start } else { seen }
        };
        let mut first = 0;
        // Rows that see the same tokens go together.
        for states in self.states.chunks_mut(ROWS) {
            let mut rest = states;
            while !rest.is_empty() {
                let tokens = seen(first);
                let same = (1..rest.len()).take_while(|row| seen(first + row) == tokens).count();
                let (block, others) = rest.split_at_mut(same + 1);
                let weights: [&[f32]; ROWS] = std::array::from_fn(|row| {
                    &self.scores.row(first + row.min(same))[tokens.clone()]
                });
                let part = tokens.start - wanted.start..tokens.end - wanted.start;
                let mut sums: [&mut [f32]; ROWS] = Default::default();
                for (sums, state) in sums.iter_mut().zip(block) {
                    *sums = sums_in_space(state, space);
                }
                for piece in split_range(part.clone(), SUM_TOKENS) {
                    self.prefetch.next_step();
                    let at = piece.start - part.start..piece.end - part.start;
                    let weights = weights.map(|weights| &weights[at.clone()]);
                    let rows = floats.slice_rows(dim, piece);
                    self.job.simd.add_weighted_rows(&weights[..=same], rows, &mut sums[..=same]);
                }
                (rest, first) = (others, first + same + 1);
            }
        }
        Ok(())
    }

    fn finish_unit(mut self, side: &HeadCodec) -> Result<UnitAnswer, BackendError> {
        let precision = effective_precision(self.job.config(), self.states.len());
        if precision == Precision::Fast {
            let magnitude = self.values.as_ref().map_or(0.0, ValueKernel::largest_value);
            let held = self.values.as_ref().and_then(ValueKernel::held_magnitudes);
            for (row, loss) in self.losses.iter_mut().enumerate() {
                loss.score = self.keys.as_ref().map_or(0.0, |keys| keys.score_loss(row));
                let losses = self.values.as_ref().map(|values| ValueLosses {
                    magnitude,
                    lost: values.joint_residual(row).abs() * magnitude,
                    folded: values.folded_loss(row),
                    bias: values.largest_bias(),
                });
                loss.take_value_losses(losses.unwrap_or_default());
                loss.held = held;
            }
        }
        if let Some(probe) = &self.probe {
            let found = probe.measure_errors(self.job, self.unit, &self.queries);
            for (loss, found) in self.losses.iter_mut().zip(&found) {
                loss.probed = *found;
            }
        }
        if let Some(values) = &self.values {
            let sums = self.sums.chunks_exact(side.dim());
            for (index, (state, sums)) in self.states.iter_mut().zip(sums).enumerate() {
                let identity = side.is_identity();
                let row = if identity { &mut state.raw } else { &mut state.coefficients };
                values.unfold_row(index, sums, row);
            }
        }
        Ok(UnitAnswer { queries: self.queries, states: self.states, losses: self.losses })
    }
}

/// Where a state keeps weighted sums of rows of that kind.
fn sums_in_space(state: &mut PartialState, space: RowSpace) -> &mut [f32] {
    match space {
        RowSpace::Raw => &mut state.raw,
        RowSpace::Coefficient => &mut state.coefficients,
    }
}

/// Multiplies weights by the gains of their rows, where kernels meet codes of raised rows.
fn raise_weights(
    scores: &mut SpanScores,
    rows: &RowReader<'_>,
    span: &TokenSpan,
    tiles: Range<usize>,
) {
    let Some(gains) = rows.as_page().and_then(PageReader::gains) else { return };
    let tokens = tiles.start * TILE..tiles.end * TILE;
    let mut factors = [1f32; SPAN];
    for token in tokens.clone() {
        factors[token] = gains.row_factor(span.first + token);
    }
    scores.multiply_weights(tokens, &factors);
}
