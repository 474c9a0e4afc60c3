//! Decoding stored tokens back to rows.

use super::payload::{self, inline_payload};
use super::store::check_layer;
use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::{DType, Geometry, LayerIndex, SequenceId};

/// Tokens `[start, end)` of one layer to read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadRange {
    /// The sequence.
    pub sequence: SequenceId,
    /// The layer.
    pub layer: LayerIndex,
    /// First token.
    pub start: u32,
    /// One past the last token; not before `start`.
    pub end: u32,
    /// Precision of the reply; `None` is the model's.
    pub dtype: Option<DType>,
}

impl LoadRange {
    /// Checks the layer against the model's geometry.
    ///
    /// # Errors
    /// When the model has no such layer.
    pub fn check_shape(&self, geometry: &Geometry) -> Result<(), RequestError> {
        check_layer(self.layer, geometry)
    }
}

impl TryFrom<v1::LoadBlocksRequest> for LoadRange {
    type Error = RequestError;

    fn try_from(request: v1::LoadBlocksRequest) -> Result<Self, RequestError> {
        if request.end < request.start {
            let reason = format!("{} is before start, {}", request.end, request.start);
            return Err(RequestError::invalid_field("end", reason));
        }
        Ok(Self {
            sequence: SequenceId(request.sequence_id),
            layer: LayerIndex(request.layer),
            start: request.start,
            end: request.end,
            dtype: payload::optional_dtype(request.dtype, "dtype")?,
        })
    }
}

impl From<LoadRange> for v1::LoadBlocksRequest {
    fn from(range: LoadRange) -> Self {
        Self {
            sequence_id: range.sequence.0,
            layer: range.layer.0,
            start: range.start,
            end: range.end,
            dtype: range.dtype.map_or(0, payload::dtype_to_wire),
        }
    }
}

/// Consecutive rows of a load's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadPiece {
    /// First token.
    pub start: u32,
    /// Tokens.
    pub tokens: u32,
    /// `[tokens, kv_heads, head_dim_k]` in the asked dtype.
    pub k: Bytes,
    /// `[tokens, kv_heads, head_dim_v]` in the asked dtype.
    pub v: Bytes,
}

impl TryFrom<v1::LoadBlocksResponse> for LoadPiece {
    type Error = RequestError;

    fn try_from(response: v1::LoadBlocksResponse) -> Result<Self, RequestError> {
        Ok(Self {
            start: response.start,
            tokens: response.tokens,
            k: payload::payload_bytes(response.k, "k")?,
            v: payload::payload_bytes(response.v, "v")?,
        })
    }
}

impl From<LoadPiece> for v1::LoadBlocksResponse {
    fn from(piece: LoadPiece) -> Self {
        Self {
            start: piece.start,
            tokens: piece.tokens,
            k: Some(inline_payload(piece.k)),
            v: Some(inline_payload(piece.v)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_round_trips_with_and_without_dtype() {
        for dtype in [None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)] {
            let range = LoadRange {
                sequence: SequenceId(1),
                layer: LayerIndex(0),
                start: 4,
                end: 4,
                dtype,
            };
            assert_eq!(LoadRange::try_from(v1::LoadBlocksRequest::from(range)).unwrap(), range);
        }
    }

    #[test]
    fn refusals_name_the_field() {
        let request = v1::LoadBlocksRequest { start: 2, end: 1, ..Default::default() };
        let error = LoadRange::try_from(request).unwrap_err();
        assert_eq!(error.to_string(), "end: 1 is before start, 2");
        let request = v1::LoadBlocksRequest { dtype: -1, ..Default::default() };
        let error = LoadRange::try_from(request).unwrap_err();
        assert_eq!(error.to_string(), "dtype: dtype -1 is not known");
    }
}
