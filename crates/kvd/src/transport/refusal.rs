//! Counts what gRPC refuses by itself: methods or encodings that it does not know, messages that
//! it cannot read or that are too large. Such requests reach no handler: nobody else counts them.

use crate::metrics::{Metric, Metrics};
use http::{HeaderMap, Response};
use metrics::Counter;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tonic::{Code, Status};
use tower::{Layer, Service};

/// Counters by reason.
#[derive(Clone)]
pub(super) struct RefusalCounters {
    unimplemented: Counter,
    bad_message: Counter,
    message_too_large: Counter,
    /// Messages that found no room, or took too long to arrive.
    pub(super) over_budget: Counter,
}

/// Header with the details of kvd's own errors; those of gRPC have none.
const DETAILS: &str = "grpc-status-details-bin";

impl RefusalCounters {
    /// Handles on the daemon's counters, which begin at 0.
    pub(super) fn new(metrics: &Metrics) -> Self {
        let counter = |reason| {
            let counter = metrics.counter(Metric::TransportRefusalsTotal, &[("reason", reason)]);
            counter.increment(0);
            counter
        };
        Self {
            unimplemented: counter("unimplemented"),
            bad_message: counter("bad_message"),
            message_too_large: counter("message_too_large"),
            over_budget: counter("over_budget"),
        }
    }

    /// Counts the status of a message that could not be read from a stream.
    pub(super) fn count_status(&self, status: &Status) {
        if status.details().is_empty() {
            self.count_code(status.code());
        }
    }

    /// Counts an answer that is nothing but a status.
    fn count_headers(&self, headers: &HeaderMap) {
        let Some(code) = headers.get("grpc-status").filter(|_| !headers.contains_key(DETAILS))
        else {
            return;
        };
        self.count_code(Code::from_bytes(code.as_bytes()));
    }

    fn count_code(&self, code: Code) {
        match code {
            Code::Unimplemented => self.unimplemented.increment(1),
            Code::Internal => self.bad_message.increment(1),
            Code::OutOfRange | Code::ResourceExhausted => self.message_too_large.increment(1),
            // Those of the services of health and reflection, and of callers who left.
            _ => {}
        }
    }
}

impl<S> Layer<S> for RefusalCounters {
    type Service = WatchedService<S>;

    fn layer(&self, inner: S) -> WatchedService<S> {
        WatchedService { inner, refusals: self.clone() }
    }
}

/// A service whose refusals are counted.
#[derive(Clone)]
pub(super) struct WatchedService<S> {
    inner: S,
    refusals: RefusalCounters,
}

impl<S, Request, Body> Service<Request> for WatchedService<S>
where
    S: Service<Request, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = WatchedFuture<S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let answer = Box::pin(self.inner.call(request));
        WatchedFuture { answer, refusals: self.refusals.clone() }
    }
}

/// An answer that is looked at when it comes.
pub(super) struct WatchedFuture<F> {
    answer: Pin<Box<F>>,
    refusals: RefusalCounters,
}

impl<F, Body, E> Future for WatchedFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let answer = ready!(self.answer.as_mut().poll(context));
        if let Ok(response) = &answer {
            self.refusals.count_headers(response.headers());
        }
        Poll::Ready(answer)
    }
}
