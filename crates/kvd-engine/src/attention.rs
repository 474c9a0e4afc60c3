//! The one part of the model that differs between runs.

use crate::local::round_to_f16;
use anyhow::Result;
use std::future::Future;

/// New tokens of one layer: what an engine hands to its attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// Tokens before these; they were handed over in earlier steps.
    pub position: usize,
    /// New tokens.
    pub n_tokens: usize,
    /// Tokens that a query sees, its own counted; `None` for all.
    pub window: Option<usize>,
    /// `[n_tokens, query heads, dim]`, after RoPE.
    pub q: &'a [f32],
    /// `[n_tokens, KV heads, dim]`, after RoPE.
    pub k: &'a [f32],
    /// `[n_tokens, KV heads, dim]`.
    pub v: &'a [f32],
}

/// Keeps the KV cache of one sequence and answers causal attention over it.
pub trait LayerAttention {
    /// Appends the new keys and values of `layer`, then lets each new query see every token up
    /// to and with its own, within the window. Returns `[n_tokens, query heads, dim]`.
    fn attend_layer(
        &mut self,
        layer: usize,
        step: AttentionInput<'_>,
    ) -> impl Future<Output = Result<Vec<f32>>> + Send;
}

/// One layer's queries, keys and values over a whole window, `[tokens, heads, dim]`.
#[derive(Clone, Debug, Default)]
pub struct LayerRecording {
    /// Queries after RoPE.
    pub q: Vec<f32>,
    /// Keys after RoPE.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

/// Passes attention on and keeps what went in: the material of calibration and of the
/// attention-error measurement.
pub struct AttentionRecorder<A> {
    inner: A,
    layers: Vec<LayerRecording>,
}

impl<A> AttentionRecorder<A> {
    /// Records what `inner` is asked.
    pub fn new(inner: A, layers: usize) -> Self {
        Self { inner, layers: vec![LayerRecording::default(); layers] }
    }

    /// The recording of each layer, keys and values rounded to f16 as a cache keeps them.
    pub fn into_layers(mut self) -> Vec<LayerRecording> {
        for layer in &mut self.layers {
            for value in layer.k.iter_mut().chain(&mut layer.v) {
                *value = round_to_f16(*value);
            }
        }
        self.layers
    }
}

impl<A: LayerAttention + Send> LayerAttention for AttentionRecorder<A> {
    async fn attend_layer(&mut self, layer: usize, step: AttentionInput<'_>) -> Result<Vec<f32>> {
        let recording = &mut self.layers[layer];
        recording.q.extend_from_slice(step.q);
        recording.k.extend_from_slice(step.k);
        recording.v.extend_from_slice(step.v);
        self.inner.attend_layer(layer, step).await
    }
}
