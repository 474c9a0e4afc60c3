//! Rotary position embeddings as `config.json` describes them: at the top (`rope_theta`,
//! `rope_scaling`) or inside `rope_parameters`, once or per kind of layer.

use super::ModelConfig;
use super::keys::ConfigKeys;
use super::layers::LayerKind;
use crate::error::Result;
use serde_json::{Map, Value};

/// Base of the frequencies where a config names none.
const THETA_DEFAULT: f64 = 10_000.0;
const SUPPORTED: &str = "default, linear, llama3, yarn, dynamic and longrope";

/// Rotary embedding of one kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeSpec {
    /// Base of the frequencies.
    pub(crate) theta: f64,
    pub(crate) scaling: RopeScaling,
}

/// How frequencies are changed for texts longer than those of the first training.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RopeScaling {
    None,
    /// All frequencies over `factor`.
    Linear {
        factor: f64,
    },
    /// As [`RopeScaling::None`] up to `max_position_embeddings`, and longer texts are refused:
    /// beyond them the frequencies follow the length of the text.
    Dynamic,
    Llama3(Llama3Scaling),
    Yarn(YarnScaling),
    LongRope(LongRope),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Llama3Scaling {
    pub(crate) factor: f64,
    pub(crate) low_freq_factor: f64,
    pub(crate) high_freq_factor: f64,
    pub(crate) original_positions: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct YarnScaling {
    pub(crate) factor: f64,
    pub(crate) beta_fast: f64,
    pub(crate) beta_slow: f64,
    pub(crate) original_positions: f64,
    /// Whether the range of channels that is blended ends on whole channels.
    pub(crate) truncate: bool,
    /// Scale of rotated queries and keys.
    pub(crate) attention_factor: f64,
}

/// Texts up to `original_positions`; longer ones take other factors and are refused.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LongRope {
    /// Divisors of the frequencies.
    pub(crate) short_factor: Vec<f64>,
    pub(crate) original_positions: usize,
    /// Scale of rotated queries and keys.
    pub(crate) attention_factor: f64,
}

/// The embedding of every kind of layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeSpecs {
    pub(crate) full: RopeSpec,
    pub(crate) sliding: RopeSpec,
}

impl RopeSpecs {
    pub(crate) fn kind_spec(&self, kind: LayerKind) -> &RopeSpec {
        match kind {
            LayerKind::Full => &self.full,
            LayerKind::Sliding => &self.sliding,
        }
    }
}

/// The values of the config that an embedding depends on.
#[derive(Clone, Copy)]
pub(super) struct RopeContext<'a> {
    /// Keys at the top.
    pub(super) top: ConfigKeys<'a>,
    pub(super) head_dim: usize,
    pub(super) positions: usize,
    /// The kinds of layers that the model has.
    pub(super) kinds: &'a [LayerKind],
}

impl RopeContext<'_> {
    /// Reads both places; they must say the same.
    pub(super) fn parse_specs(self) -> Result<RopeSpecs> {
        let scaling = self.top.read_object("rope_scaling")?;
        let parameters = self.top.read_object("rope_parameters")?;
        let old = scaling.map(|map| self.parse_object(map, "rope_scaling.")).transpose()?;
        let new = parameters.map(|map| self.parse_object(map, "rope_parameters.")).transpose()?;
        match (old, new) {
            (Some(old), Some(new)) if old != new => Err(self.top.refuse_key(
                "rope_scaling",
                "disagrees with rope_parameters; keep one of the two keys",
            )),
            (Some(specs), _) | (None, Some(specs)) => Ok(specs),
            (None, None) => {
                let none = Map::new();
                self.parse_object(&none, "")
            }
        }
    }

    /// One place: an object of parameters, or an object of such objects by kind of layer.
    fn parse_object(self, map: &Map<String, Value>, scope: &str) -> Result<RopeSpecs> {
        let keys = ConfigKeys::new(map, scope);
        if !LayerKind::ALL.iter().any(|kind| keys.is_written(kind.name())) {
            let one = self.parse_spec(keys)?;
            return Ok(RopeSpecs { full: one.clone(), sliding: one });
        }
        let allowed = LayerKind::ALL.map(LayerKind::name);
        if let Some((key, _)) = keys.present_keys().find(|(key, _)| !allowed.contains(key)) {
            let reason = "stands beside parameters per kind of layer; move it into each of them";
            return Err(keys.refuse_key(key, reason));
        }
        let mut specs = Vec::new();
        for kind in LayerKind::ALL {
            let inner = format!("{scope}{}.", kind.name());
            let spec = keys.read_object(kind.name())?;
            if spec.is_none() && self.kinds.contains(&kind) {
                let reason = "has no parameters, and the model has layers of this kind";
                return Err(keys.refuse_key(kind.name(), reason));
            }
            specs.push(spec.map(|map| self.parse_spec(ConfigKeys::new(map, &inner))).transpose()?);
        }
        let any = specs.iter().flatten().next().cloned();
        let any = keys.require_key(LayerKind::Full.name(), any)?;
        let mut specs = specs.into_iter().map(|spec| spec.unwrap_or_else(|| any.clone()));
        let full = specs.next().unwrap_or_else(|| any.clone());
        let sliding = specs.next().unwrap_or(any);
        Ok(RopeSpecs { full, sliding })
    }

    fn parse_spec(self, keys: ConfigKeys<'_>) -> Result<RopeSpec> {
        let theta = self.read_agreed(keys, "rope_theta", |keys, key| keys.read_number(key, 1.0))?;
        let partial = self
            .read_agreed(keys, "partial_rotary_factor", |keys, key| keys.read_number(key, 0.0))?;
        if partial.is_some_and(|factor| factor != 1.0) {
            let holder =
                if keys.value("partial_rotary_factor").is_some() { keys } else { self.top };
            let reason = "these models rotate all channels of a head; only 1.0 is computed";
            return Err(holder.refuse_key("partial_rotary_factor", reason));
        }
        let theta = theta.unwrap_or(THETA_DEFAULT);
        Ok(RopeSpec { theta, scaling: self.parse_scaling(keys, theta)? })
    }

    /// A key that may stand at the top too: where both do, they must be equal.
    fn read_agreed<T: PartialEq>(
        self,
        keys: ConfigKeys<'_>,
        key: &str,
        read: impl Fn(ConfigKeys<'_>, &str) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let (inner, top) = (read(keys, key)?, read(self.top, key)?);
        match (inner, top) {
            (Some(inner), Some(top)) if inner != top => {
                Err(keys
                    .refuse_key(key, "disagrees with the key of this name at the top; keep one"))
            }
            (inner, top) => Ok(inner.or(top)),
        }
    }

    fn parse_scaling(self, keys: ConfigKeys<'_>, theta: f64) -> Result<RopeScaling> {
        let (kind, alias) = (keys.read_word("rope_type")?, keys.read_word("type")?);
        if let (Some(kind), Some(alias)) = (kind, alias)
            && kind != alias
        {
            return Err(keys.refuse_key("type", format!("is {alias:?}, but rope_type is {kind:?}")));
        }
        let name = if kind.is_some() { "rope_type" } else { "type" };
        let kind = kind.or(alias).unwrap_or("default");
        let (read, scaling): (&[&str], _) = match kind {
            "default" => (&["original_max_position_embeddings"], RopeScaling::None),
            "linear" => {
                let factor = keys.require_key("factor", keys.read_number("factor", 1.0)?)?;
                let read = &["factor", "original_max_position_embeddings"];
                (read, RopeScaling::Linear { factor })
            }
            "dynamic" => {
                keys.require_key("factor", keys.read_number("factor", 1.0)?)?;
                if self.top.value("original_max_position_embeddings").is_some() {
                    let reason = "dynamic scaling starts at max_position_embeddings alone";
                    return Err(self.top.refuse_key("original_max_position_embeddings", reason));
                }
                (&["factor"], RopeScaling::Dynamic)
            }
            "llama3" => (LLAMA3, RopeScaling::Llama3(self.parse_llama3(keys)?)),
            "yarn" => (YARN, RopeScaling::Yarn(self.parse_yarn(keys, theta)?)),
            "longrope" => (LONGROPE, RopeScaling::LongRope(self.parse_longrope(keys)?)),
            other => {
                let reason = format!("{other:?} is not supported; supported are {SUPPORTED}");
                return Err(keys.refuse_key(name, reason));
            }
        };
        refuse_unread(keys, kind, read)?;
        Ok(scaling)
    }

    fn original_positions(self, keys: ConfigKeys<'_>) -> Result<usize> {
        let most = ModelConfig::POSITIONS_MAX;
        let read = |keys: ConfigKeys<'_>, key: &str| keys.read_count(key, 1, most);
        let found = self.read_agreed(keys, "original_max_position_embeddings", read)?;
        Ok(found.unwrap_or(self.positions))
    }

    fn parse_llama3(self, keys: ConfigKeys<'_>) -> Result<Llama3Scaling> {
        let number = |key| keys.require_key(key, keys.read_number(key, 1e-6)?);
        let scaling = Llama3Scaling {
            factor: keys.require_key("factor", keys.read_number("factor", 1.0)?)?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_positions: self.original_positions(keys)? as f64,
        };
        if scaling.high_freq_factor <= scaling.low_freq_factor {
            return Err(keys.refuse_key("high_freq_factor", "must be above low_freq_factor"));
        }
        Ok(scaling)
    }

    fn parse_yarn(self, keys: ConfigKeys<'_>, theta: f64) -> Result<YarnScaling> {
        if theta <= 1.0 {
            return Err(keys.refuse_key("rope_theta", "yarn needs a base above 1"));
        }
        let original_positions = self.original_positions(keys)? as f64;
        let factor = match keys.read_number("factor", 1.0)? {
            Some(factor) => factor,
            // Null stands for the ratio of lengths; a key that is not there is a mistake.
            None if keys.is_written("factor") => self.positions as f64 / original_positions,
            None => return Err(keys.refuse_key("factor", "the key is missing")),
        };
        let scale = |weight: f64| {
            if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
        };
        let weight = |key| Ok(keys.read_number(key, 0.0)?.filter(|weight| *weight != 0.0));
        let attention_factor = match (weight("mscale")?, weight("mscale_all_dim")?) {
            (Some(weight), Some(all)) => scale(weight) / scale(all),
            _ => scale(1.0),
        };
        let beta_fast = weight("beta_fast")?.unwrap_or(32.0);
        let beta_slow = weight("beta_slow")?.unwrap_or(1.0);
        if beta_fast < beta_slow {
            return Err(keys.refuse_key("beta_fast", format!("is below beta_slow, {beta_slow}")));
        }
        Ok(YarnScaling {
            factor,
            beta_fast,
            beta_slow,
            original_positions,
            truncate: keys.read_flag("truncate")?.unwrap_or(true),
            attention_factor: keys
                .read_number("attention_factor", 0.0)?
                .unwrap_or(attention_factor),
        })
    }

    fn parse_longrope(self, keys: ConfigKeys<'_>) -> Result<LongRope> {
        let list = |key| {
            let list = keys.require_key(key, keys.read_numbers(key)?)?;
            let (found, expected) = (list.len(), self.head_dim / 2);
            if found == expected {
                return Ok(list);
            }
            let reason = format!("has {found} entries; heads of {} need {expected}", self.head_dim);
            Err(keys.refuse_key(key, reason))
        };
        let (short_factor, _) = (list("short_factor")?, list("long_factor")?);
        let original_positions = self.original_positions(keys)?;
        let ratio = self.positions as f64 / original_positions as f64;
        let factor = keys.read_number("factor", 1.0)?.unwrap_or(ratio);
        let given = keys.read_number("attention_factor", 0.0)?;
        if given.is_none() && factor > 1.0 && original_positions < 2 {
            let reason = "must be at least 2 where no attention_factor is given";
            return Err(keys.refuse_key("original_max_position_embeddings", reason));
        }
        let attention_factor = given.unwrap_or_else(|| {
            let growth = factor.ln() / (original_positions as f64).ln();
            if factor <= 1.0 { 1.0 } else { (1.0 + growth).sqrt() }
        });
        Ok(LongRope { short_factor, original_positions, attention_factor })
    }
}

const LLAMA3: &[&str] =
    &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
const YARN: &[&str] = &[
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
];
const LONGROPE: &[&str] = &[
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "short_factor",
    "long_factor",
];

/// Refuses keys that a kind of scaling does not have.
fn refuse_unread(keys: ConfigKeys<'_>, kind: &str, read: &[&str]) -> Result<()> {
    let always = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
    for (key, value) in keys.present_keys() {
        // No scaling and a factor of 1 are the same.
        let nothing = key == "factor" && value.as_f64() == Some(1.0);
        if !always.contains(&key) && !read.contains(&key) && !nothing {
            let reason =
                format!("is not a key of rope type {kind:?}; remove it or correct rope_type");
            return Err(keys.refuse_key(key, reason));
        }
    }
    Ok(())
}
