//! Results of a unit of attention, which merge with those of other units of the same rows.

use crate::PartialState;
use crate::cpu::loss::RowLoss;
use crate::cpu::scratch::ScratchVec;
use crate::cpu::unit_queries::UnitQueries;

/// Results of a unit.
pub(super) struct UnitAnswer {
    pub(super) queries: UnitQueries,
    pub(super) states: ScratchVec<PartialState>,
    pub(super) losses: ScratchVec<RowLoss>,
}

impl UnitAnswer {
    /// Takes the rows from `row` on out of these.
    pub(super) fn split_off_rows(&mut self, row: usize) -> Self {
        Self {
            queries: self.queries.split_off_rows(row),
            states: self.states.split_from(row),
            losses: self.losses.split_from(row),
        }
    }

    /// Adds what another unit of the same rows came to.
    pub(super) fn merge_answer(&mut self, other: &Self) {
        let theirs = other.states.iter().zip(&other.losses);
        let mine = self.states.iter_mut().zip(&mut self.losses);
        for ((state, loss), (other, other_loss)) in mine.zip(theirs) {
            loss.merge_loss(other_loss, [state.max, other.max]);
            state.merge(other);
        }
    }
}
