//! Calls through a region: payloads are copied out of it before anything looks at them, because the
//! worker may write at any time, and answers are copied into it.

use super::Region;
use crate::service::{AttendReply, Call, Service, ServiceError};
use crate::transport::measure::answer as measured;
use bytes::Bytes;
use kvd_core::{DType, ErrorCode};
use kvd_proto::domain::{AttendBatch, StoreChunk, inline};
use kvd_proto::{RequestError, v1};
use kvd_shm::{Completion, Outcome};
use std::time::{Duration, Instant};

/// Serves one call and ends its completion record, which the caller has tested.
pub(super) async fn answer(service: &Service, region: &Region, call: v1::RegionCall) {
    let timeout = Some(call.timeout_us).filter(|timeout| *timeout != 0);
    let deadline = timeout.and_then(|us| Instant::now().checked_add(Duration::from_micros(us)));
    let caller = Call { namespace: region.namespace.clone(), deadline };
    let (name, metrics) = (name(&call), service.metrics());
    let served = measured(metrics, name, &caller, serve(service, region, &caller, call.call));
    let outcome = match served.await {
        Ok(values) => Outcome::Done(values),
        Err(status) => {
            let code = kvd_proto::error_code(&status).unwrap_or(ErrorCode::Internal);
            Outcome::Refused(format!("{}: {}", code.name(), status.message()))
        }
    };
    let ended = Completion::at(&region.memory, call.done).and_then(|record| record.end(&outcome));
    ended.expect("the record was tested when the call came, and regions keep their size");
}

fn name(call: &v1::RegionCall) -> &'static str {
    match call.call {
        Some(v1::region_call::Call::Store(_)) => "StoreRegion",
        _ => "AttendRegion",
    }
}

async fn serve(
    service: &Service,
    region: &Region,
    caller: &Call,
    call: Option<v1::region_call::Call>,
) -> Result<[u32; 3], ServiceError> {
    match call {
        None => Err(RequestError::Missing { field: "call" }.into()),
        Some(v1::region_call::Call::Attend(call)) => {
            attend(service, region, caller, call).await?;
            Ok([0; 3])
        }
        Some(v1::region_call::Call::Store(mut request)) => {
            request.k = taken(service, region, caller, request.k).await?;
            request.v = taken(service, region, caller, request.v).await?;
            let chunk = StoreChunk::try_from(request)?;
            let stored = service.store(caller, chunk).await?;
            Ok([stored.length, stored.replayed.into(), stored.packed_blocks])
        }
    }
}

async fn attend(
    service: &Service,
    region: &Region,
    caller: &Call,
    call: v1::RegionAttend,
) -> Result<(), ServiceError> {
    let mut request = call.request.ok_or(RequestError::Missing { field: "request" })?;
    request.q = taken(service, region, caller, request.q).await?;
    let batch = AttendBatch::try_from(request)?;
    let model = service.model(caller, batch.model)?;
    // Before any work: an answer must have its place.
    let heads = u64::from(batch.rows()) * u64::from(batch.q_heads);
    let shape = "[sum of n_q, q_heads, head_dim_v]";
    let values = heads * u64::from(model.shape.geometry.head_dim_v);
    let out = place(region, "out", shape, call.out, values, batch.dtype)?;
    let lse = place(region, "lse", "[sum of n_q, q_heads]", call.lse, heads, DType::F32)?;
    let reply: AttendReply = service.attend(caller, batch).await?;
    let bytes = reply.lse.iter().flat_map(|value| value.to_le_bytes()).collect();
    put(region, caller, out, reply.out).await?;
    put(region, caller, lse, bytes).await
}

/// A payload with its bytes, copied out of the region if they are there.
async fn taken(
    service: &Service,
    region: &Region,
    caller: &Call,
    payload: Option<v1::Payload>,
) -> Result<Option<v1::Payload>, ServiceError> {
    let Some(v1::Payload { source: Some(v1::payload::Source::Region(slice)) }) = payload else {
        return Ok(payload);
    };
    check(region, slice.offset, slice.bytes)?;
    // The copy is the daemon's memory, as a message is.
    let max = service.config().message_bytes_max as u64;
    if slice.bytes > max {
        let bytes = slice.bytes;
        let message = format!("a slice of {bytes} bytes is over server.message_bytes_max = {max}");
        return Err(ServiceError::new(ErrorCode::MessageTooLarge, message));
    }
    let bytes = match &region.device {
        Some(device) => device.read(caller, slice.offset, slice.bytes).await?,
        None => {
            let mut bytes = vec![0; slice.bytes as usize];
            region.memory.read(slice.offset, &mut bytes)?;
            bytes
        }
    };
    Ok(Some(inline(Bytes::from(bytes))))
}

/// Tests that payloads may be there.
fn check(region: &Region, offset: u64, bytes: u64) -> Result<(), ServiceError> {
    match &region.device {
        Some(device) => device.check(offset, bytes),
        None => Ok(region.memory.check(offset, bytes)?),
    }
}

/// Copies an answer to its place.
async fn put(
    region: &Region,
    caller: &Call,
    offset: u64,
    bytes: Vec<u8>,
) -> Result<(), ServiceError> {
    match &region.device {
        Some(device) => device.write(caller, offset, bytes).await,
        None => Ok(region.memory.write(offset, &bytes)?),
    }
}

/// Where an answer of `values` goes; its slice must be exactly as long.
fn place(
    region: &Region,
    field: &'static str,
    shape: &'static str,
    slice: Option<v1::RegionSlice>,
    values: u64,
    dtype: DType,
) -> Result<u64, ServiceError> {
    let slice = slice.ok_or(RequestError::Missing { field })?;
    let expected = values * dtype.size_bytes() as u64;
    if slice.bytes != expected {
        let given = slice.bytes;
        return Err(RequestError::PayloadLength { field, shape, given, expected }.into());
    }
    check(region, slice.offset, slice.bytes)?;
    Ok(slice.offset)
}
