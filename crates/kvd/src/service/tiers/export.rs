//! The way of a block to disk and to the store that daemons share: exported by the device in
//! slices, handed to the tier, noted once it is there.
//!
//! A publish takes blocks for writing, as many as the queue has room for; each stays in the pool
//! until its record is durable or given up. One task a device works them off, parents first. What
//! is durable goes on to the shared store, if there is one; without a disk, the store is where
//! blocks are written, and an answer of it is their place.

use super::catalog::{name_of, place_of};
use super::image::{LayerForm, write_tables};
use super::remote::place_of_object;
use super::{CacheTiers, SliceUse};
use crate::device_worker::{DeviceWork, DeviceWorker};
use crate::scheduler::JobKind;
use crate::service::{CallContext, RegisteredModel, ServiceError};
use kvd_compute::{Backend, LayerImage, LayerSlots, PageSlots, Stop, export_layer};
use kvd_core::{ErrorCode, LayerIndex};
use kvd_remote::{RemoteTier, name_object};
use kvd_store::{
    BlockToWrite, HeldChain, KeyChain, PrefixIndex, RecordPlace, SequenceStore, StoredLayer,
    WriteTarget,
};
use kvd_tier::{
    DiskLocation, DiskTier, LayerShape, ObjectName, RecordDraft, RecordMeta, RecordShape,
    RefusedWrite, ScopeId, WriteError,
};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// Blocks of one device that wait to be exported.
#[derive(Default)]
pub(super) struct ExportLine {
    waiting: VecDeque<QueuedBlock>,
    is_worked_off: bool,
}

/// A block that is to be written.
struct QueuedBlock {
    write: BlockToWrite,
    bytes: u64,
    scope: ScopeId,
    model: Arc<RegisteredModel>,
    worker: DeviceWorker,
    index: Arc<PrefixIndex>,
    /// Its object's name and its key, where the shared store is to have it.
    object: Option<ObjectKey>,
}

/// The name of an object, and the key that it is made of.
struct ObjectKey {
    name: ObjectName,
    key: Box<[u8]>,
}

/// Keys of a publish.
#[derive(Clone, Copy)]
pub(crate) struct PublishedKeys<'a> {
    /// Position of the first block that they name.
    pub(crate) first: u32,
    pub(crate) chain: &'a KeyChain<'a>,
    /// Tokens of the whole prefix.
    pub(crate) prefix_tokens: u32,
}

impl PublishedKeys<'_> {
    fn name_block(&self, scope: ScopeId, position: u32) -> Option<ObjectKey> {
        let block = position.checked_sub(self.first)? as usize;
        let key = self.chain.find_key(block)?;
        let parent = block.checked_sub(1).and_then(|block| self.chain.find_key(block));
        Some(ObjectKey { name: name_object(scope, position, key, parent), key: key.into() })
    }
}

/// Whose blocks these are, and by whom they are exported.
pub(crate) struct ExportSource<'a> {
    pub(crate) scope: ScopeId,
    pub(crate) model: &'a Arc<RegisteredModel>,
    pub(crate) worker: &'a DeviceWorker,
    pub(crate) store: &'a SequenceStore,
    /// Index of the device.
    pub(crate) shard: usize,
}

impl CacheTiers {
    /// Has the blocks of a prefix written that are not where they are to be. Does not wait.
    pub(crate) fn queue_blocks(
        self: &Arc<Self>,
        source: &ExportSource<'_>,
        chain: &HeldChain,
        keys: PublishedKeys<'_>,
    ) {
        let remote = self.remote.as_ref().map(|remote| &remote.config);
        let is_shared = remote
            .is_some_and(|remote| remote.writes && keys.prefix_tokens >= remote.min_prefix_tokens);
        let target = match (self.writes_to_disk(), is_shared) {
            (true, _) => WriteTarget::Disk,
            (false, true) => WriteTarget::Remote,
            (false, false) => return,
        };
        let room = self.queue_limit().saturating_sub(self.queued_bytes.load(Relaxed));
        let writes = source.store.plan_writes(chain, target, room);
        if writes.is_empty() {
            return;
        }
        let mut lines = self.exports.lock();
        let Some(line) = lines.get_mut(source.shard) else { return };
        for write in writes {
            let bytes = write.pool_bytes();
            self.queued_bytes.fetch_add(bytes, Relaxed);
            let is_new = is_shared && write.remote.is_none();
            let object = is_new.then(|| keys.name_block(source.scope, write.digests.position));
            line.waiting.push_back(QueuedBlock {
                write,
                bytes,
                scope: source.scope,
                model: Arc::clone(source.model),
                worker: source.worker.clone(),
                index: Arc::clone(source.store.prefix_index()),
                object: object.flatten(),
            });
        }
        if !std::mem::replace(&mut line.is_worked_off, true) {
            tokio::spawn(Arc::clone(self).work_off(source.shard));
        }
    }

    /// Exports what waits, until nothing does: a block while the record of the one before it is
    /// made, which is queued first.
    async fn work_off(self: Arc<Self>, shard: usize) {
        let mut before: Option<JoinHandle<()>> = None;
        loop {
            let next = {
                let mut lines = self.exports.lock();
                let Some(line) = lines.get_mut(shard) else { return };
                let next = line.waiting.pop_front();
                // Until the last is queued nobody else begins.
                line.is_worked_off = next.is_some() || before.is_some();
                next
            };
            let exported = match next {
                Some(block) => self.export_block(block).await,
                None if before.is_none() => return,
                None => None,
            };
            if let Some(before) = before.take() {
                // A panic in it is on stderr; its block's end was dropped with it.
                drop(before.await);
            }
            before = exported.map(|exported| tokio::task::spawn_blocking(|| exported.write_down()));
        }
    }

    /// Copies a block out of the device; none where it is not to be written or does not leave it.
    async fn export_block(self: &Arc<Self>, block: QueuedBlock) -> Option<RecordToWrite> {
        let QueuedBlock { write, bytes, scope, model, worker, index, object } = block;
        let end = WriteEnd { cache: Arc::clone(self), index, write, bytes };
        if object.is_none() && !self.writes_to_disk() {
            // Its key came with another publish: it stays in the pool alone.
            end.note_outcome(Err(None));
            return None;
        }
        let job = ExportJob {
            layers: end.write.list_layers(),
            model: Arc::clone(&model),
            images: Vec::new(),
        };
        let call = CallContext {
            waits_for_queue: true,
            ..CallContext::new(model.shape.namespace.clone())
        };
        match worker.ask_device(&call, job).await {
            Ok(block) => Some(RecordToWrite { block, scope, object, end }),
            Err(error) => {
                end.note_failure(&error);
                None
            }
        }
    }
}

/// A block outside the device, and what its record needs.
struct RecordToWrite {
    block: ExportedBlock,
    scope: ScopeId,
    object: Option<ObjectKey>,
    end: WriteEnd,
}

impl RecordToWrite {
    /// Makes the record and hands it to the tiers. Hashes and copies megabytes: not for a thread
    /// that serves calls.
    fn write_down(self) {
        let Self { block, scope, object, end } = self;
        let draft = match block.into_draft(scope, &end.write) {
            Ok(draft) => draft,
            Err(error) => return end.note_failure(&error),
        };
        let cache = Arc::clone(&end.cache);
        let upload = object.zip(cache.remote.as_ref()).map(|(ObjectKey { name, key }, remote)| {
            let bytes = remote.tier.make_object(&draft, &name, &key);
            ObjectUpload { tier: remote.tier.clone(), name, bytes }
        });
        match (&cache.disk, upload) {
            (Some(disk), upload) if cache.writes_to_disk() => {
                write_to_disk(disk, draft, end, upload);
            }
            (_, Some(upload)) => upload.queue_alone(end),
            (_, None) => end.note_outcome(Err(None)),
        }
    }
}

/// Who is told what came of a block's write.
struct WriteEnd {
    cache: Arc<CacheTiers>,
    index: Arc<PrefixIndex>,
    write: BlockToWrite,
    bytes: u64,
}

impl WriteEnd {
    /// Notes that a block's record could not be made.
    fn note_failure(self, error: &ServiceError) {
        tracing::warn!(%error, "a block is not written");
        self.note_outcome(Err(Some("DISK_ERROR")));
    }

    /// Notes the outcome; a failure without a reason follows from an earlier one.
    fn note_outcome(self, done: Result<RecordPlace, Option<&'static str>>) {
        let Self { cache, index, write, bytes } = self;
        if let Err(Some(reason)) = done {
            *cache.last_failure.lock() = reason;
        }
        index.note_written(&write, done.ok());
        cache.queued_bytes.fetch_sub(bytes, Relaxed);
        cache.written.notify_waiters();
    }
}

/// An object for the shared store.
struct ObjectUpload {
    tier: RemoteTier,
    name: ObjectName,
    bytes: bytes::Bytes,
}

impl ObjectUpload {
    /// Queues it behind a record that is durable. The tier counts what it drops.
    fn queue_behind(self) {
        let Self { tier, name, bytes } = self;
        if let Err(refused) = tier.queue_object(name, bytes, Box::new(|_| ())) {
            tracing::debug!(%refused, "a block does not reach the shared store");
        }
    }

    /// Queues it as the block's only place below the pool.
    fn queue_alone(self, end: WriteEnd) {
        let Self { tier, name, bytes } = self;
        let end = Arc::new(Mutex::new(Some(end)));
        let of_callback = Arc::clone(&end);
        let place = RecordPlace::Remote(place_of_object(&name));
        let on_uploaded = move |written: bool| {
            let end = of_callback.lock().take();
            end.into_iter().for_each(|end| end.note_outcome(written.then_some(place).ok_or(None)));
        };
        if tier.queue_object(name, bytes, Box::new(on_uploaded)).is_err() {
            let end = end.lock().take();
            end.into_iter().for_each(|end| end.note_outcome(Err(None)));
        }
    }
}

/// Hands a record to the disk; once it is durable it goes on to the shared store.
fn write_to_disk(disk: &DiskTier, draft: RecordDraft, end: WriteEnd, upload: Option<ObjectUpload>) {
    let end = Arc::new(Mutex::new(Some(end)));
    let (of_callback, runtime) = (Arc::clone(&end), Handle::current());
    let on_durable = move |done: Result<DiskLocation, WriteError>| {
        let place = done.as_ref().map(|location| RecordPlace::Disk(place_of(location)));
        let outcome = place.map_err(|error| match error {
            WriteError::Full => Some("DISK_FULL"),
            WriteError::Off | WriteError::Closed => Some("OFF"),
            // The reason is the ancestor's, and noted with it.
            WriteError::ParentLost => None,
            _ => Some("DISK_ERROR"),
        });
        if outcome.is_ok() {
            // The tier's writer is no thread of the runtime.
            let _entered = runtime.enter();
            upload.into_iter().for_each(ObjectUpload::queue_behind);
        }
        let end = of_callback.lock().take();
        end.into_iter().for_each(|end| end.note_outcome(outcome));
    };
    if let Err(refused) = disk.write_record(draft, Box::new(on_durable)) {
        let reason = match refused {
            RefusedWrite::QueueFull { .. } => "QUEUE_FULL",
            RefusedWrite::Off | RefusedWrite::Closed => "OFF",
            _ => "DISK_ERROR",
        };
        let end = end.lock().take();
        end.into_iter().for_each(|end| end.note_outcome(Err(Some(reason))));
    }
}

/// A block outside the device.
pub(crate) struct ExportedBlock {
    layers: Vec<StoredLayer>,
    images: Vec<LayerImage>,
}

impl ExportedBlock {
    fn into_draft(self, scope: ScopeId, write: &BlockToWrite) -> Result<RecordDraft, ServiceError> {
        let form = |(layer, image): (&StoredLayer, &LayerImage)| {
            let rows = layer.rows.as_ref().map_or(0, |rows| rows.rows());
            let packed = layer.pages.as_ref().map(|pages| *pages.accounting());
            LayerForm::of_image(image, rows, packed.unwrap_or_default())
        };
        let forms: Vec<_> = self.layers.iter().zip(&self.images).map(form).collect();
        let shape =
            |form: &LayerForm| LayerShape { form: form.to_bytes(), bytes: form.layer_bytes() };
        let key = write.key.as_deref().map_or_else(Box::default, Box::from);
        let meta = RecordMeta { name: name_of(scope, &write.digests), key };
        let tables = write_tables(&self.images);
        let shape = RecordShape { meta, tables, layers: forms.iter().map(shape).collect() };
        let mut draft = RecordDraft::new(&shape)
            .map_err(|error| ServiceError::new(ErrorCode::LimitExceeded, error.to_string()))?;
        for (index, (form, image)) in forms.iter().zip(&self.images).enumerate() {
            let layer = draft.layer_mut(index);
            layer.into_iter().for_each(|to| form.write_image(image, to));
        }
        Ok(draft)
    }
}

/// The job that copies a block out of the device, some layers at a time.
pub(crate) struct ExportJob {
    layers: Vec<StoredLayer>,
    model: Arc<RegisteredModel>,
    images: Vec<LayerImage>,
}

pub(super) fn slots_of(layer: &StoredLayer) -> LayerSlots {
    let pages = layer
        .pages
        .as_ref()
        .map(|pages| PageSlots { extent: pages.extent(), ends: Arc::clone(pages.ends()) });
    LayerSlots { rows: layer.rows.as_ref().map(|rows| rows.extent()), pages }
}

impl DeviceWork for ExportJob {
    type Reply = ExportedBlock;

    fn job_kind(&self) -> JobKind {
        JobKind::Transfer
    }

    fn run_slice(
        &mut self,
        backend: &mut dyn Backend,
        stop: &Stop,
    ) -> Result<Option<ExportedBlock>, ServiceError> {
        let mut slice = SliceUse::begin_slice();
        while let Some(layer) = self.layers.get(self.images.len()) {
            if slice.is_spent(stop) {
                return Ok(None);
            }
            let index = LayerIndex(self.images.len() as u32);
            let image = export_layer(backend, self.model.shape.id, index, &slots_of(layer))?;
            slice.bytes += image.rows.len() + image.pages.len();
            self.images.push(image);
        }
        let (layers, images) = (std::mem::take(&mut self.layers), std::mem::take(&mut self.images));
        Ok(Some(ExportedBlock { layers, images }))
    }
}
