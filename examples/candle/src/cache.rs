//! The part to copy: a KV cache of which kvd holds all but the tokens of the present step.
//!
//! In each layer a step's tokens attend one another here and the older ones at the daemon, and
//! both are merged by their log-sum-exps. After the last layer the step's rows of all layers are
//! stored in one call, all or nothing. Should that fail, nothing of the step is stored, and the
//! engine computes it again.

use crate::llama::LlamaConfig;
use anyhow::{Result, ensure};
use bytes::{Bytes, BytesMut};
use candle_core::{D, Device, Tensor};
use kvd_client::merge::{PartialResult, PartialView, merge_partial};
use kvd_client::{
    AttendBatch, AttendQuery, Client, DType, Geometry, HeldSession, LayerIndex, ModelId, ModelSpec,
    RopePairing, RowLayout, SequenceId, SessionOptions, StepPart, StoreStep,
};

/// One sequence.
pub(crate) struct KvdCache {
    client: Client,
    // What it owns is closed when this program ends, however it ends.
    session: HeldSession,
    model: ModelId,
    sequence: SequenceId,
    layers: usize,
    q_heads: usize,
    /// Tokens that kvd holds.
    stored: usize,
    /// The step: keys and values `[tokens, kv_heads, head_dim]` of each layer so far.
    step: Vec<LayerRows>,
}

struct LayerRows {
    k: Tensor,
    v: Tensor,
}

/// Attention over some of the tokens: `out` `[tokens, q_heads, head_dim]`, `lse`
/// `[tokens, q_heads]`.
struct PartialAttention {
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl KvdCache {
    /// Registers the model and opens a sequence.
    pub(crate) async fn open_cache(
        client: &Client,
        config: &LlamaConfig,
        codec: &str,
    ) -> Result<Self> {
        let head_dim = u32::try_from(config.head_dim)?;
        let geometry = Geometry {
            layers: u32::try_from(config.num_hidden_layers)?,
            kv_heads: u32::try_from(config.num_key_value_heads)?,
            head_dim_k: head_dim,
            head_dim_v: head_dim,
            block_tokens: 0, // the daemon's default
            dtype: DType::F32,
            rope_pairing: RopePairing::Half,
        };
        let spec = ModelSpec {
            name: format!("candle-{codec}"),
            geometry,
            codec: codec.into(),
            calibration: Bytes::new(),
        };
        let model = client.register_model(spec).await?.model;
        let name = format!("candle-{}", std::process::id());
        let session = client.hold_session(SessionOptions::new(name)).await?;
        let sequence = session.open_sequence(model).await?;
        Ok(Self {
            client: client.clone(),
            session,
            model,
            sequence,
            layers: config.num_hidden_layers,
            q_heads: config.num_attention_heads,
            stored: 0,
            step: Vec::new(),
        })
    }

    /// Tokens that kvd holds.
    pub(crate) fn stored_tokens(&self) -> usize {
        self.stored
    }

    /// Attention of a step's new tokens over all tokens up to their own: `q`, `k` (both rotated)
    /// and `v` are `[tokens, heads, head_dim]`, layers come in order.
    pub(crate) async fn attend_layer(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<Tensor> {
        ensure!(layer == self.step.len(), "layer {layer} after {}", self.step.len());
        self.step.push(LayerRows { k: k.clone(), v: v.clone() });
        let mut both = attend_own(q, k, v)?;
        if self.stored > 0 {
            let older = self.attend_older(layer, q).await?;
            let into = &mut PartialResult { out: &mut both.out, lse: &mut both.lse };
            merge_partial(into, PartialView { out: &older.out, lse: &older.lse });
        }
        Ok(Tensor::from_vec(both.out, q.dims(), &Device::Cpu)?)
    }

    /// The answer of kvd: every query sees every token that it holds.
    async fn attend_older(&self, layer: usize, q: &Tensor) -> Result<PartialAttention> {
        let tokens = u32::try_from(q.dim(0)?)?;
        let batch = AttendBatch {
            model: self.model,
            layer: LayerIndex(u32::try_from(layer)?),
            q_heads: u32::try_from(self.q_heads)?,
            dtype: DType::F32,
            scale: None, // 1 / sqrt(head_dim)
            soft_cap: None,
            queries: vec![AttendQuery::new(self.sequence, tokens).with_all_visible()],
            q: to_bytes(q)?.freeze(),
            per_query_errors: false,
        };
        let answer = self.client.attend_batch(batch).await?;
        let numbers = answer.out.chunks_exact(4);
        let out = numbers.map(|one| f32::from_le_bytes([one[0], one[1], one[2], one[3]]));
        Ok(PartialAttention { out: out.collect(), lse: answer.lse })
    }

    /// Stores the rows of the step: keys of all layers, then values of all layers.
    pub(crate) async fn store_step(&mut self) -> Result<()> {
        let step = std::mem::take(&mut self.step);
        ensure!(step.len() == self.layers, "a step of {} layers", step.len());
        let tokens = step[0].k.dim(0)?;
        let mut memory = BytesMut::new();
        for rows in &step {
            memory.unsplit(to_bytes(&rows.k)?);
        }
        let values_at = memory.len() as u64;
        for rows in &step {
            memory.unsplit(to_bytes(&rows.v)?);
        }
        let part = StepPart {
            sequence: self.sequence,
            start: u32::try_from(self.stored)?,
            tokens: u32::try_from(tokens)?,
            first_layer: LayerIndex(0),
            layers: None,
            k: RowLayout::from_offset(0),
            v: RowLayout::from_offset(values_at),
        };
        let step = StoreStep { model: self.model, parts: vec![part], memory: memory.freeze() };
        self.client.store_step(step).await?;
        self.stored += tokens;
        Ok(())
    }

    /// Gives up what kvd holds.
    pub(crate) async fn close_cache(self) -> Result<()> {
        self.session.close_session().await?;
        Ok(())
    }
}

/// Causal attention of a step's tokens over one another.
fn attend_own(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<PartialAttention> {
    let (tokens, q_heads, head_dim) = q.dims3()?;
    let group = q_heads / k.dim(1)?;
    // [q_heads, tokens, head_dim], each KV head for the query heads of its group.
    let widen = |x: &Tensor| -> candle_core::Result<Tensor> {
        let (tokens, heads, dim) = x.dims3()?;
        let wide = x.unsqueeze(2)?.broadcast_as((tokens, heads, group, dim))?;
        wide.reshape((tokens, heads * group, dim))?.transpose(0, 1)?.contiguous()
    };
    let (k, v) = (widen(k)?, widen(v)?);
    let q = (q.transpose(0, 1)?.contiguous()? / (head_dim as f64).sqrt())?;
    let later = (0..tokens)
        .flat_map(|row| (0..tokens).map(move |at| if at > row { f32::NEG_INFINITY } else { 0.0 }))
        .collect::<Vec<f32>>();
    let mask = Tensor::from_vec(later, (1, tokens, tokens), &Device::Cpu)?;
    let scores = q.matmul(&k.transpose(1, 2)?.contiguous()?)?.broadcast_add(&mask)?;
    let lse = scores.log_sum_exp(D::Minus1)?;
    let weights = scores.broadcast_sub(&lse.unsqueeze(2)?)?.exp()?;
    let out = weights.matmul(&v)?.transpose(0, 1)?.contiguous()?;
    let lse = lse.transpose(0, 1)?.contiguous()?;
    Ok(PartialAttention { out: out.flatten_all()?.to_vec1()?, lse: lse.flatten_all()?.to_vec1()? })
}

/// Little-endian f32 in row-major order, as kvd takes them.
fn to_bytes(x: &Tensor) -> Result<BytesMut> {
    let values: Vec<f32> = x.contiguous()?.flatten_all()?.to_vec1()?;
    Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect())
}
