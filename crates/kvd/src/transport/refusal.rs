//! Counts what gRPC refuses by itself: methods or encodings that it does not know, messages that
//! it cannot read or that are too large. Such requests reach no handler: nobody else counts them.

use crate::metrics::{Metric, Metrics};
use http::HeaderMap;
use metrics::Counter;
use tonic::{Code, Status};

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
    pub(super) fn count_headers(&self, headers: &HeaderMap) {
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
