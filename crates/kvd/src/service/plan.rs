//! From the store's words to the backend's: parts to sources, slots to targets.

use super::RegisteredModel;
use kvd_compute::{
    AppendPlan, AppendRows, EncodeSource, PlanPart, PlannedBlock, PlannedCopy, PlannedWrite,
    RawTarget, Source,
};
use kvd_store::{
    AppendTicket, PackBatch, PackTask, PinnedRange, PinnedRows, RawSlot, RowCopy, RowExtentRef,
    RowFormRef, RowWrite,
};

/// The plan of a ticket, for rows of that model.
pub(super) fn plan_append(
    model: &RegisteredModel,
    ticket: &AppendTicket,
    rows: AppendRows,
) -> AppendPlan {
    AppendPlan {
        copies: ticket.row_copies().iter().map(plan_copy).collect(),
        writes: ticket.row_writes().iter().map(plan_write).collect(),
        ..plan_packing(model, &ticket.pack_batch(), rows)
    }
}

/// Takes what brings rows to their slots out of a plan; what packs blocks stays.
pub(super) fn take_writes(plan: &mut AppendPlan) -> AppendPlan {
    AppendPlan {
        model: plan.model,
        layer: plan.layer,
        rows: std::mem::replace(&mut plan.rows, AppendRows::None),
        copies: std::mem::take(&mut plan.copies),
        writes: std::mem::take(&mut plan.writes),
        blocks: Vec::new(),
        block_bytes: plan.block_bytes,
        queries: None,
    }
}

/// The device's work for a batch of blocks, beside `rows` that are not written anywhere yet.
pub(super) fn plan_packing(
    model: &RegisteredModel,
    batch: &PackBatch<'_>,
    rows: AppendRows,
) -> AppendPlan {
    let (layer, geometry) = (batch.layer, &model.shape.geometry);
    // Only blocks that are packed are measured.
    let recent = model.recent_queries.as_ref().filter(|_| !batch.tasks.is_empty());
    AppendPlan {
        model: model.shape.id,
        layer,
        rows,
        copies: Vec::new(),
        writes: Vec::new(),
        blocks: batch.tasks.iter().map(plan_block).collect(),
        block_bytes: u64::from(geometry.block_tokens) * geometry.token_bytes(),
        queries: recent.and_then(|recent| recent.take_changed(layer)),
    }
}

/// Keeps the queries of a plan that failed for the next one.
pub(super) fn give_back_queries(model: &RegisteredModel, plan: &AppendPlan) {
    if let (Some(_), Some(recent)) = (&plan.queries, &model.recent_queries) {
        recent.give_back(plan.layer);
    }
}

/// Where some rows lie.
fn source(extent: &RowExtentRef<'_>) -> Source {
    let first_row = extent.rows.start - extent.origin;
    match extent.form {
        RowFormRef::Raw(slot) => {
            Source::Raw { extent: slot.extent(), capacity_rows: slot.rows(), first_row }
        }
        RowFormRef::Pages(pages) => {
            Source::Pages { extent: pages.extent(), ends: pages.ends().clone(), first_row }
        }
    }
}

/// The parts of a pinned range. The caller keeps `pinned` until the backend has answered.
pub(super) fn each_part(pinned: &PinnedRange) -> impl Iterator<Item = PlanPart> {
    let part = |PinnedRows { first_token, extent }: PinnedRows<'_>| PlanPart {
        first_token,
        rows: extent.rows.end - extent.rows.start,
        source: source(&extent),
    };
    pinned.find_rows().map(part)
}

fn raw_target(slot: &RawSlot, first_row: u32) -> RawTarget {
    RawTarget { extent: slot.extent(), capacity_rows: slot.rows(), first_row }
}

fn plan_copy(copy: &RowCopy) -> PlannedCopy {
    PlannedCopy {
        from: source(&copy.from.borrow()),
        rows: copy.from.rows.end - copy.from.rows.start,
        to: raw_target(&copy.to, copy.to_row),
    }
}

fn plan_write(write: &RowWrite) -> PlannedWrite {
    let to = raw_target(&write.to, write.to_row);
    PlannedWrite { source_row: write.source_row, rows: write.rows, to }
}

fn plan_block(task: &PackTask) -> PlannedBlock {
    let source = EncodeSource {
        extent: task.from.extent(),
        capacity_rows: task.from.rows(),
        first_row: task.rows.start,
        rows: task.rows.end - task.rows.start,
    };
    PlannedBlock { source, keep: task.keep.as_ref().map(plan_copy), retried: task.retried }
}
