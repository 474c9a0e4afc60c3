//! Calibrations that a daemon makes.

use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::{ModelId, SequenceId};

/// Most sequences of one order.
const SEQUENCES_MAX: usize = 1024;
/// Most codecs of one order.
const CODECS_MAX: usize = 16;

/// A calibration to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalibrationOrder {
    /// The model, which keeps keys and values exactly.
    pub model: ModelId,
    /// Its sequences, taken together; at least one.
    pub sequences: Vec<SequenceId>,
    /// Presets or specs, at least one; the artefact serves all of them.
    pub codecs: Vec<String>,
    /// Equal rows, codecs and seeds give equal bytes.
    pub seed: u64,
    /// Tokens of each sequence to take at most, from its front.
    pub tokens_max: Option<u32>,
}

/// A calibration that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MadeCalibration {
    /// The artefact, for a registration.
    pub calibration: Bytes,
    /// Tokens that it was fitted on.
    pub tokens: u64,
    /// Queries of the KV head that has the fewest.
    pub queries_per_head: u64,
}

impl TryFrom<v1::CalibrateModelRequest> for CalibrationOrder {
    type Error = RequestError;

    fn try_from(request: v1::CalibrateModelRequest) -> Result<Self, RequestError> {
        check_count("sequence_ids", request.sequence_ids.len(), SEQUENCES_MAX)?;
        check_count("codecs", request.codecs.len(), CODECS_MAX)?;
        Ok(Self {
            model: ModelId(request.model_id),
            sequences: request.sequence_ids.into_iter().map(SequenceId).collect(),
            codecs: request.codecs,
            seed: request.seed,
            tokens_max: (request.tokens_max > 0).then_some(request.tokens_max),
        })
    }
}

impl From<CalibrationOrder> for v1::CalibrateModelRequest {
    fn from(order: CalibrationOrder) -> Self {
        Self {
            model_id: order.model.0,
            sequence_ids: order.sequences.into_iter().map(|sequence| sequence.0).collect(),
            codecs: order.codecs,
            seed: order.seed,
            tokens_max: order.tokens_max.unwrap_or(0),
        }
    }
}

impl From<v1::CalibrateModelResponse> for MadeCalibration {
    fn from(response: v1::CalibrateModelResponse) -> Self {
        let v1::CalibrateModelResponse { calibration, tokens, queries_per_head } = response;
        Self { calibration, tokens, queries_per_head }
    }
}

fn check_count(field: &'static str, count: usize, max: usize) -> Result<(), RequestError> {
    if (1..=max).contains(&count) {
        return Ok(());
    }
    Err(RequestError::Invalid { field, reason: format!("{count} of them; give 1 to {max}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_names_sequences_and_codecs_within_limits() {
        let order = CalibrationOrder {
            model: ModelId(7),
            sequences: vec![SequenceId(1), SequenceId(2)],
            codecs: vec!["kvd-2".to_owned()],
            seed: 3,
            tokens_max: Some(512),
        };
        let wire = v1::CalibrateModelRequest::from(order.clone());
        assert_eq!(CalibrationOrder::try_from(wire.clone()).unwrap(), order);
        let all = v1::CalibrateModelRequest { tokens_max: 0, ..wire.clone() };
        assert_eq!(CalibrationOrder::try_from(all).unwrap().tokens_max, None);
        let none = v1::CalibrateModelRequest { sequence_ids: Vec::new(), ..wire.clone() };
        assert!(CalibrationOrder::try_from(none).unwrap_err().to_string().contains("sequence_ids"));
        let many = v1::CalibrateModelRequest { codecs: vec![String::new(); 17], ..wire };
        assert!(CalibrationOrder::try_from(many).unwrap_err().to_string().contains("1 to 16"));
    }
}
