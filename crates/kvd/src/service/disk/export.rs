//! The way of a block to disk: exported by the device in slices, handed to the tier, noted once it
//! is durable.
//!
//! A publish takes blocks for writing, as many as the queue has room for; each stays in the pool
//! until its record is durable or given up. One task a device works them off, parents first.

use super::catalog::{name_of, place_of};
use super::image::{LayerForm, write_tables};
use super::{DiskCache, SliceUse};
use crate::device_worker::{DeviceWork, DeviceWorker};
use crate::scheduler::JobKind;
use crate::service::{CallContext, RegisteredModel, ServiceError};
use kvd_compute::{Backend, LayerImage, LayerSlots, PageSlots, Stop, export_layer};
use kvd_core::{ErrorCode, LayerIndex};
use kvd_store::{BlockToWrite, HeldChain, PrefixIndex, SequenceStore, StoredLayer};
use kvd_tier::{
    DiskLocation, LayerShape, RecordDraft, RecordMeta, RecordShape, ScopeId, WriteError,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

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

impl DiskCache {
    /// Has the blocks of a prefix written that are not on disk. Does not wait.
    pub(crate) fn queue_blocks(self: &Arc<Self>, source: &ExportSource<'_>, chain: &HeldChain) {
        if !self.config.writes {
            return;
        }
        let room = self.config.queue_bytes.saturating_sub(self.queued_bytes.load(Relaxed));
        let writes = source.store.plan_writes(chain, room);
        if writes.is_empty() {
            return;
        }
        let mut lines = self.exports.lock();
        let Some(line) = lines.get_mut(source.shard) else { return };
        for write in writes {
            let bytes = write.pool_bytes();
            self.queued_bytes.fetch_add(bytes, Relaxed);
            line.waiting.push_back(QueuedBlock {
                write,
                bytes,
                scope: source.scope,
                model: Arc::clone(source.model),
                worker: source.worker.clone(),
                index: Arc::clone(source.store.prefix_index()),
            });
        }
        if !std::mem::replace(&mut line.is_worked_off, true) {
            tokio::spawn(Arc::clone(self).work_off(source.shard));
        }
    }

    /// Exports what waits, until nothing does.
    async fn work_off(self: Arc<Self>, shard: usize) {
        loop {
            let next = {
                let mut lines = self.exports.lock();
                let Some(line) = lines.get_mut(shard) else { return };
                let next = line.waiting.pop_front();
                line.is_worked_off = next.is_some();
                next
            };
            let Some(block) = next else { return };
            self.write_block(block).await;
        }
    }

    async fn write_block(self: &Arc<Self>, block: QueuedBlock) {
        let QueuedBlock { write, bytes, scope, model, worker, index } = block;
        let job = ExportJob {
            layers: write.list_layers(),
            model: Arc::clone(&model),
            images: Vec::new(),
        };
        let call = CallContext {
            waits_for_queue: true,
            ..CallContext::new(model.shape.namespace.clone())
        };
        let exported = worker.ask_device(&call, job).await;
        let draft = exported.and_then(|exported| exported.into_draft(scope, &write));
        let draft = match draft {
            Ok(draft) => draft,
            Err(error) => {
                tracing::warn!(%error, "a block is not written to disk");
                return self.finish_write(&index, &write, bytes, Err(Some("DISK_ERROR")));
            }
        };
        let cache = Arc::clone(self);
        let of_callback = (index.clone(), write.clone());
        let on_durable = move |done: Result<DiskLocation, WriteError>| {
            let (index, write) = of_callback;
            let done = done.map_err(|error| match error {
                WriteError::Full => Some("DISK_FULL"),
                WriteError::Off | WriteError::Closed => Some("OFF"),
                // The reason is the ancestor's, and noted with it.
                WriteError::ParentLost => None,
                _ => Some("DISK_ERROR"),
            });
            cache.finish_write(&index, &write, bytes, done);
        };
        if let Err(refused) = self.tier.write_record(draft, Box::new(on_durable)) {
            let reason = match refused {
                kvd_tier::RefusedWrite::QueueFull { .. } => "QUEUE_FULL",
                kvd_tier::RefusedWrite::Off | kvd_tier::RefusedWrite::Closed => "OFF",
                _ => "DISK_ERROR",
            };
            self.finish_write(&index, &write, bytes, Err(Some(reason)));
        }
    }

    /// Notes the outcome of a write; a failure without a reason follows from an earlier one.
    fn finish_write(
        &self,
        index: &PrefixIndex,
        write: &BlockToWrite,
        bytes: u64,
        done: Result<DiskLocation, Option<&'static str>>,
    ) {
        if let Err(Some(reason)) = done {
            *self.last_failure.lock() = reason;
        }
        index.note_written(write, done.ok().as_ref().map(place_of));
        self.queued_bytes.fetch_sub(bytes, Relaxed);
        self.written.notify_waiters();
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
        let meta = RecordMeta { name: name_of(scope, &write.digests), key: Box::default() };
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
        _: &Stop,
    ) -> Result<Option<ExportedBlock>, ServiceError> {
        let mut slice = SliceUse::begin_slice();
        while let Some(layer) = self.layers.get(self.images.len()) {
            if slice.is_spent() {
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
