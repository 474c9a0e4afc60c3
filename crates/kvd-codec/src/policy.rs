//! Overrides: another side spec for some layers or heads, so that one codec is a whole policy.
//!
//! `k[layer=0-1,head=2]=raw` keeps the keys of KV head 2 in layers 0 and 1 raw. Where several
//! overrides name a head, the last one holds.

use crate::{CodecSpec, SideSpec};
use kvd_core::{Geometry, LayerIndex, Side};
use std::fmt;
use std::ops::RangeInclusive;

/// A side spec for some layers and heads, in place of the codec's own.
#[derive(Clone, Debug, PartialEq)]
pub struct SpecOverride {
    /// Keys or values.
    pub side: Side,
    /// Layers; `None` is all of them.
    pub layers: Option<RangeInclusive<u32>>,
    /// KV heads; `None` is all of them.
    pub heads: Option<RangeInclusive<u32>>,
    /// The spec that holds there.
    pub spec: SideSpec,
}

impl SpecOverride {
    fn covers_head(&self, side: Side, layer: LayerIndex, head: usize) -> bool {
        let within = |range: &Option<RangeInclusive<u32>>, index: usize| {
            range
                .as_ref()
                .is_none_or(|range| u32::try_from(index).is_ok_and(|index| range.contains(&index)))
        };
        self.side == side && within(&self.layers, layer.0 as usize) && within(&self.heads, head)
    }

    /// Tests that the ranges lie in the geometry.
    pub(crate) fn check_ranges(&self, geometry: &Geometry) -> Result<(), String> {
        let parts = [
            (&self.layers, geometry.layers, "layers"),
            (&self.heads, geometry.kv_heads, "KV heads"),
        ];
        for (range, count, what) in parts {
            if range.as_ref().is_some_and(|range| *range.end() >= count) {
                return Err(format!("override {self}: the model has {count} {what}"));
            }
        }
        Ok(())
    }
}

impl fmt::Display for SpecOverride {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.side)?;
        let mut comma = "";
        for (name, range) in [("layer", &self.layers), ("head", &self.heads)] {
            let Some(range) = range else { continue };
            write!(f, "{comma}{name}={}", range.start())?;
            if range.start() != range.end() {
                write!(f, "-{}", range.end())?;
            }
            comma = ",";
        }
        write!(f, "]={}", self.spec)
    }
}

impl CodecSpec {
    /// The spec of one head's side.
    #[must_use]
    pub fn side_at(&self, side: Side, layer: LayerIndex, head: usize) -> &SideSpec {
        let last = self.overrides.iter().rev().find(|o| o.covers_head(side, layer, head));
        last.map_or_else(|| self.side(side), |o| &o.spec)
    }

    /// Every spec of a side: the codec's own, then those of overrides, none twice.
    #[must_use]
    pub fn side_specs(&self, side: Side) -> Vec<&SideSpec> {
        let mut variants = vec![self.side(side)];
        for o in self.overrides.iter().filter(|o| o.side == side) {
            if !variants.contains(&&o.spec) {
                variants.push(&o.spec);
            }
        }
        variants
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = "# keys of the first layers matter most
        k=smooth+hadamard/vq(d=4,b=8); v=vq(d=4,b=8) # two bits
        recent=128;
        k[layer=0-1]=fp8; k[layer=1,head=0]=raw;
        v[head=1-3]=fp8";

    #[test]
    fn the_last_override_that_names_a_head_holds() {
        let text = POLICY.replace("# two bits", ";");
        let spec: CodecSpec = text.parse().unwrap();
        let at = |side, layer, head| spec.side_at(side, LayerIndex(layer), head).to_string();
        assert_eq!(at(Side::Key, 0, 0), "fp8");
        assert_eq!(at(Side::Key, 1, 0), "raw");
        assert_eq!(at(Side::Key, 1, 1), "fp8");
        assert_eq!(at(Side::Key, 2, 0), "smooth+hadamard/vq(d=4,b=8)");
        assert_eq!(at(Side::Value, 7, 0), "vq(d=4,b=8)");
        assert_eq!(at(Side::Value, 7, 3), "fp8");
        assert_eq!(spec.side_specs(Side::Key).len(), 3);
        assert_eq!(
            spec.to_string(),
            "k=smooth+hadamard/vq(d=4,b=8); v=vq(d=4,b=8); recent=128; k[layer=0-1]=fp8; \
             k[layer=1,head=0]=raw; v[head=1-3]=fp8"
        );
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }

    #[test]
    fn errors_point_at_the_character() {
        for (text, position, part) in [
            (POLICY, 111, "expected ';'"),
            ("k=raw; v=raw; k[]=raw", 16, "layer or head"),
            ("k=raw; v=raw; k[row=1]=raw", 16, "layer or head"),
            ("k=raw; v=raw; k[layer=1,layer=2]=raw", 24, "twice"),
            ("k=raw; v=raw; k[layer=2-1]=raw", 22, "ends before"),
            ("k=raw; v=raw; k[layer=x]=raw", 22, "is not a number"),
            ("k=raw; v=raw; k[layer=1=raw", 23, "expected ']'"),
            ("k=raw; v=raw; sink[layer=1]=raw", 19, "expected '='"),
            ("k[layer=1]=raw; v=raw", 21, "k= is missing"),
        ] {
            let error = text.parse::<CodecSpec>().unwrap_err();
            assert!(error.message.contains(part), "{text:?}: {error}");
            assert_eq!(error.position, position, "{text:?}: {error}");
        }
    }
}
