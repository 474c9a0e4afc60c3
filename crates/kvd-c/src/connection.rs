//! A connection: a region with a ring, places for control calls, and the memory that callers see.

use crate::args::{ABSENT, AttendArgs, QueryArgs, StoreArgs, add_base, dtype_of};
use crate::failure::FailedCall;
use bytes::Bytes;
use kvd_client::{
    AttendBatch, AttendRing, ControlCalls, DType, ErrorCode, LayerIndex, ModelId, ModelSpec,
    Namespace, RegionClient, RegionOptions, RegionSlice, RingLayout, RingOptions, RingReply,
    SequenceFork, SequenceId, SessionId, SessionOptions, StoreChunk,
};
use kvd_shm::CompletionRecord;
use kvd_shm::ring::{RingPlace, RingQuery};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Room for answers of control calls: a description of thousands of layers.
const ROOM_BYTES: u64 = 64 << 10;
/// Texts and bytes of a model that a call has room for itself; more go through a region of their
/// own, which ends with the call.
const MODEL_BYTES_MAX: u64 = 128 << 10;
/// Bytes of a registration beside those.
const MODEL_FIELDS_BYTES: u64 = 4096;
/// Memory of callers begins on a page.
const PAGE_BYTES: u64 = 4096;
const CACHE_LINE: u64 = 64;

/// How a connection is opened.
pub(crate) struct ConnectPlan {
    pub(crate) path: String,
    pub(crate) namespace: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) entries: u32,
    pub(crate) queries_max: u32,
    pub(crate) memory_bytes: u64,
    pub(crate) timeout_us: u64,
    pub(crate) spin_us: u32,
}

/// Where in the region things are.
#[derive(Clone, Copy)]
struct RegionPlaces {
    done: u64,
    room: u64,
    /// Lists of queries, one for each attend that may be under way.
    lists: u64,
    list_bytes: u64,
    /// The first byte that callers see.
    memory: u64,
}

/// Whose an attend under way is.
#[derive(Clone, Copy)]
enum SlotOwner {
    Nobody,
    /// A caller of `kvd_submit_attend`, by its tag.
    Tagged(u64),
    /// A caller of `kvd_attend`, which waits.
    Waiting,
    /// A caller of `kvd_attend`, which has given up.
    GivenUp,
}

/// The end of an attend of `kvd_submit_attend`.
pub(crate) struct TaggedEnd {
    pub(crate) tag: u64,
    pub(crate) result: Result<(), FailedCall>,
}

pub(crate) struct OpenConnection {
    ring: AttendRing,
    /// Where the daemon is, and as whom it is asked.
    path: String,
    options: RegionOptions,
    session: SessionId,
    places: RegionPlaces,
    memory_bytes: u64,
    queries_max: u32,
    /// Attends under way, by the place of their list.
    slots: Box<[SlotOwner]>,
    free_slots: Vec<u32>,
    /// Ends that came while others were waited for.
    ended: VecDeque<TaggedEnd>,
    /// Kept, so that an attend allocates nothing.
    batch: AttendBatch,
}

impl ConnectPlan {
    fn region_places(&self) -> RegionPlaces {
        let ring = RingPlace { offset: 0, entries: self.entries, first: 0 };
        // The ring's own record of the call that opens it is behind it.
        let done = (ring.end_offset() + CompletionRecord::BYTES).next_multiple_of(CACHE_LINE);
        let room = (done + CompletionRecord::BYTES).next_multiple_of(CACHE_LINE);
        let lists = room + ROOM_BYTES;
        let list_bytes = u64::from(self.queries_max) * RingQuery::BYTES as u64;
        let memory = (lists + u64::from(self.entries) * list_bytes).next_multiple_of(PAGE_BYTES);
        RegionPlaces { done, room, lists, list_bytes, memory }
    }

    /// Connects.
    pub(crate) fn open_connection(self) -> Result<OpenConnection, FailedCall> {
        let queries = 1..=AttendBatch::QUERIES_MAX as u32;
        if !queries.contains(&self.queries_max) {
            let message = format!("queries_max is {}; it is from {queries:?}", self.queries_max);
            return Err(FailedCall::invalid_argument(message));
        }
        let entries = self.entries;
        if !entries.is_power_of_two() || entries > RingPlace::ENTRIES_MAX {
            let most = RingPlace::ENTRIES_MAX;
            let message = format!("ring_entries is {entries}: no power of two from 1 to {most}");
            return Err(FailedCall::invalid_argument(message));
        }
        let places = self.region_places();
        let bytes = places.memory.checked_add(self.memory_bytes);
        let bytes =
            bytes.ok_or_else(|| FailedCall::invalid_argument("memory_bytes is beyond 64 bits"))?;
        let mut options = RegionOptions::default().with_bytes(bytes);
        if let Some(name) = &self.namespace {
            let namespace = Namespace::new(name);
            options = options.with_namespace(
                &namespace.map_err(|error| FailedCall::invalid_argument(error.to_string()))?,
            );
        }
        if self.timeout_us > 0 {
            options = options.with_timeout(Duration::from_micros(self.timeout_us));
        }
        let region = Arc::new(RegionClient::open_region(&self.path, &options)?);
        let name = self.session.unwrap_or_else(unique_name);
        let spin = if self.spin_us == ABSENT { 0 } else { self.spin_us.into() };
        let ring =
            RingOptions::default().with_entries(entries).with_spin(Duration::from_micros(spin));
        let ring = AttendRing::open_ring(region, ring)?;
        let control = places.control_calls(ring.shared_region());
        let session = control.hold_session(SessionOptions::new(name))?.id;
        Ok(OpenConnection {
            ring,
            path: self.path,
            options,
            session,
            places,
            memory_bytes: self.memory_bytes,
            queries_max: self.queries_max,
            slots: vec![SlotOwner::Nobody; entries as usize].into(),
            free_slots: (0..entries).rev().collect(),
            ended: VecDeque::with_capacity(entries as usize),
            batch: AttendBatch {
                model: ModelId(0),
                layer: LayerIndex(0),
                q_heads: 0,
                dtype: DType::F32,
                scale: None,
                soft_cap: None,
                queries: Vec::with_capacity(self.queries_max as usize),
                q: Bytes::new(),
                per_query_errors: false,
            },
        })
    }
}

/// A name that no other session has: of the process, and when it asked.
fn unique_name() -> String {
    static ASKED: AtomicU64 = AtomicU64::new(0);
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
    let asked = ASKED.fetch_add(1, Ordering::Relaxed);
    format!("kvd-c/{}/{since}/{asked}", std::process::id())
}

impl RegionPlaces {
    fn control_calls(self, region: &RegionClient) -> ControlCalls<'_> {
        region.control_calls(self.done, RegionSlice { offset: self.room, bytes: ROOM_BYTES })
    }
}

impl OpenConnection {
    fn control_calls(&self) -> ControlCalls<'_> {
        self.places.control_calls(self.ring.shared_region())
    }

    /// The memory that callers see.
    pub(crate) fn memory_start(&self) -> *mut u8 {
        let memory = self.ring.shared_region().memory();
        memory.start_address().wrapping_add(self.places.memory as usize)
    }

    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    pub(crate) fn register_model(&self, spec: ModelSpec) -> Result<u64, FailedCall> {
        let lengths = [spec.name.len(), spec.codec.len(), spec.calibration.len()];
        let bytes: u64 = lengths.into_iter().map(|length| length as u64).sum();
        if bytes <= MODEL_BYTES_MAX {
            return Ok(self.control_calls().register_model(spec)?.model.0);
        }
        // What it registers stays when it ends: models are of no region.
        let room =
            RegionSlice { offset: CompletionRecord::BYTES, bytes: bytes + MODEL_FIELDS_BYTES };
        let region_bytes = (room.offset + room.bytes).next_multiple_of(PAGE_BYTES);
        let boot_id = self.ring.shared_region().boot_id();
        let options = self.options.clone().with_bytes(region_bytes).with_boot_id(boot_id);
        let region = RegionClient::open_region(&self.path, &options)?;
        Ok(region.control_calls(0, room).register_model(spec)?.model.0)
    }

    pub(crate) fn open_sequence(&self, model: u64) -> Result<u64, FailedCall> {
        Ok(self.control_calls().open_sequence(ModelId(model), Some(self.session))?.0)
    }

    pub(crate) fn fork_sequence(
        &self,
        sequence: u64,
        length: Option<u32>,
    ) -> Result<u64, FailedCall> {
        let sequence = SequenceId(sequence);
        let fork = SequenceFork { sequence, length, session: Some(self.session) };
        Ok(self.control_calls().fork_sequence(fork)?.sequence.0)
    }

    pub(crate) fn truncate_sequence(&self, sequence: u64, length: u32) -> Result<(), FailedCall> {
        Ok(self.control_calls().truncate_sequence(SequenceId(sequence), length)?)
    }

    pub(crate) fn sequence_length(&self, sequence: u64) -> Result<u32, FailedCall> {
        Ok(self.control_calls().describe_sequence(SequenceId(sequence))?.length)
    }

    pub(crate) fn close_sequence(&self, sequence: u64) -> Result<(), FailedCall> {
        Ok(self.control_calls().close_sequence(SequenceId(sequence))?)
    }

    /// Stores rows that are in the memory; the layer's length then.
    pub(crate) fn store_rows(&self, rows: &StoreArgs) -> Result<u32, FailedCall> {
        let base = self.places.memory;
        let slice = |offset, bytes| {
            Ok::<_, FailedCall>(RegionSlice { offset: add_base(base, offset)?, bytes })
        };
        let places = [slice(rows.k, rows.k_bytes)?, slice(rows.v, rows.v_bytes)?];
        let chunk = StoreChunk {
            sequence: SequenceId(rows.sequence),
            layer: LayerIndex(rows.layer),
            start: rows.start,
            tokens: rows.tokens,
            k: Bytes::new(),
            v: Bytes::new(),
        };
        let region = self.ring.shared_region();
        region.send_store(chunk, self.places.done, places)?;
        Ok(region.wait_call(self.places.done)?[0])
    }

    /// Begins an attend that `kvd_wait_attend` tells the end of.
    pub(crate) fn submit_tagged(
        &mut self,
        tag: u64,
        args: &AttendArgs,
        queries: &[QueryArgs],
    ) -> Result<(), FailedCall> {
        if self.ended.len() + self.count_tagged() >= self.slots.len() {
            let message = format!("the ends of {} attends are to be read first", self.slots.len());
            return Err(FailedCall::new(ErrorCode::QueueFull, message));
        }
        self.submit_attend(SlotOwner::Tagged(tag), args, queries).map(|_| ())
    }

    fn count_tagged(&self) -> usize {
        self.slots.iter().filter(|owner| matches!(owner, SlotOwner::Tagged(_))).count()
    }

    /// One attend from end to end.
    pub(crate) fn attend_once(
        &mut self,
        args: &AttendArgs,
        queries: &[QueryArgs],
    ) -> Result<(), FailedCall> {
        let slot = self.submit_attend(SlotOwner::Waiting, args, queries)?;
        loop {
            match self.read_end() {
                Ok(EndedSlot { slot: ended, result, .. }) if ended == slot => return result,
                Ok(EndedSlot { owner: SlotOwner::Tagged(tag), result, .. }) => {
                    self.ended.push_back(TaggedEnd { tag, result });
                }
                Ok(_) => {}
                Err(error) => {
                    self.slots[slot as usize] = SlotOwner::GivenUp;
                    return Err(error);
                }
            }
        }
    }

    /// The next end of a tagged attend.
    pub(crate) fn wait_tagged(&mut self) -> Result<TaggedEnd, FailedCall> {
        loop {
            if let Some(ended) = self.ended.pop_front() {
                return Ok(ended);
            }
            if self.count_tagged() == 0 {
                return Err(FailedCall::invalid_argument(
                    "no attend is under way: there is no end to wait for",
                ));
            }
            if let EndedSlot { owner: SlotOwner::Tagged(tag), result, .. } = self.read_end()? {
                return Ok(TaggedEnd { tag, result });
            }
        }
    }

    fn submit_attend(
        &mut self,
        owner: SlotOwner,
        args: &AttendArgs,
        queries: &[QueryArgs],
    ) -> Result<u32, FailedCall> {
        if queries.len() > self.queries_max as usize {
            let (count, most) = (queries.len(), self.queries_max);
            let message = format!("{count} queries, over kvd_options.queries_max = {most}");
            return Err(FailedCall::new(ErrorCode::LimitExceeded, message));
        }
        if self.free_slots.is_empty() {
            // Ends of attends that were given up may have come meanwhile.
            while let Some(reply) = self.ring.read_reply()? {
                if let EndedSlot { owner: SlotOwner::Tagged(tag), result, .. } =
                    self.take_end(reply)?
                {
                    self.ended.push_back(TaggedEnd { tag, result });
                }
            }
        }
        let Some(slot) = self.free_slots.last().copied() else {
            let message = format!("{} attends are under way", self.slots.len());
            return Err(FailedCall::new(ErrorCode::QueueFull, message));
        };
        let base = self.places.memory;
        let at = RingLayout {
            queries: self.places.lists + u64::from(slot) * self.places.list_bytes,
            q: args.q.place_rows(base)?,
            out: args.out.place_rows(base)?,
            lse: add_base(base, args.lse)?,
            query_errors: 0,
            end: 0,
        };
        let batch = &mut self.batch;
        batch.queries.clear();
        batch.queries.extend(queries.iter().map(|query| query.to_query()));
        (batch.model, batch.layer) = (ModelId(args.model), LayerIndex(args.layer));
        (batch.q_heads, batch.dtype) = (args.q_heads, dtype_of(args.dtype)?);
        batch.scale = Some(args.scale).filter(|scale| *scale != 0.0);
        batch.soft_cap = Some(args.soft_cap).filter(|cap| *cap != 0.0);
        self.ring.submit_attend(slot.into(), batch, &at)?;
        self.free_slots.pop();
        self.slots[slot as usize] = owner;
        Ok(slot)
    }

    /// Waits for the next end, whosever it is.
    fn read_end(&mut self) -> Result<EndedSlot, FailedCall> {
        let reply = self.ring.wait_reply()?;
        self.take_end(reply)
    }

    /// Frees the place of an attend that has ended.
    fn take_end(&mut self, reply: RingReply) -> Result<EndedSlot, FailedCall> {
        let slot = reply.tag as u32;
        let Some(place) = self.slots.get_mut(slot as usize) else {
            let message = format!("the end of an attend with tag {}, which is no place", reply.tag);
            return Err(FailedCall::new(ErrorCode::Internal, message));
        };
        let owner = std::mem::replace(place, SlotOwner::Nobody);
        if matches!(owner, SlotOwner::Nobody) {
            let message = format!("a second end of the attend in place {slot}");
            return Err(FailedCall::new(ErrorCode::Internal, message));
        }
        self.free_slots.push(slot);
        Ok(EndedSlot { slot, owner, result: reply.result.map(drop).map_err(FailedCall::from) })
    }
}

/// The end of an attend, and whose it was.
struct EndedSlot {
    slot: u32,
    owner: SlotOwner,
    result: Result<(), FailedCall>,
}
