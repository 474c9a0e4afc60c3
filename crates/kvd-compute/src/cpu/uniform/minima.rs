//! The share of weighted sums that comes from minima of values by token, kept apart from the codes:
//! it is the same for all channels of a group, and summed once a group.

use crate::cpu::int_dot::VECTOR_ROWS as ROWS;

/// Operands of one call: `tokens` weights of a few rows, each
/// [`SPAN`](crate::cpu::span_scores::SPAN) after the one before, and the scales of `channels`
/// channels each.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused, reason = "no kernel reads them"))]
pub(super) struct WeightedTokens<'a> {
    pub(super) weights: &'a [f32],
    pub(super) rows: usize,
    pub(super) tokens: usize,
    pub(super) steps: &'a [u8],
    pub(super) minima: &'a [u8],
    pub(super) channels: usize,
}

/// Sums of minima of a unit's rows, in so many lanes.
pub(super) struct MinimaSums<const LANES: usize> {
    /// `[blocks of rows, groups, rows]`.
    sums: Vec<[f32; LANES]>,
    channels: usize,
    groups: usize,
}

impl<const LANES: usize> MinimaSums<LANES> {
    /// No sums yet, for rows of `dim` channels in whole groups of `channels`.
    pub(super) fn new(rows: usize, dim: usize, channels: usize) -> Self {
        let groups = dim / channels;
        let sums = vec![[0.0; LANES]; rows.next_multiple_of(ROWS) * groups];
        Self { sums, channels, groups }
    }

    /// The sums of each block of rows, `[groups, rows]`.
    pub(super) fn row_blocks(&mut self) -> impl Iterator<Item = &mut [[f32; LANES]]> {
        self.sums.chunks_mut(ROWS * self.groups)
    }

    /// Where those of row `row` are, by group.
    fn of_row(&self, row: usize) -> impl Iterator<Item = usize> + use<LANES> {
        let first = row / ROWS * ROWS * self.groups + row % ROWS;
        (0..self.groups).map(move |group| first + group * ROWS)
    }

    /// Scales row `row` of the sums, and `sums`, which is that row of the codes.
    pub(super) fn scale_row(&mut self, row: usize, sums: &mut [f32], factor: f32) {
        sums.iter_mut().for_each(|sum| *sum *= factor);
        for at in self.of_row(row) {
            self.sums[at].iter_mut().for_each(|sum| *sum *= factor);
        }
    }

    /// Adds row `row` of the sums, and `sums`, which is that row of the codes, to `out`.
    pub(super) fn unfold_row(&self, row: usize, sums: &[f32], out: &mut [f32]) {
        let groups = out.chunks_exact_mut(self.channels).zip(sums.chunks_exact(self.channels));
        for ((out, sums), at) in groups.zip(self.of_row(row)) {
            let base: f32 = self.sums[at].iter().sum();
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum + base);
        }
    }
}
