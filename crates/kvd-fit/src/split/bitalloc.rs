//! Widths of bit allocations that share their bits.
//!
//! Each bit goes where it saves most, over the heads of both sides, whose errors are counted in
//! units of the split.

use super::{HeadError, OpenCodec, OpenSide, RatedCodec, SplitRequest, error_factors, other_codec};
use crate::bitalloc::{BitAllocSide, FittedBits, fit_widths};
use crate::quantizer::FitTarget;
use kvd_codec::fitting::{BitAllocTensors, SideCalibration};
use kvd_codec::{CalibrationError, CodecSpec, SideSpec};
use kvd_core::Side;

fn bit_side<'a>(open: &'a OpenSide, spec: &SideSpec) -> BitAllocSide<'a> {
    let (side, transforms) = (open.fitted.side, &spec.transforms);
    // Widths take no chance.
    let target = FitTarget { geometry: &open.geometry, side, transforms, seed: 0 };
    BitAllocSide::new(target, &open.heads)
}

fn close_side(
    open: &OpenSide,
    spec: &SideSpec,
    bits: FittedBits,
    split: Vec<f32>,
) -> SideCalibration {
    let mut fitted = SideCalibration { fitted: spec.fitted_text(), split, ..open.fitted.clone() };
    bits.permute_rows(&mut fitted.matrix, open.geometry.head_dim(fitted.side));
    fitted.bitalloc = Some(bits.tensors);
    fitted
}

/// Both sides with the bits that their own specs ask for.
pub(super) fn split_evenly(
    open: &OpenCodec<'_>,
    spec: &CodecSpec,
) -> Result<Vec<SideCalibration>, CalibrationError> {
    let parts = open.both_sides().map(|(side, open)| {
        let side_spec = spec.side(side);
        let mut alone = [bit_side(open, side_spec)];
        let budget_bits = alone[0].budget_bits(super::asked_bits(side_spec)?);
        fit_widths(&mut alone, budget_bits);
        let [bits] = alone.map(BitAllocSide::into_tensors);
        Ok(close_side(open, side_spec, bits?, Vec::new()))
    });
    parts.into_iter().collect()
}

pub(super) fn list_errors(
    open: &OpenCodec<'_>,
    of: RatedCodec<'_>,
) -> Result<Vec<HeadError>, CalibrationError> {
    let mut heads = Vec::new();
    for (side, of_side) in open.both_sides() {
        let bits = bit_side(of_side, of.spec.side(side));
        let errors = bits.unit_errors(find_tensors(of, side)?).into_iter();
        let errors = errors.zip(bits.head_weights()).map(|(error, weight)| error * weight * weight);
        heads.extend(open.name_heads(side, errors));
    }
    Ok(heads)
}

/// Shares the bits of both sides among all heads.
pub(super) fn split_by_costs(
    open: &OpenCodec<'_>,
    asked: &SplitRequest<'_>,
) -> Result<Vec<SideCalibration>, CalibrationError> {
    let SplitRequest { from, costs, bits_share } = *asked;
    let mut sides = open.both_sides().map(|(side, open)| bit_side(open, from.spec.side(side)));
    let (mut heads, mut units) = (Vec::new(), Vec::new());
    let mut budget_bits = 0.0;
    for (side, bits) in Side::BOTH.into_iter().zip(&sides) {
        let tensors = find_tensors(from, side)?;
        // What a side asks for and no whole group of coefficients takes is not spent here either.
        budget_bits += tensors.widths.iter().map(|width| f64::from(*width)).sum::<f64>();
        let errors = bits.unit_errors(tensors);
        // As much as the side's mean head errs: with costs alike the split is about the even one.
        let mean = errors.iter().sum::<f64>() / errors.len().max(1) as f64;
        let unit = if mean > 0.0 { mean } else { 1.0 };
        heads.extend(open.name_heads(side, errors.iter().map(|error| error / unit)));
        units.push(unit.sqrt());
    }
    let factors = error_factors(&heads, costs);
    let mut rest = &factors[..];
    for (bits, unit) in sides.iter_mut().zip(units) {
        let (own, after) = rest.split_at(bits.head_count());
        bits.scale_weights(&own.iter().map(|factor| factor * unit).collect::<Vec<_>>());
        rest = after;
    }
    fit_widths(&mut sides, bits_share * budget_bits);
    let closed = open.both_sides().into_iter().zip(sides).map(|((side, open), bits)| {
        let bits = bits.into_tensors()?;
        let before = &from.side_part(side).ok_or_else(|| other_codec(from.spec))?.split;
        let split = split_of(find_tensors(from, side)?, before, &bits.tensors);
        Ok(close_side(open, from.spec.side(side), bits, split))
    });
    closed.collect()
}

fn find_tensors<'a>(
    codec: RatedCodec<'a>,
    side: Side,
) -> Result<&'a BitAllocTensors, CalibrationError> {
    let tensors = codec.side_part(side).and_then(|part| part.bitalloc.as_ref());
    tensors.ok_or_else(|| other_codec(codec.spec))
}

/// By head: two to the bits of a coefficient that it has fewer than under an even split, which
/// differs from `from` by `before`, or not at all.
fn split_of(from: &BitAllocTensors, before: &[f32], now: &BitAllocTensors) -> Vec<f32> {
    let dim = from.widths.len() / from.bounds.len().max(1);
    let mean = |widths: &[u8]| {
        widths.iter().map(|width| f32::from(*width)).sum::<f32>() / widths.len() as f32
    };
    let heads = from.widths.chunks(dim).zip(now.widths.chunks(dim));
    let before = before.iter().copied().chain(std::iter::repeat(1.0));
    heads
        .zip(before)
        .map(|((from, now), before)| before * (mean(from) - mean(now)).exp2())
        .collect()
}
