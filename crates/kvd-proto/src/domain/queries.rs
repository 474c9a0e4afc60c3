//! Queries that a daemon has seen.

use super::payload::{self, inline_payload};
use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::DType;

/// A sample of the queries of one layer; without rows where the daemon keeps none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledQueries {
    /// Query heads of each token; 0 without rows.
    pub q_heads: u32,
    /// Dtype of `q`.
    pub dtype: DType,
    /// `[tokens, q_heads, head_dim_k]`.
    pub q: Bytes,
}

impl TryFrom<v1::SampleQueriesResponse> for SampledQueries {
    type Error = RequestError;

    fn try_from(response: v1::SampleQueriesResponse) -> Result<Self, RequestError> {
        Ok(Self {
            q_heads: response.q_heads,
            dtype: payload::dtype_required(response.dtype, "dtype")?,
            q: payload::payload_bytes(response.q, "q")?,
        })
    }
}

impl From<SampledQueries> for v1::SampleQueriesResponse {
    fn from(sampled: SampledQueries) -> Self {
        Self {
            q_heads: sampled.q_heads,
            dtype: payload::dtype_to_wire(sampled.dtype),
            q: Some(inline_payload(sampled.q)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_round_trips_and_names_what_is_absent() {
        let sampled = SampledQueries { q_heads: 4, dtype: DType::F16, q: vec![1, 2].into() };
        let wire = v1::SampleQueriesResponse::from(sampled.clone());
        assert_eq!(SampledQueries::try_from(wire).unwrap(), sampled);
        let error = SampledQueries::try_from(v1::SampleQueriesResponse::default()).unwrap_err();
        assert!(error.to_string().contains("dtype"), "{error}");
    }
}
