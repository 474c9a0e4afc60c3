//! From the service's answers to messages.

use crate::metrics::Metric;
use crate::service::{
    AttendReply, CalibrationReply, DevicePool, LoadPiece, ModelStats, RefusedQuery,
    RegisteredModel, ServiceError, StoreReply,
};
use kvd_core::LayerIndex;
use kvd_proto::domain::CallError;
use kvd_proto::{domain, v1};
use kvd_store::SequenceUsage;

pub(super) fn register_response(model: &RegisteredModel) -> v1::RegisterModelResponse {
    v1::RegisterModelResponse {
        model_id: model.shape.id.0,
        codec_spec: model.spec.to_string(),
        fingerprint: model.fingerprint.clone(),
        geometry: Some((&model.shape.geometry).into()),
    }
}

pub(super) fn model_description(stats: &ModelStats) -> v1::DescribeModelResponse {
    v1::DescribeModelResponse {
        geometry: Some((&stats.model.shape.geometry).into()),
        codec_spec: stats.model.spec.to_string(),
        fingerprint: stats.model.fingerprint.clone(),
        model: Some(model_stats(stats)),
    }
}

pub(super) fn model_stats(stats: &ModelStats) -> v1::ModelStats {
    let [sampled_error_k, sampled_error_v] =
        stats.model.sampled_error().map(Option::unwrap_or_default);
    let [sampled_row_error_k, sampled_row_error_v] =
        stats.model.sampled_row_error().map(Option::unwrap_or_default);
    let count = |metric| stats.model.metrics.read_count(metric);
    let [over_bound_pages_k, over_bound_pages_v] = stats.model.over_bound_pages();
    v1::ModelStats {
        model_id: stats.model.shape.id.0,
        name: stats.model.name.clone(),
        codec: stats.model.codec.clone(),
        sequences: stats.usage.sequences,
        stored: Some(stats.usage.stored.into()),
        calibration_bytes: stats.once.calibration,
        table_bytes: stats.once.tables,
        sampled_error_k,
        sampled_error_v,
        fallback_pages: stats.model.fallback_pages(),
        over_bound_pages_k,
        over_bound_pages_v,
        sampled_row_error_k,
        sampled_row_error_v,
        stored_logical_bytes: count(Metric::StoredLogicalBytesTotal),
        encoded_logical_bytes: count(Metric::EncodedLogicalBytesTotal),
        attended_logical_bytes: count(Metric::AttendedLogicalBytesTotal),
        loaded_logical_bytes: count(Metric::LoadedLogicalBytesTotal),
    }
}

pub(super) fn pool_stats(DevicePool { device, pool }: DevicePool<'_>) -> v1::PoolStats {
    v1::PoolStats {
        device: device.to_owned(),
        tier: pool.tier.to_owned(),
        capacity_bytes: pool.capacity_bytes,
        used_bytes: pool.used_bytes,
        largest_free_bytes: pool.largest_free_bytes,
        slots: pool.slots,
    }
}

pub(super) fn sequence_description(usage: SequenceUsage) -> v1::DescribeSequenceResponse {
    v1::DescribeSequenceResponse {
        model_id: usage.model.0,
        length: usage.length,
        layer_lengths: usage.layer_lengths,
        packed_blocks: usage.packed_blocks,
        raw_blocks: usage.raw_blocks,
        stored: Some(usage.stored.into()),
    }
}

pub(super) fn store_response(layer: LayerIndex, reply: StoreReply) -> v1::StoreBlocksResponse {
    domain::StoreAck {
        layer,
        length: reply.length,
        replayed: reply.replayed,
        packed_blocks: reply.packed_blocks,
    }
    .into()
}

pub(super) fn not_stored(layer: LayerIndex, error: CallError) -> v1::StoreBlocksResponse {
    v1::StoreBlocksResponse { layer: layer.0, error: Some(error.into()), ..Default::default() }
}

/// The error of a part of a request that fails alone.
pub(super) fn call_error(error: &ServiceError) -> CallError {
    CallError {
        stale: error.stale_id().cloned(),
        ..CallError::new(error.code(), error.to_string())
    }
}

pub(super) fn attend_response(reply: AttendReply) -> v1::AttendResponse {
    let query_error = |RefusedQuery { index, error }| domain::QueryError {
        query: index,
        error: call_error(&error),
    };
    domain::Attended {
        out: reply.out.into(),
        lse: reply.lse,
        query_errors: reply.query_errors.into_iter().map(query_error).collect(),
    }
    .into()
}

pub(super) fn not_attended(error: CallError) -> v1::AttendResponse {
    v1::AttendResponse { error: Some(error.into()), ..Default::default() }
}

pub(super) fn calibrate_response(made: CalibrationReply) -> v1::CalibrateModelResponse {
    v1::CalibrateModelResponse {
        calibration: made.calibration.into(),
        tokens: made.tokens,
        queries_per_head: made.queries_per_head,
    }
}

pub(super) fn load_response(piece: LoadPiece) -> v1::LoadBlocksResponse {
    domain::LoadPiece {
        start: piece.start,
        tokens: piece.tokens,
        k: piece.k.into(),
        v: piece.v.into(),
    }
    .into()
}
