//! Appending K and V.

use super::payload::{self, inline_payload};
use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::{Geometry, LayerIndex, SequenceId, Side};

/// K and V of a range of tokens of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreChunk {
    /// The sequence to append to.
    pub sequence: SequenceId,
    /// The layer.
    pub layer: LayerIndex,
    /// First token.
    pub start: u32,
    /// Tokens, at least 1; `start + tokens` fits a `u32`.
    pub tokens: u32,
    /// `[tokens, kv_heads, head_dim_k]` in the model's dtype, after RoPE.
    pub k: Bytes,
    /// `[tokens, kv_heads, head_dim_v]` in the model's dtype.
    pub v: Bytes,
}

impl StoreChunk {
    /// One past the last token.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.start.saturating_add(self.tokens)
    }

    /// Checks layer and payload lengths against the model's geometry.
    ///
    /// # Errors
    /// When the layer is out of range or a payload does not fill its shape.
    pub fn check_shape(&self, geometry: &Geometry) -> Result<(), RequestError> {
        self.check_payload_bytes(geometry, [&self.k, &self.v].map(|bytes| bytes.len() as u64))
    }

    /// Checks the shape of K and V that lie elsewhere, of these lengths in bytes.
    ///
    /// # Errors
    /// As [`StoreChunk::check_shape`].
    pub fn check_payload_bytes(
        &self,
        geometry: &Geometry,
        [k_bytes, v_bytes]: [u64; 2],
    ) -> Result<(), RequestError> {
        check_layer(self.layer, geometry)?;
        let rows = u64::from(self.tokens) * u64::from(geometry.kv_heads);
        let values = |side| rows * geometry.head_dim(side) as u64;
        let dtype = geometry.dtype;
        let shape = "[tokens, kv_heads, head_dim_k]";
        payload::check_length("k", shape, k_bytes, dtype, values(Side::Key))?;
        let shape = "[tokens, kv_heads, head_dim_v]";
        payload::check_length("v", shape, v_bytes, dtype, values(Side::Value))
    }
}

impl TryFrom<v1::StoreBlocksRequest> for StoreChunk {
    type Error = RequestError;

    fn try_from(request: v1::StoreBlocksRequest) -> Result<Self, RequestError> {
        if request.tokens == 0 {
            return Err(RequestError::invalid_field("tokens", "must be at least 1"));
        }
        if request.start.checked_add(request.tokens).is_none() {
            return Err(RequestError::invalid_field("tokens", "start + tokens is past 2^32 - 1"));
        }
        Ok(Self {
            sequence: SequenceId(request.sequence_id),
            layer: LayerIndex(request.layer),
            start: request.start,
            tokens: request.tokens,
            k: payload::payload_bytes(request.k, "k")?,
            v: payload::payload_bytes(request.v, "v")?,
        })
    }
}

impl From<StoreChunk> for v1::StoreBlocksRequest {
    fn from(chunk: StoreChunk) -> Self {
        Self {
            sequence_id: chunk.sequence.0,
            layer: chunk.layer.0,
            start: chunk.start,
            tokens: chunk.tokens,
            k: Some(inline_payload(chunk.k)),
            v: Some(inline_payload(chunk.v)),
        }
    }
}

/// Refuses a layer that the model does not have.
pub(super) fn check_layer(layer: LayerIndex, geometry: &Geometry) -> Result<(), RequestError> {
    if layer.0 < geometry.layers {
        return Ok(());
    }
    let reason = format!("layer {layer} of a model with {} layers", geometry.layers);
    Err(RequestError::invalid_field("layer", reason))
}

/// A stored range: its tokens can now be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreAck {
    /// The layer.
    pub layer: LayerIndex,
    /// Tokens of the layer that can be read.
    pub length: u32,
    /// The range had been stored before; nothing changed.
    pub replayed: bool,
    /// Blocks that left the window and were encoded.
    pub packed_blocks: u32,
}

impl From<v1::StoreBlocksResponse> for StoreAck {
    fn from(response: v1::StoreBlocksResponse) -> Self {
        Self {
            layer: LayerIndex(response.layer),
            length: response.length,
            replayed: response.replayed,
            packed_blocks: response.packed_blocks,
        }
    }
}

impl From<StoreAck> for v1::StoreBlocksResponse {
    fn from(ack: StoreAck) -> Self {
        Self {
            layer: ack.layer.0,
            length: ack.length,
            replayed: ack.replayed,
            packed_blocks: ack.packed_blocks,
            error: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_core::{Coded, DType, ErrorCode, RopePairing};

    fn chunk() -> StoreChunk {
        StoreChunk {
            sequence: SequenceId(3),
            layer: LayerIndex(1),
            start: 10,
            tokens: 2,
            k: Bytes::from(vec![1; 2 * 2 * 4 * 2]),
            v: Bytes::from(vec![2; 2 * 2 * 6 * 2]),
        }
    }

    fn geometry() -> Geometry {
        Geometry {
            layers: 2,
            kv_heads: 2,
            head_dim_k: 4,
            head_dim_v: 6,
            block_tokens: 64,
            dtype: DType::F16,
            rope_pairing: RopePairing::Half,
        }
    }

    fn refusal(change: impl FnOnce(&mut v1::StoreBlocksRequest)) -> String {
        let mut request = chunk().into();
        change(&mut request);
        StoreChunk::try_from(request).unwrap_err().to_string()
    }

    #[test]
    fn chunk_round_trips_without_copying_the_payload() {
        let original = chunk();
        let read = StoreChunk::try_from(v1::StoreBlocksRequest::from(original.clone())).unwrap();
        assert_eq!(read, original);
        assert_eq!(read.k.as_ptr(), original.k.as_ptr());
    }

    #[test]
    fn refusals_name_the_field() {
        assert_eq!(refusal(|r| r.tokens = 0), "tokens: must be at least 1");
        assert!(refusal(|r| r.start = u32::MAX).starts_with("tokens: start + tokens"));
        assert_eq!(refusal(|r| r.k = None), "k is missing");
        assert_eq!(refusal(|r| r.v = Some(v1::Payload { source: None })), "v is missing");
    }

    #[test]
    fn shape_is_checked_against_the_geometry() {
        chunk().check_shape(&geometry()).unwrap();
        let short = StoreChunk { v: chunk().k, ..chunk() };
        let error = short.check_shape(&geometry()).unwrap_err();
        assert_eq!(error.code(), ErrorCode::ShapeMismatch);
        assert!(error.to_string().starts_with("v has 32 bytes; its shape"), "{error}");
        let deep = StoreChunk { layer: LayerIndex(2), ..chunk() };
        let error = deep.check_shape(&geometry()).unwrap_err();
        assert_eq!(error.to_string(), "layer: layer 2 of a model with 2 layers");
    }
}
