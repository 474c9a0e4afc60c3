//! The thread of a ring: from records to jobs of a device.

use super::answer::{OpenSubmission, RingAnswers, RingPlaces};
use super::rows::{PlacedRows, RowMemory, RowShape};
use super::{PhaseCell, RingPhase};
use crate::device_worker::AcceptedJob;
use crate::service::{AttendReply, CallContext, InFlight, Service, ServiceError};
use crate::transport::region::RegionCaller;
use crate::transport::region::call::{QUERY_ERROR_BYTES, check_size};
use bytes::Bytes;
use kvd_core::{LayerIndex, ModelId, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery};
use kvd_shm::RegionMemory;
use kvd_shm::ring::{AdaptiveSpin, RingAttend, RingError, RingIntake, RingQuery, TakenRecord};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the thread sleeps where nothing is due: a doorbell that was lost costs as much.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// How long it sleeps between two looks at attends that are still under way when it drains.
const DRAIN_PAUSE: Duration = Duration::from_millis(2);

pub(super) struct RingThread {
    pub(super) service: Arc<Service>,
    /// Not the region itself, which ends with its connection, on a thread of the runtime.
    pub(super) caller: RegionCaller,
    pub(super) memory: Arc<RegionMemory>,
    pub(super) intake: RingIntake<Arc<RegionMemory>>,
    pub(super) answers: Arc<RingAnswers>,
    pub(super) phase: Arc<PhaseCell>,
    pub(super) under_way: Vec<JobUnderWay>,
    pub(super) rows: RowMemory,
    pub(super) spin: AdaptiveSpin,
}

/// A job that a device has, or will have.
pub(super) struct JobUnderWay {
    number: u32,
    deadline: Option<Instant>,
    job: AcceptedJob,
}

/// A batch that was let in, and where its answer goes.
struct ReadBatch {
    call: CallContext,
    batch: AttendBatch,
    places: RingPlaces,
    /// Share of the budgets of its queries.
    share: InFlight,
}

impl RingThread {
    /// Serves until the connection or the daemon ends.
    ///
    /// # Errors
    /// [`RingError::Broken`], which the worker is to blame for.
    pub(super) fn serve_ring(mut self) -> Result<(), RingError> {
        let served = self.serve_records();
        // What is under way is cancelled, and its memory mapped until the device has let it go.
        self.under_way.clear();
        self.answers.close_ring();
        served
    }

    fn serve_records(&mut self) -> Result<(), RingError> {
        let mut has_looked = false;
        loop {
            let phase = self.phase.read_phase();
            if phase == RingPhase::Cut {
                return Ok(());
            }
            self.let_ended_go();
            if let Some(record) = self.intake.take_next()? {
                self.start_attend(&record);
                has_looked = false;
                continue;
            }
            if phase == RingPhase::Draining && self.under_way.is_empty() {
                return Ok(());
            }
            if !has_looked {
                has_looked = true;
                let (intake, phase) = (&self.intake, &self.phase);
                let is_due = || Ok(intake.can_take()? || phase.read_phase() != RingPhase::Open);
                if self.spin.look_for::<RingError>(is_due)? {
                    continue;
                }
            }
            let time = self.expire_late(Instant::now());
            let phase = &self.phase;
            self.intake.sleep_until_rung(time, || phase.read_phase() == RingPhase::Cut)?;
        }
    }

    /// Forgets jobs that have ended.
    fn let_ended_go(&mut self) {
        let answers = &self.answers;
        let ended = self.under_way.extract_if(.., |of| answers.has_ended(of.number));
        ended.for_each(|of| of.job.note_answer());
    }

    /// Ends those that wait past their deadline; how long the thread may sleep.
    fn expire_late(&mut self, now: Instant) -> Duration {
        let mut time = SLEEP_MAX;
        if self.phase.read_phase() == RingPhase::Draining {
            time = DRAIN_PAUSE;
        }
        for of in &mut self.under_way {
            let Some(deadline) = of.deadline else { continue };
            if deadline > now {
                time = time.min(deadline - now);
                continue;
            }
            // Once: what the device has by then ends by itself.
            of.deadline = None;
            of.job.expire_job();
        }
        time
    }

    /// Gives an attend to its device, or ends it.
    fn start_attend(&mut self, record: &TakenRecord) {
        let TakenRecord { number, bytes } = record;
        let submission = OpenSubmission::new(&self.answers, *number, RingAttend::tag_of(bytes));
        let read = RingAttend::read_record(bytes, *number).map_err(ServiceError::from);
        let admitted = read.and_then(|attend| self.admit_attend(attend));
        let ReadBatch { call, batch, places, share } = match admitted {
            Ok(read) => read,
            Err(error) => return submission.end_attend(None, Err(error)),
        };
        let (deadline, service) = (call.deadline, self.service.clone());
        let tell = move |mut result: Result<AttendReply, ServiceError>| {
            // What it holds is free before its worker asks for more.
            drop(share);
            if let Ok(reply) = &mut result {
                reply.held = None;
            }
            submission.end_attend(Some(places), result.as_ref().map_err(ServiceError::clone));
            if let Ok(reply) = result {
                service.keep_answer(reply);
            }
            true
        };
        if let Some(job) = self.service.tell_attend(&call, batch, tell) {
            self.under_way.push(JobUnderWay { number: *number, deadline, job });
        }
    }

    /// Lets an attend in, and reads its batch.
    fn admit_attend(&mut self, attend: RingAttend) -> Result<ReadBatch, ServiceError> {
        let timeout = Some(attend.timeout_us).filter(|timeout| *timeout != 0);
        let deadline = timeout.and_then(|us| Instant::now().checked_add(Duration::from_micros(us)));
        let caller = CallContext { deadline, ..self.caller.call_context() };
        let caller = self.caller.admit_call(&self.service, &caller, "AttendRegion")?;
        self.service.admit_call(&caller)?;
        // Before anything is copied.
        let bytes = u64::from(attend.queries) * RingQuery::BYTES as u64;
        check_size(&self.service, bytes)?;
        let _share = self.service.take_bytes(&caller, bytes)?;
        self.read_batch(caller, &attend)
    }

    /// Tests that part of an answer may be written there.
    fn check_bytes(&self, field: &str, offset: u64, bytes: u64) -> Result<(), ServiceError> {
        self.memory.check_range(offset, bytes)?;
        self.answers.check_outside(field, offset..offset + bytes)
    }

    /// Copies a batch out of the region, and tests it as a message is tested.
    fn read_batch(
        &mut self,
        call: CallContext,
        attend: &RingAttend,
    ) -> Result<ReadBatch, ServiceError> {
        let memory = &self.memory;
        let mut batch = AttendBatch {
            model: ModelId(attend.model),
            layer: LayerIndex(attend.layer),
            q_heads: attend.q_heads,
            dtype: attend.dtype,
            scale: attend.scale,
            // As in a message 0 is none.
            soft_cap: attend.soft_cap.filter(|soft_cap| *soft_cap != 0.0),
            queries: read_queries(memory, attend, self.service.take_queries())?,
            q: Bytes::new(),
            per_query_errors: attend.per_query_errors,
        };
        batch.check_batch()?;
        let model = self.service.batch_model(&call, &batch)?;
        let geometry = &model.shape.geometry;
        let value_bytes = batch.dtype.size_bytes() as u64;
        let rows = |head_dim: u32| RowShape {
            tokens: batch.query_rows().into(),
            heads: batch.q_heads.into(),
            row_bytes: u64::from(head_dim) * value_bytes,
        };
        let (of_q, of_out) = (rows(geometry.head_dim_k), rows(geometry.head_dim_v));
        batch.check_shape_of(geometry, of_q.size_bytes())?;
        check_size(&self.service, of_q.size_bytes())?;
        let q = PlacedRows::new(memory, "q", attend.q, of_q)?;
        let out = PlacedRows::new(memory, "out", attend.out, of_out)?;
        self.answers.check_outside("out", out.byte_range())?;
        self.check_bytes("lse", attend.lse_at, of_out.tokens * of_out.heads * 4)?;
        let queries = batch.queries.len();
        let query_errors = batch.per_query_errors.then_some(attend.query_errors_at);
        if let Some(at) = query_errors {
            self.check_bytes("query_errors", at, (queries * QUERY_ERROR_BYTES) as u64)?;
        }
        // As before a message is read.
        let share = self.service.take_bytes(&call, of_q.size_bytes())?;
        batch.q = q.copy_out(memory, &mut self.rows)?;
        let places = RingPlaces { out, lse: attend.lse_at, queries, query_errors };
        let call = CallContext { is_message_admitted: true, ..call };
        Ok(ReadBatch { call, batch, places, share })
    }
}

/// Copies the list of queries to one that is empty.
fn read_queries(
    memory: &RegionMemory,
    attend: &RingAttend,
    mut queries: Vec<AttendQuery>,
) -> Result<Vec<AttendQuery>, ServiceError> {
    let count = attend.queries as usize;
    memory.check_range(attend.queries_at, (count * RingQuery::BYTES) as u64)?;
    // A longer list is refused with the rest of the batch; it need not be read for that.
    let read = count.min(AttendBatch::QUERIES_MAX + 1);
    queries.reserve_exact(read);
    for index in 0..read {
        let mut entry = [0; RingQuery::BYTES];
        memory.read_bytes(attend.queries_at + (index * RingQuery::BYTES) as u64, &mut entry)?;
        let query = RingQuery::read_entry(&entry)?;
        queries.push(AttendQuery {
            sequence: SequenceId(query.sequence),
            n_q: query.n_q,
            kv_length: query.kv_length,
            position: query.position,
            start: query.start,
            end: query.end,
            sliding_window: query.sliding_window.filter(|window| *window != 0),
        });
    }
    Ok(queries)
}
