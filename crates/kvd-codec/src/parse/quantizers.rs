//! Parsing of quantizers that have arguments.

use super::*;

impl SpecCursor<'_> {
    pub(super) fn parse_uniform(&mut self, start: usize) -> ParseResult<Quantizer> {
        let (mut step, mut axis, mut group, mut mode) = (None, None, None, UniformMode::Asym);
        for Argument { start, name, value_start, value } in self.parse_arguments()? {
            match name {
                "b" | "rel" if step.is_some() => {
                    return self.fail_at(start, "b and rel exclude each other");
                }
                "b" => step = Some(UniformStep::Bits(self.parse_at(value_start, value, "bits")?)),
                "rel" => {
                    let rel = self.parse_at(value_start, value, "the range")?;
                    step = Some(UniformStep::Relative(rel));
                }
                "g" => group = Some(self.parse_at(value_start, value, "values per group")?),
                "axis" => {
                    axis = Some(match value {
                        "channel" => GroupAxis::Channel,
                        "token" => GroupAxis::Token,
                        "block" => GroupAxis::Block,
                        _ => return self.fail_at(value_start, "axis is channel, token or block"),
                    });
                }
                "mode" => {
                    mode = match value {
                        "asym" => UniformMode::Asym,
                        "sym" => UniformMode::Sym,
                        "hybrid" => UniformMode::Hybrid,
                        _ => return self.fail_at(value_start, "mode is asym, sym or hybrid"),
                    };
                }
                _ => return self.fail_at(start, format!("uniform has no argument {name:?}")),
            }
        }
        let Some(step) = step else { return self.fail_at(start, "uniform needs b= or rel=") };
        let Some(axis) = axis else { return self.fail_at(start, "uniform needs axis=") };
        Ok(Quantizer::Uniform { step, axis, group, mode })
    }

    pub(super) fn parse_polar(&mut self, start: usize) -> ParseResult<Quantizer> {
        let (mut angle, mut radius, mut group) = (None, None, None);
        for Argument { start, name, value_start, value } in self.parse_arguments()? {
            match name {
                "a" => angle = Some(self.parse_at(value_start, value, "angle bits")?),
                "r" => radius = Some(self.parse_at(value_start, value, "radius bits")?),
                "g" => group = Some(self.parse_at(value_start, value, "tokens per group")?),
                _ => return self.fail_at(start, format!("polar has no argument {name:?}")),
            }
        }
        match (angle, radius) {
            (Some(angle), Some(radius)) => Ok(Quantizer::Polar { angle, radius, group }),
            _ => self.fail_at(start, "polar needs a= and r="),
        }
    }

    pub(super) fn parse_lloyd(&mut self, start: usize) -> ParseResult<Quantizer> {
        let mut bits = None;
        for Argument { start, name, value_start, value } in self.parse_arguments()? {
            match name {
                "b" => bits = Some(self.parse_at(value_start, value, "bits")?),
                _ => return self.fail_at(start, format!("lloyd has no argument {name:?}")),
            }
        }
        match bits {
            Some(bits) => Ok(Quantizer::Lloyd { bits }),
            None => self.fail_at(start, "lloyd needs b="),
        }
    }

    pub(super) fn parse_vq(&mut self, start: usize) -> ParseResult<Quantizer> {
        let (mut dim, mut bits) = (None, None);
        let (mut stages, mut scope) = (1, CodebookScope::Head);
        for Argument { start, name, value_start, value } in self.parse_arguments()? {
            match name {
                "d" => dim = Some(self.parse_at(value_start, value, "channels")?),
                "b" => bits = Some(self.parse_at(value_start, value, "bits")?),
                "stages" => stages = self.parse_at(value_start, value, "stages")?,
                "scope" => match CodebookScope::from_name(value) {
                    Some(known) => scope = known,
                    None => {
                        return self.fail_at(value_start, "scope is model, layer, head or group");
                    }
                },
                _ => return self.fail_at(start, format!("vq has no argument {name:?}")),
            }
        }
        match (dim, bits) {
            (Some(dim), Some(bits)) => Ok(Quantizer::Vq(VqSpec { dim, bits, stages, scope })),
            _ => self.fail_at(start, "vq needs d= and b="),
        }
    }
}
