//! The run without kvd: an f16 KV cache and f32 attention in this process.

use crate::attention::{Attention, AttentionInput};
use crate::config::Heads;
use crate::plain;
use anyhow::{Result, ensure};
use half::f16;

/// Attention over a cache that keeps K and V rounded to f16, as an engine does, or as they are.
pub struct LocalAttention {
    heads: Heads,
    layers: Vec<Cache>,
    stored: fn(f32) -> f32,
}

#[derive(Clone, Default)]
struct Cache {
    k: Vec<f32>,
    v: Vec<f32>,
}

impl LocalAttention {
    /// An empty cache of `layers` layers in f16.
    #[must_use]
    pub fn new(heads: Heads, layers: usize) -> Self {
        Self { heads, layers: vec![Cache::default(); layers], stored: rounded }
    }

    /// An empty cache of `layers` layers in f32.
    #[must_use]
    pub fn exact(heads: Heads, layers: usize) -> Self {
        Self { stored: |value| value, ..Self::new(heads, layers) }
    }
}

impl Attention for LocalAttention {
    async fn attend(&mut self, layer: usize, step: AttentionInput<'_>) -> Result<Vec<f32>> {
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
        Ok(plain::attend(self.heads, position, window, q, &cache.k, &cache.v))
    }
}

/// The value an f16 cache gives back: beyond its range the largest one, as kvd has it.
#[must_use]
pub(crate) fn rounded(value: f32) -> f32 {
    f16::from_f32(value.clamp(-f16::MAX.to_f32(), f16::MAX.to_f32())).to_f32()
}
