//! Shares the bits of a codec among layers, heads and sides by what an error costs there
//! (`docs/adr/0047-bits-by-sensitivity.md`).
//!
//! An even split lets every head of a side err by as much, relative to the head's weight, and gives
//! each side the rate that its spec asks for. A split by costs moves the errors of single heads, so
//! that both sides together take the bits of the even split. Steps and widths are parameters of
//! pages; the format of pages does not change.

mod bitalloc;
mod grid;

use crate::Samples;
use crate::calibration::{HeadFit, HeadIndex};
use crate::grid::GridHead;
use kvd_codec::fitting::SideCalibration;
use kvd_codec::{
    BitAllocSpec, Calibration, CalibrationError, CodecError, CodecSpec, GridSpec, Quantizer,
    SideSpec,
};
use kvd_core::{Geometry, LayerIndex, Side};
use std::ops::Range;

/// The root of a head's error moves by no more than this from where costs are like those of the
/// mean head.
const FACTOR_MAX: f64 = 16.0;

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

/// One side of a model whose transforms are fitted and whose bits are open.
#[derive(Clone, Debug)]
pub struct OpenSide {
    geometry: Geometry,
    /// Tensors that the transforms took from the samples.
    fitted: SideCalibration,
    heads: Vec<GridHead>,
}

impl OpenSide {
    /// Fits the transforms of `spec` as [`crate::fit_calibration`] does;
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
    /// Whether bits can be shared: both sides are grids, or both are bit allocations, and no layer
    /// or head has another spec.
    #[must_use]
    pub fn can_share(spec: &CodecSpec) -> bool {
        spec.overrides.is_empty() && shared_kind(spec).is_ok()
    }

    /// Bits per key and value that both sides together ask for; 0 for a side that cannot share.
    #[must_use]
    pub fn total_rate(spec: &CodecSpec) -> f32 {
        Side::BOTH.iter().filter_map(|side| side_rate(spec.side(*side))).map(|of| of.rate).sum()
    }

    /// The calibration of the even split: that of [`crate::fit_calibration`].
    ///
    /// # Errors
    /// When the bits of `spec` cannot be shared, or a step or scale leaves its range.
    pub fn split_evenly(&self, spec: &CodecSpec) -> Result<Calibration, CalibrationError> {
        let parts = match shared_kind(spec)? {
            SharedKind::Grid => grid::split_evenly(self, spec)?,
            SharedKind::BitAlloc => bitalloc::split_evenly(self, spec)?,
        };
        Ok(self.close_codec(parts))
    }

    /// The costs under `to` of groups whose costs were measured under `from`, another codec of the
    /// same transforms: a cost grows with the squared error. A group without error under `from`
    /// has no cost under `to`.
    ///
    /// # Errors
    /// When the bits of either cannot be shared, or its calibration is of another codec.
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

    /// The mean squared errors of rows of all heads under a calibration, in one unit for a side.
    fn list_errors(&self, of: RatedCodec<'_>) -> Result<Vec<HeadError>, CalibrationError> {
        match shared_kind(of.spec)? {
            SharedKind::Grid => grid::list_errors(self, of),
            SharedKind::BitAlloc => bitalloc::list_errors(self, of),
        }
    }

    fn both_sides(&self) -> [(Side, &OpenSide); 2] {
        [(Side::Key, self.key), (Side::Value, self.value)]
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

    /// Moves the errors of `from`, under which each head's error has the cost in `costs`, so that
    /// one more bit saves as much everywhere. Both sides together take at most `bits_share` of
    /// the bits that their specs ask for.
    ///
    /// A cost grows with the squared error, so that the best roots of errors go with the root of
    /// squared error over cost. A head without error stays as it is, one without cost errs most.
    ///
    /// # Errors
    /// When the bits of `spec` cannot be shared, `from` is not of it, or a step or scale leaves its
    /// range.
    pub fn split_by_costs(
        &self,
        spec: &CodecSpec,
        from: &Calibration,
        costs: &[GroupCost],
        bits_share: f64,
    ) -> Result<Calibration, CalibrationError> {
        let from = RatedCodec { spec, calibration: from };
        let asked = SplitRequest { from, costs, bits_share };
        let parts = match shared_kind(spec)? {
            SharedKind::Grid => grid::split_by_costs(self, &asked)?,
            SharedKind::BitAlloc => bitalloc::split_by_costs(self, &asked)?,
        };
        Ok(self.close_codec(parts))
    }

    fn close_codec(&self, parts: Vec<SideCalibration>) -> Calibration {
        Calibration::from_parts(&self.key.geometry, self.seed, parts)
    }
}

/// A codec and a calibration of it.
#[derive(Clone, Copy, Debug)]
pub struct RatedCodec<'a> {
    /// The codec.
    pub spec: &'a CodecSpec,
    /// Its calibration.
    pub calibration: &'a Calibration,
}

impl<'a> RatedCodec<'a> {
    /// The calibration's part of one side.
    fn side_part(&self, side: Side) -> Option<&'a SideCalibration> {
        self.calibration.find_side(side, &self.spec.side(side).fitted_text())
    }
}

/// The split by costs that is asked for.
struct SplitRequest<'a> {
    from: RatedCodec<'a>,
    costs: &'a [GroupCost],
    /// The share of the bits that the specs of both sides ask for.
    bits_share: f64,
}

/// The squared error of a head's rows.
struct HeadError {
    side: Side,
    layer: LayerIndex,
    head: usize,
    error: f64,
}

/// By head: how the roots of errors move, but for a factor common to all. `heads` have the errors
/// under which costs were measured, in a unit that all heads may have as much of.
fn error_factors(heads: &[HeadError], costs: &[GroupCost]) -> Vec<f64> {
    let wanted: Vec<f64> = costs.iter().map(|cost| wanted_factor(cost, heads)).collect();
    let known = || wanted.iter().filter(|factor| factor.is_normal());
    let mean =
        (known().map(|factor| factor.ln()).sum::<f64>() / known().count().max(1) as f64).exp();
    let factor = |head: &HeadError| {
        let group = costs.iter().position(|c| c.group.has_head(head.layer, head.side, head.head));
        match group.map_or(f64::NAN, |group| wanted[group] / mean) {
            moved if moved.is_nan() || moved == 0.0 => 1.0,
            moved => moved.clamp(FACTOR_MAX.recip(), FACTOR_MAX),
        }
    };
    heads.iter().map(factor).collect()
}

/// The factor of a group, in relation to other groups: infinite without cost, zero or NaN without
/// error.
fn wanted_factor(cost: &GroupCost, heads: &[HeadError]) -> f64 {
    let error = cost.group.sum_errors(heads);
    let cost = if cost.cost.is_finite() { cost.cost.max(0.0) } else { 0.0 };
    (error / cost).sqrt()
}

/// Quantizers whose bits can be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SharedKind {
    /// Grids: steps move.
    Grid,
    /// Bit allocations: widths move.
    BitAlloc,
}

/// The rate that a side asks for.
#[derive(Clone, Copy)]
struct SideRate {
    kind: SharedKind,
    /// Bits per value.
    rate: f32,
}

fn side_rate(spec: &SideSpec) -> Option<SideRate> {
    match spec.quantizer {
        Quantizer::Grid(GridSpec { rate }) => Some(SideRate { kind: SharedKind::Grid, rate }),
        Quantizer::BitAlloc(BitAllocSpec { bits }) => {
            Some(SideRate { kind: SharedKind::BitAlloc, rate: bits })
        }
        _ => None,
    }
}

/// The bits per value that a side asks for.
fn asked_bits(spec: &SideSpec) -> Result<f32, CalibrationError> {
    let shape = || CalibrationError::Shape(format!("the bits of {spec} cannot be shared"));
    side_rate(spec).map(|of| of.rate).ok_or_else(shape)
}

/// The quantizer of both sides.
fn shared_kind(spec: &CodecSpec) -> Result<SharedKind, CalibrationError> {
    let [key, value] = Side::BOTH.map(|side| side_rate(spec.side(side)).map(|of| of.kind));
    let reason = "bits are shared by two grids or two bit allocations";
    let shape =
        || CalibrationError::Shape(format!("the bits of {spec} cannot be shared: {reason}"));
    key.filter(|key| Some(*key) == value).ok_or_else(shape)
}

/// The error of a calibration that is not of the codec.
fn other_codec(spec: &CodecSpec) -> CalibrationError {
    CalibrationError::Shape(format!("the calibration is not of {spec}"))
}
