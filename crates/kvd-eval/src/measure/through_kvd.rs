//! Attention through a kvd daemon, over gRPC.

use super::latency::CallLatencies;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_client::{
    AttendBatch, AttendQuery, AttendStream, BlockKeys, Client, LoadRange, StoreChunk, StoreStream,
};
use kvd_core::{DType, LayerIndex, ModelId, SequenceId, StoredBytes};
use kvd_engine::{AttentionInput, HeadCounts, LayerAttention};
use std::time::Instant;

/// The cache of one sequence at a time, kept by the daemon. The two streams outlive sequences, as
/// those of an engine's worker do.
pub(crate) struct KvdAttention {
    client: Client,
    model: ModelId,
    heads: HeadCounts,
    sequence: SequenceId,
    store: StoreStream,
    attend: AttendStream,
    latencies: StepLatencies,
}

/// Samples of steps of one token and of steps of several.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepLatencies {
    pub(crate) decode: CallLatencies,
    pub(crate) prefill: CallLatencies,
}

impl StepLatencies {
    fn calls_for(&mut self, tokens: u32) -> &mut CallLatencies {
        if tokens == 1 { &mut self.decode } else { &mut self.prefill }
    }
}

impl KvdAttention {
    /// Opens the streams and a first sequence.
    pub(crate) async fn open_sequence(
        client: &Client,
        model: ModelId,
        heads: HeadCounts,
    ) -> Result<Self> {
        Ok(Self {
            client: client.clone(),
            model,
            heads,
            sequence: client.open_sequence(model).await?,
            store: client.store_stream(1).await?,
            attend: client.attend_stream(1).await?,
            latencies: StepLatencies::default(),
        })
    }

    /// Goes on with a new, empty sequence and returns the old one, still open.
    pub(crate) async fn next_sequence(&mut self) -> Result<SequenceId> {
        let next = self.client.open_sequence(self.model).await?;
        Ok(std::mem::replace(&mut self.sequence, next))
    }

    /// Goes on with a new sequence that has a prefix of `passage` from the cache, of one page for
    /// each key. Closes the sequence so far and returns the tokens of the prefix.
    pub(crate) async fn switch_to_prefix(
        &mut self,
        passage: SequenceId,
        keys: BlockKeys,
    ) -> Result<u32> {
        self.client.publish_blocks(passage, 0, keys.clone()).await?;
        self.begin_with_prefix(keys).await
    }

    /// Publishes the sequence's first pages, as many as there are keys, and waits until they are on
    /// disk; from then on the sequence reads them as whoever finds them does.
    pub(crate) async fn publish_prefix(&mut self, keys: BlockKeys) -> Result<()> {
        self.client.publish_settled(self.sequence, 0, keys.clone()).await?;
        let done = self.client.publish_durably(self.sequence, 0, keys).await?;
        let why = &done.not_durable;
        anyhow::ensure!(why.is_empty(), "the pages are not on the daemon's disk: {why}");
        Ok(())
    }

    /// Goes on with a new sequence that begins with what is cached of these pages; its tokens.
    pub(crate) async fn begin_with_prefix(&mut self, keys: BlockKeys) -> Result<u32> {
        let opened = self.client.open_on_prefix(self.model, keys, None, None).await?;
        let before = std::mem::replace(&mut self.sequence, opened.sequence);
        self.client.close_sequence(before).await?;
        Ok(opened.length)
    }

    /// Ends the streams and returns the sequence, still open.
    pub(crate) async fn finish_sequence(self) -> Result<SequenceId> {
        self.store.finish_stream().await?;
        self.attend.finish_stream().await?;
        Ok(self.sequence)
    }

    /// The samples since the last call of this.
    pub(crate) fn take_latencies(&mut self) -> StepLatencies {
        std::mem::take(&mut self.latencies)
    }

    /// Appends K and V, rounded to f16, and waits until they can be read.
    pub(crate) async fn store_rows(
        &mut self,
        layer: usize,
        start: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<()> {
        let tokens = u32::try_from(k.len() / self.heads.kv_width())?;
        let chunk = StoreChunk {
            sequence: self.sequence,
            layer: layer_index(layer)?,
            start: u32::try_from(start)?,
            tokens,
            k: pack_values(DType::F16, k),
            v: pack_values(DType::F16, v),
        };
        let begin = Instant::now();
        self.store.send_chunk(chunk).await?;
        while self.store.receive_ack().await?.is_some() {}
        self.latencies.calls_for(tokens).store.push(begin.elapsed());
        Ok(())
    }

    /// Causal attention of queries `[n, query heads, dim]`, the first at `position`, over all
    /// tokens up to the last query's, or those of the model's `window`.
    pub(crate) async fn query_rows(
        &mut self,
        layer: usize,
        position: usize,
        window: Option<usize>,
        q: &[f32],
    ) -> Result<Vec<f32>> {
        let n_q = u32::try_from(q.len() / self.heads.query_width())?;
        let position = u32::try_from(position)?;
        let query = AttendQuery {
            kv_length: Some(position + n_q),
            position: Some(position),
            sliding_window: window.map(u32::try_from).transpose()?,
            ..AttendQuery::new(self.sequence, n_q)
        };
        let batch = AttendBatch {
            model: self.model,
            layer: layer_index(layer)?,
            q_heads: u32::try_from(self.heads.query)?,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![query],
            q: pack_values(DType::F32, q),
            per_query_errors: false,
        };
        let begin = Instant::now();
        let attended = self.attend.attend_batch(batch).await?;
        self.latencies.calls_for(n_q).attend.push(begin.elapsed());
        unpack_values(&attended.out, q.len())
    }

    /// K and V of the first `tokens` tokens as the daemon decodes them.
    pub(crate) async fn load_rows(
        &self,
        layer: usize,
        tokens: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let range = LoadRange {
            sequence: self.sequence,
            layer: layer_index(layer)?,
            start: 0,
            end: u32::try_from(tokens)?,
            dtype: Some(DType::F32),
        };
        let rows = self.client.load_rows(range).await?;
        let values = tokens * self.heads.kv_width();
        Ok((unpack_values(&rows.k, values)?, unpack_values(&rows.v, values)?))
    }

    /// Bytes that the daemon holds of the sequence.
    pub(crate) async fn stored_bytes(&self) -> Result<StoredBytes> {
        let description = self.client.describe_sequence(self.sequence).await?;
        let stored = description.stored;
        let stored =
            stored.context("the daemon's description of a sequence has no stored bytes")?;
        Ok(stored.into())
    }
}

impl LayerAttention for KvdAttention {
    async fn attend_layer(&mut self, layer: usize, step: AttentionInput<'_>) -> Result<Vec<f32>> {
        self.store_rows(layer, step.position, step.k, step.v).await?;
        self.query_rows(layer, step.position, step.window, step.q).await
    }
}

fn layer_index(layer: usize) -> Result<LayerIndex> {
    Ok(LayerIndex(u32::try_from(layer)?))
}

fn pack_values(dtype: DType, values: &[f32]) -> Bytes {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    dtype.narrow_values(values, &mut bytes);
    bytes.into()
}

fn unpack_values(bytes: &[u8], values: usize) -> Result<Vec<f32>> {
    anyhow::ensure!(
        bytes.len() == values * DType::F32.size_bytes(),
        "the daemon answered {} bytes where {values} f32 were expected",
        bytes.len()
    );
    let mut out = vec![0.0; values];
    DType::F32.widen_values(bytes, &mut out);
    Ok(out)
}
