//! The run without kvd: an f16 KV cache and f32 attention in this process.

use crate::attention::{AttentionInput, LayerAttention};
use crate::config::HeadCounts;
use crate::plain;
use anyhow::{Result, ensure};
use half::f16;

/// Attention over a cache that keeps K and V rounded to f16, as an engine does, or as they are.
pub struct LocalAttention {
    heads: HeadCounts,
    layers: Vec<LayerCache>,
    stored: fn(f32) -> f32,
}

#[derive(Clone, Default)]
struct LayerCache {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl LocalAttention {
    /// An empty cache of `layers` layers in f16.
    #[must_use]
    pub fn new(heads: HeadCounts, layers: usize) -> Self {
        Self { heads, layers: vec![LayerCache::default(); layers], stored: round_to_f16 }
    }

    /// An empty cache of `layers` layers in f32.
    #[must_use]
    pub fn exact_cache(heads: HeadCounts, layers: usize) -> Self {
        Self { stored: |value| value, ..Self::new(heads, layers) }
    }
}

impl LayerAttention for LocalAttention {
    async fn attend_layer(&mut self, layer: usize, step: AttentionInput<'_>) -> Result<Vec<f32>> {
        let cache = &mut self.layers[layer];
        let stored = cache.k.len() / self.heads.kv_width();
        ensure!(
            stored == step.position,
            "layer {layer} has {stored} tokens, not {}",
            step.position
        );
        cache.k.extend(step.k.iter().map(|&value| (self.stored)(value)));
        cache.v.extend(step.v.iter().map(|&value| (self.stored)(value)));
        let AttentionInput { position, window, q, .. } = step;
        Ok(plain::attend_plain(self.heads, position, window, q, &cache.k, &cache.v))
    }
}

/// The value an f16 cache gives back: beyond its range the largest one, as kvd has it.
#[must_use]
pub(crate) fn round_to_f16(value: f32) -> f32 {
    f16::from_f32(value.clamp(-f16::MAX.to_f32(), f16::MAX.to_f32())).to_f32()
}
