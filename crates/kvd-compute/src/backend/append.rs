//! An append on a device: its plan, the order of its steps, and what came of it.
//!
//! [`AppendPlan`] is made by the store's side and holds extents, not memory. Its steps have one
//! order on every device: rows are checked, rows of blocks that are shared are copied, the new ones
//! written, and blocks that leave the window encoded and moved to their slots.
//! [`super::AppendTask`] takes them, in slices.

use super::{EncodeSource, EncodedPages, IncomingRows, ModelBytes, RawTarget};
use crate::region::no_region_error;
use crate::{BackendError, Source, StagedRows, Stop};
use kvd_core::{Extent, LayerIndex, ModelId};
use std::any::Any;
use std::time::Duration;

/// Rows in the stored precision that are encoded at once: enough for many cores, and a bound on
/// what lies beside the page memory meanwhile.
const ENCODE_BATCH_BYTES: u64 = 64 << 20;

/// Where the rows of an append are.
#[derive(Debug)]
pub enum AppendRows {
    /// None: the plan packs blocks that are stored.
    None,
    /// In memory of the host.
    Host(IncomingRows),
    /// On the device, which has copied and checked them.
    Staged(StagedRows),
}

/// Rows to bring to a raw slot: copied from raw, decoded from pages.
#[derive(Clone, Debug)]
pub struct PlannedCopy {
    /// Where they lie.
    pub from: Source,
    /// How many.
    pub rows: u32,
    /// Where they go.
    pub to: RawTarget,
}

/// New rows that go to a raw slot.
#[derive(Clone, Copy, Debug)]
pub struct PlannedWrite {
    /// First token within what is appended.
    pub source_row: u32,
    /// Tokens.
    pub rows: u32,
    /// Where they go.
    pub to: RawTarget,
}

/// A block that leaves the window.
#[derive(Clone, Debug)]
pub struct PlannedBlock {
    /// The rows to encode.
    pub source: EncodeSource,
    /// Rows that stay raw, to be copied to a slot of their own.
    pub keep: Option<PlannedCopy>,
    /// It was offered before and could not be packed then.
    pub retried: bool,
}

/// All that a store asks of the device, in the order of its steps.
#[derive(Debug)]
pub struct AppendPlan {
    /// The model.
    pub model: ModelId,
    /// The layer.
    pub layer: LayerIndex,
    /// The new rows.
    pub rows: AppendRows,
    /// Copies to execute before the writes.
    pub copies: Vec<PlannedCopy>,
    /// Where the new rows go; no slot's rows meet another's.
    pub writes: Vec<PlannedWrite>,
    /// Blocks to pack once the writes are done.
    pub blocks: Vec<PlannedBlock>,
    /// Bytes of a whole block in the stored precision.
    pub block_bytes: u64,
    /// Recent queries of each head to measure errors by from now on; none where they are the same
    /// as before.
    pub queries: Option<Vec<Vec<f32>>>,
}

/// The outcome of one block.
#[derive(Debug)]
pub enum BlockAnswer {
    /// Its pages are in the slot that was reserved for them.
    Packed(EncodedPages),
    /// It cannot be encoded, and stays raw for good.
    Refused(BackendError),
}

/// The outcome of an append, which becomes visible by the caller's commit.
#[derive(Debug, Default)]
pub struct AppendOutcome {
    /// One for each of the plan's blocks, in order; those behind the last stay raw for now.
    pub blocks: Vec<BlockAnswer>,
    /// Why blocks behind the last answer could not be encoded, where that is not for want of room.
    pub encode_error: Option<BackendError>,
    /// Why pages are not measured by the plan's queries.
    pub query_error: Option<BackendError>,
    /// How long packing took; none where there were no blocks.
    pub packing_time: Option<Duration>,
    /// Memory that the model takes once, after its blocks were packed.
    pub model_bytes: Option<ModelBytes>,
}

/// Reserves a slot for pages of so many bytes; `None` when the pool has no room.
pub type ReserveSlot<'a> = dyn FnMut(u64) -> Option<Extent> + 'a;

/// Blocks of one layer to encode, and how far that has come.
pub struct EncodeTask {
    /// The model.
    pub model: ModelId,
    /// The layer.
    pub layer: LayerIndex,
    /// The blocks.
    pub blocks: Vec<EncodeSource>,
    /// The device's own state between slices; none before the first.
    pub under_way: Option<Box<dyn Any + Send>>,
}

/// Pages of each block of an [`EncodeTask`], or why it has none.
pub type EncodedBlocks = Vec<Result<EncodedPages, BackendError>>;

/// The steps of an append, which [`super::AppendTask`] takes in order.
pub trait AppendSteps {
    /// Tests that every value is finite, before anything is written.
    ///
    /// # Errors
    /// The first NaN or infinity, or an unknown model.
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError>;

    /// Copies `count` rows into a raw slot; pages are decoded.
    ///
    /// # Errors
    /// When the model is unknown or a page is corrupt.
    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError>;

    /// Writes `count` tokens of `rows`, from `source_row` on, into a raw slot.
    ///
    /// # Errors
    /// When the model is unknown.
    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError>;

    /// [`AppendSteps::write`] of rows that are staged, to any number of slots, none of which meets
    /// another.
    ///
    /// # Errors
    /// When they are no longer staged.
    fn write_staged(
        &mut self,
        staged: &StagedRows,
        writes: &[PlannedWrite],
    ) -> Result<(), BackendError> {
        let _ = (staged, writes);
        Err(no_region_error())
    }

    /// Measures the errors of a layer's pages by these queries from now on, as
    /// [`kvd_codec::ModelCodec::set_queries`] does; a device that measures none ignores them.
    ///
    /// # Errors
    /// When the model is unknown or the queries do not fit it.
    fn set_queries(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        heads: &[Vec<f32>],
    ) -> Result<(), BackendError> {
        let _ = (model, layer, heads);
        Ok(())
    }

    /// Encodes blocks of one layer; entropy tables are built from them when the layer has none.
    /// A block that cannot be encoded, even raw, has an error of its own: the others stand.
    ///
    /// # Errors
    /// When the model is unknown or its entropy tables are used up.
    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError>;

    /// Goes on with [`AppendSteps::encode`] until all blocks of a task are encoded or, `None`, its
    /// slice is over. At least one block is; the blocks are those of one call. A device that does
    /// not pause encodes all of them.
    ///
    /// # Errors
    /// As [`AppendSteps::encode`].
    fn encode_slice(
        &mut self,
        task: &mut EncodeTask,
        stop: &Stop,
    ) -> Result<Option<EncodedBlocks>, BackendError> {
        let _ = stop;
        self.encode(task.model, task.layer, &task.blocks).map(Some)
    }

    /// Moves encoded pages into their slot, after the call that encoded them and before any other.
    fn move_pages(&mut self, pages: &EncodedPages, to: Extent);
}

impl AppendPlan {
    /// Blocks that are encoded at once at most.
    #[must_use]
    pub fn batch_blocks_max(&self) -> usize {
        let blocks = ENCODE_BATCH_BYTES / self.block_bytes.max(1);
        usize::try_from(blocks).unwrap_or(usize::MAX).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch_of(block_bytes: u64) -> usize {
        let rows = IncomingRows { tokens: 0, k: bytes::Bytes::new(), v: bytes::Bytes::new() };
        let (copies, writes, blocks) = (Vec::new(), Vec::new(), Vec::new());
        let (model, layer, rows) = (ModelId(1), LayerIndex(0), AppendRows::Host(rows));
        AppendPlan { model, layer, rows, copies, writes, blocks, block_bytes, queries: None }
            .batch_blocks_max()
    }

    #[test]
    fn batches_are_bounded_by_bytes() {
        assert_eq!(batch_of(512), (64 << 20) / 512);
        // 1024 tokens of 128 heads of 128 channels, K and V in 16 bits.
        assert_eq!(batch_of(1024 * 128 * 2 * 128 * 2), 1);
    }
}
