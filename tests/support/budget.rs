//! The error budget of an engine's answers.

use crate::TestEngine;
pub use kvd_testkit::budget::*;
use kvd_testkit::reference::{BatchAnswer, QueryBatch};
use kvd_testkit::rows::LayerRows;

/// As [`assert_within_precision`] by the yardstick of the engine's codec.
///
/// # Panics
/// When a value is beyond the budget, naming the place.
pub fn assert_within_budget(
    context: &str,
    engine: &TestEngine,
    question: &QueryBatch,
    answer: &BatchAnswer,
    rows: &[&LayerRows],
) -> BudgetUse {
    let yardstick = BudgetYardstick { shape: &engine.shape, precision: engine.yardstick };
    assert_within_precision(context, yardstick, question, answer, rows)
}
