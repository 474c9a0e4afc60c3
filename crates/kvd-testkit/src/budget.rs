//! How far an answer may be from the truth (`docs/adr/0008-kernel-error-budget.md`).
//!
//! The yardstick is a plain reference of the same precision over the same rows: what that
//! precision costs somebody who does nothing clever. Its largest error over a question is the
//! unit; the daemon, which sums in another order, folds linear transforms into the query and splits
//! the range, may err [`SLACK`] times as far. The unit is at least one rounding of the largest
//! value involved, so that a reference that was lucky does not shrink it. On top comes the
//! rounding of the output to its dtype, which is exact.
//!
//! Which precision is a matter of the codec: f32, or f32 sums of products with f16 queries and
//! weights where the daemon multiplies a codec's codes as integers ([`ErrorPrecision`]).

use crate::reference::{
    BatchAnswer, QueryBatch, ReferenceAnswer, ReferenceArithmetic, attend_reference,
};
use crate::rows::{LayerRows, ModelShape};
use kvd_client::DType;

/// Errors of the daemon over errors of the plain reference.
pub const SLACK: f64 = 4.0;

/// The precision of the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorPrecision {
    /// f32 throughout.
    Single,
    /// f32 sums, but f16 queries and softmax weights.
    Half,
}

/// How much of the budget was used, at the worst place: 1 is all of it.
#[derive(Clone, Copy, Debug)]
pub struct BudgetUse {
    /// By outputs.
    pub out: f64,
    /// By log-sum-exps.
    pub lse: f64,
}

/// A model's shape and the precision that its codec is held to.
#[derive(Clone, Copy, Debug)]
pub struct BudgetYardstick<'a> {
    /// The shape.
    pub shape: &'a ModelShape,
    /// The precision.
    pub precision: ErrorPrecision,
}

/// Checks `answer` against the reference over `rows` (one set for each query): no output and no
/// log-sum-exp is further from the truth than the yardstick's budget.
///
/// # Panics
/// When one is, naming the place.
pub fn assert_within_precision(
    context: &str,
    yardstick: BudgetYardstick<'_>,
    question: &QueryBatch,
    answer: &BatchAnswer,
    rows: &[&LayerRows],
) -> BudgetUse {
    let shape = yardstick.shape;
    let exact = attend_reference(ReferenceArithmetic::Double, shape, question, rows);
    assert_eq!(answer.out.len(), exact.out.len(), "{context}: values in out");
    assert_eq!(answer.lse.len(), exact.lse.len(), "{context}: values in lse");
    let units = error_units(yardstick, question, rows, &exact);
    let mut used = BudgetUse { out: 0.0, lse: 0.0 };
    for (at, (got, want)) in answer.out.iter().zip(&exact.out).enumerate() {
        let allowed = SLACK * units.out + rounding_distance(question.dtype, *want);
        let error = (f64::from(*got) - want).abs();
        assert!(error <= allowed, "{context}: out[{at}] is {got}, not {want} ± {allowed:.3e}");
        used.out = used.out.max(error / allowed);
    }
    let allowed = SLACK * units.lse;
    for (at, (got, want)) in answer.lse.iter().zip(&exact.lse).enumerate() {
        if want.is_infinite() {
            assert_eq!(*got, f32::NEG_INFINITY, "{context}: lse[{at}] where nothing is visible");
            assert_zero(context, shape, answer, at);
            continue;
        }
        let error = (f64::from(*got) - want).abs();
        assert!(error <= allowed, "{context}: lse[{at}] is {got}, not {want} ± {allowed:.3e}");
        used.lse = used.lse.max(error / allowed);
    }
    used
}

/// The size of one error of the yardstick's precision.
fn error_units(
    yardstick: BudgetYardstick<'_>,
    question: &QueryBatch,
    rows: &[&LayerRows],
    exact: &ReferenceAnswer,
) -> BudgetUse {
    let BudgetYardstick { shape, precision } = yardstick;
    let single = attend_reference(ReferenceArithmetic::Single, shape, question, rows);
    let epsilon = f64::from(f32::EPSILON);
    let largest = rows.iter().flat_map(|rows| &rows.v).fold(0f32, |max, v| max.max(v.abs()));
    let finite = |lse: &&f64| lse.is_finite();
    let largest_lse = exact.lse.iter().filter(finite).fold(1f64, |max, lse| max.max(lse.abs()));
    let mut unit = BudgetUse {
        out: largest_error(&single.out, &exact.out).max(epsilon * f64::from(largest)),
        lse: largest_error(&single.lse, &exact.lse).max(epsilon * largest_lse),
    };
    if precision == ErrorPrecision::Half {
        let half = attend_reference(ReferenceArithmetic::HalfFactors, shape, question, rows);
        // One product with one factor of eleven bits.
        let rounding = 2f64.powi(-11);
        let out = largest_error(&half.out, &exact.out).max(rounding * exact.largest_value);
        let lse = largest_error(&half.lse, &exact.lse).max(rounding * exact.largest_term);
        unit = BudgetUse { out: unit.out.max(out), lse: unit.lse.max(lse) };
    }
    unit
}

fn assert_zero(context: &str, shape: &ModelShape, answer: &BatchAnswer, row: usize) {
    let dim = shape.head_dim_v as usize;
    let out = &answer.out[row * dim..(row + 1) * dim];
    assert!(out.iter().all(|value| *value == 0.0), "{context}: out where nothing is visible");
}

fn largest_error(got: &[f64], want: &[f64]) -> f64 {
    let errors = got.iter().zip(want).filter(|(_, want)| want.is_finite());
    errors.fold(0.0, |max, (got, want)| max.max((got - want).abs()))
}

/// Largest distance of `value` from its nearest neighbour in `dtype`; for f16 also the spacing of
/// its subnormal numbers.
fn rounding_distance(dtype: DType, value: f64) -> f64 {
    let (bits, least): (i32, f64) = match dtype {
        DType::F32 => (24, 0.0),
        DType::F16 => (11, 2f64.powi(-25)),
        DType::BF16 => (8, 0.0),
    };
    (value.abs() * 2f64.powi(-bits)).max(least)
}

/// Root-mean-square error of an answer's outputs relative to the reference: what the tables of
/// codec error show.
#[must_use]
pub fn relative_error(answer: &BatchAnswer, reference: &ReferenceAnswer) -> f64 {
    let pairs = answer.out.iter().zip(&reference.out);
    let (error, norm) = pairs.fold((0.0, 0.0), |(error, norm), (got, want)| {
        (error + (f64::from(*got) - want).powi(2), norm + want.powi(2))
    });
    (error / norm).sqrt()
}
