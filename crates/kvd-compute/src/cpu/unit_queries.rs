//! The query rows of one unit of attention, times the scale, as given and folded.

use crate::BackendError;
use crate::cpu::attend_job::{AttendJob, AttendUnit, group_size, payload_row};
use crate::cpu::loss::{all_finite, largest_magnitude};
use kvd_codec::{HeadCodec, RowSpace};

/// The queries of a unit, once as given and once folded into coefficient space.
pub(super) struct UnitQueries {
    /// Times the scale, `[rows, dim]`.
    pub(super) raw: Vec<f32>,
    /// In coefficient space.
    pub(super) folded: Vec<f32>,
    /// Summands of the scores of coefficient pages.
    pub(super) offsets: Vec<f32>,
    /// Summands of the scores of raw rows.
    zeros: Vec<f32>,
    dim: usize,
}

impl UnitQueries {
    /// # Errors
    /// When a query times the scale is beyond f32, as given or folded.
    pub(super) fn new(
        job: &AttendJob<'_>,
        unit: &AttendUnit<'_>,
        side: &HeadCodec,
    ) -> Result<Self, BackendError> {
        let dim = side.dim();
        let scale = job.plan.score_scale(dim);
        let rows = unit.token_count() * group_size(job);
        let mut raw = Vec::with_capacity(rows * dim);
        for row in 0..rows {
            let start = payload_row(job, unit, row) * dim;
            raw.extend(job.q[start..start + dim].iter().map(|value| value * scale));
        }
        let mut folded = raw.clone();
        let offsets = side.fold_queries(&mut folded);
        let queries = Self { raw, folded, offsets, zeros: vec![0.0; rows], dim };
        let beyond = (0..rows).find(|row| !queries.is_finite(*row));
        beyond.map_or(Ok(queries), |row| {
            Err(BackendError::query_overflow(job.plan, payload_row(job, unit, row), dim))
        })
    }

    /// Takes the rows from `row` on out of these.
    pub(super) fn split_off_rows(&mut self, row: usize) -> Self {
        Self {
            raw: self.raw.split_off(row * self.dim),
            folded: self.folded.split_off(row * self.dim),
            offsets: self.offsets.split_off(row),
            zeros: self.zeros.split_off(row),
            dim: self.dim,
        }
    }

    /// One row, as keys of that space meet it.
    pub(super) fn row(&self, space: RowSpace, row: usize) -> &[f32] {
        let rows = match space {
            RowSpace::Raw => &self.raw,
            RowSpace::Coefficient => &self.folded,
        };
        &rows[row * self.dim..(row + 1) * self.dim]
    }

    /// The largest magnitude of a row, as given or folded.
    pub(super) fn largest_in_row(&self, row: usize) -> f32 {
        [RowSpace::Raw, RowSpace::Coefficient]
            .map(|space| largest_magnitude(self.row(space, row)))
            .into_iter()
            .fold(0f32, f32::max)
    }

    fn is_finite(&self, row: usize) -> bool {
        all_finite(self.row(RowSpace::Raw, row))
            && all_finite(self.row(RowSpace::Coefficient, row))
            && self.offsets[row].is_finite()
    }

    /// Summands of the scores of keys of that space.
    pub(super) fn offsets_of(&self, space: RowSpace) -> &[f32] {
        match space {
            RowSpace::Raw => &self.zeros,
            RowSpace::Coefficient => &self.offsets,
        }
    }
}
