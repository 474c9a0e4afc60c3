//! Calls through a region: payloads are copied out of it before anything looks at them, because the
//! worker may write at any time, and answers are copied into it; but what kernels reach in device
//! memory is read and answered where it is, and K and V are copied within the device.

use super::{RegionHost, WorkerRegion, control};
use crate::metrics::Metric;
use crate::service::{
    AttendReply, CallContext, InPlaceQueries, OpenMemory, RefusedQuery, RegisteredModel, Service,
    ServiceError, StoreReply,
};
use crate::transport::measure::measure_answer;
use bytes::Bytes;
use kvd_compute::{RegionPlaces, RegionRows};
use kvd_core::{DType, ErrorCode};
use kvd_proto::domain::{AnswerForm, AttendBatch, CallError, StoreChunk, inline_payload};
use kvd_proto::{RequestError, v1};
use kvd_shm::{CallOutcome, CallRefusal, CompletionRecord, RegionMemory};
use std::time::{Duration, Instant};

/// Bytes of what is said of one query that was refused alone.
pub(super) const QUERY_ERROR_BYTES: usize = 128;
/// Bytes of one log-sum-exp.
const LSE_BYTES: u64 = DType::F32.size_bytes() as u64;

/// The work of a call.
struct CallWork {
    call: Option<v1::region_call::Call>,
    /// Its name, as it is counted and let in.
    rpc: &'static str,
    /// Completion record that is to tell of the launch, where the caller wants that.
    launched: Option<u64>,
}

/// An attend, and the record that is to tell of its launch.
struct AttendWork {
    call: v1::RegionAttend,
    launched: Option<u64>,
}

/// A store whose K and V are in device memory.
struct DeviceStore<'a> {
    request: &'a v1::StoreBlocksRequest,
    k: v1::RegionSlice,
    v: v1::RegionSlice,
}

/// Serves one call and ends its completion record, which the caller has tested.
pub(super) async fn answer_call(host: &RegionHost, region: &WorkerRegion, call: v1::RegionCall) {
    let service = &*host.service;
    let timeout = Some(call.timeout_us).filter(|timeout| *timeout != 0);
    let deadline = timeout.and_then(|us| Instant::now().checked_add(Duration::from_micros(us)));
    let caller = CallContext { deadline, ..region.caller.call_context() };
    let (name, metrics) = (rpc_name(&call), service.metrics());
    let (done, launched) = (call.done, call.say_launched.then_some(call.done));
    let outcome = match call.call {
        // Its rpc is measured by the service of gRPC.
        Some(v1::region_call::Call::Control(call)) => {
            control::answer_control(host, region, &caller, call).await
        }
        call => {
            let served =
                serve_call(service, region, &caller, CallWork { call, rpc: name, launched });
            match measure_answer(metrics, name, &caller, served).await {
                Ok(values) => CallOutcome::Done(values),
                Err(status) => CallOutcome::Refused(refusal_of(&CallError::from(&status), 0)),
            }
        }
    };
    let ended = CompletionRecord::from_offset(&region.memory, done)
        .and_then(|record| record.end_call(&outcome));
    ended.expect("the record was tested when the call came, and regions keep their size");
}

/// The record's form of an error, of which `error_bytes` are elsewhere.
pub(super) fn refusal_of(error: &CallError, error_bytes: u32) -> CallRefusal {
    let CallError { code, message, retry_after, stale } = error;
    let retry_after_ms =
        retry_after.map_or(0, |time| time.as_millis().try_into().unwrap_or(u32::MAX));
    let id_boot = stale.as_ref().and_then(|stale| u32::from_str_radix(&stale.id_boot, 16).ok());
    CallRefusal {
        text: format!("{}: {message}", code.name()),
        retry_after_ms,
        id_boot: id_boot.unwrap_or(0),
        error_bytes,
    }
}

/// Whether it stores.
pub(super) fn is_store(call: &v1::RegionCall) -> bool {
    matches!(call.call, Some(v1::region_call::Call::Store(_)))
}

fn rpc_name(call: &v1::RegionCall) -> &'static str {
    if is_store(call) { "StoreRegion" } else { "AttendRegion" }
}

async fn serve_call(
    service: &Service,
    region: &WorkerRegion,
    caller: &CallContext,
    work: CallWork,
) -> Result<[u32; 3], ServiceError> {
    // Before payloads are copied: who is not let in costs nothing.
    region.caller.admit_call(service, caller, work.rpc)?;
    service.admit_call(caller)?;
    match work.call {
        // Control calls and rings have gone their own way.
        None | Some(v1::region_call::Call::Control(_) | v1::region_call::Call::Ring(_)) => {
            Err(RequestError::Missing { field: "call" }.into())
        }
        Some(v1::region_call::Call::Attend(call)) => {
            let attend = AttendWork { call, launched: work.launched };
            let failed = attend_batch(service, region, caller, attend).await?;
            Ok([failed, 0, 0])
        }
        Some(v1::region_call::Call::Store(request)) => {
            let stored = store_blocks(service, region, caller, request).await?;
            Ok([stored.length, stored.replayed.into(), stored.packed_blocks])
        }
    }
}

async fn store_blocks(
    service: &Service,
    region: &WorkerRegion,
    caller: &CallContext,
    mut request: v1::StoreBlocksRequest,
) -> Result<StoreReply, ServiceError> {
    let slices = [request.k.as_ref(), request.v.as_ref()].map(slice_of);
    let given: Vec<_> = slices.into_iter().flatten().collect();
    let bytes = check_slices(service, region, &given)?;
    if let (Some(device), [Some(k), Some(v)]) = (&region.device, slices) {
        let store = DeviceStore { request: &request, k, v };
        if let Some(stored) = store_in_place(service, device, caller, store).await? {
            return Ok(stored);
        }
    }
    // Before anything is copied.
    let _share = service.take_bytes(caller, bytes)?;
    let caller = &CallContext { is_message_admitted: true, ..caller.clone() };
    request.k = take_payload(region, caller, request.k).await?;
    request.v = take_payload(region, caller, request.v).await?;
    count_call(service, if region.device.is_some() { "copied" } else { "file" });
    service.store_chunk(caller, StoreChunk::try_from(request)?).await
}

/// A store whose K and V are both in device memory, if its device takes them from there.
async fn store_in_place(
    service: &Service,
    device: &OpenMemory,
    caller: &CallContext,
    store: DeviceStore<'_>,
) -> Result<Option<StoreReply>, ServiceError> {
    let DeviceStore { request, k, v } = store;
    let nothing = Some(inline_payload(Bytes::new()));
    let without = v1::StoreBlocksRequest { k: nothing.clone(), v: nothing, ..*request };
    let chunk = StoreChunk::try_from(without)?;
    let model = service.model_of(caller, chunk.sequence)?;
    if !device.stages_rows(&model, [k.offset, v.offset]) {
        return Ok(None);
    }
    let places = RegionRows {
        region: device.device_region(),
        tokens: chunk.tokens,
        k: k.offset,
        v: v.offset,
    };
    let stored = service.store_in_place(caller, &chunk, places, [k.bytes, v.bytes]).await;
    if !matches!(stored, Ok(None)) {
        count_call(service, "in_place");
    }
    stored
}

/// Counts a call by where its payloads were.
fn count_call(service: &Service, payloads: &'static str) {
    service.metrics().counter(Metric::RegionCallsTotal, &[("payloads", payloads)]).increment(1);
}

/// Where the answer to an attend goes.
#[derive(Clone, Copy)]
struct AnswerPlaces {
    out: u64,
    out_bytes: u64,
    lse: u64,
    lse_bytes: u64,
    /// In the memory file; where the batch asks for errors of single queries.
    query_errors: Option<u64>,
}

/// Answers how many queries of the batch were refused alone.
async fn attend_batch(
    service: &Service,
    region: &WorkerRegion,
    caller: &CallContext,
    work: AttendWork,
) -> Result<u32, ServiceError> {
    let AttendWork { mut call, launched } = work;
    let mut request = call.request.take().ok_or(RequestError::Missing { field: "request" })?;
    let form = AnswerForm::from_request(&request)?;
    let payload = request.q.take();
    let elsewhere = region.device.as_ref().zip(slice_of(payload.as_ref()));
    let in_file = slice_of(payload.as_ref()).filter(|_| elsewhere.is_none());
    let bytes = check_slices(service, region, in_file.as_slice())?;
    // Before anything is copied.
    let _share = service.take_bytes(caller, bytes)?;
    let copying = CallContext { is_message_admitted: true, ..caller.clone() };
    request.q = match elsewhere {
        Some(_) => Some(inline_payload(Bytes::new())),
        None => take_payload(region, caller, payload).await?,
    };
    let mut batch = AttendBatch::try_from(request)?;
    service.admit_call(caller)?;
    let model = service.batch_model(caller, &batch)?;
    let queries = batch.queries.len();
    // Before any work: an answer must have its place.
    let at = answer_places(region, FormedBatch { batch: &batch, form }, &model, &call)?;
    let mut _copy = None;
    if let Some((device, q)) = elsewhere {
        check_slice(region, q.offset, q.bytes)?;
        // In place or copied, a call has the same limits.
        check_size(service, q.bytes)?;
        batch.check_shape_of(&model.shape.geometry, q.bytes)?;
        let places =
            RegionPlaces { region: device.device_region(), q: q.offset, out: at.out, lse: at.lse };
        let slices = CallSlices {
            q: DeviceSlice { offset: q.offset, bytes: q.bytes },
            out: DeviceSlice { offset: at.out, bytes: at.out_bytes },
            lse: DeviceSlice { offset: at.lse, bytes: at.lse_bytes },
        };
        let fits = form.is_usual(batch.dtype) && kernels_take(batch.dtype, &slices);
        if fits && batch.query_rows() > 0 && device.reaches_queries(&model, &batch) {
            count_call(service, "in_place");
            let memory = region.memory.clone();
            // A query that the host may still answer anew is not final before the end.
            let launched = launched.filter(|_| !batch.per_query_errors);
            let tell = move || {
                let record = launched.map(|done| CompletionRecord::from_offset(&memory, done));
                // The record was tested when the call came.
                let _ = record.map(|record| record.and_then(|record| record.mark_launched()));
            };
            let in_place = InPlaceQueries { places, q_bytes: q.bytes };
            let again = batch.per_query_errors.then(|| batch.clone());
            let result = service.attend_in_place(caller, batch, in_place, tell).await;
            batch = match (result, again) {
                // The device says that a query is not finite; which ones, the host finds out.
                (Err(error), Some(again)) if error.code() == ErrorCode::NonFinite => again,
                (result, _) => return put_query_errors(region, at.query_errors, queries, &result?),
            };
        }
        let share = service.take_bytes(caller, q.bytes)?;
        batch.q = copy_out(device, caller, q).await?;
        _copy = Some(share);
    }
    count_call(service, if region.device.is_some() { "copied" } else { "file" });
    let reply: AttendReply = service.attend_formed(&copying, batch, form).await?;
    let bytes = reply.lse.iter().flat_map(|value| value.to_le_bytes()).collect();
    put_answer(region, caller, at.out, reply.out).await?;
    put_answer(region, caller, at.lse, bytes).await?;
    put_query_errors(region, at.query_errors, queries, &reply.query_errors)
}

/// A batch, and the form of its answer.
#[derive(Clone, Copy)]
struct FormedBatch<'a> {
    batch: &'a AttendBatch,
    form: AnswerForm,
}

/// Where the answer to a batch goes; each slice must be exactly as long.
fn answer_places(
    region: &WorkerRegion,
    formed: FormedBatch<'_>,
    model: &RegisteredModel,
    call: &v1::RegionAttend,
) -> Result<AnswerPlaces, ServiceError> {
    let FormedBatch { batch, form } = formed;
    let dtype = form.out_dtype_for(batch.dtype);
    let heads = u64::from(batch.query_rows()) * u64::from(batch.q_heads);
    let values = heads * u64::from(model.shape.geometry.head_dim_v);
    let shape = "[sum of n_q, q_heads, head_dim_v]";
    let out = answer_place(region, "out", shape, call.out, values, dtype)?;
    let lse = answer_place(region, "lse", "[sum of n_q, q_heads]", call.lse, heads, DType::F32)?;
    let out_bytes = values * dtype.size_bytes() as u64;
    let query_errors = if batch.per_query_errors {
        let field = "query_errors";
        let slice = call.query_errors.ok_or(RequestError::Missing { field })?;
        let (given, expected) = (slice.bytes, (batch.queries.len() * QUERY_ERROR_BYTES) as u64);
        if given != expected {
            let shape = "[queries, 128]";
            return Err(RequestError::PayloadLength { field, shape, given, expected }.into());
        }
        region.memory.check_range(slice.offset, slice.bytes)?;
        Some(slice.offset)
    } else {
        None
    };
    Ok(AnswerPlaces { out, out_bytes, lse, lse_bytes: heads * LSE_BYTES, query_errors })
}

fn put_query_errors(
    region: &WorkerRegion,
    at: Option<u64>,
    queries: usize,
    refused: &[RefusedQuery],
) -> Result<u32, ServiceError> {
    write_query_errors(&region.memory, at, queries, refused)
}

/// Writes "CODE: message" of each query that was refused alone; answers how many there are.
pub(super) fn write_query_errors(
    memory: &RegionMemory,
    at: Option<u64>,
    queries: usize,
    refused: &[RefusedQuery],
) -> Result<u32, ServiceError> {
    let Some(at) = at.filter(|_| !refused.is_empty()) else { return Ok(0) };
    let mut bytes = vec![0; queries * QUERY_ERROR_BYTES];
    for RefusedQuery { index, error } in refused {
        let text = format!("{}: {error}", error.code().name());
        let text = &text.as_bytes()[..text.floor_char_boundary(QUERY_ERROR_BYTES)];
        bytes[*index as usize * QUERY_ERROR_BYTES..][..text.len()].copy_from_slice(text);
    }
    memory.write_bytes(at, &bytes)?;
    Ok(refused.len() as u32)
}

/// Bytes of device memory.
#[derive(Clone, Copy)]
struct DeviceSlice {
    offset: u64,
    bytes: u64,
}

/// Slices that one attend reads and writes in device memory.
struct CallSlices {
    q: DeviceSlice,
    out: DeviceSlice,
    lse: DeviceSlice,
}

/// Whether kernels can read and write values there: aligned, and no two of the three meet, since a
/// kernel writes answers while another block still reads queries. The slices lie in the region.
fn kernels_take(dtype: DType, call: &CallSlices) -> bool {
    let CallSlices { q, out, lse } = *call;
    let value = dtype.size_bytes() as u64;
    let is_aligned = |slice: DeviceSlice, each: u64| slice.offset.is_multiple_of(each);
    let are_apart = |a: DeviceSlice, b: DeviceSlice| {
        a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset
    };
    is_aligned(q, value)
        && is_aligned(out, value)
        && is_aligned(lse, LSE_BYTES)
        && are_apart(q, out)
        && are_apart(q, lse)
        && are_apart(out, lse)
}

/// Where in a region a payload is, if it is there.
fn slice_of(payload: Option<&v1::Payload>) -> Option<v1::RegionSlice> {
    match payload?.source {
        Some(v1::payload::Source::Region(slice)) => Some(slice),
        _ => None,
    }
}

/// A slice of device memory, copied; a copy is the daemon's memory, as a message is.
async fn copy_out(
    device: &OpenMemory,
    caller: &CallContext,
    slice: v1::RegionSlice,
) -> Result<Bytes, ServiceError> {
    Ok(device.read_bytes(caller, slice.offset, slice.bytes).await?.into())
}

/// Refuses payloads larger than a message.
pub(super) fn check_size(service: &Service, bytes: u64) -> Result<(), ServiceError> {
    let max = service.config().message_bytes_max as u64;
    if bytes <= max {
        return Ok(());
    }
    let message = format!("payloads of {bytes} bytes are over server.message_bytes_max = {max}");
    Err(ServiceError::new(ErrorCode::MessageTooLarge, message))
}

/// Tests that slices lie in the region and are together no larger than a message may be, and
/// answers their bytes. A slice that fails here never fits, however long the caller waits.
fn check_slices(
    service: &Service,
    region: &WorkerRegion,
    slices: &[v1::RegionSlice],
) -> Result<u64, ServiceError> {
    for slice in slices {
        check_slice(region, slice.offset, slice.bytes)?;
    }
    let bytes = slices.iter().fold(0u64, |sum, slice| sum.saturating_add(slice.bytes));
    check_size(service, bytes)?;
    Ok(bytes)
}

/// A payload with its bytes, copied out of the region if they are there. [`check_slices`] has
/// tested its slice.
async fn take_payload(
    region: &WorkerRegion,
    caller: &CallContext,
    payload: Option<v1::Payload>,
) -> Result<Option<v1::Payload>, ServiceError> {
    let Some(slice) = slice_of(payload.as_ref()) else { return Ok(payload) };
    let bytes = match &region.device {
        Some(device) => copy_out(device, caller, slice).await?,
        None => {
            let mut bytes = vec![0; slice.bytes as usize];
            region.memory.read_bytes(slice.offset, &mut bytes)?;
            bytes.into()
        }
    };
    Ok(Some(inline_payload(bytes)))
}

/// Tests that payloads may be there.
fn check_slice(region: &WorkerRegion, offset: u64, bytes: u64) -> Result<(), ServiceError> {
    match &region.device {
        Some(device) => device.check_range(offset, bytes),
        None => Ok(region.memory.check_range(offset, bytes)?),
    }
}

/// Copies an answer to its place.
async fn put_answer(
    region: &WorkerRegion,
    caller: &CallContext,
    offset: u64,
    bytes: Vec<u8>,
) -> Result<(), ServiceError> {
    match &region.device {
        Some(device) => device.write_bytes(caller, offset, bytes).await,
        None => Ok(region.memory.write_bytes(offset, &bytes)?),
    }
}

/// Where an answer of `values` goes; its slice must be exactly as long.
fn answer_place(
    region: &WorkerRegion,
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
    check_slice(region, slice.offset, slice.bytes)?;
    Ok(slice.offset)
}
