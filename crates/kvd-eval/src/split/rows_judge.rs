//! Effect of a codec's errors on attention over rows, where there is no model to run: each layer's
//! outputs by themselves, relative to their length. Queries and windows are as they would be in a
//! sequence, so that an error counts as much as attention looks at it.

use super::packed_attention::{PackedAttention, PackedHeads};
use super::{CodecCounts, JudgedCodec, ProbeGroups};
use crate::calibrate::LayerRows;
use crate::progress::RunProgress;
use anyhow::{Result, ensure};
use kvd_codec::{Calibration, CodecSpec, ModelCodec};
use kvd_core::{Geometry, Side};
use kvd_engine::{AttentionInput, HeadCounts, LayerAttention};
use kvd_fit::GroupCost;
use std::ops::Range;

/// Tokens of a step: queries see fewer of their newest neighbours packed than later ones will.
const CHUNK: usize = 32;

/// Rows of two texts.
pub(super) struct RowsJudge<'a> {
    geometry: Geometry,
    heads: HeadCounts,
    texts: [JudgedRows; 2],
    progress: &'a RunProgress,
}

/// Rows of a text by layer, and attention outputs over them.
struct JudgedRows {
    layers: Vec<LayerRows>,
    tokens: usize,
    /// By layer; empty until they are computed.
    exact: Vec<Vec<f32>>,
}

impl<'a> RowsJudge<'a> {
    /// `texts` have a query for each token.
    ///
    /// # Errors
    /// When keys and values differ in size.
    pub(super) fn new(
        geometry: &Geometry,
        query_heads: usize,
        texts: [Vec<LayerRows>; 2],
        progress: &'a RunProgress,
    ) -> Result<Self> {
        let [key_dim, value_dim] = Side::BOTH.map(|side| geometry.head_dim(side));
        ensure!(
            key_dim == value_dim,
            "keys of {key_dim} channels and values of {value_dim}: use --split even"
        );
        let heads = HeadCounts { query: query_heads, kv: geometry.kv_heads as usize, dim: key_dim };
        let texts = texts.map(|layers| {
            let tokens = layers.first().map_or(0, |layer| layer.k.len() / heads.kv_width());
            JudgedRows { layers, tokens, exact: Vec::new() }
        });
        Ok(Self { geometry: geometry.clone(), heads, texts, progress })
    }

    pub(super) fn step_count(&self, codecs: CodecCounts) -> usize {
        let layers = self.geometry.layers as usize;
        let probes = 2 * self.geometry.kv_heads as usize;
        let [first, second] = [0, 1].map(|text| layers * self.texts[text].tokens);
        codecs.probed * first * probes + codecs.judged * 2 * second
    }

    pub(super) async fn measure_costs(
        &mut self,
        spec: &CodecSpec,
        calibration: &Calibration,
    ) -> Result<Vec<GroupCost>> {
        let codec = ModelCodec::new(self.geometry.clone(), spec.clone(), Some(calibration))?;
        self.attend_exactly(&codec).await?;
        let mut costs = Vec::new();
        for group in ProbeGroups::new(&self.geometry, usize::MAX).0 {
            let layers = group.layers.start as usize..group.layers.end as usize;
            let packed = PackedHeads::Group(&group);
            let judged = self.run_rows(&self.texts[0], &codec, packed, layers).await?;
            costs.push(GroupCost { group, cost: judged.loss });
        }
        Ok(costs)
    }

    pub(super) async fn judge_codec(
        &mut self,
        spec: &CodecSpec,
        calibration: &Calibration,
    ) -> Result<JudgedCodec> {
        let codec = ModelCodec::new(self.geometry.clone(), spec.clone(), Some(calibration))?;
        self.attend_exactly(&codec).await?;
        let layers = 0..self.geometry.layers as usize;
        self.run_rows(&self.texts[1], &codec, PackedHeads::Everything, layers).await
    }

    /// Computes outputs without a codec, once.
    async fn attend_exactly(&mut self, codec: &ModelCodec) -> Result<()> {
        let heads = self.heads;
        for text in &mut self.texts {
            if !text.exact.is_empty() {
                continue;
            }
            let mut attention = PackedAttention::new(heads, codec, PackedHeads::Nothing, None);
            for layer in 0..text.layers.len() {
                let mut outputs = Vec::new();
                for start in (0..text.tokens).step_by(CHUNK) {
                    outputs.extend(text.attend_step(heads, layer, start, &mut attention).await?);
                }
                text.exact.push(outputs);
            }
        }
        Ok(())
    }

    async fn run_rows(
        &self,
        text: &JudgedRows,
        codec: &ModelCodec,
        packed: PackedHeads<'_>,
        layers: Range<usize>,
    ) -> Result<JudgedCodec> {
        let mut attention = PackedAttention::new(self.heads, codec, packed, None);
        let first = text.tokens / 8 * self.heads.query_width();
        let mut loss = 0.0;
        for layer in layers {
            let mut outputs = Vec::new();
            for start in (0..text.tokens).step_by(CHUNK) {
                outputs.extend(text.attend_step(self.heads, layer, start, &mut attention).await?);
                self.progress.add_steps(CHUNK.min(text.tokens - start));
            }
            let exact = &text.exact[layer][first..];
            let energy: f64 = exact.iter().map(|x| f64::from(*x).powi(2)).sum();
            let pairs = outputs[first..].iter().zip(exact);
            let error: f64 = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
            loss += if energy > 0.0 { error / energy } else { 0.0 };
        }
        let loss = loss / text.layers.len() as f64;
        Ok(JudgedCodec { loss, bits: attention.taken.bits_per_value() })
    }
}

impl JudgedRows {
    /// The outputs of some tokens of a layer.
    async fn attend_step(
        &self,
        heads: HeadCounts,
        layer: usize,
        start: usize,
        attention: &mut PackedAttention<'_>,
    ) -> Result<Vec<f32>> {
        let tokens = start..(start + CHUNK).min(self.tokens);
        let rows = &self.layers[layer];
        let of = |rows: &'_ [f32], width: usize| -> Vec<f32> {
            rows[tokens.start * width..tokens.end * width].to_vec()
        };
        let (kv, query) = (heads.kv_width(), heads.query_width());
        let (q, k, v) = (of(&rows.q, query), of(&rows.k, kv), of(&rows.v, kv));
        let n_tokens = tokens.len();
        let step = AttentionInput { position: start, n_tokens, window: None, q: &q, k: &k, v: &v };
        attention.attend_layer(layer, step).await
    }
}
