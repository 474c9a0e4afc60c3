//! An append in flight: what the lane must do, and how it becomes visible.
//!
//! Owns the plan (reservations, copy on write, which blocks to pack) and [`AppendTicket`]. The
//! plan is made and published under the sequence's mutex; in between no lock is held. Until
//! [`AppendTicket::commit`] nothing of it can be seen, and dropping the ticket gives back every
//! byte and the right to append (no lock but the pool's).

use crate::cell::{Packed, Pages, Part, PartKind, RawCell, RawSlot, View};
use crate::layer::{Layer, Remembered};
use crate::ledger::{Ledger, Tally};
use crate::pool::{Pool, PoolFull};
use crate::sequence::Claim;
use crate::shape::ModelShape;
use kvd_core::{LayerIndex, SequenceId};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// The answer to an append that fits.
#[derive(Debug)]
pub enum Append {
    /// The same range with the same content is there already.
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
    pub(crate) claim: Claim,
    /// Where the layer ends until this is dropped.
    pub(crate) start: u32,
    pub(crate) tokens: u32,
}

/// Rows to bring to a raw slot: copied from raw, decoded from pages.
#[derive(Clone, Debug)]
pub struct RowCopy {
    /// The rows and where they are.
    pub from: Part,
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

/// The exclusive right to append to one layer of one sequence.
///
/// The lane executes [`copies`](Self::copies), then [`writes`](Self::writes), then for each of
/// [`packs`](Self::packs) its `keep` and the encoding, and calls [`commit`](Self::commit).
/// Dropping the ticket instead undoes everything: nothing was visible.
#[derive(Debug)]
#[must_use = "dropping a ticket takes the append back"]
pub struct AppendTicket {
    plan: Plan,
    offered: Remembered,
    length_after: u32,
    // Holds the sequence's entry, and with it the cell that is written in place: a fork made
    // meanwhile cannot take that cell for its own alone, even when the sequence is closed.
    // The last field, so that the next append finds the slots released (fields drop in order).
    claim: Claim,
}

impl AppendTicket {
    /// Makes the plan for `offered`, which begins at the end of `layer`.
    pub(crate) fn new(
        claim: Claim,
        layer: &mut Layer,
        pool: &Arc<Pool>,
        offered: Remembered,
    ) -> Result<Self, PoolFull> {
        let length_after = layer.length + offered.tokens;
        let room = Room { pool, shape: &claim.entry.model, ledger: &claim.entry.ledger };
        let plan = Plan::new(layer, &room, length_after)?;
        Ok(Self { plan, offered, length_after, claim })
    }

    /// Copies to execute before the writes: the rows of a block that cannot be appended to in
    /// place, because others see it or because it is packed.
    #[must_use]
    pub fn copies(&self) -> &[RowCopy] {
        &self.plan.copies
    }

    /// Where the request's rows go; together they are all its rows, in order.
    #[must_use]
    pub fn writes(&self) -> &[RowWrite] {
        &self.plan.writes
    }

    /// Blocks to encode once the writes are done, in order.
    #[must_use]
    pub fn packs(&self) -> &[PackTask] {
        &self.plan.packs
    }

    /// Says that the rows of `packs()[index]` can never be encoded: the block stays raw and is not
    /// offered again.
    ///
    /// # Panics
    /// When there is no such task.
    pub fn give_up(&self, index: usize) {
        self.plan.pack_cells[index].unpackable.store(true, Relaxed);
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
    pub(crate) fn entry(&self) -> &crate::sequence::SequenceEntry {
        &self.claim.entry
    }

    /// Publishes the append and returns the layer's length, in tokens. `packed[i]` answers
    /// `packs()[i]`; `None` (or a missing answer) means that it could not be packed now, for
    /// instance for want of memory: the block stays raw and is offered again at the next append.
    pub fn commit(self, packed: Vec<Option<Pages>>) -> u32 {
        debug_assert!(packed.len() <= self.plan.packs.len(), "more answers than packs");
        let Self { plan, offered, length_after, claim } = self;
        let entry = &claim.entry;
        let gone = {
            let mut layers = entry.layers.lock();
            let layer = &mut layers[claim.layer];
            for write in &plan.writes {
                write.to.set_filled(write.to_row + write.rows);
            }
            let replaced = layer.views.split_off(plan.first_view);
            layer.views.extend(plan.views);
            layer.length = length_after;
            layer.remember(offered);
            let tasks = plan.packs.into_iter().zip(plan.pack_cells);
            let answers = packed.into_iter().chain(std::iter::repeat_with(|| None));
            for ((task, cell), pages) in tasks.zip(answers) {
                match pages {
                    Some(pages) => publish(task, &cell, pages, &entry.ledger),
                    None => cell.deferred.store(true, Relaxed),
                }
            }
            (replaced, layer.settle(&entry.model))
        };
        drop(gone);
        length_after
    }
}

/// Gives a cell its packed form. Another sequence may have been faster: then this one is dropped.
fn publish(task: PackTask, cell: &RawCell, pages: Pages, ledger: &Arc<Ledger>) {
    let slot = pages.slot();
    slot.attach(|| Tally::packed(ledger, pages.accounting(), slot.reserved_bytes()));
    let sink = task.keep.map(|keep| {
        keep.to.set_filled(keep.to.rows());
        keep.to
    });
    // Lost races are the other's gain: the cell has a packed form either way.
    let _lost = cell.packed.set(Arc::new(Packed { sink, pages }));
}

/// Where a plan's memory comes from, and on whose account.
struct Room<'a> {
    pool: &'a Arc<Pool>,
    shape: &'a ModelShape,
    ledger: &'a Arc<Ledger>,
}

impl Room<'_> {
    fn raw(&self, rows: u32) -> Result<RawSlot, PoolFull> {
        let size_bytes = self.shape.geometry.raw_layout(rows).size_bytes();
        let slot = self.pool.reserve(size_bytes)?.seal();
        let values_per_row = self.shape.geometry.values_per_token();
        slot.attach(|| Tally::raw(self.ledger, values_per_row, slot.reserved_bytes()));
        Ok(RawSlot::new(slot, rows))
    }
}

/// What an append does.
#[derive(Debug)]
struct Plan {
    copies: Vec<RowCopy>,
    writes: Vec<RowWrite>,
    packs: Vec<PackTask>,
    /// The cell of each of `packs`.
    pack_cells: Vec<Arc<RawCell>>,
    /// On commit, `views` replace the layer's views from this one on.
    first_view: usize,
    views: Vec<View>,
}

impl Plan {
    fn new(layer: &mut Layer, room: &Room<'_>, length_after: u32) -> Result<Self, PoolFull> {
        let mut plan = Self {
            copies: Vec::new(),
            writes: Vec::new(),
            packs: Vec::new(),
            pack_cells: Vec::new(),
            first_view: layer.views.len(),
            views: Vec::new(),
        };
        let start = layer.length;
        for (block, rows) in room.shape.rows_by_block(start..length_after) {
            let to = if rows.start == 0 {
                plan.fresh(room)?
            } else {
                plan.tail(&mut layer.views[block], block, rows.start, room)?
            };
            let first = block as u32 * room.shape.block_tokens() + rows.start;
            let count = rows.end - rows.start;
            let source_row = first - start;
            plan.writes.push(RowWrite { to, to_row: rows.start, rows: count, source_row });
        }
        plan.pack_due(layer, room, length_after);
        Ok(plan)
    }

    /// A new cell at the end.
    fn fresh(&mut self, room: &Room<'_>) -> Result<RawSlot, PoolFull> {
        let raw = room.raw(room.shape.block_tokens())?;
        self.views.push(View::fresh(raw.clone()));
        Ok(raw)
    }

    /// The slot for what follows the first `rows` rows of the last cell: its own when that can be
    /// written in place, else a new one to which they are copied.
    fn tail(
        &mut self,
        view: &mut View,
        block: usize,
        rows: u32,
        room: &Room<'_>,
    ) -> Result<RawSlot, PoolFull> {
        if view.is_appendable(rows)
            && let View::Raw { raw, .. } = view
        {
            return Ok(raw.clone());
        }
        let to = self.fresh(room)?;
        self.first_view = block;
        let mut parts = Vec::with_capacity(2);
        view.parts(0..rows, &mut parts);
        self.copies.extend(parts.into_iter().map(|from| {
            let to_row = from.rows.start;
            RowCopy { from, to: to.clone(), to_row }
        }));
        Ok(to)
    }

    /// Adds a task for each cell that will have left the window and has no packed form yet. A
    /// cell whose sink rows find no room waits for the next append: packing is what makes room,
    /// so the want of it must not refuse the append.
    fn pack_due(&mut self, layer: &Layer, room: &Room<'_>, length_after: u32) {
        let shape = room.shape;
        for block in layer.settled..shape.blocks_due(length_after) {
            let sink_rows = shape.sink_rows(block);
            let view = match block.checked_sub(self.first_view) {
                Some(new) => &self.views[new],
                None => &layer.views[block],
            };
            let View::Raw { raw, cell } = view else {
                continue;
            };
            let done = cell.packed.get().is_some() || cell.is_unpackable();
            if done || sink_rows == shape.block_tokens() {
                continue;
            }
            let Ok(to) = (sink_rows > 0).then(|| room.raw(sink_rows)).transpose() else {
                continue;
            };
            let keep = to.map(|to| {
                let kind = PartKind::Raw(raw.clone());
                RowCopy { from: Part { rows: 0..sink_rows, origin: 0, kind }, to, to_row: 0 }
            });
            let rows = sink_rows..shape.block_tokens();
            let (block, retried) = (block as u32, cell.deferred.load(Relaxed));
            self.packs.push(PackTask { block, from: raw.clone(), rows, keep, retried });
            self.pack_cells.push(Arc::clone(cell));
        }
    }
}
