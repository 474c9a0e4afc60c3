//! Shares the bits of a codec among layers, heads and sides by what an error costs there
//! (`docs/adr/0047-bits-by-sensitivity.md`).
//!
//! An even split gives every head of a side one step, relative to the head's weight, and each side
//! the rate that its spec asks for. A split by costs moves the steps of single heads, so that both
//! sides together take the bits of the even split. Steps, classes and tables are parameters of
//! pages; the format of pages does not change.

use crate::calibration::{GridTensors, SideCalibration};
use crate::fit::{HeadFit, HeadIndex};
use crate::fit_grid::{FittedGains, GridHead, GridSide};
use crate::quantizer::grid::GridSpec;
use crate::{Calibration, CalibrationError, CodecError, CodecSpec, Quantizer, Samples, SideSpec};
use kvd_core::{Geometry, LayerIndex, Side};
use std::ops::Range;

/// A step moves by no more than this from where costs are like those of the mean head.
const FACTOR_MAX: f64 = 16.0;
/// The common factor of all steps is searched from the reciprocal of this to this,
const COMMON_MAX: f64 = 256.0;
/// halving the ratio's logarithm so often.
const HALVINGS: u32 = 16;

/// Heads of one side in consecutive layers, whose steps move together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadGroup {
    /// Keys or values.
    pub side: Side,
    /// Layers.
    pub layers: Range<u32>,
    /// KV heads.
    pub heads: Range<u32>,
}

impl HeadGroup {
    /// Whether a head is one of them.
    #[must_use]
    pub fn has_head(&self, layer: LayerIndex, side: Side, head: usize) -> bool {
        let head = u32::try_from(head).is_ok_and(|head| self.heads.contains(&head));
        self.side == side && self.layers.contains(&layer.0) && head
    }

    fn sum_errors(&self, heads: &[HeadError]) -> f64 {
        let own = heads.iter().filter(|head| self.has_head(head.layer, head.side, head.head));
        own.map(|head| head.error).sum()
    }
}

/// The loss that the errors of some heads make by themselves, in one unit for all groups.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupCost {
    /// The heads.
    pub group: HeadGroup,
    /// Their loss; what is no positive number counts as none.
    pub cost: f64,
}

/// One side of a model whose transforms are fitted and whose steps are open.
#[derive(Clone, Debug)]
pub struct OpenSide {
    geometry: Geometry,
    /// Tensors that the transforms took from the samples.
    fitted: SideCalibration,
    heads: Vec<GridHead>,
}

impl OpenSide {
    /// Fits the transforms of `spec`, which has a grid, as [`crate::fit_calibration`] does;
    /// `one_more` is called after each head.
    ///
    /// # Errors
    /// As [`crate::fit_calibration`].
    pub fn fit_transforms(
        side: Side,
        spec: &SideSpec,
        samples: &Samples,
        one_more: &mut dyn FnMut(),
    ) -> Result<Self, CalibrationError> {
        let geometry = samples.geometry();
        let checked = spec.check_geometry(geometry, side);
        checked.map_err(|reason| Box::new(CodecError::InvalidCodec { side, reason }))?;
        let mut fitted = SideCalibration::new(side, String::new());
        let mut heads = Vec::new();
        for layer in 0..geometry.layers {
            for head in 0..geometry.kv_heads as usize {
                let place = HeadIndex { layer, side, head };
                let fit = HeadFit::new(place, samples, &spec.transforms)?;
                let fit = fit.fit_transforms(&spec.transforms, &mut fitted)?;
                heads.push(fit.cross_fitted(&spec.transforms)?);
                one_more();
            }
        }
        Ok(Self { geometry: geometry.clone(), fitted, heads })
    }

    fn grid_side(&self) -> GridSide<'_> {
        let gains = FittedGains { side: self.fitted.side, gains: &self.fitted.gain };
        GridSide::new(&self.geometry, gains, &self.heads)
    }

    fn close_side(&self, spec: &SideSpec, grid: GridTensors, split: Vec<f32>) -> SideCalibration {
        let fitted = spec.fitted_text();
        SideCalibration { fitted, grid: Some(grid), split, ..self.fitted.clone() }
    }
}

/// Both sides of a codec, open.
#[derive(Clone, Copy, Debug)]
pub struct OpenCodec<'a> {
    /// The keys.
    pub key: &'a OpenSide,
    /// The values.
    pub value: &'a OpenSide,
    /// Seed that the calibration names.
    pub seed: u64,
}

impl OpenCodec<'_> {
    /// Whether bits can be shared: both sides are grids, and no layer or head has another spec.
    #[must_use]
    pub fn can_share(spec: &CodecSpec) -> bool {
        spec.overrides.is_empty()
            && Side::BOTH.iter().all(|side| side_rate(spec.side(*side)).is_some())
    }

    /// Bits per key and value that both sides together ask for; 0 for a side that is no grid.
    #[must_use]
    pub fn total_rate(spec: &CodecSpec) -> f32 {
        Side::BOTH.iter().filter_map(|side| side_rate(spec.side(*side))).sum()
    }

    /// The calibration of the even split: that of [`crate::fit_calibration`].
    ///
    /// # Errors
    /// When a side is no grid, or a step leaves its range.
    pub fn split_evenly(&self, spec: &CodecSpec) -> Result<Calibration, CalibrationError> {
        let parts = [self.key, self.value].into_iter().zip(Side::BOTH).map(|(open, side)| {
            let side_spec = spec.side(side);
            let grid = open.grid_side().fit_rate(grid_rate(side_spec)?)?;
            Ok(open.close_side(side_spec, grid, Vec::new()))
        });
        let parts = parts.collect::<Result<_, CalibrationError>>()?;
        Ok(Calibration { geometry: self.key.geometry.clone(), seed: self.seed, parts })
    }

    /// The costs under `to` of groups whose costs were measured under `from`, another rate of the
    /// same transforms: a cost grows with the squared error. A group without error under `from`
    /// has no cost under `to`.
    ///
    /// # Errors
    /// When a side of either has no grid.
    pub fn carry_costs(
        &self,
        costs: &[GroupCost],
        from: RatedCodec<'_>,
        to: RatedCodec<'_>,
    ) -> Result<Vec<GroupCost>, CalibrationError> {
        let [before, after] = [self.list_errors(from)?, self.list_errors(to)?];
        let carry = |cost: &GroupCost| {
            let [before, after] = [&before, &after].map(|heads| cost.group.sum_errors(heads));
            let carried = if before > 0.0 { cost.cost * after / before } else { 0.0 };
            GroupCost { group: cost.group.clone(), cost: carried }
        };
        Ok(costs.iter().map(carry).collect())
    }

    /// The squared errors of all heads under a calibration, in one unit for a side.
    fn list_errors(&self, of: RatedCodec<'_>) -> Result<Vec<HeadError>, CalibrationError> {
        let mut heads = Vec::new();
        for (side, open) in Side::BOTH.into_iter().zip([self.key, self.value]) {
            let steps = &grid_part(of, side)?.grid.steps;
            let errors = open.grid_side().unit_errors(steps).into_iter().zip(steps);
            let errors = errors.map(|(error, step)| error * f64::from(*step).powi(2));
            heads.extend(self.name_heads(side, errors));
        }
        Ok(heads)
    }

    fn name_heads(
        &self,
        side: Side,
        errors: impl Iterator<Item = f64>,
    ) -> impl Iterator<Item = HeadError> {
        let kv_heads = self.key.geometry.kv_heads as usize;
        errors.enumerate().map(move |(index, error)| HeadError {
            side,
            layer: LayerIndex((index / kv_heads) as u32),
            head: index % kv_heads,
            error,
        })
    }

    /// Moves the steps of `from`, under which each head's error has the cost in `costs`, so that
    /// one more bit saves the same everywhere. Both sides together take at most `bits_share` of
    /// the bits that their specs ask for.
    ///
    /// A cost grows with the square of a step, so that the best steps go with the root of squared
    /// error over cost. A head without error keeps its step, one without cost gets the coarsest.
    ///
    /// # Errors
    /// When a side is no grid, `from` is not of this codec, or a step leaves its range.
    pub fn split_by_costs(
        &self,
        spec: &CodecSpec,
        from: &Calibration,
        costs: &[GroupCost],
        bits_share: f64,
    ) -> Result<Calibration, CalibrationError> {
        let grids = [self.key.grid_side(), self.value.grid_side()];
        let mut before = Vec::new();
        let mut budget = 0.0;
        for (side, grid) in Side::BOTH.into_iter().zip(&grids) {
            let part = grid_part(RatedCodec { spec, calibration: from }, side)?;
            budget += bits_share * grid.budget_bits(f64::from(grid_rate(spec.side(side))?));
            before.push(StepsBefore { steps: &part.grid.steps, split: part.split });
        }
        let factors = self.step_factors(&grids, &before, costs);
        let try_common = |common: f64| {
            let sides = grids.iter().zip(&before).zip(&factors).map(|((grid, before), factors)| {
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
            let bits: f64 =
                grids.iter().zip(&trials).map(|(grid, trial)| grid.token_bits(trial)).sum();
            if bits <= budget {
                coarse = middle;
                best = Some(trials);
            } else {
                fine = middle;
            }
        }
        let trials = best.unwrap_or_else(|| try_common(coarse));
        let opens = [self.key, self.value].into_iter().zip(&grids).zip(before).zip(trials);
        let parts = opens.zip(Side::BOTH).map(|((((open, grid), before), trial), side)| {
            let tensors = grid.check_steps(trial.tensors)?;
            let split = before.split_of(&tensors.steps);
            Ok(open.close_side(spec.side(side), tensors, split))
        });
        let parts = parts.collect::<Result<_, CalibrationError>>()?;
        Ok(Calibration { geometry: self.key.geometry.clone(), seed: self.seed, parts })
    }

    /// By side and head: how steps move, but for a factor common to all.
    fn step_factors(
        &self,
        grids: &[GridSide<'_>; 2],
        before: &[StepsBefore<'_>],
        costs: &[GroupCost],
    ) -> Vec<Vec<f64>> {
        let sides = Side::BOTH.into_iter().zip(grids).zip(before);
        let heads = sides.flat_map(|((side, grid), before)| {
            self.name_heads(side, grid.unit_errors(before.steps).into_iter())
        });
        let heads: Vec<HeadError> = heads.collect();
        let wanted: Vec<f64> = costs.iter().map(|cost| wanted_factor(cost, &heads)).collect();
        let known = || wanted.iter().filter(|factor| factor.is_normal());
        let mean =
            (known().map(|factor| factor.ln()).sum::<f64>() / known().count().max(1) as f64).exp();
        let factor = |head: &HeadError| {
            let group =
                costs.iter().position(|c| c.group.has_head(head.layer, head.side, head.head));
            match group.map_or(f64::NAN, |group| wanted[group] / mean) {
                moved if moved.is_nan() || moved == 0.0 => 1.0,
                moved => moved.clamp(FACTOR_MAX.recip(), FACTOR_MAX),
            }
        };
        let factors: Vec<f64> = heads.iter().map(factor).collect();
        let keys = before[0].steps.len();
        vec![factors[..keys].to_vec(), factors[keys..].to_vec()]
    }
}

/// A codec of two grids and a calibration that has them.
#[derive(Clone, Copy, Debug)]
pub struct RatedCodec<'a> {
    /// The codec.
    pub spec: &'a CodecSpec,
    /// Its calibration.
    pub calibration: &'a Calibration,
}

/// A calibration's grid of one side.
struct GridPart<'a> {
    grid: &'a GridTensors,
    split: &'a [f32],
}

fn grid_part(codec: RatedCodec<'_>, side: Side) -> Result<GridPart<'_>, CalibrationError> {
    let RatedCodec { spec, calibration } = codec;
    let part = calibration.part(side, &spec.side(side).fitted_text());
    let part =
        part.and_then(|part| Some(GridPart { grid: part.grid.as_ref()?, split: &part.split }));
    part.ok_or_else(|| CalibrationError::Shape(format!("the calibration has no grid for {spec}")))
}

/// The squared error of a head's rows.
struct HeadError {
    side: Side,
    layer: LayerIndex,
    head: usize,
    error: f64,
}

/// The factor of a group's steps, in relation to other groups: infinite without cost, zero or NaN
/// without error. Errors are in squares of steps.
fn wanted_factor(cost: &GroupCost, heads: &[HeadError]) -> f64 {
    let error = cost.group.sum_errors(heads);
    let cost = if cost.cost.is_finite() { cost.cost.max(0.0) } else { 0.0 };
    (error / cost).sqrt()
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

fn side_rate(spec: &SideSpec) -> Option<f32> {
    match spec.quantizer {
        Quantizer::Grid(GridSpec { rate }) => Some(rate),
        _ => None,
    }
}

fn grid_rate(spec: &SideSpec) -> Result<f32, CalibrationError> {
    let shape = || CalibrationError::Shape(format!("{spec} is no grid: its bits cannot be shared"));
    side_rate(spec).ok_or_else(shape)
}
