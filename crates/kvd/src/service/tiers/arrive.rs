//! A prefix that comes back from disk layer by layer: its sequence is opened once the first layers
//! of all its blocks lie verified in the pool, and a task brings the others, some layers of every
//! block at a time.
//!
//! The slots of all layers are reserved before the answer, so want of room makes the prefix
//! shorter, as what is found damaged by then does. What fails later is lost to this sequence: its
//! reads are refused, and what is damaged is forgotten. When nobody has the sequence any more, the
//! task ends and its slots are free. Of a shared store's objects whole blocks come: they are read
//! in one piece anyway.

use super::SliceUse;
use super::export::slots_of;
use super::image::{LayerForm, LayerTable, read_tables};
use super::import::{
    BlockImages, BlockReadError, LoadClaim, PlannedPromotion, PrefixPromotion, RefusalReason,
    reserve_layer,
};
use crate::device_worker::DeviceWork;
use crate::scheduler::JobKind;
use crate::service::{CallContext, PrefixOpening, RegisteredModel, Service, ServiceError};
use kvd_compute::{Backend, ImportOutcome, LayerImage, Stop, import_layer};
use kvd_core::{ErrorCode, LayerIndex};
use kvd_store::{
    ArrivingPrefix, AttachedSequence, BlockToRead, FilledPrefix, PoolPart, ReadPlan, RecordPlace,
    StoredLayer,
};
use kvd_tier::{DiskLocation, ReadRequest, RecordHead, RecordPart};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::oneshot;
use tokio::time::timeout_at;

/// Layers of a block that are read at once, behind the first.
const GROUP_LAYERS: u32 = 8;
/// Reads under way at a time.
const READS_AHEAD: usize = 8;
/// Blocks whose layers one job brings to the device.
const BLOCKS_PER_JOB: usize = 16;

/// A sequence that was opened on a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpenedLayers {
    pub(crate) opened: AttachedSequence,
    /// Layers that may be read at once.
    pub(crate) ready: u32,
}

/// A read under way.
type PartFlight<T> = oneshot::Receiver<Result<T, BlockReadError>>;

/// Names and forms of a block, from its record's head.
struct BlockHead {
    record: Arc<RecordHead>,
    forms: Vec<LayerForm>,
    tables: Vec<LayerTable>,
}

impl BlockHead {
    fn of_part(part: &RecordPart, block: &BlockImages<'_>) -> Option<Self> {
        let record = Arc::clone(part.record_head());
        let layers = block.shape.geometry.layers;
        let form = |layer| LayerForm::from_bytes(record.layer_form(layer)?);
        let forms = (0..layers).map(form).collect::<Option<Vec<_>>>()?;
        let fits = forms.iter().all(|form| block.fits_form(form));
        let tables = read_tables(record.table_bytes())?;
        fits.then_some(Self { record, forms, tables })
    }
}

/// A block on its way.
struct ArrivingRecord {
    head: Arc<BlockHead>,
    slots: Vec<StoredLayer>,
}

/// Blocks whose slots are reserved, and why no more.
#[derive(Default)]
struct ReservedBlocks {
    records: Vec<ArrivingRecord>,
    refusal: Option<RefusalReason>,
}

/// Blocks whose slots are reserved, in order, and what keeps them.
struct ArrivingBlocks {
    records: Vec<ArrivingRecord>,
    /// Others that need them wait for the end of these.
    _claims: Vec<LoadClaim>,
    _turn: OwnedSemaphorePermit,
}

/// An arrival whose first layers have come.
struct BegunArrival {
    promotion: PrefixPromotion,
    plan: ReadPlan,
    before: PoolPart,
    blocks: ArrivingBlocks,
    ready: u32,
}

/// Blocks that some layers were brought of, and why no more.
struct FillOutcome {
    filled: usize,
    refusal: Option<RefusalReason>,
}

impl Service {
    /// [`Service::open_on_prefix`], answered once the first `ready` layers of what is on disk are
    /// in the pool, where all of it is on disk. Otherwise once everything is.
    ///
    /// # Errors
    /// As that.
    pub(crate) async fn open_by_layers(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
        ready: u32,
    ) -> Result<OpenedLayers, ServiceError> {
        if ready > 0
            && let Some(begun) = self.begin_arrival(call, opening, ready).await
        {
            return self.open_begun(call, opening, begun);
        }
        // Kept until the prefix is attached.
        let _brought = self.bring_prefix(call, opening).await;
        let opened = self.open_on_prefix(call, opening)?;
        Ok(OpenedLayers { opened, ready: self.count_layers(call, opening) })
    }

    fn count_layers(&self, call: &CallContext, opening: &PrefixOpening) -> u32 {
        let model = self.models.find_model(&call.namespace, opening.model);
        model.map_or(0, |model| model.shape.geometry.layers)
    }

    /// Brings the first layers of a prefix; none where it is to come as a whole.
    async fn begin_arrival(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
        ready: u32,
    ) -> Option<BegunArrival> {
        let PlannedPromotion { promotion, mut plan } = self.plan_promotion(call, opening).await?;
        let is_on_disk = |read: &BlockToRead| matches!(read.place, RecordPlace::Disk(_));
        let layers = promotion.model.shape.geometry.layers;
        if ready >= layers || !plan.missing.iter().all(is_on_disk) {
            return None;
        }
        let turn = Arc::clone(&promotion.cache.promotions).acquire_owned();
        let _turn = timeout_at(promotion.end.into(), turn).await.ok()?.ok()?;
        let claim = |read| promotion.claim_block(read).ok();
        let _claims = plan.missing.iter().map(claim).collect::<Option<Vec<_>>>()?;
        let index = promotion.store.prefix_index();
        // Another may have brought some between the look and the claim.
        if plan.missing.iter().any(|read| index.is_read(read) != Some(false)) {
            return None;
        }
        let before = index.hold_before(&plan)?;
        let ReservedBlocks { mut records, refusal } = promotion.reserve_blocks(&plan.missing).await;
        let filled = promotion.fill_layers(&plan.missing, &records, 0..ready, None).await;
        records.truncate(filled.filled);
        if let Some(reason) = filled.refusal.or(refusal) {
            promotion.count_refusal(reason);
        }
        if records.is_empty() {
            return None;
        }
        plan.blocks -= plan.missing.len() - records.len();
        plan.missing.truncate(records.len());
        let blocks = ArrivingBlocks { records, _claims, _turn };
        Some(BegunArrival { promotion, plan, before, blocks, ready })
    }

    /// Opens the sequence, and has the other layers brought.
    fn open_begun(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
        begun: BegunArrival,
    ) -> Result<OpenedLayers, ServiceError> {
        let BegunArrival { promotion, plan, before, blocks, ready } = begun;
        let missing = plan.missing.clone();
        let slots = blocks.records.iter().map(|record| record.slots.clone()).collect();
        let filled = FilledPrefix { plan, before, blocks: slots, ready };
        let mut arriving = None;
        let opened = self.open_by(call, opening, |store, shape, session| {
            let begun = store.open_arriving(shape, filled, session)?;
            Ok(arriving.insert(begun).opened)
        })?;
        if let Some(arriving) = arriving {
            tokio::spawn(promotion.bring_rest(arriving, missing, blocks, ready));
        }
        Ok(OpenedLayers { opened, ready })
    }
}

impl PrefixPromotion {
    /// Reads the heads of records and reserves the slots of their blocks, in order, until one
    /// cannot be; and why no more.
    async fn reserve_blocks(&self, missing: &[BlockToRead]) -> ReservedBlocks {
        let begin = |block: usize| {
            self.begin_part(&missing[block], ReadRequest::Head, |part, block| {
                BlockHead::of_part(part, block).map(Arc::new)
            })
        };
        let mut reads = ReadLine::new(missing.len(), begin);
        let mut reserved = ReservedBlocks::default();
        while let Some(flight) = reads.take_next() {
            let head = match self.end_flight(&missing[reserved.records.len()], flight).await {
                Ok(head) => head,
                Err(reason) => return ReservedBlocks { refusal: Some(reason), ..reserved },
            };
            let (pool, namespace) = (self.store.pool(), &self.model.shape.namespace);
            let reserve = |form| reserve_layer(pool, namespace, form);
            let Some(slots) = head.forms.iter().map(reserve).collect() else {
                return ReservedBlocks { refusal: Some("no_room"), ..reserved };
            };
            reserved.records.push(ArrivingRecord { head, slots });
        }
        reserved
    }

    /// Brings layers of blocks to their slots, in order, until those of one cannot be brought.
    async fn fill_layers(
        &self,
        missing: &[BlockToRead],
        records: &[ArrivingRecord],
        layers: Range<u32>,
        arriving: Option<&ArrivingPrefix>,
    ) -> FillOutcome {
        let begin = |block: usize| self.begin_layers(&missing[block], &records[block], &layers);
        let mut reads = ReadLine::new(records.len(), begin);
        let mut filled = 0;
        while let Some(first) = reads.take_next() {
            if arriving.is_some_and(|arriving| !arriving.is_wanted()) {
                return FillOutcome { filled, refusal: Some("abandoned") };
            }
            let mut blocks = Vec::with_capacity(BLOCKS_PER_JOB);
            let mut refusal = None;
            let mut next = Some(first);
            while let Some(flight) = next {
                let block = filled + blocks.len();
                match self.end_flight(&missing[block], flight).await {
                    Ok(images) => {
                        let slots = &records[block].slots[layers.start as usize..][..images.len()];
                        blocks.push(FilledBlock { images, slots: slots.to_vec() });
                    }
                    Err(reason) => refusal = Some(reason),
                }
                let has_room = blocks.len() < BLOCKS_PER_JOB && refusal.is_none();
                next = if has_room { reads.take_ready() } else { None };
            }
            let read = blocks.len();
            let job = FillJob::new(&self.model, layers.clone(), blocks);
            let outcome = self.run_fill(&missing[filled..filled + read], job).await;
            filled += outcome.filled;
            if let Some(reason) = outcome.refusal.or(refusal) {
                return FillOutcome { filled, refusal: Some(reason) };
            }
        }
        FillOutcome { filled, refusal: None }
    }

    fn begin_layers(
        &self,
        read: &BlockToRead,
        record: &ArrivingRecord,
        layers: &Range<u32>,
    ) -> PartFlight<Vec<LayerImage>> {
        let (head, layers) = (Arc::clone(&record.head), layers.clone());
        let request =
            ReadRequest::Layers { head: Arc::clone(&head.record), layers: layers.clone() };
        self.begin_part(read, request, move |part, block| {
            block.read_layers(part, &head.forms, &head.tables, layers)
        })
    }

    /// Begins a read whose answer is made in the reader's thread; none is no block of this model.
    fn begin_part<T: Send + 'static>(
        &self,
        read: &BlockToRead,
        request: ReadRequest,
        make: impl FnOnce(&RecordPart, &BlockImages<'_>) -> Option<T> + Send + 'static,
    ) -> PartFlight<T> {
        let (reply, answer) = oneshot::channel();
        let (RecordPlace::Disk(place), Some(disk)) = (read.place, &self.cache.disk) else {
            // Its tier is not there: whoever waits is told so.
            return answer;
        };
        let (model, position) = (Arc::clone(&self.model), read.digests.position);
        let on_read = move |part: Result<RecordPart, _>| {
            let made = part.map_err(BlockReadError::Disk).and_then(|part| {
                let block = BlockImages { shape: &model.shape, position };
                make(&part, &block).ok_or(BlockReadError::Foreign)
            });
            // Who asked may be gone.
            drop(reply.send(made));
        };
        let location = DiskLocation::from_words(place.0);
        match disk.submit_read(location, request, Box::new(on_read)) {
            Ok(()) => answer,
            Err(error) => {
                let (reply, refused) = oneshot::channel();
                drop(reply.send(Err(BlockReadError::Disk(error))));
                refused
            }
        }
    }

    async fn end_flight<T>(
        &self,
        read: &BlockToRead,
        flight: PartFlight<T>,
    ) -> Result<T, RefusalReason> {
        let Ok(answer) = timeout_at(self.end.into(), flight).await else { return Err("timeout") };
        let answer = answer.map_err(|_| "closed")?;
        answer.map_err(|error| self.refuse_read(read, error))
    }

    /// Has the device take layers of blocks.
    async fn run_fill(&self, missing: &[BlockToRead], job: FillJob) -> FillOutcome {
        if missing.is_empty() {
            return FillOutcome { filled: 0, refusal: None };
        }
        let call = CallContext {
            waits_for_queue: true,
            deadline: Some(self.end),
            ..CallContext::new(self.model.shape.namespace.clone())
        };
        let (filled, refusal) = match self.worker.ask_device(&call, job).await {
            Ok(FillResult::Filled) => (missing.len(), None),
            Ok(FillResult::TablesFull { block }) => (block, Some("tables_full")),
            Ok(FillResult::Damaged { block }) => {
                (block, Some(self.refuse_damaged(&missing[block])))
            }
            Err(error) if error.code() == ErrorCode::DeadlineExceeded => (0, Some("timeout")),
            Err(error) => {
                tracing::warn!(%error, "layers from disk were not imported");
                (0, Some("device"))
            }
        };
        FillOutcome { filled, refusal }
    }

    /// Brings the layers behind the first, and makes the blocks findable in the pool.
    async fn bring_rest(
        mut self,
        arriving: ArrivingPrefix,
        missing: Vec<BlockToRead>,
        blocks: ArrivingBlocks,
        ready: u32,
    ) {
        // It is not the opening's call any more.
        self.end = self.began + self.cache.config.promotion.time_max;
        let (count, layers) = (blocks.records.len(), self.model.shape.geometry.layers);
        let mut group = ready..ready;
        while group.end < layers {
            group = group.end..(group.end + GROUP_LAYERS).min(layers);
            let filled =
                self.fill_layers(&missing, &blocks.records, group.clone(), Some(&arriving)).await;
            if filled.filled < count {
                let reason = filled.refusal.unwrap_or("closed");
                arriving.note_lost(reason);
                return self.count_blocks(0, Some(reason));
            }
            arriving.note_ready(group.end);
        }
        let came = self.store.finish_arrival(arriving);
        self.count_blocks(came as u64, (came < count).then_some("no_room"));
    }
}

/// Reads for blocks in order, a few under way at a time.
struct ReadLine<T, F> {
    begin: F,
    flights: VecDeque<PartFlight<T>>,
    next: usize,
    count: usize,
}

impl<T, F: FnMut(usize) -> PartFlight<T>> ReadLine<T, F> {
    fn new(count: usize, begin: F) -> Self {
        Self { begin, flights: VecDeque::new(), next: 0, count }
    }

    fn fill_up(&mut self) {
        while self.flights.len() < READS_AHEAD && self.next < self.count {
            self.flights.push_back((self.begin)(self.next));
            self.next += 1;
        }
    }

    /// The next read, to be waited for; others go on beside it.
    fn take_next(&mut self) -> Option<PartFlight<T>> {
        self.fill_up();
        let next = self.flights.pop_front();
        self.fill_up();
        next
    }

    /// The next read, if its answer is there.
    fn take_ready(&mut self) -> Option<PartFlight<T>> {
        let is_there = self.flights.front().is_some_and(|flight| !flight.is_empty());
        if is_there { self.take_next() } else { None }
    }
}

/// Layers of a block, and the slots that are theirs.
struct FilledBlock {
    images: Vec<LayerImage>,
    slots: Vec<StoredLayer>,
}

/// The job that brings some layers of blocks to their slots.
pub(crate) struct FillJob {
    model: Arc<RegisteredModel>,
    layers: Range<u32>,
    blocks: Vec<FilledBlock>,
    /// None once all lie in their slots.
    next: Option<ImagePlace>,
}

/// A layer of a block of a job.
#[derive(Clone, Copy, Default)]
struct ImagePlace {
    block: usize,
    layer: usize,
}

/// Outcome of that; of the block that is named a table has no version left, or bytes are damaged.
pub(crate) enum FillResult {
    Filled,
    TablesFull { block: usize },
    Damaged { block: usize },
}

impl DeviceWork for FillJob {
    type Reply = FillResult;

    fn job_kind(&self) -> JobKind {
        JobKind::Transfer
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<FillResult>, ServiceError> {
        let mut slice = SliceUse::begin_slice();
        while let Some(at) = self.next {
            if slice.is_spent(stop) {
                return Ok(None);
            }
            let FilledBlock { images, slots } = &mut self.blocks[at.block];
            let (image, slots) = (&mut images[at.layer], slots_of(&slots[at.layer]));
            slice.bytes += image.rows.len() + image.pages.len();
            let layer = LayerIndex(self.layers.start + at.layer as u32);
            match import_layer(backend, self.model.shape.id, layer, image, &slots) {
                Ok(ImportOutcome::Imported) => {}
                Ok(ImportOutcome::TablesFull) => {
                    return Ok(Some(FillResult::TablesFull { block: at.block }));
                }
                Err(error) => {
                    let error = ServiceError::from(error);
                    if error.code() != ErrorCode::CorruptPage {
                        return Err(error);
                    }
                    return Ok(Some(FillResult::Damaged { block: at.block }));
                }
            }
            // Its bytes lie on the device.
            *image = LayerImage::default();
            self.next = self.find_next(at);
        }
        // Placing pages has no answer of its own: what a failed device holds is never read.
        match backend.failure() {
            None => Ok(Some(FillResult::Filled)),
            Some(reason) => Err(ServiceError::new(ErrorCode::DeviceFailed, reason)),
        }
    }
}

impl FillJob {
    fn new(model: &Arc<RegisteredModel>, layers: Range<u32>, blocks: Vec<FilledBlock>) -> Self {
        let next = (!blocks.is_empty() && !layers.is_empty()).then(ImagePlace::default);
        Self { model: Arc::clone(model), layers, blocks, next }
    }

    /// The image behind another: those of one block after those of the block before.
    fn find_next(&self, at: ImagePlace) -> Option<ImagePlace> {
        let ImagePlace { block, layer } = at;
        if layer + 1 < self.layers.len() {
            return Some(ImagePlace { block, layer: layer + 1 });
        }
        (block + 1 < self.blocks.len()).then_some(ImagePlace { block: block + 1, layer: 0 })
    }
}
