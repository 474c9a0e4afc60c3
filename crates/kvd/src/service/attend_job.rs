//! The jobs of attends: what a device does for one, and what is counted of it.

use super::attend::{AttendReply, RefusedQuery};
use super::attend_shelf::AttendShelf;
use super::budget::InFlight;
use super::distinct_reads::DistinctReads;
use super::launches::count_launches;
use super::{RegisteredModel, ServiceError};
use crate::device_worker::DeviceWork;
use crate::metrics::Metrics;
use crate::scheduler::JobKind;
use kvd_compute::{
    AttendPlan, AttendTask, Attended, Backend, PlanPart, PlanQuery, RegionPlaces, Stop,
};
use kvd_core::Geometry;
use kvd_store::PinnedRange;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An attend that the device may begin.
pub(super) struct PreparedAttend {
    pub(super) task: AttendTask,
    pub(super) model: Arc<RegisteredModel>,
    pub(super) query_tokens: u32,
    pub(super) query_errors: Vec<RefusedQuery>,
    /// Keeps what the plan names as it is until the device has answered.
    pub(super) pins: DistinctReads<PinnedRange>,
    /// Share of the budgets of the request.
    pub(super) _inflight: InFlight,
    /// Share of the budgets of the answer.
    pub(super) answer: Option<InFlight>,
    pub(super) metrics: Arc<Metrics>,
    /// Takes the memory of the plan and of the pins when this is dropped.
    pub(super) shelf: Arc<AttendShelf>,
    /// Device time so far.
    pub(super) took: Duration,
}

impl PreparedAttend {
    /// The reply where every query was refused for having no tokens: there is no row to answer.
    pub(super) fn take_empty(&mut self) -> Option<AttendReply> {
        let query_errors =
            (self.query_tokens == 0).then(|| std::mem::take(&mut self.query_errors))?;
        let (out, lse) = (Vec::new(), Vec::new());
        Some(AttendReply { out, lse, query_errors, held: None })
    }

    /// Goes on by `work`, and counts the time and the launches.
    fn go_on<T>(
        &mut self,
        backend: &mut dyn Backend,
        work: impl FnOnce(&mut dyn Backend, &mut AttendTask) -> T,
    ) -> T {
        let (began, before) = (Instant::now(), backend.launches());
        let result = work(backend, &mut self.task);
        count_launches(&self.metrics, || backend.info(), &before, &backend.launches());
        self.took += began.elapsed();
        result
    }

    /// Counts an attend that was answered; answers which queries failed.
    fn end_attend(&mut self, stored_bytes_read: u64, saved_passes: u64) -> Vec<RefusedQuery> {
        let metrics = &self.model.metrics;
        metrics.attend.record_job(self.took);
        metrics.attended_layer_query_tokens.increment(u64::from(self.query_tokens));
        metrics.attended_stored_bytes.increment(stored_bytes_read);
        metrics.saved_passes.increment(saved_passes);
        let logical = logical_bytes(&self.task.plan, &self.model.shape.geometry);
        metrics.attended_logical_bytes.increment(logical);
        std::mem::take(&mut self.query_errors)
    }
}

impl Drop for PreparedAttend {
    fn drop(&mut self) {
        self.shelf.keep_plan(std::mem::take(&mut self.task.plan.queries));
        for pinned in self.pins.drain_values() {
            self.shelf.keep_pin(pinned.into_memory());
        }
    }
}

/// The job of an attend whose answer is carried.
pub(crate) struct AttendJob(pub(super) PreparedAttend);

impl DeviceWork for AttendJob {
    type Reply = AttendReply;

    fn job_kind(&self) -> JobKind {
        JobKind::Attend
    }

    fn caller_plan(&self) -> Option<&AttendPlan> {
        Some(self.asked_plan())
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<AttendReply>, ServiceError> {
        let attended = self.0.go_on(backend, |backend, task| backend.attend_slice(task, stop));
        Ok(attended?.map(|attended| self.take_reply(attended)))
    }
}

impl AttendJob {
    /// The question.
    pub(crate) fn asked_plan(&self) -> &AttendPlan {
        &self.0.task.plan
    }

    /// Counts device time that it has had in a pass with others.
    pub(crate) fn add_time(&mut self, took: Duration) {
        self.0.took += took;
    }

    /// Bytes of the pages and raw rows that the plan names.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let geometry = &self.0.model.shape.geometry;
        let token_bytes = geometry.values_per_token() * geometry.dtype.size_bytes() as u64;
        let parts = self.asked_plan().queries.iter().flat_map(|query| query.parts.iter());
        parts.map(|part| part.stored_bytes(token_bytes)).sum()
    }

    /// The reply, once the device has answered.
    pub(crate) fn take_reply(&mut self, attended: Attended) -> AttendReply {
        let Attended { out, lse, stored_bytes_read, saved_passes } = attended;
        let query_errors = self.0.end_attend(stored_bytes_read, saved_passes);
        AttendReply { out, lse, query_errors, held: self.0.answer.take() }
    }
}

/// The job of an attend whose queries and answer are in device memory.
pub(crate) struct AttendInPlace {
    pub(super) prepared: PreparedAttend,
    pub(super) places: RegionPlaces,
    /// Called once the device has all of it.
    pub(super) launched: Box<dyn FnMut() + Send>,
}

impl DeviceWork for AttendInPlace {
    type Reply = Vec<RefusedQuery>;

    fn job_kind(&self) -> JobKind {
        JobKind::Attend
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        _: &Stop,
    ) -> Result<Option<Vec<RefusedQuery>>, ServiceError> {
        let (places, launched) = (&self.places, &mut self.launched);
        let read = self
            .prepared
            .go_on(backend, |backend, task| backend.attend_in_place(&task.plan, places, launched));
        Ok(Some(self.prepared.end_attend(read?, 0)))
    }
}

/// Bytes of the tokens that the plan's queries see, in the stored precision.
fn logical_bytes(plan: &AttendPlan, geometry: &Geometry) -> u64 {
    let tokens: u64 = plan.queries.iter().map(seen_tokens).sum();
    tokens * geometry.values_per_token() * geometry.dtype.size_bytes() as u64
}

/// Tokens of a query's parts that one of its tokens sees.
fn seen_tokens(query: &PlanQuery) -> u64 {
    let last = query.n_q.saturating_sub(1);
    let (start, end) = (query.visible(0).start, query.visible(last).end);
    let seen = |part: &PlanPart| {
        let tokens = part.end_token().min(end).saturating_sub(part.first_token.max(start));
        u64::from(tokens)
    };
    query.parts.iter().map(seen).sum::<u64>()
}
