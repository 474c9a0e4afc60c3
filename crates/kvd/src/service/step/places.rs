//! Where each row of a step is: strides and blocks of an engine's memory, tested once. Pure
//! arithmetic.

use kvd_proto::RequestError;
use kvd_proto::domain::{RowLayout, RowTable};
use std::ops::Range;

/// Rows of one side of a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowShape {
    pub(super) layers: u32,
    pub(super) tokens: u32,
    pub(super) heads: u32,
    /// Bytes of one row.
    pub(super) row_bytes: u64,
}

impl RowShape {
    /// Bytes of one layer, dense.
    pub(super) fn layer_bytes(&self) -> u64 {
        u64::from(self.tokens) * self.token_bytes()
    }

    fn token_bytes(&self) -> u64 {
        u64::from(self.heads) * self.row_bytes
    }

    /// How many rows there are.
    pub(super) fn count_rows(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.tokens) * u64::from(self.heads)
    }
}

/// Consecutive tokens at one stride.
#[derive(Clone, Copy, Debug)]
struct TokenSpan {
    /// Bytes from the offset of the layer.
    at: u64,
    /// Tokens, at least 1.
    tokens: u32,
}

/// Bytes that are dense both in the engine's memory and in rows of `[tokens, heads, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowRun {
    /// First byte in the engine's memory.
    pub(super) at: u64,
    /// First byte in the dense rows of the layer.
    pub(super) dense: usize,
    pub(super) bytes: usize,
}

/// Rows whose every byte is inside the memory.
#[derive(Clone, Debug)]
pub(super) struct RowPlaces {
    shape: RowShape,
    offset: u64,
    head_stride: u64,
    token_stride: u64,
    layer_stride: u64,
    spans: Vec<TokenSpan>,
}

impl RowPlaces {
    /// Fills in dense strides and tests that all rows are inside `memory_bytes`.
    ///
    /// # Errors
    /// A row outside, a table that does not fit the tokens, or strides beyond 2^64.
    pub(super) fn resolve_layout(
        field: &'static str,
        layout: &RowLayout,
        shape: RowShape,
        memory_bytes: u64,
    ) -> Result<Self, RequestError> {
        let refuse = |reason: String| RequestError::Invalid { field, reason };
        let or_dense = |stride: u64, dense: Option<u64>| match stride {
            0 => dense.ok_or_else(|| refuse("its strides are beyond 2^64".to_owned())),
            stride => Ok(stride),
        };
        let head_stride = or_dense(layout.head_stride, Some(shape.row_bytes))?;
        let token_stride =
            or_dense(layout.token_stride, head_stride.checked_mul(shape.heads.into()))?;
        let spans = match &layout.table {
            None => vec![TokenSpan { at: 0, tokens: shape.tokens }],
            Some(table) => {
                let dense = token_stride.checked_mul(table.block_tokens.into());
                let block_stride = or_dense(table.block_stride, dense)?;
                table_spans(table, shape.tokens, TableStrides { block_stride, token_stride })
                    .map_err(refuse)?
            }
        };
        let layer_stride = match (layout.layer_stride, &layout.table) {
            (0, Some(_)) if shape.layers > 1 => {
                let reason = "layer_stride is missing; rows in blocks have no dense layers";
                return Err(refuse(reason.to_owned()));
            }
            (0, Some(_)) => 0,
            (0, None) => or_dense(0, token_stride.checked_mul(shape.tokens.into()))?,
            (stride, _) => stride,
        };
        let offset = layout.offset;
        let places = Self { shape, offset, head_stride, token_stride, layer_stride, spans };
        let end = places.end_byte();
        if end > u128::from(memory_bytes) {
            let reason = format!("its rows end at byte {end} of a memory of {memory_bytes}");
            return Err(refuse(reason));
        }
        Ok(places)
    }

    pub(super) fn row_shape(&self) -> &RowShape {
        &self.shape
    }

    /// The rows of some of the tokens, counted in the part, by themselves.
    pub(super) fn cut_tokens(&self, tokens: Range<u32>) -> Self {
        let mut first = 0;
        let mut spans = Vec::new();
        for span in &self.spans {
            let end = first + span.tokens;
            let (start, stop) = (tokens.start.max(first), tokens.end.min(end));
            if start < stop {
                let at = span.at + u64::from(start - first) * self.token_stride;
                spans.push(TokenSpan { at, tokens: stop - start });
            }
            first = end;
        }
        let shape = RowShape { tokens: tokens.end - tokens.start, ..self.shape };
        Self { shape, spans, ..*self }
    }

    /// One past the last byte of the row that ends last. Nothing here is beyond 128 bits.
    fn end_byte(&self) -> u128 {
        let last = |count: u32, stride: u64| u128::from(count - 1) * u128::from(stride);
        let spans = self
            .spans
            .iter()
            .map(|span| u128::from(span.at) + last(span.tokens, self.token_stride));
        u128::from(self.offset)
            + spans.max().unwrap_or(0)
            + last(self.shape.layers, self.layer_stride)
            + last(self.shape.heads, self.head_stride)
            + u128::from(self.shape.row_bytes)
    }

    /// Visits the rows of a layer, counted in the part, as runs that are as long as they are dense.
    ///
    /// # Errors
    /// The first that `visit` answers.
    pub(super) fn visit_runs<E>(
        &self,
        layer: u32,
        mut visit: impl FnMut(RowRun) -> Result<(), E>,
    ) -> Result<(), E> {
        let RowShape { heads, row_bytes, .. } = self.shape;
        let token_bytes = self.shape.token_bytes();
        let dense_heads = heads == 1 || self.head_stride == row_bytes;
        let dense_tokens = dense_heads && self.token_stride == token_bytes;
        let layer_at = self.offset + u64::from(layer) * self.layer_stride;
        let mut first = 0u64;
        for span in &self.spans {
            let (at, tokens) = (layer_at + span.at, u64::from(span.tokens));
            let dense = |token: u64| ((first + token) * token_bytes) as usize;
            if dense_tokens {
                let bytes = (tokens * token_bytes) as usize;
                visit(RowRun { at, dense: dense(0), bytes })?;
            } else {
                for token in 0..tokens {
                    let (at, dense) = (at + token * self.token_stride, dense(token));
                    if dense_heads {
                        visit(RowRun { at, dense, bytes: token_bytes as usize })?;
                        continue;
                    }
                    for head in 0..u64::from(heads) {
                        let (at, dense) =
                            (at + head * self.head_stride, dense + (head * row_bytes) as usize);
                        visit(RowRun { at, dense, bytes: row_bytes as usize })?;
                    }
                }
            }
            first += tokens;
        }
        Ok(())
    }
}

struct TableStrides {
    block_stride: u64,
    token_stride: u64,
}

/// The tokens of each block that a table names.
fn table_spans(
    table: &RowTable,
    tokens: u32,
    strides: TableStrides,
) -> Result<Vec<TokenSpan>, String> {
    let RowTable { block_tokens, blocks, first_row, .. } = table;
    if first_row >= block_tokens {
        return Err(format!("first_row {first_row} is not in a block of {block_tokens} tokens"));
    }
    let end = u64::from(*first_row) + u64::from(tokens);
    let wanted = end.div_ceil(u64::from(*block_tokens));
    if blocks.len() as u64 != wanted {
        let given = blocks.len();
        return Err(format!("{given} blocks; {tokens} tokens from row {first_row} take {wanted}"));
    }
    let (mut row, mut left) = (*first_row, tokens);
    let span = |block: &u32| {
        let tokens = left.min(block_tokens - row);
        let at = u64::from(*block).checked_mul(strides.block_stride);
        let in_block = u64::from(row).checked_mul(strides.token_stride);
        let at = at.zip(in_block).and_then(|(at, in_block)| at.checked_add(in_block));
        (row, left) = (0, left - tokens);
        let at = at.ok_or_else(|| format!("block {block} begins beyond 2^64"))?;
        Ok(TokenSpan { at, tokens })
    };
    blocks.iter().map(span).collect()
}

/// A byte that two rows of a step have, if any do.
pub(super) fn find_overlap<'a>(all: impl IntoIterator<Item = &'a RowPlaces>) -> Option<u64> {
    let mut runs = Vec::new();
    for places in all {
        for layer in 0..places.shape.layers {
            let noted = places.visit_runs(layer, |run| {
                runs.push(run.at..run.at + run.bytes as u64);
                Ok::<_, std::convert::Infallible>(())
            });
            let Ok(()) = noted;
        }
    }
    // They come in ascending series, which this sort finds.
    runs.sort_by_key(|run| run.start);
    runs.windows(2).find(|pair| pair[0].end > pair[1].start).map(|pair| pair[1].start)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: RowShape = RowShape { layers: 2, tokens: 5, heads: 2, row_bytes: 8 };

    fn resolve(layout: &RowLayout, memory: u64) -> Result<RowPlaces, String> {
        let places = RowPlaces::resolve_layout("k", layout, SHAPE, memory);
        places.map_err(|error| error.to_string())
    }

    /// Where each row of a layer is, by token and head.
    fn rows(places: &RowPlaces, layer: u32) -> Vec<u64> {
        let mut rows = vec![u64::MAX; 10];
        let noted = places.visit_runs(layer, |run| {
            for at in (0..run.bytes).step_by(8) {
                rows[(run.dense + at) / 8] = run.at + at as u64;
            }
            Ok::<_, std::convert::Infallible>(())
        });
        let Ok(()) = noted;
        rows
    }

    fn paged(block_tokens: u32, first_row: u32, blocks: &[u32]) -> RowLayout {
        let blocks = blocks.to_vec();
        let table = RowTable { block_tokens, block_stride: 0, blocks, first_row };
        RowLayout { layer_stride: 1000, table: Some(table), ..RowLayout::default() }
    }

    #[test]
    fn strides_of_zero_are_dense_and_others_are_taken_as_they_are() {
        let dense = resolve(&RowLayout::from_offset(16), 16 + 160).unwrap();
        assert_eq!(rows(&dense, 1), (0..10).map(|row| 96 + 8 * row).collect::<Vec<_>>());
        // Heads outermost, as in [heads, tokens, dim].
        let strided = RowLayout {
            offset: 3,
            head_stride: 50,
            token_stride: 8,
            layer_stride: 100,
            table: None,
        };
        let places = resolve(&strided, 3 + 100 + 50 + 32 + 8).unwrap();
        let wanted = |layer: u64| {
            let row = |row: u64| 3 + 100 * layer + 50 * (row % 2) + 8 * (row / 2);
            (0..10).map(row).collect::<Vec<_>>()
        };
        assert_eq!((rows(&places, 0), rows(&places, 1)), (wanted(0), wanted(1)));
        let short = resolve(&strided, 3 + 100 + 50 + 32 + 7).unwrap_err();
        assert_eq!(short, "k: its rows end at byte 193 of a memory of 192");
    }

    #[test]
    fn tokens_go_through_the_blocks_of_a_table() {
        let places = resolve(&paged(2, 1, &[9, 0, 4]), 2000).unwrap();
        let block = |number: u64, row: u64| number * 32 + row * 16;
        let tokens = [block(9, 1), block(0, 0), block(0, 1), block(4, 0), block(4, 1)];
        let wanted: Vec<_> = tokens.iter().flat_map(|at| [1000 + at, 1000 + at + 8]).collect();
        assert_eq!(rows(&places, 1), wanted);
        let cut = places.cut_tokens(1..4);
        assert_eq!(rows(&cut, 1)[..6], wanted[2..8]);
        assert_eq!(rows(&cut, 1)[6..], [u64::MAX; 4]);
    }

    #[test]
    fn tables_that_do_not_fit_and_numbers_that_overflow_are_refused() {
        let refused = |layout: &RowLayout| resolve(layout, u64::MAX).unwrap_err();
        assert!(refused(&paged(2, 2, &[0, 1, 2])).contains("first_row 2 is not in a block of 2"));
        assert!(refused(&paged(2, 0, &[0, 1])).contains("2 blocks; 5 tokens from row 0 take 3"));
        assert!(refused(&paged(2, 0, &[0, 1, 2, 3])).contains("4 blocks"));
        let no_layers = RowLayout { layer_stride: 0, ..paged(8, 0, &[0]) };
        assert!(refused(&no_layers).contains("layer_stride is missing"));
        let mut far = paged(2, 0, &[u32::MAX, 1, 2]);
        far.table.as_mut().unwrap().block_stride = u64::MAX;
        assert!(refused(&far).contains("beyond 2^64"), "{}", refused(&far));
        let max = u64::MAX;
        for layout in [
            RowLayout::from_offset(max),
            RowLayout { head_stride: max, ..RowLayout::default() },
            RowLayout { token_stride: max, ..RowLayout::default() },
            RowLayout { layer_stride: max, offset: max, ..RowLayout::default() },
            RowLayout { token_stride: max / 2, ..RowLayout::default() },
        ] {
            refused(&layout);
        }
    }

    #[test]
    fn rows_that_meet_are_found() {
        let dense = |offset| resolve(&RowLayout::from_offset(offset), 4096).unwrap();
        assert_eq!(find_overlap([&dense(0), &dense(160)]), None);
        assert_eq!(find_overlap([&dense(0), &dense(152)]), Some(152));
        // K and V in turns, in one block: not one of their rows meets another.
        let turns = |offset| {
            let token_stride = 32;
            resolve(&RowLayout { offset, token_stride, ..RowLayout::default() }, 4096).unwrap()
        };
        assert_eq!(find_overlap([&turns(0), &turns(16)]), None);
        assert_eq!(find_overlap([&turns(0), &turns(15)]), Some(15));
        // One block twice.
        let twice = resolve(&paged(2, 0, &[3, 3, 1]), 4096).unwrap();
        assert_eq!(find_overlap([&twice]), Some(96));
        // A stride that is shorter than a row.
        let short = RowLayout { head_stride: 4, ..RowLayout::default() };
        assert!(find_overlap([&resolve(&short, 4096).unwrap()]).is_some());
    }
}
