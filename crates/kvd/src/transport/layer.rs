//! Treats every gRPC request before tonic reads its messages: lets it in, notes its deadline,
//! decides whether its answer may be compressed, and counts the bytes of its messages.

use super::admission::{AdmittedRequest, CallerPrincipal, admit_request};
use super::bytes::{ByteMeter, HeldBody, MessageLimits, MeteredBody};
use super::call::wire_status;
use super::connection;
use super::deadline::{CallDeadline, LimitedBody};
use super::refusal::RefusalCounters;
use crate::service::{ByteBudgets, CallOwner, Service as Daemon};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::body::Body;
use tower::{Layer, Service};

/// Wraps the routes of a server in [`RequestService`].
#[derive(Clone)]
pub(super) struct RequestLayer {
    pub(super) service: Arc<Daemon>,
    pub(super) refusals: RefusalCounters,
}

impl<S> Layer<S> for RequestLayer {
    type Service = RequestService<S>;

    fn layer(&self, inner: S) -> RequestService<S> {
        RequestService { inner, layer: self.clone() }
    }
}

/// A service that ends requests at their deadline and counts their bytes.
#[derive(Clone)]
pub(super) struct RequestService<S> {
    inner: S,
    layer: RequestLayer,
}

/// Beside its metadata handlers know this of a request: one extension of it.
#[derive(Clone, Default)]
pub(super) struct RequestNotes {
    /// Counts the bytes of its messages.
    pub(super) meter: ByteMeter,
    /// When its caller stops waiting.
    pub(super) deadline: Option<CallDeadline>,
}

/// A request that was let in.
struct ArrivedRequest {
    request: http::Request<Body>,
    deadline: Option<CallDeadline>,
    /// Whether its messages wait for room.
    waits: bool,
}

/// A request whose bytes are counted, and the meter that counts them.
struct MeteredRequest {
    request: http::Request<Body>,
    meter: ByteMeter,
}

/// Rpcs that take a stream of messages: one that finds no room waits.
const STREAMS: [&str; 2] = ["/kvd.v1.Kvd/StoreBlocks", "/kvd.v1.Kvd/AttendStream"];

impl RequestLayer {
    /// Counts the bytes of a request's messages from here on.
    fn meter_request(&self, arrived: ArrivedRequest) -> MeteredRequest {
        let ArrivedRequest { request, deadline, waits } = arrived;
        let owner = connection::owner_of(request.extensions())
            .cloned()
            .unwrap_or_else(CallOwner::in_process);
        // One that is malformed was refused before.
        let namespace = kvd_proto::namespace_of_headers(request.headers()).ok();
        let config = self.service.config();
        let caller = request.extensions().get::<CallerPrincipal>();
        let principal = caller.and_then(|caller| caller.0.byte_budget()).cloned();
        let limits = MessageLimits {
            budgets: ByteBudgets {
                principal,
                ..self.service.budgets_of(&owner, namespace.as_ref())
            },
            message_bytes_max: config.message_bytes_max as u64,
            message_time: config.message_timeout,
            waits,
            refused: self.refusals.over_budget.clone(),
        };
        let meter = ByteMeter::default();
        let body = |body| Body::new(MeteredBody::new(body, limits, meter.clone()));
        let mut request = request.map(body);
        let notes = RequestNotes { meter: meter.clone(), deadline };
        request.extensions_mut().insert(notes);
        MeteredRequest { request, meter }
    }
}

impl<S> Service<http::Request<Body>> for RequestService<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let AdmittedRequest { granted, call } =
            match admit_request(&self.layer.service, &mut request) {
                Ok(admitted) => admitted,
                Err(refused) => return Box::pin(async move { Ok(refused.into_http()) }),
            };
        let RequestLayer { service, refusals } = self.layer.clone();
        let deadline = CallDeadline::take_header(request.headers_mut());
        drop_unasked_compression(request.headers_mut());
        let is_stream = STREAMS.contains(&request.uri().path());
        let arrived = ArrivedRequest { request, deadline, waits: is_stream };
        let MeteredRequest { request, meter } = self.layer.meter_request(arrived);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = match deadline {
                None => answer.await?,
                Some(deadline) => match deadline.limit_work(answer).await {
                    None => return Ok(CallDeadline::passed_status().into_http()),
                    Some(answer) => answer?,
                },
            };
            // What gRPC refuses by itself reaches no handler, and is counted by nobody else.
            refusals.count_headers(answer.headers());
            if !is_stream {
                meter.end_message();
            }
            Ok(answer.map(|body| {
                let body = HeldBody::new(body, meter, call);
                let refused = granted.map(|granted| async move {
                    wire_status(&service.access_control().wait_for_refusal(&granted).await)
                });
                // In one box, however many they are.
                match (refused, deadline) {
                    (None, None) => Body::new(body),
                    (None, Some(deadline)) => Body::new(LimitedBody::new(body, deadline)),
                    (Some(refused), None) => Body::new(LimitedBody::ended_by(body, refused)),
                    (Some(refused), Some(deadline)) => {
                        let body = LimitedBody::ended_by(body, refused);
                        Body::new(LimitedBody::new(body, deadline))
                    }
                }
            }))
        })
    }
}

/// Answers are compressed only for callers that compress their requests. The common gRPC libraries
/// say that they accept gzip whether their user wants it or not, and compressing tensors costs far
/// more time than it saves on a local network.
fn drop_unasked_compression(headers: &mut http::HeaderMap) {
    let asked = headers.get("grpc-encoding").is_some_and(|encoding| encoding == "gzip");
    if !asked {
        headers.remove("grpc-accept-encoding");
    }
}
