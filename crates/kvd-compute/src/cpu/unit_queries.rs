//! The query rows of one unit of attention, times the scale, as given and folded.

use crate::BackendError;
use crate::cpu::attend_job::{AttendJob, AttendUnit, group_size, payload_row};
use crate::cpu::loss::{all_finite, largest_magnitude};
use crate::cpu::scratch::ScratchVec;
use kvd_codec::{HeadCodec, RowSpace};

/// The queries of a unit, once as given and once folded into coefficient space.
pub(super) struct UnitQueries {
    /// Times the scale, `[rows, dim]`.
    pub(super) raw: ScratchVec<f32>,
    /// In coefficient space.
    pub(super) folded: ScratchVec<f32>,
    /// Summands of the scores of coefficient pages.
    pub(super) offsets: ScratchVec<f32>,
    /// Summands of the scores of raw rows.
    zeros: ScratchVec<f32>,
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
        let mut raw = ScratchVec::with_room(rows * dim);
        for row in 0..rows {
            let start = payload_row(job, unit, row) * dim;
            raw.extend(job.q[start..start + dim].iter().map(|value| value * scale));
        }
        let mut folded = raw.clone();
        let mut offsets = ScratchVec::repeat_value(0.0, rows);
        side.fold_queries_into(&mut folded, &mut offsets);
        let queries =
            Self { raw, folded, offsets, zeros: ScratchVec::repeat_value(0.0, rows), dim };
        let beyond = (0..rows).find(|row| !queries.is_finite(*row));
        beyond.map_or(Ok(queries), |row| {
            Err(BackendError::query_overflow(job.plan, payload_row(job, unit, row), dim))
        })
    }

    /// Takes the rows from `row` on out of these.
    pub(super) fn split_off_rows(&mut self, row: usize) -> Self {
        Self {
            raw: self.raw.split_from(row * self.dim),
            folded: self.folded.split_from(row * self.dim),
            offsets: self.offsets.split_from(row),
            zeros: self.zeros.split_from(row),
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
