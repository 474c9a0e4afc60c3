//! What happens to every gRPC request before tonic reads its messages: its deadline is noted, and
//! whether its answer may be compressed.

use super::deadline::{Deadline, LimitedBody};
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::body::Body;
use tower::{Layer, Service};

/// Wraps the routes of a server in [`Requests`].
#[derive(Clone, Copy)]
pub(super) struct RequestLayer;

impl<S> Layer<S> for RequestLayer {
    type Service = Requests<S>;

    fn layer(&self, inner: S) -> Requests<S> {
        Requests { inner }
    }
}

/// A service that ends requests at their deadline.
#[derive(Clone)]
pub(super) struct Requests<S> {
    inner: S,
}

impl<S> Service<http::Request<Body>> for Requests<S>
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
        let deadline = Deadline::take(request.headers_mut());
        drop_unasked_compression(request.headers_mut());
        let Some(deadline) = deadline else { return Box::pin(self.inner.call(request)) };
        request.extensions_mut().insert(deadline);
        let answer = self.inner.call(request);
        Box::pin(async move {
            match deadline.limit(answer).await {
                None => Ok(Deadline::passed().into_http()),
                Some(answer) => Ok(answer?.map(|body| Body::new(LimitedBody::new(body, deadline)))),
            }
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
