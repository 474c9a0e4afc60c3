//! Which layers see the whole text, and which a sliding window of it.

use super::keys::ConfigKeys;
use super::{ModelConfig, ModelFamily};
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
pub(crate) struct LayerKinds {
    pub(crate) kinds: Vec<LayerKind>,
    /// Tokens that a sliding layer sees, its own counted.
    pub(crate) window: Option<usize>,
}

/// Window of the classes that have one, where the key is absent.
const WINDOW_DEFAULT: usize = 4096;
/// First sliding layer of Qwen models where the key is absent.
const MAX_WINDOW_LAYERS_DEFAULT: usize = 28;

impl LayerKinds {
    pub(super) fn parse_layers(
        keys: ConfigKeys<'_>,
        family: ModelFamily,
        count: usize,
    ) -> Result<Self> {
        let window = window_in_use(keys, family)?;
        let kinds = match window {
            None => vec![LayerKind::Full; count],
            Some(_) if family.has_qwen_windows() => {
                let key = "max_window_layers";
                let first = keys.read_count(key, 0, ModelConfig::POSITIONS_MAX)?;
                let first = first.unwrap_or(MAX_WINDOW_LAYERS_DEFAULT);
                let kind = |i| if i >= first { LayerKind::Sliding } else { LayerKind::Full };
                (0..count).map(kind).collect()
            }
            Some(_) => vec![LayerKind::Sliding; count],
        };
        let Some(listed) = listed_kinds(keys, count)? else { return Ok(Self { kinds, window }) };
        if listed.contains(&LayerKind::Sliding) && window.is_none() {
            let reason = "has sliding_attention, but no sliding window is in use: correct \
                          sliding_window or use_sliding_window";
            return Err(keys.refuse_key("layer_types", reason));
        }
        if !family.has_qwen_windows() && listed != kinds {
            let reason =
                format!("a {} model has one kind of layer, that of sliding_window", family.name());
            return Err(keys.refuse_key("layer_types", reason));
        }
        Ok(Self { kinds: listed, window })
    }
}

fn listed_kinds(keys: ConfigKeys<'_>, count: usize) -> Result<Option<Vec<LayerKind>>> {
    let Some(names) = keys.read_words("layer_types")? else { return Ok(None) };
    if names.len() != count {
        let reason = format!("has {} entries for {count} layers", names.len());
        return Err(keys.refuse_key("layer_types", reason));
    }
    let kind = |name: &str| {
        let found = LayerKind::ALL.into_iter().find(|kind| kind.name() == name);
        let reason =
            || format!("{name:?} is not supported; full_attention and sliding_attention are");
        found.ok_or_else(|| keys.refuse_key("layer_types", reason()))
    };
    names.into_iter().map(kind).collect::<Result<_>>().map(Some)
}

/// The window in use, where there is one.
fn window_in_use(keys: ConfigKeys<'_>, family: ModelFamily) -> Result<Option<usize>> {
    let used = keys.read_flag("use_sliding_window")?;
    let unused = family.has_qwen_windows() && used != Some(true);
    let least = usize::from(!unused);
    let written = keys.read_count("sliding_window", least, ModelConfig::POSITIONS_MAX)?;
    if unused {
        return Ok(None);
    }
    let default = (!keys.is_written("sliding_window")).then_some(WINDOW_DEFAULT);
    let window = match family {
        ModelFamily::Llama => written,
        ModelFamily::Mistral | ModelFamily::Qwen2 | ModelFamily::Qwen3 => written.or(default),
    };
    match (family, window, used) {
        (ModelFamily::Llama, Some(_), _) => {
            let reason = "a llama model sees the whole text; set model_type to mistral if this \
                          one was trained with a window, or the key to null";
            Err(keys.refuse_key("sliding_window", reason))
        }
        (ModelFamily::Mistral, Some(_), Some(false))
        | (ModelFamily::Mistral | ModelFamily::Llama, None, Some(true)) => {
            Err(keys.refuse_key("use_sliding_window", "disagrees with sliding_window"))
        }
        _ => Ok(window),
    }
}
