//! The ring of a region: attends without a message. One thread writes records and reads their ends;
//! neither allocates, nor calls the system while the daemon is awake.

use crate::error::ClientError;
use crate::region::{LOOK_INTERVAL, RegionClient, region_error};
use crate::region_layout::{ALIGN, AttendLayout, QUERY_ERROR_BYTES};
use kvd_core::{Coded, ErrorCode};
use kvd_proto::domain::{AttendBatch, AttendQuery, Attended};
use kvd_proto::v1;
use kvd_shm::ring::{AdaptiveSpin, RingAttend, RingPlace, RingQuery, RingRows, WorkerRing};
use kvd_shm::{CallOutcome, CompletionRecord, RegionMemory};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How a ring is opened.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RingOptions {
    /// Offset in the region, a multiple of 64; 0.
    pub offset: u64,
    /// Attends that are under way at most, a power of two; 64.
    pub entries: u32,
    /// Number of the first record; 0. Numbers wrap, so that any will do.
    pub first: u32,
    /// How long to look for an end before the thread sleeps, at most: less where attends take
    /// longer, and not where other threads have work for the core; 100 microseconds.
    pub spin: Duration,
}

impl Default for RingOptions {
    fn default() -> Self {
        Self { offset: 0, entries: 64, first: 0, spin: Duration::from_micros(100) }
    }
}

impl RingOptions {
    /// With room for so many attends.
    #[must_use]
    pub fn with_entries(mut self, entries: u32) -> Self {
        self.entries = entries;
        self
    }

    /// Elsewhere in the region.
    #[must_use]
    pub fn with_offset(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// With records that are numbered from there.
    #[must_use]
    pub fn with_first(mut self, first: u32) -> Self {
        self.first = first;
        self
    }

    /// Looking for so long at most before it sleeps.
    #[must_use]
    pub fn with_spin(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }
}

/// Where the parts of an attend by ring are in the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Offset of the list of queries, [`RingQuery::BYTES`] for each.
    pub queries: u64,
    /// `[sum of n_q, q_heads, head_dim_k]`, written by the caller.
    pub q: RingRows,
    /// `[sum of n_q, q_heads, head_dim_v]`, written by the daemon.
    pub out: RingRows,
    /// Offset of `[sum of n_q, q_heads]`, f32, written by the daemon.
    pub lse: u64,
    /// Offset of 128 bytes for each query, where the batch asks for errors of single ones.
    pub query_errors: u64,
    /// One past the last byte.
    pub end: u64,
}

impl RingLayout {
    /// Places one after another from `start` on, dense, for heads of so many channels of keys and
    /// values.
    #[must_use]
    pub fn pack_from(start: u64, batch: &AttendBatch, head_dims: [u32; 2]) -> Self {
        let at = AttendLayout::pack_from(start, batch, head_dims);
        let dense = |offset| RingRows { offset, token_stride: 0, head_stride: 0 };
        let count = batch.queries.len() as u64;
        let queries = at.end().next_multiple_of(ALIGN);
        let query_errors = (queries + count * RingQuery::BYTES as u64).next_multiple_of(ALIGN);
        let end = query_errors + count * QUERY_ERROR_BYTES;
        let (q, out) = (dense(at.q.offset), dense(at.out.offset));
        Self { queries, q, out, lse: at.lse.offset, query_errors, end }
    }
}

/// The end of an attend by ring.
#[derive(Clone, Debug, PartialEq)]
pub struct RingReply {
    /// Tag that it was submitted with.
    pub tag: u64,
    /// How many of its queries failed alone, or why there is no answer.
    pub result: Result<u32, ClientError>,
}

/// A ring that the daemon serves, until the region ends.
#[derive(Debug)]
pub struct AttendRing {
    region: Arc<RegionClient>,
    ring: WorkerRing<Arc<RegionMemory>>,
    place: RingPlace,
    spin: AdaptiveSpin,
    /// The tag of the next attend of [`AttendRing::attend_once`].
    next_tag: u64,
    /// Why the daemon serves it no more.
    ended: Option<ClientError>,
}

impl AttendRing {
    /// Opens the region's ring. It takes [`AttendRing::free_from`] minus its offset bytes; nothing
    /// else may be there.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` where no ring can be there; `LIMIT_EXCEEDED`, of a second ring too;
    /// `DEADLINE_EXCEEDED`; a lost connection.
    pub fn open_ring(region: Arc<RegionClient>, options: RingOptions) -> Result<Self, ClientError> {
        let RingOptions { offset, entries, first, spin } = options;
        let place = RingPlace { offset, entries, first };
        let memory = region.shared_memory();
        place.check_place(&memory).map_err(|error| coded_error(&error))?;
        let ring = WorkerRing::begin_ring(memory, place).map_err(|error| region_error(&error))?;
        let done = place.end_offset();
        let asked = v1::RegionRing { offset, entries, first };
        region.send_call(done, v1::region_call::Call::Ring(asked))?;
        region.wait_call(done)?;
        let spin = AdaptiveSpin::up_to(spin);
        Ok(Self { region, ring, place, spin, next_tag: 0, ended: None })
    }

    /// The first byte of the region behind the ring.
    #[must_use]
    pub fn free_from(&self) -> u64 {
        self.place.end_offset() + CompletionRecord::BYTES
    }

    /// The region.
    #[must_use]
    pub fn shared_region(&self) -> &RegionClient {
        &self.region
    }

    /// Attends whose ends were not read.
    #[must_use]
    pub fn count_open(&self) -> u32 {
        self.ring.count_open()
    }

    /// Writes an attend whose queries' values are in the region; the batch's own are ignored.
    /// Until its end was read, its places belong to the daemon.
    ///
    /// # Errors
    /// `QUEUE_FULL` while [`RingOptions::entries`] attends wait for their ends to be read; when a
    /// place is not inside the region.
    pub fn submit_attend(
        &mut self,
        tag: u64,
        batch: &AttendBatch,
        at: &RingLayout,
    ) -> Result<(), ClientError> {
        let Some(number) = self.ring.next_number() else {
            let open = self.ring.count_open();
            let message = format!("the ends of {open} attends of the ring are to be read first");
            let retry_after = Some(kvd_proto::RETRY_AFTER_DEFAULT);
            let full = ClientError::new(ErrorCode::QueueFull, message);
            return Err(ClientError { retry_after, ..full });
        };
        let memory = self.region.memory();
        let list = (at.queries..).step_by(RingQuery::BYTES);
        for (offset, query) in list.zip(&batch.queries) {
            let entry = ring_query(query).write_entry();
            memory.write_bytes(offset, &entry).map_err(|error| region_error(&error))?;
        }
        let timeout = self.region.call_timeout();
        let record = RingAttend {
            tag,
            timeout_us: timeout.map_or(0, |timeout| timeout.as_micros() as u64),
            model: batch.model.0,
            layer: batch.layer.0,
            q_heads: batch.q_heads,
            dtype: batch.dtype,
            scale: batch.scale,
            soft_cap: batch.soft_cap,
            per_query_errors: batch.per_query_errors,
            queries: batch.queries.len() as u32,
            queries_at: at.queries,
            q: at.q,
            out: at.out,
            lse_at: at.lse,
            query_errors_at: at.query_errors,
        };
        let written = self.ring.write_submission(&record.write_record(number));
        written.map_err(|error| region_error(&error))
    }

    /// Writes a record as it stands, for tests of what the daemon makes of it.
    ///
    /// # Errors
    /// As [`AttendRing::submit_attend`].
    #[doc(hidden)]
    pub fn submit_record(&mut self, record: &[u8; 256]) -> Result<(), ClientError> {
        self.ring.write_submission(record).map_err(|error| region_error(&error))
    }

    /// The number of the next record.
    #[doc(hidden)]
    #[must_use]
    pub fn next_number(&self) -> Option<u32> {
        self.ring.next_number()
    }

    /// Waits for the next end, in the order in which they come.
    ///
    /// # Errors
    /// `DEADLINE_EXCEEDED` when none comes within the region's timeout, after which the daemon may
    /// still write to the attend's places; a lost connection, or why the daemon has ended it.
    pub fn wait_reply(&mut self) -> Result<RingReply, ClientError> {
        let timeout = self.region.call_timeout();
        let end = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            if let Some(reply) = self.read_reply()? {
                return Ok(reply);
            }
            // It says so once; what it wrote before was read.
            if let Some(error) = &self.ended {
                return Err(error.clone());
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if let (Some(timeout), Some(Duration::ZERO)) = (timeout, left) {
                return Err(ClientError::deadline_exceeded(timeout));
            }
            let time = left.map_or(LOOK_INTERVAL, |left| left.min(LOOK_INTERVAL));
            let began = Instant::now();
            let waited = self.ring.wait_end(&mut self.spin, time);
            waited.map_err(|error| region_error(&error))?;
            let is_closed = self.ring.is_closed().map_err(|error| region_error(&error))?;
            // A daemon that is gone wakes no one. What it wrote before may be read all the same.
            if (is_closed || began.elapsed() >= time)
                && let Err(error) = self.region.read_notice()
            {
                self.ended = Some(error);
                continue;
            }
            if is_closed {
                // Why, is on its way.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The next end, if it is there.
    ///
    /// # Errors
    /// `INTERNAL` where the daemon writes what is no end.
    pub fn read_reply(&mut self) -> Result<Option<RingReply>, ClientError> {
        let Some(end) = self.ring.read_end().map_err(|error| region_error(&error))? else {
            return Ok(None);
        };
        let malformed = |error| format!("malformed end of an attend by ring: {error}");
        let end = end.map_err(|error| ClientError::new(ErrorCode::Internal, malformed(error)))?;
        let result = match end.outcome {
            CallOutcome::Done(values) => Ok(values[0]),
            CallOutcome::Refused(refusal) => Err(self.region.explain_refusal(&refusal)),
        };
        Ok(Some(RingReply { tag: end.tag, result }))
    }

    /// One attend from end to end, behind the ring. Ends of attends that were given up are passed
    /// over.
    ///
    /// # Errors
    /// As [`AttendRing::submit_attend`] and [`AttendRing::wait_reply`].
    pub fn attend_once(
        &mut self,
        batch: &AttendBatch,
        head_dims: [u32; 2],
    ) -> Result<Attended, ClientError> {
        let at = RingLayout::pack_from(self.free_from(), batch, head_dims);
        let region = self.region.clone();
        let memory = region.memory();
        memory.write_bytes(at.q.offset, &batch.q).map_err(|error| region_error(&error))?;
        let tag = self.next_tag;
        self.next_tag += 1;
        self.submit_attend(tag, batch, &at)?;
        let failed = loop {
            let reply = self.wait_reply()?;
            if reply.tag == tag {
                break reply.result?;
            }
        };
        let errors = crate::RegionSlice {
            offset: at.query_errors,
            bytes: batch.queries.len() as u64 * QUERY_ERROR_BYTES,
        };
        let query_errors = if failed > 0 { region.query_errors(errors)? } else { Vec::new() };
        let lse_count = batch.query_rows() as usize * batch.q_heads as usize;
        let out_bytes = lse_count * head_dims[1] as usize * batch.dtype.size_bytes();
        let read = |offset, bytes| {
            let mut to = vec![0; bytes];
            memory.read_bytes(offset, &mut to).map_err(|error| region_error(&error))?;
            Ok::<_, ClientError>(to)
        };
        let out = read(at.out.offset, out_bytes)?.into();
        let lse = read(at.lse, 4 * lse_count)?;
        let lse = lse.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Ok(Attended { out, lse, query_errors })
    }
}

fn ring_query(query: &AttendQuery) -> RingQuery {
    let AttendQuery { sequence, n_q, kv_length, position, start, end, sliding_window } = *query;
    RingQuery { sequence: sequence.0, n_q, kv_length, position, start, end, sliding_window }
}

fn coded_error(error: &(impl Coded + ToString)) -> ClientError {
    ClientError::new(error.code(), error.to_string())
}
