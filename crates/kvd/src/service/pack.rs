//! Packed blocks of a store: what came of each, told to the ticket, the metrics and the log.

use super::{RegisteredModel, ServiceError, plan};
use kvd_compute::{
    AppendOutcome, AppendPlan, AppendRows, AppendTask, Backend, BlockAnswer, EncodedPages, Stop,
};
use kvd_store::{ArenaPool, PackBatch, PackedPages, ReservedSlot};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Packs blocks whose rows are where they belong.
///
/// # Errors
/// Those of the device; nothing is packed then.
pub(super) fn pack_blocks(
    backend: &mut dyn Backend,
    pool: &Arc<ArenaPool>,
    model: &RegisteredModel,
    batch: &PackBatch<'_>,
) -> Result<Vec<Option<PackedPages>>, ServiceError> {
    if batch.tasks.is_empty() {
        return Ok(Vec::new());
    }
    let plan = plan::plan_packing(model, batch, AppendRows::None);
    AppendUnderWay::new(plan).finish_append(backend, PackSite { pool, model, batch })
}

/// The target of an append: where its pages go, its model and its blocks.
#[derive(Clone, Copy)]
pub(super) struct PackSite<'a> {
    pub(super) pool: &'a Arc<ArenaPool>,
    pub(super) model: &'a RegisteredModel,
    pub(super) batch: &'a PackBatch<'a>,
}

/// A plan that the device carries out, and the slots of blocks that it has packed. Dropped before
/// its end it gives them back.
pub(super) struct AppendUnderWay {
    task: AppendTask,
    slots: Vec<ReservedSlot>,
}

impl AppendUnderWay {
    pub(super) fn new(plan: AppendPlan) -> Self {
        Self { task: AppendTask::new(plan), slots: Vec::new() }
    }

    /// Goes on until all is written and packed or, `None`, the slice is over.
    ///
    /// # Errors
    /// Those of the device; nothing is packed then.
    pub(super) fn go_on(
        &mut self,
        backend: &mut dyn Backend,
        site: PackSite<'_>,
        stop: &Stop,
    ) -> Result<Option<Vec<Option<PackedPages>>>, ServiceError> {
        let PackSite { pool, model, batch } = site;
        let Self { task, slots } = self;
        let mut reserve = |bytes| {
            let slot = pool.reserve_pages_for(&model.shape.namespace, bytes).ok()?;
            let extent = slot.extent();
            slots.push(slot);
            Some(extent)
        };
        let appended = backend.append_slice(task, &mut reserve, stop);
        let appended = appended.inspect_err(|_| plan::give_back_queries(model, task.plan()))?;
        let settle = |appended| settle_blocks(model, batch, std::mem::take(slots), appended);
        Ok(appended.map(settle))
    }

    /// Goes on to the end.
    ///
    /// # Errors
    /// As [`AppendUnderWay::go_on`].
    pub(super) fn finish_append(
        mut self,
        backend: &mut dyn Backend,
        site: PackSite<'_>,
    ) -> Result<Vec<Option<PackedPages>>, ServiceError> {
        loop {
            if let Some(packed) = self.go_on(backend, site, &Stop::never())? {
                return Ok(packed);
            }
        }
    }
}

/// Takes note of what came of a batch's blocks; the answers are for its ticket. `slots` are
/// those of packed blocks, in order.
fn settle_blocks(
    model: &RegisteredModel,
    batch: &PackBatch<'_>,
    slots: Vec<ReservedSlot>,
    appended: AppendOutcome,
) -> Vec<Option<PackedPages>> {
    let (sequence, layer) = (batch.sequence.0, batch.layer.0);
    if let Some(error) = &appended.query_error {
        tracing::warn!(layer, %error, "pages are measured without recent queries");
    }
    if let Some(error) = &appended.encode_error {
        tracing::warn!(sequence, layer, %error, "blocks stay raw");
    }
    let mut slots = slots.into_iter();
    let mut packed = Vec::with_capacity(appended.blocks.len());
    for (index, answer) in appended.blocks.into_iter().enumerate() {
        packed.push(match answer {
            BlockAnswer::Packed(pages) => {
                count_pages(model, &pages);
                slots.next().map(|slot| seal_pages(slot, &pages))
            }
            BlockAnswer::Refused(error) => {
                let block = batch.tasks[index].block;
                tracing::warn!(sequence, layer, block, %error, "a block stays raw for good");
                batch.give_up(index);
                None
            }
        });
    }
    count_deferred(model, batch, &packed);
    if let Some(time) = appended.packing_time {
        model.metrics.encode.record_job(time);
    }
    if let Some(once) = appended.model_bytes {
        model.table_bytes.store(once.tables, Ordering::Relaxed);
        model.table_versions.store(once.table_versions, Ordering::Relaxed);
    }
    packed
}

/// Counts blocks that are raw and were not offered before.
fn count_deferred(model: &RegisteredModel, batch: &PackBatch<'_>, packed: &[Option<PackedPages>]) {
    // Rows that are kept as they came lose nothing by waiting: no alert is to tell of them.
    if !model.saves_memory() {
        return;
    }
    // Those after the first without room were not tried, or found none either.
    let answers = packed.iter().map(Option::is_some).chain(std::iter::repeat(false));
    let tasks = batch.tasks.iter().zip(answers);
    let deferred = tasks.filter(|(task, is_packed)| !task.retried && !is_packed).count() as u64;
    model.metrics.pack_deferred.increment(deferred);
    model.deferred_blocks.fetch_add(deferred, Ordering::Relaxed);
}

fn count_pages(model: &RegisteredModel, pages: &EncodedPages) {
    let metrics = &model.metrics;
    metrics.encoded_layer_blocks.increment(1);
    metrics.fallback_pages.increment(u64::from(pages.fallback_pages));
    model.fallback_pages.fetch_add(u64::from(pages.fallback_pages), Ordering::Relaxed);
    let value_bytes = model.shape.geometry.dtype.size_bytes() as u64;
    metrics.encoded_logical_bytes.increment(pages.packed.values * value_bytes);
    metrics.encoded_page_bytes.increment(pages.size_bytes());
    for (side, pages) in pages.over_bound().into_iter().enumerate() {
        metrics.over_bound_pages[side].increment(u64::from(pages));
        model.over_bound_pages[side].fetch_add(u64::from(pages), Ordering::Relaxed);
    }
    if let Some(checked) = &pages.sampled {
        metrics.sampled_blocks.increment(1);
        model.sampled.lock().add_block(checked);
    }
}

/// Pages that can be read from now on.
fn seal_pages(slot: ReservedSlot, pages: &EncodedPages) -> PackedPages {
    PackedPages::new(slot.seal_slot(), pages.page_ends.clone(), pages.packed)
}
