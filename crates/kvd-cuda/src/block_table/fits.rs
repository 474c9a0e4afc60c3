//! Whether thread blocks have room for a layer, asked before anything of it is stored.

use super::{AttendTables, LayerShapes, TableOptions};
use crate::PlanError;
use kvd_codec::{ModelCodec, PageHeader};
use kvd_compute::{AttendPlan, PlanPart, PlanQuery, Source};
use kvd_core::{Extent, LayerIndex, ModelId, Side};
use std::sync::Arc;

/// A made-up plan: one query of `rows` rows to each head, every head with one whole page.
pub(crate) fn one_page(codec: &ModelCodec, layer: LayerIndex, rows: u32) -> AttendPlan {
    let geometry = codec.geometry();
    let pages = 2 * geometry.kv_heads;
    // One byte each, so that a page's place is its number.
    let ends: Arc<[u32]> = (1..=pages).collect();
    let extent = Extent { offset: 0, len: u64::from(pages) };
    let source = Source::Pages { extent, ends, first_row: 0 };
    let rows_of_page = geometry.block_tokens;
    let part = PlanPart { first_token: 0, rows: rows_of_page, source };
    let query = PlanQuery {
        n_q: rows,
        position: rows_of_page,
        sliding_window: None,
        parts: Arc::new([part]),
    };
    AttendPlan {
        model: ModelId(0),
        layer,
        q_heads: geometry.kv_heads,
        dtype: geometry.dtype,
        scale: None,
        soft_cap: None,
        queries: vec![query],
        q: Default::default(),
    }
}

impl LayerShapes {
    /// Whether the thread blocks of `plan`, a plan of [`one_page`], have room for what its heads'
    /// runs and tables take. Of sides whose tables are built from
    /// blocks that is the prior; plans know what those take at most.
    ///
    /// # Errors
    /// [`PlanError::SharedMemory`].
    pub(crate) fn check_room(
        &self,
        plan: &AttendPlan,
        codec: &ModelCodec,
        options: TableOptions,
    ) -> Result<(), PlanError> {
        let heads = codec.geometry().kv_heads as usize;
        let known =
            |head: usize| Side::BOTH.iter().all(|side| self.current_shape(head, *side).is_some());
        if !(0..heads).all(known) {
            return Ok(());
        }
        let header = |place: u64| {
            let (side, head) = (Side::BOTH[place as usize / heads], place as usize % heads);
            Some(PageHeader {
                side,
                quantizer: 0,
                huffman: false,
                fallback: false,
                gains: false,
                tokens: codec.geometry().block_tokens as u16,
                dim: codec.geometry().head_dim(side) as u16,
                layer: plan.layer.0 as u16,
                head: head as u16,
                table_version: 0,
                codec_tag: 0,
                payload_len: 1,
                checksum: 0,
            })
        };
        AttendTables::in_place(plan, codec, self, &header, options).map(drop)
    }
}
