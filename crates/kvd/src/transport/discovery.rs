//! Answers about the daemon itself: where its regions are, what it can, what it limits, and which
//! codecs it knows.

use super::{cache, convert};
use crate::config::{check_weight, find_quota};
use crate::quotas::{LimitChange, QuotaOrder};
use crate::service::{CallContext, ChangedQuotas, QuotaDescription, Service, ServiceError};
use kvd_codec::{CodecSpec, Preset, presets, resolve_spec};
use kvd_core::{DType, ErrorCode, Geometry, Namespace, RopePairing, Side};
use kvd_proto::domain::ModelSpec;
use kvd_proto::v1;
use std::collections::HashMap;

/// Raised when something changes that a client relied on.
const PROTOCOL: u32 = 1;

/// Additions to the first version of the protocol.
const FEATURES: [&str; 10] = [
    "all_visible",
    "calibrate_model",
    "codec_list",
    "lse_form",
    "out_dtype",
    "region_control",
    "region_ring",
    "steps",
    "watch_blocks",
    "windows",
];

/// Shape for which the bits of codecs are given; they hardly depend on it.
const GEOMETRY: Geometry = Geometry {
    layers: 1,
    kv_heads: 1,
    head_dim_k: 128,
    head_dim_v: 128,
    block_tokens: 64,
    dtype: DType::F16,
    rope_pairing: RopePairing::Half,
};

/// The answer to `GetServerInfo`.
pub(super) fn server_info(
    service: &Service,
    call: &CallContext,
) -> Result<v1::GetServerInfoResponse, ServiceError> {
    service.admit_call(call)?;
    let config = service.config();
    let region = config.listen_region.as_ref();
    // A client's working directory is another.
    let region = region.map(|path| std::path::absolute(path).unwrap_or_else(|_| path.clone()));
    Ok(v1::GetServerInfoResponse {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: service.boot_id().to_owned(),
        device: service.device_names(),
        pool_capacity_bytes: service.pool_stats().capacity_bytes,
        message_bytes_max: config.message_bytes_max as u64,
        block_tokens_default: config.block_tokens_default,
        precision: service.precision_name().to_owned(),
        region_path: region.map(|path| path.display().to_string()).unwrap_or_default(),
        protocol: PROTOCOL,
        features: FEATURES.map(str::to_owned).to_vec(),
        limits: named_limits(service),
        codec_default: ModelSpec::CODEC_DEFAULT.to_owned(),
    })
}

/// The answer to `ListModels`.
pub(super) fn model_list(
    service: &Service,
    call: &CallContext,
) -> Result<v1::ListModelsResponse, ServiceError> {
    let mut models = Vec::new();
    for model in service.list_models(call)? {
        models.push(convert::model_description(&service.model_stats(call, model)?));
    }
    Ok(v1::ListModelsResponse { models })
}

/// Limits that a client may run into, by the names of their settings.
fn named_limits(service: &Service) -> HashMap<String, u64> {
    let config = service.config();
    let session_ttl = u64::try_from(config.session_ttl_max.as_millis()).unwrap_or(u64::MAX);
    let limits = [
        ("server.message_bytes_max", config.message_bytes_max as u64),
        ("device.queue_jobs_max", config.queue_jobs_max as u64),
        ("limits.models_max", config.models_max as u64),
        ("limits.sequences_max", config.sequences_max as u64),
        ("limits.sessions_max", config.sessions_max as u64),
        ("limits.session_ttl_ms_max", session_ttl),
        ("limits.tokens_per_sequence_max", config.tokens_per_sequence_max.into()),
        ("limits.calibration_bytes_max", config.calibration_bytes_max as u64),
        ("limits.calibration_rows_bytes_max", config.calibration_rows_bytes_max),
        ("limits.inflight_bytes_max", config.inflight_bytes_max as u64),
        ("limits.connection_bytes_max", config.connection_bytes_max as u64),
        ("limits.namespace_bytes_max", config.namespace_bytes_max as u64),
        ("limits.regions_max", config.regions_max as u64),
        ("limits.region_bytes_max", config.region_bytes_max),
        ("limits.ring_entries_max", config.rings.entries_max.into()),
        ("limits.attend_parts_max", config.attend_parts_max),
        ("limits.attend_work_max", config.attend_work_max),
        ("limits.step_rows_max", config.step_rows_max),
        ("limits.page_tokens_min", config.page_tokens_min.into()),
    ];
    limits.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The answer to `GetStats`.
pub(super) fn daemon_stats(
    service: &Service,
    call: &CallContext,
) -> Result<v1::GetStatsResponse, ServiceError> {
    let mut models = Vec::new();
    for model in service.list_models(call)? {
        models.push(convert::model_stats(&service.model_stats(call, model)?));
    }
    Ok(v1::GetStatsResponse {
        boot_id: service.boot_id().to_owned(),
        pools: service.device_pools().map(convert::pool_stats).collect(),
        models,
        caches: service.device_caches().map(cache::cache_stats).collect(),
    })
}

/// The answer to `ListNamespaces`.
pub(super) fn namespace_list(
    service: &Service,
    call: &CallContext,
) -> Result<v1::ListNamespacesResponse, ServiceError> {
    let described = service.list_namespaces(call)?.into_iter().map(|found| v1::NamespaceInfo {
        name: found.name.as_str().to_owned(),
        models: found.models,
        sequences: found.sequences,
        sessions: found.sessions,
        held_bytes: found.held_bytes,
        weight: found.weight,
        quotas: found.quotas.into_iter().map(quota_info).collect(),
    });
    Ok(v1::ListNamespacesResponse { namespaces: described.collect() })
}

fn quota_info(quota: QuotaDescription) -> v1::NamespaceQuota {
    let QuotaDescription { kind, used, allowed, refused } = quota;
    v1::NamespaceQuota { name: kind.quota_name().to_owned(), used, allowed, refused }
}

/// The answer to `SetNamespaceQuotas`.
pub(super) async fn set_quotas(
    service: &Service,
    call: &CallContext,
    request: v1::SetNamespaceQuotasRequest,
) -> Result<v1::SetNamespaceQuotasResponse, ServiceError> {
    let order = read_order(&request)?;
    let ChangedQuotas { quotas, weight, is_kept } = service.set_quotas(call, order).await?;
    let quotas = quotas.into_iter().map(quota_info).collect();
    Ok(v1::SetNamespaceQuotasResponse { quotas, kept: is_kept, weight })
}

fn read_order(request: &v1::SetNamespaceQuotasRequest) -> Result<QuotaOrder, ServiceError> {
    let wrong = |reason: String| ServiceError::new(ErrorCode::InvalidArgument, reason);
    let namespace = Namespace::new(&request.name);
    let namespace = namespace.map_err(|error| wrong(format!("name: {error}")))?;
    if !request.reset && request.changes.is_empty() && request.weight.is_none() {
        return Err(wrong("changes: there are none, no weight, and no reset".to_owned()));
    }
    let weight = request.weight.map(check_weight).transpose();
    let weight = weight.map_err(|reason| wrong(format!("weight: {reason}")))?;
    let mut changes: Vec<LimitChange> = Vec::new();
    for v1::QuotaChange { name, allowed } in &request.changes {
        let kind = find_quota(name).map_err(|reason| wrong(format!("changes: {reason}")))?;
        if changes.iter().any(|change| change.kind == kind) {
            return Err(wrong(format!("changes: {name} stands twice")));
        }
        if *allowed == Some(u64::MAX) {
            return Err(wrong(format!("changes: {name} is out of range; leave it out for none")));
        }
        changes.push(LimitChange { kind, allowed: *allowed });
    }
    Ok(QuotaOrder { namespace, reset: request.reset, changes, weight })
}

/// The answer to `ListCodecs`.
pub(super) fn codec_list(
    service: &Service,
    call: &CallContext,
) -> Result<v1::ListCodecsResponse, ServiceError> {
    service.admit_call(call)?;
    let page_tokens_min = service.config().page_tokens_min;
    let described = presets().iter().filter_map(|preset| {
        // A test of the codecs parses every preset.
        Some(codec_info(preset, &resolve_spec(preset.name).ok()?, page_tokens_min))
    });
    Ok(v1::ListCodecsResponse { codecs: described.collect() })
}

fn codec_info(preset: &Preset, spec: &CodecSpec, page_tokens_min: u32) -> v1::CodecInfo {
    let [bits_k, bits_v] = Side::BOTH.map(|side| {
        let of_side = spec.side(side);
        // A rate that a fit keeps counts everything.
        let rate = of_side.quantizer.target_bits().map(f64::from);
        rate.or_else(|| of_side.implied_bits(&GEOMETRY, side).total_bits())
    });
    v1::CodecInfo {
        name: preset.name.to_owned(),
        spec: spec.to_string(),
        summary: preset.summary.to_owned(),
        choose_when: preset.choose_when.to_owned(),
        bits_k,
        bits_v,
        needs_calibration: spec.needs_calibration(),
        page_tokens_min: crate::service::least_page_tokens(spec, page_tokens_min),
        sink: spec.sink,
        recent: spec.recent,
    }
}
