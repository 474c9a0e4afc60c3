//! Plans of appends: which rows go where, and which blocks are packed.
//!
//! Owns [`AppendDraft`], which is made under the layer's mutex and copies pointers only, and
//! [`AppendPlan`], which takes the memory without that mutex. The claim on the layer keeps the
//! draft true: nobody else appends or truncates meanwhile, and forks and readers change nothing.

use crate::allocator::SlotRegion;
use crate::append::{PackTask, RowCopy, RowWrite};
use crate::layer::SequenceLayer;
use crate::layer_block::{BlockView, LayerBlock, RawSlot, RowExtent, RowForm};
use crate::ledger::{ModelLedger, SlotAccount};
use crate::pool::{ArenaPool, ReserveError};
use crate::shape::{BlockRows, ModelShape};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Findings of an append in its layer.
#[derive(Debug)]
pub(crate) struct AppendDraft {
    start: u32,
    pub(crate) length_after: u32,
    /// Blocks of the layer.
    blocks: usize,
    last: LastBlock,
    /// Blocks that will have left the window and have no packed form.
    due: Vec<DueBlock>,
}

/// Where the rows go that follow those of the last block.
#[derive(Debug)]
enum LastBlock {
    /// Nowhere: it is full.
    Full,
    /// To its own slot.
    Appendable(RawSlot),
    /// To a new slot, to which its rows are copied: others see them, or they are packed.
    Copied(Vec<RowExtent>),
}

/// A raw block that is to be packed.
#[derive(Debug)]
struct DueBlock {
    index: usize,
    raw: RawSlot,
    block: Arc<LayerBlock>,
}

impl AppendDraft {
    /// Looks up what `layer` holds for an append up to `length_after`.
    pub(crate) fn new(layer: &mut SequenceLayer, shape: &ModelShape, length_after: u32) -> Self {
        let (start, blocks) = (layer.length, layer.views.len());
        let rows = start % shape.block_tokens();
        let last = match layer.views.last_mut() {
            Some(view) if rows > 0 => find_last_block(view, rows),
            _ => LastBlock::Full,
        };
        let kept = if let LastBlock::Copied(_) = last { blocks - 1 } else { blocks };
        let due = layer.settled..shape.blocks_due(length_after).min(kept);
        let due = due.filter_map(|index| DueBlock::find_due(layer.views.get(index), index, shape));
        let due = due.collect();
        Self { start, length_after, blocks, last, due }
    }
}

fn find_last_block(view: &mut BlockView, rows: u32) -> LastBlock {
    if view.is_appendable(rows)
        && let BlockView::Raw { raw, .. } = view
    {
        return LastBlock::Appendable(raw.clone());
    }
    LastBlock::Copied(view.find_rows(0..rows).map(|extent| extent.to_pinned()).collect())
}

impl DueBlock {
    /// The block of that index, when there is something to encode.
    fn find_due(view: &BlockView, index: usize, shape: &ModelShape) -> Option<Self> {
        let BlockView::Raw { raw, block } = view else { return None };
        let done = block.packed.get().is_some() || block.is_unpackable();
        let all_sink = shape.sink_rows(index) == shape.block_tokens();
        let due = || Self { index, raw: raw.clone(), block: Arc::clone(block) };
        (!done && !all_sink).then(due)
    }
}

/// Work of an append, with the memory that it takes.
#[derive(Debug)]
pub(crate) struct AppendPlan {
    pub(crate) copies: Vec<RowCopy>,
    pub(crate) writes: Vec<RowWrite>,
    pub(crate) packs: Vec<PackTask>,
    /// The block of each of `packs`.
    pub(crate) pack_blocks: Vec<Arc<LayerBlock>>,
    /// On commit, `views` replace the layer's views from this one on.
    pub(crate) first_view: usize,
    pub(crate) views: Vec<BlockView>,
}

impl AppendPlan {
    /// Takes the memory for a draft. The pool may free what was closed before, so no lock is held.
    pub(crate) fn new(
        draft: AppendDraft,
        pool: &Arc<ArenaPool>,
        shape: &ModelShape,
        ledger: &Arc<ModelLedger>,
    ) -> Result<Self, ReserveError> {
        let allocation = RawAllocation { pool, shape, ledger };
        let AppendDraft { start, length_after, blocks, last, due } = draft;
        let mut plan = Self {
            copies: Vec::new(),
            writes: Vec::new(),
            packs: Vec::new(),
            pack_blocks: Vec::new(),
            first_view: blocks,
            views: Vec::new(),
        };
        let mut last = Some(last);
        for BlockRows { block, rows } in shape.rows_by_block(start..length_after) {
            let to = match last.take() {
                Some(LastBlock::Appendable(raw)) => raw,
                Some(LastBlock::Copied(extents)) => {
                    plan.first_view = blocks - 1;
                    plan.add_copy(extents, &allocation)?
                }
                Some(LastBlock::Full) | None => plan.add_block(&allocation)?,
            };
            let first = block as u32 * shape.block_tokens() + rows.start;
            let count = rows.end - rows.start;
            let source_row = first - start;
            plan.writes.push(RowWrite { to, to_row: rows.start, rows: count, source_row });
        }
        due.into_iter().for_each(|due| plan.add_pack(due, &allocation));
        let new = plan.first_view..shape.blocks_due(length_after);
        let find = |index| DueBlock::find_due(&plan.views[index - plan.first_view], index, shape);
        let due: Vec<_> = new.filter_map(find).collect();
        due.into_iter().for_each(|due| plan.add_pack(due, &allocation));
        Ok(plan)
    }

    /// Adds a block at the end.
    fn add_block(&mut self, allocation: &RawAllocation<'_>) -> Result<RawSlot, ReserveError> {
        let raw = allocation.reserve_rows(allocation.shape.block_tokens())?;
        self.views.push(BlockView::new_raw(raw.clone()));
        Ok(raw)
    }

    /// Adds a block in place of the last, and copies of its rows.
    fn add_copy(
        &mut self,
        extents: Vec<RowExtent>,
        allocation: &RawAllocation<'_>,
    ) -> Result<RawSlot, ReserveError> {
        let to = self.add_block(allocation)?;
        self.copies.extend(extents.into_iter().map(|from| {
            let to_row = from.rows.start;
            RowCopy { from, to: to.clone(), to_row }
        }));
        Ok(to)
    }

    /// Adds a task to pack a block. One whose sink rows find no memory waits for the next append:
    /// packing is what frees memory, so the want of it must not refuse the append.
    fn add_pack(&mut self, due: DueBlock, allocation: &RawAllocation<'_>) {
        let retried = due.block.deferred.load(Relaxed);
        let Ok(task) = allocation.make_task(due.index, &due.raw, retried) else { return };
        self.packs.push(task);
        self.pack_blocks.push(due.block);
    }
}

/// The pool that a plan's memory comes from, and the ledger that counts it.
pub(crate) struct RawAllocation<'a> {
    pub(crate) pool: &'a Arc<ArenaPool>,
    pub(crate) shape: &'a ModelShape,
    pub(crate) ledger: &'a Arc<ModelLedger>,
}

impl RawAllocation<'_> {
    /// A task to pack a block, with memory for its rows that stay raw.
    pub(crate) fn make_task(
        &self,
        index: usize,
        raw: &RawSlot,
        retried: bool,
    ) -> Result<PackTask, ReserveError> {
        let sink_rows = self.shape.sink_rows(index);
        let keep = (sink_rows > 0).then(|| self.reserve_rows(sink_rows)).transpose()?;
        let keep = keep.map(|to| {
            let form = RowForm::Raw(raw.clone());
            RowCopy { from: RowExtent { rows: 0..sink_rows, origin: 0, form }, to, to_row: 0 }
        });
        let rows = sink_rows..self.shape.block_tokens();
        Ok(PackTask { block: index as u32, from: raw.clone(), rows, keep, retried })
    }

    /// A slot of so many rows in the stored precision.
    fn reserve_rows(&self, rows: u32) -> Result<RawSlot, ReserveError> {
        let size_bytes = self.shape.geometry.raw_layout(rows).size_bytes();
        let namespace = Some(&self.shape.namespace);
        let slot = self.pool.reserve_slot(SlotRegion::Rows, size_bytes, namespace)?.seal_slot();
        let values_per_row = self.shape.geometry.values_per_token();
        slot.attach_account(|| {
            SlotAccount::new_raw(self.ledger, values_per_row, slot.reserved_bytes())
        });
        Ok(RawSlot::new(slot, rows))
    }
}
