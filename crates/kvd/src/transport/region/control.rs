//! Control calls: any unary rpc through a region, by the routes of gRPC itself, so that limits,
//! deadlines, namespaces and errors are its own. A session that is held here is held by the region.

use super::call::{check_size, refusal_of};
use super::{RegionHost, WorkerRegion};
use crate::service::{CallContext, ServiceError, SessionLease};
use crate::transport::encoded_codec::EncodedCodec;
use crate::transport::layer::RequestService;
use crate::transport::measure::{measure_answer, refuse_call};
use bytes::Bytes;
use http::uri::PathAndQuery;
use kvd_core::{ErrorCode, SessionId};
use kvd_proto::domain::{CallError, SessionHold};
use kvd_proto::{NAMESPACE_KEY, RequestError, RpcKind, rpc_kind, v1};
use kvd_shm::CallOutcome;
use parking_lot::Mutex;
use prost::Message;
use std::collections::HashMap;
use std::time::Instant;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::service::Routes;
use tonic::{Code, Request, Status};

/// The services of gRPC, as they are behind its connections.
pub(in crate::transport) type ControlRoutes = RequestService<Routes>;

/// Least room for an answer: what every rpc that changes something fits.
const ANSWER_BYTES_MIN: u64 = 4096;
/// Name by which calls are counted that reach no rpc.
const CONTROL: &str = "ControlRegion";
/// The one stream of gRPC that a region holds by itself.
const HOLD_SESSION: &str = "HoldSession";

/// Sessions that a region holds.
#[derive(Default)]
pub(super) struct HeldSessions {
    leases: Mutex<HashMap<SessionId, SessionLease>>,
}

/// Serves a control call: its answer, or its error, is in the region when this returns.
pub(super) async fn answer_control(
    host: &RegionHost,
    region: &WorkerRegion,
    caller: &CallContext,
    call: v1::RegionControl,
) -> CallOutcome {
    let room = match check_room(region, &call) {
        Ok(room) => room,
        Err(error) => {
            let status = refuse_call(host.service.metrics(), CONTROL, &error);
            return CallOutcome::Refused(refusal_of(&CallError::from(&status), 0));
        }
    };
    let answered = serve_control(host, region, caller, call).await;
    let put = answered.map_err(|status| call_error(&status)).and_then(|answer| {
        put_answer(region, room, &answer)
            .map_err(|error| CallError::new(error.code(), error.to_string()))
    });
    match put {
        Ok(bytes) => CallOutcome::Done([bytes, 0, 0]),
        Err(error) => {
            let whole = v1::CallError::from(error.clone()).encode_to_vec();
            // One that has no room is told by the record alone.
            let bytes = put_answer(region, room, &whole).unwrap_or(0);
            CallOutcome::Refused(refusal_of(&error, bytes))
        }
    }
}

/// Where the answer goes.
fn check_room(
    region: &WorkerRegion,
    call: &v1::RegionControl,
) -> Result<v1::RegionSlice, ServiceError> {
    let room = call.answer.ok_or(RequestError::Missing { field: "answer" })?;
    if room.bytes < ANSWER_BYTES_MIN {
        let message = format!("answer has {} bytes; it needs {ANSWER_BYTES_MIN}", room.bytes);
        return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
    }
    region.memory.check_range(room.offset, room.bytes)?;
    Ok(room)
}

fn put_answer(
    region: &WorkerRegion,
    room: v1::RegionSlice,
    answer: &[u8],
) -> Result<u32, ServiceError> {
    let bytes = answer.len() as u64;
    if bytes > room.bytes {
        let message = format!(
            "the answer takes {bytes} bytes, and answer has {}; ask again with more room",
            room.bytes
        );
        return Err(ServiceError::new(ErrorCode::MessageTooLarge, message));
    }
    region.memory.write_bytes(room.offset, answer)?;
    Ok(answer.len() as u32)
}

/// The error of a status, also of one that gRPC itself gave.
fn call_error(status: &Status) -> CallError {
    if kvd_proto::error_code(status).is_some() {
        return CallError::from(status);
    }
    let code = match status.code() {
        Code::OutOfRange | Code::ResourceExhausted => ErrorCode::MessageTooLarge,
        // A message that does not parse.
        Code::Internal => ErrorCode::InvalidArgument,
        _ => ErrorCode::Internal,
    };
    CallError::new(code, status.message())
}

async fn serve_control(
    host: &RegionHost,
    region: &WorkerRegion,
    caller: &CallContext,
    call: v1::RegionControl,
) -> Result<Bytes, Status> {
    let metrics = host.service.metrics();
    let refuse = |error: ServiceError| refuse_call(metrics, CONTROL, &error);
    let v1::RegionControl { method, request, .. } = call;
    let kind = rpc_kind(&method).ok_or_else(|| refuse(unknown_method(&method)))?;
    let caller = &region.caller.admit_call(&host.service, caller, &method).map_err(refuse)?;
    let request = take_request(host, region, caller, request).map_err(refuse)?;
    match kind {
        RpcKind::Unary => ask_routes(host, region, caller, RpcRequest { method, request }).await,
        RpcKind::Stream if method == HOLD_SESSION => {
            let held = hold_session(host, region, caller, request);
            measure_answer(metrics, HOLD_SESSION, caller, held).await
        }
        RpcKind::Stream => Err(refuse(stream_method(&method))),
    }
}

fn unknown_method(method: &str) -> ServiceError {
    let shown: String = method.chars().take(64).collect();
    let message = format!("method {shown:?} is no rpc of kvd.v1.Kvd, such as \"OpenSequence\"");
    ServiceError::new(ErrorCode::InvalidArgument, message)
}

fn stream_method(method: &str) -> ServiceError {
    let message = format!(
        "{method} is a stream; a region has attend, store, StoreStep, LoadStep and HoldSession"
    );
    ServiceError::new(ErrorCode::InvalidArgument, message)
}

/// The request's bytes, copied out of the memory file if they are there.
fn take_request(
    host: &RegionHost,
    region: &WorkerRegion,
    caller: &CallContext,
    request: Option<v1::Payload>,
) -> Result<Bytes, ServiceError> {
    // Who is not let in costs nothing. What gives back is let in by its rpc.
    caller.check_deadline()?;
    match request.and_then(|payload| payload.source) {
        // A message without fields.
        None => Ok(Bytes::new()),
        Some(v1::payload::Source::Inline(bytes)) => Ok(bytes),
        Some(v1::payload::Source::Region(v1::RegionSlice { offset, bytes })) => {
            region.memory.check_range(offset, bytes)?;
            check_size(&host.service, bytes)?;
            // The routes count it while it is served.
            let _share = host.service.take_bytes(caller, bytes)?;
            let mut copied = vec![0; bytes as usize];
            region.memory.read_bytes(offset, &mut copied)?;
            Ok(copied.into())
        }
    }
}

/// A request of an rpc, encoded.
struct RpcRequest {
    method: String,
    request: Bytes,
}

/// Serves a unary rpc by the routes of gRPC.
async fn ask_routes(
    host: &RegionHost,
    region: &WorkerRegion,
    caller: &CallContext,
    rpc: RpcRequest,
) -> Result<Bytes, Status> {
    let mut request = Request::new(rpc.request);
    let namespace = MetadataValue::try_from(region.caller.namespace.as_str());
    let namespace = namespace.map_err(|error| Status::internal(error.to_string()))?;
    request.metadata_mut().insert(NAMESPACE_KEY, namespace);
    request.extensions_mut().insert(region.caller.owner.clone());
    // Rows of steps are there.
    request.extensions_mut().insert(region.memory.clone());
    if let Some(deadline) = caller.deadline {
        request.set_timeout(deadline.saturating_duration_since(Instant::now()));
    }
    let path = PathAndQuery::try_from(format!("/kvd.v1.Kvd/{}", rpc.method));
    let path = path.map_err(|error| Status::internal(error.to_string()))?;
    let max = host.service.config().message_bytes_max;
    let mut routes = Grpc::new(host.control.clone()).max_decoding_message_size(max);
    Ok(routes.unary(request, path, EncodedCodec).await?.into_inner())
}

/// Holds a session until the region's end.
async fn hold_session(
    host: &RegionHost,
    region: &WorkerRegion,
    caller: &CallContext,
    request: Bytes,
) -> Result<Bytes, ServiceError> {
    let request = v1::HoldSessionRequest::decode(request).map_err(|error| {
        ServiceError::new(ErrorCode::InvalidArgument, format!("request: {error}"))
    })?;
    let hold = SessionHold::try_from(request)?;
    let sessions = &region.sessions;
    let lease = host
        .service
        .hold_session(caller, hold, region.caller.owner.call_peer().to_string())
        .await?;
    let session_id = lease.session_id().0;
    let ttl_ms = u32::try_from(lease.granted_ttl().as_millis()).unwrap_or(u32::MAX);
    let mut leases = sessions.leases.lock();
    // Sessions that others ended are held by nobody.
    leases.retain(|_, lease| !lease.has_ended());
    leases.insert(lease.session_id(), lease);
    Ok(v1::HoldSessionResponse { session_id, ttl_ms }.encode_to_vec().into())
}
