//! Tokens of samples that come again: a prompt that was sent many times, or padding by one token.
//! Their rows are of few bits and take part in every mean, so that a fit that counted each copy
//! would give all other rows more bits than were asked for
//! (`docs/adr/0020-tables-from-a-prior.md`).
//!
//! A text repeats tokens too, and with them the values of the first layer, whose keys differ by
//! their positions. So a token counts once only where key and value are those of an earlier one,
//! and a value alone only where it makes up much of its head.

use crate::SampleKind;
use crate::outliers::is_zero;
use crate::row_block::RowBlock;
use crate::samples::Samples;
use kvd_core::{LayerIndex, Side};
use std::borrow::Cow;
use std::collections::HashMap;

/// Copies count as long as they are at most one in so many rows: where a text begins anew its first
/// tokens are those of before.
const ONE_IN: usize = 16;
/// As many copies of a value count in any case.
const COPIES_MIN: usize = 64;

/// Rows of a head that a fit looks at.
#[derive(Clone, Debug)]
pub(crate) struct VariedRows<'a> {
    /// `[rows, dim]`; as they were given where few repeat.
    pub(crate) rows: Cow<'a, [f32]>,
    /// Rows that are left out, since they repeat others.
    pub(crate) repeated: usize,
}

impl<'a> VariedRows<'a> {
    /// Keeps the rows that `kept` says, all without it.
    pub(crate) fn of_rows(rows: &'a [f32], dim: usize, kept: Option<&[bool]>) -> Self {
        let Some(kept) = kept else { return Self { rows: Cow::Borrowed(rows), repeated: 0 } };
        let of_kept = rows.chunks_exact(dim).zip(kept).filter(|of| *of.1);
        let rows = of_kept.flat_map(|of| of.0).copied().collect();
        Self { rows: Cow::Owned(rows), repeated: kept.iter().filter(|kept| !**kept).count() }
    }
}

impl Samples {
    /// Rows of a kind without those that repeat others; empty outside the geometry.
    pub(crate) fn varied_rows(
        &self,
        layer: LayerIndex,
        kind: SampleKind,
        head: usize,
    ) -> VariedRows<'_> {
        let [key_dim, value_dim] = Side::BOTH.map(|side| self.geometry().head_dim(side));
        match kind {
            SampleKind::Queries => {
                let queries = self.queries(layer, head);
                let kept = keep_first_ones(&[RowBlock { rows: queries, dim: key_dim }]);
                VariedRows::of_rows(queries, key_dim, kept.as_deref())
            }
            SampleKind::Keys => {
                let kept = self.varied_tokens(layer, head);
                VariedRows::of_rows(self.rows(layer, Side::Key, head), key_dim, kept.as_deref())
            }
            SampleKind::Values => {
                let values = self.rows(layer, Side::Value, head);
                let kept = self.varied_tokens(layer, head);
                let kept = keep_few_copies(RowBlock { rows: values, dim: value_dim }, kept);
                VariedRows::of_rows(values, value_dim, kept.as_deref())
            }
        }
    }

    /// Which tokens of a head have a key and a value of their own; none where all count.
    pub(crate) fn varied_tokens(&self, layer: LayerIndex, head: usize) -> Option<Vec<bool>> {
        let sides = Side::BOTH.map(|side| RowBlock {
            rows: self.rows(layer, side, head),
            dim: self.geometry().head_dim(side),
        });
        // Without its value a key says by its position which token it is of.
        let paired = sides[0].count_tokens() == sides[1].count_tokens();
        keep_first_ones(if paired { &sides } else { &sides[..1] })
    }
}

/// The first token with the same rows on all sides, by token; none for zeros, which are left out
/// in any case.
fn first_equals(sides: &[RowBlock<'_>]) -> Vec<Option<usize>> {
    let mut first_by_hash = HashMap::new();
    let find_first = |token: usize| {
        if sides.iter().all(|side| is_zero(side.row_of(token))) {
            return None;
        }
        let hashes = sides.iter().map(|side| side.hash_row(token));
        let hash = hashes.fold(0, |all: u64, hash| all.rotate_left(32) ^ hash);
        let first = *first_by_hash.entry(hash).or_insert(token);
        // Rows of one hash that differ are no copies of each other.
        let same = sides.iter().all(|side| side.has_equal(first, token));
        Some(if same { first } else { token })
    };
    (0..sides[0].count_tokens()).map(find_first).collect()
}

/// The first of equal tokens where the others are more than [`ONE_IN`]; none where all count.
fn keep_first_ones(sides: &[RowBlock<'_>]) -> Option<Vec<bool>> {
    let firsts = first_equals(sides);
    let full = firsts.iter().flatten().count();
    let is_copy = |(token, first): (usize, &Option<usize>)| first.is_some_and(|at| at != token);
    let copies = firsts.iter().enumerate().filter(|of| is_copy(*of)).count();
    (copies * ONE_IN > full).then(|| firsts.iter().enumerate().map(|of| !is_copy(of)).collect())
}

/// Keeps, of each row that is more than [`ONE_IN`] of those kept so far, as many copies as that
/// share of the others comes to.
fn keep_few_copies(side: RowBlock<'_>, kept: Option<Vec<bool>>) -> Option<Vec<bool>> {
    let is_kept = |token: usize| kept.as_ref().is_none_or(|kept| kept[token]);
    let firsts = first_equals(&[side]);
    let of_kept = || firsts.iter().enumerate().filter(|of| is_kept(of.0)).filter_map(|of| *of.1);
    let mut copies = HashMap::new();
    of_kept().for_each(|first| *copies.entry(first).or_insert(0usize) += 1);
    let full = of_kept().count();
    copies.retain(|_, count| *count * ONE_IN > full && *count > COPIES_MIN);
    if copies.is_empty() {
        return kept;
    }
    let others = full - copies.values().sum::<usize>();
    let most = (others / ONE_IN).max(COPIES_MIN);
    let mut left: HashMap<usize, usize> = copies.keys().map(|first| (*first, most)).collect();
    let mut keep_token = |token: usize| {
        let of_row = firsts[token].and_then(|first| left.get_mut(&first));
        let counts = is_kept(token) && of_row.as_ref().is_none_or(|left| **left > 0);
        if let Some(left) = of_row.filter(|_| counts) {
            *left -= 1;
        }
        counts
    };
    Some((0..side.count_tokens()).map(&mut keep_token).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIM: usize = 4;

    /// Rows that all differ.
    fn rows(count: usize, of: usize) -> Vec<f32> {
        (0..count * DIM).map(|i| (i + 1) as f32 + 1e6 * of as f32).collect()
    }

    fn kept(rows: &[f32]) -> Option<Vec<bool>> {
        keep_first_ones(&[RowBlock { rows, dim: DIM }])
    }

    #[test]
    fn copies_count_once_where_they_are_many() {
        let ordinary = rows(160, 0);
        assert_eq!(kept(&ordinary), None);
        for (copies, counted) in [(9, false), (11, true), (500, true)] {
            let mut all = ordinary.clone();
            all.extend(ordinary[..5 * DIM].iter().cycle().take(copies * DIM));
            let kept = kept(&all);
            assert_eq!(kept.is_some(), counted, "{copies}");
            let left = kept.map_or(160, |kept| kept.iter().filter(|kept| **kept).count());
            assert_eq!(left, 160, "{copies}");
        }
        // Zeros are not told from each other here.
        let padded = [&ordinary[..], &[0.0; 64 * DIM]].concat();
        assert_eq!(kept(&padded), None);
        assert_eq!(kept(&[]), None);
    }

    #[test]
    fn tokens_with_the_same_value_and_other_keys_are_others() {
        let (keys, value) = (rows(40, 0), rows(1, 7));
        let values = value.repeat(40);
        let sides = [&keys[..], &values[..]].map(|rows| RowBlock { rows, dim: DIM });
        assert_eq!(keep_first_ones(&sides), None);
        assert!(keep_first_ones(&sides[1..]).is_some());
    }

    #[test]
    fn one_value_is_at_most_a_sixteenth_of_the_others() {
        let values = [rows(1, 1).repeat(3000), rows(1600, 0), rows(1, 1).repeat(20)].concat();
        let side = RowBlock { rows: &values, dim: DIM };
        let kept = keep_few_copies(side, None).unwrap();
        assert_eq!(kept.iter().filter(|kept| **kept).count(), 1600 + 100);
        // Without those that are left out already.
        let half: Vec<bool> = (0..side.count_tokens()).map(|token| token >= 2950).collect();
        assert_eq!(keep_few_copies(side, Some(half.clone())), Some(half));
        // Few values that come often are the tokens of a text.
        let letters = rows(20, 0).repeat(50);
        assert_eq!(keep_few_copies(RowBlock { rows: &letters, dim: DIM }, None), None);
    }
}
