//! From the store's words to the backend's: parts to sources, slots to targets.

use kvd_compute::{EncodeSource, PlanPart, RawTarget, Source, StagedWrite};
use kvd_store::{PackTask, PinnedRange, PinnedRows, RawSlot, RowExtentRef, RowFormRef, RowWrite};

/// Where some rows lie.
pub(super) fn source(extent: &RowExtentRef<'_>) -> Source {
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
pub(super) fn list_parts(pinned: &PinnedRange) -> Vec<PlanPart> {
    let part = |PinnedRows { first_token, extent }: PinnedRows<'_>| PlanPart {
        first_token,
        rows: extent.rows.end - extent.rows.start,
        source: source(&extent),
    };
    pinned.find_rows().map(part).collect()
}

/// Rows of a raw slot to write.
pub(super) fn raw_target(slot: &RawSlot, first_row: u32) -> RawTarget {
    RawTarget { extent: slot.extent(), capacity_rows: slot.rows(), first_row }
}

/// Rows of a request that the device has staged, and where they go.
pub(super) fn staged_write(write: &RowWrite) -> StagedWrite {
    let to = raw_target(&write.to, write.to_row);
    StagedWrite { source_row: write.source_row, rows: write.rows, to }
}

/// The rows of a block that become pages.
pub(super) fn encode_source(task: &PackTask) -> EncodeSource {
    EncodeSource {
        extent: task.from.extent(),
        capacity_rows: task.from.rows(),
        first_row: task.rows.start,
        rows: task.rows.end - task.rows.start,
    }
}
