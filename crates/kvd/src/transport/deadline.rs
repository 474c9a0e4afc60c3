//! Deadlines: `grpc-timeout` is read once, when a call arrives, and ends the call wherever it is.
//!
//! tonic has a timer of its own, which answers `CANCELLED` without kvd's error details and does not
//! watch streams. It starts after this one and asks this one first, so it never answers.

use super::call::wire_status;
use crate::service::{CallContext, ServiceError};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::time::Sleep;
use tonic::Status;

/// Header of the time that a caller waits.
const TIMEOUT_HEADER: &str = "grpc-timeout";

/// When the caller of a request stops waiting.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallDeadline(pub(super) Instant);

impl CallDeadline {
    /// Takes it out of a request's headers. A malformed one is ignored, as the gRPC specification
    /// lets a server do.
    pub(super) fn take_header(headers: &mut http::HeaderMap) -> Option<Self> {
        let value = headers.remove(TIMEOUT_HEADER)?;
        let timeout = parse_timeout(value.to_str().ok()?)?;
        Instant::now().checked_add(timeout).map(Self)
    }

    /// Waits for `work`; `None` when the deadline passes first.
    pub(super) async fn limit_work<T>(self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        let mut timer = pin!(tokio::time::sleep_until(self.0.into()));
        poll_fn(|context| {
            if let Poll::Ready(value) = work.as_mut().poll(context) {
                return Poll::Ready(Some(value));
            }
            // The clock decides, not this timer alone: tonic's may have woken the task first.
            if timer.as_mut().poll(context).is_ready() || Instant::now() >= self.0 {
                return Poll::Ready(None);
            }
            Poll::Pending
        })
        .await
    }

    /// The answer of a call whose deadline has passed.
    pub(super) fn passed_status() -> Status {
        wire_status(&ServiceError::new(
            kvd_core::ErrorCode::DeadlineExceeded,
            CallContext::DEADLINE_PASSED,
        ))
    }
}

/// `TimeoutValue TimeoutUnit` of the gRPC over HTTP/2 specification.
fn parse_timeout(text: &str) -> Option<Duration> {
    let (value, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let value: u64 = value.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(value.saturating_mul(3600))),
        "M" => Some(Duration::from_secs(value.saturating_mul(60))),
        "S" => Some(Duration::from_secs(value)),
        "m" => Some(Duration::from_millis(value)),
        "u" => Some(Duration::from_micros(value)),
        "n" => Some(Duration::from_nanos(value)),
        _ => None,
    }
}

/// A response's body that may end before its stream does: with `DEADLINE_EXCEEDED` when its
/// deadline passes, or as the caller loses its right.
pub(super) struct LimitedBody<B> {
    /// `None` once it has ended.
    inner: Option<B>,
    end: BodyEnd,
}

/// The status that a body ends with, when that comes first.
enum BodyEnd {
    /// That of a deadline.
    AtDeadline {
        deadline: CallDeadline,
        /// None until a body is waited for: most are there at once.
        timer: Option<Pin<Box<Sleep>>>,
    },
    Told(Pin<Box<dyn Future<Output = Status> + Send>>),
}

impl<B> LimitedBody<B> {
    pub(super) fn new(inner: B, deadline: CallDeadline) -> Self {
        Self { inner: Some(inner), end: BodyEnd::AtDeadline { deadline, timer: None } }
    }

    /// One that ends with what `end` gives.
    pub(super) fn ended_by(inner: B, end: impl Future<Output = Status> + Send + 'static) -> Self {
        Self { inner: Some(inner), end: BodyEnd::Told(Box::pin(end)) }
    }
}

impl BodyEnd {
    /// The status, if it comes before the next frame.
    fn poll_before(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        match self {
            Self::Told(end) => end.as_mut().poll(context),
            Self::AtDeadline { deadline, .. } if deadline.0 > Instant::now() => Poll::Pending,
            Self::AtDeadline { .. } => Poll::Ready(CallDeadline::passed_status()),
        }
    }

    /// The status, where the next frame is waited for.
    fn poll_meanwhile(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        // It was asked before, and wakes the task.
        let Self::AtDeadline { deadline, timer } = self else { return Poll::Pending };
        let new = || Box::pin(tokio::time::sleep_until(deadline.0.into()));
        ready!(timer.get_or_insert_with(new).as_mut().poll(context));
        Poll::Ready(CallDeadline::passed_status())
    }
}

impl<B: Body<Data = Bytes, Error = Status> + Unpin> Body for LimitedBody<B> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let Some(inner) = &mut this.inner else { return Poll::Ready(None) };
        let mut ended = this.end.poll_before(context);
        if ended.is_pending() {
            match Pin::new(inner).poll_frame(context) {
                Poll::Pending => ended = this.end.poll_meanwhile(context),
                frame => return frame,
            }
        }
        let status = ready!(ended);
        // Whatever works for the stream sees that nobody reads on.
        this.inner = None;
        let mut trailers = http::HeaderMap::new();
        let added = status.add_header(&mut trailers);
        Poll::Ready(Some(added.map(|()| Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_every_unit() {
        assert_eq!(parse_timeout("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout("0n"), Some(Duration::ZERO));
        for bad in ["", "5", "m", "-1S", "1d", "1.5S", "\u{fc}"] {
            assert_eq!(parse_timeout(bad), None, "{bad:?}");
        }
    }

    #[tokio::test]
    async fn work_that_ends_in_time_is_answered_and_other_work_is_dropped() {
        let soon = || CallDeadline(Instant::now() + Duration::from_millis(5));
        assert_eq!(soon().limit_work(async { 7 }).await, Some(7));
        assert_eq!(soon().limit_work(std::future::pending::<()>()).await, None);
        // What is there already is an answer, however late it is asked for.
        assert_eq!(CallDeadline(Instant::now()).limit_work(async { 7 }).await, Some(7));
    }
}
