//! Rows that a daemon holds, read back by `LoadBlocks`: exact where the sequence's codec is `raw`.

use super::{CalibrateError, KvDump, LayerRows};
use crate::progress::RunProgress;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_client::{Client, ClientOptions, Endpoint, LoadRange};
use kvd_core::{DType, Geometry, LayerIndex, ModelId, Namespace, SequenceId};

/// Tokens read at a time: what the progress bar moves by.
const PIECE_TOKENS: u32 = 512;

/// Sequences of a running daemon.
#[derive(Clone, Debug)]
pub struct DaemonSource {
    /// The daemon.
    pub endpoint: Endpoint,
    /// How to connect, and who asks.
    pub options: Box<ClientOptions>,
    /// The caller's namespace; `default` when absent.
    pub namespace: Option<Namespace>,
    /// Sequences of one model, taken together in this order.
    pub sequences: Vec<SequenceId>,
    /// Tokens of each to take at most, from its front.
    pub tokens: Option<usize>,
}

impl DaemonSource {
    /// K and V of every layer, and the daemon's sample of queries where it keeps one.
    pub(super) async fn load_dump(&self, progress: &RunProgress) -> Result<KvDump> {
        let connected = Client::connect_with(self.endpoint.clone(), &self.options).await;
        let mut client = connected.with_context(|| format!("no daemon at {}", self.endpoint))?;
        if let Some(namespace) = &self.namespace {
            client = client.with_namespace(namespace);
        }
        let mut all: Option<(ModelId, KvDump)> = None;
        for &sequence in &self.sequences {
            let (model, dump) = self.load_sequence(&client, sequence, progress).await?;
            match &mut all {
                None => all = Some((model, dump)),
                Some((_, all)) => {
                    let file = format!("sequence {}", sequence.0);
                    all.append_dump(dump).map_err(|()| CalibrateError::Mixed { file })?;
                }
            }
        }
        let (model, mut dump) = all.context("no sequence")?;
        add_queries(&client, model, &mut dump).await?;
        Ok(dump)
    }

    async fn load_sequence(
        &self,
        client: &Client,
        sequence: SequenceId,
        progress: &RunProgress,
    ) -> Result<(ModelId, KvDump)> {
        let description = client.describe_sequence(sequence).await?;
        let most = self.tokens.and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(u32::MAX);
        let end = description.length.min(most);
        if end == 0 {
            return Err(CalibrateError::Empty { sequence: sequence.0 }.into());
        }
        let model = ModelId(description.model_id);
        let geometry = client.describe_model(model).await?.geometry;
        let geometry = geometry.context("the daemon's description has no geometry")?;
        let geometry = Geometry::try_from(geometry)?;
        progress.begin_steps("sequence", (geometry.layers * end) as usize);
        let mut layers = Vec::new();
        for layer in (0..geometry.layers).map(LayerIndex) {
            let mut rows = LayerRows::default();
            for start in (0..end).step_by(PIECE_TOKENS as usize) {
                let end = end.min(start + PIECE_TOKENS);
                let range = LoadRange { sequence, layer, start, end, dtype: Some(DType::F32) };
                let loaded = client.load_rows(range).await?;
                rows.k.extend(widen_values(&loaded.k, DType::F32));
                rows.v.extend(widen_values(&loaded.v, DType::F32));
                progress.add_steps((end - start) as usize);
            }
            layers.push(rows);
        }
        Ok((model, KvDump { geometry, query_heads: 0, layers }))
    }
}

/// The sample is of the model, whatever sequences were named.
async fn add_queries(client: &Client, model: ModelId, dump: &mut KvDump) -> Result<()> {
    let mut sampled = Vec::new();
    for layer in (0..dump.geometry.layers).map(LayerIndex) {
        sampled.push(client.sample_queries(model, layer).await?);
    }
    let heads = sampled.first().map_or(0, |first| first.q_heads);
    // Rows of all layers, or a fit could not weigh them all.
    if heads == 0 || sampled.iter().any(|layer| layer.q_heads != heads) {
        return Ok(());
    }
    dump.query_heads = heads as usize;
    for (rows, sampled) in dump.layers.iter_mut().zip(sampled) {
        rows.q = widen_values(&sampled.q, sampled.dtype);
    }
    Ok(())
}

fn widen_values(bytes: &Bytes, dtype: DType) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / dtype.size_bytes()];
    dtype.widen_values(bytes, &mut values);
    values
}
