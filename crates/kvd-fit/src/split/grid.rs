//! Steps of grids that share their bits.

use super::{HeadError, OpenCodec, OpenSide, RatedCodec, SplitRequest, error_factors, other_codec};
use crate::grid::{FittedGains, GridSide};
use kvd_codec::fitting::{GridTensors, SideCalibration};
use kvd_codec::{CalibrationError, CodecSpec, SideSpec};
use kvd_core::Side;

/// The common factor of all steps is searched from the reciprocal of this to this,
const COMMON_MAX: f64 = 256.0;
/// halving the ratio's logarithm so often.
const HALVINGS: u32 = 16;

fn grid_side(open: &OpenSide) -> GridSide<'_> {
    let gains = FittedGains { side: open.fitted.side, gains: &open.fitted.gain };
    GridSide::new(&open.geometry, gains, &open.heads)
}

fn close_side(
    open: &OpenSide,
    spec: &SideSpec,
    grid: GridTensors,
    split: Vec<f32>,
) -> SideCalibration {
    let fitted = spec.fitted_text();
    SideCalibration { fitted, grid: Some(grid), split, ..open.fitted.clone() }
}

/// One step for a side, in relation to the weights of its heads.
pub(super) fn split_evenly(
    open: &OpenCodec<'_>,
    spec: &CodecSpec,
) -> Result<Vec<SideCalibration>, CalibrationError> {
    let parts = open.both_sides().map(|(side, open)| {
        let side_spec = spec.side(side);
        let grid = grid_side(open).fit_rate(super::asked_bits(side_spec)?)?;
        Ok(close_side(open, side_spec, grid, Vec::new()))
    });
    parts.into_iter().collect()
}

pub(super) fn list_errors(
    open: &OpenCodec<'_>,
    of: RatedCodec<'_>,
) -> Result<Vec<HeadError>, CalibrationError> {
    let mut heads = Vec::new();
    for (side, of_side) in open.both_sides() {
        let steps = &GridPart::find_part(of, side)?.grid.steps;
        let errors = grid_side(of_side).unit_errors(steps).into_iter().zip(steps);
        let errors = errors.map(|(error, step)| error * f64::from(*step).powi(2));
        heads.extend(open.name_heads(side, errors));
    }
    Ok(heads)
}

/// Moves the steps of single heads, and all of them until both sides take their bits.
pub(super) fn split_by_costs(
    open: &OpenCodec<'_>,
    asked: &SplitRequest<'_>,
) -> Result<Vec<SideCalibration>, CalibrationError> {
    let SplitRequest { from, costs, bits_share } = *asked;
    let grids = open.both_sides().map(|(_, open)| grid_side(open));
    let (mut before, mut heads) = (Vec::new(), Vec::new());
    let mut budget = 0.0;
    for (side, grid) in Side::BOTH.into_iter().zip(&grids) {
        let GridPart { grid: tensors, split } = GridPart::find_part(from, side)?;
        budget +=
            bits_share * grid.budget_bits(f64::from(super::asked_bits(from.spec.side(side))?));
        heads.extend(open.name_heads(side, grid.unit_errors(&tensors.steps).into_iter()));
        before.push(StepsBefore { steps: &tensors.steps, split });
    }
    let factors = error_factors(&heads, costs);
    let factors = factors.split_at(before[0].steps.len());
    let factors = [factors.0, factors.1];
    let try_common = |common: f64| {
        let sides = grids.iter().zip(&before).zip(factors).map(|((grid, before), factors)| {
            let steps = before.steps.iter().zip(factors);
            let steps = steps.map(|(step, factor)| (f64::from(*step) * factor * common) as f32);
            grid.try_steps(steps.collect())
        });
        sides.collect::<Vec<_>>()
    };
    let (mut fine, mut coarse) = (COMMON_MAX.recip(), COMMON_MAX);
    let mut best = None;
    for _ in 0..HALVINGS {
        let middle = (fine * coarse).sqrt();
        let trials = try_common(middle);
        let bits: f64 = grids.iter().zip(&trials).map(|(grid, trial)| grid.token_bits(trial)).sum();
        if bits <= budget {
            coarse = middle;
            best = Some(trials);
        } else {
            fine = middle;
        }
    }
    let trials = best.unwrap_or_else(|| try_common(coarse));
    let sides = open.both_sides().into_iter().zip(&grids).zip(before).zip(trials);
    let parts = sides.map(|((((side, open), grid), before), trial)| {
        let tensors = grid.check_steps(trial.tensors)?;
        let split = before.split_of(&tensors.steps);
        Ok(close_side(open, from.spec.side(side), tensors, split))
    });
    parts.collect()
}

/// A calibration's grid of one side.
struct GridPart<'a> {
    grid: &'a GridTensors,
    split: &'a [f32],
}

impl<'a> GridPart<'a> {
    fn find_part(codec: RatedCodec<'a>, side: Side) -> Result<Self, CalibrationError> {
        let part = codec.side_part(side);
        let part =
            part.and_then(|part| Some(Self { grid: part.grid.as_ref()?, split: &part.split }));
        part.ok_or_else(|| other_codec(codec.spec))
    }
}

/// Steps that are about to move.
struct StepsBefore<'a> {
    steps: &'a [f32],
    /// In relation to an even split; empty for that itself.
    split: &'a [f32],
}

impl StepsBefore<'_> {
    /// How steps compare with those of an even split.
    fn split_of(&self, steps: &[f32]) -> Vec<f32> {
        let moved = steps.iter().zip(self.steps).map(|(now, before)| now / before);
        let before = self.split.iter().copied().chain(std::iter::repeat(1.0));
        moved.zip(before).map(|(moved, before)| moved * before).collect()
    }
}
