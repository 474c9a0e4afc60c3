//! The way of a block back from disk or from the store that daemons share: read and verified by the
//! tier, brought to reserved slots by the device in slices, then findable in the pool.
//!
//! A call that is to begin with a prefix has its missing blocks brought, in order, a few reads
//! ahead; a block that another call brings already is waited for. All of it within a bounded time:
//! what is not there then is a shorter prefix.

use super::export::slots_of;
use super::image::{LayerForm, LayerTable, read_tables};
use super::remote::object_of_place;
use super::{CacheTiers, LoadKey, SliceUse};
use crate::device_worker::{DeviceWork, DeviceWorker};
use crate::metrics::{Metric, Metrics};
use crate::scheduler::JobKind;
use crate::service::{
    CallContext, DeviceShard, PrefixOpening, RegisteredModel, Service, ServiceError,
};
use kvd_codec::Page;
use kvd_compute::{Backend, ImportOutcome, LayerImage, Stop, import_layer};
use kvd_core::{ErrorCode, Extent, LayerIndex, Namespace};
use kvd_remote::ReadFailure;
use kvd_store::{
    ArenaPool, BlockToRead, ModelShape, PackedPages, PrefixIndex, RawSlot, ReadPlan, RecordPlace,
    SequenceStore, StoredLayer,
};
use kvd_tier::{DiskLocation, ReadError, ReadRequest, RecordPart, ScopeId};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout_at;

/// Reads of one call that are under way at a time.
const READS_AHEAD: usize = 8;

/// A prefix that was brought to the pool; it stays there until this is dropped, and goes by its
/// turn from then on.
pub(crate) struct BroughtPrefix {
    index: Arc<PrefixIndex>,
    /// None once it was let go of.
    plan: Option<ReadPlan>,
}

impl Drop for BroughtPrefix {
    fn drop(&mut self) {
        self.plan.take().into_iter().for_each(|plan| self.index.settle_reads(plan));
    }
}

/// Why a block did not come, as the label `reason` has it.
pub(super) type RefusalReason = &'static str;

/// A read under way.
enum ReadFlight {
    /// This call's.
    Own { answer: oneshot::Receiver<Result<RecordPart, BlockReadError>>, _claim: LoadClaim },
    /// Another's, which ends with the sender.
    Other(watch::Receiver<()>),
    /// It could not begin.
    Refused(ReadError),
}

/// Why a record was not read.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockReadError {
    Disk(ReadError),
    Remote(ReadFailure),
    /// It is whole, and no block of this model.
    Foreign,
}

/// The right to bring a block; others wait for its end.
pub(super) struct LoadClaim {
    cache: Arc<CacheTiers>,
    key: LoadKey,
    _ends: watch::Sender<()>,
}

impl Drop for LoadClaim {
    fn drop(&mut self) {
        self.cache.loading.lock().remove(&self.key);
    }
}

/// Who brings blocks.
#[derive(Clone)]
pub(super) struct PrefixPromotion {
    pub(super) cache: Arc<CacheTiers>,
    pub(super) store: Arc<SequenceStore>,
    pub(super) worker: DeviceWorker,
    pub(super) shard_index: usize,
    pub(super) model: Arc<RegisteredModel>,
    scope: ScopeId,
    pub(super) metrics: Arc<Metrics>,
    pub(super) began: Instant,
    pub(super) end: Instant,
}

/// A promotion, and what it is to bring.
pub(super) struct PlannedPromotion {
    pub(super) promotion: PrefixPromotion,
    pub(super) plan: ReadPlan,
}

impl Service {
    /// Brings the blocks of a prefix to the pool that are on disk alone, as far as they can be read
    /// in time; none where nothing is missing. Keep the answer until the prefix is attached.
    pub(crate) async fn bring_prefix(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
    ) -> Option<BroughtPrefix> {
        let PlannedPromotion { promotion, plan } = self.plan_promotion(call, opening).await?;
        let index = Arc::clone(promotion.store.prefix_index());
        let brought = BroughtPrefix { index, plan: Some(plan) };
        let missing = brought.plan.as_ref().map_or(&[][..], |plan| &plan.missing);
        let (came, refusal) = promotion.bring_blocks(missing).await;
        promotion.count_blocks(came, refusal);
        Some(brought)
    }

    /// Finds what a prefix has below the pool; none where nothing is missing.
    pub(super) async fn plan_promotion(
        &self,
        call: &CallContext,
        opening: &PrefixOpening,
    ) -> Option<PlannedPromotion> {
        let cache = Arc::clone(self.tiers.as_ref()?);
        self.admit_call(call).ok()?;
        let model = self.models.find_model(&call.namespace, opening.model).ok()?;
        let scope = model.scope?;
        let chains = self.read_chains(&model, std::slice::from_ref(&opening.prefix)).ok()?;
        let DeviceShard { store, worker, .. } = &self.shards[model.shard];
        let index = store.prefix_index();
        let blocks_max = self.config.tokens_per_sequence_max / model.shape.geometry.block_tokens;
        if self.reads_remotely() {
            let cached = index.match_prefixes(model.shape.id, &chains);
            self.find_remotely(call, &model, &chains, &cached).await;
        }
        let plan = index.plan_reads(model.shape.id, &chains[0], blocks_max as usize)?;
        let began = Instant::now();
        let own_end = began + cache.config.promotion.time_max;
        let end = call.deadline.map_or(own_end, |deadline| deadline.min(own_end));
        let promotion = PrefixPromotion {
            cache,
            store: Arc::clone(store),
            worker: worker.clone(),
            shard_index: model.shard,
            scope,
            metrics: self.metrics.clone(),
            model,
            began,
            end,
        };
        Some(PlannedPromotion { promotion, plan })
    }
}

impl PrefixPromotion {
    /// Counts blocks that came to the pool, and why no more did.
    pub(super) fn count_blocks(&self, came: u64, refusal: Option<RefusalReason>) {
        let metrics = &self.metrics;
        metrics.counter(Metric::PromotedBlocksTotal, &[]).increment(came);
        metrics.histogram(Metric::PromoteSeconds, &[]).record(self.began.elapsed().as_secs_f64());
        refusal.into_iter().for_each(|reason| self.count_refusal(reason));
    }

    /// Counts why a block did not come.
    pub(super) fn count_refusal(&self, reason: RefusalReason) {
        self.metrics.counter(Metric::ImportRefusedTotal, &[("reason", reason)]).increment(1);
        tracing::debug!(model = self.model.name, reason, "a prefix is shorter than matched");
    }

    /// The right to bring a block, or the end of whoever has it.
    pub(super) fn claim_block(&self, read: &BlockToRead) -> Result<LoadClaim, watch::Receiver<()>> {
        let key = LoadKey { shard: self.shard_index, lineage: read.digests.lineage };
        let mut loading = self.cache.loading.lock();
        if let Some(other) = loading.get(&key) {
            return Err(other.clone());
        }
        let (ends, ended) = watch::channel(());
        loading.insert(key, ended);
        Ok(LoadClaim { cache: Arc::clone(&self.cache), key, _ends: ends })
    }

    /// Brings blocks in order until one cannot be; how many came, and why no more.
    async fn bring_blocks(&self, missing: &[BlockToRead]) -> (u64, Option<RefusalReason>) {
        let Ok(turn) = timeout_at(self.end.into(), self.cache.promotions.acquire()).await else {
            return (0, Some("timeout"));
        };
        let Ok(_turn) = turn else { return (0, Some("closed")) };
        let (mut came, mut flights, mut next) = (0, VecDeque::new(), 0);
        loop {
            while flights.len() < READS_AHEAD && next < missing.len() {
                flights.push_back(self.begin_read(&missing[next]));
                next += 1;
            }
            let Some(flight) = flights.pop_front() else { return (came, None) };
            let read = &missing[next - flights.len() - 1];
            match self.end_read(read, flight).await {
                Ok(()) => came += 1,
                Err(reason) => return (came, Some(reason)),
            }
        }
    }

    fn begin_read(&self, read: &BlockToRead) -> ReadFlight {
        let claim = match self.claim_block(read) {
            Ok(claim) => claim,
            Err(other) => return ReadFlight::Other(other),
        };
        let (reply, answer) = oneshot::channel();
        // Who asked may be gone.
        match (read.place, &self.cache.disk, &self.cache.remote) {
            (RecordPlace::Disk(place), Some(disk), _) => {
                let location = DiskLocation::from_words(place.0);
                let on_read = move |part: Result<_, _>| {
                    drop(reply.send(part.map_err(BlockReadError::Disk)));
                };
                let request = ReadRequest::Record;
                if let Err(error) = disk.submit_read(location, request, Box::new(on_read)) {
                    return ReadFlight::Refused(error);
                }
            }
            (RecordPlace::Remote(place), _, Some(remote)) => {
                let name = object_of_place(self.scope, &read.digests, &place);
                let (tier, end) = (remote.tier.clone(), self.end);
                tokio::spawn(async move {
                    let part = tier.read_block(&name, end).await;
                    drop(reply.send(part.map_err(BlockReadError::Remote)));
                });
            }
            // Its tier is not there; whoever waits is told so.
            _ => drop(reply),
        }
        ReadFlight::Own { answer, _claim: claim }
    }

    async fn end_read(&self, read: &BlockToRead, flight: ReadFlight) -> Result<(), RefusalReason> {
        let (answer, _claim) = match flight {
            ReadFlight::Own { answer, _claim } => (answer, _claim),
            ReadFlight::Other(mut ended) => {
                // It changes never, and closes when the other is done.
                let waited = timeout_at(self.end.into(), ended.changed()).await;
                let is_there = self.store.prefix_index().is_read(read) == Some(true);
                return if is_there { Ok(()) } else { Err(waited.map_or("timeout", |_| "other")) };
            }
            ReadFlight::Refused(error) => {
                return Err(self.refuse_read(read, BlockReadError::Disk(error)));
            }
        };
        let Ok(part) = timeout_at(self.end.into(), answer).await else { return Err("timeout") };
        let part = part.map_err(|_| "closed")?;
        let part = part.map_err(|error| self.refuse_read(read, error))?;
        let Some(job) = self.plan_import(read, &part) else {
            return Err(self.refuse_damaged(read));
        };
        drop(part);
        let call = CallContext {
            waits_for_queue: true,
            deadline: Some(self.end),
            ..CallContext::new(self.model.shape.namespace.clone())
        };
        match self.worker.ask_device(&call, job).await {
            Ok(ImportResult::InPool) => Ok(()),
            Ok(ImportResult::TablesFull) => Err("tables_full"),
            Ok(ImportResult::NoRoom) => Err("no_room"),
            Err(error) if error.code() == ErrorCode::CorruptPage => Err(self.refuse_damaged(read)),
            Err(error) if error.code() == ErrorCode::DeadlineExceeded => Err("timeout"),
            Err(error) => {
                tracing::warn!(%error, "a block from disk was not imported");
                Err("device")
            }
        }
    }

    /// A read that gave nothing: what is gone or damaged is forgotten, with all behind it, and so
    /// is what a shared store does not give: it is found again when it can be.
    pub(super) fn refuse_read(&self, read: &BlockToRead, error: BlockReadError) -> RefusalReason {
        let reason = match error {
            BlockReadError::Disk(ReadError::Corrupt { .. })
            | BlockReadError::Remote(ReadFailure::Corrupt) => return self.forget_damaged(read),
            BlockReadError::Disk(ReadError::Gone { .. })
            | BlockReadError::Remote(ReadFailure::Missing) => "gone",
            BlockReadError::Disk(other) => return other.reason_label(),
            BlockReadError::Remote(ReadFailure::TimedOut) => "timeout",
            BlockReadError::Remote(ReadFailure::Unavailable) => "remote",
            BlockReadError::Foreign => return self.refuse_damaged(read),
        };
        self.store.prefix_index().remove_unreadable(read);
        reason
    }

    /// A record that is whole and yet no block of this model.
    pub(super) fn refuse_damaged(&self, read: &BlockToRead) -> RefusalReason {
        if let (RecordPlace::Remote(place), Some(remote)) = (read.place, &self.cache.remote) {
            remote.tier.refuse_block(&object_of_place(self.scope, &read.digests, &place));
        }
        self.forget_damaged(read)
    }

    fn forget_damaged(&self, read: &BlockToRead) -> RefusalReason {
        let gone = self.store.prefix_index().remove_unreadable(read);
        let (position, is_remote) =
            (read.digests.position, matches!(read.place, RecordPlace::Remote(_)));
        tracing::warn!(position, gone, is_remote, "a record is damaged: its prefix is shorter now");
        if !is_remote {
            self.cache.remove_records(self.scope, std::slice::from_ref(&read.digests));
        }
        "corrupt"
    }

    /// The job that imports a record; none where the record is not one of this model's blocks.
    fn plan_import(&self, read: &BlockToRead, part: &RecordPart) -> Option<ImportJob> {
        let layers = 0..self.model.shape.geometry.layers;
        let tables = read_tables(part.table_bytes())?;
        let form = |layer| LayerForm::from_bytes(part.layer_form(layer)?);
        let forms = layers.clone().map(form).collect::<Option<Vec<_>>>()?;
        let block = BlockImages { shape: &self.model.shape, position: read.digests.position };
        let images = block.read_layers(part, &forms, &tables, layers)?;
        let images = forms.into_iter().zip(images);
        let images = images.map(|(form, image)| PlannedLayer { form, image }).collect();
        Some(ImportJob {
            model: Arc::clone(&self.model),
            store: Arc::clone(&self.store),
            read: read.clone(),
            images,
            layers: Vec::new(),
        })
    }
}

/// A block of a model, by whose shape records are read.
pub(super) struct BlockImages<'a> {
    pub(super) shape: &'a ModelShape,
    pub(super) position: u32,
}

impl BlockImages<'_> {
    /// Rows of the block that stay raw.
    fn count_sink(&self) -> u32 {
        let block_tokens = self.shape.geometry.block_tokens;
        let start = u64::from(self.position) * u64::from(block_tokens);
        u64::from(self.shape.sink).saturating_sub(start).min(block_tokens.into()) as u32
    }

    /// Whether a layer's form is that of such a block.
    pub(super) fn fits_form(&self, form: &LayerForm) -> bool {
        let (geometry, sink) = (&self.shape.geometry, self.count_sink());
        let rows_bytes = if sink == 0 { 0 } else { geometry.raw_layout(sink).size_bytes() };
        let pages = if sink == geometry.block_tokens { 0 } else { 2 * geometry.kv_heads };
        form.rows == sink && form.rows_bytes == rows_bytes && form.page_ends.len() == pages as usize
    }

    /// Reads layers out of a part that has them; none where they are no layers of such a block.
    pub(super) fn read_layers(
        &self,
        part: &RecordPart,
        forms: &[LayerForm],
        tables: &[LayerTable],
        layers: Range<u32>,
    ) -> Option<Vec<LayerImage>> {
        let tokens = self.shape.geometry.block_tokens - self.count_sink();
        let read = |layer: u32| {
            let form = forms.get(layer as usize).filter(|form| self.fits_form(form))?;
            let of_layer = tables.iter().filter(|of| of.layer == LayerIndex(layer));
            let of_layer = of_layer.map(|of| of.table.clone()).collect();
            let image = form.read_image(part.layer_bytes(layer)?, of_layer)?;
            // Their other fields are tested once their tables are known.
            has_tokens(&image, tokens).then_some(image)
        };
        layers.map(read).collect()
    }
}

/// Whether all pages of an image have so many rows.
fn has_tokens(image: &LayerImage, tokens: u32) -> bool {
    let starts = std::iter::once(&0).chain(&image.page_ends);
    starts.zip(&image.page_ends).all(|(start, end)| {
        let page = image.pages.get(*start as usize..*end as usize);
        let page = page.and_then(|bytes| Page::parse_page(bytes).ok());
        page.is_some_and(|page| u32::from(page.header().tokens) == tokens)
    })
}

/// A layer that is to be imported.
struct PlannedLayer {
    form: LayerForm,
    image: LayerImage,
}

/// Outcome of an import.
pub(crate) enum ImportResult {
    /// The block is in the pool.
    InPool,
    /// A table has no version left.
    TablesFull,
    /// The pool or the cache has no room, or what lies before it has gone.
    NoRoom,
}

/// The job that brings a block to the device, some layers at a time.
pub(crate) struct ImportJob {
    model: Arc<RegisteredModel>,
    store: Arc<SequenceStore>,
    read: BlockToRead,
    images: Vec<PlannedLayer>,
    /// Those that lie in the pool, which nobody reads yet.
    layers: Vec<StoredLayer>,
}

/// Takes slots for a layer of this form, which nobody may read before they are filled; none where
/// the pool or the namespace has no room.
pub(super) fn reserve_layer(
    pool: &Arc<ArenaPool>,
    namespace: &Namespace,
    form: &LayerForm,
) -> Option<StoredLayer> {
    let rows = (form.rows_bytes > 0).then(|| pool.reserve_rows_for(namespace, form.rows_bytes));
    let end = form.page_ends.last().copied().map(u64::from);
    let pages = end.map(|bytes| pool.reserve_pages_for(namespace, bytes));
    let (rows, pages) = (rows.transpose().ok()?, pages.transpose().ok()?);
    Some(StoredLayer {
        rows: rows.map(|slot| RawSlot::new(slot.seal_slot(), form.rows)),
        pages: pages.map(|slot| {
            PackedPages::new(slot.seal_slot(), form.page_ends.clone().into(), form.packed)
        }),
    })
}

impl DeviceWork for ImportJob {
    type Reply = ImportResult;

    fn job_kind(&self) -> JobKind {
        JobKind::Transfer
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<ImportResult>, ServiceError> {
        let mut slice = SliceUse::begin_slice();
        while self.layers.len() < self.images.len() {
            if slice.is_spent(stop) {
                return Ok(None);
            }
            let number = self.layers.len();
            let PlannedLayer { form, image } = &mut self.images[number];
            slice.bytes += form.layer_bytes();
            let (pool, namespace) = (self.store.pool(), &self.model.shape.namespace);
            // Nobody reads the slots before the block is in the index.
            let Some(layer) = reserve_layer(pool, namespace, form) else {
                return Ok(Some(ImportResult::NoRoom));
            };
            let slots = slots_of(&layer);
            debug_assert!(slots.rows.is_none_or(|rows: Extent| rows.len == form.rows_bytes));
            let index = LayerIndex(number as u32);
            let done = import_layer(backend, self.model.shape.id, index, image, &slots)?;
            if done == ImportOutcome::TablesFull {
                return Ok(Some(ImportResult::TablesFull));
            }
            // Its bytes lie on the device.
            *image = LayerImage::default();
            self.layers.push(layer);
        }
        // Placing pages has no answer of its own: what a failed device holds is never found.
        if let Some(reason) = backend.failure() {
            return Err(ServiceError::new(ErrorCode::DeviceFailed, reason));
        }
        let layers = std::mem::take(&mut self.layers);
        let brought = self.store.bring_read(&self.model.shape, &self.read, layers);
        Ok(Some(if brought { ImportResult::InPool } else { ImportResult::NoRoom }))
    }
}
