//! `polar(..)` as a spec asks for it.

use super::HeadQuantizer;
use super::bind::{HeadBinder, SideBinding, mismatch_error};
use super::polar::Polar;
use super::registry::QuantizerSpec;
use crate::CodecError;
use crate::page::id;
use crate::parse::{Argument, ParseResult, QuantizerWord, SpecCursor};
use kvd_core::{DType, RopePairing};
use std::fmt;
use std::sync::Arc;

/// Angles and radii as a spec asks for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolarSpec {
    /// Bits of the angle, 1 to 8.
    pub angle: u8,
    /// Bits of the radius, 1 to 8.
    pub radius: u8,
    /// Tokens that share a pair's scale; `None` takes one scale per pair for all tokens from the
    /// calibration, as the paper does at 4+4 bits.
    pub group: Option<u16>,
}

impl QuantizerSpec for PolarSpec {
    fn spec_names() -> &'static [&'static str] {
        &["polar()"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        let (mut angle, mut radius, mut group) = (None, None, None);
        for Argument { start, name, value_start, value } in cursor.parse_arguments()? {
            match name {
                "a" => angle = Some(cursor.parse_at(value_start, value, "angle bits")?),
                "r" => radius = Some(cursor.parse_at(value_start, value, "radius bits")?),
                "g" => group = Some(cursor.parse_at(value_start, value, "tokens per group")?),
                _ => return cursor.fail_at(start, format!("polar has no argument {name:?}")),
            }
        }
        match (angle, radius) {
            (Some(angle), Some(radius)) => Ok(Self { angle, radius, group }),
            _ => cursor.fail_at(word.start, "polar needs a= and r="),
        }
    }

    fn page_id(&self, _native: DType) -> u8 {
        id::POLAR
    }

    fn check_parameters(&self) -> Result<(), String> {
        let Self { angle: a, radius: r, group } = *self;
        if !(1..=8).contains(&a) || !(1..=8).contains(&r) {
            return Err(format!("polar(a={a},r={r}): a and r must be 1 to 8"));
        }
        if group == Some(0) {
            return Err("polar g=0: must be at least 1".to_owned());
        }
        Ok(())
    }

    fn code_count(&self) -> Option<u32> {
        Some(1 << (self.angle.min(8) + self.radius.min(8)))
    }

    fn codes_per_row(&self, dim: usize) -> usize {
        dim / 2
    }

    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        Polar::step_bytes(self.group, tokens, dim)
    }

    fn is_fitted(&self) -> bool {
        self.group.is_none()
    }

    fn bind_side<'a>(&self, side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        let pairing = side.geometry.rope_pairing;
        // Radii belong to pairs of channels.
        if let Some(fitted) = side.fitted_for.filter(|fitted| fitted.rope_pairing != pairing) {
            let was = fitted.rope_pairing;
            let reason =
                format!("its radii are of {was:?} rope pairs, the model's are {pairing:?}");
            return Err(mismatch_error(reason));
        }
        let (bits, group) = ([self.angle, self.radius], self.group);
        Ok(Box::new(move |index, hash| {
            hash.update(&[u8::from(pairing == RopePairing::Interleaved)]);
            let Some(group) = group else {
                let pairs = side.geometry.head_dim(side.side) / 2;
                let radii = side.head_tensor(|part| &part.radius, index, pairs, "radii")?;
                radii.iter().for_each(|r| hash.update(&r.to_le_bytes()));
                let polar = Polar::with_radii(pairing, bits, radii);
                let negative = || mismatch_error(format!("a radius of {} is negative", side.side));
                return Ok(Arc::new(polar.ok_or_else(negative)?) as Arc<dyn HeadQuantizer>);
            };
            Ok(Arc::new(Polar::with_groups(pairing, bits, group)) as Arc<dyn HeadQuantizer>)
        }))
    }
}

impl fmt::Display for PolarSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { angle, radius, group } = self;
        write!(f, "polar(a={angle},r={radius}")?;
        group.map_or(Ok(()), |group| write!(f, ",g={group}"))?;
        f.write_str(")")
    }
}
