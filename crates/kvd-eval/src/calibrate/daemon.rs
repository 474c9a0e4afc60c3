//! Rows that a daemon holds, read back by `LoadBlocks`: exact where the sequence's codec is `raw`.

use super::{CalibrateError, KvDump, LayerRows};
use crate::progress::Progress;
use anyhow::{Context, Result};
use bytes::Bytes;
use kvd_client::{Client, Endpoint, LoadRange};
use kvd_core::{DType, Geometry, LayerIndex, ModelId, Namespace, SequenceId};

/// Tokens read at a time: what the progress bar moves by.
const PIECE_TOKENS: u32 = 512;

/// Sequences of a running daemon.
#[derive(Clone, Debug)]
pub struct DaemonSource {
    /// The daemon.
    pub endpoint: Endpoint,
    /// The caller's namespace; `default` when absent.
    pub namespace: Option<Namespace>,
    /// Sequences of one model, taken together in this order.
    pub sequences: Vec<SequenceId>,
    /// Tokens of each to take at most, from its front.
    pub tokens: Option<usize>,
}

impl DaemonSource {
    /// K and V of every layer; queries are not there.
    pub(super) async fn load(&self, progress: &Progress) -> Result<KvDump> {
        let connected = Client::connect(self.endpoint.clone()).await;
        let mut client = connected.with_context(|| format!("no daemon at {}", self.endpoint))?;
        if let Some(namespace) = &self.namespace {
            client = client.with_namespace(namespace);
        }
        let mut all: Option<KvDump> = None;
        for &sequence in &self.sequences {
            let dump = self.sequence(&client, sequence, progress).await?;
            match &mut all {
                None => all = Some(dump),
                Some(all) => {
                    let file = format!("sequence {}", sequence.0);
                    all.append(dump).map_err(|()| CalibrateError::Mixed { file })?;
                }
            }
        }
        all.context("no sequence")
    }

    async fn sequence(
        &self,
        client: &Client,
        sequence: SequenceId,
        progress: &Progress,
    ) -> Result<KvDump> {
        let description = client.describe_sequence(sequence).await?;
        let most = self.tokens.and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(u32::MAX);
        let end = description.length.min(most);
        if end == 0 {
            return Err(CalibrateError::Empty { sequence: sequence.0 }.into());
        }
        let model = client.describe_model(ModelId(description.model_id)).await?;
        let geometry = model.geometry.context("the daemon's description has no geometry")?;
        let geometry = Geometry::try_from(geometry)?;
        progress.begin("sequence", (geometry.layers * end) as usize);
        let mut layers = Vec::new();
        for layer in (0..geometry.layers).map(LayerIndex) {
            let mut rows = LayerRows::default();
            for start in (0..end).step_by(PIECE_TOKENS as usize) {
                let end = end.min(start + PIECE_TOKENS);
                let range = LoadRange { sequence, layer, start, end, dtype: Some(DType::F32) };
                let loaded = client.load(range).await?;
                rows.k.extend(values(&loaded.k));
                rows.v.extend(values(&loaded.v));
                progress.add((end - start) as usize);
            }
            layers.push(rows);
        }
        Ok(KvDump { geometry, query_heads: 0, layers })
    }
}

fn values(bytes: &Bytes) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / DType::F32.size_bytes()];
    DType::F32.widen(bytes, &mut values);
    values
}
