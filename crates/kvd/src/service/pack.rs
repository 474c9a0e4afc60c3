//! Packing: the worker's part of a store that turns blocks which leave the window into pages.

use super::{RegisteredModel, ServiceError, plan};
use kvd_compute::{Backend, EncodedPages};
use kvd_core::{Geometry, Side};
use kvd_store::{ArenaPool, PackBatch, PackTask, PackedBytes, PackedPages};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Rows in the stored precision that are encoded at once: enough for many cores, and a bound on
/// what lies beside the pool meanwhile.
const ENCODE_BATCH_BYTES: u64 = 64 << 20;

/// Packs the blocks of a store or a publish.
pub(super) struct BlockPacker<'a> {
    pub(super) backend: &'a mut dyn Backend,
    pub(super) pool: &'a Arc<ArenaPool>,
    pub(super) model: &'a RegisteredModel,
    pub(super) batch: PackBatch<'a>,
}

impl BlockPacker<'_> {
    /// Encodes the blocks that leave the window. A block that finds no room stays raw and is
    /// offered again by the next append: giving up the append would not free anything. One that
    /// cannot be encoded stays raw for good.
    pub(super) fn pack_blocks(&mut self) -> Result<Vec<Option<PackedPages>>, ServiceError> {
        let tasks = self.batch.tasks;
        if tasks.is_empty() {
            return Ok(Vec::new());
        }
        let began = Instant::now();
        let layer = self.batch.layer;
        let recent = self.model.recent_queries.as_ref();
        if let Some(queries) = recent.and_then(|recent| recent.take_changed(layer)) {
            // They only measure: a store does not fail for want of them.
            if let Err(error) = self.backend.set_queries(self.model.shape.id, layer, &queries) {
                let layer = layer.0;
                tracing::warn!(layer, %error, "pages are measured without recent queries");
            }
        }
        let batch_max = batch_blocks_of(&self.model.shape.geometry);
        // Where the pool was full, one block finds out at little cost whether it still is.
        let mut batch = if tasks.iter().any(|task| task.retried) { 1 } else { batch_max };
        let mut packed = Vec::with_capacity(tasks.len());
        while packed.len() < tasks.len() && self.encode_batch(batch, &mut packed)? {
            batch = batch.saturating_mul(2).min(batch_max);
        }
        // Those after the first without room were not tried, or found none either.
        let news = |(task, pages): &(&PackTask, Option<&Option<PackedPages>>)| {
            !task.retried && pages.is_none_or(Option::is_none)
        };
        let answers = (0..tasks.len()).map(|index| packed.get(index));
        let deferred = tasks.iter().zip(answers).filter(news).count();
        let model = self.model;
        // Rows that are kept as they came lose nothing by waiting: no alert is to tell of them.
        if model.saves_memory() {
            model.metrics.pack_deferred.increment(deferred as u64);
            model.deferred_blocks.fetch_add(deferred as u64, Ordering::Relaxed);
        }
        model.metrics.encode.record_job(began.elapsed());
        if let Ok(once) = self.backend.model_bytes(model.shape.id) {
            model.table_bytes.store(once.tables, Ordering::Relaxed);
            model.table_versions.store(once.table_versions, Ordering::Relaxed);
        }
        Ok(packed)
    }

    /// Encodes the next tasks, `count` at most, and adds their answers to `packed`. False when
    /// the rest need not be tried.
    fn encode_batch(
        &mut self,
        count: usize,
        packed: &mut Vec<Option<PackedPages>>,
    ) -> Result<bool, ServiceError> {
        let (id, layer, first) = (self.model.shape.id, self.batch.layer, packed.len());
        let tasks = &self.batch.tasks[first..];
        let tasks = &tasks[..tasks.len().min(count)];
        for keep in tasks.iter().filter_map(|task| task.keep.as_ref()) {
            let count = keep.from.rows.end - keep.from.rows.start;
            let (from, to) =
                (plan::source(&keep.from.borrow()), plan::raw_target(&keep.to, keep.to_row));
            self.backend.copy(id, layer, &from, count, to)?;
        }
        let sources: Vec<_> = tasks.iter().map(plan::encode_source).collect();
        let (sequence, of_layer) = (self.batch.sequence.0, layer.0);
        let encoded = match self.backend.encode(id, layer, &sources) {
            Ok(encoded) => encoded,
            Err(error) => {
                tracing::warn!(sequence, layer = of_layer, %error, "blocks stay raw");
                return Ok(false);
            }
        };
        for (offset, encoded) in encoded.iter().enumerate() {
            match encoded {
                Ok(pages) => match self.place_pages(pages) {
                    Some(pages) => packed.push(Some(pages)),
                    // A pool without room for one block has none for the rest.
                    None => return Ok(false),
                },
                Err(error) => {
                    let block = tasks[offset].block;
                    let layer = of_layer;
                    tracing::warn!(sequence, layer, block, %error, "a block stays raw for good");
                    self.batch.give_up(first + offset);
                    packed.push(None);
                }
            }
        }
        Ok(true)
    }

    fn place_pages(&mut self, pages: &EncodedPages) -> Option<PackedPages> {
        let (model, metrics) = (self.model, &self.model.metrics);
        let reserved =
            self.pool.reserve_pages_for(&model.shape.namespace, pages.size_bytes()).ok()?;
        self.backend.place(pages, reserved.extent());
        metrics.encoded_layer_blocks.increment(1);
        metrics.fallback_pages.increment(u64::from(pages.fallback_pages));
        model.fallback_pages.fetch_add(u64::from(pages.fallback_pages), Ordering::Relaxed);
        let value_bytes = model.shape.geometry.dtype.size_bytes() as u64;
        metrics.encoded_logical_bytes.increment(pages.values * value_bytes);
        metrics.encoded_page_bytes.increment(pages.size_bytes());
        for (side, pages) in pages.over_bound().into_iter().enumerate() {
            metrics.over_bound_pages[side].increment(u64::from(pages));
            model.over_bound_pages[side].fetch_add(u64::from(pages), Ordering::Relaxed);
        }
        if let Some(checked) = &pages.sampled {
            metrics.sampled_blocks.increment(1);
            model.sampled.lock().add_block(checked);
        }
        let accounting = PackedBytes {
            codes: pages.parts.codes,
            scales: pages.parts.scales,
            offsets: pages.parts.offsets,
            header: pages.parts.header,
            key: pages.side_bytes[Side::Key.index()],
            value: pages.side_bytes[Side::Value.index()],
            values: pages.values,
        };
        Some(PackedPages::new(reserved.seal_slot(), pages.page_ends.clone(), accounting))
    }
}

/// Blocks of that shape that make up one batch; one at least.
pub(super) fn batch_blocks_of(geometry: &Geometry) -> usize {
    let block_bytes = u64::from(geometry.block_tokens) * geometry.token_bytes();
    usize::try_from(ENCODE_BATCH_BYTES / block_bytes).unwrap_or(usize::MAX).max(1)
}
