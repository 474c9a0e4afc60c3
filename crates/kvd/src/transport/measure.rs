//! One count and one duration per answer, also for answers nobody waited for.

use super::call::wire_status;
use crate::metrics::Metrics;
use crate::service::{CallContext, ServiceError};
use crate::telemetry::CALL_SPAN;
use kvd_core::ErrorCode;
use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt;
use std::time::{Duration, Instant};
use tonic::Status;
use tracing::field::Empty;
use tracing::{Instrument, Level};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Clocks of the caller, of tonic and of the handler start one after another: a call that was
/// given up this short before its deadline was given up because of it.
const DEADLINE_SLACK: Duration = Duration::from_millis(20);

/// An answer in the making. The server drops handlers whose caller has left or whose deadline
/// has passed, wherever they are; dropping this unfinished is how that is counted.
struct MeasuredAnswer<'a> {
    metrics: &'a Metrics,
    name: &'static str,
    deadline: Option<Instant>,
    began: Instant,
    ended: bool,
}

impl<'a> MeasuredAnswer<'a> {
    fn begin_answer(metrics: &'a Metrics, name: &'static str, deadline: Option<Instant>) -> Self {
        Self { metrics, name, deadline, began: Instant::now(), ended: false }
    }

    fn end_answer(mut self, code: Option<ErrorCode>) {
        self.ended = true;
        self.metrics.count_request(self.name, code, self.began.elapsed());
    }

    fn drop_code(&self) -> ErrorCode {
        let now = Instant::now();
        if std::thread::panicking() {
            ErrorCode::Internal
        } else if self.deadline.is_some_and(|deadline| deadline <= now + DEADLINE_SLACK) {
            ErrorCode::DeadlineExceeded
        } else {
            ErrorCode::Cancelled
        }
    }
}

impl Drop for MeasuredAnswer<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let code = self.drop_code();
            self.metrics.count_request(self.name, Some(code), self.began.elapsed());
            tracing::debug!(rpc = self.name, %code, "request given up");
        }
    }
}

/// Measures and logs one answer, be it of a call or of one message of a stream.
pub(super) async fn measure_answer<T>(
    metrics: &Metrics,
    name: &'static str,
    call: &CallContext,
    work: impl Future<Output = Result<T, ServiceError>>,
) -> Result<T, Status> {
    let measured = MeasuredAnswer::begin_answer(metrics, name, call.deadline);
    let span = call_span(name, call);
    let result = work.instrument(span.clone()).await;
    let code = result.as_ref().err().map(ServiceError::code);
    if let Some(code) = code {
        span.record("otel.status_code", "ERROR").record("code", tracing::field::display(code));
    }
    measured.end_answer(code);
    // Within the span, whose fields say whose request it was.
    result.map_err(|error| span.in_scope(|| log_refusal(name, &error)))
}

/// The span of one answer, which lines inside carry and traces show. Whoever names the span of
/// their own finds its trace in every line, also where only calls that fail are logged.
fn call_span(name: &'static str, call: &CallContext) -> tracing::Span {
    macro_rules! span {
        ($level:expr, $($trace_id:tt)*) => {
            tracing::span!(
                $level,
                CALL_SPAN,
                name,
                otel.name = name,
                otel.kind = "server",
                namespace = %call.namespace,
                model = Empty,
                sequence = Empty,
                code = Empty,
                otel.status_code = Empty,
                queue_us = Empty,
                device_us = Empty,
                $($trace_id)*
            )
        };
    }
    let Some(parent) = &call.trace_parent else { return span!(Level::DEBUG,) };
    let span = span!(Level::INFO, trace_id = %parent.trace_id());
    // Refused where nobody collects traces.
    let _ = span.set_parent(Context::new().with_remote_span_context(parent.clone()));
    span
}

/// Counts, measures and logs a call that was refused before it reached the service.
pub(super) fn refuse_call(metrics: &Metrics, name: &'static str, error: &ServiceError) -> Status {
    MeasuredAnswer::begin_answer(metrics, name, None).end_answer(Some(error.code()));
    log_refusal(name, error)
}

/// Counts and logs a part that failed alone of a call that is answered.
pub(super) fn count_failed_part(metrics: &Metrics, name: &'static str, error: &ServiceError) {
    metrics.count_part(name, error.code());
    log_error(name, error);
}

/// Logs an error and gives it the wire's form.
fn log_refusal(name: &'static str, error: &ServiceError) -> Status {
    log_error(name, error);
    wire_status(error)
}

fn log_error(name: &'static str, error: &ServiceError) {
    match error.code() {
        ErrorCode::Internal | ErrorCode::DeviceFailed | ErrorCode::CorruptPage => {
            tracing::error!(rpc = name, code = %error.code(), %error, "request failed");
        }
        code => tracing::debug!(rpc = name, %code, %error, "request refused"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(deadline: Option<Instant>) -> String {
        let metrics = Metrics::new();
        drop(MeasuredAnswer::begin_answer(&metrics, "Attend", deadline));
        let text = metrics.render_page();
        let counted =
            |line: &&str| line.starts_with("kvd_requests_total{") && !line.ends_with(" 0");
        let line = text.lines().find(counted);
        line.unwrap_or_else(|| panic!("nothing counted: {text}")).to_owned()
    }

    #[test]
    fn answers_given_up_are_counted_by_their_reason() {
        let now = Instant::now();
        let cases = [
            (None, "CANCELLED"),
            (Some(now + Duration::from_secs(60)), "CANCELLED"),
            (Some(now + Duration::from_millis(1)), "DEADLINE_EXCEEDED"),
            (Some(now), "DEADLINE_EXCEEDED"),
        ];
        for (deadline, code) in cases {
            let line = format!("kvd_requests_total{{rpc=\"Attend\",code=\"{code}\"}} 1");
            assert_eq!(counted(deadline), line);
        }
    }

    #[tokio::test]
    async fn a_panic_is_counted_as_a_defect_from_the_first() {
        let metrics = std::sync::Arc::new(Metrics::new());
        let of_task = metrics.clone();
        let panics = tokio::spawn(async move {
            let namespace = kvd_core::Namespace::new("default").unwrap();
            let call = CallContext::new(namespace);
            let work = async { panic!("a defect") };
            measure_answer::<()>(&of_task, "Attend", &call, work).await
        });
        assert!(panics.await.unwrap_err().is_panic());
        let line = "kvd_requests_total{rpc=\"Attend\",code=\"INTERNAL\"} 1\n";
        assert!(metrics.render_page().contains(line), "{}", metrics.render_page());
    }

    #[test]
    fn an_answer_that_ended_is_counted_once() {
        let metrics = Metrics::new();
        MeasuredAnswer::begin_answer(&metrics, "Attend", None).end_answer(None);
        let text = metrics.render_page();
        assert!(text.contains("kvd_requests_total{rpc=\"Attend\",code=\"OK\"} 1"), "{text}");
        assert!(!text.contains("CANCELLED"), "{text}");
    }
}
