//! Treats every gRPC request before tonic reads its messages: lets it in, notes its deadline,
//! decides whether its answer may be compressed, and counts the bytes of its messages.

use super::admission::{AdmittedRequest, CallerPrincipal, admit_request};
use super::bytes::{ByteMeter, HeldBody, MessageLimits, MeteredBody};
use super::call::wire_status;
use super::connection;
use super::deadline::{CallDeadline, LimitedBody};
use crate::service::{ByteBudgets, CallOwner, Service as Daemon};
use metrics::Counter;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tonic::body::Body;
use tower::{Layer, Service};

/// Wraps the routes of a server in [`RequestService`].
#[derive(Clone)]
pub(super) struct RequestLayer {
    pub(super) service: Arc<Daemon>,
    /// Counts messages that were refused for their bytes.
    pub(super) refused: Counter,
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

/// A request whose bytes are counted, and the meter that counts them.
struct MeteredRequest {
    request: http::Request<Body>,
    meter: ByteMeter,
}

/// Rpcs that take a stream of messages: one that finds no room waits.
const STREAMS: [&str; 2] = ["/kvd.v1.Kvd/StoreBlocks", "/kvd.v1.Kvd/AttendStream"];

impl RequestLayer {
    /// Counts the bytes of a request's messages from here on.
    fn meter_request(&self, request: http::Request<Body>, waits: bool) -> MeteredRequest {
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
            refused: self.refused.clone(),
        };
        let meter = ByteMeter::default();
        let body = |body| Body::new(MeteredBody::new(body, limits, meter.clone()));
        let mut request = request.map(body);
        request.extensions_mut().insert(meter.clone());
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
        let service = self.layer.service.clone();
        let deadline = CallDeadline::take_header(request.headers_mut());
        drop_unasked_compression(request.headers_mut());
        let is_stream = STREAMS.contains(&request.uri().path());
        let MeteredRequest { mut request, meter } = self.layer.meter_request(request, is_stream);
        if let Some(deadline) = deadline {
            request.extensions_mut().insert(deadline);
        }
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = match deadline {
                None => answer.await?,
                Some(deadline) => match deadline.limit_work(answer).await {
                    None => return Ok(CallDeadline::passed_status().into_http()),
                    Some(answer) => answer?,
                },
            };
            if !is_stream {
                meter.end_message();
            }
            let answer = answer.map(|body| Body::new(HeldBody::new(body, meter, call)));
            let answer = match granted {
                None => answer,
                Some(granted) => {
                    let refused = async move {
                        wire_status(&service.access_control().wait_for_refusal(&granted).await)
                    };
                    answer.map(|body| Body::new(LimitedBody::ended_by(body, refused)))
                }
            };
            Ok(match deadline {
                None => answer,
                Some(deadline) => answer.map(|body| Body::new(LimitedBody::new(body, deadline))),
            })
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
