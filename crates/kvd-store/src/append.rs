//! An append in flight: what the device worker must do, and how it becomes visible.
//!
//! Owns [`AppendTicket`]. What it does is planned in `append_plan` and published here under the
//! layer's mutex; in between no lock is held. Until [`AppendTicket::commit`] nothing of it can be
//! seen, and dropping the ticket gives back every byte and the right to append (no lock but the
//! pool's).

use crate::append_plan::{AppendDraft, AppendPlan};
use crate::layer::RememberedRange;
use crate::layer_block::{LayerBlock, PackedBlock, PackedPages, RawSlot, RowExtent};
use crate::ledger::{ModelLedger, SlotAccount};
use crate::pool::{ArenaPool, ReserveError};
use crate::sequence::LayerClaim;
use crate::shape::ModelShape;
use kvd_core::{LayerIndex, SequenceId};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The answer to an append that fits.
#[derive(Debug)]
pub enum BegunAppend {
    /// That range is there already, with the same content.
    Replayed {
        /// Tokens of the layer.
        length: u32,
    },
    /// The right to store it, and how.
    Ticket(AppendTicket),
}

/// The right to append a range whose content is not known yet: while it is held, nobody else
/// appends to that layer or truncates the sequence. Nothing is reserved; dropping it gives the
/// right back.
#[derive(Debug)]
#[must_use = "dropping a claim lets others append"]
pub struct AppendClaim {
    pub(crate) claim: LayerClaim,
    /// End of the layer until this is dropped.
    pub(crate) start: u32,
    pub(crate) tokens: u32,
}

/// Rows to bring to a raw slot: copied from raw, decoded from pages.
#[derive(Clone, Debug)]
pub struct RowCopy {
    /// The rows and where they are.
    pub from: RowExtent,
    /// Where they go.
    pub to: RawSlot,
    /// Row of `to` that receives `from.rows.start`.
    pub to_row: u32,
}

/// Rows of the request to write to a raw slot.
#[derive(Clone, Debug)]
pub struct RowWrite {
    /// Where they go.
    pub to: RawSlot,
    /// First row of `to`.
    pub to_row: u32,
    /// Number of rows.
    pub rows: u32,
    /// First row within the request.
    pub source_row: u32,
}

/// A full block that leaves the window with this append: encode its rows, K and V of each head.
#[derive(Clone, Debug)]
pub struct PackTask {
    /// Index of the block within the sequence.
    pub block: u32,
    /// The whole block in the stored precision; row `r` is row `r` of the slot.
    pub from: RawSlot,
    /// Rows to encode: all but the sink's. Row `rows.start` becomes row 0 of each page.
    pub rows: Range<u32>,
    /// The sink's rows, to be copied to a slot of their own because `from` is given up.
    pub keep: Option<RowCopy>,
    /// The block was offered before and could not be packed then.
    pub retried: bool,
}

/// Blocks of one layer of one sequence that are to be encoded.
#[derive(Clone, Copy, Debug)]
pub struct PackBatch<'a> {
    /// The sequence.
    pub sequence: SequenceId,
    /// The layer.
    pub layer: LayerIndex,
    /// The blocks, in order.
    pub tasks: &'a [PackTask],
    /// State of the block of each task.
    pub(crate) blocks: &'a [Arc<LayerBlock>],
}

impl PackBatch<'_> {
    /// Says that the rows of `tasks[index]` can never be encoded: the block stays raw and is not
    /// offered again.
    ///
    /// # Panics
    /// When there is no such task.
    pub fn give_up(&self, index: usize) {
        self.blocks[index].unpackable.store(true, Relaxed);
    }
}

/// The exclusive right to append to one layer of one sequence.
///
/// The device worker executes [`row_copies`](Self::row_copies), then
/// [`row_writes`](Self::row_writes), then for each of [`pack_tasks`](Self::pack_tasks) its `keep`
/// and the encoding, and calls [`commit`](Self::commit). Dropping the ticket instead undoes
/// everything: nothing was visible.
#[derive(Debug)]
#[must_use = "dropping a ticket takes the append back"]
pub struct AppendTicket {
    plan: AppendPlan,
    offered: RememberedRange,
    length_after: u32,
    // Holds the sequence's entry, and with it the block that is written in place: a fork made
    // meanwhile cannot take that block for its own alone, even when the sequence is closed.
    // The last field, so that the next append finds the slots released (fields drop in order).
    claim: LayerClaim,
}

impl AppendTicket {
    /// Reserves what `draft` needs to append `offered`, which begins at the end of the layer.
    pub(crate) fn new(
        claim: LayerClaim,
        draft: AppendDraft,
        pool: &Arc<ArenaPool>,
        offered: RememberedRange,
    ) -> Result<Self, ReserveError> {
        let length_after = draft.length_after;
        let plan = AppendPlan::new(draft, pool, &claim.entry.model, &claim.entry.ledger)?;
        Ok(Self { plan, offered, length_after, claim })
    }

    /// Copies to execute before the writes: the rows of a block that cannot be appended to in
    /// place, because others see it or because it is packed.
    #[must_use]
    pub fn row_copies(&self) -> &[RowCopy] {
        &self.plan.copies
    }

    /// Where the request's rows go; together they are all its rows, in order.
    #[must_use]
    pub fn row_writes(&self) -> &[RowWrite] {
        &self.plan.writes
    }

    /// Blocks to encode once the writes are done, in order.
    #[must_use]
    pub fn pack_tasks(&self) -> &[PackTask] {
        &self.plan.packs
    }

    /// Blocks to encode, with the right to say that one can never be.
    #[must_use]
    pub fn pack_batch(&self) -> PackBatch<'_> {
        let (tasks, blocks) = (&self.plan.packs[..], &self.plan.pack_blocks[..]);
        PackBatch { sequence: self.sequence(), layer: self.layer(), tasks, blocks }
    }

    /// Tokens the layer will have.
    #[must_use]
    pub fn length_after(&self) -> u32 {
        self.length_after
    }

    /// First token of the append.
    #[must_use]
    pub fn start(&self) -> u32 {
        self.offered.start
    }

    /// Tokens of the append.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.offered.tokens
    }

    /// The sequence.
    #[must_use]
    pub fn sequence(&self) -> SequenceId {
        self.claim.entry.id
    }

    /// The layer.
    #[must_use]
    pub fn layer(&self) -> LayerIndex {
        LayerIndex(self.claim.layer as u32)
    }

    /// The sequence's model.
    #[must_use]
    pub fn model(&self) -> &Arc<ModelShape> {
        &self.claim.entry.model
    }

    /// The sequence's entry.
    #[cfg(test)]
    pub(crate) fn sequence_entry(&self) -> &crate::sequence::SequenceEntry {
        &self.claim.entry
    }

    /// Publishes the append and returns the layer's length, in tokens. `packed[i]` answers
    /// `packs()[i]`; `None` (or a missing answer) means that it could not be packed now, for
    /// instance for want of memory: the block stays raw and is offered again at the next append.
    pub fn commit(self, packed: Vec<Option<PackedPages>>) -> u32 {
        debug_assert!(packed.len() <= self.plan.packs.len(), "more answers than packs");
        let Self { plan, offered, length_after, claim } = self;
        let entry = &claim.entry;
        let gone = {
            let mut layer = entry.layer_mutex(claim.layer).lock();
            for write in &plan.writes {
                write.to.set_filled(write.to_row + write.rows);
            }
            let mut gone = layer.views.truncate_to(plan.first_view);
            plan.views.into_iter().for_each(|view| layer.views.push(view));
            layer.length = length_after;
            layer.remember_range(offered);
            let tasks = plan.packs.into_iter().zip(plan.pack_blocks);
            let answers = packed.into_iter().chain(std::iter::repeat_with(|| None));
            for ((task, block), pages) in tasks.zip(answers) {
                match pages {
                    Some(pages) => set_packed(task, &block, pages, &entry.ledger),
                    None => block.deferred.store(true, Relaxed),
                }
            }
            layer.settle_blocks(&entry.model, &mut gone);
            gone
        };
        entry.discard_views(gone);
        length_after
    }
}

/// Gives a block its packed form. Another sequence may have been faster: then this one is dropped.
pub(crate) fn set_packed(
    task: PackTask,
    block: &LayerBlock,
    pages: PackedPages,
    ledger: &Arc<ModelLedger>,
) {
    let slot = pages.slot();
    slot.attach_account(|| {
        SlotAccount::new_packed(ledger, pages.accounting(), slot.reserved_bytes())
    });
    let sink = task.keep.map(|keep| {
        keep.to.set_filled(keep.to.rows());
        keep.to
    });
    // Lost races are the other's gain: the block has a packed form either way.
    let _lost = block.packed.set(Arc::new(PackedBlock { sink, pages }));
}
