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
        // A signal that ends the command is waited for on this thread.
        tokio::task::yield_now().await;
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
pub fn round_to_f16(value: f32) -> f32 {
    f16::from_f32(value.clamp(-f16::MAX.to_f32(), f16::MAX.to_f32())).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[tokio::test]
    async fn tasks_of_the_same_thread_run_between_layers() {
        let heads = HeadCounts { query: 1, kv: 1, dim: 2 };
        let mut attention = LocalAttention::new(heads, 1);
        let ran = Arc::new(AtomicBool::new(false));
        let flag = ran.clone();
        tokio::spawn(async move { flag.store(true, Ordering::Relaxed) });
        let row = [1.0, 2.0];
        let (q, k, v) = (&row[..], &row[..], &row[..]);
        let input = AttentionInput { position: 0, n_tokens: 1, window: None, q, k, v };
        assert_eq!(attention.attend_layer(0, input).await.unwrap(), row);
        assert!(ran.load(Ordering::Relaxed));
    }
}
