//! Handles of what is counted of every call: to find one by its labels takes more memory than the
//! rest of a small call.

use super::{Metric, Metrics};
use kvd_core::ErrorCode;
use metrics::{Counter, Histogram};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::time::Duration;

/// The series of calls that ended alike.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct EndedAlike {
    rpc: &'static str,
    /// None of those that were answered.
    code: Option<ErrorCode>,
}

/// Handles of those series.
#[derive(Clone)]
struct RequestHandles {
    count: Counter,
    seconds: Histogram,
}

/// Handles that were found so far; no more than rpcs times error codes.
#[derive(Default)]
pub(super) struct RequestSeries(RwLock<HashMap<EndedAlike, RequestHandles>>);

impl Metrics {
    /// Counts a part that failed alone of a call that is answered, and counted, itself.
    pub(crate) fn count_part(&self, rpc: &'static str, code: ErrorCode) {
        self.requests_counter(rpc, code.name()).increment(1);
    }

    /// Counts one finished call.
    pub fn count_request(&self, rpc: &'static str, code: Option<ErrorCode>, took: Duration) {
        let ended = EndedAlike { rpc, code };
        if let Some(known) = self.requests.0.read().get(&ended) {
            return known.count_call(took);
        }
        let handles = RequestHandles {
            count: self.requests_counter(rpc, code.map_or("OK", ErrorCode::name)),
            seconds: self.histogram(Metric::RequestSeconds, &[("rpc", rpc)]),
        };
        handles.count_call(took);
        self.requests.0.write().insert(ended, handles);
    }
}

impl RequestHandles {
    fn count_call(&self, took: Duration) {
        self.count.increment(1);
        self.seconds.record(took.as_secs_f64());
    }
}
