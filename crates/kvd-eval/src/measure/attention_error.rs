//! Attention error on clean queries, keys and values: what the codec loses and what the daemon's
//! arithmetic loses, apart.
//!
//! The recorded window is stored up to three quarters, then in steps; each step's queries attend
//! over what the daemon holds at that moment, as in decoding. Three results are compared, the
//! last two in f64:
//!   * the daemon's output;
//!   * attention over the decoded rows the daemon gives back (windows included);
//!   * attention over the original rows.

use super::KvdAttention;
use super::storage::side_bits_since;
use anyhow::Result;
use kvd_core::StoredBytes;
use kvd_engine::{HeadCounts, LayerRecording, ModelConfig, plain};
use serde::Serialize;
use std::ops::Range;

/// Relative Frobenius errors of attention outputs, mean over layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AttentionError {
    /// Exact attention over decoded rows against exact attention over the originals.
    pub codec: f64,
    /// The daemon's output against exact attention over decoded rows.
    pub kernel: f64,
    /// The daemon's output against exact attention over the originals.
    pub total: f64,
    /// The error of each layer.
    pub layers: Vec<LayerError>,
}

/// [`AttentionError`] of one layer, and what its packed blocks take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LayerError {
    /// As [`AttentionError::codec`].
    pub codec: f64,
    /// As [`AttentionError::kernel`].
    pub kernel: f64,
    /// As [`AttentionError::total`].
    pub total: f64,
    /// Bits per key value of packed blocks, everything counted.
    pub key_bits: f64,
    /// Bits per value of V of packed blocks, everything counted.
    pub value_bits: f64,
}

/// A recorded window and the exact outputs of its last quarter.
pub(crate) struct CleanWindow {
    heads: HeadCounts,
    /// Tokens that a query of each layer sees.
    windows: Vec<Option<usize>>,
    layers: Vec<LayerRecording>,
    exact: Vec<Vec<f64>>,
    first_query: usize,
    tokens: usize,
}

impl CleanWindow {
    /// Takes the exact outputs of queries from three quarters of the window on.
    pub(crate) fn new(config: &ModelConfig, layers: Vec<LayerRecording>) -> Self {
        let heads = config.attention_heads();
        let windows: Vec<_> = (0..layers.len()).map(|layer| config.layer_window(layer)).collect();
        let tokens = layers.first().map_or(0, |layer| layer.k.len() / heads.kv_width());
        let first_query = tokens * 3 / 4;
        let exact = |(layer, window): (&LayerRecording, &Option<usize>)| {
            let q = &layer.q[first_query * heads.query_width()..];
            plain::attend_plain::<f64>(heads, first_query, *window, q, &layer.k, &layer.v)
        };
        let exact = layers.iter().zip(&windows).map(exact).collect();
        Self { heads, windows, layers, exact, first_query, tokens }
    }

    /// Layers recorded.
    pub(super) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Tokens recorded.
    pub(super) fn token_count(&self) -> usize {
        self.tokens
    }

    /// Steps that [`CleanWindow::measure_sequence`] tells of, in tokens: queries of every layer.
    pub(crate) fn measured_tokens(&self) -> usize {
        (self.tokens - self.first_query) * self.layers.len()
    }

    /// Measures a fresh sequence, one layer after the other.
    pub(crate) async fn measure_sequence(
        &self,
        kvd: &mut KvdAttention,
        chunk: usize,
        mut on_step: impl FnMut(usize),
    ) -> Result<AttentionError> {
        let mut layers = Vec::new();
        let mut before = StoredBytes::default();
        for layer in 0..self.layers.len() {
            self.store_rows(kvd, layer, 0..self.first_query).await?;
            let mut sums = LayerSums::default();
            let mut start = self.first_query;
            while start < self.tokens {
                let end = (start + chunk).min(self.tokens);
                self.store_rows(kvd, layer, start..end).await?;
                self.measure_step(kvd, layer, start, end, &mut sums).await?;
                on_step(end - start);
                start = end;
            }
            let stored = kvd.stored_bytes().await?;
            let [key_bits, value_bits] = side_bits_since(&stored, &before);
            before = stored;
            layers.push(LayerError {
                codec: (sums.codec / sums.exact).sqrt(),
                kernel: (sums.kernel / sums.decoded).sqrt(),
                total: (sums.total / sums.exact).sqrt(),
                key_bits,
                value_bits,
            });
        }
        let count = layers.len().max(1) as f64;
        let mean = |pick: fn(&LayerError) -> f64| layers.iter().map(pick).sum::<f64>() / count;
        Ok(AttentionError {
            codec: mean(|layer| layer.codec),
            kernel: mean(|layer| layer.kernel),
            total: mean(|layer| layer.total),
            layers,
        })
    }

    /// Appends the rows of `tokens` of one layer.
    pub(super) async fn store_rows(
        &self,
        kvd: &mut KvdAttention,
        layer: usize,
        tokens: Range<usize>,
    ) -> Result<()> {
        let width = self.heads.kv_width();
        let rows = tokens.start * width..tokens.end * width;
        let recording = &self.layers[layer];
        kvd.store_rows(layer, tokens.start, &recording.k[rows.clone()], &recording.v[rows]).await
    }

    /// The daemon's answer to the queries of `tokens` of one layer.
    pub(super) async fn query_rows(
        &self,
        kvd: &mut KvdAttention,
        layer: usize,
        tokens: Range<usize>,
    ) -> Result<Vec<f32>> {
        let width = self.heads.query_width();
        let q = &self.layers[layer].q[tokens.start * width..tokens.end * width];
        kvd.query_rows(layer, tokens.start, self.windows[layer], q).await
    }

    async fn measure_step(
        &self,
        kvd: &mut KvdAttention,
        layer: usize,
        start: usize,
        end: usize,
        sums: &mut LayerSums,
    ) -> Result<()> {
        let width = self.heads.query_width();
        let q = &self.layers[layer].q[start * width..end * width];
        let answered = self.query_rows(kvd, layer, start..end).await?;
        let (k, v) = kvd.load_rows(layer, end).await?;
        let decoded = plain::attend_plain::<f64>(self.heads, start, self.windows[layer], q, &k, &v);
        let first = (start - self.first_query) * width;
        let exact = &self.exact[layer][first..first + q.len()];
        for ((&out, &decoded), &exact) in answered.iter().zip(&decoded).zip(exact) {
            let out = f64::from(out);
            sums.exact += exact * exact;
            sums.decoded += decoded * decoded;
            sums.codec += (decoded - exact).powi(2);
            sums.kernel += (out - decoded).powi(2);
            sums.total += (out - exact).powi(2);
        }
        Ok(())
    }
}

/// Sums of squares over one layer's outputs.
#[derive(Clone, Default)]
struct LayerSums {
    exact: f64,
    decoded: f64,
    codec: f64,
    kernel: f64,
    total: f64,
}
