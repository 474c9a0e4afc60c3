//! Which layers see the whole text, and which a sliding window of it.

use super::keys::Keys;
use super::{Family, ModelConfig};
use crate::error::Result;

/// How far back a layer's attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// All tokens.
    Full,
    /// The last tokens only.
    Sliding,
}

impl LayerKind {
    pub(super) const ALL: [Self; 2] = [Self::Full, Self::Sliding];

    /// Its name in `layer_types`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::Sliding => "sliding_attention",
        }
    }
}

/// The layers of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layers {
    pub(crate) kinds: Vec<LayerKind>,
    /// Tokens that a sliding layer sees, its own counted.
    pub(crate) window: Option<usize>,
}

/// Window of the classes that have one, where the key is absent.
const WINDOW_DEFAULT: usize = 4096;
/// First sliding layer of Qwen models where the key is absent.
const MAX_WINDOW_LAYERS_DEFAULT: usize = 28;

impl Layers {
    pub(super) fn parse(keys: Keys<'_>, family: Family, count: usize) -> Result<Self> {
        let window = window(keys, family)?;
        let kinds = match window {
            None => vec![LayerKind::Full; count],
            Some(_) if family.has_qwen_windows() => {
                let key = "max_window_layers";
                let first = keys.count(key, 0, ModelConfig::POSITIONS_MAX)?;
                let first = first.unwrap_or(MAX_WINDOW_LAYERS_DEFAULT);
                let kind = |i| if i >= first { LayerKind::Sliding } else { LayerKind::Full };
                (0..count).map(kind).collect()
            }
            Some(_) => vec![LayerKind::Sliding; count],
        };
        let Some(listed) = listed(keys, count)? else { return Ok(Self { kinds, window }) };
        if listed.contains(&LayerKind::Sliding) && window.is_none() {
            let reason = "has sliding_attention, but no sliding window is in use: mend \
                          sliding_window or use_sliding_window";
            return Err(keys.refuse("layer_types", reason));
        }
        if !family.has_qwen_windows() && listed != kinds {
            let reason =
                format!("a {} model has one kind of layer, that of sliding_window", family.name());
            return Err(keys.refuse("layer_types", reason));
        }
        Ok(Self { kinds: listed, window })
    }
}

fn listed(keys: Keys<'_>, count: usize) -> Result<Option<Vec<LayerKind>>> {
    let Some(names) = keys.words("layer_types")? else { return Ok(None) };
    if names.len() != count {
        let reason = format!("has {} entries for {count} layers", names.len());
        return Err(keys.refuse("layer_types", reason));
    }
    let kind = |name: &str| {
        let found = LayerKind::ALL.into_iter().find(|kind| kind.name() == name);
        let reason =
            || format!("{name:?} is not supported; full_attention and sliding_attention are");
        found.ok_or_else(|| keys.refuse("layer_types", reason()))
    };
    names.into_iter().map(kind).collect::<Result<_>>().map(Some)
}

/// The window in use, where there is one.
fn window(keys: Keys<'_>, family: Family) -> Result<Option<usize>> {
    let used = keys.flag("use_sliding_window")?;
    let unused = family.has_qwen_windows() && used != Some(true);
    let least = usize::from(!unused);
    let written = keys.count("sliding_window", least, ModelConfig::POSITIONS_MAX)?;
    if unused {
        return Ok(None);
    }
    let default = (!keys.is_written("sliding_window")).then_some(WINDOW_DEFAULT);
    let window = match family {
        Family::Llama => written,
        Family::Mistral | Family::Qwen2 | Family::Qwen3 => written.or(default),
    };
    match (family, window, used) {
        (Family::Llama, Some(_), _) => {
            let reason = "a llama model sees the whole text; set model_type to mistral if this \
                          one was trained with a window, or the key to null";
            Err(keys.refuse("sliding_window", reason))
        }
        (Family::Mistral, Some(_), Some(false))
        | (Family::Mistral | Family::Llama, None, Some(true)) => {
            Err(keys.refuse("use_sliding_window", "disagrees with sliding_window"))
        }
        _ => Ok(window),
    }
}
