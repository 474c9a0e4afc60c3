//! Stores that go on beside what is measured, as prefills of other requests do.

use crate::data::NormalValues;
use crate::{BenchError, HeadShape};
use bytes::Bytes;
use kvd_client::{Client, StoreChunk};
use kvd_core::{LayerIndex, ModelId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// Tokens of a sequence before the next one.
const SEQUENCE_TOKENS: u32 = 8192;

/// Writers, each of which stores one chunk after another until all are stopped.
pub(crate) struct BackgroundStores {
    stop: Arc<AtomicBool>,
    stored: Arc<AtomicU64>,
    writers: Vec<JoinHandle<Result<(), BenchError>>>,
}

/// The load of some writers: chunks of a model's first layer.
#[derive(Clone, Copy)]
pub(crate) struct WriterLoad {
    pub(crate) model: ModelId,
    pub(crate) shape: HeadShape,
    pub(crate) writers: usize,
    /// Tokens of a chunk.
    pub(crate) tokens: u32,
}

/// One writer.
struct ChunkWriter {
    client: Client,
    model: ModelId,
    tokens: u32,
    k: Bytes,
    v: Bytes,
    stop: Arc<AtomicBool>,
    stored: Arc<AtomicU64>,
}

impl BackgroundStores {
    /// Starts the writers of a load.
    pub(crate) fn start_writers(runtime: &Runtime, client: &Client, load: WriterLoad) -> Self {
        let WriterLoad { model, shape, writers, tokens } = load;
        let (stop, stored) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let mut normal = NormalValues::new(7);
        let heads = tokens as usize * shape.kv_heads as usize;
        let mut rows = |dim: u32| normal.draw_bytes(heads * dim as usize, 1.0);
        let mut started = Vec::new();
        for _ in 0..writers {
            let [k, v] = [shape.head_dim_k, shape.head_dim_v].map(&mut rows);
            let (client, stop, stored) = (client.clone(), stop.clone(), stored.clone());
            let writer = ChunkWriter { client, model, tokens, k, v, stop, stored };
            started.push(runtime.spawn(writer.write_sequences()));
        }
        Self { stop, stored, writers: started }
    }

    /// Tokens stored so far.
    pub(crate) fn stored_tokens(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// Lets all writers end.
    pub(crate) fn stop_writers(self, runtime: &Runtime) -> Result<(), BenchError> {
        self.stop.store(true, Ordering::Relaxed);
        for writer in self.writers {
            runtime.block_on(writer).map_err(BenchError::failed_step("store"))??;
        }
        Ok(())
    }
}

impl ChunkWriter {
    /// Stores chunk after chunk, in one sequence after another, until it is to stop.
    async fn write_sequences(self) -> Result<(), BenchError> {
        let Self { client, model, tokens, k, v, stop, stored } = self;
        let failed = || BenchError::failed_step("store");
        while !stop.load(Ordering::Relaxed) {
            let sequence = client.open_sequence(model).await.map_err(failed())?;
            for index in 0..(SEQUENCE_TOKENS / tokens).max(1) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let (k, v, layer) = (k.clone(), v.clone(), LayerIndex(0));
                let chunk = StoreChunk { sequence, layer, start: index * tokens, tokens, k, v };
                client.store_chunk(chunk).await.map_err(failed())?;
                stored.fetch_add(u64::from(tokens), Ordering::Relaxed);
            }
            client.close_sequence(sequence).await.map_err(failed())?;
        }
        Ok(())
    }
}
