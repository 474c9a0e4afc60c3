//! A worker that takes as much as it can and reads nothing.

use super::rows::{LAYERS, RowSource};
use super::worker::{CODECS, register_model};
use bytes::Bytes;
use kvd_client::{Client, ClientError, LayerIndex, LoadRange, SessionOptions, StoreChunk};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Tokens of a message: 128 KiB of K and as much of V.
const TOKENS: u32 = 512;
/// Messages in flight.
const STORES: u32 = 48;

/// Floods until it is killed; an error only where the daemon is gone or refuses.
pub(super) async fn flood_daemon(
    client: &Client,
    socket: &Path,
    seed: u64,
) -> Result<(), ClientError> {
    let mut halves = Vec::new();
    for number in 0..40u32 {
        // The preface of HTTP/2, whole or cut short, and half a frame after it.
        let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x40\x01\x04";
        if let Ok(mut half) = UnixStream::connect(socket) {
            // The daemon may close it at once.
            let _ = half.write_all(&preface[..(number as usize % preface.len()) + 1]);
            halves.push(half);
        }
    }
    let model = register_model(client, CODECS[0]).await?;
    let session = client.hold_session(SessionOptions::new(format!("flood-{seed}"))).await?;
    let sequence = session.open_sequence(model).await?;
    let source = RowSource { content: 99, layer: 0, is_value: false };
    let rows: Bytes = source.row_bytes(0, TOKENS).into();
    let mut stores = tokio::task::JoinSet::new();
    for number in 0..STORES {
        let (client, k, v) = (client.clone(), rows.clone(), rows.clone());
        let layer = LayerIndex(number % LAYERS);
        let start = (number / LAYERS) * TOKENS;
        stores.spawn(async move {
            let chunk = StoreChunk { sequence, layer, start, tokens: TOKENS, k, v };
            client.store_chunk(chunk).await
        });
    }
    // Most are refused: they come out of order, or the pool is full.
    while stores.join_next().await.is_some() {}
    let range = LoadRange { sequence, layer: LayerIndex(0), start: 0, end: TOKENS, dtype: None };
    let mut unread = Vec::new();
    for _ in 0..16 {
        unread.push(client.load_stream(range).await?);
    }
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    session.close_session().await.map(drop)
}
