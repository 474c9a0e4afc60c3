//! Regions: a worker hands memory over a Unix socket, writes queries there, and finds the outputs
//! there (`docs/contract.md`, "Regions"). A connection is a region: when it ends, however it does,
//! requests that have not begun are dropped and the memory is given back.

mod call;
mod control;
mod frames;
mod ring;

use super::connection::ServerPhase;
use super::measure::refuse_call;
use super::socket::BoundSocket;
use crate::access::{AccessRequest, ConnectionPeer, PeerDoor};
use crate::metrics::{Metric, Metrics, OpenCount};
use crate::service::{CallContext, CallOwner, MemoryOffer, OpenMemory, Service, ServiceError};
use control::{ControlRoutes, HeldSessions};
use frames::{FrameSocket, ReceivedFrame};
use kvd_compute::RegionHandle;
use kvd_core::{ErrorCode, Namespace};
use kvd_proto::domain::CallError;
use kvd_proto::v1;
use kvd_shm::{CallOutcome, CompletionRecord, RegionMemory};
use metrics::Gauge;
use ring::ServedRing;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Calls of one region that are under way; further ones wait in its socket.
const CALLS_AHEAD_MAX: usize = 32;
/// How long calls that were sent when the connection ended are read, and passed over.
const LINGER_TIME: Duration = Duration::from_millis(500);
/// Time to send the first message and its descriptors: a worker that connects has them at hand.
const HANDSHAKE_TIME: Duration = Duration::from_secs(2);
/// How long to wait when the system gives no socket.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// The socket for regions.
pub(super) struct RegionServer {
    pub(super) socket: BoundSocket,
}

/// A worker that connects, and its place among the regions.
struct RegionPeer {
    peer: Arc<ConnectionPeer>,
    permit: OwnedSemaphorePermit,
}

/// State that all regions share.
#[derive(Clone)]
pub(super) struct RegionHost {
    pub(super) service: Arc<Service>,
    /// The way of control calls.
    pub(super) control: ControlRoutes,
}

/// Whoever opened a region.
#[derive(Clone)]
struct RegionCaller {
    namespace: Namespace,
    /// Whose jobs and bytes count together: the connection.
    owner: CallOwner,
}

/// A region that is open.
struct WorkerRegion {
    /// Whose calls come through it.
    caller: RegionCaller,
    /// Completion records, and payloads where no device memory is open. A device may tell of a
    /// launch there when the region is gone.
    memory: Arc<RegionMemory>,
    /// Payloads.
    device: Option<OpenMemory>,
    /// Sessions that it holds until its end.
    sessions: HeldSessions,
    regions: Gauge,
    bytes: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl WorkerRegion {
    fn new(
        caller: RegionCaller,
        memory: RegionMemory,
        metrics: &Metrics,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let regions = metrics.gauge(Metric::Regions, &[]);
        let bytes = metrics.gauge(Metric::RegionBytes, &[]);
        regions.increment(1.0);
        bytes.increment(memory.size_bytes() as f64);
        let (memory, sessions) = (Arc::new(memory), HeldSessions::default());
        Self { caller, memory, device: None, sessions, regions, bytes, _permit: permit }
    }
}

impl RegionCaller {
    /// Lets a call of an rpc pass, as one of whoever opened the region.
    fn admit_call(
        &self,
        service: &Service,
        call: &CallContext,
        rpc: &str,
    ) -> Result<CallContext, ServiceError> {
        let (peer, namespace) = (self.owner.call_peer(), &self.namespace);
        let request = AccessRequest { peer, authorization: None, rpc, namespace };
        let principal = service.access_control().check_call(&request)?;
        let begin = |of| service.access_control().begin_call(&request, of);
        let permit = principal.as_ref().map(begin).transpose()?.map(Arc::new);
        Ok(CallContext { principal, _permit: permit, ..call.clone() })
    }

    /// Context of a call through it.
    fn call_context(&self) -> CallContext {
        CallContext { owner: self.owner.clone(), ..CallContext::new(self.namespace.clone()) }
    }
}

impl Drop for WorkerRegion {
    fn drop(&mut self) {
        self.regions.decrement(1.0);
        self.bytes.decrement(self.memory.size_bytes() as f64);
    }
}

impl RegionServer {
    /// Serves until the daemon drains: calls under way are answered, unless the cut comes first.
    pub(super) async fn serve_regions(self, host: RegionHost, phase: watch::Receiver<ServerPhase>) {
        let Self { socket } = self;
        let service = &host.service;
        let permits = Arc::new(Semaphore::new(service.config().regions_max));
        let mut connections = JoinSet::new();
        let open = super::server::connections_gauge(service.metrics(), "region");
        let drain = ServerPhase::Draining.wait_until(phase.clone());
        let cut = ServerPhase::Cut.wait_until(phase.clone());
        tokio::pin!(drain, cut);
        loop {
            tokio::select! {
                accepted = socket.accept_stream() => match accepted {
                    Ok(stream) => {
                        let (host, phase) = (host.clone(), phase.clone());
                        match permits.clone().try_acquire_owned() {
                            Ok(permit) => {
                                let count = OpenCount::new(&open);
                                connections.spawn(async move {
                                    let _count = count;
                                    serve_connection(stream, host, phase, permit).await;
                                });
                            }
                            Err(_) => refuse_full(stream, service.config().regions_max).await,
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a region's connection could not be accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = connections.join_next() => {}
                () = &mut drain => break,
            }
        }
        // A worker that comes now is refused by the system, and finds a successor's file.
        drop(socket);
        tokio::select! {
            () = async { while connections.join_next().await.is_some() {} } => {}
            () = &mut cut => {}
        }
    }
}

/// Refuses a connection without a wait for what it says: those over the limit hold nothing.
async fn refuse_full(stream: UnixStream, max: usize) {
    let message = format!("{max} regions are open already, limits.regions_max");
    let error = ServiceError::new(ErrorCode::LimitExceeded, message);
    refuse_worker(&FrameSocket::new(stream), &error).await;
}

/// One worker's connection, from its first message to its end.
async fn serve_connection(
    stream: UnixStream,
    host: RegionHost,
    mut phase: watch::Receiver<ServerPhase>,
    permit: OwnedSemaphorePermit,
) {
    let service = &host.service;
    let peer = Arc::new(ConnectionPeer::of_socket(PeerDoor::Region, &stream));
    let mut frames = FrameSocket::new(stream);
    let OpenedRegion { region, kind, reason } =
        match shake_hands(&mut frames, service, RegionPeer { peer, permit }).await {
            // A peer that stays silent, or leaves, has nothing to be told.
            None => return,
            Some(Ok(opened)) => opened,
            Some(Err(error)) => return refuse_worker(&frames, &error).await,
        };
    let region = Arc::new(region);
    let response = describe_opened(&region, service, kind, reason);
    if frames.send_message(&response).await.is_err() {
        return;
    }
    let bytes = region.memory.size_bytes();
    tracing::debug!(namespace = %region.caller.namespace, bytes, "region");
    let ahead = Arc::new(Semaphore::new(CALLS_AHEAD_MAX));
    let mut calls = JoinSet::new();
    let mut ring = None;
    loop {
        let Ok(permit) = ahead.clone().acquire_owned().await else { return };
        let call = match next_call(&mut frames, &mut ring, &mut phase).await {
            Ok(call) => call,
            // Dropping `calls` and the ring drops what nobody waits for any more.
            Err(RegionEnd::Left) => return,
            Err(RegionEnd::Refused(error)) => return refuse_worker(&frames, &error).await,
            Err(RegionEnd::Drain) => break,
        };
        // Where a refusal goes must be known before anything can be refused.
        if let Err(error) = CompletionRecord::from_offset(&region.memory, call.done) {
            return refuse_worker(&frames, &error.into()).await;
        }
        while calls.try_join_next().is_some() {}
        if let Some(v1::region_call::Call::Ring(asked)) = call.call {
            open_ring(service, &region, &mut ring, RingRequest { done: call.done, asked });
            continue;
        }
        let in_order = region.device.is_some() && call::is_store(&call);
        let (host, region) = (host.clone(), region.clone());
        let mut answered = Box::pin(async move {
            call::answer_call(&host, &region, call).await;
            drop(permit);
        });
        // Tasks begin in any order. A store in place has claimed its range and its place in the
        // queue by its first wait, so one that continues it finds it in flight. Others touch their
        // payloads before they wait, which is not for the connection to do.
        if in_order && first_wait(&mut answered).await {
            continue;
        }
        calls.spawn(answered);
    }
    while calls.join_next().await.is_some() {}
    if let Some(ring) = ring {
        ring.drain_ring().await;
    }
    say_shutting_down(frames).await;
}

/// Why a region takes no more calls.
enum RegionEnd {
    /// The worker has left.
    Left,
    /// It has broken the protocol, or its ring.
    Refused(ServiceError),
    Drain,
}

async fn next_call(
    frames: &mut FrameSocket,
    ring: &mut Option<ServedRing>,
    phase: &mut watch::Receiver<ServerPhase>,
) -> Result<v1::RegionCall, RegionEnd> {
    tokio::select! {
        // Calls that have arrived are answered (if only with SHUTTING_DOWN).
        biased;
        message = frames.next() => match message {
            Ok(Some(ReceivedFrame { message, .. })) => Ok(message),
            Ok(None) => Err(RegionEnd::Left),
            Err(error) => Err(RegionEnd::Refused(broken_error(&error))),
        },
        error = ServedRing::wait_broken(ring) => Err(RegionEnd::Refused(error)),
        _ = phase.wait_for(|now| *now >= ServerPhase::Draining) => Err(RegionEnd::Drain),
    }
}

/// A call for a ring.
struct RingRequest {
    /// Its completion record, which was tested.
    done: u64,
    asked: v1::RegionRing,
}

/// Opens a region's ring, and ends the call's record.
fn open_ring(
    service: &Arc<Service>,
    region: &WorkerRegion,
    ring: &mut Option<ServedRing>,
    request: RingRequest,
) {
    let opened = match ring {
        Some(_) => {
            let message = "the region has a ring; open another region for another one";
            Err(ServiceError::new(ErrorCode::LimitExceeded, message))
        }
        None => ServedRing::open_ring(service, region, request.asked),
    };
    let outcome = match opened {
        Ok(opened) => {
            *ring = Some(opened);
            CallOutcome::Done([0; 3])
        }
        Err(error) => {
            let status = refuse_call(service.metrics(), "AttendRegion", &error);
            CallOutcome::Refused(call::refusal_of(&CallError::from(&status), 0))
        }
    };
    let ended = CompletionRecord::from_offset(&region.memory, request.done)
        .and_then(|record| record.end_call(&outcome));
    ended.expect("the record was tested when the call came, and regions keep their size");
}

/// The answer to the first message.
fn describe_opened(
    region: &WorkerRegion,
    service: &Service,
    kind: v1::RegionKind,
    reason: String,
) -> v1::OpenRegionResponse {
    let opened = region.device.as_ref().map(OpenMemory::opened_region);
    let event = opened.and_then(|opened| opened.event);
    v1::OpenRegionResponse {
        kind: kind.into(),
        reason,
        boot_id: service.boot_id().to_owned(),
        refused: String::new(),
        cuda_event: event.map(|event| event.to_vec().into()).unwrap_or_default(),
        copied: opened.and_then(|opened| opened.copied.clone()).unwrap_or_default(),
        no_event: opened.and_then(|opened| opened.no_event.clone()).unwrap_or_default(),
    }
}

/// Tells a worker that the daemon drains, and lets it read that.
async fn say_shutting_down(frames: FrameSocket) {
    let message = "the daemon drains; open a region of its successor";
    refuse_worker(&frames, &ServiceError::new(ErrorCode::ShuttingDown, message)).await;
    frames.pass_over_rest(LINGER_TIME).await;
}

/// Goes on with a call until it waits for the first time; whether it has ended without.
async fn first_wait(answered: &mut (impl Future<Output = ()> + Unpin)) -> bool {
    let once = |context: &mut Context<'_>| Poll::Ready(Pin::new(&mut *answered).poll(context));
    poll_fn(once).await.is_ready()
}

/// Reads the first message and opens its region; none where the peer has left, or takes too long.
async fn shake_hands(
    frames: &mut FrameSocket,
    service: &Arc<Service>,
    worker: RegionPeer,
) -> Option<Result<OpenedRegion, ServiceError>> {
    let first = frames.next::<v1::OpenRegionRequest>();
    let ReceivedFrame { message: request, files } =
        match tokio::time::timeout(HANDSHAKE_TIME, first).await.ok()? {
            Ok(first) => first?,
            Err(error) => return Some(Err(broken_error(&error))),
        };
    let time = service.config().keepalive_timeout;
    tokio::time::timeout(time, open_region(request, files, service, worker)).await.ok()
}

/// Maps what the first message carries, and what descriptors came with it.
async fn open_region(
    request: v1::OpenRegionRequest,
    mut files: Vec<OwnedFd>,
    service: &Arc<Service>,
    worker: RegionPeer,
) -> Result<OpenedRegion, ServiceError> {
    let second = if files.len() > 1 { files.pop() } else { None };
    let region = map_region(&request, files, service, worker)?;
    with_device(region, request, second, service).await
}

/// A region that was opened for a worker.
struct OpenedRegion {
    region: WorkerRegion,
    /// How its payloads are reached.
    kind: v1::RegionKind,
    /// Why they are not reached as the worker asked; empty where they are.
    reason: String,
}

/// Opens the device memory that the worker offers. Without it, and with the reason, payloads are in
/// the memory file. A GPU that is not the daemon's is refused.
async fn with_device(
    mut region: WorkerRegion,
    request: v1::OpenRegionRequest,
    file: Option<OwnedFd>,
    service: &Arc<Service>,
) -> Result<OpenedRegion, ServiceError> {
    use v1::open_region_request::Device;
    let (kind, handle) = match request.device {
        None if request.device_uuid.is_empty() => {
            return Ok(OpenedRegion { region, kind: v1::RegionKind::Memfd, reason: String::new() });
        }
        None => {
            let message = "device_uuid names a GPU, but no device memory is offered; leave it out";
            return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
        }
        Some(Device::CudaIpc(bytes)) => {
            let wanted = RegionHandle::IPC_BYTES;
            let handle = bytes[..].try_into().map(RegionHandle::CudaIpc);
            let reason = format!("cuda_ipc has {} bytes, not {wanted}", bytes.len());
            (v1::RegionKind::CudaIpc, handle.map_err(|_| reason))
        }
        Some(Device::CudaFd(_)) => {
            let handle = file.map(RegionHandle::CudaFd);
            let reason = "the message carries no second descriptor".to_owned();
            (v1::RegionKind::CudaFd, handle.ok_or(reason))
        }
    };
    let uuid = service.find_gpu(&request.device_uuid)?;
    let size_bytes = request.device_bytes;
    let caller = region.caller.call_context();
    let opened = match handle {
        Err(reason) => Err(reason),
        Ok(handle) => {
            OpenMemory::open_memory(service, &caller, MemoryOffer { handle, size_bytes, uuid })
                .await
                .map_err(|error| error.to_string())
        }
    };
    Ok(match opened {
        Ok(device) => {
            if let Some(reason) = &device.opened_region().copied {
                tracing::warn!(reason, "a region's device memory is copied through the host");
            }
            if let Some(reason) = &device.opened_region().no_event {
                tracing::warn!(reason, "a region has no event that says when answers are there");
            }
            region.device = Some(device);
            OpenedRegion { region, kind, reason: String::new() }
        }
        Err(reason) => {
            tracing::warn!(%reason, "a region's payloads are in its memory file");
            OpenedRegion { region, kind: v1::RegionKind::Memfd, reason }
        }
    })
}

fn map_region(
    request: &v1::OpenRegionRequest,
    files: Vec<OwnedFd>,
    service: &Service,
    worker: RegionPeer,
) -> Result<WorkerRegion, ServiceError> {
    let RegionPeer { peer, permit } = worker;
    let name = if request.namespace.is_empty() { "default" } else { &request.namespace };
    let namespace = Namespace::new(name)
        .map_err(|error| ServiceError::new(ErrorCode::InvalidArgument, error.to_string()))?;
    let (rpc, asked) = ("OpenRegion", &namespace);
    let request_of = AccessRequest { peer: &peer, authorization: None, rpc, namespace: asked };
    service.access_control().check_call(&request_of)?;
    service.admit_call(&CallContext::new(namespace.clone()))?;
    let max = service.config().region_bytes_max;
    if request.bytes == 0 {
        let message = "bytes is 0: say how long the memory file is";
        return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
    }
    if request.bytes > max {
        let bytes = request.bytes;
        let message = format!("a region of {bytes} bytes is over limits.region_bytes_max = {max}");
        return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
    }
    let Some(file) = files.into_iter().next() else {
        let message = "the first byte of the message carries no descriptor (SCM_RIGHTS)";
        return Err(ServiceError::new(ErrorCode::InvalidArgument, message));
    };
    let memory = RegionMemory::map_file(file, request.bytes)?;
    let owner = CallOwner::of_peer(service.config().connection_bytes_max as u64, peer);
    let caller = RegionCaller { namespace, owner };
    Ok(WorkerRegion::new(caller, memory, service.metrics(), permit))
}

/// A message that could not be read.
fn broken_error(error: &io::Error) -> ServiceError {
    ServiceError::new(ErrorCode::InvalidArgument, format!("region message: {error}"))
}

/// Tells the worker why its connection ends.
async fn refuse_worker(frames: &FrameSocket, error: &ServiceError) {
    tracing::debug!(code = %error.code(), %error, "region refused");
    let refused = format!("{}: {error}", error.code().name());
    let response = v1::OpenRegionResponse { refused, ..Default::default() };
    // It may have left.
    let _ = frames.send_message(&response).await;
}

#[cfg(test)]
mod tests;
