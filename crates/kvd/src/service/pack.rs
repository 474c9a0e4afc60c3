//! Packed blocks of a store: what came of each, told to the ticket, the metrics and the log.

use super::RegisteredModel;
use kvd_compute::{AppendOutcome, BlockAnswer, EncodedPages};
use kvd_store::{AppendTicket, PackedPages, ReservedSlot};
use std::sync::atomic::Ordering;

/// Takes note of what came of the ticket's blocks; the answers are for its commit. `slots` are
/// those of packed blocks, in order.
pub(super) fn settle_blocks(
    model: &RegisteredModel,
    ticket: &AppendTicket,
    slots: Vec<ReservedSlot>,
    appended: AppendOutcome,
) -> Vec<Option<PackedPages>> {
    let (sequence, layer) = (ticket.sequence().0, ticket.layer().0);
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
                let block = ticket.pack_tasks()[index].block;
                tracing::warn!(sequence, layer, block, %error, "a block stays raw for good");
                ticket.give_up(index);
                None
            }
        });
    }
    count_deferred(model, ticket, &packed);
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
fn count_deferred(model: &RegisteredModel, ticket: &AppendTicket, packed: &[Option<PackedPages>]) {
    // Rows that are kept as they came lose nothing by waiting: no alert is to tell of them.
    if !model.saves_memory() {
        return;
    }
    // Those after the first without room were not tried, or found none either.
    let answers = packed.iter().map(Option::is_some).chain(std::iter::repeat(false));
    let tasks = ticket.pack_tasks().iter().zip(answers);
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
