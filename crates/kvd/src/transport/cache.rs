//! Calls of the cache between the wire and the service.

use crate::service::{
    CallContext, DeviceCache, OpenedLayers, PrefixOpening, PublishMode, Service, ServiceError,
};
use kvd_core::{ErrorCode, LeaseId, ModelId, SequenceId};
use kvd_proto::domain::{BlockKeys, session_from_wire};
use kvd_proto::v1;
use kvd_store::PublishStop;
use std::time::Duration;

/// A lease of a message, where 0 is none.
pub(super) fn lease_from_wire(id: u64) -> Option<LeaseId> {
    (id != 0).then_some(LeaseId(id))
}

fn read_keys(chains: Vec<v1::BlockKeys>) -> Vec<BlockKeys> {
    chains.into_iter().map(BlockKeys::from).collect()
}

/// `OpenSequence`: empty, or on a prefix.
pub(super) async fn open_sequence(
    service: &Service,
    call: &CallContext,
    message: v1::OpenSequenceRequest,
) -> Result<v1::OpenSequenceResponse, ServiceError> {
    let (model, lease) = (ModelId(message.model_id), lease_from_wire(message.lease_id));
    let session = session_from_wire(message.session_id);
    if message.prefix.is_none() && lease.is_none() {
        let sequence_id = service.open_sequence_in(call, model, session)?.0;
        return Ok(v1::OpenSequenceResponse { sequence_id, ..Default::default() });
    }
    let prefix = message.prefix.unwrap_or_default().into();
    let opening = PrefixOpening { model, session, prefix, lease };
    let opened = service.open_by_layers(call, &opening, message.ready_layers).await?;
    let OpenedLayers { opened, ready } = opened;
    let (sequence_id, length, ready_layers) = (opened.id.0, opened.length, ready);
    Ok(v1::OpenSequenceResponse { sequence_id, length, ready_layers })
}

/// `CloseSequence`: at once, or if it is idle; with what it published, or without.
pub(super) fn close_sequence(
    service: &Service,
    call: &CallContext,
    message: v1::CloseSequenceRequest,
) -> Result<(), ServiceError> {
    let v1::CloseSequenceRequest { sequence_id, idle_ms_min, keep_published } = message;
    let id = SequenceId(sequence_id);
    match (idle_ms_min, keep_published.unwrap_or(true)) {
        (0, true) => service.close_sequence(call, id),
        (0, false) => service.close_and_drop(call, id),
        (idle, true) => service.close_idle_sequence(call, id, Duration::from_millis(idle)),
        (_, false) => {
            let message = "keep_published: false goes with no idle_ms_min: drop the blocks after";
            Err(ServiceError::new(ErrorCode::InvalidArgument, message))
        }
    }
}

pub(super) async fn match_prefix(
    service: &Service,
    call: &CallContext,
    message: v1::MatchPrefixRequest,
) -> Result<v1::MatchPrefixResponse, ServiceError> {
    let v1::MatchPrefixRequest { model_id, chains, lease_ms } = message;
    let lease = Duration::from_millis(lease_ms.into());
    let chains = read_keys(chains);
    let matched = service.match_shared(call, ModelId(model_id), &chains, lease).await?;
    Ok(v1::MatchPrefixResponse {
        matched_keys: matched.keys,
        matched_tokens: matched.tokens,
        pool_tokens: matched.pool_tokens,
        lease_id: matched.lease.map_or(0, |lease| lease.0),
    })
}

pub(super) fn release_lease(
    service: &Service,
    call: &CallContext,
    message: v1::ReleaseLeaseRequest,
) -> Result<v1::ReleaseLeaseResponse, ServiceError> {
    service.release_lease(call, LeaseId(message.lease_id))?;
    Ok(v1::ReleaseLeaseResponse {})
}

pub(super) async fn publish_blocks(
    service: &Service,
    call: &CallContext,
    message: v1::PublishBlocksRequest,
) -> Result<v1::PublishBlocksResponse, ServiceError> {
    let waits_for_disk = message.wait() == v1::PublishWait::Disk;
    let v1::PublishBlocksRequest { sequence_id, start, keys, settle, .. } = message;
    let missing = || ServiceError::new(ErrorCode::InvalidArgument, "keys is missing");
    let keys = keys.map(BlockKeys::from).ok_or_else(missing)?;
    let sequence = SequenceId(sequence_id);
    let mode = PublishMode { settles: settle, waits_for_disk };
    let reply = service.publish_in_mode(call, sequence, start, &keys, mode).await?;
    let done = reply.published;
    Ok(v1::PublishBlocksResponse {
        length: done.length,
        published: done.published as u32,
        existed: done.existed as u32,
        stopped_by: done.stop.map_or("", stop_name).to_owned(),
        durable_length: reply.durable_length,
        not_durable: reply
            .not_durable
            .map_or_else(String::new, |why| format!("NOT_DURABLE: {why}")),
    })
}

fn stop_name(stop: PublishStop) -> &'static str {
    match stop {
        PublishStop::PoolFull => "POOL_FULL",
        PublishStop::Unpackable => "UNPACKABLE",
        PublishStop::KeyInUse => "KEY_IN_USE",
        PublishStop::IndexFull => "INDEX_FULL",
        PublishStop::CacheFull => "CACHE_FULL",
        PublishStop::QuotaExceeded => "QUOTA_EXCEEDED",
        PublishStop::ParentGone => "PARENT_GONE",
    }
}

pub(super) fn pin_blocks(
    service: &Service,
    call: &CallContext,
    message: v1::PinBlocksRequest,
) -> Result<v1::PinBlocksResponse, ServiceError> {
    let v1::PinBlocksRequest { model_id, chains, ttl_ms } = message;
    let ttl = (ttl_ms != 0).then(|| Duration::from_millis(ttl_ms));
    let pinned = service.pin_prefixes(call, ModelId(model_id), &read_keys(chains), ttl)?;
    let (pinned_tokens, pinned_bytes) = (pinned.tokens, pinned.pinned_bytes);
    Ok(v1::PinBlocksResponse { pinned_tokens, pinned_bytes })
}

pub(super) fn unpin_blocks(
    service: &Service,
    call: &CallContext,
    message: v1::UnpinBlocksRequest,
) -> Result<v1::UnpinBlocksResponse, ServiceError> {
    let v1::UnpinBlocksRequest { model_id, chains } = message;
    let unpinned = service.unpin_prefixes(call, ModelId(model_id), &read_keys(chains))?;
    Ok(v1::UnpinBlocksResponse { unpinned })
}

pub(super) fn drop_blocks(
    service: &Service,
    call: &CallContext,
    message: v1::DropBlocksRequest,
) -> Result<v1::DropBlocksResponse, ServiceError> {
    let v1::DropBlocksRequest { model_id, chains } = message;
    let dropped = service.drop_blocks(call, ModelId(model_id), &read_keys(chains))?;
    Ok(v1::DropBlocksResponse { dropped: dropped.dropped, held: dropped.held })
}

/// Use of one device's cache.
pub(super) fn cache_stats(of: DeviceCache<'_>) -> v1::CacheStats {
    let DeviceCache { device, usage, limit_bytes } = of;
    v1::CacheStats {
        device: device.to_owned(),
        blocks: usage.entries,
        bytes: usage.bytes,
        limit_bytes,
        leases: usage.leases,
        pinned_bytes: usage.pinned_bytes,
        published: usage.published,
        evicted: usage.evicted_for_room + usage.evicted_by_limit,
        pool_blocks: usage.pool_entries,
        disk_blocks: usage.disk_entries,
    }
}
