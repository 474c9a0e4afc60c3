//! Ends of a ring: the answer to its place, then the record, written by whichever thread has it.

use super::rows::PlacedRows;
use crate::metrics::{Metric, Metrics};
use crate::service::{AttendReply, ServiceError};
use crate::transport::call::wire_status;
use crate::transport::region::call::{refusal_of, write_query_errors};
use kvd_core::ErrorCode;
use kvd_proto::domain::CallError;
use kvd_shm::ring::{RingEnd, RingEnds, RingPlace};
use kvd_shm::{CallOutcome, RegionMemory};
use metrics::Counter;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// State that the threads share which end attends.
pub(super) struct RingAnswers {
    memory: Arc<RegionMemory>,
    place: RingPlace,
    ends: Mutex<RingEnds<Arc<RegionMemory>>>,
    /// Whether a submission has ended, by its place in the ring.
    ended: Box<[AtomicBool]>,
    metrics: Arc<Metrics>,
    calls: Counter,
}

/// Where the answer to one goes; tested.
#[derive(Clone, Copy)]
pub(super) struct RingPlaces {
    pub(super) out: PlacedRows,
    pub(super) lse: u64,
    /// Queries of the batch, and where errors of single ones go.
    pub(super) queries: usize,
    pub(super) query_errors: Option<u64>,
}

/// A submission that has not ended. Dropped, it ends as cancelled: nobody answered it.
pub(super) struct OpenSubmission {
    answers: Arc<RingAnswers>,
    number: u32,
    tag: u64,
    began: Instant,
    has_ended: bool,
}

impl RingAnswers {
    pub(super) fn new(memory: Arc<RegionMemory>, place: RingPlace, metrics: &Arc<Metrics>) -> Self {
        Self {
            ends: Mutex::new(RingEnds::over_memory(memory.clone(), place)),
            ended: (0..place.entries).map(|_| AtomicBool::new(false)).collect(),
            calls: metrics.counter(Metric::RegionCallsTotal, &[("payloads", "ring")]),
            metrics: metrics.clone(),
            memory,
            place,
        }
    }

    fn ended_flag(&self, number: u32) -> &AtomicBool {
        &self.ended[(number & (self.place.entries - 1)) as usize]
    }

    /// Whether a submission has ended; asked before its place is taken anew.
    pub(super) fn has_ended(&self, number: u32) -> bool {
        self.ended_flag(number).load(Ordering::Acquire)
    }

    /// Refuses to write part of an answer over the ring itself.
    pub(super) fn check_outside(&self, field: &str, range: Range<u64>) -> Result<(), ServiceError> {
        let ring = self.place.offset..self.place.end_offset();
        if range.is_empty() || range.end <= ring.start || ring.end <= range.start {
            return Ok(());
        }
        let message = format!("{field}: bytes {range:?} are in the ring itself, {ring:?}");
        Err(ServiceError::new(ErrorCode::InvalidArgument, message))
    }

    /// Wakes the thread that takes submissions.
    pub(super) fn wake_thread(&self) {
        let woken = self.ends.lock().wake_intake();
        woken.expect("the place was tested when the ring was opened");
    }

    /// Says that the ring is served no more.
    pub(super) fn close_ring(&self) {
        let closed = self.ends.lock().close_ring();
        closed.expect("the place was tested when the ring was opened");
    }
}

impl OpenSubmission {
    pub(super) fn new(answers: &Arc<RingAnswers>, number: u32, tag: u64) -> Self {
        answers.ended_flag(number).store(false, Ordering::Release);
        answers.calls.increment(1);
        let (answers, began) = (answers.clone(), Instant::now());
        Self { answers, number, tag, began, has_ended: false }
    }

    /// Ends it with an answer, written first, or a refusal.
    pub(super) fn end_attend(
        mut self,
        places: Option<RingPlaces>,
        result: Result<&AttendReply, ServiceError>,
    ) {
        let memory = &self.answers.memory;
        let written = result.and_then(|reply| match places {
            Some(places) => places.write_answer(memory, reply),
            None => Err(ServiceError::new(ErrorCode::Internal, "an answer without a place")),
        });
        self.end_with(written);
    }

    fn end_with(&mut self, written: Result<u32, ServiceError>) {
        self.has_ended = true;
        let code = written.as_ref().err().map(ServiceError::code);
        let outcome = match written {
            Ok(failed) => CallOutcome::Done([failed, 0, 0]),
            Err(error) => {
                tracing::debug!(rpc = "AttendRegion", code = %error.code(), %error, "refused");
                CallOutcome::Refused(refusal_of(&CallError::from(&wire_status(&error)), 0))
            }
        };
        let answers = &self.answers;
        answers.metrics.count_request("AttendRegion", code, self.began.elapsed());
        answers.ended_flag(self.number).store(true, Ordering::Release);
        let end = RingEnd { tag: self.tag, submission: self.number, outcome };
        let ended = answers.ends.lock().write_end(&end);
        ended.expect("the place was tested when the ring was opened");
    }
}

impl Drop for OpenSubmission {
    fn drop(&mut self) {
        if !self.has_ended {
            let (code, message) = if std::thread::panicking() {
                (ErrorCode::DeviceFailed, "the device failed during this attend")
            } else {
                (ErrorCode::Cancelled, "the ring has ended, and with it this attend")
            };
            self.end_with(Err(ServiceError::new(code, message)));
        }
    }
}

impl RingPlaces {
    /// Writes an answer; how many queries failed alone.
    fn write_answer(
        &self,
        memory: &RegionMemory,
        reply: &AttendReply,
    ) -> Result<u32, ServiceError> {
        self.out.copy_in(memory, &reply.out)?;
        let mut at = self.lse;
        for values in reply.lse.chunks(64) {
            let mut bytes = [0; 256];
            let each = bytes.as_chunks_mut::<4>().0.iter_mut().zip(values);
            each.for_each(|(to, value)| *to = value.to_le_bytes());
            let count = 4 * values.len();
            memory.write_bytes(at, &bytes[..count])?;
            at += count as u64;
        }
        write_query_errors(memory, self.query_errors, self.queries, &reply.query_errors)
    }
}
