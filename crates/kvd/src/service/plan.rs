//! From the store's words to the backend's: parts to sources, slots to targets.

use kvd_compute::{EncodeSource, PlanPart, RawTarget, Source, StagedWrite};
use kvd_store::{PackTask, Part, PartKind, Pinned, RawSlot, RowWrite};

/// Where a part lies.
pub(super) fn source(part: &Part) -> Source {
    let first_row = part.rows.start - part.origin;
    match &part.kind {
        PartKind::Raw(slot) => {
            Source::Raw { extent: slot.extent(), capacity_rows: slot.rows(), first_row }
        }
        PartKind::Pages(pages) => {
            Source::Pages { extent: pages.extent(), ends: pages.ends().clone(), first_row }
        }
    }
}

/// The parts of a pinned range. The caller keeps `pinned` until the backend has answered.
pub(super) fn parts(pinned: &Pinned) -> Vec<PlanPart> {
    let part = |pinned: &kvd_store::PinnedPart| PlanPart {
        first_token: pinned.first_token,
        rows: pinned.part.rows.end - pinned.part.rows.start,
        source: source(&pinned.part),
    };
    pinned.parts.iter().map(part).collect()
}

/// Rows of a raw slot to write.
pub(super) fn target(slot: &RawSlot, first_row: u32) -> RawTarget {
    RawTarget { extent: slot.extent(), capacity_rows: slot.rows(), first_row }
}

/// Rows of a request that the device has staged, and where they go.
pub(super) fn staged_write(write: &RowWrite) -> StagedWrite {
    let to = target(&write.to, write.to_row);
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
