//! `uniform(..)` as a spec asks for it: width of a level, groups, and where the levels stand.

use super::HeadQuantizer;
use super::bind::{HeadBinder, SideBinding};
use super::hybrid::Hybrid;
use super::registry::{QuantizerSpec, share_quantizer};
use super::symmetric::Symmetric;
use super::uniform::Uniform;
use crate::CodecError;
use crate::page::id;
use crate::parse::{Argument, ParseResult, QuantizerWord, SpecCursor};
use kvd_core::DType;
use std::fmt;

/// The axis along which the values that share one scale lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupAxis {
    /// One channel: a group spans tokens.
    Channel,
    /// One token: a group spans channels.
    Token,
    /// The page: one group for all of it.
    Block,
}

/// How wide one uniform level is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UniformStep {
    /// `2^bits - 1` steps cover the group's range (KIVI); 1 to 8 bits.
    Bits(u8),
    /// The step is this fraction of the group's range (KVComp §3.1.1); 1/255 to 1.
    Relative(f32),
}

/// Where a group's levels stand (InnerQ §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UniformMode {
    /// From the group's minimum to its maximum (eq. 10 to 12).
    Asym,
    /// Around zero, a sign and a magnitude each (eq. 13): one level less than twice as many.
    Sym,
    /// Per group whichever of the two has the smaller squared error (§4.1.2).
    Hybrid,
}

/// Equidistant levels for groups of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UniformSpec {
    /// Width of a level.
    pub step: UniformStep,
    /// Which values form a group.
    pub axis: GroupAxis,
    /// Values per group; `None` is the whole extent of the axis in the page.
    pub group: Option<u16>,
    /// Where the levels stand.
    pub mode: UniformMode,
    /// Part of a group's values that keep their magnitude: larger ones are cut to the largest that
    /// does (OSCAR §3.2). Above 0, below 1; `None` cuts nothing. Asymmetric levels of groups inside
    /// a token alone.
    pub clip: Option<f32>,
}

/// How a group of values gets uniform levels, for encoders outside this crate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UniformLevels {
    /// A step's part of what a group spans.
    pub step_part: f32,
    /// Part of a group's values that keep their magnitude, where others are cut to it first.
    pub clip: Option<f32>,
}

impl UniformStep {
    /// Levels of a group, or of its magnitudes where signs are apart.
    fn level_count(self) -> u32 {
        match self {
            Self::Bits(bits) => 1 << bits.min(16),
            Self::Relative(rel) => relative_levels(rel),
        }
    }
}

/// Codes `0..=ceil(1/rel)`. The small slack keeps 1/0.02f32 (just above 50) at 50.
fn relative_levels(rel: f32) -> u32 {
    (1.0 / f64::from(rel) - 1e-4).ceil().clamp(1.0, 65534.0) as u32 + 1
}

impl UniformSpec {
    /// The quantizer without its mode.
    fn base_quantizer(&self) -> Uniform {
        let top = (self.step.level_count() - 1) as u16;
        Uniform::new(self.step, self.axis, self.group, top).with_clip(self.clip)
    }
}

impl QuantizerSpec for UniformSpec {
    fn spec_names() -> &'static [&'static str] {
        &["uniform()"]
    }

    fn parse_spec(cursor: &mut SpecCursor<'_>, word: QuantizerWord<'_>) -> ParseResult<Self> {
        let (mut step, mut axis, mut group, mut mode) = (None, None, None, UniformMode::Asym);
        let mut clip = None;
        for Argument { start, name, value_start, value } in cursor.parse_arguments()? {
            match name {
                "b" | "rel" if step.is_some() => {
                    return cursor.fail_at(start, "b and rel exclude each other");
                }
                "b" => {
                    step = Some(UniformStep::Bits(cursor.parse_at(value_start, value, "bits")?))
                }
                "rel" => {
                    let rel = cursor.parse_at(value_start, value, "the range")?;
                    step = Some(UniformStep::Relative(rel));
                }
                "clip" => {
                    clip = Some(cursor.parse_at(value_start, value, "a part of the values")?)
                }
                "g" => group = Some(cursor.parse_at(value_start, value, "values per group")?),
                "axis" => {
                    axis = Some(match value {
                        "channel" => GroupAxis::Channel,
                        "token" => GroupAxis::Token,
                        "block" => GroupAxis::Block,
                        _ => return cursor.fail_at(value_start, "axis is channel, token or block"),
                    });
                }
                "mode" => {
                    mode = match value {
                        "asym" => UniformMode::Asym,
                        "sym" => UniformMode::Sym,
                        "hybrid" => UniformMode::Hybrid,
                        _ => return cursor.fail_at(value_start, "mode is asym, sym or hybrid"),
                    };
                }
                _ => return cursor.fail_at(start, format!("uniform has no argument {name:?}")),
            }
        }
        let Some(step) = step else {
            return cursor.fail_at(word.start, "uniform needs b= or rel=");
        };
        let Some(axis) = axis else { return cursor.fail_at(word.start, "uniform needs axis=") };
        Ok(Self { step, axis, group, mode, clip })
    }

    fn page_id(&self, _native: DType) -> u8 {
        match self.mode {
            UniformMode::Asym => id::UNIFORM,
            UniformMode::Sym => id::SYMMETRIC,
            UniformMode::Hybrid => id::HYBRID,
        }
    }

    fn check_parameters(&self) -> Result<(), String> {
        match *self {
            Self { step: UniformStep::Bits(b), .. } if !(1..=8).contains(&b) => {
                Err(format!("uniform b={b}: must be 1 to 8"))
            }
            Self { step: UniformStep::Relative(rel), .. }
                if !(1.0 / 255.0..=1.0).contains(&rel) =>
            {
                Err(format!("uniform rel={rel}: must be 1/255 to 1"))
            }
            Self { group: Some(0), .. } => Err("uniform g=0: must be at least 1".to_owned()),
            Self { axis: GroupAxis::Block, group: Some(_), .. } => {
                Err("uniform axis=block takes no g: the group is the page".to_owned())
            }
            Self { clip: Some(clip), .. } if !(clip > 0.0 && clip < 1.0) => {
                Err(format!("uniform clip={clip}: must be above 0 and below 1"))
            }
            Self { clip: Some(_), axis, mode, .. }
                if axis != GroupAxis::Token || mode != UniformMode::Asym =>
            {
                Err("uniform clip= is for axis=token and mode=asym".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn code_count(&self) -> Option<u32> {
        let levels = self.step.level_count();
        Some(if self.mode == UniformMode::Sym { 2 * levels - 1 } else { levels })
    }

    fn scale_bytes(&self, tokens: usize, dim: usize) -> usize {
        let base = self.base_quantizer();
        match self.mode {
            UniformMode::Asym => base.scale_bytes(tokens, dim),
            UniformMode::Sym => Symmetric { base }.scale_bytes(tokens, dim),
            UniformMode::Hybrid => Hybrid { base }.scale_bytes(tokens, dim),
        }
    }

    fn bind_side<'a>(&self, _side: SideBinding<'a>) -> Result<HeadBinder<'a>, CodecError> {
        let base = self.base_quantizer();
        Ok(match self.mode {
            UniformMode::Asym => share_quantizer(base),
            UniformMode::Sym => share_quantizer(Symmetric { base }),
            UniformMode::Hybrid => share_quantizer(Hybrid { base }),
        })
    }
}

impl fmt::Display for UniformSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            UniformStep::Bits(bits) => write!(f, "uniform(b={bits}")?,
            UniformStep::Relative(rel) => write!(f, "uniform(rel={rel}")?,
        }
        if let Some(group) = self.group {
            write!(f, ",g={group}")?;
        }
        let axis = match self.axis {
            GroupAxis::Channel => "channel",
            GroupAxis::Token => "token",
            GroupAxis::Block => "block",
        };
        let mode = match self.mode {
            UniformMode::Asym => "",
            UniformMode::Sym => ",mode=sym",
            UniformMode::Hybrid => ",mode=hybrid",
        };
        write!(f, ",axis={axis}{mode}")?;
        self.clip.map_or(Ok(()), |clip| write!(f, ",clip={clip}"))?;
        f.write_str(")")
    }
}
