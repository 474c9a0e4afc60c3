//! Attention error on clean queries, keys and values: what the codec loses and what the daemon's
//! arithmetic loses, apart.
//!
//! The recorded window is stored up to three quarters, then in steps; each step's queries attend
//! over what the daemon holds at that moment, as in decoding. Three results are compared, the
//! last two in f64:
//!   * the daemon's output;
//!   * attention over the decoded rows the daemon gives back (windows included);
//!   * attention over the original rows.

use crate::attention::Recording;
use crate::config::Heads;
use crate::plain;
use crate::through_kvd::KvdAttention;
use anyhow::Result;
use serde::Serialize;

/// Relative Frobenius errors of attention outputs, mean over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AttentionError {
    /// Exact attention over decoded rows against exact attention over the originals.
    pub codec: f64,
    /// The daemon's output against exact attention over decoded rows.
    pub kernel: f64,
    /// The daemon's output against exact attention over the originals.
    pub total: f64,
}

/// A recorded window and the exact outputs of its last quarter.
pub(crate) struct CleanWindow {
    heads: Heads,
    layers: Vec<Recording>,
    exact: Vec<Vec<f64>>,
    first_query: usize,
    tokens: usize,
}

impl CleanWindow {
    /// Takes the exact outputs of queries from three quarters of the window on.
    pub(crate) fn new(heads: Heads, layers: Vec<Recording>) -> Self {
        let tokens = layers.first().map_or(0, |layer| layer.k.len() / heads.kv_width());
        let first_query = tokens * 3 / 4;
        let exact = |layer: &Recording| {
            let q = &layer.q[first_query * heads.query_width()..];
            plain::attend::<f64>(heads, first_query, q, &layer.k, &layer.v)
        };
        let exact = layers.iter().map(exact).collect();
        Self { heads, layers, exact, first_query, tokens }
    }

    /// Measures a fresh sequence.
    pub(crate) async fn measure(
        &self,
        kvd: &mut KvdAttention,
        chunk: usize,
        mut on_step: impl FnMut(usize),
    ) -> Result<AttentionError> {
        let mut sums = vec![LayerSums::default(); self.layers.len()];
        for layer in 0..self.layers.len() {
            self.store(kvd, layer, 0, self.first_query).await?;
        }
        let mut start = self.first_query;
        while start < self.tokens {
            let end = (start + chunk).min(self.tokens);
            for (layer, sums) in sums.iter_mut().enumerate() {
                self.store(kvd, layer, start, end).await?;
                self.step(kvd, layer, start, end, sums).await?;
            }
            on_step(end - start);
            start = end;
        }
        let layers = sums.len().max(1) as f64;
        let mean = |pick: fn(&LayerSums) -> f64| sums.iter().map(pick).sum::<f64>() / layers;
        Ok(AttentionError {
            codec: mean(|s| (s.codec / s.exact).sqrt()),
            kernel: mean(|s| (s.kernel / s.decoded).sqrt()),
            total: mean(|s| (s.total / s.exact).sqrt()),
        })
    }

    async fn store(
        &self,
        kvd: &mut KvdAttention,
        layer: usize,
        start: usize,
        end: usize,
    ) -> Result<()> {
        let rows = start * self.heads.kv_width()..end * self.heads.kv_width();
        let recording = &self.layers[layer];
        kvd.store(layer, start, &recording.k[rows.clone()], &recording.v[rows]).await
    }

    async fn step(
        &self,
        kvd: &mut KvdAttention,
        layer: usize,
        start: usize,
        end: usize,
        sums: &mut LayerSums,
    ) -> Result<()> {
        let width = self.heads.query_width();
        let q = &self.layers[layer].q[start * width..end * width];
        let answered = kvd.query(layer, start, q).await?;
        let (k, v) = kvd.load(layer, end).await?;
        let decoded = plain::attend::<f64>(self.heads, start, q, &k, &v);
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
