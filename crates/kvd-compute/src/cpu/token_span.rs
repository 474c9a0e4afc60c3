//! Spans: the tokens of a part that attention takes in one step, cut where tiles of its pages
//! begin.

use crate::cpu::span_scores::{SPAN, TILE};
use crate::{PlanPart, Source};
use kvd_codec::FixedCodes;
use std::ops::Range;

/// Consecutive tokens that attention takes in one step, counted in their source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TokenSpan {
    /// First row, on the bound of a tile.
    pub(crate) first: usize,
    /// The rows that are wanted, counted from `first`.
    wanted: Range<usize>,
    /// Position of row `first`; before the sequence where a fork does not own a page's first rows.
    position: i64,
}

/// The spans of a part that hold tokens of `seen`. They begin on the bounds of tiles of the page,
/// not of the part: that is how codes lie.
pub(crate) fn spans_of(
    part: &PlanPart,
    seen: Range<u32>,
) -> impl Iterator<Item = TokenSpan> + Clone + use<> {
    let origin = match part.source {
        Source::Raw { .. } => 0,
        Source::Pages { first_row, .. } => first_row as usize,
    };
    let position = i64::from(part.first_token) - origin as i64;
    let row = |token: u32| (token.max(part.first_token) - part.first_token) as usize + origin;
    let wanted = row(seen.start)..row(seen.end.min(part.end_token()));
    let start = wanted.start / TILE * TILE;
    let end = if wanted.is_empty() { start } else { wanted.end };
    (start..end).step_by(SPAN).map(move |first| TokenSpan {
        first,
        wanted: wanted.start.max(first) - first..wanted.end.min(first + SPAN) - first,
        position: position + first as i64,
    })
}

impl TokenSpan {
    /// The tiles that hold wanted rows, counted from the span's start.
    pub(crate) fn tile_range(&self) -> Range<usize> {
        self.wanted.start / TILE..self.wanted.end.div_ceil(TILE)
    }

    /// Index of a tile in its page.
    pub(crate) fn page_tile(&self, tile: usize) -> usize {
        self.first / TILE + tile
    }

    /// The wanted rows, counted in their source.
    pub(crate) fn source_rows(&self) -> Range<usize> {
        self.first + self.wanted.start..self.first + self.wanted.end
    }

    /// Whether these rows, counted from the span's start, are all that are wanted.
    pub(crate) fn is_whole(&self, rows: &Range<usize>) -> bool {
        *rows == self.wanted
    }

    /// How many tiles, from the first wanted one on, have all their tokens in the page.
    pub(crate) fn full_tiles(&self, codes: &FixedCodes<'_>) -> usize {
        let full = |tile: &usize| codes.layout.tile_tokens(self.page_tile(*tile)) == TILE;
        self.tile_range().take_while(full).count()
    }

    /// The wanted rows of a tile.
    pub(crate) fn wanted_of(&self, tile: usize) -> Range<usize> {
        self.wanted.start.max(tile * TILE)..self.wanted.end.min((tile + 1) * TILE)
    }

    /// Position of a row that is wanted, counted from the span's start.
    pub(crate) fn position_of(&self, row: usize) -> usize {
        (self.position + row as i64) as usize
    }

    /// The wanted rows whose position is in `visible`.
    pub(crate) fn visible_rows(&self, visible: &Range<u32>) -> Range<usize> {
        let row = |token: u32| usize::try_from(i64::from(token) - self.position).unwrap_or(0);
        let start = row(visible.start).max(self.wanted.start);
        let end = row(visible.end).min(self.wanted.end);
        if start < end { start..end } else { 0..0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::Extent;

    #[test]
    fn spans_cover_the_range_once_and_are_aligned_in_the_page() {
        let source = Source::Pages {
            extent: Extent { offset: 0, len: 0 },
            ends: Vec::new().into(),
            first_row: 5,
        };
        let part = PlanPart { first_token: 100, rows: 159, source };
        let rows = |seen| {
            let rows = |span: TokenSpan| {
                assert_eq!(span.first % TILE, 0);
                assert_eq!(span.position, 95 + span.first as i64);
                span.first + span.wanted.start..span.first + span.wanted.end
            };
            spans_of(&part, seen).map(rows).map(|rows| (rows.start, rows.end)).collect::<Vec<_>>()
        };
        assert_eq!(rows(0..1000), [(5, 128), (128, 164)]);
        assert_eq!(rows(130..140), [(35, 45)]);
        assert_eq!(rows(120..130), [(25, 35)]);
        assert_eq!(rows(0..100), []);
        assert_eq!(rows(259..500), []);
    }

    #[test]
    fn span_knows_its_tiles_and_who_sees_what() {
        let span = TokenSpan { first: 64, wanted: 3..70, position: 159 };
        assert_eq!(span.tile_range(), 0..3);
        assert_eq!(span.page_tile(1), 3);
        assert_eq!(span.wanted_of(0), 3..32);
        assert_eq!(span.wanted_of(2), 64..70);
        assert_eq!(span.visible_rows(&(0..1000)), 3..70);
        assert_eq!(span.visible_rows(&(170..172)), 11..13);
        assert_eq!(span.visible_rows(&(0..162)), 0..0);
        assert_eq!(TokenSpan { position: -2, ..span }.visible_rows(&(0..10)), 3..12);
    }
}
