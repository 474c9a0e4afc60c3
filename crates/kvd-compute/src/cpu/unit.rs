//! One unit of attention: some query rows of one KV head over some parts. Spans of tokens go
//! through three steps, scores, softmax, weighted sum; the first and last by the side's fused
//! kernel where it has one, else over rows decoded to f32.

use super::attend::{Job, Unit, group, payload_row};
use super::fused::{Keys, Place, Values};
use super::scores::{SPAN, Scores, TILE};
use super::simd::{self, BLOCK_ROWS, Precision};
use super::softmax;
use super::tile::{Rows, Span, spans};
use crate::{BackendError, PartialState, PlanPart};
use kvd_codec::{HeadSide, Space};
use kvd_core::Side;
use std::ops::Range;

/// The queries of a unit, once as given and once folded into coefficient space.
struct Queries {
    raw: Vec<f32>,
    folded: Vec<f32>,
    /// What to add to scores of coefficient pages.
    offsets: Vec<f32>,
}

impl Queries {
    fn new(job: &Job<'_>, unit: &Unit<'_>, side: &HeadSide) -> Self {
        let dim = side.dim();
        let scale = job.plan.scale.unwrap_or_else(|| 1.0 / (dim as f32).sqrt());
        let rows = unit.q.len() * group(job);
        let (mut raw, mut folded) = (Vec::with_capacity(rows * dim), vec![0.0; rows * dim]);
        let mut offsets = Vec::with_capacity(rows);
        for (row, folded) in folded.chunks_exact_mut(dim).enumerate() {
            let start = payload_row(job, unit, row) * dim;
            raw.extend(job.q[start..start + dim].iter().map(|value| value * scale));
            offsets.push(side.fold_query(&raw[row * dim..], folded));
        }
        Self { raw, folded, offsets }
    }
}

/// Bytes of each side of the next part that one step asks for.
const PREFETCH_BYTES: usize = 1024;

/// What a unit keeps from span to span.
struct Walk<'a> {
    job: &'a Job<'a>,
    unit: &'a Unit<'a>,
    queries: Queries,
    states: Vec<PartialState>,
    scores: Scores,
    keys: Option<Keys>,
    values: Option<Values>,
    /// Sums of the fused value side, `[rows, dim]` in its order.
    sums: Vec<f32>,
    /// Codes of a span, a byte each.
    codes: Vec<u8>,
    /// Rows of a tile, decoded.
    tile: Vec<f32>,
    /// What of the next part was not asked for yet, by side.
    ahead: [&'a [u8]; 2],
}

pub(super) fn run(job: &Job<'_>, unit: &Unit<'_>) -> Result<Vec<PartialState>, BackendError> {
    let head = |side| job.reader.codec.head(job.reader.layer, side, unit.head);
    let (key_side, value_side) = (head(Side::Key), head(Side::Value));
    let queries = Queries::new(job, unit, key_side);
    let rows = queries.offsets.len();
    let dim_v = value_side.dim();
    let fast = job.precision == Precision::Fast;
    let keys = fast.then(|| Keys::new(job.simd, key_side, &queries.folded)).flatten();
    let values = fast.then(|| Values::new(job.simd, value_side)).flatten();
    let mut walk = Walk {
        job,
        unit,
        queries,
        states: (0..rows).map(|_| PartialState::empty(dim_v)).collect(),
        scores: Scores::new(rows),
        keys,
        sums: if values.is_some() { vec![0.0; rows * dim_v] } else { Vec::new() },
        values,
        codes: vec![0; SPAN * key_side.dim().max(dim_v)],
        tile: vec![0.0; TILE * key_side.dim().max(dim_v)],
        ahead: [&[]; 2],
    };
    walk.parts()?;
    Ok(walk.finish(value_side))
}

impl<'a> Walk<'a> {
    fn parts(&mut self) -> Result<(), BackendError> {
        // The union of what the unit's query tokens see; spans outside are never decoded.
        let seen = self.unit.query.visible(self.unit.q.start).start
            ..self.unit.query.visible(self.unit.q.end - 1).end;
        for (index, part) in self.unit.parts.iter().enumerate() {
            let mut spans = spans(part, seen.clone()).peekable();
            if spans.peek().is_none() {
                continue;
            }
            let reader = self.job.reader;
            let open = |side| reader.open(&part.source, part.rows, side, self.unit.head);
            let (keys, values) = (open(Side::Key)?, open(Side::Value)?);
            let next = self.unit.parts.get(index + 1);
            let bytes = |side| {
                let read = |part: &'a PlanPart| {
                    reader.bytes(&part.source, part.rows, side, self.unit.head)
                };
                next.map_or(&[][..], read)
            };
            self.ahead = Side::BOTH.map(bytes);
            for span in spans {
                self.score(&keys, &span)?;
                self.prefetch();
                self.weigh(&span, keys.space(), values.space());
                self.accumulate(&values, &span)?;
            }
        }
        Ok(())
    }

    /// Asks for a few more lines of the next part: many at once would wait for one another.
    fn prefetch(&mut self) {
        for bytes in &mut self.ahead {
            let (now, later) = bytes.split_at(bytes.len().min(PREFETCH_BYTES));
            simd::prefetch(now);
            *bytes = later;
        }
    }

    /// Writes the scores of the span's tokens.
    fn score(&mut self, rows: &Rows<'_>, span: &Span) -> Result<(), BackendError> {
        for tile in span.tiles() {
            self.prefetch();
            if let (Some(keys), Some(page)) = (&mut self.keys, rows.full_tile(span, tile)) {
                let place = Place { page, in_page: span.tile(tile), in_span: tile };
                keys.tile(self.job.simd, place, &mut self.codes, &mut self.scores);
                continue;
            }
            let wanted = span.wanted_of(tile);
            let queries = match rows.space() {
                Space::Raw => &self.queries.raw,
                Space::Coefficient => &self.queries.folded,
            };
            let dim = queries.len() / self.states.len();
            let decoded = &mut self.tile[..wanted.len() * dim];
            rows.decode_at(span.first + wanted.start, wanted.len(), decoded)?;
            let scores = (self.scores.tail_mut(wanted.start), SPAN);
            self.job.simd.scores(dim, queries, decoded, scores);
        }
        Ok(())
    }

    /// Turns scores into weights, online (Milakov and Gimelshein): sums seen so far are scaled
    /// down when a larger score comes.
    fn weigh(&mut self, span: &Span, key_space: Space, value_space: Space) {
        let (simd, cap, group) = (self.job.simd, self.job.plan.soft_cap, group(self.job));
        for (row, state) in self.states.iter_mut().enumerate() {
            let visible = self.unit.query.visible(self.unit.q.start + (row / group) as u32);
            let seen = span.visible(&visible);
            self.scores.see(row, seen.clone());
            if seen.is_empty() {
                continue;
            }
            let scores = &mut self.scores.row_mut(row)[seen];
            let offset = match key_space {
                Space::Raw => 0.0,
                Space::Coefficient => self.queries.offsets[row],
            };
            let max = softmax::finish(simd, scores, offset, cap);
            if max > state.max && state.weight_sum > 0.0 && !self.sums.is_empty() {
                let factor = (state.max - max).exp();
                let dim = state.raw.len();
                self.sums[row * dim..][..dim].iter_mut().for_each(|sum| *sum *= factor);
            }
            state.raise_max(max);
            let (sum, largest) = softmax::weigh(simd, scores, state.max);
            self.scores.largest[row] = largest;
            state.weight_sum += sum;
            if value_space == Space::Coefficient {
                state.coefficient_weight += sum;
            }
        }
    }

    /// Adds the weighted values of the span's tokens.
    fn accumulate(&mut self, rows: &Rows<'_>, span: &Span) -> Result<(), BackendError> {
        let mut tiles = span.tiles();
        self.prefetch();
        if let Some(values) = &mut self.values {
            let full = tiles.clone().take_while(|tile| rows.full_tile(span, *tile).is_some());
            let count = full.count();
            if let Some(page) = rows.full_tile(span, tiles.start).filter(|_| count > 0) {
                let place = Place { page, in_page: span.tile(tiles.start), in_span: tiles.start };
                let (codes, sums) = (&mut self.codes, &mut self.sums);
                values.tiles(self.job.simd, (place, count), codes, &self.scores, sums);
                tiles.start += count;
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
        rows: &Rows<'_>,
        span: &Span,
        tile: usize,
    ) -> Result<(), BackendError> {
        let wanted = span.wanted_of(tile);
        let dim = self.states[0].raw.len();
        let decoded = &mut self.tile[..wanted.len() * dim];
        rows.decode_at(span.first + wanted.start, wanted.len(), decoded)?;
        let space = rows.space();
        let part = |seen: &Range<usize>| {
            (seen.start - wanted.start) * dim..(seen.end - wanted.start) * dim
        };
        let seen = |scores: &Scores, row: usize| {
            let seen = scores.seen(row);
            let seen = seen.start.max(wanted.start)..seen.end.min(wanted.end);
            if seen.is_empty() { wanted.start..wanted.start } else { seen }
        };
        for (index, states) in self.states.chunks_mut(BLOCK_ROWS).enumerate() {
            let first = index * BLOCK_ROWS;
            let of = |row: usize| seen(&self.scores, first + row);
            let same = of(0);
            if let [a, b, c, d] = states
                && (1..BLOCK_ROWS).all(|row| of(row) == same)
            {
                let weights: [&[f32]; BLOCK_ROWS] =
                    std::array::from_fn(|row| &self.scores.row(first + row)[same.clone()]);
                let acc = [a, b, c, d].map(|state| accumulator(state, space));
                self.job.simd.accumulate_block(weights, &decoded[part(&same)], acc);
                continue;
            }
            for (row, state) in states.iter_mut().enumerate() {
                let (seen, acc) = (of(row), accumulator(state, space));
                let weights = &self.scores.row(first + row)[seen.clone()];
                self.job.simd.accumulate(weights, &decoded[part(&seen)], acc);
            }
        }
        Ok(())
    }

    fn finish(mut self, side: &HeadSide) -> Vec<PartialState> {
        if let Some(values) = &self.values {
            let sums = self.sums.chunks_exact(side.dim());
            for (state, sums) in self.states.iter_mut().zip(sums) {
                let identity = side.is_identity();
                let row = if identity { &mut state.raw } else { &mut state.coefficients };
                values.unfold(sums, row);
            }
        }
        self.states
    }
}

/// Where a state keeps weighted sums of rows of that kind.
fn accumulator(state: &mut PartialState, space: Space) -> &mut [f32] {
    match space {
        Space::Raw => &mut state.raw,
        Space::Coefficient => &mut state.coefficients,
    }
}
