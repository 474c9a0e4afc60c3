//! Attention over a cache whose older rows go through a codec, in this process: what a daemon
//! would answer, but for its kernels' rounding.

use anyhow::{Result, ensure};
use kvd_codec::{BlockRows, ModelCodec, PageReader, RowSpace};
use kvd_core::{LayerIndex, Side};
use kvd_engine::{AttentionInput, HeadCounts, LayerAttention, plain, round_to_f16};
use kvd_fit::HeadGroup;
use std::ops::Range;

/// The rows that go through the codec.
#[derive(Clone, Copy)]
pub(super) enum PackedHeads<'a> {
    /// None of them.
    Nothing,
    /// Those of a group.
    Group(&'a HeadGroup),
    /// All of them.
    Everything,
}

impl PackedHeads<'_> {
    fn has_head(self, layer: LayerIndex, side: Side, head: usize) -> bool {
        match self {
            Self::Nothing => false,
            Self::Everything => true,
            Self::Group(group) => group.has_head(layer, side, head),
        }
    }

    /// Layers below this one see what they see without a codec.
    fn first_layer(self) -> usize {
        match self {
            Self::Nothing => usize::MAX,
            Self::Everything => 0,
            Self::Group(group) => group.layers.start as usize,
        }
    }
}

/// Attention outputs of every layer over one text.
#[derive(Default)]
pub(super) struct LayerOutputs(pub(super) Vec<Vec<f32>>);

/// Bytes of the pages of both sides, and what they hold.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PackedBytes {
    bytes: u64,
    values: u64,
}

impl PackedBytes {
    /// Bits per value, headers counted.
    pub(super) fn bits_per_value(self) -> f64 {
        8.0 * self.bytes as f64 / self.values.max(1) as f64
    }
}

/// One sequence.
pub(super) struct PackedAttention<'a> {
    heads: HeadCounts,
    codec: &'a ModelCodec,
    packed: PackedHeads<'a>,
    /// Outputs without a codec, where they are known.
    without: Option<&'a LayerOutputs>,
    caches: Vec<LayerCache>,
    pub(super) taken: PackedBytes,
    /// Outputs so far; kept where nothing is packed.
    pub(super) outputs: LayerOutputs,
}

/// `[tokens, KV heads, dim]` of a layer.
#[derive(Clone, Default)]
struct LayerCache {
    k: Vec<f32>,
    v: Vec<f32>,
    /// Tokens before this one are packed, or in the sink window.
    packed_end: usize,
}

impl<'a> PackedAttention<'a> {
    pub(super) fn new(
        heads: HeadCounts,
        codec: &'a ModelCodec,
        packed: PackedHeads<'a>,
        without: Option<&'a LayerOutputs>,
    ) -> Self {
        let layers = codec.geometry().layers as usize;
        let packed_end = codec.spec().sink as usize;
        let caches = vec![LayerCache { packed_end, ..LayerCache::default() }; layers];
        let outputs = match packed {
            PackedHeads::Nothing => LayerOutputs(vec![Vec::new(); layers]),
            _ => LayerOutputs::default(),
        };
        Self { heads, codec, packed, without, caches, taken: PackedBytes::default(), outputs }
    }

    /// Packs the blocks of a layer that no recent window holds.
    fn pack_blocks(&mut self, layer: usize) -> Result<()> {
        let index = LayerIndex(u32::try_from(layer)?);
        let of_side = |side| (0..self.heads.kv).any(|head| self.packed.has_head(index, side, head));
        let touched = Side::BOTH.into_iter().any(of_side);
        if !touched {
            return Ok(());
        }
        let block = self.codec.geometry().block_tokens as usize;
        let recent = self.codec.spec().recent as usize;
        let stored = self.caches[layer].k.len() / self.heads.kv_width();
        loop {
            let start = self.caches[layer].packed_end;
            if start + block > stored.saturating_sub(recent) {
                return Ok(());
            }
            self.pack_block(layer, start..start + block)?;
            self.caches[layer].packed_end = start + block;
        }
    }

    fn pack_block(&mut self, layer: usize, tokens: Range<usize>) -> Result<()> {
        let HeadCounts { kv, dim, .. } = self.heads;
        let width = self.heads.kv_width();
        let cache = &mut self.caches[layer];
        let by_head = |rows: &[f32]| -> Vec<f32> {
            let rows = &rows[tokens.start * width..tokens.end * width];
            (0..kv).flat_map(|head| crate::samples::head_rows(rows, head, kv, dim)).collect()
        };
        let (k, v) = (by_head(&cache.k), by_head(&cache.v));
        let index = LayerIndex(u32::try_from(layer)?);
        let rows = BlockRows { tokens: tokens.len(), k: &k, v: &v };
        let mut bytes = Vec::new();
        let encoded = self.codec.encode_block(index, &rows, &mut bytes)?;
        self.taken.bytes += bytes.len() as u64;
        self.taken.values += (k.len() + v.len()) as u64;
        let mut start = 0;
        for (page, end) in encoded.page_ends.iter().enumerate() {
            let end = *end as usize;
            let (side, head) = (Side::BOTH[page / kv], page % kv);
            if self.packed.has_head(index, side, head) {
                let decoded = decode_page(self.codec, index, side, head, &bytes[start..end])?;
                let into = if side == Side::Key { &mut cache.k } else { &mut cache.v };
                let first = tokens.start * width + head * dim;
                let into = into[first..].chunks_mut(width);
                for (into, row) in into.zip(decoded.chunks_exact(dim)) {
                    into[..dim].copy_from_slice(row);
                }
            }
            start = end;
        }
        Ok(())
    }
}

fn decode_page(
    codec: &ModelCodec,
    layer: LayerIndex,
    side: Side,
    head: usize,
    bytes: &[u8],
) -> Result<Vec<f32>> {
    let reader = PageReader::open_page(codec, layer, side, head, bytes)?;
    let bound = codec.head_codec(layer, side, head);
    let mut rows = vec![0f32; reader.tokens() * bound.dim()];
    reader.decode_rows(0, reader.tokens(), &mut rows)?;
    if reader.space() == RowSpace::Coefficient {
        for row in rows.chunks_exact_mut(bound.dim()) {
            let coefficients = row.to_vec();
            bound.invert_row(&coefficients, row);
        }
    }
    Ok(rows)
}

impl LayerAttention for PackedAttention<'_> {
    async fn attend_layer(&mut self, layer: usize, step: AttentionInput<'_>) -> Result<Vec<f32>> {
        // A signal that ends the command is waited for on this thread.
        tokio::task::yield_now().await;
        let AttentionInput { position, n_tokens, window, q, .. } = step;
        let known = self.without.filter(|_| layer < self.packed.first_layer());
        if let Some(LayerOutputs(outputs)) = known {
            let width = self.heads.query_width();
            return Ok(outputs[layer][position * width..(position + n_tokens) * width].to_vec());
        }
        let cache = &mut self.caches[layer];
        let stored = cache.k.len() / self.heads.kv_width();
        ensure!(stored == position, "layer {layer} has {stored} tokens, not {position}");
        cache.k.extend(step.k.iter().map(|value| round_to_f16(*value)));
        cache.v.extend(step.v.iter().map(|value| round_to_f16(*value)));
        let out = plain::attend_plain(self.heads, position, window, q, &cache.k, &cache.v);
        if let Some(outputs) = self.outputs.0.get_mut(layer) {
            outputs.extend_from_slice(&out);
        }
        self.pack_blocks(layer)?;
        Ok(out)
    }
}
